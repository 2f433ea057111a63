"""The processes that train together, called ranks, and what they tell each other.

A process that trains alone is a world of one, in which nothing here communicates.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runner.base import slurm
from runner.distributed.store import gather_ranks, open_store

T = TypeVar("T")
_LIMIT = 1000.0  # a reason to stop that is not a signal


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True if this rank writes files and talks to people."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; all have to call this."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def decide(self, question: Callable[[], T]) -> T:
        """The answer of rank 0, which alone is asked; an exception there is raised everywhere."""
        if self.size == 1:
            return question()
        # The answer and the exception travel together, so that no rank waits for one that failed
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = question()
            except Exception as error:
                answer[1] = _portable(error)
        dist.broadcast_object_list(answer, src=0)
        # All ranks end with the same error, as none could continue alone
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on the same device."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def highest(self, tensor: Tensor) -> None:
        """Give a tensor the highest values that it has on any rank, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on rank 0."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, src=0)


_WORLD = World()


def world() -> World:
    """The world of this process."""
    return _WORLD


def started_by_launcher() -> bool:
    """True if torchrun or SLURM started this process as one of several ranks; SLURM's variables become torch's."""
    environ = os.environ
    # Only srun sets the number of tasks of a step: a script that calls the program without it wants one process.
    if "RANK" not in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
        environ.update({name: environ[f"SLURM_{of_slurm}"] for name, of_slurm in names.items()})
        environ["LOCAL_WORLD_SIZE"] = environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]
        # The port follows from the job, so that all ranks agree on it and two jobs on a node differ
        environ.setdefault("MASTER_ADDR", environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"))
        environ.setdefault("MASTER_PORT", str(10_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000))
    return int(environ.get("WORLD_SIZE", "1")) > 1


def restarted() -> bool:
    """True if this process continues one of the same command: a launcher of ranks or SLURM started it again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or slurm.restarted()


@contextlib.contextmanager
def joined(timeout_s: float, device: torch.device, store: Any = None) -> Iterator[World]:
    """Be one of the ranks that the environment describes, with this device; gloo connects CPUs, NCCL GPUs.

    Args:
        timeout_s: seconds that ranks wait for each other.
        device: of this rank.
        store: where ranks find each other; None for that of the environment.

    Raises:
        RanksMissing: if some do not come in time.
    """
    global _WORLD
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Waiting here names missing ranks; torch's own wait would end with a timeout that names none
    store = store or open_store(timeout_s)
    gather_ranks(store, "joined", timeout_s)
    # Both backends: tensors travel by NCCL, and small Python objects by gloo without touching the GPU
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    _WORLD = World(rank, size)
    try:
        yield _WORLD
    finally:
        _WORLD = World()
        with contextlib.suppress(Exception):  # another rank may be gone
            dist.destroy_process_group()


class Agreement:
    """Lets all ranks stop at the same step, and delay checkpoints by the clock of rank 0.

    A callback: after each step every rank sends what it knows, and reads what was sent after the step before, so that nobody
    waits. Once a rank is asked to stop, all ranks learn of it one or two steps later. A single process sends nothing.

    Args:
        world: the ranks.
        asked: what asks this rank to stop, or an empty string, see `runner.runtime.signals.StopSignals`.
        timeout_s: seconds to wait for the other ranks.
    """

    def __init__(self, world: World, asked: Callable[[], str], timeout_s: float) -> None:
        self._world, self._asked = world, asked
        self._group: Any = None
        if world.size > 1:  # messages of a group of its own do not queue behind gradients
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._reason, self._time = "", world.decide(time.monotonic)

    def on_step(self, loop: Any) -> None:
        """Read what was sent after the step before, and send what this rank knows."""
        self.on_end(loop)
        if self._group is None:
            return
        reason = self._asked()
        number = signal.Signals[reason] if reason in signal.Signals.__members__ else _LIMIT * bool(reason)
        message = torch.tensor([number, time.monotonic() if self._world.first else 0.0], dtype=torch.float64)
        self._sent = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True), message

    def on_end(self, loop: Any) -> None:
        """Read the last message."""
        if self._sent is None:
            return
        work, message = self._sent
        work.wait()
        self._sent = None
        number, self._time = message.tolist()
        if number and not self._reason:
            self._reason = "a time limit" if number == _LIMIT else signal.Signals(int(number)).name

    def confirm(self) -> None:
        """Exchange at once, after all ranks have left an evaluation."""
        self.on_step(None)
        self.on_end(None)

    def reason(self) -> str:
        """The reason for which all ranks stop, or an empty string."""
        return self._asked() if self._group is None else self._reason

    def clock(self) -> float:
        """Seconds on the clock of rank 0, the same number on every rank at a step."""
        return time.monotonic() if self._group is None else self._time


def rows(samples: int, rank: int, size: int) -> slice:
    """The rows of a batch of `samples` that are a rank's: neighbours, and one more for the first ranks if they do not divide."""
    each, more = divmod(samples, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def gathered_rows(own: Tensor, samples: int, world: World) -> Tensor:
    """The rows of all ranks, (samples, ...), given this one's; a rank without rows gives a row that is skipped."""
    parts = [rows(samples, rank, world.size) for rank in range(world.size)]
    longest = max(1, parts[0].stop)
    padded = own.new_zeros((longest, *own.shape[1:]))
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(found, padded)
    return torch.cat([rank_rows[: part.stop - part.start] for rank_rows, part in zip(found, parts, strict=True)])


def _portable(error: Exception) -> Exception:
    """The error, or a description of one that cannot be sent, as it holds an open file: the other ranks wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error
