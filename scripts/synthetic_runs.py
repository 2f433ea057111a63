"""Folders of runs to try reports with: `python scripts/synthetic_runs.py FOLDER [COUNT]`.

One real run is trained, and copied with other settings, metrics and curves. Some runs are failed, killed, running or resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RATES = (0.001, 0.003, 0.01, 0.03)
WIDTHS = (16, 32, 64)
SEEDS = 5
ERROR = "diverged: the training loss is nan at step 40"


def make_runs(template: Path, root: Path, count: int, steps: int = 100) -> None:
    """Write `count` run directories into `root`, named 0, 1, ...

    Args:
        template: a finished run directory of `data=digits model=small_cnn`.
        root: gets the runs.
        count: how many.
        steps: records of the training loss in each.
    """
    config, environment = (template / "config.yaml").read_text(), (template / "environment.json").read_text()
    summary = json.loads((template / "summary.json").read_text())
    settings = [(rate, width, amp) for amp in (False, True) for width in WIDTHS for rate in RATES]
    for number in range(count):
        rate, width, amp = settings[number // SEEDS % len(settings)]
        seed = number % SEEDS + SEEDS * (number // (SEEDS * len(settings)))
        draw = random.Random(number)
        folder = root / str(number)
        folder.mkdir(parents=True)
        text = re.sub(r"^seed: .*$", f"seed: {seed}", config, flags=re.MULTILINE)
        text = re.sub(r"^amp: .*$", f"amp: {str(amp).lower()}", text, flags=re.MULTILINE)
        text = re.sub(r"^  lr: .*$", f"  lr: {rate}", text, flags=re.MULTILINE)
        text = re.sub(r"width: \d+", f"width: {width}", text)
        (folder / "config.yaml").write_text(text)
        words = [f"seed={seed}", f"optimizer.lr={rate}", f"model.width={width}", f"amp={str(amp).lower()}"]
        (folder / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
        (folder / "environment.json").write_text(environment)
        best = 0.99 - 0.03 * abs(math.log10(rate / 0.01)) - 0.4 / width + draw.gauss(0, 0.003)
        speed = 4000 * 32 / width * (1.5 if amp else 1) * draw.uniform(0.95, 1.05)
        lines, curve = [], 0.0
        for step in range(1, steps + 1):
            share = step / steps
            curve = 2.3 * math.exp(-6 * share * math.sqrt(rate / 0.01)) + 1 - best + abs(draw.gauss(0, 0.01))
            train = {"loss": curve, "lr": rate * (1 - share), "samples_per_s": speed * draw.uniform(0.9, 1.0)}
            train |= {"data_wait": 0.01, "peak_memory_mib": 500.0 + 4 * width}
            lines.append({"global_step": 10 * step, "epoch": 1 + step // 10, "split": "train", **train})
            if step % 10 == 0:
                val = {"loss": 1.1 * curve, "accuracy": best * (1 - math.exp(-8 * share))}
                lines.append({"global_step": 10 * step, "epoch": step // 10, "split": "val", **val})
        tested = {"loss": curve, "accuracy": best - 0.002 + draw.gauss(0, 0.001)}
        metric = {"metric": "val/accuracy", "mode": "max", "value": lines[-1]["accuracy"], "loss": lines[-1]["loss"]}
        metric |= {"global_step": 10 * steps, "epoch": 10}
        own = summary | {"best": metric, "test": tested, "global_step": 10 * steps, "wall_s": 1000 * 640 / speed}
        own |= {"last": {"loss": lines[-1]["loss"], "accuracy": lines[-1]["accuracy"]}, "startup_s": draw.uniform(1, 2)}
        if number % 40 == 39:
            own |= {"status": "failed", "error": ERROR, "best": None, "last": {}, "global_step": 40}
            own.pop("test")
            lines = lines[:4]
        elif number % 50 == 49:
            own |= {"status": "running", "global_step": 300}
            own.pop("test")
            lines = lines[:30]
        elif number % 60 == 59:
            own["resumed_from"] = str(root / str(number - 1) / "checkpoints" / "step_0000000500.safetensors")
        (folder / "summary.json").write_text(json.dumps(own, indent=2))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def trained(folder: Path) -> Path:
    """The directory of a short run in `folder`."""
    words = ["model=small_cnn", "epochs=1", "threads=1", "logger=none", f"output_root={folder}"]
    done = subprocess.run([sys.executable, "-m", "runner", "train", *words], capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def main() -> None:
    """Train one run and copy it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int, nargs="?", default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make_runs(trained(Path(scratch)), options.folder, options.count)


if __name__ == "__main__":
    main()
