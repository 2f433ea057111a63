"""Writes runs of an earlier version that were killed, for `tests/test_old_runs.py`.

`PYTHONPATH=src python tests/support/write_old_runs.py FOLDER`, in a checkout of the commit that FOLDER is named after. It adds what
uninterrupted runs of the same words end with, and on which machine. FOLDER already has `old_parts.py`.
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

import safetensors.torch
import tar_files
import torch
from drawn_masks import draw

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
FAST = (
    *("device=cpu", "threads=1", "logger=none", "log.progress=false", "log.curves=false", "data.num_workers=0"),
    *("checkpoint.async=false", "checkpoint.min_seconds=0", "checkpoint.keep=1", "epochs=3"),
)
DIGITS = (*FAST, "data=digits", "model=mlp", "model.hidden=[8]", "model.dropout=0.1", "data.batch_size=128")
SHARDS = (*FAST, "data=shards", "data.root=tars", "data.image_size=8", "data.batch_size=2", "data.split.test=0")
MASKS = (*FAST, "experiment=segmentation", "data.root=shapes", "data.image_size=16", "data.batch_size=2")
NETWORKS = (
    *FAST, "--config-dir=conf", "transform=none", "data.batch_size=12", "data.images=[]", "data.dataset._target_=old_parts.Digits",
    "loss=none", "model._target_=torch.nn.Linear", "~model.dropout", "~model.width", "+model.in_features=8",
    "+model.out_features=64", "task._target_=old_parts.Networks", "optimizer=two",
)  # fmt: skip
RATES = ("0.01", "0.02", "0.03")
RUNS = {
    "plain": (13, DIGITS),
    "averaged": (13, (*DIGITS, "ema=0.9", "accumulate=2", "data.batch_size=64", "on_oom=split")),
    "several": (8, NETWORKS),
    "shards": (8, (*SHARDS, "model=small_cnn", "model.width=2", "data.shuffle=blocks")),
    "segmentation": (
        6,
        (*MASKS, "model=small_cnn", "~model.width", "~model.dropout", "model._target_=old_parts.Pixels"),
    ),
    "sweep": (13, (*DIGITS, "--multirun", f"optimizer.lr={','.join(RATES)}")),
}
"""Words, and the step after whose checkpoint the run is killed, for each name."""
OPTION = "defaults:\n  - adam@generator\n  - sgd@discriminator\n  - _self_\n"


def train(folder: Path, *words: str, **environment: str) -> int:
    """The exit status of the program, in a folder."""
    (folder / "sitecustomize.py").write_text(SITE)
    path = f"{folder}:{os.environ['PYTHONPATH']}"
    variables = (
        os.environ | environment | {"PYTHONPATH": path, "RUNNER_TRUST": "old_parts", "KILL_FIRST": f"{folder}/pid"}
    )
    program = subprocess.Popen([sys.executable, "-m", "runner", "train", *words], cwd=folder, env=variables)
    (folder / "pid").write_text(str(program.pid))
    return program.wait()


def write(name: str, folder: Path, kept: Path) -> dict[str, str]:
    """Train one of `RUNS` to the end, and again until it is killed; keep the latter, and the weights of the former."""
    step, words = RUNS[name]
    place = "sweep.dir" if name == "sweep" else "hydra.run.dir"
    words = (*words, f"checkpoint.every_steps={step}")
    assert train(folder, *words, f"{place}=whole") == 0
    kill = {"KILL_AT": str(step + 1)} | ({"KILL_RATE": RATES[1]} if name == "sweep" else {})
    assert train(folder, *words, f"{place}={name}", **kill) == -signal.SIGKILL
    time.sleep(1)
    for path in [*(folder / name).rglob("step_*"), *(folder / name).rglob(".lock")]:
        path.unlink()  # `last` is the same file as the step
    for path in (folder / name).rglob("environment.json"):
        found = json.loads(path.read_text()) | {"hostname": "a machine", "platform": "Linux", "memory_bytes": 0}
        found["command"] = [
            "python",
            *(found["command"][1:] if "-m" in found["command"] else ()),
        ]  # paths of this machine
        path.write_text(json.dumps(found, indent=2) + "\n")
    for path in (folder / name).rglob("run.log"):
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
    """Write all of `RUNS`."""
    from runner.tracking.environment import environment

    for split, count in (("train", 3), ("val", 1)):
        for number in range(count):
            images = [(file, tar_files.encoded(int(Path(file).stem), 8) if file.endswith("png") else content)
                      for file, content in tar_files.samples(range(number * 4, number * 4 + 4), tar_files.cls)]  # fmt: skip
            tar_files.write_tar(kept / "tars" / split / f"{number}.tar", images)
    draw(kept / "shapes", train=8, val=4, size=16)
    digests = dict[str, str]()
    for name in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for entry in ("old_parts.py", "tars", "shapes"):
                copy = shutil.copytree if (kept / entry).is_dir() else shutil.copy
                copy(kept / entry, folder / entry)
            (folder / "conf" / "optimizer").mkdir(parents=True)
            (folder / "conf" / "optimizer" / "two.yaml").write_text(f"# Two.\n# train\n{OPTION}")
            digests |= write(name, folder, kept)
    found = environment()
    machine = {
        "torch": found["torch"]["version"],
        "capability": found["torch"]["cpu_capability"],
        "cpu": found["cpu"]["model"],
    }
    (kept / "expected.json").write_text(json.dumps({"machine": machine, "weights_sha256": digests}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
