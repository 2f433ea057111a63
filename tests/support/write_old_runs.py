"""Writes what later versions must use, for `tests/test_old_runs.py`: runs that were killed, and the public names.

`PYTHONPATH=src python tests/support/write_old_runs.py tests/fixtures/VERSION` at the release. It adds what uninterrupted runs of
the same words end with, and on which machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import runner
from runner.config import keys
from runner.config.schema import VERBS as SCHEMAS
from runner.config.sources import Sources
from runner.tracking.environment import environment
from runner.verbs._table import VERBS

# Ends a process at a step, unless `KILL_RATE` names another learning rate, and before it the one that started it.
SITE = """
import os, signal
from pathlib import Path

if "KILL_AT" in os.environ:
    from runner.engine import callbacks

    def on_step(self, loop):
        rate = str(loop.state.optimizer.param_groups[0]["initial_lr"])
        if loop.state.position.global_step == int(os.environ["KILL_AT"]) and rate == os.environ.get("KILL_RATE", rate):
            os.kill(int(Path(os.environ["KILL_FIRST"]).read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks.Progress.on_step = on_step
"""
DIGITS = (
    *("device=cpu", "threads=1", "logger=none", "log.progress=false", "log.curves=false", "log.pictures=false"),
    *("data.num_workers=0", "checkpoint.async=false", "checkpoint.min_seconds=0", "checkpoint.keep=1", "epochs=3"),
    *("data=digits", "model=mlp", "model.hidden=[8]", "model.dropout=0.1", "data.batch_size=128"),
)
RATES = ("0.01", "0.02", "0.03")
RUNS = {
    "plain": DIGITS,
    "averaged": (*DIGITS, "optimizer=muon", "transform=mix", "ema=0.9", "accumulate=2", "data.batch_size=64"),
    "sweep": (*DIGITS, "--multirun", f"optimizer.lr={','.join(RATES)}"),
}
STEP = 13
"""Its checkpoint is the last one that is written before a run is killed: in the middle of the second epoch."""


def public_names() -> dict[str, Any]:
    """The names that docs/project/stability.md promises, sorted."""
    sources = Sources()
    options = [option for group in sources.groups() for option in sources.options(group)]
    targets = {
        target for each in options for target in re.findall(r"_target_: (runner\.[\w.]+)", each.path.read_text())
    }
    return {
        "verbs": sorted(VERBS),
        "python": sorted(runner.__all__),
        "keys": {verb: sorted(keys.all_keys(schema)) for verb, schema in SCHEMAS.items()},
        "options": sorted(f"{option.group}={option.name}" for option in options),
        "targets": sorted(targets),
    }


def train(folder: Path, *words: str, **variables: str) -> int:
    """The exit status of the program, in a folder."""
    (folder / "sitecustomize.py").write_text(SITE)
    path = f"{folder}:{os.environ['PYTHONPATH']}"
    known = os.environ | variables | {"PYTHONPATH": path, "KILL_FIRST": f"{folder}/pid"}
    program = subprocess.Popen([sys.executable, "-m", "runner", "train", *words], cwd=folder, env=known)
    (folder / "pid").write_text(str(program.pid))
    return program.wait()


def write(name: str, folder: Path, kept: Path) -> dict[str, str]:
    """Train one of `RUNS` to the end, and again until it is killed; keep the latter, and the weights of the former."""
    place = "sweep.dir" if name == "sweep" else "hydra.run.dir"
    words = (*RUNS[name], f"checkpoint.every_steps={STEP}")
    assert train(folder, *words, f"{place}=whole") == 0
    kill = {"KILL_AT": str(STEP + 1)} | ({"KILL_RATE": RATES[1]} if name == "sweep" else {})
    assert train(folder, *words, f"{place}={name}", **kill) == -signal.SIGKILL
    time.sleep(1)  # until the job of a sweep has ended, too
    for path in [*(folder / name).rglob("step_*"), *(folder / name).rglob(".lock")]:
        path.unlink()  # `last` is the same file as the step
    # Names and paths of this machine
    for path in (folder / name).rglob("environment.json"):
        found = json.loads(path.read_text()) | {"hostname": "a machine", "platform": "Linux", "memory_bytes": 0}
        found["command"] = ["python", *(found["command"][1:] if "-m" in found["command"] else ())]
        path.write_text(json.dumps(found, indent=2) + "\n")
    for path in (folder / name).rglob("*.log"):
        path.write_text(re.sub(rf"{folder}\S*/", "", path.read_text()))
    shutil.copytree(folder / name, kept / name)
    digests, tensors = dict[str, str](), dict[str, torch.Tensor]()
    for path in sorted((folder / "whole").rglob("summary.json")):
        job = path.parent.relative_to(folder / "whole")
        digests[str(Path(name, job))] = json.loads(path.read_text())["weights_sha256"]
        saved = safetensors.torch.load_file(path.parent / "checkpoints" / "last.safetensors")
        own = {key: value for key, value in saved.items() if "/" not in key or key.startswith("averaged/")}
        tensors |= {f"{Path(name, job)}:{key}": value for key, value in own.items()}
    safetensors.torch.save_file(tensors, kept / f"{name}.safetensors")
    return digests


def main(kept: Path) -> None:
    """Write all of `RUNS`, what they end with, and `public_names`."""
    kept.mkdir(parents=True)  # the files of a version are never rewritten
    digests = dict[str, str]()
    for name in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            digests |= write(name, Path(scratch), kept)
    build, cpu = environment()["torch"], environment()["cpu"]["model"]
    machine = {"torch": build["version"], "capability": build["cpu_capability"], "cpu": cpu}
    (kept / "expected.json").write_text(json.dumps({"machine": machine, "weights_sha256": digests}, indent=2) + "\n")
    (kept / "names.json").write_text(json.dumps(public_names(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
