"""Images a second out of a folder of JPEGs: `runner` against torchvision's `ImageFolder` and a `DataLoader`.

    python scripts/benchmark_folder.py --images 1000 --rounds 5

Both read the same files (about 500x375 pixels, noise with the spectrum of photographs, made by this script) with as many
workers and give normalised float32 batches of one size. The peer is written as in most training scripts: version 1
transforms on PIL images. Two kinds of training transforms are timed, in alternation, by whole epochs with workers that are
already running: `middle` (Resize, CenterCrop, flip) and `random` (RandomResizedCrop, flip). The processor time of all
processes is reported beside the rates, as it depends less on what else the machine does. Then `data.cache=disk` is timed: the
epoch that decodes the images and writes the cache, and the epoch after it.

    python scripts/benchmark_folder.py --images 300 --rounds 3 --workers 2 --train

`--train` trains a model on the batches instead, with the same loop for both and for the cache: a small one, whose step
takes less than reading, and ResNet-18. It tells the processor time of the process that trains and of the workers, and
what the model takes alone, which bounds every ratio.

    pip install -e ".[peers]"
    python scripts/benchmark_folder.py --images 200 --shrink 0.25 --rounds 5 --workers 2 --shards

`--shards` packs the images into tar files, which `data=shards` and WebDataset read in turns with the two above; the size of the
photographs is then 2000x1500.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import psutil
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from runner.config.schema.sections import Data, Evaluate, Normalize, Split, Transform
from runner.config.schema.train import Train
from runner.data.build import read_data
from runner.data.module import DataModule
from runner.runtime.device import configure_torch

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BATCH = 64
CPU = torch.device("cpu")


def photograph(generator: np.random.Generator, height: int, width: int) -> Image.Image:
    """Noise whose strength falls with the frequency as in pictures of nature, the colours alike."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = 1 / max(height, width)
    planes = []
    for _ in range(4):
        spectrum = generator.normal(size=frequency.shape) + 1j * generator.normal(size=frequency.shape)
        plane = np.fft.irfft2(spectrum / frequency**1.1, s=(height, width))
        planes.append((plane - plane.mean()) / plane.std())
    pixels = 128 + 50 * np.stack([0.8 * planes[0] + 0.4 * plane for plane in planes[1:]], -1)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_folder(root: Path, images: int, shrink: float) -> None:
    """Write `<root>/<class>/<number>.jpg`, 4 classes, sizes around 500x375 divided by `shrink`."""
    generator = np.random.default_rng(0)
    for number in range(images):
        folder = root / "abcd"[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        width, height = int(generator.integers(400, 600) / shrink), int(generator.integers(300, 450) / shrink)
        photograph(generator, height, width).save(folder / f"{number:05d}.jpg", quality=90)


def peer(root: Path, kind: str, size: int, workers: int) -> DataLoader[Any]:
    """What most training scripts have."""
    return DataLoader(
        ImageFolder(str(root), peer_transform(kind, size)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def peer_transform(kind: str, size: int) -> Callable[[Any], Any]:
    """Version 1 transforms of a PIL image."""
    crop = (
        [transforms.Resize(size), transforms.CenterCrop(size)]
        if kind == "middle"
        else [transforms.RandomResizedCrop(size)]
    )
    steps = [*crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed


def web_dataset(shards: Path, kind: str, size: int, workers: int) -> DataLoader[Any]:
    """WebDataset's own loader, as its documentation has it."""
    import webdataset

    files = sorted(map(str, shards.glob("train/*.tar")))
    samples = webdataset.WebDataset(files, shardshuffle=len(files), seed=0).shuffle(1000).decode("pil")
    pairs = samples.to_tuple("jpg", "cls").map_tuple(peer_transform(kind, size), int).batched(BATCH)
    return webdataset.WebLoader(pairs, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def ours(
    root: Path, kind: str, size: int, workers: int, cache_dir: Path | None = None, source: str = "folders.image_folder"
) -> DataModule:
    """The same through the program's own configuration."""
    data = Data(
        dataset={"_target_": f"runner.data.sources.{source}"},
        root=str(root),
        batch_size=BATCH,
        image_size=size,
        num_workers=workers,
        normalize=Normalize(mean=MEAN, std=STD),
        split=Split(val=0, test=0),
        cache=None if cache_dir is None else "disk",
        cache_dir=None if cache_dir is None else str(cache_dir),
    )
    crops = [{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": size}] if kind == "random" else []
    transform = Transform(sample_train=crops, train=[{"_target_": "runner.data.transforms.augment.RandomFlip"}])
    nodes: dict[str, Any] = {name: {} for name in ("model", "optimizer", "scheduler", "loss", "task")}
    config = Train(data=data, transform=transform, evaluate=Evaluate(batch_size=BATCH), **nodes)
    return read_data(config, CPU, make_cache=True, dtype=torch.float32)


class Cost(NamedTuple):
    """Seconds of an epoch: by the clock, and of the processors in this process and its workers."""

    wall: float
    cpu: float


def cost(epoch: Callable[[], Iterable[Any]], images: int) -> Cost:
    """What an epoch takes, which must give so many images."""
    began, busy, seen = time.perf_counter(), processors(), 0
    for batch in epoch():
        assert batch[0].dtype == torch.float32
        seen += len(batch[0])
    assert seen == images
    return Cost(time.perf_counter() - began, processors() - busy)


def processors() -> float:
    """Processor seconds so far of this process and its workers."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def epochs(splits: DataModule) -> Callable[[], Iterable[Any]]:
    """Gives one epoch after the other."""
    count = -(-splits.train.samples // BATCH)
    number = iter(range(10**9))
    return lambda: (batch.data for batch in splits.train.loader.batches(next(number), 0, count))


def compare(root: Path, kind: str, arguments: argparse.Namespace, workers: int) -> str:
    """Images a second of the peer and of us, and the medians of the ratios of neighbouring epochs."""
    theirs, mine = peer(root, kind, arguments.size, workers), ours(root, kind, arguments.size, workers)
    turns = (lambda: theirs, epochs(mine))
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    for turn in range(arguments.rounds + 1):
        for epoch, found in zip(turns, costs, strict=True):
            spent = cost(epoch, arguments.images)
            if turn:  # the first one starts the workers
                found.append(spent)
    mine.close()
    rates = [statistics.median(arguments.images / each.wall for each in found) for found in costs]
    busy = [statistics.median(1000 * each.cpu / arguments.images for each in found) for found in costs]
    pairs = list(zip(*costs, strict=True))
    return (
        f"| {kind} | {workers} | {rates[0]:,.0f} | {rates[1]:,.0f} | "
        f"{statistics.median(theirs.wall / ours_.wall for theirs, ours_ in pairs):.2f} | "
        f"{busy[0]:.2f} | {busy[1]:.2f} | {statistics.median(theirs.cpu / ours_.cpu for theirs, ours_ in pairs):.2f} |"
    )


def compare_shards(root: Path, kind: str, arguments: argparse.Namespace, workers: int) -> Iterator[str]:
    """A row for each source of images: rates, processor time, and the median of its ratios to the first one's."""
    size, shards = arguments.size, root.parent / "shards"
    folders, packed = ours(root, kind, size, workers), ours(shards, kind, size, workers, source="shards.shards")
    theirs, theirs_packed = peer(root, kind, size, workers), web_dataset(shards, kind, size, workers)
    turns: dict[str, Callable[[], Iterable[Any]]] = {
        "ImageFolder": lambda: theirs, "WebDataset": lambda: theirs_packed,
        "runner, image_folder": epochs(folders), "runner, shards": epochs(packed),
    }  # fmt: skip
    found: dict[str, list[Cost]] = {source: [] for source in turns}
    for turn in range(arguments.rounds + 1):
        for source, epoch in turns.items():
            spent = cost(epoch, arguments.images)
            if turn:  # the first one starts the workers
                found[source].append(spent)
    folders.close()
    packed.close()
    for source, costs in found.items():
        rate, busy = (statistics.median(values) for values in zip(*costs, strict=True))
        pairs = list(zip(found["ImageFolder"], costs, strict=True))
        ratios = [statistics.median(getattr(them, of) / getattr(us, of) for them, us in pairs) for of in Cost._fields]
        numbers = [f"{arguments.images / rate:,.0f}", f"{ratios[0]:.2f}"]
        numbers += [f"{1000 * busy / arguments.images:.2f}", f"{ratios[1]:.2f}"]
        yield f"| {kind} | {source} | {' | '.join(numbers)} |"


def with_cache(root: Path, arguments: argparse.Namespace, workers: int) -> str:
    """Seconds of the epoch that makes the cache, of the one after it, and the median of their ratios."""
    found = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            began = time.perf_counter()
            splits = ours(root, "middle", arguments.size, workers, Path(folder))
            epoch = epochs(splits)
            cost(epoch, arguments.images)
            first = time.perf_counter() - began
            found.append((first, cost(epoch, arguments.images).wall))
            splits.close()
    first, second = (statistics.median(each) for each in zip(*found, strict=True))
    ratio = statistics.median(before / after for before, after in found)
    return f"data.cache=disk, {workers} workers: first epoch {first:.2f} s, second {second:.2f} s, ratio {ratio:.1f}"


class Trainer:
    """Steps of SGD on a model, the same for every source of batches."""

    def __init__(self, name: str, size: int) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = small() if name == "small" else torchvision.models.resnet18(num_classes=4)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, fused=True)
        self._size = size

    def step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        """Train on a batch."""
        loss = nn.functional.cross_entropy(self._model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def alone(self) -> float:
        """Processor seconds that an image takes without reading."""
        images, targets = torch.rand(BATCH, 3, self._size, self._size), torch.zeros(BATCH, dtype=torch.int64)
        self.step(images, targets)
        began = time.process_time()
        for _ in range(4):
            self.step(images, targets)
        return (time.process_time() - began) / (4 * BATCH)

    def on(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, after a step on each."""
        for batch in batches:
            self.step(batch[0], batch[1])
            yield batch


def small() -> nn.Module:
    """A convolutional network whose step takes about as long as reading an image."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2 if inputs > 3 else 4, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def training(root: Path, name: str, arguments: argparse.Namespace, workers: int) -> list[str]:
    """Rows of the peer, of us and of the cache, each with its ratios to the neighbouring epoch of the peer."""
    trainer = Trainer(name, arguments.size)
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        theirs = peer(root, "middle", arguments.size, workers)
        mine = ours(root, "middle", arguments.size, workers)
        cached = ours(root, "middle", arguments.size, workers, Path(folder))
        turns: dict[str, Callable[[], Iterable[Any]]] = {
            "peer": lambda: theirs, "runner": epochs(mine), "runner, data.cache=disk": epochs(cached)
        }  # fmt: skip
        found: dict[str, list[tuple[Cost, float]]] = {source: [] for source in turns}
        for turn in range(arguments.rounds + 1):
            for source, epoch in turns.items():
                own = time.process_time()
                spent = cost(lambda epoch=epoch: trainer.on(epoch()), arguments.images)
                if turn:
                    found[source].append((spent, time.process_time() - own))
        mine.close()
        cached.close()
    rows, alone = [], trainer.alone() * 1000
    for source, costs in found.items():
        ms = [1000 * statistics.median(numbers) / arguments.images for numbers in (
            [spent.cpu for spent, _ in costs], [own for _, own in costs])]  # fmt: skip
        pairs = list(zip(found["peer"], costs, strict=True))
        ratios = [
            statistics.median(getattr(them[0], kind) / getattr(us[0], kind) for them, us in pairs)
            for kind in Cost._fields
        ]
        cells = [ms[0] - ms[1], ms[1], ms[0], ratios[1], ratios[0]]
        rows.append(f"| {name} ({alone:.2f}) | {source} | {' | '.join(f'{abs(cell):.2f}' for cell in cells)} |")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side of what the model is given")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shrink", type=float, default=1.0, help="files of 500x375 pixels divided by this")
    parser.add_argument("--train", action="store_true", help="train a model on the batches")
    parser.add_argument("--shards", action="store_true", help="read tar files too")
    parser.add_argument("--models", nargs="+", default=["small", "resnet18"], choices=["small", "resnet18"])
    arguments = parser.parse_args()
    configure_torch(CPU, torch.get_num_threads(), False, cudnn_benchmark=False, tf32=False, detect_anomaly=False)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "images"
        make_folder(root, arguments.images, arguments.shrink)
        size = sum(path.stat().st_size for path in root.rglob("*.jpg"))
        print(
            f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, ",
            end="",
        )
        print(f"Pillow {PIL.__version__}, {torch.get_num_threads()} threads")
        print(
            f"{arguments.images:,} JPEGs of {size / arguments.images / 1000:.0f} kB to {arguments.size}x{arguments.size}"
        )
        if arguments.train:
            print(
                "| model (CPU ms an image alone) | batches | CPU ms an image: workers | main | all | ratio | ratio of rates |"
            )
            print("|---|---|---|---|---|---|---|")
            for workers in arguments.workers:
                for name in arguments.models:
                    print(*training(root, name, arguments, workers), sep="\n", flush=True)
            return
        if arguments.shards:
            words = ("data=image_folder", f"data.root={root}", f"output={root.parent / 'shards'}", "shard_samples=50")
            subprocess.run([sys.executable, "-m", "runner", "pack", *words], check=True)
            print("| transforms | source | images/s | ratio | CPU ms per image | ratio |\n|---|---|---|---|---|---|")
            for workers in arguments.workers:
                for kind in ("middle", "random"):
                    print(*compare_shards(root, kind, arguments, workers), sep="\n", flush=True)
            return
        print("| transforms | workers | peer images/s | runner | ratio | peer CPU ms an image | runner | ratio |")
        print("|---|---|---|---|---|---|---|---|")
        for workers in arguments.workers:
            for kind in ("middle", "random"):
                print(compare(root, kind, arguments, workers), flush=True)
        print(with_cache(root, arguments, max(arguments.workers)))


if __name__ == "__main__":
    main()
