"""What only a GPU shows, in parts of at most eight minutes: each prints Markdown tables, and writes their rows as JSON.

In 14 minutes, what matters most first; `--json` is written after each case, and after `--limit` seconds nothing more is measured:

    python scripts/gpu.py bits --limit 280 --json bits.json
    python scripts/gpu.py recipe --only profile both --limit 200 --json recipe.json --airbench path/to/airbench94_muon.py
    python scripts/gpu.py steps --only mlp resnet50 vit_tiny mlp_step mlp_graphs --limit 160 --json steps.json
    python scripts/gpu.py jpeg --limit 185 --json jpeg.json

The recipe is timed on random images unless `--cifar` names a folder of torchvision's CIFAR10. `faster_rcnn` needs
`faster-coco-eval`. `jpeg` needs about 2.5 GiB of /dev/shm with 16 workers, for their batches of 256 images of 224 pixels.
`--small` tries a part on the CPU, with tiny sizes that show nothing else. The loops that `runner` is compared with are in
`scripts/loops` and `scripts/peers`. They train between its epochs, in the same process; one with workers, Lightning's Trainer
and airbench's own file are processes that alternate with those of `runner`. Ratios are medians, with the smallest and the largest.
A measurement that fails is a row with the reason, and the exit status is 1. Where there is no GPU, this lists the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmark_peers import job_of, options
from peers.machine import installed, machine
from peers.processes import MeasurementFailed, measure, run, turns, words
from recipes import records

ROOT = Path(__file__).resolve().parents[1]
TURNS = 8
SYNC = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
QUIET = ("logger=none", "log.curves=false", "evaluate.every_epochs=null", "evaluate.test=false")
SGD = ("data.split.val=0", "optimizer=sgd", "optimizer.lr=0.02", "scheduler=constant", "checkpoint.every_epochs=null",
       "checkpoint.min_seconds=0")  # fmt: skip
TIMED = (*QUIET, "log.every_steps=50")  # as the loops read the loss
FAST = ("amp=bf16", "channels_last=true")

Row = dict[str, str | float]  # cells by column


@dataclass(frozen=True)
class Asked:
    """What is measured where: the options, a folder to work in, and when the time is over."""

    small: bool
    device: str
    folder: Path
    deadline: float
    airbench: Path | None = None
    cifar: Path | None = None

    @property
    def common(self) -> tuple[str, ...]:
        """Words for every run."""
        return (f"device={self.device}", f"threads={self.threads}")

    @property
    def threads(self) -> int:
        """CPU threads of torch."""
        return 1 if self.device == "cpu" else 4

    def left(self) -> float:
        """Seconds until the time is over, when it raises `MeasurementFailed`."""
        if (left := self.deadline - time.monotonic()) <= 0:
            raise MeasurementFailed("not measured before the time was over (--limit)")
        return left

    def call(self, *command: str, allowed: Sequence[int] = (0,)) -> str:
        """What `python COMMAND` prints, which must end with one of these statuses."""
        status, printed = run([sys.executable, *command], ROOT, self.threads, self.left())
        if status not in allowed:
            raise MeasurementFailed(f"status {status}: {printed}")
        return printed

    def train(self, *words: str, allowed: int = 0) -> None:
        """Run `runner train`, which must end with this status."""
        self.call("-m", "runner", "train", *words, allowed=(allowed,))

    def images(self, count: int, shrink: float) -> Path:
        """A folder with JPEGs of about 500x375 pixels, divided by `shrink`, in `train`."""
        if not (root := self.folder / "jpeg").exists():
            self.call("-c", f"from benchmark_folder import *; make_folder(Path('{root}/train'), {count}, {shrink})")
        return root

    def cifar10(self) -> tuple[str, ...]:
        """Words for CIFAR-10, or for images that stand for it."""
        if self.cifar is None and not self.small:
            raise MeasurementFailed("needs --cifar, a folder of torchvision's CIFAR10")
        made = ("data=synthetic", "data.image_size=32", "data.dataset.samples=64", "data.batch_size=32", "epochs=1")
        return made if self.cifar is None else (f"data.root={self.cifar.resolve()}",)


def reason(error: Exception) -> str:
    """Why a measurement failed, in a line: the first one that speaks of an error, or the last."""
    text = str(error) if isinstance(error, MeasurementFailed) else repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    late = text.startswith("not ")  # finished, or measured: what follows is where it was
    return next((line for line in lines if late or "error" in line.lower()), lines[-1])[:300]


class Kill:
    """A callback that kills the run after this step, once; `file` gets the step of each start, and of the kill."""

    def __init__(self, file: str, step: int) -> None:
        self._file, self._step = Path(file), step

    def _write(self, step: int) -> None:
        with self._file.open("a") as file:
            file.write(f"{step} ")

    def on_start(self, loop: Any) -> None:
        """Write where the run starts."""
        self._write(loop.state.position.global_step)

    def on_step(self, loop: Any) -> None:
        """Kill the process."""
        if loop.state.position.global_step == self._step and len(self._file.read_text().split()) == 1:
            self._write(self._step)
            os.kill(os.getpid(), signal.SIGKILL)


def weights_of(asked: Asked, words: Sequence[str], kill: int | None = None) -> str:
    """SHA-256 of the weights of a run that is killed after this step, within an epoch, and resumed; or of one left alone."""
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        run, first = f"hydra.run.dir={folder}/run", [*words, *asked.common]
        if kill is None:
            asked.train(*first, run)
        else:
            callback = f"callbacks.kill={{_target_: gpu.Kill, file: {folder}/steps, step: {kill}}}"
            asked.train(*first, callback, run, allowed=-signal.SIGKILL)
            asked.train(f"ckpt_path={folder}/run", "trust=[gpu]", run)
            steps = (Path(folder) / "steps").read_text().split()
            if len(steps) != 3 or steps[:2] != ["0", str(kill)] or not 0 < int(steps[2]) <= kill:
                raise MeasurementFailed(f"start, kill after step {kill} and resume: at {', '.join(steps)}")
        sha: str = json.loads((Path(folder) / "run" / "summary.json").read_text())["weights_sha256"]
        return sha


def bits(asked: Asked, *setting: str, data: Sequence[str] = ()) -> list[Row]:
    """Two runs that are left alone, and one that is killed; all three again deterministic, if they differ."""
    began, size = time.monotonic(), (16, 512, 32) if asked.small else (32, 4096, 128)
    model = ("model=small_cnn", "model.width=8") if asked.small else ("model=resnet18_cifar",)
    synthetic = (
        "data=synthetic",
        *map("{}={}".format, ("data.image_size", "data.dataset.samples", "data.batch_size"), size),
    )
    words = (*model, *(data or synthetic), *QUIET, "data.hflip=0.5", "checkpoint.every_steps=5", "epochs=3", *setting)
    first, second, killed = (weights_of(asked, words, kill) for kill in (None, None, 17))
    deterministic, same = "deterministic=true" in setting, first == second
    repeated, resumed = ("OTHER BITS",) * 2 if deterministic else ("not deterministic", "differs, not deterministic")
    row: Row = {"setting": " ".join(setting) or "as it comes", "repeated": "same bits" if same else repeated,
                "killed and resumed": "cannot be told" if not same else "same bits" if killed == first else resumed,
                "SHA-256": first[:16], "seconds": time.monotonic() - began}  # fmt: skip
    again = not deterministic and not first == second == killed
    return [row, *(bits(asked, *setting, "deterministic=true", data=data) if again else [])]


def bits_of_workers(asked: Asked) -> list[Row]:
    """JPEGs that 0, 4 and 12 workers read: all have the bits of the first."""
    count, shrink, size, batch = (256, 8, 32, 16) if asked.small else (2048, 2, 64, 64)
    data = ("data=image_folder", f"data.root={asked.images(count, shrink)}", "data.placement=disk", "data.split.test=0",
            f"data.image_size={size}", f"data.batch_size={batch}")  # fmt: skip
    found = [
        bits(asked, f"data.num_workers={count}", "deterministic=true", data=data)[0]
        for count in ((0, 2) if asked.small else (0, 4, 12))
    ]
    return [
        row | {"as without workers": "same bits" if row["SHA-256"] == found[0]["SHA-256"] else "OTHER BITS"}
        for row in found
    ]


class Training(NamedTuple):
    """Epochs and steps of a training, its seconds, those without a cold start, and accuracy with test-time augmentation."""

    epochs: int
    steps: int
    seconds: float
    warm: float
    accuracy: float


def of_file(lines: Iterable[str]) -> Iterator[Training]:
    """The runs that airbench's file prints, with the first, which warms up. Whitening is timed, and evaluation is not."""
    epochs, seconds = 0, 0.0
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 6 and cells[1].isdigit():
            epochs, seconds = epochs + 1, float(cells[5])
        elif len(cells) == 6 and cells[1] == "eval":
            yield Training(epochs, epochs * 25, seconds, seconds, float(cells[4]))  # steps of 2,000 images
            epochs = 0


