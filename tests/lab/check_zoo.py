"""Trainings that are broken on purpose, one fault each, for `check` to find: their parts, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from runner.data.sources.arrays import ImageArrays
from runner.data.sources.synthetic import synthetic

CLASSES = 4


class Listed(Dataset[Any]):
    """Samples from tensors of any kind, which the program cannot inspect."""

    def __init__(self, images: Any, targets: Tensor, classes: tuple[str, ...] = ()) -> None:
        self.images, self.targets = images, targets
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if image is None:
            raise OSError("the file is truncated")
        return image, self.targets[index]


BOTH = {  # faults of the images of both splits
    "white pages": lambda images: 250 - images // 16,
    "all zero": torch.zeros_like,
    "swapped channels": lambda images: images.flip(1),
    "cast to uint8": lambda images: images // 128,
}
IN_TEST = {"swapped channels in test": lambda images: images.flip(1), "dark test": lambda images: images // 3}
TARGETS = {"one class": torch.zeros_like, "large targets": lambda targets: targets * 1e4, "no targets": torch.ones_like}


def shapes(fault: str = "", kind: str = "classification", samples: int = 400, **unused: Any) -> dict[str, Any]:
    """400 images of 8x8 pixels in three colours, and 100 to test on, with one fault."""
    made = synthetic(samples, 8, 3, CLASSES, kind=kind, noise=0.3)  # type: ignore[arg-type]
    train, test = made["train"], made["test"]
    classes, (images, theirs) = train.classes, (each.images.clone() for each in (train, test))
    images[:, 0] //= 3  # dark in red, so that the order of the channels can be told
    theirs[:, 0] //= 3
    images, theirs = (BOTH.get(fault, Tensor.clone)(each) for each in (images, theirs))
    theirs = IN_TEST.get(fault, Tensor.clone)(theirs)
    targets, right = (TARGETS.get(fault, Tensor.clone)(each.targets) for each in (train, test))

    if fault in ("labels from 1", "labels out of range"):
        names = classes if fault == "labels out of range" else ()
        return {"train": Listed(images, targets + 1, names), "test": Listed(theirs, right + 1, names)}
    elif fault == "one name":
        classes = ["a", "b", "c", "a"]
    elif fault == "channels last":
        return {"train": Listed(images.permute(0, 2, 3, 1), targets, classes)}
    elif fault == "one glyph twice":
        theirs[0] = images[0]
    elif fault == "faint numbers":
        noise = torch.randn(len(targets) + len(right), generator=torch.Generator().manual_seed(4))
        targets, right = targets + noise[: len(targets)], right + noise[len(targets) :]
    elif fault == "leaked test":
        theirs[:40], right[:40] = images[:40], targets[:40]
    elif fault == "duplicate rows":
        images[100:150], targets[100:150] = images[:50], targets[:50]
    elif fault == "constant images":
        images[::10] = 7
    elif fault == "common class":
        keep = (targets == 0) | ((targets > 0).cumsum(0) < 9)
        images, targets = images[keep], targets[keep]
        right.zero_()
    elif fault == "one class twice as large":
        kept, held = ((each == 0) | (torch.arange(len(each)) % 2 == 0) for each in (targets, right))
        images, targets, theirs, right = images[kept], targets[kept], theirs[held], right[held]
    elif fault in ("not scaled", "not a number", "outlier"):
        pixels = images.float() / (1 if fault == "not scaled" else 255)
        if fault == "not a number":
            pixels[17, 1, 2, 3] = float("nan")
        elif fault == "outlier":
            pixels[17] *= 1000
        return {"train": Listed(pixels, targets, classes)}
    elif fault == "other shapes":
        return {"train": Listed([image[:, : 8 - index % 2] for index, image in enumerate(images)], targets, classes)}
    elif fault == "unreadable":
        return {"train": Listed([None if i % 50 == 7 else image for i, image in enumerate(images)], targets, classes)}
    return {"train": ImageArrays(images, targets, classes), "test": ImageArrays(theirs, right, classes)}


def _adds_up(net: Net) -> None:
    kept = torch.zeros_like(net.conv.weight)
    net.conv.weight.register_hook(lambda gradient: kept.add_(gradient).clone())


def _with_blocks(std: float) -> Callable[[Net], None]:
    def add(net: Net) -> None:
        net.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        for block in net.blocks:
            nn.init.normal_(block.weight, std=std)

    return add


PREPARED: dict[str, Callable[[Net], object]] = {  # faults of the layers and of their initial weights
    "bias before norm": lambda net: setattr(net, "conv", nn.Conv2d(net.conv.in_channels, net.width, 3, padding=1)),
    "frozen": lambda net: [part.requires_grad_(False) for part in (net.conv.weight, net.norm)],
    "dead": lambda net: nn.init.constant_(net.hidden.bias, -100.0),
    "unused branch": lambda net: setattr(net, "branch", nn.Linear(net.width, 32)),
    "vanishing": _with_blocks(0.01),
    "exploding": _with_blocks(4.0),
    "large head": lambda net: nn.init.normal_(net.head.weight, std=3.0),
    "hook that adds up": _adds_up,
    "counts evaluations": lambda net: net.register_buffer("calls", torch.zeros(())),
    "unscaled dropout": lambda net: setattr(net, "norm", nn.GroupNorm(1, net.width)),
    "centred": lambda net: setattr(net, "norm", nn.BatchNorm2d(net.width, track_running_stats=False)),
}
FEATURES: dict[str, Callable[[Net, Tensor], Tensor]] = {  # faults of what the convolution gives
    "view for permute": lambda net, x: x.view(x.shape[1], len(x), *x.shape[2:]).transpose(0, 1),
    "norm twice": lambda net, x: net.norm(x),
}
POOLED: dict[str, Callable[[Net, Tensor], Tensor]] = {  # faults of its mean over the image
    "unscaled dropout": lambda net, x: x * (torch.rand_like(x) > 0.6) if net.training else x,
    "detached": lambda net, x: x.detach(),
    "unused branch": lambda net, x: (net.branch(x), x)[1],
}
LAST: dict[str, Callable[[Net, Tensor], Tensor]] = {  # faults of the logits
    "counts evaluations": lambda net, x: (net.calls.add_(1), x)[1],
    "explodes": lambda net, x: x * float("nan") if net.training else x,
    "softmax": lambda net, x: x.softmax(1),
    "sigmoid": lambda net, x: x.sigmoid(),
}


def _same(net: Net, values: Tensor) -> Tensor:
    return values


class Net(nn.Module):
    """Convolution with BatchNorm, dropout and a linear head, with one fault."""

    def __init__(
        self, num_classes: int, fault: str = "", in_channels: int = 3, width: int = 16, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.fault, self.width = fault, width
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.hidden = nn.Linear(width, 32)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, num_classes)
        nn.init.normal_(self.head.weight, std=0.05)
        nn.init.zeros_(self.head.bias)
        PREPARED.get(fault, id)(self)

    def train(self, mode: bool = True) -> Net:
        return super().train({"always training": True, "never training": False}.get(self.fault, mode))

    def forward(self, images: Tensor) -> Tensor:
        fault = self.fault
        if fault == "raises":
            return {}[fault]
        if fault == "norm in evaluation":
            self.norm.eval()
        features = FEATURES.get(fault, _same)(self, self.conv(images * 0 if fault == "blind" else images))
        features = POOLED.get(fault, _same)(self, F.relu(self.norm(features)).mean((2, 3)))
        features = F.relu(self.hidden(features))
        for block in getattr(self, "blocks", ()):
            features = F.relu(block(features))
        if fault == "dropout always on":
            features = F.dropout(features, 0.5)
        return LAST.get(fault, _same)(self, self.head(self.dropout(features)))


class Pretrained(Net):
    """A healthy one, as if its weights had been trained on images of certain statistics."""

    @staticmethod
    def preferred_data(**arguments: Any) -> dict[str, Any]:
        return {"normalize": {"mean": [0.5, 0.5, 0.4], "std": [0.25, 0.25, 0.2]}}


class Partial(torch.optim.SGD):
    """Steps biases and norms alone."""

    def __init__(self, params: Any, lr: float, **unused: Any) -> None:
        super().__init__([parameter for parameter in params if parameter.ndim < 2], lr)


class KeepsGradients:
    """Puts the gradients of a step back after it: a forgotten zero_grad."""

    def on_start(self, loop: Any) -> None:
        self.kept: dict[Tensor, Tensor] = {}
        for parameter in loop.state.model.parameters():
            parameter.register_hook(lambda gradient, parameter=parameter: self.kept.__setitem__(parameter, gradient))

    def on_step(self, loop: Any) -> None:
        for parameter, gradient in self.kept.items():
            parameter.grad = gradient.clone()


class LeavesEvaluation:
    """Evaluates in a callback, and does not go back."""

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        loop.state.model.eval()


class Blank:
    """An augmentation that hides the whole image."""

    def __call__(self, images: Tensor, rng: Any) -> Tensor:
        return torch.zeros_like(images)


class Case(NamedTuple):
    """A broken training."""

    fault: str  # what is wrong
    words: tuple[str, ...]  # beyond those of a healthy one
    check: str  # the check that has to find it
    status: str = ""  # its result; empty for a warning or a failure
    evidence: str = ""  # part of what it reports


def first_of_each(cases: Sequence[Case]) -> list[int]:
    """The places of cases that stand for others of the same check: the first of each."""
    checks = [case.check for case in cases]
    return [place for place, check in enumerate(checks) if check not in checks[:place]]


def _data(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"data.dataset={{_target_: check_zoo.shapes, fault: {fault}}}", *more), check, status, evidence)


def _model(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"model.fault={fault}", *more), check, status, evidence)


def _loss(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"loss={{_target_: check_photo_parts.Loss, fault: {fault}}}", *more), check, status, evidence)


REGRESSION = ("task=regression", "loss=mse", "data.dataset={_target_: check_zoo.shapes, kind: regression}")
CASES = [
    Case("worst for best", ("checkpoint.mode=min",), "metric-direction", "fail", "checkpoint.mode=min for val/accuracy"),
    Case("a fifth is dropped", ("data.drop_last=true", "data.batch_size=256"), "epoch-length", "warn", "drop_last=true leaves"),
    _data("labels from 1", "missing-classes", "fail", "labels run from 1 to 4"),
    _data("labels out of range", "target-range", "fail", "outside 0 to 3: from 1 to 4"),
    _data("white pages", "augmentation", "fail", "with augmentation",
          "transform.train=[{_target_: check_photo_parts.Batchwise, fault: normalised}]"),
    _data("leaked test", "leakage", "fail", "of 100 of test"),
    _data("duplicate rows", "duplicates", "warn", "exact copies"),
    _data("all zero", "constant-images", "fail", "500 of 500 images have a single value"),
    _data("constant images", "constant-images", "fail", "40 of 500 images"),
    _data("one class", "class-balance", "fail", "every training sample is of class 0"),
    _data("common class", "class-balance", "warn", "training samples per class"),
    _data("one class twice as large", "class-weights", "warn", "the correlation of weight", "loss.class_weights=[2,1,1,1]"),
    _data(
        "swapped channels", "channel-order", "fail", "data.normalize.mean",
        "data.normalize.mean=[0.16,0.5,0.5]", "data.normalize.std=[0.07,0.2,0.2]",
    ),
    _data("swapped channels in test", "channel-order", "fail", "channel means are"),
    _data("dark test", "normalization", "warn", "in test"),
    _data("cast to uint8", "image-range", "fail", "uint8 values from 0 to 1"),
    _data("not scaled", "image-range", "fail", "float32 values from 0 to 2"),
    _data("not a number", "finite-images", "fail", "sample 17 of train", "data.normalize={mean: [0.5], std: [0.25]}"),
    _data("outlier", "outlier-images", "warn", "sample 17 of train"),
    _data("other shapes", "image-shapes", "fail", "2 shapes"),
    _data("channels last", "image-shapes", "warn", "read as 8 channels of 8x3"),
    _data("one name", "missing-classes", "warn", "several classes are called a"),
    _data("unreadable", "readable", "fail", "OSError: the file is truncated"),
    Case("wrong normalisation", ("data.normalize.mean=[127,127,127]", "data.normalize.std=[60,60,60]"),
         "normalization", "fail", "mean [127, 127, 127]"),
    Case("augmentation on validation", ("transform.eval=[{_target_: runner.data.transforms.augment.RandomFlip}]",),
         "evaluation-transform", "fail", "differ when they are read again"),
    Case("empty augmentation", ("transform.train=[{_target_: check_zoo.Blank}]",),
         "augmentation", "fail", "with augmentation"),
    _model("softmax", "logits", "fail", "rows that sum to 1"),
    _model("sigmoid", "logits", "fail", "a sigmoid", "loss=bce"),
    _model("bias before norm", "bias-before-norm", "warn", "conv before norm (BatchNorm2d)"),
    _model("frozen", "frozen-parameters", "warn", "conv.weight, norm.weight, norm.bias"),
    _model("view for permute", "sample-mixing", "fail", "changes the outputs of others"),
    _model("centred", "sample-mixing", "fail", "changes the outputs of others"),
    _model("always training", "modes", "fail", "stay in training mode after eval()"),
    _model("never training", "modes", "fail", "stay in evaluation mode after train(): the model"),
    _model("norm in evaluation", "modes", "warn", "stay in evaluation mode after train(): norm"),
    _model("dropout always on", "repeatable-evaluation", "fail", "differ by"),
    _model("counts evaluations", "evaluation-leaves-state", "fail", "calls"),
    _model("detached", "missing-gradients", "fail", "conv.weight, norm.weight, norm.bias"),
    _model("unused branch", "missing-gradients", "warn", "branch.weight, branch.bias"),
    _model("vanishing", "gradient-scale", "warn", "root mean square"),
    _model("exploding", "gradient-scale", "fail", "root mean square"),
    _model("norm twice", "repeated-norms", "warn", "run several times in a forward pass: norm"),
    _model("unscaled dropout", "output-scale", "warn", "times those in evaluation mode"),
    _model("dead", "gradient-scale", "fail", "is zero"),
    _model("explodes", "initial-loss", "fail", "nan"),
    _model("large head", "initial-loss", "warn", "equal outputs give 1.386 = ln 4"),
    _model("blind", "zero-input", "fail", "of zeros differ"),
    _loss("wrong axis", "loss-of-samples", "warn", "samples together"),
    _loss("sum", "loss-of-samples", "fail", "it is their sum"),
    Case("silent broadcast", (*REGRESSION, "loss={_target_: check_photo_parts.Loss, fault: broadcast}"),
         "loss-broadcast", "fail", "all with all"),
    Case("large targets", (*REGRESSION[:2], "data.dataset={_target_: check_zoo.shapes, kind: regression, fault: large targets}"),
         "target-scale", "warn", "deviation"),
    Case("constant targets", (*REGRESSION[:2], "data.dataset={_target_: check_zoo.shapes, kind: regression, fault: no targets}"),
         "target-scale", "fail", "deviation 0"),
    Case("forgotten zero_grad", ("callbacks={keep: {_target_: check_zoo.KeepsGradients}}",),
         "stale-gradients", "fail", "are not zero when the second step begins"),
    _model("hook that adds up", "stale-gradients", "fail", "conv.weight"),
    Case("evaluation mode in training", ("callbacks={leave: {_target_: check_zoo.LeavesEvaluation}}",),
         "mode-in-training", "fail", "6 modules are in evaluation mode when a step begins"),
    Case("parameters omitted", ("optimizer={_target_: check_zoo.Partial, lr: 0.1}",),
         "optimizer-parameters", "fail", "conv.weight, hidden.weight, head.weight"),
    Case("parameters never zeroed", ("optimizer={_target_: check_zoo.Partial, lr: 0.1}",),
         "stale-gradients", "fail", "conv.weight"),
]  # fmt: skip

OWN = (
    "threads=1", "device=cpu", "data=own", "data.images=[]", "transform=none", "data.batch_size=16", "epochs=30",
    "model=null", "loss=none", "task=null",
)  # fmt: skip
TWO = (
    "~optimizer",
    *(f"+optimizer.{name}={{_target_: torch.optim.Adam, lr: 0.001}}" for name in ("generator", "critic")),
)
TASKS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {  # healthy ones: class, data, model, words
    "gradient penalty": ("WGAN", "own_steps.Digits", "network", ("+model.outputs=64", *TWO)),
    "slope of an energy": ("Energy", "own_steps.Digits", "network", ()),
    "slope at random times": ("Physics", "placeholder", "network", ("+model.outputs=1",)),
    "random queue": ("MoCo", "views", "network", ()),
    "random views": ("SimCLR", "views", "network", ()),
    "noise": ("Masked", "noise", "network", ("+model.outputs=64",)),
    "diffusion": ("Diffusion", "own_steps.Digits", "network", ("+model.outputs=64",)),
    "seeds": ("Reinforce", "seed", "network", ()),
    "mean teacher": ("MeanTeacher", "own_steps.Digits", "network", ()),
    "masks": ("Masked", "own_steps.Digits", "network", ("+model.outputs=64",)),
    "words": ("NextWord", "healthy_tasks.tokens", "Words", ()),
    "one graph": ("Nodes", "healthy_tasks.graph", "network", ()),
    "fields": ("Both", "fields", "network", ()),
    "norms of a critic": ("DCGAN", "own_steps.Digits", "network", ("+model.outputs=64", *TWO)),
    "two ways": ("CycleGAN", "own_steps.Digits", "network", ("+model.outputs=64", *TWO)),
    "losses of layers": ("ForwardForward", "own_steps.Digits", "network", ()),
    "closures": ("Table", "fields", "network",
                 ("+model.inputs=72", "~optimizer", "+optimizer={_target_: torch.optim.LBFGS, line_search_fn: strong_wolfe}")),
    "random pairs": ("Siamese", "comparison", "network", ()),
    "larger pictures": ("SuperResolution", "picture", "pixels", ("+model.outputs=4",)),
    "frozen features": ("StyleTransfer", "picture", "pixels", ()),
    "frames": ("Video", "clip", "network", ("data.images=[frames]",)),
    "texts of images": ("CLIP", "caption", "network", ()),
    "triplets": ("Triplets", "fields", "network", ()),
    "table": ("Table", "fields", "network", ("+model.inputs=72",)),
    "crops of two sizes": ("DINO", "crops", "pixels", ("+model.outputs=16",)),
    "frozen teacher": ("Distillation", "own_steps.Digits", "network", ()),
    "causal attention": ("NextWord", "healthy_tasks.tokens", "GPT", ()),
}  # fmt: skip
