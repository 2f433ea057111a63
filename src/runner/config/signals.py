"""The signals that ask a run to stop: one list, for the run, its worker processes and what is made before training."""

from __future__ import annotations

import signal

STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
    if hasattr(signal, name)  # Windows has few of them
)