def airbench(file: Path, data: Path | None, runs: int, limit_s: float) -> list[Training]:
    """Run the file until it has finished so many runs; without `data` on random images."""
    with tempfile.TemporaryDirectory() as folder:
        (place := Path(folder) / "cifar10").mkdir()  # where it looks for the data, and writes them as tensors
        for path in data.resolve().iterdir() if data else ():
            (place / path.name).symlink_to(path)
        for name, count in () if data else (("train", 50_000), ("test", 10_000)):
            images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8)
            made = {"images": images, "labels": torch.randint(10, (count,)), "classes": [*"abcdefghij"]}
            torch.save(made, place / f"{name}.pt")
        command = [sys.executable, "-u", str(file.resolve())]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            found = list(islice(of_file(process.stdout or ()), 1, 1 + runs))
            timer.cancel()
            process.kill()
    if not found:
        raise MeasurementFailed(f"{file.name} finished none of {runs} runs in {limit_s:.0f} s")
    return found


def seconds_of(lines: list[dict[str, Any]], batch_size: int) -> tuple[float, float]:
    """Seconds in which the batches of a run were trained, from its log lines; and if its first tenth took as long as the rest."""
    steps = [0, *(line["global_step"] for line in lines)]
    spans = list(zip(pairwise(steps), (batch_size / line["samples_per_s"] for line in lines), strict=True))
    whole = sum((last - first) * step_s for (first, last), step_s in spans)
    warm = [(last - first, step_s) for (first, last), step_s in spans if first >= steps[-1] // 10]
    return whole, sum(count * step_s for count, step_s in warm) * steps[-1] / sum(count for count, _ in warm)


def recipe_run(asked: Asked, seed: int) -> Training:
    """A run of the recipe."""
    batch, words = (32, asked.cifar10()) if asked.small else (1000, ("data.batch_size=1000",))
    if not asked.small:  # images of either kind take the same time
        words += (
            asked.cifar10() if asked.cifar else ("data=synthetic", "data.image_size=32", "data.dataset.samples=50000")
        )
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        run = Path(folder) / "run"
        given = ("experiment=cifar10_airbench", *QUIET, *words, *asked.common)
        asked.train(*given, f"hydra.run.dir={run}", f"seed={seed}")
        last = f"ckpt_path={run}/checkpoints/last.safetensors"
        asked.call("-m", "runner", "eval", last, "split=val", "tta=[flip,shifts]", f"output={run}/views")
        accuracy = json.loads((run / "views" / "eval_val.json").read_text())["tta"]["metrics"]["accuracy"]
        lines = records(run, "train")
        return Training(lines[-1]["epoch"], lines[-1]["global_step"], *seconds_of(lines, batch), accuracy)


def recipes(asked: Asked) -> list[Row]:
    """Half of the recipe's runs, those of airbench's file, and the other half."""
    half, file = 1 if asked.small else 2, asked.airbench

    def ours(first: int) -> list[Training]:
        return [recipe_run(asked, first + number) for number in range(half)]

    runs: list[tuple[str, Callable[[], list[Training]]]] = [("`experiment=cifar10_airbench`", partial(ours, 0))]
    if file is not None:
        runs.append((f"`{file.name}`", lambda: airbench(file, asked.cifar, 2 * half, min(240.0, asked.left() / 2))))
    runs.append((runs[0][0], partial(ours, half)))
    found: dict[str, list[Training]] = {}
    late: list[Row] = []
    for name, train in runs:
        try:
            found.setdefault(name, []).extend(train())
        except MeasurementFailed as error:
            late.append({"training": name, "why": reason(error)})
    return [recipe_row(name, each, asked.cifar is not None) for name, each in found.items() if each] + late


def recipe_row(name: str, found: Sequence[Training], real: bool) -> Row:
    """Median and range of the runs; per 1,000 images of CIFAR-10, as the numbers of epochs differ."""
    seconds, warm = ([getattr(each, name) for each in found] for name in ("seconds", "warm"))
    accuracy = statistics.mean(each.accuracy for each in found) if real else ""
    return {"training": name, "epochs": found[0].epochs, "steps": found[0].steps, "seconds": statistics.median(seconds),
            "from": min(seconds), "to": max(seconds), "seconds, warm": statistics.median(warm),
            "warm, ms per 1,000 images": statistics.median(warm) * 1e3 / (50 * found[0].epochs),
            "accuracy, mean": accuracy, "runs": len(found)}  # fmt: skip


def of_trace(events: Sequence[Mapping[str, Any]]) -> Row:
    """Launches and kernels of a step, how long the device works, copying among it, and idles, and how often the host waits."""
    steps = [event for event in events if event.get("name") == "step" and event.get("cat") == "user_annotation"]
    calls = [
        event
        for event in events
        if str(event.get("cat")).startswith("cuda_")
        and any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps)
    ]
    if not steps:
        return {"why": "the trace has no steps"}
    launches = {call["args"]["correlation"] for call in calls if "Launch" in call["name"]}
    known = {call.get("args", {}).get("correlation", 0) for call in calls} - {0}
    work = [each for each in events if each.get("cat") in ON_DEVICE and each["args"]["correlation"] in known]
    busy, end = 0.0, 0.0
    for each in sorted(work, key=lambda event: event["ts"]):
        last = each["ts"] + each["dur"]
        busy += max(0.0, last - max(end, each["ts"]))
        end = max(end, last)
    idle = end - min((each["ts"] for each in work), default=end) - busy
    found = {"launches": len(launches), "kernels": sum(each["cat"] == "kernel" for each in work),
             "busy, ms (traced)": busy / 1e3, "idle, ms (traced)": idle / 1e3,
             "host waits": sum(call["name"] in SYNC for call in calls)}  # fmt: skip
    return {name: total / len(steps) for name, total in found.items()}


