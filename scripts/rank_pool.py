"""Ranks that stay, so that many short runs do not each wait for the imports of several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from runner.base.errors import FAILED, PREEMPTED
from runner.checkpoint.weights import weights_sha256
from runner.distributed.world import rows, world
from runner.launch.ranks import Outcome, RankFailed, outcome_of

_PATIENCE_S = 20  # for other ranks, once one has failed
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["runner.launch.processes", "runner.verbs.train", "torchmetrics.classification"])


class RankPool:
    """Processes that run what `runner.launch.ranks.run_ranks` would start processes for.

    One that dies, or a rank that fails while others wait for it, ends all of them; the next call starts others.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def __call__(self, entry: Callable[[Any], Any], job: Any, size: int, *_: Any, **__: Any) -> Outcome:
        """Run `entry(job)` on `size` ranks; returns the outcome of the first, or raises `RankFailed`."""
        while len(self._ranks) < size:
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(there,), daemon=False)
            process.start()
            there.close()
            self._ranks.append((process, here))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        used = [connection for _, connection in self._ranks[:size]]
        for rank, connection in enumerate(used):
            connection.send((entry, job, rank, size, port, str(Path.cwd()), sys.path))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < size:
            wrong = any(outcome.status not in (0, PREEMPTED) for outcome in outcomes.values())
            ready: Any = wait(
                [each for rank, each in enumerate(used) if rank not in outcomes], _PATIENCE_S if wrong else None
            )
            if not ready:
                break
            for connection in ready:
                rank = used.index(connection)
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    outcomes[rank] = Outcome(rank, FAILED, sentence="died", ended=time.time())
        if failed := [outcome for outcome in outcomes.values() if outcome.status not in (0, PREEMPTED)]:
            self.close()
            raise RankFailed(min(failed, key=lambda outcome: (outcome.lost, outcome.ended)))
        return outcomes[0]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, a run with `devices=2` in this process uses these ranks."""
        with mock.patch("runner.launch.ranks.run_ranks", self):
            yield


def _serve(connection: Connection) -> None:
    """Do jobs until the other side is gone."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)  # as a rank of the launcher does
    with contextlib.suppress(EOFError):
        while True:
            entry, job, rank, size, port, folder, path = connection.recv()
            os.chdir(folder)
            sys.path[:] = path
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in environment.items()})
            try:
                outcome = Outcome(rank, 0, value=entry(job))
            except BaseException as error:
                outcome = outcome_of(rank, error)
            connection.send(outcome)


class Recorder:
    """A callback that writes the sample numbers of every batch to `ids_RANK.txt`, and sends SIGTERM after a step.

    Args:
        folder: where to write; what is there is continued.
        stop_at: the step; None for none.
    """

    def __init__(self, folder: str, stop_at: int | None = None) -> None:
        self._path, self._stop_at = Path(folder) / f"ids_{world().rank}.txt", stop_at
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def on_start(self, loop: Any) -> None:
        """Stand between the loop and its source of batches, and write the sha256 of initial weights to `initial.txt`."""
        if not loop.state.position.global_step:
            self._path.with_name("initial.txt").write_text(weights_sha256(loop.state.model.state_dict()))
        self._source, loop.source = loop.source, self

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """The batches of the source."""
        ranks, size, samples = world(), self._source.batch_size, self._source.samples
        for number, batch in enumerate(self._source.batches(epoch, start, stop), start):
            own = rows(min(size, samples - number * size), ranks.rank, ranks.size)
            ids = batch.indices[: own.stop - own.start].tolist()
            with self._path.open("a") as file:
                print(epoch, number, ranks.rank, *ids, file=file)
            yield batch

    def on_step(self, loop: Any) -> None:
        """Ask to stop."""
        if world().first and loop.state.position.global_step == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def sample_ids(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The sample numbers of each batch, by epoch and batch, in the order of the ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    lines = [[*map(int, line.split())] for path in folder.glob("ids_*.txt") for line in path.read_text().splitlines()]
    for epoch, batch, _, *ids in sorted(lines, key=lambda line: line[:3]):
        found.setdefault((epoch, batch), []).extend(ids)
    return found
