"""`train json=true`: the result of a run or a sweep as one line of JSON on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAST = ("threads=1", "logger=none", "log.progress=false", "log.curves=false", "model=mlp", "epochs=1")

PRINTS = """
import os
class Prints:
    def on_start(self, loop):
        print("printed by Python")
        os.write(1, b"written to the descriptor")
"""


def test_standard_output_is_the_summary_and_the_directory(workdir: Path, own_module: Callable[..., Path]) -> None:
    own_module("prints", PRINTS)
    # A process of its own, whose ranks inherit its streams
    words = ("json=true", "devices=2", "+callbacks.prints={_target_: prints.Prints}")
    command = [sys.executable, "-m", "runner", "train", *FAST, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    directory = workdir / result.pop("directory")
    assert result == json.loads((directory / "summary.json").read_text())
    assert (result["status"], result["error"]) == ("finished", None)
    assert "written to the descriptor" in done.stderr
    assert str(directory.relative_to(workdir)) in done.stderr, "people still see where it is"


def test_a_sweep_ends_with_its_table(run: Callable[..., Any]) -> None:
    result = run("train", *FAST, "json=on", "optimizer.lr=0.1,0.01", "hydra/launcher=pool", "--multirun")
    assert result.status == 0, result.err
    (line,) = result.out.splitlines()
    found = json.loads(line)
    folder = Path(found.pop("directory"))
    assert found == json.loads((folder / "sweep.json").read_text())
    assert [job["status"] for job in found["jobs"]] == ["finished", "finished"]


def test_a_run_that_fails_says_so_with_its_exit_status(run: Callable[..., Any]) -> None:
    result = run("train", *FAST, "json=true", "optimizer.lr=1e35")
    found = json.loads(result.out)
    assert (result.status, found["status"]) == (3, "failed")
    assert found["error"].startswith("diverged")
    assert Path(found["directory"]).is_dir()
    # The mistake is found once the data is read, and leaves no directory
    result = run("train", *FAST, "json=true", "data=fashion_mnist", "data.root=nowhere")
    found = json.loads(result.out)
    assert (result.status, found["status"], found["directory"]) == (2, "failed", None)
    assert found["error"].startswith("data.root")


def test_a_mistake_in_the_command_prints_no_json(rejected: Callable[..., Any]) -> None:
    result = rejected("train", "json=true", "model=mlpp")
    assert (result.out, "model" in result.err) == ("", True)


def test_a_finished_run_is_told_again_and_checkpoints_do_not_have_the_key(run: Callable[..., Any]) -> None:
    first, again = (run("train", *FAST, "json=true", "resume=auto", "hydra.run.dir=here") for _ in range(2))
    assert json.loads(again.out) == json.loads(first.out)
    directory = json.loads(first.out)["directory"]
    resumed = run("train", f"ckpt_path={directory}", "epochs=2", "threads=1")
    assert resumed.status == 0, resumed.err
    assert Path(resumed.out.splitlines()[-1]).is_dir(), "the command that resumes did not ask for JSON"
