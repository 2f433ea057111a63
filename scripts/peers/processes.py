"""Measurements in separate processes, each writing to a separate terminal.

`python -m peers.processes JOB` is such a process of every contender but `runner`, which has its own command line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.cases import CASES, MOMENTUM, WEIGHT_DECAY, Job

DAY_S = 86_400.0
_SCRIPTS = Path(__file__).resolve().parents[1]


class MeasurementFailed(Exception):
    """A contender ended with an error; the message is the end of what it printed."""


def measure(job: Job, limit_s: float = DAY_S) -> dict[str, Any]:
    """Carry out a job in a fresh process and a fresh scratch folder; `limit_s`: see `run`.

    Returns:
        `step_s`: seconds an optimizer step, from the end of the first epoch to the end of the last; `quickest_s`: the
        same in the quickest of these epochs; `epochs_s`: seconds of each of them; `loss` and `accuracy` of the trained
        model.

    Raises:
        MeasurementFailed: if the contender did.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = replace(job, folder=name, result=str(folder / "result.json"))
        file = folder / "job.json"
        job.write(file)
        command = ["runner", *words(job, file)] if job.contender == "runner" else ["peers.processes", str(file)]
        status, printed = run([sys.executable, "-m", *command], folder, job.threads, limit_s)
        if status != 0 or not Path(job.result).exists():
            raise MeasurementFailed(f"{job.contender} ended with status {status}:\n{printed[-3000:]}")
        found: dict[str, Any] = json.loads(Path(job.result).read_text())
        return found


def turns(words: Sequence[str], loops: Mapping[str, Mapping[str, Any]], folder: Path, threads: int, epochs: int = 1,
          warmup: int = 2, limit_s: float = DAY_S) -> list[dict[str, float]]:  # fmt: skip
    """Seconds of a step by contender in every turn of a run of `runner` with these words.

    Args:
        loops, epochs, warmup: see `peers.turns.Turns`.
        limit_s: see `run`.

    Raises:
        MeasurementFailed: if the run did.
    """
    result = folder / "turns.json"
    turns = {"_target_": "peers.turns.Turns", "result": result, "epochs": epochs, "warmup": warmup}
    turns |= {f"loops.{name}.{key}": value for name, given in loops.items() for key, value in given.items()}
    turns |= {} if loops else {"loops": {}}
    command = ["-m", "runner", *words, *(f"callbacks.turns.{key}={value}" for key, value in turns.items())]
    status, printed = run([sys.executable, *command], folder, threads, limit_s)
    if status != 0 or not result.exists():
        raise MeasurementFailed(f"runner ended with status {status}:\n{printed[-3000:]}")
    found: list[dict[str, float]] = json.loads(result.read_text())
    return found


def run(command: list[str], folder: Path, threads: int, limit_s: float = DAY_S) -> tuple[int, str]:
    """Exit status of a command and what it showed on its terminal.

    Raises:
        MeasurementFailed: if the command was killed, with its processes, after `limit_s`.
    """
    paths = [str(_SCRIPTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    settings = {
        "PYTHONPATH": os.pathsep.join(
            str(Path(path).absolute()) for path in paths
        ),  # the command runs in another folder
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=os.environ | settings,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        shown = bytearray()
        # Reading fails with EIO once the last holder of the other end is gone.
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 65536):
                shown += chunk
        status, printed = process.wait(), shown.decode(errors="replace")
        if status == -signal.SIGKILL and late.is_set():
            raise MeasurementFailed(f"not finished in {limit_s:.0f} s\n{printed[-3000:]}")
        return status, printed
    finally:
        timer.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)


def words(job: Job, job_file: Path) -> list[str]:
    """Words after `python -m runner`: no evaluation while training, the score is taken by the clock's callback."""
    case = CASES[job.case]
    data = [word.format(root=job.fashion_root, samples=job.samples or "null") for word in case.data]
    return [
        "train", *data, f"model={case.model}", "transform=standard" if case.shift else "transform=none",
        f"data.shift={case.shift}", f"data.hflip={case.flip}", f"data.batch_size={case.batch_size}",
        f"data.normalize.mean=[{case.mean}]", f"data.normalize.std=[{case.std}]", "data.split.val=0", "evaluate.test=false",
        "optimizer=sgd", f"optimizer.lr={case.lr}", f"optimizer.momentum={MOMENTUM}",
        f"optimizer.weight_decay={WEIGHT_DECAY}", "scheduler=cosine", f"epochs={job.epochs}", f"seed={job.seed}",
        f"threads={job.threads}", f"device={job.device}", f"output_root={job.folder}",
        "callbacks.clock._target_=peers.clock.Callback", f"callbacks.clock.job={job_file}", *job.further,
    ]  # fmt: skip


def main() -> None:
    """Train as the job says, and write what it took."""
    import torch

    from peers.clock import Clock, train
    from peers.work import work_of

    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    loop = importlib.import_module(f"peers.{job.contender}_loop")
    work, clock = work_of(job), Clock()
    clock.write(work, train(loop, work, clock))


if __name__ == "__main__":
    main()
