"""Compare the losses of runs with those of loops written by hand in the manner of torchvision's and PyTorch's scripts.

    python scripts/equal_loops.py                       # all four, a few minutes on two cores
    python scripts/equal_loops.py dcgan --steps 10

Both get the same samples in the same order and the same initial weights, compute in float64, and take the same fused kernel
for the update: with random weights, training enlarges a difference of rounding a hundredfold in some steps. The table has the
largest difference of a loss over all steps, and the exit status is 1 if one is above 1e-10.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from loops import parts  # noqa: E402

BATCH = 2
SGD: dict[str, Any] = {"lr": 0.0001, "momentum": 0.9, "weight_decay": 0.0005}
SCALE = 1 / 255  # not a division, which rounds in another way
LIMIT = 1e-10
COMMON = (
    f"--config-dir={HERE / 'loops' / 'conf'}", "dtype=float64", "threads=1", "device=cpu", "data.shuffle=false",
    f"data.batch_size={BATCH}", "data.num_workers=0", "data.split.val=0", "data.split.test=0", "evaluate.every_epochs=null",
    "data.normalize.mean=[0.0]", "data.normalize.std=[1.0]", "evaluate.test=false", "scheduler=constant", "callbacks=none",
    "logger=none", "log.every_steps=1", "log.progress=false",
    "epochs=null", "init_mismatch=raise", "trust=[loops]", "transform=none", "~model.dropout", "~model.width",
)  # fmt: skip
OPTIMIZER = ("optimizer=sgd", "optimizer.nesterov=false", *(f"optimizer.{name}={value}" for name, value in SGD.items()))
DETECTION = (
    *OPTIMIZER, "task=detection", "loss=none", "data.images=['0']", "data.dataset._target_=loops.parts.Scenes",
    "+data.dataset.boxes=true",
)  # fmt: skip


def batches(data: Any, steps: int) -> Iterator[list[Any]]:
    """Samples in order, `BATCH` at a time."""
    for step in range(steps):
        yield [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]


def segmentation(model: nn.Module, steps: int) -> list[float]:
    """As torchvision's references/segmentation: main loss, and half of the auxiliary one."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD, fused=True)
    losses = []
    for samples in batches(parts.Scenes(), steps):
        images = torch.stack([image for image, _ in samples]).double() * SCALE
        masks = torch.stack([mask for _, mask in samples]).long()
        outputs = model(images.as_subclass(Tensor))
        found = [F.cross_entropy(outputs[name], masks.as_subclass(Tensor), ignore_index=255) for name in ("out", "aux")]
        losses.append(updated(optimizer, found[0] + 0.5 * found[1]))
    return losses


def detection(model: nn.Module, steps: int) -> list[float]:
    """As torchvision's references/detection: the sum of the losses of the model."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], **SGD, fused=True)
    losses = []
    for samples in batches(parts.Scenes(boxes=True), steps):
        images = [(image.double() * SCALE).as_subclass(Tensor) for image, _ in samples]
        targets = [
            {name: value.as_subclass(Tensor) for name, value in target.items() if isinstance(value, Tensor)}
            for _, target in samples
        ]
        for target in targets:
            target["boxes"] = target["boxes"].double()
        losses.append(updated(optimizer, torch.stack(list(model(images, targets).values())).sum()))
    return losses


def dcgan(model: nn.Module, steps: int) -> list[float]:
    """As PyTorch's examples/dcgan: an update of the discriminator on real and generated images, then one of the generator."""
    judge = parts.discriminator().double().train()
    rates: dict[str, Any] = {"lr": 0.0002, "betas": (0.5, 0.999), "fused": True}
    of_judge, of_model = torch.optim.Adam(judge.parameters(), **rates), torch.optim.Adam(model.parameters(), **rates)
    losses = []
    for samples in batches(parts.Noisy(), steps):
        images, noise = (torch.stack(list(column)).double() for column in zip(*samples, strict=True))
        real, ones = judge(images), torch.ones(BATCH, 1, 1, 1).double()
        judge.zero_grad()
        error = F.binary_cross_entropy_with_logits(real, ones)
        error.backward()
        fakes = model(noise)
        false = F.binary_cross_entropy_with_logits(judge(fakes.detach()), 0 * ones)
        false.backward()
        of_judge.step()
        model.zero_grad()
        against = F.binary_cross_entropy_with_logits(judge(fakes), ones)
        losses.append(float(error.detach() + false.detach()) + updated(of_model, against))
    return losses


def updated(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """The loss, after an update."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


Loop = Callable[[nn.Module, int], list[float]]
CASES: dict[str, tuple[str, tuple[str, ...], Loop]] = {
    "deeplabv3": (
        "segmenter",
        (*OPTIMIZER, "task=segmentation", "data.images=['0']", "data.dataset._target_=loops.parts.Scenes"),
        segmentation,
    ),
    "faster_rcnn": ("faster_rcnn", DETECTION, detection),
    "mask_rcnn": ("mask_rcnn", DETECTION, detection),
    "dcgan": (
        "Generator",
        ("optimizer=dcgan", "task._target_=loops.parts.DCGAN", "loss=none", "data.images=[]",
         "data.dataset._target_=loops.parts.Noisy"),
        dcgan,
    ),
}  # fmt: skip


def difference(name: str, steps: int, folder: Path) -> float:
    """The largest difference of a loss between a run and the loop by hand."""
    builder, words, loop = CASES[name]
    torch.manual_seed(0)
    model = getattr(parts, builder)()
    torch.save(model.state_dict(), folder / "weights.pth")
    target = (f"model._target_=loops.parts.{builder}", f"init_from={folder / 'weights.pth'}", f"max_steps={steps}")
    command = [sys.executable, "-m", "runner", "train", *COMMON, *words, *target, f"hydra.run.dir={folder / name}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    ours = [record["loss"] for record in records if record["split"] == "train"]
    by_hand = loop(model.double().train(), steps)
    assert len(ours) == len(by_hand) == steps, (len(ours), len(by_hand))
    return max(abs(one - other) for one, other in zip(ours, by_hand, strict=True))


def main() -> int:
    """Compare what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=list(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for name in given.names:
        with tempfile.TemporaryDirectory() as folder:
            found = difference(name, given.steps, Path(folder))
        print(f"{name:<12} {given.steps} steps, largest difference of a loss {found:.2e}", flush=True)
        worst = max(worst, found)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