def profile(asked: Asked, *words: str) -> list[Row]:
    """What a step of the recipe consists of."""
    count, samples, batch = (1, 64, 8) if asked.small else (10, 50_000, 1000)
    data = ("data=synthetic", "data.image_size=32", f"data.dataset.samples={samples}", f"data.batch_size={batch}")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        output = Path(folder) / "profile"
        counts = (f"steps={count}", f"trace_steps={count}", f"warmup_steps={count}", "budget_s=60", f"output={output}")
        asked.call("-m", "runner", "profile", "experiment=cifar10_airbench", *data, *asked.common, *counts, *words)
        timed = json.loads((output / "profile.json").read_text())["step_ms"]
        traced = of_trace(json.loads((output / "trace.json").read_text())["traceEvents"])
    return [{"a step of": " ".join(["the recipe", *words]), "ms, not traced": timed["median"], **traced}]


Turns = list[dict[str, float]]


def alternately(count: int, names: Sequence[str], seconds: Callable[[str], float]) -> tuple[Turns, list[Row]]:
    """Seconds by name in each turn; every other turn is in reverse. If a later one fails, those before, and a row about it."""
    found: Turns = []
    for number in range(count):
        try:
            found.append({name: seconds(name) for name in (names, names[::-1])[number % 2]})
        except MeasurementFailed as error:
            if not found:
                raise
            return found, [{"not measured": f"turn {number + 1} of {count}", "why": reason(error)}]
    return found, []


