"""Ways that training ends before it is done."""


class Diverged(Exception):
    """The training loss or the weights are no longer finite."""


class Preempted(Exception):
    """The run was asked to stop by a signal; its state has been saved."""


class Interrupted(Exception):
    """The run was asked to stop while it evaluated."""
