"""Callbacks and data of ranks that fail, hang or are slow."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from runner.data.sources.synthetic import synthetic

WORDS = (
    "data=synthetic", "data.dataset.samples=90", "data.image_size=8", "data.batch_size=8", "model=mlp", "model.hidden=[16]",
    "threads=1", "logger=none", "log.curves=false", "log.progress=false",
)  # fmt: skip


def data(**given: Any) -> Any:
    """Other images on each rank."""
    return synthetic(**given | {"seed": int(os.environ.get("RANK", "0"))})


def _parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class Fault:
    """Raises an error, or gets a signal, which may be for the first attempt alone, or while the launcher is stopped."""

    def __init__(self, step: int = 5, how: str = "raise") -> None:
        self.step, self.how = step, how

    def on_step(self, loop: Any) -> None:
        if os.environ["RANK"] != "1" or loop.state.position.global_step != self.step:
            return
        if self.how == "raise":
            raise ValueError("a mistake of mine")
        if self.how == "SIGKILL once" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        if self.how == "SIGKILL while the launcher is busy":
            launcher = _parent_of(_parent_of(os.getpid()))
            os.kill(launcher, signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {launcher}"], start_new_session=True)
        os.kill(os.getpid(), signal.Signals[self.how.split()[0]])


class Late:
    """Rank 0 asks the launcher to stop, and does not save for long."""

    def on_step(self, loop: Any) -> None:
        if os.environ["RANK"] == "0" and loop.state.position.global_step == 3:
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
            time.sleep(60)


class Slow:
    """Notes how workers would be started, and makes steps last as long as a variable of the environment says."""

    def on_start(self, loop: Any) -> None:
        Path(f"workers_of_rank_{os.environ['RANK']}").write_text(multiprocessing.get_start_method())

    def on_step(self, loop: Any) -> None:
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