def ratio_row(case: str, other: str, found: Sequence[Mapping[str, float]]) -> Row:
    """How long `runner` takes in terms of another loop, from the seconds of both in each turn."""
    ratios = [turn["runner"] / turn[other] for turn in found]
    ours, theirs = (statistics.median(turn[name] for turn in found) for name in ("runner", other))
    return {"case": case, "against": f"`{other}`", "its step, ms": theirs * 1e3, "of `runner`, ms": ours * 1e3,
            "ratio": statistics.median(ratios), "from": min(ratios), "to": max(ratios), "turns": len(ratios)}  # fmt: skip


def step(asked: Asked, case: str, words: Sequence[str], loops: dict[str, Any], epochs: int) -> list[Row]:
    """A run of `runner` with other loops between its epochs, in turns of so many epochs."""
    epochs, count, warmup = (1, 2, 1) if asked.small else (epochs, TURNS, 2)
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        given = ("train", *words, *TIMED, *asked.common, f"output_root={name}", f"epochs={epochs * (count + warmup)}")
        found = turns(given, loops, Path(name), asked.threads, epochs, warmup, asked.left())
    return [ratio_row(case, other, found) for other in loops]


def device_images(asked: Asked, model: str, compiled: bool = False) -> list[Row]:
    """ResNet-50 on images of 224 pixels, or ViT-Tiny on images of 32, in the device's memory."""
    size, batch, samples = (32, 4, 8) if asked.small else (224, 256, 6144) if model == "resnet50" else (32, 256, 25_600)
    of_model = ("model=torchvision", "model.name=resnet50") if model == "resnet50" else ("model=vit_tiny",)
    words = (*SGD, *FAST, *of_model, "data=synthetic", f"data.image_size={size}", f"data.dataset.samples={samples}",
             f"data.batch_size={batch}", "transform=none", f"compile={str(compiled).lower()}")  # fmt: skip
    loop = {"loop": "loops.device_images", "model": model, "device": asked.device, "samples": samples, "size": size,
            "batch_size": batch, "compiled": compiled}  # fmt: skip
    case = f"{model}, {size} pixels, batch {batch}, bf16, NHWC{', compiled' if compiled else ''}"
    return step(asked, case, words, {"device_images": loop}, 1)


