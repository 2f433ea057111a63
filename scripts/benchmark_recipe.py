"""Seconds and epochs until CIFAR-10 is learned to 90%, by `runner`'s recipe and by other loops, with the same network.

    pip install -e ".[peers]"
    python scripts/benchmark_recipe.py path/to/images --epochs 9                  # every loop until it has reached the level
    python scripts/benchmark_recipe.py path/to/images --epochs 2 --rounds 3       # the time of an epoch, in turns
    python scripts/benchmark_recipe.py path/to/images --device cuda --workers 16

The folder has train/CLASS/*.png and val/CLASS/*.png. `runner` trains `experiment=cifar10_airbench`. The others are what people
write for this network: `torch.utils.data.DataLoader` with workers and torchvision's transforms of each image, AdamW with
OneCycleLR; or Lightning's Trainer with them; or timm's loader, optimizer and schedule. All have the same network with
whitening, bfloat16, channels last, batches of 1,000 and an evaluation after each epoch, and images in memory from the start.
The seconds of an epoch compare the loops; those to the level compare the recipes too, of which only that of `runner` was tuned.

Each measurement is a separate process. The clock starts before the first batch and counts training, evaluation and what the loop
does besides: `runner` and Lightning save checkpoints, and the others do not.
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
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from peers.machine import load, machine
from runner.models.airbench import Airbench
from runner.models.initial import whiten

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCH, SMOOTHING = 1000, 0.2
AUGMENTED = (transforms.RandomCrop(32, padding=2, padding_mode="reflect"), transforms.RandomHorizontalFlip())
NORMALISED = (transforms.ToTensor(), transforms.Normalize(MEAN, STD))
WORDS = (
    "experiment=cifar10_airbench", "data=image_folder", "data.image_size=32", "data.cache=disk",
    f"data.normalize.mean={list(MEAN)}", f"data.normalize.std={list(STD)}", "amp=bf16", "evaluate.test=false",
    "data.split.val=0.1", "data.split.test=0", "trust=[benchmark_recipe]", "logger=none",
    "callbacks.clock._target_=benchmark_recipe.Callback",
)  # fmt: skip


class Clock:
    """Writes seconds since it was started and the accuracy, a line for each epoch."""

    def __init__(self, path: str) -> None:
        self._path, self._begun = path, time.perf_counter()

    def epoch_ended(self, accuracy: float) -> None:
        """Note the end of an epoch and of its evaluation."""
        with Path(self._path).open("a") as file:
            file.write(json.dumps([time.perf_counter() - self._begun, accuracy]) + "\n")


class Callback:
    """The clock in a run of `runner`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_start(self, loop: Any) -> None:
        """Start the clock."""
        self._clock = Clock(self._path)

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Note the end of an epoch."""
        self._clock.epoch_ended(metrics["val/accuracy"])


class Pictures(Dataset[Any]):
    """Decoded images, as torchvision's CIFAR10 keeps them."""

    def __init__(self, folder: Path, transform: Callable[[Any], Any]) -> None:
        found = ImageFolder(str(folder))
        self.images = [found.loader(path) for path, _ in found.samples]
        self.targets, self.transform = found.targets, transform
        self.transforms = None  # timm's loader looks for it

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.targets[index]


def network(pictures: Pictures, seed: int) -> nn.Module:
    """The network, with whitening."""
    torch.manual_seed(seed)
    model = Airbench(3, 10)
    sample = [transforms.Compose(NORMALISED)(pictures.images[index]) for index in torch.randperm(len(pictures))[:5000]]
    whiten(model, [torch.stack(sample)])
    model.whiten.weight.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """The outputs for a batch, on the device of the model."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16):
        outputs: Tensor = model(images.to(device, non_blocking=True, memory_format=torch.channels_last))
    return outputs


def loss_of(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """The loss of a batch."""
    outputs = outputs_of(model, images)
    with torch.autocast(outputs.device.type, torch.bfloat16):
        return nn.functional.cross_entropy(
            outputs, targets.to(outputs.device, non_blocking=True), label_smoothing=SMOOTHING
        )


@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader[Any]) -> float:
    """The share of right answers."""
    model.eval()
    right: Any = 0
    for images, targets in loader:
        outputs = outputs_of(model, images)
        right += (outputs.argmax(1) == targets.to(outputs.device, non_blocking=True)).sum()
    model.train()
    return int(right) / len(loader.dataset)  # type: ignore[arg-type]


def loaders(given: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and evaluation batches."""
    train = Pictures(given.root / "train", transforms.Compose([*AUGMENTED, *NORMALISED]))
    held = Pictures(given.root / "val", transforms.Compose(NORMALISED))
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": given.workers, "persistent_workers": True}
    options["pin_memory"] = given.device != "cpu"
    return DataLoader(train, shuffle=True, drop_last=True, **options), DataLoader(held, **options)


