"""Sweeps that run in other processes: waiting for them, and what their folders say."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from forked import ForkedProgram

from runner.sweeps.ledger import Ledger

T = TypeVar("T")
ENDED = "outputs/*/sweeps/*/*/summary.json"
COMMANDS = '''
"""A launcher that starts the command of each job on this machine."""

import os
import subprocess
import time

from runner.launch.jobs import Ended


class Commands:
    survives = False

    def __init__(self, values, words=(), slots=2):
        self.words, self.slots, self.running = list(words), slots, {}

    def start(self, jobs):
        for job in jobs:
            job.log.parent.mkdir(exist_ok=True)
            with job.log.open("ab") as log:
                words, variables = [*self.words, *job.command], {**os.environ, **job.environment}
                process = subprocess.Popen(words, env=variables, stdout=log, stderr=subprocess.STDOUT)
            self.running[job.number] = process
        return ["here"] * len(jobs)

    def wait(self, timeout_s):
        time.sleep(timeout_s)
        ended = [number for number, process in self.running.items() if process.poll() is not None]
        return [Ended(number, f"status {self.running.pop(number).returncode}") for number in ended]

    def stop(self, kill):
        for process in self.running.values():
            process.terminate()

    def close(self):
        pass
'''


def until(condition: Callable[[], T], program: ForkedProgram | None = None, seconds: float = 60) -> T:
    """Wait until something is true, while a program runs, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert program is None or program.poll() is None, program.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return found


def kill_and_repeat(words: list[str], kills: int, workdir: Path) -> None:
    """Kill the command of a sweep some times, each at a random moment after another job ended, and repeat it to its end."""
    draw = random.Random(0)
    for attempt in range(kills + 1):
        known, program = len([*workdir.glob(ENDED)]), ForkedProgram(words)
        if attempt < kills:
            until(lambda: program.poll() is not None or len([*workdir.glob(ENDED)]) > known)  # noqa: B023
            time.sleep(draw.random() * 0.3)
            program.kill()
        out, err = program.communicate(timeout=60)
        assert all(Ledger.read(path.parent).launches for path in workdir.glob("outputs/*/sweeps/*/sweep.jsonl"))
        assert program.returncode in ((0, -signal.SIGKILL) if attempt < kills else (0,)), err + out


def jobs_of(workdir: Path) -> dict[str, int]:
    """Processes of the jobs that have logged an evaluation, by folder."""
    found = [path.parent for path in workdir.rglob("metrics.jsonl") if '"val"' in path.read_text()]
    owners = {folder.name: (folder / ".lock").read_text().split() for folder in found}
    return {name: int(words[1]) for name, words in owners.items() if words}  # none while it is being written


def processes_in(folder: Path) -> list[str]:
    """Commands of the processes that work in a folder, apart from this one, its fork server, and agents of Ray.

    Ray leaves its agents for minutes if its cluster is shut down seconds after it has started.
    """
    agents, found = ("ray::DashboardAgent", "ray::RuntimeEnvAgent"), []
    for process in psutil.process_iter():
        try:
            own = os.getpid() in (process.pid, process.ppid())
            if not own and Path(process.cwd()) == folder and process.status() != "zombie":
                command = " ".join(process.cmdline()).strip()
                found += [] if command in agents else [command]
        except psutil.Error:
            continue
    return found


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Lines of the ledger of a sweep: all, or those of some kinds."""
    lines = [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]
    return [line for line in lines if not kinds or line["event"] in kinds]


def started(folder: Path) -> list[str]:
    """Folders of the jobs that a sweep started, in their order."""
    return [line["folder"] for line in events(folder, "started")]


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """The summary of each job of a sweep, by its folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights that the jobs of a sweep ended with, by their folders."""
    return {name: found["weights_sha256"] for name, found in summaries(folder).items() if "weights_sha256" in found}


def contents(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    """What is below a folder but locks: of each file its content, and when it was written."""
    paths = (path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None for path in paths}