def mlp(asked: Asked, *further: str) -> list[Row]:
    """An MLP on digits, against a loop without and one with CUDA graphs."""
    epochs = 40
    given = options(["--case", "digits", "--device", asked.device, "--epochs", str(epochs * (TURNS + 2))])
    job, file = job_of(given, "digits", asked.threads, None), asked.folder / "job.json"
    job.write(file)
    ours = ("train", "callbacks.", "epochs=", "device=", "threads=", "output_root=", "evaluate.")
    common = [*SGD[-2:], *(word for word in words(job, file) if not word.startswith(ours))]  # the loops save nothing
    names = {"bare_loop": "peers.bare_loop"} | ({} if asked.device == "cpu" else {"mlp_graph": "loops.mlp_graph"})
    loops = {name: {"loop": module, "job": file} for name, module in names.items()}
    return step(asked, " ".join(["MLP on digits, batch 64", *further]), [*common, *further], loops, epochs)


def lightning(asked: Asked) -> list[Row]:
    """The MLP by Lightning's Trainer, each training a process."""
    if installed("lightning") is None:
        return [{"lightning": "not installed"}]
    given = options(["--case", "digits", "--device", asked.device, "--epochs", "2" if asked.small else "41"])
    job = job_of(given, "digits", asked.threads, None)
    found, late = alternately(
        1 if asked.small else 3,
        ("runner", "lightning"),
        lambda name: measure(replace(job, contender=name), asked.left())["step_s"],
    )
    return [ratio_row("MLP on digits, batch 64", "lightning", found), *late]


