"""What is trained in each case, in numbers: read by the driver, by `runner`'s command line and by every other contender."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LOG_EVERY = 50  # optimizer steps between readings of the loss; `runner` reads it 50 times a run and after each epoch
MOMENTUM = 0.9  # Nesterov's
WEIGHT_DECAY = 5e-4
NOISE = 2.0  # of synthetic images: enough that a few epochs do not reach a loss of 0

NEEDS = {"accelerate": "accelerate", "lightning": "lightning"}  # packages
CONTENDERS = {
    "runner": "`python -m runner train`, as it comes: logging, live progress, a checkpoint whenever one is due",
    "bare": "the best plain loop: data in memory, one gather an epoch, fused optimizer, rate set by hand, loss summed in a "
    "tensor and read every 50 steps; crop and flip a batch at a time",
    "hand": "the loop people write: data in memory, `images[index]` for each batch, torch's scheduler, `loss.item()`; crop and "
    "flip image by image",
    "dataloader": "the loop of the tutorials: `DataLoader`, with 2 workers and transforms on PIL images where there are any",
    "accelerate": "the loop of `dataloader` prepared by Accelerate",
    "lightning": "Lightning as it comes: logging, display, a checkpoint an epoch",
}
"""Who takes part, in a line each."""


@dataclass(frozen=True)
class Case:
    """One piece of work.

    Attributes:
        title: what it is, for people.
        model: option of `runner`'s group `model`.
        data: words for `runner` that select the data; `{root}` and `{samples}` are filled in.
        contenders: who does it.
        epochs: passes over the training samples unless told otherwise; the first one is not timed.
        samples: training samples unless told otherwise; None for all that there are.
        batch_size: the last, smaller batch of an epoch is trained on as well.
        lr: learning rate at the start, from which half a cosine leads to 0 over all steps.
        mean, std: of pixels in [0, 1].
        shift: largest shift of the augmentation, as a share of the image size; 0 for none.
        flip: chance of mirroring an image.
        loss_tolerance: how far a final loss may be from the median of all, as a share of it.
        accuracy_tolerance: how far a test accuracy may be from the median of all.
    """

    title: str
    model: str
    data: tuple[str, ...]
    contenders: tuple[str, ...]
    epochs: int
    samples: int | None
    batch_size: int
    lr: float
    mean: float
    std: float
    shift: float = 0.0
    flip: float = 0.0
    loss_tolerance: float = 0.5
    accuracy_tolerance: float = 0.02


_SYNTHETIC = ("data=synthetic", "data.image_size=32", "data.dataset.samples={samples}", f"data.dataset.noise={NOISE}")

CASES = {
    "digits": Case(
        title="digits, MLP 64-128-10",
        model="mlp",
        data=("data=digits",),
        contenders=("runner", "bare", "hand", "dataloader", "accelerate", "lightning"),
        epochs=61,
        samples=None,
        batch_size=64,
        lr=0.05,
        mean=0.3053,
        std=0.3761,
    ),
    "fashion": Case(
        title="Fashion-MNIST, small CNN, crop and flip",
        model="small_cnn",
        data=(
            "data=fashion_mnist",
            "data.dataset._target_=peers.work.fashion",
            "data.dataset.root={root}",
            "+data.dataset.samples={samples}",
        ),
        contenders=("runner", "bare", "hand", "dataloader", "accelerate", "lightning"),
        epochs=3,
        samples=12800,
        batch_size=128,
        lr=0.05,
        mean=0.2860,
        std=0.3530,
        shift=0.125,
        flip=0.5,
        loss_tolerance=0.25,
        accuracy_tolerance=0.04,
    ),
    "resnet18": Case(
        title="ResNet-18 on synthetic 32x32 images",
        model="resnet18_cifar",
        data=_SYNTHETIC,
        contenders=("runner", "bare"),
        epochs=3,
        samples=640,
        batch_size=64,
        lr=0.02,
        mean=0.5,
        std=0.25,
        accuracy_tolerance=0.15,
    ),
}
CASES["vit_tiny"] = replace(CASES["resnet18"], title="ViT-tiny on synthetic 32x32 images", model="vit_tiny", lr=0.1)


@dataclass(frozen=True)
class Job:
    """One measurement, as the driver hands it to the process that makes it.

    Attributes:
        case: name of the work.
        contender: name of the way to do it.
        epochs: passes over the training samples; the first one is not timed.
        samples: training samples; None for all.
        threads: CPU threads of torch.
        seed: seed of the weights and of everything that is drawn.
        fashion_root: folder that holds FashionMNIST/, for the case that needs it.
        further: words added to the command of `runner`.
        folder: scratch folder to work in.
        result: file to write the result to.
        device: where to train.
    """

    case: str
    contender: str
    epochs: int
    samples: int | None
    threads: int
    seed: int
    fashion_root: str | None = None
    further: tuple[str, ...] = ()
    folder: str = ""
    result: str = ""
    device: str = "cpu"

    @classmethod
    def read(cls, path: str) -> Job:
        """Read what `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))
