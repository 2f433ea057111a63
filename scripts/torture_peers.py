"""Do to other libraries what `torture.py` does to `runner`, and count the same way.

    python scripts/torture_peers.py                                # all of them, about ten minutes on two cores
    python scripts/torture_peers.py runner timm --kills 5 --seed 3

Every library trains the same small network on digits as its documentation writes it, saves every few steps, and goes on from
the newest checkpoint. Peers come with `pip install -e '.[peers]'`; one that is not installed is skipped with a message.
Each training is a forked process, and torch computes on one thread. Nothing is promised here, so the exit status is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there; no thread pool may exist when we fork
sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults.lives import Life, fork
from faults.peers import PROGRAMS, Job, Program
from faults.table import Row


class Victim:
    """One library, and what is done to it.

    Args:
        program: the library.
        folder: scratch folder.
        counts: how many of what.
        draw: random numbers.
    """

    def __init__(self, program: Program, folder: Path, counts: argparse.Namespace, draw: random.Random) -> None:
        self._program, self._folder, self._counts, self._draw = program, folder, counts, draw
        self._number = 0
        self._asked = 0.0
        self.rows: list[Row] = []

    def torment(self) -> list[Row]:
        """Every fault in turn."""
        self._alone = {workers: self._left_alone(workers) for workers in (0, 2)}
        for step in (self._repeats, self._workers, self._kills, self._signals, self._damage, self._pickles, self._disk):
            step()
        self._not_a_number()
        return self.rows

    def _start(self, job: Job, prepare: Callable[[], None] | None = None) -> Life:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "fingerprint").unlink(missing_ok=True)

        def work() -> int:
            if prepare is not None:
                prepare()
            self._program.train(job)
            return 0

        self._number += 1
        return fork(work, self._folder / f"log_{self._number}.txt")

    def _finish(self, job: Job, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
        """Exit status, and the fingerprint if it came to one."""
        life = self._start(job, prepare)
        life.wait(120)
        return life.status or 0, _fingerprint(job)

    def _left_alone(self, workers: int) -> tuple[str, float, float]:
        """Fingerprint, seconds to the first checkpoint, seconds to the end."""
        job = Job(self._folder / f"alone_{workers}", workers)
        life = self._start(job)
        began = time.perf_counter()
        while not self._program.checkpoints(job.folder) and not life.ended():
            time.sleep(0.002)
        saved = time.perf_counter() - began
        assert life.wait(120) == 0, life.said()
        return _fingerprint(job), saved, time.perf_counter() - began

    def _row(self, what: str) -> Row:
        self.rows.append(Row(self._program.name, what))
        return self.rows[-1]

    def _new(self, workers: int = 0) -> Job:
        return Job(self._folder / f"run_{self._number}", workers)

    def _repeats(self) -> None:
        row = self._row("no fault: the same bits twice")
        for workers, (expected, _, _) in self._alone.items():
            row.count("" if self._finish(self._new(workers))[1] == expected else "other bits", _quiet)

    def _workers(self) -> None:
        row = self._row("the same bits with 0 and 2 workers")
        row.count("" if self._alone[0][0] == self._alone[2][0] else "other bits", _quiet)

    def _stopped(self, job: Job, number: int) -> int | None:
        """Run a job and end it by a signal after its first checkpoint; its status, None if it was over before."""
        _, saved, total = self._alone[job.workers]
        life = self._start(job)
        while not self._program.checkpoints(job.folder) and not life.ended():
            time.sleep(0.002)
        moment = time.perf_counter() + self._draw.uniform(0, 0.9 * (total - saved))
        while time.perf_counter() < moment and not life.ended():
            time.sleep(0.002)
        if life.ended():
            return None
        self._asked = time.time()
        os.kill(life.pid, number)
        status = life.wait(60)
        return None if status == 0 and _fingerprint(job) else status

    def _kills(self) -> None:
        row = self._row("SIGKILL and resume: the bits of an uninterrupted run")
        ended = self._row("SIGKILL and resume: the resumed run finishes")
        while row.injected < self._counts.kills:
            job = self._new(2 * (row.injected % 2))
            if self._stopped(job, signal.SIGKILL) is None:
                continue
            status, found = self._finish(replace(job, resumes=True))
            row.count("" if found == self._alone[job.workers][0] else "other bits", _quiet)
            ended.count("" if status == 0 and found else "failed", _quiet)

    def _signals(self) -> None:
        saved = self._row("SIGTERM: a checkpoint of the step is saved before the end")
        told = self._row("SIGTERM: the exit status tells a scheduler to restart it (not 0, not killed)")
        while saved.injected < self._counts.signals:
            job = self._new()
            status = self._stopped(job, signal.SIGTERM)
            if status is None:
                continue
            files = self._program.checkpoints(job.folder)
            fresh = bool(files) and files[0].stat().st_mtime > self._asked
            _, found = self._finish(replace(job, resumes=True))
            saved.count("" if fresh and found == self._alone[0][0] else "not saved, or not exactly", _quiet)
            told.count("" if status > 0 else "killed, or 0", _quiet)

    def _interrupted(self) -> Job:
        """A job that was killed in the middle, and is not touched."""
        while True:
            job = self._new()
            if self._stopped(job, signal.SIGKILL) is not None:
                return job

    def _damage(self) -> None:
        whole = self._interrupted()
        _, healthy = self._finish(replace(self._copy(whole), resumes=True))
        changed = self._row("one bit of a tensor flipped in the newest checkpoint: detected, or without effect")
        short = self._row("the newest checkpoint truncated: detected, or the previous one used")
        on = self._row("the newest checkpoint truncated: the resumed run finishes")
        for number in range(self._counts.flips):
            job = self._copy(whole)
            self._flip(self._program.checkpoints(job.folder)[0])
            status, found = self._finish(replace(job, resumes=True))
            changed.count("" if status or found == healthy else "believed", _quiet)
            if number < self._counts.truncations:
                job = self._copy(whole)
                file = self._program.checkpoints(job.folder)[0]
                os.truncate(file, self._draw.randrange(file.stat().st_size))
                status, found = self._finish(replace(job, resumes=True))
                short.count("" if status or found in (healthy, self._alone[0][0]) else "believed", _quiet)
                on.count("" if status == 0 and found else "failed", _quiet)

    def _copy(self, job: Job) -> Job:
        self._number += 1
        copy = self._new()
        shutil.copytree(job.folder, copy.folder, symlinks=True)
        return copy

    def _flip(self, file: Path) -> None:
        """Flip the highest bit but one of a byte in the middle half of a file, where its tensors lie."""
        data = bytearray(file.read_bytes())
        data[self._draw.randrange(len(data) // 4, 3 * len(data) // 4)] ^= 0x40
        file.unlink()  # it may have other names
        file.write_bytes(data)

    def _pickles(self) -> None:
        row = self._row("a pickle as a file of the checkpoint: nothing in it is executed")
        whole = self._interrupted()
        for index in range(len(self._program.checkpoints(whole.folder))):
            job = self._copy(whole)
            file, proof = self._program.checkpoints(job.folder)[index], job.folder / "proof"
            file.unlink()
            _malicious(file, proof)
            self._finish(replace(job, resumes=True))
            row.count("run" if proof.exists() else "", _quiet)

    def _disk(self) -> None:
        told = self._row("files limited to half a checkpoint during the run: the exit status is not 0")
        on = self._row("files limited to half a checkpoint: the run continues once there is space")
        size = max(file.stat().st_size for file in self._program.checkpoints(self._folder / "alone_0"))
        for _ in range(self._counts.disks):
            job = self._new()
            life = self._start(job)
            while not self._program.checkpoints(job.folder) and not life.ended():
                time.sleep(0.002)
            if life.ended():
                continue
            resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
            status = life.wait(120)
            told.count("" if status > 0 else "killed, or 0", _quiet)
            status, found = self._finish(replace(job, resumes=True))
            on.count("" if status == 0 and found else "failed", _quiet)

    def _not_a_number(self) -> None:
        row = self._row("an image with NaN values: the run fails, or its weights stay finite")
        for workers in (0, 2):
            job = replace(self._new(workers), poisoned=True)
            status, _ = self._finish(job)
            written = job.folder / "fingerprint"
            finite = written.exists() and not written.read_text().endswith("not finite")
            row.count("" if status or finite else "ended as if all were well", _quiet)


class Evil:
    """What a pickle can do."""

    def __init__(self, proof: Path) -> None:
        self._proof = str(proof)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._proof, "w")


def _malicious(file: Path, proof: Path) -> None:
    import pickle

    import torch

    if file.suffix == ".pkl":
        file.write_bytes(pickle.dumps(Evil(proof)))
    else:
        torch.save({"state_dict": Evil(proof)}, file)


def _fingerprint(job: Job) -> str:
    written = job.folder / "fingerprint"
    return written.read_text() if written.exists() else ""


def _quiet(_: str) -> None:
    """Others promise nothing that could be broken."""


def table(rows: list[Row]) -> str:
    """Rows of faults, columns of libraries."""
    names = list(dict.fromkeys(row.section for row in rows))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for what in dict.fromkeys(row.what for row in rows):
        cells = []
        for name in names:
            found = [row for row in rows if (row.section, row.what) == (name, what)]
            cells.append(f"{found[0].kept}/{found[0].injected}" if found and found[0].injected else "")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "programs", nargs="*", metavar="LIBRARY", help=f"of {', '.join(PROGRAMS)}; all if none is given"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and places")
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs at random moments")
    parser.add_argument("--signals", type=int, default=5, help="SIGTERMs at random moments")
    parser.add_argument("--flips", type=int, default=20, help="flipped bits")
    parser.add_argument("--truncations", type=int, default=10, help="truncated files, at most as many as flipped bits")
    parser.add_argument("--disks", type=int, default=3, help="runs on a disk that is full")
    options = parser.parse_args(argv)
    for name in options.programs:
        if name not in PROGRAMS:
            parser.error(f"'{name}' is not one of {', '.join(PROGRAMS)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for name in options.programs or PROGRAMS:
            if importlib.util.find_spec(name) is None:
                print(f"{name} is skipped: it is not installed", flush=True)
                continue
            program = PROGRAMS[name]
            rows += Victim(program, Path(scratch) / name, options, random.Random(f"{options.seed} {name}")).torment()
            print(f"{program.name} is done", flush=True)
    print(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
