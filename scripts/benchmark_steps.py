"""Time of an optimizer step of `task=segmentation` and `task=detection` beside that of loops by hand, run by run.

    python scripts/benchmark_steps.py                                # both, several minutes on two cores
    python scripts/benchmark_steps.py segmentation --repeats 9 --workers 2

Both train the same model from the same weights, on one thread, on images that the same number of worker processes draw and
flip; the loops are those of torchvision's references, with the optimizer in one kernel. Nothing is saved in the steps that
count. Each ratio is of two runs in a row, the first of which alternates. CPU time is that of the process and its workers, and
tells more on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmark_peers import described
from faults.scenes import Scenes
from peers.machine import load, machine
from runner.models.torchvision_detection import detector
from runner.models.torchvision_zoo import segmenter
from runner.tasks.detection import Detection
from runner.tasks.segmentation import Segmentation

HERE = Path(__file__).resolve()
MODELS = {"segmentation": "deeplabv3_mobilenet_v3_large", "detection": "fasterrcnn_mobilenet_v3_large_320_fpn"}
BATCH = {"segmentation": 8, "detection": 2}
SGD: dict[str, Any] = {"lr": 0.0001, "momentum": 0.9, "weight_decay": 0.0005}
OPTIMIZER = ("optimizer=sgd", "optimizer.nesterov=false", *(f"optimizer.{name}={value}" for name, value in SGD.items()))
COMMON = (
    "transform=none", "transform.sample_train=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip}]", *OPTIMIZER,
    "scheduler=constant", "data.images=['0']", "data.dataset._target_=faults.scenes.Scenes", "data.split.val=0",
    "data.split.test=0", "data.normalize.mean=[0.0]", "data.normalize.std=[1.0]", "evaluate.every_epochs=null",
    "evaluate.test=false", "epochs=null", "checkpoint.every_epochs=null", "checkpoint.min_seconds=0", "device=cpu",
    "threads=1", "trust=[faults,benchmark_steps]", "init_mismatch=raise",
)  # fmt: skip
WORDS = {
    "segmentation": ("task=segmentation", "model=torchvision_segmentation", "model.aux_loss=true"),
    "detection": ("task=detection", "model=torchvision_detection", "loss=none", "+data.dataset.boxes=true"),
}


class Clock:
    """A callback that notes wall and CPU seconds of the steps after `warmup`, each on average."""

    def __init__(self, result: str, warmup: int, steps: int) -> None:
        self._result, self._warmup, self._steps, self._step = Path(result), warmup, steps, 0
        self._start = spent()

    def on_step(self, loop: Any = None) -> None:
        """Count a step."""
        self._step += 1
        if self._step == self._warmup:
            self._start = spent()
        elif self._step == self._steps:
            pairs = zip(spent(), self._start, strict=True)
            each = [(end - start) / (self._steps - self._warmup) for end, start in pairs]
            self._result.write_text(json.dumps(each))


def spent() -> tuple[float, float]:
    """The time, and the CPU seconds of this process and those below it."""
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return time.perf_counter(), sum(each.user + each.system for each in times)


class Flipped(Dataset[Any]):
    """Scenes, half of them mirrored, with pixels in [0, 1]."""

    def __init__(self, boxes: bool) -> None:
        self._scenes = Scenes(boxes=boxes)
        self._transform = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, index: int) -> Any:
        return self._transform(*self._scenes[index])


def model_of(case: str) -> nn.Module:
    """The model, with random weights."""
    if case == "detection":
        return detector(MODELS[case], num_classes=3)
    return segmenter(MODELS[case], num_classes=3, aux_loss=True)


def segmentation_loss(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    """Main loss, and half of the auxiliary one."""
    outputs, masks = model(images), masks.long()
    losses = [F.cross_entropy(outputs[name], masks, ignore_index=255) for name in ("out", "aux")]
    return losses[0] + 0.5 * losses[1]


def detection_loss(model: nn.Module, images: list[Tensor], targets: list[Mapping[str, Any]]) -> Tensor:
    """The sum of the losses of the model."""
    kept = [{name: target[name] for name in ("boxes", "labels", "masks")} for target in targets]
    return torch.stack(list(model(images, kept).values())).sum()


def by_hand(case: str, weights: Path, workers: int, clock: Clock, steps: int) -> None:
    """Train in the manner of torchvision's references."""
    torch.set_num_threads(1)
    model = model_of(case)
    model.load_state_dict(torch.load(weights))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], **SGD, fused=True)
    loss_of: Callable[..., Tensor] = segmentation_loss if case == "segmentation" else detection_loss
    loader = DataLoader(
        Flipped(boxes=case == "detection"),
        batch_size=BATCH[case],
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=Segmentation.collate if case == "segmentation" else Detection.collate,
    )
    model.train()
    while True:
        for batch in loader:
            loss = loss_of(model, *batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
            clock.on_step()
            steps -= 1
            if not steps:
                return


def seconds(contender: str, case: str, given: argparse.Namespace, folder: Path) -> list[float]:
    """Wall and CPU seconds of a step in a run of its own."""
    result, weights = folder / "result.json", folder / "weights.pth"
    result.unlink(missing_ok=True)  # that of the run before
    if contender == "hand":
        command = [str(HERE), case, f"--by-hand={result}", f"--weights={weights}"]
        command += [f"--{name}={getattr(given, name)}" for name in ("workers", "warmup", "steps")]
    else:
        command = ["-m", "runner", "train", *COMMON, *WORDS[case], f"model.name={MODELS[case]}", f"init_from={weights}"]
        command += [f"data.batch_size={BATCH[case]}", f"data.num_workers={given.workers}", f"max_steps={given.steps}"]
        clock = {"_target_": "benchmark_steps.Clock", "result": result, "warmup": given.warmup, "steps": given.steps}
        command += [f"output_root={folder}", *(f"callbacks.clock.{key}={clock[key]}" for key in clock)]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found: list[float] = json.loads(result.read_text())
    return found


def main() -> None:
    """Measure and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(MODELS), help="segmentation, detection or both")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    parser.add_argument("--workers", type=int, default=1, help="processes that read samples")
    parser.add_argument("--warmup", type=int, default=5, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=45, help="steps of a run")
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.by_hand:
        clock = Clock(given.by_hand, given.warmup, given.steps)
        by_hand(given.cases[0], given.weights, given.workers, clock, given.steps)
        return
    print(described(machine()))
    print("\n| task | a step by hand, wall | CPU | `runner` takes, wall | CPU | each pair, CPU | load |")
    print("|---|---|---|---|---|---|---|")
    for case in given.cases:
        with tempfile.TemporaryDirectory() as name:
            folder, times = Path(name), dict[str, list[list[float]]](runner=[], hand=[])
            torch.manual_seed(0)
            torch.save(model_of(case).state_dict(), folder / "weights.pth")
            for number in range(given.repeats):
                for contender in ("runner", "hand")[:: 1 - 2 * (number % 2)]:
                    times[contender].append(seconds(contender, case, given, folder))
        pairs = zip(times["runner"], times["hand"], strict=True)
        wall, cpu = zip(*([ours / theirs for ours, theirs in zip(*pair, strict=True)] for pair in pairs), strict=True)
        by = " | ".join(f"{1000 * statistics.median(each):.0f} ms" for each in zip(*times["hand"], strict=True))
        ratios = f"{statistics.median(wall):.3f} | {statistics.median(cpu):.3f}"
        each = ", ".join(f"{ratio:.3f}" for ratio in cpu)
        print(f"| {case} | {by} | {ratios} | {each} | {load()} |", flush=True)


if __name__ == "__main__":
    main()
