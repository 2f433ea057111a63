"""A job of SLURM: whether this process is in one that was requeued, and how it asks for that."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from runner.base import signals
from runner.base.reading import is_true

_PATIENCE_S = 60.0  # for an answer of SLURM


def restarted() -> bool:
    """Tell whether SLURM started this job again: after a preemption, a failed node or a requeue."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def job() -> str:
    """The name of the job of this process for SLURM; an empty string outside of one.

    A job of an array is named by its array and its place there, as one of them shares its number with the whole array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


@contextlib.contextmanager
def early_warnings() -> Iterator[None]:
    """In a job of SLURM, note the warnings that come before a run listens to signals, as they would end the process."""

    def note(number: int, frame: FrameType | None) -> None:
        for names in (signals.heard, signals.early):
            names.append(signal.Signals(number).name)

    signals.heard.clear()
    signals.early.clear()
    ending = [number for number in signals.WARNINGS if job() and signal.getsignal(number) == signal.SIG_DFL]
    with signals.listening(note, ending):
        yield


def warned(values: Mapping[str, Any]) -> bool:
    """Tell whether SLURM warned this process by one of the signals that ask for a requeue.

    Args:
        values: a composed config.
    """
    wanted = values.get("slurm") or {}
    named = wanted.get("signal") or []
    names = {f"SIG{name}" for name in ([named] if isinstance(named, str) else named)}
    return is_true(wanted.get("requeue")) and bool(job()) and not names.isdisjoint(signals.heard)


def requeue() -> None:
    """Put the job of this process back into the queue, unless SLURM ends it already; say what happened."""
    shown = _scontrol("show", "job", "--oneliner", job())
    state = re.search(r"\bJobState=(\w+)", shown.stdout if shown is not None else "")
    if state is not None and state[1] != "RUNNING":
        # It was cancelled, or SLURM requeues it by itself.
        print(f"SLURM job {job()} is {state[1]}: it is not requeued", file=sys.stderr, flush=True)
        return
    done = _scontrol("requeue", job())
    if done is None or done.returncode:
        reason = "there is no scontrol" if done is None else done.stderr.strip()
        print(f"warning: SLURM job {job()} could not be requeued: {reason}", file=sys.stderr, flush=True)
    else:
        print(f"SLURM job {job()} is requeued", file=sys.stderr, flush=True)


def _scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    return None
