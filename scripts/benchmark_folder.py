"""Images a second out of a folder of JPEGs: `runner` against torchvision's `ImageFolder` and a `DataLoader`.

    python scripts/benchmark_folder.py --images 1000 --rounds 5
    pip install -e ".[peers]"
    python scripts/benchmark_folder.py --images 200 --shrink 0.25 --rounds 5 --workers 2 --shards

All sources read the same files (about 500x375 pixels, noise with the spectrum of photographs, made by this script) with as
many workers, and give normalised float32 batches of one size. The peer is written as in most training scripts: version 1
transforms of PIL images. Whole epochs are timed in turns, with workers that are already running: `middle` is Resize,
CenterCrop and flip, `random` RandomResizedCrop and flip. CPU times are printed beside the rates, as they depend less on
what else the machine does. The seconds that making the cache of `data.cache=disk` takes are printed before the rows.

`--shards` packs the images into tar files, which `data=shards` and WebDataset read. Training on the images is measured by
`gpu.py jpeg`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import psutil
import torch
from PIL import Image
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
Epoch = Callable[[], Iterable[Any]]  # gives the batches of the next epoch


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

    def write(number: int) -> None:
        generator, folder = np.random.default_rng(number), root / "abcd"[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        width, height = int(generator.integers(400, 600) / shrink), int(generator.integers(300, 450) / shrink)
        photograph(generator, height, width).save(folder / f"{number:05d}.jpg", quality=90)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # drawing and encoding run without Python's lock
        list(pool.map(write, range(images)))


def peer_transform(kind: str, size: int) -> Callable[[Any], Any]:
    """Version 1 transforms of a PIL image."""
    middle = [transforms.Resize(size), transforms.CenterCrop(size)]
    crop = middle if kind == "middle" else [transforms.RandomResizedCrop(size)]
    steps = [*crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed


def image_folder(root: Path, kind: str, size: int, workers: int) -> Epoch:
    """What most training scripts have."""
    images = ImageFolder(str(root), peer_transform(kind, size))
    loader = DataLoader(images, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


def web_dataset(shards: Path, kind: str, size: int, workers: int) -> Epoch:
    """WebDataset's own loader, as its documentation has it."""
    import webdataset

    files = sorted(map(str, shards.glob("train/*.tar")))
    samples = webdataset.WebDataset(files, shardshuffle=len(files), seed=0).shuffle(1000).decode("pil")
    pairs = samples.to_tuple("jpg", "cls").map_tuple(peer_transform(kind, size), int).batched(BATCH)
    loader = webdataset.WebLoader(pairs, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


def ours(root: Path, kind: str, size: int, workers: int, source: str, cache_dir: Path | None = None) -> DataModule:
    """The same through the program's own configuration."""
    data = Data(
        dataset={"_target_": f"runner.data.sources.{source}"}, root=str(root), batch_size=BATCH, image_size=size,
        num_workers=workers, normalize=Normalize(mean=MEAN, std=STD), split=Split(val=0, test=0),
        cache=None if cache_dir is None else "disk", cache_dir=None if cache_dir is None else str(cache_dir),
    )  # fmt: skip
    crops = [{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": size}] if kind == "random" else []
    transform = Transform(sample_train=crops, train=[{"_target_": "runner.data.transforms.augment.RandomFlip"}])
    nodes: dict[str, Any] = {name: {} for name in ("model", "optimizer", "scheduler", "loss", "task")}
    config = Train(data=data, transform=transform, evaluate=Evaluate(batch_size=BATCH), **nodes)
    configure_torch(config, CPU)
    return read_data(config, CPU, make_cache=True, dtype=torch.float32)


def epochs(splits: DataModule) -> Epoch:
    """Gives one epoch after the other."""
    count = -(-splits.train.samples // BATCH)
    number = iter(range(10**9))
    return lambda: (batch.data for batch in splits.train.loader.batches(next(number), 0, count))


class Cost(NamedTuple):
    """Seconds of an epoch: by the clock, and of the CPUs in this process and its workers, and in this process."""

    wall: float
    cpu: float
    own: float


def cpu_seconds() -> float:
    """CPU seconds so far of this process and its workers."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def cost(epoch: Epoch, images: int) -> Cost:
    """What an epoch takes, which must give so many images."""
    began, busy, own, seen = time.perf_counter(), cpu_seconds(), time.process_time(), 0
    for batch in epoch():
        assert batch[0].dtype == torch.float32
        seen += len(batch[0])
    assert seen == images
    return Cost(time.perf_counter() - began, cpu_seconds() - busy, time.process_time() - own)


def compare(sources: dict[str, Epoch], options: argparse.Namespace, what: str) -> None:
    """Time all sources in turns, and print a row for each with the median of its ratios to the first one."""
    costs: dict[str, list[Cost]] = {name: [] for name in sources}
    for turn in range(options.rounds + 1):
        for name, epoch in sources.items():
            spent = cost(epoch, options.images)
            costs[name] += [spent] if turn else []  # the first one starts the workers
    base = next(iter(costs.values()))
    for name, found in costs.items():
        wall, cpu, own = (statistics.median(values) for values in zip(*found, strict=True))
        faster, less = (
            statistics.median(getattr(them, of) / getattr(us, of) for them, us in zip(base, found, strict=True))
            for of in ("wall", "cpu")
        )
        ms = [1000 * seconds / options.images for seconds in (max(cpu - own, 0), own, cpu)]
        cells = [what, name, f"{options.images / wall:,.0f}", f"{faster:.2f}"]
        print(f"| {' | '.join([*cells, *(f'{each:.2f}' for each in ms), f'{less:.2f}'])} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side of what the model is given")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shrink", type=float, default=1.0, help="files of 500x375 pixels divided by this")
    parser.add_argument("--shards", action="store_true", help="read tar files too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, shards = Path(name) / "images", Path(name) / "shards"
        make_folder(root, options.images, options.shrink)
        size = sum(path.stat().st_size for path in root.rglob("*.jpg")) / options.images / 1000
        print(f"Python {platform.python_version()}, torch {torch.__version__}, Pillow {PIL.__version__}, ", end="")
        print(f"{torch.get_num_threads()} threads; {options.images:,} JPEGs of {size:.0f} kB to {options.size} pixels")
        if options.shards:
            words = ("data=image_folder", f"data.root={root}", f"output={shards}", "shard_samples=50")
            subprocess.run([sys.executable, "-m", "runner", "pack", *words], check=True)
        print("| measured | source | images/s | ratio | CPU ms per image: workers | main | all | ratio |")
        print("|---" * 8 + "|")
        for workers in options.workers:
            for kind in ("middle", "random"):
                modules = {"image_folder": ours(root, kind, options.size, workers, "folders.image_folder")}
                sources = {"ImageFolder": image_folder(root, kind, options.size, workers)}
                if options.shards:
                    sources["WebDataset"] = web_dataset(shards, kind, options.size, workers)
                    modules["shards"] = ours(shards, kind, options.size, workers, "shards.shards")
                elif kind == "middle":  # a random crop of the file cannot be cached
                    began, folder = time.perf_counter(), Path(name) / f"cache_{workers}"
                    modules["data.cache=disk"] = ours(root, kind, options.size, workers, "folders.image_folder", folder)
                    print(
                        f"making the cache with {workers} workers: {time.perf_counter() - began:.2f} s", file=sys.stderr
                    )
                sources |= {f"runner, {key}": epochs(module) for key, module in modules.items()}
                compare(sources, options, f"{kind}, {workers} workers")
                for module in modules.values():
                    module.close()


if __name__ == "__main__":
    main()
