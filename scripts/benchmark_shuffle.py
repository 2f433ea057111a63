"""How far `data.shuffle=blocks` is from a full shuffle: in the order, in the classes of a batch, and in the accuracy.

    OMP_NUM_THREADS=1 python scripts/benchmark_shuffle.py order
    OMP_NUM_THREADS=1 python scripts/benchmark_shuffle.py train --seeds 10 --shards 80

`order` computes orders of 1,000 shards of 900 to 1,100 samples of ten classes, and no images. The classes are drawn at random in
`mixed` shards, and in `sorted` ones all samples of a class come before those of the next. Chi-square is that of the classes of a
batch of 256 against equal shares, divided by its degrees of freedom: 1 is a batch drawn at random.

`train` writes 1,297 digits as so many tar files, mixed or sorted by class, and trains the default model on batches of 16: with 80
tar files and a window of one, a batch has images of one or two of them. The other 500 digits are the test images. Differences are
those of runs of one seed, with the standard error of their mean.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from runner import train
from runner.data.sampler import BlockOrder, EpochOrder
from runner.data.sources.digits import digits

WINDOWS = (16, 4, 1)
BATCH, CLASSES = 256, 10
TEST = 500


def orders(ends: Tensor, epoch: int) -> Iterator[tuple[str, EpochOrder]]:
    """Each kind of order of the same shards."""
    samples = int(ends[-1])
    yield "full", EpochOrder(samples, 0, epoch)
    for window in (64, *WINDOWS):
        yield f"blocks, window {window}", BlockOrder(ends, window, 0, epoch)
    yield "none", EpochOrder(samples, 0, epoch, shuffle=False)


def show_orders(epochs: int) -> None:
    """A table of the orders."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(900, 1101, (1000,), generator=generator).cumsum(0)
    samples = int(ends[-1])
    mixed = torch.randint(CLASSES, (samples,), generator=generator)
    found: dict[str, list[list[float]]] = {}
    for epoch in range(epochs):
        for name, order in orders(ends, epoch):
            drawn = order.slice(0, samples // BATCH * BATCH)
            shards = torch.searchsorted(ends, drawn, right=True)
            touched = [len(batch.unique()) for batch in shards.view(-1, BATCH)[::37]]
            numbers = [float((shards[1:] == shards[:-1]).double().mean()), statistics.fmean(touched)]
            for classes in (mixed, mixed.sort().values):
                labels = classes[drawn].view(-1, BATCH)
                counts = torch.stack([(labels == each).sum(1) for each in range(CLASSES)], 1).double()
                expected = BATCH / CLASSES
                chi = ((counts - expected) ** 2 / expected).sum(1) / (CLASSES - 1)
                numbers.append(float(chi.mean()))
            found.setdefault(name, []).append(numbers)
    print("| order | neighbours from one shard | shards in a batch | chi-square, mixed | chi-square, sorted |")
    print("|---|---|---|---|---|")
    for name, each in found.items():
        same, touched_mean, *chis = np.mean(each, axis=0)
        print(f"| {name} | {same:.2%} | {touched_mean:.1f} | " + " | ".join(f"{chi:.2f}" for chi in chis) + " |")


def write_shards(folder: Path, images: Tensor, targets: Tensor, count: int) -> None:
    """Images uint8 (N, 1, H, W) and their classes, in their order, as so many tar files."""
    folder.mkdir(parents=True)
    for number, places in enumerate(torch.arange(len(images)).tensor_split(count)):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as tar:
            for place in places.tolist():
                Image.fromarray(images[place, 0].numpy()).save(image := io.BytesIO(), "png")
                for extension, content in (("png", image.getvalue()), ("cls", str(int(targets[place])).encode())):
                    member = tarfile.TarInfo(f"{place:06d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def accuracy(root: Path, seed: int, *words: str) -> float:
    """Of the test images, after a training."""
    # As data=digits, whose images are in memory; the cache gives the batches of the tar files, and spares decoding
    keys = (
        "data=shards", f"data.root={root}", "data.image_size=8", "data.shift=0", "data.hflip=0",
        "data.normalize.mean=[0.3053]", "data.normalize.std=[0.3761]", "data.cache=disk", "data.placement=ram",
        "data.split.val=0", "evaluate.every_epochs=null", "logger=none", "log.progress=false", "log.curves=false",
        "callbacks=none", "threads=1", "data.batch_size=16", "epochs=10", f"output_root={root.parent / 'runs'}",
    )  # fmt: skip
    return float(train(*keys, f"seed={seed}", *words).summary["test"]["accuracy"])


def show_accuracies(seeds: int, shards: int) -> None:
    """A table of accuracies."""
    whole = digits()["train"]
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    held, rest = order[:TEST], order[TEST:]
    cases = {"full": ["data.shuffle=true"]}
    for window in WINDOWS:
        cases[f"blocks, window {window}"] = ["data.shuffle=blocks", f"data.shuffle_window={window}"]
    cases["none"] = ["data.shuffle=false"]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for kind, rows in (("mixed", rest), ("sorted", rest[whole.targets[rest].argsort(stable=True)])):
            root = Path(folder, kind)
            write_shards(root / "train", whole.images[rows], whole.targets[rows], shards)
            write_shards(root / "test", whole.images[held], whole.targets[held], 1)
            for name, words in cases.items():
                found[name][kind] = [accuracy(root, seed, *words) for seed in range(seeds)]
    print("| order | mixed shards | difference from full | sorted shards | difference from full |")
    print("|---|---|---|---|---|")
    for name, kinds in found.items():
        cells = []
        for kind, values in kinds.items():
            differences = [value - full for value, full in zip(values, found["full"][kind], strict=True)]
            error = statistics.stdev(differences) / seeds**0.5
            compared = f"{statistics.fmean(differences):+.2%} ({error:.2%})" if name != "full" else ""
            cells += [f"{statistics.fmean(values):.2%}, lowest {min(values):.2%}", compared]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["order", "train"])
    parser.add_argument("--epochs", type=int, default=5, help="orders of each kind")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--shards", type=int, default=80, help="tar files of the training images")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: at least 2, for a standard error")
    if options.what == "order":
        show_orders(options.epochs)
    else:
        show_accuracies(options.seeds, options.shards)


if __name__ == "__main__":
    main()
