"""Another process that holds the lock of a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CODE = """
import sys, pathlib
from runner.run.directory import hold
assert hold(pathlib.Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Within, another process holds a folder, unless it is killed."""
    command = [sys.executable, "-c", CODE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
