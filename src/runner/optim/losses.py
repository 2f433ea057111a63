"""Losses: the mean over the samples of a batch.

No sample's contribution depends on the other samples of its batch (class weights are normalised over the classes, not
over the batch), so that gradients accumulated over micro-batches equal the gradient of the whole; only `smp_loss` is
different. Shapes must match exactly: nothing is broadcast. Logits of 16 bits are converted to float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import UserError, first_line, nearest, require


class _ClassLoss(nn.Module):
    """Base of losses over class logits: checks shapes, holds class weights, and takes the mean over pixels that count."""

    weight: Tensor | None

    def __init__(
        self,
        class_weights: list[float] | Literal["balanced"] | None,
        num_classes: int | None,
        class_counts: Tensor | None,
        ignore_index: int,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        if num_classes is not None and num_classes < 2:
            # The softmax of a single output is always 1, so nothing would be learned.
            raise ValueError(f"num_classes must be at least 2, got {num_classes}; for one number use loss=mse")
        self.num_classes = num_classes
        # Not persistent: it follows from config and data, and a checkpoint only contains the model's tensors.
        self.register_buffer("weight", _class_weights(class_weights, num_classes, class_counts), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of logits (B, C) and targets: classes int64 (B,) or probabilities float (B, C).

        Or of logits (B, C, ...) and classes int64 (B, ...), such as those of pixels: the mean over all that are not
        `ignore_index`, and 0 if none is left.

        Raises:
            ValueError: the shapes or types do not fit.
        """
        if logits.ndim < 3 or targets.ndim < 2:
            return self._loss(*self._checked(logits, targets), "mean")
        if targets.dtype != torch.int64 or targets.shape != logits.shape[:1] + logits.shape[2:]:
            raise ValueError(_mismatch(logits, targets, "classes int64 (B, ...) for logits (B, C, ...)"))
        # As rows: on CUDA, torch's loss of images is refused by deterministic=true, and this one is not
        counts = (targets != self.ignore_index).flatten()
        rows = self._checked(logits.movedim(1, -1).flatten(0, -2), targets.flatten().where(counts, 0))
        return self._loss(*rows, "none").where(counts, 0).sum() / counts.sum().clamp_min(1)

    def _loss(self, logits: Tensor, targets: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        """The `mean` over the samples, or with `none` the losses (B,), for classes only."""
        raise NotImplementedError

    def _checked(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits (B, C) in at least float32, targets, and the class weights (C,) of the type of the logits."""
        _check_matrix(logits, self.num_classes)
        is_classes = targets.shape == logits.shape[:1] and targets.dtype is torch.int64
        if not is_classes and not (targets.is_floating_point() and targets.shape == logits.shape):
            raise ValueError(_mismatch(logits, targets, "classes int64 (B,) or probabilities float (B, C)"))
        logits = _at_least_float32(logits)
        targets = targets if is_classes else targets.to(logits.dtype)
        return logits, targets, None if self.weight is None else self.weight.to(logits.dtype)


class CrossEntropy(_ClassLoss):
    """Cross-entropy of softmax probabilities, for one class per sample or for soft targets.

    Equals `torch.nn.functional.cross_entropy` except for its weighting: sum(w_i * loss_i) / B.

    Args:
        label_smoothing: share of each target that is spread evenly over all classes, from 0 to 1.
        class_weights: one weight per class, or "balanced" (inverse to the class's count in the training data);
            scaled to a mean of 1 over the classes.
        num_classes: checked against the logits if given.
        class_counts: training samples per class, int64 (C,); required for "balanced".
        ignore_index: class of pixels that do not count, where samples have many.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        class_weights: list[float] | Literal["balanced"] | None = None,
        num_classes: int | None = None,
        class_counts: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(class_weights, num_classes, class_counts, ignore_index)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
        self.label_smoothing = label_smoothing

    def _loss(self, logits: Tensor, targets: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        # torch's mean of weighted losses is over the weights
        over_samples = weight is not None and reduction == "mean"
        how = "sum" if over_samples else reduction
        loss = F.cross_entropy(logits, targets, weight, reduction=how, label_smoothing=self.label_smoothing)
        return loss / len(logits) if over_samples else loss


class Focal(_ClassLoss):
    """Cross-entropy with each class's term scaled by (1 - p)^gamma, so that confident predictions count less.

    After Lin et al. (arXiv:1708.02002), over softmax probabilities; with gamma=0 it is the cross-entropy.

    Args:
        gamma: strength of the scaling; not negative.
        class_weights, num_classes, class_counts, ignore_index: see `CrossEntropy`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        gamma: float = 2.0,
        class_weights: list[float] | Literal["balanced"] | None = None,
        num_classes: int | None = None,
        class_counts: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(class_weights, num_classes, class_counts, ignore_index)
        if not 0 <= gamma < float("inf"):
            raise ValueError(f"gamma must not be negative, got {gamma}")
        self.gamma = gamma

    def _loss(self, logits: Tensor, targets: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        log_p = F.log_softmax(logits, dim=1)
        # The clamp keeps the gradient of the power finite where p is 1 and gamma below 1.
        rest = -torch.expm1(log_p).clamp(max=-torch.finfo(log_p.dtype).tiny)
        terms = -log_p * rest.pow(self.gamma)
        terms = terms if weight is None else terms * weight
        # Probabilities of a mixed batch: every class counts by its share
        of_targets = terms * targets if targets.is_floating_point() else terms.gather(1, targets[:, None]).squeeze(1)
        return of_targets if reduction == "none" else of_targets.sum() / len(logits)


class _DenseLoss(nn.Module):
    """Base of losses that compare outputs with targets of the same shape."""

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of outputs and targets (B, C)."""
        raise NotImplementedError

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of outputs (B, C) and targets: classes int64 (B,), made one-hot, or float (B, C).

        If C is 1, targets may be (B,) of either type. Outputs with more dimensions, such as images, take targets of their shape.

        Raises:
            ValueError: the shapes or types do not fit.
        """
        if logits.ndim < 3 or logits.shape != targets.shape:
            _check_matrix(logits, self.num_classes)
        logits = _at_least_float32(logits)
        return self.loss(logits, _dense(logits, targets))


class BinaryCrossEntropy(_DenseLoss):
    """Binary cross-entropy of each output (one-vs-rest), averaged over the outputs; targets are probabilities.

    Args:
        pos_weight: weight of the positive targets: one for each output, or one number for all; "auto" takes the number of
            training samples without a label by that with it, so that both count equally.
        target_threshold: targets above it become 1 and all others 0, so that both classes of a mixed image count fully (Wightman et
            al., arXiv:2110.00476); from 0 to 1.
        num_classes: checked against the logits if given.
        label_counts: training samples without and with each label, int64 (2, C); required for "auto".

    Raises:
        ValueError: an argument is out of range.
    """

    pos_weight: Tensor | None

    def __init__(
        self,
        pos_weight: list[float] | float | Literal["auto"] | None = None,
        num_classes: int | None = None,
        label_counts: Tensor | None = None,
        target_threshold: float | None = None,
    ) -> None:
        super().__init__(num_classes)
        if target_threshold is not None and not 0 <= target_threshold < 1:
            raise ValueError(f"target_threshold must be from 0 to below 1, got {target_threshold}")
        self.target_threshold = target_threshold
        # Not persistent, as class weights are.
        self.register_buffer("pos_weight", _positive_weights(pos_weight, num_classes, label_counts), persistent=False)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples and outputs."""
        weight = None if self.pos_weight is None else self.pos_weight.to(logits.dtype)
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).to(targets.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight)


class MeanSquaredError(_DenseLoss):
    """Squared difference, averaged over the outputs: for regression, or for classes made one-hot."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples and outputs."""
        return F.mse_loss(logits, targets)


def _check_matrix(logits: Tensor, num_classes: int | None) -> None:
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise ValueError(f"the model must return logits (B, C) for at least one sample, got {tuple(logits.shape)}")
    if num_classes is not None and logits.shape[1] != num_classes:
        raise ValueError(f"the model returns {logits.shape[1]} outputs, and the loss is for num_classes={num_classes}")


def _mismatch(logits: Tensor, targets: Tensor, allowed: str) -> str:
    kind = str(targets.dtype).removeprefix("torch.")
    return f"targets {kind} {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}; expected: {allowed}"


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _dense(logits: Tensor, targets: Tensor) -> Tensor:
    """Targets with shape and type of the logits: classes become one-hot, a vector becomes one column."""
    if targets.shape == logits.shape and targets.is_floating_point():
        return targets.to(logits.dtype)
    known = targets.is_floating_point() or targets.dtype == torch.int64
    if known and targets.shape == logits.shape[:1]:
        if logits.shape[1] == 1:
            return targets.to(logits.dtype)[:, None]
        if not targets.is_floating_point():
            return F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    raise ValueError(_mismatch(logits, targets, "float (B, C), classes int64 (B,), or (B,) for a single output"))


def _positive_weights(
    given: Sequence[float] | float | str | None, num_classes: int | None, label_counts: Tensor | None
) -> Tensor | None:
    """Weights float32 (C,) or (1,), or None if positives and negatives count equally."""
    if given is None:
        return None
    if isinstance(given, str):
        counts = _counted(given, "auto", "pos_weight", label_counts, "a data set with an attribute targets")
        # A label that never occurs would have an infinite weight
        for row, words in ((1, "with every label; labels without"), (0, "without every label; labels of all")):
            if bad := (counts[row] == 0).nonzero().flatten().tolist():
                raise ValueError(f"pos_weight=auto needs training samples {words}: {bad}")
        # The ratio of negatives to positives gives both the same total weight
        weights = counts[0].double() / counts[1]
    else:
        weights = torch.tensor(given if isinstance(given, Sequence) else [given], dtype=torch.float64)
        if not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise ValueError(f"pos_weight must be one or several numbers above 0, got {given}")
    if num_classes is not None and len(weights) not in (1, num_classes):
        raise ValueError(f"pos_weight must have one weight for each of {num_classes} outputs, got {len(weights)}")
    return weights.float()


def _class_weights(
    given: Sequence[float] | str | None, num_classes: int | None, class_counts: Tensor | None
) -> Tensor | None:
    """Weights float32 (C,) with mean 1, or None if all classes count equally."""
    if given is None:
        return None
    if isinstance(given, str):
        counts = _counted(given, "balanced", "class_weights", class_counts, "data with classes")
        if empty := (counts == 0).nonzero().flatten().tolist():
            raise ValueError(f"class_weights=balanced needs training samples of every class; classes without: {empty}")
        # The inverse frequency gives every class the same total weight
        weights = 1.0 / counts.double()
    else:
        weights = torch.tensor(given, dtype=torch.float64)
        if weights.ndim != 1 or not bool((torch.isfinite(weights) & (weights >= 0)).all() and weights.any()):
            raise ValueError(f"class_weights must be numbers that are not negative, and not all 0, got {list(given)}")
    if num_classes is not None and len(weights) != num_classes:
        raise ValueError(f"class_weights must have one weight for each of {num_classes} classes, got {len(weights)}")
    # With a mean of 1, the loss keeps its scale, and so does the learning rate
    return (weights / weights.mean()).float()


def _counted(given: str, word: str, name: str, counts: Tensor | None, needed: str) -> Tensor:
    """The counts of training samples that weights given as a word follow from."""
    if given != word:
        raise ValueError(f"{name} must be numbers, '{word}' or null, got '{given}'")
    if counts is None:
        raise ValueError(f"{name}={word} needs {needed}, whose samples can be counted")
    return counts


class NoLoss(nn.Module):
    """The loss of a task that computes it in its `training_step`."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, *args: Any) -> Tensor:
        """Raises `ValueError`."""
        raise ValueError("loss=none computes nothing: the task needs a training_step and an evaluation_step")


def smp_loss(name: str, ignore_index: int | None = None, options: Mapping[str, Any] = {}) -> nn.Module:
    """Build a loss of logits (B, C, H, W) and class numbers (B, H, W).

    Args:
        name: class in `segmentation_models_pytorch.losses`, such as DiceLoss.
        ignore_index: class of pixels that do not count.
        options: more arguments of the class; `mode` is "multiclass".

    Raises `UserError` if the package is not installed, there is no such loss, or it does not take the options.
    """
    require("loss", "runner[smp]", "segmentation_models_pytorch")
    from segmentation_models_pytorch import losses

    kinds = {
        each: kind for each, kind in vars(losses).items() if "mode" in getattr(kind.__init__, "__annotations__", {})
    }
    if name not in kinds:
        raise UserError("loss.name", f"there is no '{name}' of several classes", ", ".join(kinds), nearest(name, kinds))
    ignoring = {"ignore_index": ignore_index} if "ignore_index" in inspect.signature(kinds[name]).parameters else {}
    try:
        made: nn.Module = kinds[name]("multiclass", **ignoring, **options)
    except TypeError as error:
        raise UserError("loss.options", first_line(error)) from error
    made.register_forward_pre_hook(lambda _, given: (_at_least_float32(given[0]), *given[1:]))
    return made