def scenes(asked: Asked, model: str) -> list[Row]:
    """Detection or segmentation of drawn scenes."""
    task, further = ("segmentation", ["model.aux_loss=true"])
    if model.startswith("fasterrcnn"):
        task, further = ("detection", ["loss=none", "+data.dataset.boxes=true"])
    batch, steps = (2, 2) if asked.small else (8, 20) if asked.device != "cpu" else (2 if task == "detection" else 8, 2)
    words = (*SGD, f"task={task}", f"model=torchvision_{task}", *further, f"model.name={model}", "transform=none",
             "transform.sample_train=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip}]", "data.images=['0']",
             "data.dataset._target_=faults.scenes.Scenes", f"+data.dataset.samples={steps * batch}", f"data.batch_size={batch}",
             "data.num_workers=0", "data.drop_last=true", "data.split.test=0", "data.normalize.mean=[0.0]",
             "data.normalize.std=[1.0]", "optimizer.lr=0.0001", "optimizer.nesterov=false")  # fmt: skip
    loop = {"loop": "loops.scenes", "model": model, "device": asked.device, "samples": steps * batch,
            "batch_size": batch}  # fmt: skip
    return step(asked, f"{model}, batch {batch}", words, {"torchvision_style": loop}, 1)


def jpeg(asked: Asked) -> list[Row]:
    """ResNet-18 on JPEGs by `runner`, and by a loop with `ImageFolder` and a `DataLoader`, in alternating processes."""
    count, size, batch, workers = (32, 32, 8, 2) if asked.small else (8192, 224, 256, os.cpu_count() or 1)
    root, epochs, warmup = asked.images(count, 8 if asked.small else 1), *((2, 1) if asked.small else (5, 2))
    crop = f"transform.sample_train=[{{_target_: runner.data.transforms.crops.RandomResizedCrop, size: {size}}}]"
    flip = "transform.train=[{_target_: runner.data.transforms.augment.RandomFlip}]"
    words = ("train", *TIMED, *SGD, *FAST, *asked.common, "model=torchvision", "model.name=resnet18", "data=image_folder",
             f"data.root={root}", f"data.image_size={size}", "data.split.test=0", crop, flip, f"data.batch_size={batch}",
             "data.drop_last=true", f"data.num_workers={workers}", f"epochs={epochs}")  # fmt: skip
    loop = {"loop": "loops.jpeg", "root": str(root), "device": asked.device, "size": size, "batch_size": batch,
            "workers": workers}  # fmt: skip
    result = asked.folder / "seconds.json"

    def seconds(name: str) -> float:
        if name == "runner":
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                ours = turns(
                    (*words, f"output_root={folder}"), {}, Path(folder), asked.threads, 1, warmup, asked.left()
                )
            return statistics.median(turn["runner"] for turn in ours)
        asked.call("-m", "peers.turns", json.dumps(loop), str(epochs), str(result))
        return statistics.median(json.loads(result.read_text())[warmup:]) / (count // batch)

    found, late = alternately(1 if asked.small else 3, ("runner", "jpeg"), seconds)
    row = ratio_row(f"resnet18, {count} JPEGs, {size} pixels, batch {batch}, {workers} workers", "jpeg", found)
    rates = [batch * 1e3 / float(row[name]) for name in ("of `runner`, ms", "its step, ms")]
    return [row | {"images/s of `runner`": rates[0], "of the loop": rates[1]}, *late]


def starts(asked: Asked, *words: str) -> list[Row]:
    """Seconds of runs of two steps: two of each setting, of which the first finds no compiled kernels."""
    rows: list[Row] = []
    for setting in ("compile=false", "compile=true", *(() if asked.small else ("compile=step",))):
        with tempfile.TemporaryDirectory(dir=asked.folder) as name:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor", "TRITON_CACHE_DIR": f"{name}/triton"}
            given = (*words, *QUIET, *SGD, *asked.common, "epochs=null", "max_steps=2", setting, f"output_root={name}")
            found = []
            for _ in range(2):
                began = time.monotonic()
                with patch.dict(os.environ, caches):
                    asked.train(*given)
                found.append(time.monotonic() - began)
        eager = float(rows[0]["second"]) if rows else found[1]
        rows.append({"two steps of": " ".join([words[-1], setting]), "first start, s": found[0], "second": found[1],
                     "more than without, s": found[0] - eager, "at the second": found[1] - eager})  # fmt: skip
    return rows


def cifar10(asked: Asked) -> list[Row]:
    """Three seeds by `recipes.py`, which compares them with the stored runs."""
    words = (*asked.cifar10(), *asked.common, *(("model.width=4",) if asked.small else ()))
    seeds = "1" if asked.small else "3"
    command = ("scripts/recipes.py", "cifar10_resnet18", "--folder", f"{asked.folder}/sweep", "--seeds", seeds)
    printed = asked.call(*command, *words, allowed=(0, 1, 4))  # below the bar, or worse than the stored runs
    lines = re.findall(r"^(?:\d+: )?accuracy.*$", printed, re.MULTILINE)
    return [{"`experiment=cifar10_resnet18`, by seed and together": line.strip()} for line in lines]


def of_tests(printed: str) -> list[Row]:
    """Pytest's last line, and the tests that failed."""
    totals = re.findall(r"\d+ (?:passed|failed|error|skipped).*", printed) or ["nothing ran"]
    failed = [line.split(" - ")[0] for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [{"tests with `-m gpu`": totals[-1].strip("= \r"), "failed": "; ".join(failed)}]


def tests(asked: Asked) -> list[Row]:
    """The tests that need a GPU; without one they are skipped."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in path.read_text())
    pytest = ("-m", "pytest", "-q", "-n", "4", "-p", "no:benchmark", "--color=no", "-m", "gpu")
    return of_tests(asked.call(*pytest, *files, allowed=(0, 1)))


Cases = dict[str, Callable[[Asked], list[Row]]]


def of(measure: Callable[..., list[Row]], **cases: str) -> Cases:
    """Cases of a measurement that differ in their words."""
    return {name: lambda asked, words=words: measure(asked, *words.split()) for name, words in cases.items()}  # type: ignore[misc]


BATCHES = "data=synthetic data.dataset.samples=512 data.batch_size=256 transform=none amp=bf16 channels_last=true"
PARTS: dict[str, tuple[str, Cases]] = {
    "bits": ("runs killed within an epoch and resumed, repeated, and with other numbers of workers: SHA-256", of(
        bits, plain="", deterministic="deterministic=true", bf16="amp=bf16 channels_last=true ema=0.99",
        fp16="amp=fp16 accumulate=2 grad_clip.norm=1 epochs=5", compiled="amp=bf16 compile=true",
    ) | {"workers": bits_of_workers}),
    "recipe": ("the recipe for CIFAR-10 against the file that it follows, and what its step consists of", {
        "both": recipes, **of(profile, profile="", profile_compiled="compile=true", profile_step="compile=step")}),
    "steps": ("the time of a step beside that of loops by hand and of Lightning", {
        "resnet50": partial(device_images, model="resnet50"), "vit_tiny": partial(device_images, model="vit_tiny"),
        "resnet50_compiled": partial(device_images, model="resnet50", compiled=True),
        **of(mlp, mlp="", mlp_step="compile=step"), "lightning": lightning,
        **of(scenes, faster_rcnn="fasterrcnn_mobilenet_v3_large_320_fpn", deeplab="deeplabv3_mobilenet_v3_large"),
        **of(mlp, mlp_graphs="compile=step compiler.mode=reduce-overhead")}),
    "jpeg": ("training from JPEG files, images a second", {"jpeg": jpeg}),
    "compile": ("what compilation takes at the first and at the second start", of(
        starts, compile_mlp="data=digits model=mlp",
        compile_resnet50=f"{BATCHES} data.image_size=224 model=torchvision model.name=resnet50")),
    "cifar10": ("CIFAR-10 with ResNet-18, three seeds", {"cifar10": cifar10}),
    "tests": ("every test with the marker gpu", {"tests": tests}),
}  # fmt: skip
LARGE = {"compiled", "profile_compiled", "profile_step", "resnet50_compiled", "mlp_step", "mlp_graphs",
         "compile_resnet50"}  # fmt: skip  # not with --small
TOGETHER = {"bits": 6}  # cases at the same time, where no time is compared


def measured(case: Callable[[Asked], list[Row]], asked: Asked, name: str) -> list[Row]:
    """The rows of a case; if it fails, one with the reason."""
    try:
        return case(asked)
    except Exception as error:  # whatever it is, the other cases are measured
        return [{name: "not measured", "why": reason(error)}]


def table(asked: Asked, cases: Cases, together: int, save: Callable[[list[Row]], None]) -> list[Row]:
    """Measure, print and save the rows as they come, with the head of a table wherever the columns change."""
    rows: list[Row] = []
    one_by_one = threading.Lock()

    def show(name: str) -> None:
        found = measured(cases[name], asked, name)
        with one_by_one:
            for row in found:
                if not rows or list(row) != list(rows[-1]):
                    print("\n| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
                cells = [
                    value
                    if isinstance(value, str)
                    else f"{value:,.{0 if value >= 100 or isinstance(value, int) else 3}f}"
                    for value in row.values()
                ]
                print("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |", flush=True)
                rows.append(row)
            save(rows)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(show, cases))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a part, or list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some of its cases")
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--device", default="cuda", help="where to train")
    parser.add_argument("--json", type=Path, help="file for the rows, the machine and the versions")
    parser.add_argument("--airbench", type=Path, help="the file that the recipe for CIFAR-10 follows")
    parser.add_argument("--cifar", type=Path, help="folder of torchvision's CIFAR10; needed by the part cifar10")
    parser.add_argument("--limit", type=float, default=470.0, help="seconds after which nothing more is measured")
    given = parser.parse_args(argv)
    device = "cpu" if given.small else given.device
    absent = device != "cpu" and not torch.cuda.is_available()
    if absent or given.part is None:
        print("there is no CUDA device; with one, these run:" if absent else "the parts, with their cases:")
        for name, (what, cases) in PARTS.items():
            print(f"  python scripts/gpu.py {name}: {what}\n    {', '.join(cases)}")
        return 0
    cases = {name: case for name, case in PARTS[given.part][1].items() if not given.small or name not in LARGE}
    if unknown := set(given.only or ()) - set(cases):
        parser.error(f"--only: {', '.join(sorted(unknown))}; allowed for {given.part}: {', '.join(cases)}")
    began, card = time.monotonic(), torch.cuda.get_device_name() if device != "cpu" else "CPU"
    command = shlex.join(["python", "scripts/gpu.py", *(sys.argv[1:] if argv is None else argv)])
    about = {"part": given.part, "command": command, "card": card, **machine()}
    about["packages"] |= {name: installed(name) for name in ("pillow", "torchcodec")}  # decoders of JPEG
    about["packages"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    print(f"{card}, {about['cores']} cores, torch {torch.__version__}, Python {about['python']}: `{command}`")
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(given.small, device, Path(folder), began + given.limit, given.airbench, given.cifar)
        chosen = {name: cases[name] for name in given.only or cases}

        def save(rows: list[Row]) -> None:
            if given.json:
                found = about | {"seconds": time.monotonic() - began, "rows": rows}
                given.json.write_text(json.dumps(found, indent=2) + "\n")

        rows = table(asked, chosen, TOGETHER.get(given.part, 1), save)
    return int(any("why" in row or "OTHER BITS" in row.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
