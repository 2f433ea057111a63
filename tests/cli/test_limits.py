"""Limits of the system and places where nothing can be made: a sentence, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extended import some

from runner.base.errors import system_limit

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "model=mlp", "threads=1", "logger=none",
    "log.progress=false", "log.curves=false", "evaluate.test=false", "max_steps=2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("devices=2", "device=cpu", "hydra.run.dir=mine"), "logs"),
        (("--multirun", "seed=1", "sweep.dir=mine"), "logs"),
        (("hydra.run.dir=mine",), "checkpoints"),
    ],
)
def test_a_file_where_a_run_needs_a_folder_is_a_mistake(
    rejected: Any, workdir: Path, words: tuple[str, ...], name: str
) -> None:
    (workdir / "mine").mkdir()
    (workdir / "mine" / name).touch()
    error = rejected("train", *SMALL, *words).err
    assert f"cannot write mine/{name}: a file exists where a folder is needed" in error


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
@pytest.mark.parametrize("place", ["/proc/foo", "/dev/null/x", "/dev/null", "file/a/b"])
def test_a_folder_that_cannot_be_made_is_a_mistake(rejected: Any, workdir: Path, key: str, place: str) -> None:
    (workdir / "file").touch()
    sweep = ("--multirun", "seed=0,1") if "sweep" in key else ()
    result = rejected("train", *SMALL, *sweep, f"{key}={place}")
    assert f"{key}: cannot be {place}: " in result.err
    assert f"the override {key}={place}" in result.err


def test_looking_whether_a_folder_can_be_made_leaves_nothing(rejected: Any, workdir: Path) -> None:
    rejected("train", *SMALL, "hydra.run.dir=a/b", "optimizer.lr=wrong")
    assert [path for path in workdir.rglob("*") if path.name.startswith(".runner_")] == []


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("given", some([("data.placement=disk", "data.num_workers=2"), ("devices=2",)], 1))
def test_a_limit_on_open_files_is_a_sentence(workdir: Path, given: tuple[str, ...]) -> None:
    words = (*SMALL, *given, "hydra.run.dir=run")
    done = shell(f'ulimit -n 24; exec "$0" -m runner train {" ".join(words)}')
    assert done.returncode == 1, done.stderr
    assert "too many open files" in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert '"status": "failed"' in (workdir / "run" / "summary.json").read_text()


@pytest.mark.slow
def test_a_limit_on_memory_is_a_sentence(workdir: Path) -> None:
    done = shell(f'ulimit -v 2000000; exec "$0" -m runner train {" ".join(SMALL)}')
    assert done.returncode == 1, done.stderr
    assert "there is not enough memory, or a limit on it (ulimit -v) is too small" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_the_limit_is_recognised_behind_other_errors_and_nothing_else_is() -> None:
    outer = RuntimeError("a worker failed")
    outer.__cause__ = OSError(24, "Too many open files")
    assert "ulimit -n" in system_limit(outer)
    assert "ulimit -n" in system_limit(RuntimeError("Too many open files. Communication is no longer possible"))
    assert system_limit(OSError(2, "No such file or directory")) == ""


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of bash in which `$0 -m runner` is the program."""
    words = ["bash", "-o", "pipefail", "-c", command, sys.executable]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("display", "sweep"),
    some(
        [
            ("<&- >&- 2>&-", ()),
            ("2>/dev/full >/dev/full", ("--multirun", "seed=0,1")),
            ("2>&1 | head -n 1", ("--multirun", "seed=0,1")),
        ],
        0,
        several=True,
    ),
)
def test_a_run_does_not_end_with_its_display(workdir: Path, display: str, sweep: tuple[str, ...]) -> None:
    done = shell(f'"$0" -m runner train {" ".join((*SMALL, *sweep))} {display}')
    assert (done.returncode, done.stderr) == (0, "")
    summaries = [path.read_text() for path in workdir.rglob("summary.json")]
    assert len(summaries) == (2 if sweep else 1)
    assert all('"status": "finished"' in summary for summary in summaries)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("list model >&-", 0, ""),
        ("show | head -n 1", 0, ""),
        ("--version >/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
        ("list model >/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
        ("no_verb 2>&-", 2, ""),
        ("no_verb 2>/dev/full", 2, ""),
    ],
)
def test_the_other_verbs_say_that_their_output_was_lost(words: str, status: int, says: str) -> None:
    done = shell(f'"$0" -m runner {words}')
    assert (done.returncode, done.stderr) == (status, says)
