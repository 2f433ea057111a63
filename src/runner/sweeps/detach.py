"""A sweep in the background: `hydra.launcher.detach=true`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from runner.config.errors import FAILED, OK

LOG = "sweep.log"
"""The file in the sweep's folder that gets what it prints."""


def detached(folder: Path, begin: Callable[[], None]) -> None:
    """Go on in a process in the background that has no terminal, once it has begun.

    Args:
        folder: of the sweep.
        begin: takes the folder; called in the new process.

    Raises:
        SystemExit: in the process that was called, which tells how to follow and how to end the other one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    seen, says = os.pipe()
    process = os.fork()
    if process:
        os.close(says)
        begun = os.read(seen, 1)
        os.close(seen)
        if not begun:
            os.waitpid(process, 0)
            print((folder / LOG).read_text(errors="replace").strip(), file=sys.stderr)
            raise SystemExit(FAILED)
        print(f"the sweep runs in the background as process {process}; its output is in {folder / LOG}")
        print(f"    show it: python -m runner sweep {folder}")
        print(f"    stop it: kill {process}, and the same command continues it")
        print(folder, flush=True)
        raise SystemExit(OK)
    os.setsid()
    os.close(seen)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    begin()
    os.write(says, b"1")
    os.close(says)
