"""Exceptions that end training early; exit codes are those of `runner.base.errors`."""

import re

import torch

# On the CPU torch raises a plain RuntimeError with one of these messages
_CPU_MESSAGE = re.compile(r"can't allocate memory|not enough memory")


class Diverged(Exception):
    """The training loss or the weights are no longer finite."""

    exit_code = 3
    prefix = "diverged: "
    hint = "; lower optimizer.lr, set grad_clip.norm=1.0 or on_nonfinite=skip, or find the operation with debug=anomaly"


class BadMetric(Exception):
    """A callback reports a metric that cannot be logged."""

    exit_code = 2

    def __init__(self, problem: str, allowed: str) -> None:
        super().__init__(f"{problem}\n    allowed: {allowed}")


class Preempted(Exception):
    """A signal asked the run to stop; its state has been saved."""

    exit_code = 75
    prefix = "stopped by "


class Interrupted(Exception):
    """The run was asked to stop during an evaluation."""


class RankMismatch(Exception):
    """The ranks of a run disagree about what they compute."""

    exit_code = 2


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that a device, or the CPU, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_MESSAGE.search(str(error)) is not None
