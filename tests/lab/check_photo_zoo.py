"""Trainings on photographs that are broken on purpose, one fault each, for `check` to find; and healthy ones."""

from __future__ import annotations

from check_zoo import Case


def _data(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(
        fault, (f"data.dataset={{_target_: check_photos.dataset, fault: {fault}}}", *more), check, status, evidence
    )


def _net(fault: str, check: str, status: str, evidence: str, *more: str) -> Case:
    return Case(fault, (f"model.fault={fault}", *more), check, status, evidence)


def _loss(fault: str, check: str, status: str, evidence: str) -> Case:
    return Case(
        f"{fault} loss", (f"loss={{_target_: check_photo_parts.Loss, fault: {fault}}}",), check, status, evidence
    )


def _batch(fault: str, check: str, status: str, evidence: str, where: str = "train") -> Case:
    words = (f"transform.{where}=[{{_target_: check_photo_parts.Batchwise, fault: {fault}}}]",)
    return Case(f"{fault} {where}", words, check, status, evidence)


def _curve(fault: str, status: str, evidence: str) -> Case:
    words = (f"scheduler={{_target_: check_photo_parts.Curve, kind: {fault}, total_steps: null}}",)
    return Case(f"{fault} schedule", words, "schedule", status, evidence)


NUMBERS = ("task={_target_: runner.tasks.regression.Regression}", "loss={_target_: runner.optim.losses.MeanSquaredError}",
           "data.dataset={_target_: check_photos.dataset, kind: regression}")  # fmt: skip
SGD = "optimizer={_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9"
ADAM = "optimizer={_target_: torch.optim.AdamW, lr: 0.005"
CASES = [
    *(_data(f"again {how}", "near-duplicates", "warn", "of 120 of test")
      for how in ("mirrored", "rescaled", "mirrored and brighter", "encoded")),
    _data("late copies", "near-duplicates", "warn", "of 256 of test"),
    _data("one image", "duplicates", "fail", "exact copies"),
    _data("permuted", "learnable", "warn", "linear model"),
    _data("permuted test", "split-targets", "fail", "on test"),
    _data("no such class in test", "missing-classes", "warn", "no sample of test is of class 1"),
    _data("normalised", "normalization", "fail", "already normalized",
          "data.normalize={mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}"),
    _data("divided twice", "image-range", "fail", "float32 values from 0 to 0.003"),
    _batch("one image", "batch-repeats", "fail", "100% of"),
    _batch("pairs", "batch-repeats", "fail", "look exactly like another"),
    _batch("permuted", "batch-pairing", "fail", "the picture of another sample"),
    _batch("rolled and mirrored", "batch-pairing", "fail", "the picture of another sample"),
    _batch("tiny contrast", "augmentation", "fail", "deviation"),
    _batch("mostly erased", "augmentation", "fail", "almost no contrast left"),
    _batch("dark", "augmentation", "warn", "the mean of a channel moves"),
    *(_net(fault, "unregistered-parameters", "fail", evidence) for fault, evidence in (
        ("list", "blocks[0].bias"), ("dict", "blocks['first'].bias"), ("plain tensor", "scale"),
        ("tensors in a list", "scales[0]"), ("hidden in an object", "kept.layer.bias"),
        ("made in forward", "made in forward"), ("registered in forward", "made in forward"))),
    Case("learned scale loss", ("loss={_target_: check_photo_parts.Loss, fault: learned scale}",),
         "unregistered-parameters", "fail", "loss.scale"),
    _net("constant weights", "equal-units", "warn", "deep.weight"),
    _net("zero weights", "equal-units", "fail", "hidden.weight"),
    *(_net(fault, "reachable-targets", "fail", "with every answer right") for fault in ("tanh", "clamp", "unit length")),
    *(_net(fault, "reachable-targets", "warn", "outputs are from 0") for fault in ("relu",)),
    _net("abs", "reachable-targets", "warn", "to inf"),
    *(Case(f"{fault} of numbers", (*NUMBERS, f"model.fault={fault}"), "reachable-targets", "fail", "of the targets are outside")
      for fault in ("relu", "sigmoid", "tanh", "softplus")),
    *(_loss(fault, "loss-minimum", "fail", evidence) for fault, evidence in (
        ("wrong sign", "are right for"), ("item", "are right for"),
        ("constant", "are right for"), ("blind", "are right for"), ("own answers", "are right for"), ("argmax", "are right for"),
        ("wrong neighbour", "are right for"), ("rolled", "are right for"), ("mean of the batch", "are right for"),
        ("entropy", "are right for"))),
    *(Case(f"{fault} loss", (*NUMBERS[::2], f"loss={{_target_: check_photo_parts.Loss, fault: {fault}}}"),
           "loss-minimum", "fail", "correlation") for fault in ("difference", "squared mean", "means")),
    _loss("first sample", "loss-of-samples", "warn", "samples together"),
    _loss("half of the batch", "loss-of-samples", "warn", "samples together"),
    _loss("ignores class 0", "class-share", "fail", "class 0"),
    _loss("zero weight", "class-share", "fail", "class 2"),
    _loss("extreme weight", "class-share", "warn", "times as much as one of class 2"),
    *(Case(f"{words} for AdamW", (f"{ADAM}, {words}}}",), "optimizer-settings", status, evidence)
      for words, status, evidence in (
        ("weight_decay: 100", "fail", "takes 50"), ("betas: [0.999, 0.9]", "warn", "betas"), ("eps: 1.0", "warn", "eps=1"),
        ("maximize: true", "fail", "maximize"), ("weight_decay: 2.0", "warn", "takes 1.0%"))),
    Case("AdamW at 0.1", ("optimizer={_target_: torch.optim.AdamW, lr: 0.1}",), "optimizer-settings", "warn", "lr=0.1 for AdamW"),
    Case("Adam at 1", ("optimizer={_target_: torch.optim.Adam, lr: 1.0}",), "optimizer-settings", "fail", "lr=1 for Adam"),
    Case("momentum of 1", ("optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 1.0}",),
         "optimizer-settings", "fail", "momentum=1"),
    Case("SGD with decay", (f"{SGD}, weight_decay: 0.5}}",), "optimizer-settings", "fail", "takes 5.0%"),
    Case("dampened", (f"{SGD}, dampening: 1.0}}",), "optimizer-settings", "fail", "dampening=1"),
    _curve("rises", "fail", "the warm-up takes"),
    _curve("gone at once", "fail", "practically 0"),
    _curve("spike", "fail", "the rate is exceeded"),
    _curve("negative", "fail", "negative"),
    _curve("nothing", "fail", "never reached"),
    Case("warm-up longer than the run", ("scheduler={_target_: runner.optim.schedules.Constant, total_steps: null, warmup: 500}",),
         "schedule", "fail", "the warm-up takes"),
    Case("schedule of a shorter run", ("scheduler={_target_: runner.optim.schedules.Cosine, total_steps: 3, warmup: 0.0}",),
         "schedule", "fail", "practically 0"),
    Case("SGD clipped to nothing", (f"{SGD}}}", "grad_clip.norm=1e-6"), "step-size", "fail", "grad_clip.norm=1e-06"),
    Case("SGD with values clipped to nothing", (f"{SGD}}}", "grad_clip.value=1e-9"), "step-size", "fail", "of their size"),
    Case("adaptive clipping to nothing", (f"{SGD}}}", "grad_clip.agc=1e-7"), "step-size", "fail", "of their size"),
    Case("SGD at 1e-6", ("optimizer={_target_: torch.optim.SGD, lr: 1.0e-6}",), "step-size", "fail", "of their size"),
    Case("AdamW at 1e-7", ("optimizer={_target_: torch.optim.AdamW, lr: 1.0e-7}",), "step-size", "fail", "of their size"),
    Case("SGD at 50", ("optimizer={_target_: torch.optim.SGD, lr: 50.0}",), "step-size", "fail", "of their size"),
    Case("average that never moves", ("ema=0.99999", "averaging.warmup=false"), "averaging", "fail", "are initial weights"),
    Case("momentum 0", ("model.momentum=0.0",), "norm-statistics", "fail", "keep their initial values"),
    Case("momentum 1", ("model.momentum=1.0",), "norm-statistics", "fail", "of the last batch"),
    Case("momentum 1e-5", ("model.momentum=1.0e-5",), "norm-statistics", "fail", "keep their initial values"),
    Case("batches of one", ("data.batch_size=1",), "norm-statistics", "fail", "batch_size=1"),
    Case("batches of two", ("data.batch_size=2",), "norm-statistics", "warn", "batch_size=2"),
    Case("last batch of one", ("data.batch_size=15",), "norm-statistics", "warn", "one sample"),
    Case("dropout of 0.9", ("model.dropout=0.9",), "dropout-rate", "warn", "90%"),
    Case("worst loss for best", ("checkpoint.monitor=val/loss", "checkpoint.mode=max"), "metric-direction", "fail",
         "whose min is best"),
    Case("accumulates all", ("accumulate=100",), "epoch-length", "warn", "accumulate=100"),
    Case("drops most", ("data.batch_size=150", "data.drop_last=true"), "epoch-length", "warn", "drop_last"),
    *(Case(f"{name} optimizer", (f"optimizer={{_target_: check_photo_parts.{name}, lr: 0.01}}",),
           "step-direction", "fail", "errors")
      for name in ("Ascent", "Shuffles")),
    *(Case(fault, (f"callbacks={{own: {{_target_: check_photo_parts.Undoes, fault: {fault}}}}}",),
           "callbacks-effect", status, "left")
      for fault, status in (
        ("first weights after steps", "fail"), ("first weights after evaluations", "fail"), ("no rate", "warn"))),
    Case("other unit", (*NUMBERS[:2], "data.dataset={_target_: check_photos.dataset, kind: regression, fault: other unit}"),
         "target-scale", "warn", "in test"),
    Case("upside down", ("data.dataset={_target_: runner.data.sources.digits.digits}",
         "transform.eval=[{_target_: check_photo_parts.Batchwise, fault: upside down}]"),
         "orientation", "warn", "turned by 180 degrees"),
    *(_data(fault, "near-duplicates", "warn", "of 120 of test") for fault in ("again rotated", "again upside down", "again grey")),
    *(_data(fault, "split-targets", "fail", "on test") for fault in ("swapped test", "renamed classes in test")),
    *(_net(fault, "unregistered-parameters", "fail", "") for fault in ("closure", "not a leaf")),
    _net("norms in a tuple", "build", "fail", ""),
    _net("same kernels", "equal-units", "", "conv.weight"),
    *(_net(fault, "reachable-targets", "", "outputs are from") for fault in ("hardtanh", "leaky end", "sigmoid twice")),
    _net("drops maps", "dropout-rate", "warn", "norm.1"),
    *(_loss(fault, "loss-minimum", "fail", "are right for")
      for fault in ("clamped", "cosine", "rounded", "sorted", "last class", "log of the mean")),
    _loss("every second", "loss-of-samples", "warn", "samples together"),
    _batch("neighbours swapped", "batch-pairing", "fail", "the picture of another sample"),
    _batch("half repeated", "batch-repeats", "fail", "look exactly like another"),
    _batch("negative", "augmentation", "", "the mean of a channel moves"),
    *(Case(fault, (f"callbacks={{own: {{_target_: check_photo_parts.Undoes, fault: {fault}}}}}",), "callbacks-effect")
      for fault in ("clamps", "noise", "new layers")),
    Case("wrong sign of matrices", ("optimizer={_target_: check_photo_parts.Backwards, lr: 0.005}",), "step-direction", "fail"),
    Case("bytes in test", (*NUMBERS[:2], "data.dataset={_target_: check_photos.dataset, kind: regression, fault: bytes}"),
         "target-scale", "warn", "in test"),
    _curve("halved each step", "", ""),
    _curve("nothing until the end", "", ""),
    Case("momentum 0.9999", ("optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 0.9999}",), "optimizer-settings"),
    Case("Adam decay 1", ("optimizer={_target_: torch.optim.Adam, lr: 0.001, weight_decay: 1.0}",), "optimizer-settings"),
    Case("Adagrad 1e-9", ("optimizer={_target_: torch.optim.Adagrad, lr: 1.0e-9}",), "step-size"),
    Case("NAdam 0.8", ("optimizer={_target_: torch.optim.NAdam, lr: 0.8}",), "optimizer-settings"),
    Case("ema without warm-up", ("ema=0.999", "averaging.warmup=false"), "averaging"),
]  # fmt: skip

HEALTHY = {
    "as it is": (),
    "SGD": (f"{SGD}, nesterov: true, weight_decay: 0.0005}}",),
    "Adam": ("optimizer={_target_: torch.optim.Adam, lr: 0.003}",),
    "RMSprop": ("optimizer={_target_: torch.optim.RMSprop, lr: 0.001}",),
    "fine-tuning rate": ("optimizer={_target_: torch.optim.AdamW, lr: 0.0001, weight_decay: 0.05}", "epochs=40"),
    "clipped by norm": ("grad_clip.norm=1.0",),
    "clipped adaptively": ("grad_clip.agc=0.01",),
    "average": ("ema=0.95",),
    "long average": ("ema=0.99", "epochs=30"),
    "cosine": ("scheduler={_target_: runner.optim.schedules.Cosine, total_steps: null, warmup: 0.05}",),
    "constant": ("scheduler={_target_: runner.optim.schedules.Constant, total_steps: null, warmup: 5}",),
    "warm-up, stable, decay": ("scheduler={_target_: runner.optim.schedules.WSD, total_steps: null}",),
    "numbers": NUMBERS,
    "batches of 64": ("data.batch_size=64",),
    "accumulated": ("accumulate=4",),
    "crops and colour": ("transform.train=[{_target_: runner.data.transforms.resized_crop.RandomResizedCrop, scale: [0.25, 1.0]}, "
                         "{_target_: runner.data.transforms.augment.RandomFlip}, "
                         "{_target_: runner.data.transforms.color_jitter.ColorJitter, brightness: 0.4, contrast: 0.4, "
                         "saturation: 0.4, hue: 0.0}]",),
    "small crops": ("transform.train=[{_target_: runner.data.transforms.resized_crop.RandomResizedCrop, scale: [0.08, 1.0]}]",),
    "RandAugment": ("transform.train=[{_target_: runner.data.transforms.auto_augment.RandAugment}]",),
    "erasing": ("transform.train=[{_target_: runner.data.transforms.augment.RandomErasing, p: 0.5, share: 0.25}]",),
    "mixup": ("transform.mix={_target_: runner.data.transforms.mixing.Mixup, alpha: 0.2, p: 1.0}",),
    "images of floats": ("data.dataset={_target_: check_photos.dataset, fault: floats}",),
    "64 pixels": ("data.dataset={_target_: check_photos.dataset, side: 64}",),
    "binary cross-entropy": ("loss={_target_: runner.optim.losses.BinaryCrossEntropy}",),
    "focal": ("loss={_target_: runner.optim.losses.Focal}",),
    "smoothed": ("loss={_target_: runner.optim.losses.CrossEntropy, label_smoothing: 0.1}",),
    "transformer": ("model={_target_: runner.models.vit.ViT, num_classes: null, image_size: null, in_channels: null, dim: 32, "
                    "depth: 2, heads: 2}",),
    # Statistics that are this slow need a long training.
    "slow BatchNorm": ("model.momentum=0.0003", "epochs=2000"),
}  # fmt: skip
# Each of these settings is in one of the trainings that the suite checks.
COMBINED = (
    ("as it is",),
    ("SGD", "clipped by norm", "cosine", "crops and colour"),
    ("Adam", "batches of 64", "constant", "images of floats"),
    ("RMSprop", "accumulated", "smoothed", "erasing"),
    ("long average", "fine-tuning rate"),
    ("clipped adaptively", "average", "small crops", "warm-up, stable, decay"),
    ("numbers", "slow BatchNorm"),
    ("mixup", "binary cross-entropy"),
    ("64 pixels",),
    ("transformer", "focal", "RandAugment"),
)
# Healthy trainings of what the program ships
SHIPPED = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_photos.dataset}", "data.batch_size=32"),
    *("data.normalize={mean: null, std: null}", "epochs=12", "data.hflip=0.5", "data.split.val=0.2"),
)
OF_NUMBERS = ("task=regression", "loss=mse", "data.dataset={_target_: check_photos.dataset, kind: regression}")
RESNET = ("model=resnet18_cifar", "model.width=8")
VIT = ("model=vit_tiny", "model.dim=48", "model.depth=3")
CNN = ("model=small_cnn", "model.width=16")
ZOO = ("model=torchvision", "optimizer.lr=0.001")

