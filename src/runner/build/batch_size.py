"""The batch that fits: found before a run that asks for `data.batch_size=auto`, and what is said when one does not."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from runner.build.model import as_given
from runner.config.errors import UserError, first_line
from runner.config.schema.train import Train
from runner.engine.oom_retry import is_out_of_memory
from runner.instrument.saved_tensors import SavedTensors
from runner.runtime.memory import readable

if TYPE_CHECKING:
    from runner.build.run import Training

_SHARE = 0.8  # of the memory that is free
_BESIDE = 3  # times the weights: gradients, and two averages as Adam keeps them
_FOR_BACKWARD = 2.0  # times what the graph keeps: gradients of activations, and what operations need meanwhile
_MEASURED = 4  # samples that are measured
_LESS_A_SAMPLE = "a smaller model or smaller images, amp=true, or activation_checkpointing=true"
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Fitting:
    """The batch size that was found.

    Attributes:
        size: samples, a power of two.
        reason: why, a clause.
    """

    size: int
    reason: str


def settle_batch_size(
    config: Train, values: dict[str, Any], make: Callable[[Train, dict[str, Any]], Training]
) -> Fitting:
    """Find the batch size, and write it into the config, so that a resumed run does not search again.

    Args:
        config: the config; changed in place.
        values: the same as plain containers; changed in place.
        make: builds a training from such a pair.

    Raises:
        UserError: if no sample fits.
    """
    tried, its_values = copy.deepcopy((config, values))
    tried.data.batch_size = its_values["data"]["batch_size"] = 1
    training = make(tried, its_values)
    with contextlib.closing(training.splits):
        found = largest_batch(training)
    values["data"]["batch_size"] = config.data.batch_size = found.size
    values["data"]["normalize"] = its_values["data"]["normalize"]
    return found


def largest_batch(training: Training) -> Fitting:
    """The largest power of two that fits as a batch, and is no more than the training samples.

    What a sample takes is estimated from what the graph of a few keeps for backward. On a GPU the batch is then tried.

    Raises:
        UserError: if no sample fits.
    """
    with training.state.freezing.as_at(None):  # which takes the most
        return _largest_batch(training)


def _largest_batch(training: Training) -> Fitting:
    samples = training.splits.train.samples
    with memory_told("data.batch_size", _MEASURED, _LESS_A_SAMPLE):
        each = _of_a_sample(training)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in training.model.parameters())
    room = int(_SHARE * free_memory(training.device)) - _BESIDE * weights
    if room < each:
        raise UserError(
            f"data.batch_size: a sample takes about {readable(each)}, and {readable(room)} are free for it on {training.device}\n"
            f"    allowed: {_LESS_A_SAMPLE}"
        )
    size = largest_power(min(samples, room // each))
    while training.device.type == "cuda" and size > 1 and not _fits(training, size):
        size //= 2
    limit = f"{samples:,} training samples" if 2 * size > samples else f"{readable(room)} free"
    return Fitting(size, f"auto: about {readable(each)} a sample, {limit}")


def largest_power(number: int) -> int:
    """The largest power of two up to a number of at least 1."""
    return 1 << (number.bit_length() - 1)


def free_memory(device: torch.device) -> int:
    """Bytes free on a device; on the CPU those of the machine, or of the control group that the process is in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or no limit, which says `max`
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free


@contextlib.contextmanager
def memory_told(key: str, size: int, fix: str) -> Iterator[None]:
    """Say in a sentence that memory does not suffice, and what to set.

    Args:
        key: that says how large batches are.
        size: samples of a batch.
        fix: what helps.

    Raises:
        UserError: in place of torch's error.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
        message = f"{key}: memory does not suffice for batches of {size}: {reason}"
        raise UserError(f"{message}\n    allowed: {fix}") from error


def memory_for_training(config: Train) -> contextlib.AbstractContextManager[None]:
    """See `memory_told`: for steps of training."""
    split = ", or on_oom=split" if config.on_oom == "raise" else ""
    fix = "a smaller data.batch_size with a larger accumulate, amp=true, activation_checkpointing=true" + split
    return memory_told("data.batch_size", config.data.samples_a_batch, fix)


def memory_for_evaluation(config: Train) -> contextlib.AbstractContextManager[None]:
    """See `memory_told`: for evaluations."""
    return memory_told("evaluate.batch_size", config.evaluate.batch_size, "a smaller evaluate.batch_size, or amp=true")


def _of_a_sample(training: Training) -> int:
    with SavedTensors(training.model) as saved:
        images = _forward(training, _MEASURED)[0]
        kept = saved.activations
    return max(1, int(_FOR_BACKWARD * (kept + images.numel() * images.element_size()) / _MEASURED))


def _fits(training: Training, size: int) -> bool:
    """Whether forward and backward of a batch go well."""
    try:
        _forward(training, size)[1].backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for parameter in training.model.parameters():
            parameter.grad = None
    torch.cuda.empty_cache()
    return True


def _forward(training: Training, size: int) -> tuple[Tensor, Tensor]:
    """Images of a batch, and its loss with a graph."""
    splits = training.splits
    images = as_given(splits, size)
    targets = training.task.targets(splits.example[1].expand(size, *splits.example[1].shape[1:]))
    with training.precision.autocast():
        return images, training.loss(training.model(images), targets)
