"""Ways that training ends before it is done."""


class Diverged(Exception):
    """The training loss or the weights are no longer finite."""


class NotFinite(Exception):
    """A step was left out because its loss or gradients are not finite, and training goes on from an earlier state.

    Attributes:
        step: number of the optimizer step, from 1.
    """

    def __init__(self, step: int, report: str) -> None:
        super().__init__(report)
        self.step = step


class BadMetric(Exception):
    """A callback reports a metric that cannot be logged."""


class Preempted(Exception):
    """The run was asked to stop by a signal; its state has been saved."""


class Interrupted(Exception):
    """The run was asked to stop while it evaluated."""
