"""Checks of the loss: its value before training, and whether it compares each sample only with its own target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.overfit_batch import SHARE, overfit_samples, train_on_batch
from runner.verbs.check.result import NotApplicable, Result, failed, graded, passed, skipped, warned

_SAMPLES = 12
_TOLERANCE = 1e-3  # relative
_RATE, _STEPS = 1e-3, 6  # of AdamW, within which a high first loss may come down; MNASNet needs 5 or 6


def _different_targets(context: CheckContext) -> Tensor:
    """Targets of a few samples, as different as possible: one of each kind first, then the others."""
    targets = context.targets(context.batch)
    _, kinds = torch.unique(targets.view(len(targets), -1), dim=0, return_inverse=True)
    first = [int((kinds == kind).nonzero()[0]) for kind in range(int(kinds.max()) + 1)]
    order = [*first, *(place for place in range(len(targets)) if place not in set(first))]
    return targets[order[:_SAMPLES]]


def _random_outputs(context: CheckContext, count: int) -> Tensor:
    """Outputs of the shape that the task needs, between 0.05 and 0.95, as some losses take only probabilities."""
    outputs = context.training.task.outputs(context.splits.classes)
    drawn = torch.rand(count, outputs, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    return drawn.to(context.splits.example[0].device)


def _loss(context: CheckContext, outputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(context.training.parts.loss(outputs, targets))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-5)


def initial_loss(context: CheckContext) -> Result:
    """A first loss that is not that of a guess: ln C for C equally likely classes, the variance for regression."""
    if context.found is not None:
        return skipped("the weights come from a checkpoint")
    if context.config.init_from is not None or context.config.model.get("weights") is not None:
        return skipped("the weights are pretrained")
    targets = context.targets(context.batch)
    context.training.state.train()
    with torch.no_grad():
        outputs = context.model(context.batch.images)
        value = float(context.training.parts.loss(outputs, targets))
    if context.classes or not targets.is_floating_point():
        guess, what = _loss(context, torch.zeros_like(outputs), targets), "equal outputs give"
    else:
        mean = targets.float().mean(0, keepdim=True).expand_as(outputs)
        guess, what = _loss(context, mean, targets), "the mean of the targets gives"
    evidence = f"{value:.4g}, where {what} {guess:.4g}"
    if context.classes and _close(guess, math.log(context.classes)):
        evidence += f" = ln {context.classes}"
    if not math.isfinite(value):
        return failed(evidence, "find the operation with debug=anomaly")
    if value > 2 * guess + 0.1:
        curve = train_on_batch(context, overfit_samples(context)[0], _RATE, _STEPS + 1, SHARE * context.left)
        # Large features with a wide last layer, as in EfficientNet: what a few steps undo costs nothing.
        if context.classes and min(curve.losses) <= guess:
            return passed(f"{evidence}; AdamW with {_RATE:g} is below that after at most {len(curve.losses) - 1} steps")
    low = bool(context.classes) and value < 0.5 * guess
    if low and (prior := _loss_of_shares(context, outputs, targets)) is not None:
        evidence += f", and the class shares {prior:.4g}"
        low = value < 0.5 * min(guess, prior)
    fix = "small initial weights in the last layer (for regression also a bias equal to the mean of the targets)"
    return graded(evidence, fix, fail=value > 10 * guess + 1, warn=value > 2 * guess + 0.1 or low)


def _loss_of_shares(context: CheckContext, outputs: Tensor, targets: Tensor) -> float | None:
    """The loss of outputs that know only the class frequencies, as `init=prior_bias` makes them."""
    counts = context.splits.class_counts
    if counts is None or outputs.ndim != 2 or len(counts) != outputs.shape[1]:
        return None
    shares = (counts.clamp_min(1) / counts.clamp_min(1).sum()).to(outputs)
    try:
        return _loss(context, shares.log().expand_as(outputs), targets)
    except (RuntimeError, ValueError):  # a loss that takes only probabilities
        return None


def loss_of_samples(context: CheckContext) -> Result:
    """A loss that is not the mean over the samples: a sum, or one that depends on which samples are together."""
    targets = _different_targets(context)
    outputs, count = _random_outputs(context, len(targets)), len(targets)
    together = _loss(context, outputs, targets)
    alone = sum(_loss(context, outputs[place : place + 1], targets[place : place + 1]) for place in range(count))
    evidence = f"{together:.4g} for {count} samples together, {alone / count:.4g} on average for each alone"
    if _close(together, alone / count):
        return passed(evidence)
    if _close(together, alone):
        fix = "reduction='mean': otherwise batch size and accumulate change the size of a step"
        return failed(f"{evidence}: it is their sum", fix)
    return warned(evidence, "compare each row of the outputs with its own target, and average over the batch")


def loss_axis(context: CheckContext) -> Result:
    """A softmax over the batch instead of the classes."""
    targets = _different_targets(context)
    outputs = _random_outputs(context, len(targets))
    if outputs.shape[1] < 2 or len(targets) < 2:
        return skipped("one output")
    generator = torch.Generator().manual_seed(1)
    value = _loss(context, outputs, targets)
    try:
        by_row, by_column = (
            _loss(context, outputs + torch.rand(shape, generator=generator).to(outputs), targets)
            for shape in ((len(outputs), 1), (1, outputs.shape[1]))
        )
    except (RuntimeError, ValueError):  # a loss that takes only probabilities
        return passed("the loss takes probabilities, and computes no softmax")
    evidence = f"adding a number to the outputs of each sample changes the loss by {by_row - value:.3g}, "
    evidence += f"to those of each class by {by_column - value:.3g}"
    over_batch = _close(by_column, value) and not _close(by_row, value)
    return graded(evidence, "dim=1 in softmax or log_softmax: dim=0 is the batch", fail=over_batch)


def loss_broadcast(context: CheckContext) -> Result:
    """Shapes that broadcast, (B,) against (B, 1): every output is compared with every target."""
    targets = _different_targets(context)
    outputs, count = _random_outputs(context, len(targets)), len(targets)
    together = _loss(context, outputs, targets)
    pairs = [_loss(context, outputs[a : a + 1], targets[b : b + 1]) for a in range(count) for b in range(count)]
    own, every = sum(pairs[:: count + 1]) / count, sum(pairs) / count**2
    if _close(own, every):
        return skipped("all targets are alike")
    evidence = f"{together:.4g}; each output with its own target gives {own:.4g}, all with all {every:.4g}"
    fix = "give outputs and targets the same shape: squeeze both or none"
    return graded(evidence, fix, fail=_close(together, every) or _close(together, every * count))


def accumulation(context: CheckContext) -> Result:
    """Gradients of small batches that do not add up to that of the large batch, as accumulate requires."""
    batch, model, parts = context.batch, context.model, context.training.parts
    half, targets = len(batch.images) // 2, context.targets(batch)
    if half < 1:
        raise NotApplicable("there is only one image")
    model.eval()  # BatchNorm and dropout depend on the batch by design

    def gradient(*pieces: slice) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        for piece in pieces:
            loss = parts.loss(model(batch.images[piece]), targets[piece])
            if loss.requires_grad:
                (loss / len(pieces)).backward()  # type: ignore[no-untyped-call]
        return [p.grad.detach().flatten().double() for p in model.parameters() if p.grad is not None]

    whole, summed = gradient(slice(0, 2 * half)), gradient(slice(0, half), slice(half, 2 * half))
    if not whole:
        return skipped("there is no gradient")
    large, small = torch.cat(whole), torch.cat(summed)
    apart = float((large - small).norm() / large.norm().clamp_min(1e-12))
    ratio = float(large.norm() / small.norm().clamp_min(1e-12))
    evidence = f"they differ by {apart:.2g}, the large batch's is {ratio:.3g} times as long"
    fix = "a loss that is the mean over the samples, and samples that do not depend on each other"
    return graded(evidence, fix, fail=apart > 0.02)
