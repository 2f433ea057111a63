"""Runs for reports: one real run is trained for each process, and copied with other settings, metrics and curves."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SETTINGS = [
    (rate, width, amp) for amp in (False, True) for width in (16, 32, 64) for rate in (0.001, 0.003, 0.01, 0.03)
]
_TEMPLATE: list[Path] = []
_MADE: dict[int, Path] = {}


@pytest.fixture
def many(train_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder with as many synthetic runs as asked for; tests must not change it."""

    def call(count: int) -> Path:
        if count not in _MADE:
            if not _TEMPLATE:
                template = train_once("model=small_cnn", "model.width=8", "epochs=1", "limit.train_batches=4").directory
                kept = tmp_path_factory.mktemp("template") / "run"
                _TEMPLATE.append(shutil.copytree(template, kept))
            root = tmp_path_factory.mktemp("many") / "runs"
            for number in range(count):
                _make_run(_TEMPLATE[0], root / str(number), number)
            _MADE[count] = root
        return _MADE[count]

    return call


def _make_run(template: Path, folder: Path, number: int) -> None:
    """A run with five seeds per setting; every 40th has failed, every 50th still runs, every 60th was resumed."""
    rate, width, amp = _SETTINGS[number // 5 % len(_SETTINGS)]
    seed = number % 5 + 5 * (number // (5 * len(_SETTINGS)))
    draw = random.Random(number)
    folder.mkdir(parents=True)
    text = (template / "config.yaml").read_text()
    for name, value in (("^seed", seed), ("^amp", str(amp).lower()), ("^  lr", rate), (" width", width)):
        text = re.sub(rf"({name}): [^,\n}}]+", rf"\g<1>: {value}", text, flags=re.MULTILINE)
    (folder / "config.yaml").write_text(text)
    words = [f"seed={seed}", f"optimizer.lr={rate}", f"model.width={width}", f"amp={str(amp).lower()}"]
    (folder / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    shutil.copy(template / "environment.json", folder)
    best = 0.99 - 0.03 * abs(math.log10(rate / 0.01)) - 0.4 / width + draw.gauss(0, 0.003)
    speed = 4000 * 32 / width * (1.5 if amp else 1) * draw.uniform(0.95, 1.05)
    lines: list[dict[str, Any]] = []
    for step in range(1, 101):
        share = step / 100
        loss = 2.3 * math.exp(-6 * share * math.sqrt(rate / 0.01)) + 1 - best + abs(draw.gauss(0, 0.01))
        train = {"loss": loss, "lr": rate * (1 - share), "samples_per_s": speed * draw.uniform(0.9, 1.0)}
        train |= {"data_wait": 0.01, "peak_memory_mib": 500.0 + 4 * width}
        lines.append({"global_step": 10 * step, "epoch": 1 + step // 10, "split": "train", **train})
        if step % 10 == 0:
            val = {"loss": 1.1 * loss, "accuracy": best * (1 - math.exp(-8 * share))}
            lines.append({"global_step": 10 * step, "epoch": step // 10, "split": "val", **val})
    last = {name: lines[-1][name] for name in ("loss", "accuracy")}
    monitored = {"metric": "val/accuracy", "mode": "max", "value": last["accuracy"], "loss": last["loss"]}
    summary = json.loads((template / "summary.json").read_text())
    summary |= {"best": monitored | {"global_step": 1000, "epoch": 10}, "last": last, "global_step": 1000}
    summary |= {"test": {"loss": loss, "accuracy": best - 0.002 + draw.gauss(0, 0.001)}}
    summary |= {"wall_s": 1000 * 640 / speed, "startup_s": draw.uniform(1, 2)}
    if number % 40 == 39:
        error = "diverged: the training loss is nan at step 40"
        summary |= {"status": "failed", "error": error, "best": None, "last": {}, "global_step": 40}
        lines = lines[:4]
    elif number % 50 == 49:
        summary |= {"status": "running", "global_step": 300}
        lines = lines[:30]
    elif number % 60 == 59:
        resumed = folder.with_name(str(number - 1)) / "checkpoints" / "step_0000000500.safetensors"
        summary["resumed_from"] = str(resumed)
    if summary["status"] != "finished":
        del summary["test"]
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
