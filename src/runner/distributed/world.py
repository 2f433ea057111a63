"""The processes that train together, called ranks, and what they tell each other.

A process that trains alone is a world of one, in which nothing here communicates.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runner.base import slurm
from runner.distributed.store import gather_ranks, open_store

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_size: int = 1

    @property
    def first(self) -> bool:
        """True if this rank writes files and talks to people."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; all have to call this."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=_control())
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
        dist.broadcast_object_list(answer, src=0, group=_control())
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

    def wait_for_all(self) -> None:
        """Return once every rank has called this."""
        self.gather(None)


_WORLD = World()


def world() -> World:
    """The world of this process."""
    return _WORLD


def started_by_launcher() -> bool:
    """True if torchrun or SLURM started this process as one of several ranks; SLURM's variables become torch's."""
    environ = os.environ
    # Only srun sets the number of tasks of a step: a script that calls the program without it wants one process.
    if "RANK" not in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        # Only SLURM's names differ from those that torch reads
        a_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]
        environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = (
            environ["SLURM_LOCALID"],
            a_node.split("(")[0].split(",")[0],
        )
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
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ.get(name, "1" if "SIZE" in name else "0")) for name in names)
    timeout = datetime.timedelta(seconds=timeout_s)
    # Waiting here names missing ranks; torch's own wait would end with a timeout that names none
    store = store or open_store(timeout_s)
    gather_ranks(store, "joined", timeout_s)
    group = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
    # Both backends: tensors travel by NCCL, and small Python objects by gloo without touching the GPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **group)
    else:
        dist.init_process_group("gloo", **group)
    _WORLD = World(rank, size, local_rank, local_size)
    try:
        yield _WORLD
    finally:
        _WORLD = World()
        with contextlib.suppress(Exception):  # another rank may be gone
            dist.destroy_process_group()


def _portable(error: Exception) -> Exception:
    """The error, or a description of one that cannot be sent, as it holds an open file: the other ranks wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error


def _control() -> Any:
    """The group for objects, which travel through the CPU."""
    return dist.group.WORLD
