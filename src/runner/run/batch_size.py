"""The batch size that fits into memory, for `data.batch_size=auto`, and errors for batches that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from runner.base.errors import UserError, first_line
from runner.config.keys import with_changes
from runner.config.schema.train import Train
from runner.data.loaders import Batch
from runner.engine.errors import is_out_of_memory
from runner.instrument.nested import tensors_in
from runner.instrument.saved_tensors import bytes_for_backward
from runner.run.run import Run
from runner.runtime.memory import readable

T = TypeVar("T", bound=Train)

_SHARE = 0.8  # of the memory that is free
_BESIDE = 3  # times the weights: gradients, and two averages as Adam keeps them
_FOR_BACKWARD = 2.0  # times what the graph keeps: gradients of activations, and what operations need meanwhile
_MEASURED = 4  # samples that are measured
_LESS_A_SAMPLE = "a smaller model or smaller images, amp=true, or activation_checkpointing=true"
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def auto_batch_size(config: T, build: Callable[[T], Run]) -> tuple[T, list[tuple[str, str, str]]]:
    """The config with the batch size that fits, so that a resumed run does not search again, and a row that says why.

    Without `data.batch_size=auto` the config is as it was, and there is no row. The size is the largest power of two that is no
    more than the training samples. The memory of a sample is estimated from what the graph of a few keeps for backward. On a GPU,
    the batch is then tried. A `UserError` says that not even one sample fits.
    """
    if config.data.batch_size != "auto":
        return config, []
    # Any size does for building, but BatchNorm takes no single sample: the memory of a sample is measured afterwards
    run = build(with_changes(config, {"data.batch_size": 2, "data.drop_last": True}))
    with contextlib.closing(run.data), run.state.freezing.as_at(None):  # training everything takes the most
        samples = run.data.train.samples
        with explaining_memory("data.batch_size", _MEASURED, _LESS_A_SAMPLE):
            each = _bytes_of_sample(run)
        # Workspaces and fragmentation grow with the model, so a part of the free memory is left alone
        weights = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
        room = int(_SHARE * free_memory(run.device)) - _BESIDE * weights
        if room < each:
            problem = f"a sample takes about {readable(each)}, and {readable(room)} are free for it on {run.device}"
            raise UserError("data.batch_size", problem, _LESS_A_SAMPLE)
        # A power of two, not above the training samples: more would have no effect
        size = 1 << (min(samples, room // each).bit_length() - 1)
        # The estimate is linear, and memory is not: on a GPU the size is tried, and halved until it fits
        while run.device.type == "cuda" and size > 1 and not _fits(run, size):
            size //= 2
    limit = f"{samples:,} training samples" if 2 * size > samples else f"{readable(room)} free"
    row = "batch", f"{size:,} samples", f"auto: about {readable(each)} a sample, {limit}"
    return with_changes(config, {"data.batch_size": size}), [row]


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
def explaining_memory(key: str, size: int, fix: str) -> Iterator[None]:
    """Turn an out-of-memory error in batches of `size` samples, as set by `key`, into a `UserError` that says what helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(key, f"there is not enough memory for batches of {size}: {first_line(error)}", fix) from error


def memory_for_training(config: Train) -> contextlib.AbstractContextManager[None]:
    """See `explaining_memory`: for training, with smaller batches that give the same update."""
    size = config.data.samples_a_batch
    # Equal parts, so that an epoch has as many updates as before
    parts = next((number for number in range(2, size + 1) if size % number == 0), 1)
    smaller = f"data.batch_size={size // parts} accumulate={parts * config.accumulate}"
    fix = f"{smaller}, which gives the same update except for BatchNorm; or " if parts > 1 else ""
    return explaining_memory("data.batch_size", size, f"{fix}amp=true, activation_checkpointing=true")


def _bytes_of_sample(run: Run) -> int:
    batch = run.data.example_batch(_MEASURED)
    kept = bytes_for_backward(run.model, lambda: _loss(run, batch))
    return max(1, int(_FOR_BACKWARD * (kept + sum(tensor.nbytes for tensor in tensors_in(batch.data))) / _MEASURED))


def _fits(run: Run, size: int) -> bool:
    """Whether forward and backward of a batch go well."""
    try:
        _loss(run, run.data.example_batch(size)).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for _, parameter in run.state.named_parameters():
            parameter.grad = None
    torch.cuda.empty_cache()
    return True


def _loss(run: Run, batch: Batch) -> Tensor:
    """The loss of a batch with its graph."""
    with run.precision.autocast():
        return run.step.objective(batch.data)
