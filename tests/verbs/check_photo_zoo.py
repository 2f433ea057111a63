"""Trainings on photographs that are broken on purpose: models, losses, optimizers, callbacks and schedules, and the list of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from check_zoo import Case
from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions with BatchNorm and a linear head, with one fault."""

    def __init__(
        self,
        num_classes: int,
        fault: str = "",
        in_channels: int = 3,
        momentum: float = 0.1,
        dropout: float = 0.1,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.fault = fault
        self.conv = nn.Conv2d(in_channels, 12, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12, momentum=momentum)
        self.deep = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, num_classes)
        nn.init.normal_(self.head.weight, std=0.05)
        nn.init.zeros_(self.head.bias)
        if fault == "list":
            self.blocks = [nn.Linear(24, 24) for _ in range(2)]
        elif fault == "dict":
            self.blocks = {"first": nn.Linear(24, 24), "second": {"inner": nn.Linear(24, 24)}}
        elif fault == "plain tensor":
            self.scale = torch.ones(24, requires_grad=True)
        elif fault == "tensors in a list":
            self.scales = [torch.ones(24, requires_grad=True) for _ in range(2)]
        elif fault == "hidden in an object":
            self.kept = Holder()
        elif fault == "constant weights":
            nn.init.constant_(self.deep.weight, 0.05)
        elif fault == "zero weights":
            self.hidden = nn.Linear(24, 24)
            nn.init.zeros_(self.hidden.weight)
            nn.init.constant_(self.hidden.bias, 0.1)
            nn.init.constant_(self.head.weight, 0.05)

    def forward(self, images: Tensor) -> Tensor:
        fault = self.fault
        features = F.relu(self.norm(self.conv(images)))
        features = F.relu(self.deep(features)).mean((2, 3))
        if fault == "list":
            for block in self.blocks:
                features = F.relu(block(features)) + features
        elif fault == "dict":
            features = features + F.relu(self.blocks["first"](features)) + self.blocks["second"]["inner"](features)
        elif fault == "plain tensor":
            features = features * self.scale
        elif fault == "tensors in a list":
            features = features * self.scales[0] + self.scales[1]
        elif fault == "hidden in an object":
            features = self.kept.layer(features)
        elif fault == "made in forward":
            features = features + F.relu(nn.Linear(24, 24)(features))
        elif fault == "registered in forward":
            self.late = nn.Linear(24, 24)
            features = features + F.relu(self.late(features))
        elif fault == "zero weights":
            features = F.relu(self.hidden(features))
        if fault == "dropped":
            features = F.dropout(features, 0.97, self.training)
        outputs = self.head(self.dropout(features))
        last = {"relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "clamp": lambda x: x.clamp(-1, 1)}
        last |= {"softplus": F.softplus, "unit length": lambda x: F.normalize(x, dim=1), "log-softmax": lambda x: x.log_softmax(1)}
        last |= {"abs": torch.abs, "relu6": F.relu6}
        return last[fault](outputs) if fault in last else outputs


class Holder:
    """An object of one's own that is no module."""

    def __init__(self) -> None:
        self.layer = nn.Linear(24, 24)


class Loss(nn.Module):
    """Cross-entropy, or squared errors of numbers, with one fault."""

    def __init__(self, fault: str, **unused: Any) -> None:
        super().__init__()
        self.fault = fault
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        fault = self.fault
        if fault == "learned scale":
            return F.cross_entropy(outputs * self.scale, targets)
        if fault == "wrong sign":
            return -F.cross_entropy(outputs, targets)
        if fault == "detached":
            return F.cross_entropy(outputs.detach(), targets)
        if fault == "item":
            return torch.tensor(F.cross_entropy(outputs, targets).item(), requires_grad=True)
        if fault == "constant":
            return F.cross_entropy(outputs, targets) * 0 + 1
        if fault == "blind":
            return F.cross_entropy(outputs, torch.zeros_like(targets))
        if fault == "own answers":
            return F.cross_entropy(outputs, outputs.argmax(1))
        if fault == "argmax":
            return (outputs.argmax(1) != targets).float().mean().requires_grad_()
        if fault == "wrong neighbour":
            return F.cross_entropy(outputs, (targets + 1) % outputs.shape[1])
        if fault == "rolled":
            return F.cross_entropy(outputs, targets.roll(1))
        if fault == "mean of the batch":
            return (outputs.softmax(1).mean(0) - F.one_hot(targets, outputs.shape[1]).float().mean(0)).square().sum()
        if fault == "entropy":
            return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        if fault == "first sample":
            return F.cross_entropy(outputs[:1], targets[:1])
        if fault == "half of the batch":
            return F.cross_entropy(outputs[: max(1, len(outputs) // 2)], targets[: max(1, len(outputs) // 2)])
        if fault == "ignores class 0":
            return F.cross_entropy(outputs, targets, ignore_index=0) if bool((targets != 0).any()) else outputs.sum() * 0
        if fault == "zero weight":
            weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
            return (F.cross_entropy(outputs, targets, reduction="none") * weight[targets]).mean()
        if fault == "extreme weight":
            weight = torch.tensor([1.0, 1.0, 1e-4, 1.0])
            return (F.cross_entropy(outputs, targets, reduction="none") * weight[targets]).mean()
        if fault == "difference":
            return (outputs - targets).mean()
        if fault == "squared mean":
            return (outputs - targets).mean().square()
        if fault == "means":
            return (outputs.mean() - targets.mean()).square()
        return F.cross_entropy(outputs, targets)


class Ascent(torch.optim.SGD):
    """Steps uphill."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=group["lr"])


class Forgets(torch.optim.AdamW):
    """Puts the weights back after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        super().step(closure)
        for group, before in zip(self.param_groups, kept, strict=True):
            for weight, old in zip(group["params"], before, strict=True):
                weight.data.lerp_(old, 0.9999)


class Shuffles(torch.optim.SGD):
    """Steps along the gradients of nobody: noise of their size."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(torch.randn_like(weight) * 0.02)


class PutsBack:
    """A callback that puts the first weights back, after each step or each evaluation."""

    def __init__(self, after: str) -> None:
        self.after = after

    def on_start(self, loop: Any) -> None:
        self.kept = {name: tensor.clone() for name, tensor in loop.state.model.state_dict().items()}

    def on_step(self, loop: Any) -> None:
        if self.after == "steps":
            loop.state.model.load_state_dict(self.kept)

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        if self.after == "evaluations":
            loop.state.model.load_state_dict(self.kept)


class SlowsDown:
    """A callback that sets the rate to nothing."""

    def on_step(self, loop: Any) -> None:
        for group in loop.state.optimizer.param_groups:
            group["initial_lr"] = group["lr"] = 1e-12


class Curve:
    """A schedule of a kind."""

    def __init__(self, kind: str, total_steps: int) -> None:
        self.kind, self.total = kind, total_steps

    def factor(self, step: int) -> float:
        share = step / max(1, self.total)
        return {
            "rises": 10 ** (2 * share - 1.5),
            "gone at once": float(step < 2) + 1e-6,
            "spike": 1000.0 if 0.5 < share < 0.7 else 1.0,
            "negative": 1 - 2 * share,
            "nothing": 1e-6,
        }[self.kind]

    def observe(self, metric: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Batchwise:
    """A batch transform with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, images: Tensor, draws: Any) -> Tensor:
        floats = images.float() / 255 if images.dtype == torch.uint8 else images
        side = images.shape[-1]
        if self.fault == "one image":
            return images[:1].expand_as(images).clone()
        if self.fault == "pairs":
            return images[::2].repeat_interleave(2, 0)[: len(images)]
        if self.fault == "permuted":
            return images.flip(0)
        if self.fault == "rolled and mirrored":
            return images.roll(1, 0).flip(-1)
        if self.fault == "overflow":
            return (images.to(torch.int64) + 110).to(torch.uint8)
        if self.fault == "normalised":
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            return (floats - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        if self.fault == "bytes as floats":
            return images.float()
        if self.fault == "corner":
            return F.interpolate(floats[..., : side // 8, : side // 8], (side, side), mode="bilinear")
        if self.fault == "background":
            return torch.cat([floats[..., :5, :]] * 7, 2)[..., :side, :]
        if self.fault == "tiny contrast":
            return 0.5 + 0.05 * (floats - 0.5)
        if self.fault == "channels":
            return images.flip(1)
        if self.fault == "mostly erased":
            floats = floats.clone()
            floats[torch.arange(len(floats)) % 3 > 0] = 0.5
            return floats
        if self.fault == "dark":
            return floats * 0.3
        return images


def _data(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"data.dataset={{_target_: check_photos.dataset, fault: {fault}}}", *more), check, status, evidence)


def _net(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"model.fault={fault}", *more), check, status, evidence)


def _loss(fault: str, check: str, status: str, evidence: str) -> Case:
    return Case(f"{fault} loss", (f"loss={{_target_: check_photo_zoo.Loss, fault: {fault}}}",), check, status, evidence)


def _batch(fault: str, check: str, status: str, evidence: str, where: str = "train") -> Case:
    words = (f"transform.{where}=[{{_target_: check_photo_zoo.Batchwise, fault: {fault}}}]",)
    return Case(f"{fault} {where}", words, check, status, evidence)


def _set(fault: str, words: tuple[str, ...], check: str, status: str, evidence: str) -> Case:
    return Case(fault, words, check, status, evidence)


def _curve(fault: str, status: str, evidence: str) -> Case:
    words = (f"scheduler={{_target_: check_photo_zoo.Curve, kind: {fault}, total_steps: null}}",)
    return Case(f"{fault} schedule", words, "schedule", status, evidence)


NUMBERS = ("task={_target_: runner.engine.tasks.Regression}", "loss={_target_: runner.optim.losses.MeanSquaredError}",
           "data.dataset={_target_: check_photos.dataset, kind: regression}")  # fmt: skip
SGD = "optimizer={_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9"
ADAM = "optimizer={_target_: torch.optim.AdamW, lr: 0.005"
CASES = [
    *(_data(f"again {how}", "near-duplicates", "warn", "of 120 of test")
      for how in ("mirrored", "shifted", "cut out", "rescaled", "mirrored and brighter", "encoded")),
    *(_data(f"test {how}", "split-source", "warn", "in test than in train") for how in
      ("grey", "pale", "blurred", "nearest", "zoomed", "warm", "low contrast", "gamma", "few bits", "framed", "compressed", "noisy")),
    _data("corner pixel", "image-shortcut", "warn", "row 0, column 0"),
    _data("border", "image-shortcut", "warn", "the pixel in row"),
    _data("stamp", "image-shortcut", "warn", "class 2"),
    _data("pixel in the middle", "image-shortcut", "warn", "row 14, column 15"),
    _data("alpha channel", "image-shortcut", "warn", "channel 3 is"),
    _data("one image", "duplicates", "fail", "exact copies"),
    _data("permuted", "learnable", "warn", "logistic regression"),
    _data("permuted test", "split-targets", "fail", "of test"),
    _data("no such class in test", "missing-classes", "warn", "no sample of test is of class 1"),
    _data("sorted", "shuffling", "fail", "100% of each of the first batches", "data.shuffle=false"),
    _data("overflow", "wrap-around", "fail", "almost 255 apart"),
    _data("overflow of contrast", "wrap-around", "fail", "almost 255 apart"),
    _data("normalised", "normalization", "fail", "normalised already", "data.normalize={mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}"),
    _data("divided twice", "image-range", "fail", "float32 values from 0 to 0.003"),
    _set("other unit", (*NUMBERS[:2], "data.dataset={_target_: check_photos.dataset, kind: regression, fault: other unit}"),
         "target-shift", "warn", "deviation"),
    _batch("one image", "batch-repeats", "fail", "100% of"),
    _batch("pairs", "batch-repeats", "fail", "look exactly like another"),
    _batch("permuted", "batch-pairing", "fail", "the picture of another sample"),
    _batch("rolled and mirrored", "batch-pairing", "fail", "the picture of another sample"),
    _batch("overflow", "wrap-around", "fail", "in training batches"),
    _batch("normalised", "model-input", "fail", "in training"),
    _batch("normalised", "model-input", "fail", "in an evaluation", "eval"),
    _batch("bytes as floats", "model-input", "fail", "in an evaluation", "eval"),
    _batch("corner", "augmented-classes", "warn", "of augmented images"),
    _batch("background", "augmented-classes", "warn", "of augmented images"),
    _batch("tiny contrast", "augmentation", "fail", "deviation"),
    _batch("mostly erased", "augmentation", "fail", "almost no contrast left"),
    _batch("dark", "augmentation", "warn", "the mean of a channel moves"),
    *(_net(fault, "unregistered-parameters", "fail", evidence) for fault, evidence in (
        ("list", "blocks[0].bias"), ("dict", "blocks['first'].bias"), ("plain tensor", "scale"),
        ("tensors in a list", "scales[0]"), ("hidden in an object", "kept.layer.bias"),
        ("made in forward", "made in forward"), ("registered in forward", "made in forward"))),
    _set("learned scale loss", ("loss={_target_: check_photo_zoo.Loss, fault: learned scale}",),
         "unregistered-parameters", "fail", "loss.scale"),
    _net("constant weights", "equal-units", "warn", "deep.weight"),
    _net("zero weights", "equal-units", "fail", "hidden.weight"),
    *(_net(fault, "reachable-targets", "fail", "with every answer right") for fault in ("tanh", "clamp", "unit length")),
    *(_net(fault, "reachable-targets", "warn", "outputs are from 0") for fault in ("relu",)),
    _net("abs", "reachable-targets", "warn", "to inf"),
    *(_set(f"{fault} of numbers", (*NUMBERS, f"model.fault={fault}"), "reachable-targets", "fail", "of the targets are outside")
      for fault in ("relu", "sigmoid", "tanh", "softplus")),
    *(_loss(fault, "loss-minimum", "fail", evidence) for fault, evidence in (
        ("wrong sign", "are right for"), ("detached", "no gradient"), ("item", "are right for"),
        ("constant", "are right for"), ("blind", "are right for"), ("own answers", "are right for"), ("argmax", "are right for"),
        ("wrong neighbour", "are right for"), ("rolled", "are right for"), ("mean of the batch", "are right for"),
        ("entropy", "are right for"))),
    *(_set(f"{fault} loss", (*NUMBERS[::2], f"loss={{_target_: check_photo_zoo.Loss, fault: {fault}}}"),
           "loss-minimum", "fail", "correlation") for fault in ("difference", "squared mean", "means")),
    _loss("first sample", "loss-coverage", "fail", "of 64 samples"),
    _loss("half of the batch", "loss-coverage", "warn", "32 of 64 samples"),
    _loss("ignores class 0", "loss-coverage", "fail", "class 0"),
    _loss("zero weight", "loss-coverage", "fail", "class 2"),
    _loss("extreme weight", "loss-coverage", "warn", "times as much as one of class 2"),
    *(_set(f"{words} for AdamW", (f"{ADAM}, {words}}}",), "optimizer-settings", status, evidence)
      for words, status, evidence in (
        ("weight_decay: 100", "fail", "takes 50"), ("betas: [0.999, 0.9]", "warn", "betas"), ("eps: 1.0", "warn", "eps=1"),
        ("maximize: true", "fail", "maximize"), ("weight_decay: 2.0", "warn", "takes 1.0%"))),
    _set("AdamW at 0.1", ("optimizer={_target_: torch.optim.AdamW, lr: 0.1}",), "optimizer-settings", "warn", "lr=0.1 for AdamW"),
    _set("Adam at 1", ("optimizer={_target_: torch.optim.Adam, lr: 1.0}",), "optimizer-settings", "fail", "lr=1 for Adam"),
    _set("momentum of 1", ("optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 1.0}",), "optimizer-settings", "fail", "momentum=1"),
    _set("SGD with decay", (f"{SGD}, weight_decay: 0.5}}",), "optimizer-settings", "fail", "takes 5.0%"),
    _set("dampened", (f"{SGD}, dampening: 1.0}}",), "optimizer-settings", "fail", "dampening=1"),
    _curve("rises", "fail", "the warm-up takes"),
    _curve("gone at once", "fail", "practically 0"),
    _curve("spike", "fail", "the rate is exceeded"),
    _curve("negative", "fail", "negative"),
    _curve("nothing", "fail", "never reached"),
    _set("warm-up longer than the run", ("scheduler={_target_: runner.optim.schedules.Constant, total_steps: null, warmup: 500}",),
         "schedule", "fail", "the warm-up takes"),
    _set("schedule of a shorter run", ("scheduler={_target_: runner.optim.schedules.Cosine, total_steps: 3, warmup: 0.0}",),
         "schedule", "fail", "practically 0"),
    _set("SGD clipped to nothing", (f"{SGD}}}", "clip.norm=1e-6"), "step-size", "fail", "clip.norm=1e-06"),
    _set("SGD with values clipped to nothing", (f"{SGD}}}", "clip.value=1e-9"), "step-size", "fail", "of their size"),
    _set("adaptive clipping to nothing", (f"{SGD}}}", "clip.agc=1e-7"), "step-size", "fail", "of their size"),
    _set("SGD at 1e-6", ("optimizer={_target_: torch.optim.SGD, lr: 1.0e-6}",), "step-size", "fail", "of their size"),
    _set("AdamW at 1e-7", ("optimizer={_target_: torch.optim.AdamW, lr: 1.0e-7}",), "step-size", "fail", "of their size"),
    _set("SGD at 50", ("optimizer={_target_: torch.optim.SGD, lr: 50.0}",), "step-size", "fail", "of their size"),
    _set("average that never moves", ("ema=0.99999", "averaging.warmup=false"), "averaging", "fail", "are initial weights"),
    _set("average longer than the run", ("ema=0.9999",), "averaging", "warn", "never reached"),
    _set("average of nothing", ("ema=0.01",), "averaging", "warn", "hardly differs"),
    _set("momentum 0", ("model.momentum=0.0",), "norm-statistics", "fail", "stay what they are"),
    _set("momentum 1", ("model.momentum=1.0",), "norm-statistics", "fail", "of the last batch"),
    _set("momentum 1e-5", ("model.momentum=1.0e-5",), "norm-statistics", "fail", "stay what they are"),
    _set("batches of one", ("data.batch_size=1",), "norm-statistics", "fail", "batch_size=1"),
    _set("batches of two", ("data.batch_size=2",), "norm-statistics", "warn", "batch_size=2"),
    _set("last batch of one", ("data.batch_size=15",), "norm-statistics", "warn", "one sample"),
    _set("dropout of 0.9", ("model.dropout=0.9",), "dropout-rate", "warn", "90%"),
    _net("dropped", "dropout-rate", "fail", "in forward"),
    _set("accumulates all", ("accumulate=100",), "epoch-length", "warn", "accumulate=100"),
    _set("drops most", ("data.batch_size=150", "data.drop_last=true"), "epoch-length", "warn", "drop_last"),
    *(_set(f"{name} optimizer", (f"optimizer={{_target_: check_photo_zoo.{name}, lr: 0.01}}",), "short-training", "fail", "with AdamW")
      for name in ("Ascent", "Forgets", "Shuffles")),
    *(_set(f"weights put back after {after}", (f"callbacks={{own: {{_target_: check_photo_zoo.PutsBack, after: {after}}}}}",),
           "short-training", "fail", "without callbacks") for after in ("steps", "evaluations")),
    _set("rate set to nothing", ("callbacks={own: {_target_: check_photo_zoo.SlowsDown}}",),
         "short-training", "fail", "without callbacks"),
    _loss("blind", "overfit", "fail", "the answers stay wrong"),
]  # fmt: skip

HEALTHY = {
    "as it is": (),
    "SGD": (f"{SGD}, nesterov: true, weight_decay: 0.0005}}",),
    "Adam": ("optimizer={_target_: torch.optim.Adam, lr: 0.003}",),
    "RMSprop": ("optimizer={_target_: torch.optim.RMSprop, lr: 0.001}",),
    "fine-tuning rate": ("optimizer={_target_: torch.optim.AdamW, lr: 0.0001, weight_decay: 0.05}", "epochs=40"),
    "clipped by norm": ("clip.norm=1.0",),
    "clipped adaptively": ("clip.agc=0.01",),
    "average": ("ema=0.95",),
    "long average": ("ema=0.99", "epochs=30"),
    "cosine": ("scheduler={_target_: runner.optim.schedules.Cosine, total_steps: null, warmup: 0.05}",),
    "constant": ("scheduler={_target_: runner.optim.schedules.Constant, total_steps: null, warmup: 5}",),
    "warm-up, stable, decay": ("scheduler={_target_: runner.optim.schedules.WSD, total_steps: null}",),
    "numbers": NUMBERS,
    "batches of 64": ("data.batch_size=64",),
    "accumulated": ("accumulate=4",),
    "crops and colour": ("transform.train=[{_target_: runner.data.resized_crop.RandomResizedCrop, scale: [0.25, 1.0]}, "
                         "{_target_: runner.data.augment.RandomFlip}, {_target_: runner.data.colour.ColorJitter, brightness: 0.4, "
                         "contrast: 0.4, saturation: 0.4, hue: 0.0}]",),
    "small crops": ("transform.train=[{_target_: runner.data.resized_crop.RandomResizedCrop, scale: [0.08, 1.0]}]",),
    "RandAugment": ("transform.train=[{_target_: runner.data.policies.RandAugment}]",),
    "erasing": ("transform.train=[{_target_: runner.data.augment.RandomErasing, p: 0.5, share: 0.25}]",),
    "mixup": ("transform.mix={_target_: runner.data.mixing.Mixup, alpha: 0.2, p: 1.0}",),
    "images of floats": ("data.dataset={_target_: check_photos.dataset, fault: floats}",),
    "64 pixels": ("data.dataset={_target_: check_photos.dataset, side: 64}",),
    "binary cross-entropy": ("loss={_target_: runner.optim.losses.BinaryCrossEntropy}",),
    "focal": ("loss={_target_: runner.optim.losses.Focal}",),
    "smoothed": ("loss={_target_: runner.optim.losses.CrossEntropy, label_smoothing: 0.1}",),
    "transformer": ("model={_target_: runner.models.vit.ViT, num_classes: null, image_size: null, in_channels: null, dim: 32, "
                    "depth: 2, heads: 2}",),
}  # fmt: skip
