"""`summary.txt`: what a person opens first says what the run was, and its commands work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from runner.run.run_record import summary_text


def test_the_text_of_a_run_has_its_results_and_commands_that_work(accepted: Any, train_once: Any) -> None:
    result = train_once("model=mlp", "model.hidden=[16]", "epochs=2")
    text = (result.directory / "summary.txt").read_text()
    summary = result.summary
    assert text.startswith(f"finished, {summary['global_step']} steps, ")
    assert f"val/accuracy {summary['best']['value']:.4g}" in text
    assert "model.hidden=[16]" in text
    commands = re.findall(r"^  (\w+) +python -m runner (.+)$", text, re.MULTILINE)
    assert [name for name, _ in commands] == ["resume", "evaluate", "predict", "export"]
    for name, command in commands:
        words = shlex.split(command.replace("MORE", "3").replace("FOLDER", "test"))
        accepted(*words, "threads=1", *(["logger=none"] if name == "resume" else []))


def test_the_text_of_a_failed_run_has_the_reason_and_the_command(run: Any, workdir: Path) -> None:
    words = ("model=mlp", "epochs=1", "optimizer.lr=1e9", "threads=1", "logger=none", "log.progress=false")
    assert run("train", *words, "hydra.run.dir=run").status == 3
    text = Path("run/summary.txt").read_text()
    assert text.startswith("failed, ")
    assert "diverged" in text
    assert "python -m runner train model=mlp epochs=1 optimizer.lr=1e9" in text


def test_secrets_and_sweep_keys_are_not_repeated() -> None:
    words = ["sweep.dir=x", "data.dataset.api_key=abc123", "seed=1"]
    text = summary_text(Path("a b"), {"status": "preempted", "error": "stopped by SIGTERM"}, words, saved=True)
    assert "abc123" not in text
    assert "sweep.dir" not in text
    assert "python -m runner train 'ckpt_path=a b'\n" in text