def train_epochs(
    given: argparse.Namespace,
    model: nn.Module,
    loader: Any,
    optimizer: torch.optim.Optimizer,
    update_rate: Callable[[], None],
    held: DataLoader[Any],
) -> None:
    """The loop of the tutorials."""
    clock = Clock(given.result)
    for _ in range(given.epochs):
        for images, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model, images, targets)
            loss.backward()
            optimizer.step()
            update_rate()
        clock.epoch_ended(accuracy_of(model, held))


def dataloader(given: argparse.Namespace) -> None:
    """A DataLoader, AdamW and OneCycleLR."""
    train, held = loaders(given)
    model = network(train.dataset, given.seed).to(given.device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=given.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=given.epochs * len(train))
    train_epochs(given, model, train, optimizer, scheduler.step, held)


def timm(given: argparse.Namespace) -> None:
    """timm's loader, optimizer and schedule."""
    from timm.data import create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    _, held = loaders(given)
    pictures = Pictures(given.root / "train", lambda image: image)
    loader = create_loader(
        pictures, (3, 32, 32), BATCH, is_training=True, mean=MEAN, std=STD, num_workers=given.workers,  # type: ignore[arg-type]
        device=torch.device(given.device),
    )  # fmt: skip
    pictures.transform = transforms.Compose([*AUGMENTED, transforms.PILToTensor()])  # timm normalises whole batches
    model = network(pictures, given.seed).to(given.device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=given.lr, weight_decay=0.01)
    steps = given.epochs * len(loader)
    scheduler = CosineLRScheduler(
        optimizer, steps, warmup_t=steps // 4, warmup_lr_init=given.lr / 25, t_in_epochs=False
    )
    steps_taken = count(1)
    train_epochs(given, model, loader, optimizer, lambda: scheduler.step_update(next(steps_taken)), held)


def lightning(given: argparse.Namespace) -> None:
    """Lightning's Trainer as it comes."""
    import lightning

    train, held = loaders(given)
    clock = Clock(given.result)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(train.dataset, given.seed)  # type: ignore[arg-type]

        def on_train_start(self) -> None:
            clock.__init__(given.result)  # type: ignore[misc]

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = loss_of(self.model, *batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            images, targets = batch
            outputs = outputs_of(self.model, images)
            self.log("accuracy", (outputs.argmax(1) == targets).float().mean())

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                clock.epoch_ended(float(self.trainer.callback_metrics["accuracy"]))

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=given.lr, fused=True)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=given.epochs * len(train))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        accelerator="gpu" if given.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=given.epochs,
        default_root_dir=given.scratch,
        logger=False,
    )
    trainer.fit(Module(), train, held)


def runner(given: argparse.Namespace) -> None:
    """The recipe."""
    words = (
        f"data.root={given.root}",
        f"data.cache_dir={given.scratch}",
        f"hydra.run.dir={given.scratch}/run",
        f"epochs={given.epochs}",
        f"device={given.device}",
    )
    clock = f"callbacks.clock.path={given.result}"
    command = [sys.executable, "-m", "runner", "train", *WORDS, *words, clock, f"seed={given.seed}"]
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


LOOPS = {"runner": runner, "dataloader": dataloader, "lightning": lightning, "timm": timm}


def measured(name: str, given: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds and accuracy at the end of each epoch, of one contender in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        result = scratch / "result.jsonl"
        command = [sys.executable, __file__, str(given.root), "--one", name, "--epochs", str(given.epochs)]
        command += ["--lr", str(given.lr), "--seed", str(given.seed), "--result", str(result), "--scratch", folder]
        command += ["--device", given.device, "--workers", str(given.workers)]
        with (scratch / "log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{(scratch / 'log').read_text()[-2000:]}")
        return [tuple(json.loads(line)) for line in result.read_text().splitlines()]


def said(name: str, curve: list[tuple[float, float]], level: float) -> Iterator[str]:
    """Lines about a measurement."""
    epochs = [end - start for start, end in pairwise([0.0, *(seconds for seconds, _ in curve)])]
    reached = next((index for index, (_, accuracy) in enumerate(curve) if accuracy >= level), None)
    at = f"epoch {reached + 1}, {curve[reached][0]:.0f} s" if reached is not None else f"not in {len(curve)} epochs"
    yield f"{name}: {level:.0%} {at}; {statistics.median(epochs[1:] or epochs):.1f} s an epoch; accuracy " + " ".join(
        f"{accuracy:.3f}" for _, accuracy in curve
    )


def main() -> None:
    """Measure, or be one contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.005, help="of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="of the other loops")
    parser.add_argument("--one", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.root = given.root.resolve()
    if given.one:
        LOOPS[given.one](given)
        return
    print(json.dumps(machine() | {"load": load()}), flush=True)
    for _ in range(given.rounds):
        for name in given.only:
            print(*said(name, measured(name, given), given.level), sep="\n", flush=True)


if __name__ == "__main__":
    main()