TRAININGS: dict[str, tuple[str, ...]] = {
    "small_cnn": CNN,
    "strong augmentation, sgd": (*CNN, "transform=strong", "optimizer=sgd", "optimizer.lr=0.02", "scheduler=cosine"),
    "mlp, adam": ("model=mlp", "model.hidden=[64,64]", "optimizer=adam", "scheduler=constant", "transform=none"),
    "resnet, zero gamma, sgd": (*RESNET, "init=zero_gamma", "optimizer=sgd", "optimizer.lr=0.05"),
    "resnet, drop path, mixing": (*RESNET, "model.drop_path=0.2", "transform=mix"),
    "vision transformer": (*VIT, "optimizer.lr=0.001"),
    "vision transformer, clipping": (
        *VIT,
        "model.drop_path=0.1",
        "optimizer.lr=0.001",
        "grad_clip.norm=1.0",
        "ema=0.99",
    ),
    "residual blocks that start at zero": (
        "model={_target_: check_photo_parts.Residual, num_classes: null, width: 16}",
    ),
    "muon": (*CNN, "optimizer=muon"),
    "rmsprop, steps": (*CNN, "optimizer=rmsprop", "optimizer.lr=0.001", "scheduler=step"),
    "focal loss, smoothed averages": (*CNN, "loss=focal", "ema=0.98"),
    "binary cross-entropy": (*CNN, "loss=bce"),
    "label smoothing, accumulation": (*CNN, "loss.label_smoothing=0.1", "accumulate=2", "data.batch_size=16"),
    "numbers, small_cnn": (*CNN, *OF_NUMBERS),
    "numbers, vision transformer": (*VIT, *OF_NUMBERS, "optimizer.lr=0.001"),
    "stochastic weight averaging": (*CNN, "swa=0.75", "scheduler=wsd"),
    "random augmentation": (*CNN, "transform=randaugment", "init=prior_bias"),
    "trivial augmentation, adaptive clipping": (*RESNET, "transform=trivialaugment", "grad_clip.agc=0.05"),
    "augmix": (*CNN, "transform=augmix", "loss.class_weights=balanced"),
    # Of 32 pixels its last layers see one: the statistics of a batch are those of its few images
    "efficientnet_b0": (*ZOO, "model.name=efficientnet_b0", "data.dataset={_target_: check_photos.dataset, side: 64}"),
    # Its BatchNorm has a momentum of 0.0003, which needs a long training.
    "mnasnet0_5": (*ZOO, "model.name=mnasnet0_5", "transform=resized_crop", "epochs=2000"),
    "mobilenet_v3_small": (*ZOO, "model.name=mobilenet_v3_small", "transform=none"),
}
# Those that every check is made of in the suite; for the others the checks that need many steps take too long there.
WHOLE = ("mlp, adam", "residual blocks that start at zero", "random augmentation", "numbers, small_cnn")
