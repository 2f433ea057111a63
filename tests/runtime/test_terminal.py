"""Runs on a real terminal: Ctrl-C, Ctrl-C again, and a terminal that is closed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from extended import some
from forked import ForkedProgram
from slow_parts import SOURCE, at_step

WORDS = (
    "train", "data=synthetic", "data.dataset.samples=200", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "model=mlp", "model.hidden=[16]", "threads=1", "logger=none", "log.every_steps=1", "evaluate.test=false",
    "log.curves=false", "data.placement=disk", "data.num_workers=2", "+callbacks.slow._target_=slow.Slow",
    "+callbacks.slow.step_s=0.05", "hydra.run.dir=run",
)  # fmt: skip


class Terminal:
    """A terminal that the program runs on."""

    def __init__(self, process: ForkedProgram, master: int) -> None:
        self.process, self._master, self._said = process, master, b""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def wait(self, done: Callable[[], bool], longest_s: float = 90.0) -> None:
        deadline = time.monotonic() + longest_s
        while not done():
            assert time.monotonic() < deadline, self.said
            self._read(0.02)

    def end(self) -> int:
        self.wait(lambda: self.process.poll() is not None)
        for _ in range(10):  # worker processes may still print
            self._read(0.05)
        return self.process.returncode

    def _read(self, wait_s: float) -> None:
        if self._master < 0 or not select.select([self._master], [], [], wait_s)[0]:
            time.sleep(wait_s if self._master < 0 else 0)
            return
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            self._said += os.read(self._master, 1 << 16)

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")


@pytest.fixture
def on_terminal(own_module: Callable[..., Path]) -> Iterator[Callable[..., Terminal]]:
    own_module("slow", SOURCE)
    started: list[Terminal] = []
    slaves: list[int] = []  # open, as a terminal that nobody has open is gone before the program opens it

    def call(*words: str, verb: Sequence[str] = WORDS, ignored: Sequence[signal.Signals] = ()) -> Terminal:
        master, slave = os.openpty()
        process = ForkedProgram([*verb, *words], os.ttyname(slave), ignored)
        started.append(Terminal(process, master))
        slaves.append(slave)
        return started[-1]

    yield call
    for terminal in started:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
        terminal.close()
    for slave in slaves:
        os.close(slave)


def preempted(name: str) -> bool:
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["error"] == f"stopped by {name}"
    return bool(summary["status"] == "preempted") and Path("run/checkpoints/last.safetensors").is_file()


@pytest.mark.parametrize(
    ("key", "name"),
    some([(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")], 0, several=True),
    ids=["Ctrl-C", "Ctrl-backslash"],
)
def test_a_key_that_stops_saves_and_ends_with_75(on_terminal: Any, key: bytes, name: str) -> None:
    terminal = on_terminal()
    terminal.wait(lambda: at_step(3))
    terminal.press(key)
    assert terminal.end() == 75, terminal.said
    assert preempted(name)
    assert terminal.said.startswith("runner "), "the first line appears before torch is loaded"
    assert "train, loading torch" in terminal.said.splitlines()[0]
    assert "resume with ckpt_path=" in terminal.said
    assert "Traceback" not in terminal.said


def test_a_terminal_that_is_closed_saves_and_ends_with_75(on_terminal: Any) -> None:
    terminal = on_terminal()
    terminal.wait(lambda: at_step(3))
    terminal.close()
    assert terminal.end() == 75
    assert preempted("SIGHUP")


@pytest.mark.extended
def test_a_closed_terminal_does_not_stop_a_run_that_nohup_started(on_terminal: Any) -> None:
    terminal = on_terminal("callbacks.slow.step_s=0.01", ignored=[signal.SIGHUP])
    terminal.wait(lambda: at_step(3))
    terminal.close()
    assert terminal.end() == 0
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"


@pytest.mark.extended
def test_a_second_ctrl_c_ends_at_once_without_a_traceback_of_any_process(on_terminal: Any) -> None:
    terminal = on_terminal("callbacks.slow.step_s=60")
    terminal.wait(lambda: at_step(1))
    terminal.press(b"\x03")
    time.sleep(0.5)
    assert terminal.process.poll() is None, "the first one waits for the step to end"
    terminal.press(b"\x03")
    assert terminal.end() == 128 + signal.SIGINT
    assert "Traceback" not in terminal.said
    assert "Error" not in terminal.said


def test_ctrl_c_before_training_ends_without_a_traceback(on_terminal: Any) -> None:
    waiting = "import time\nfrom pathlib import Path\nPath('steps').write_text('1')\ntime.sleep(60)\nSlow = None\n"
    Path("slow.py").write_text(waiting, encoding="utf-8")
    terminal = on_terminal(verb=("check", "data.dataset._target_=slow.Slow"))
    terminal.wait(lambda: at_step(1))
    terminal.press(b"\x03")
    assert terminal.end() == 128 + signal.SIGINT, terminal.said
    assert "Traceback" not in terminal.said


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback() -> None:
    """Both forms of the program, at moments from the first import of its own to that of torch."""
    script = "import sys; print(flush=True); from runner.__main__ import main; sys.exit(main())"
    for delay in (0.1, 0.5, 1.0):
        process = subprocess.Popen(
            [sys.executable, "-c", script, "train", "epochs=100", "hydra.run.dir=run", "logger=none"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (128 + signal.SIGINT, 75), said
        assert "Traceback" not in said
