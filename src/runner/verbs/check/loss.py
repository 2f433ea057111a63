"""Checks of the loss: its value before training, and whether it compares each sample with its own target alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext, NotApplicable
from runner.verbs.check.overfit_batch import SHARE, learn, overfit_samples
from runner.verbs.check.result import Result, check, failed, passed, skipped, warned

_SAMPLES = 12
_APART = 1e-3  # relative
_RATE, _UNDONE = 1e-3, 5  # steps of AdamW that a high first loss may take to come down


def _targets(context: CheckContext) -> Tensor:
    """Targets of a few samples, as different as there are."""
    targets = context.targets(context.batch)
    rows = targets.flatten(1) if targets.ndim > 1 else targets[:, None]
    _, group = torch.unique(rows, dim=0, return_inverse=True)
    # One of each kind first, then the others.
    first = [int((group == kind).nonzero()[0]) for kind in range(int(group.max()) + 1)]
    order = [*first, *(place for place in range(len(targets)) if place not in set(first))]
    return targets[order[:_SAMPLES]]


def _outputs(context: CheckContext, count: int, seed: int = 0) -> Tensor:
    """Made-up outputs of the shape that the task wants, between 0.05 and 0.95, as some losses take probabilities alone."""
    outputs = context.training.task.outputs(context.splits.classes)
    drawn = torch.rand(count, outputs, generator=torch.Generator().manual_seed(seed)) * 0.9 + 0.05
    return drawn.to(context.splits.example[0].device)


def _loss(context: CheckContext, outputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(context.training.parts.loss(outputs, targets))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_APART, abs_tol=1e-5)


@check
def initial_loss(context: CheckContext) -> Result:
    """A first loss that is not that of a guess: ln C for C equally likely classes, the variance for numbers."""
    if context.found is not None:
        return skipped("the weights are those of a checkpoint")
    if context.config.init_from is not None or context.config.model.get("weights") is not None:
        return skipped("the weights are trained ones")
    batch, parts = context.batch, context.training.parts
    targets = context.targets(batch)
    context.training.state.train()
    with torch.no_grad():
        outputs = context.model(batch.images)
        value = float(parts.loss(outputs, targets))
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
    fix = "small initial weights in the last layer (and for numbers a bias of their mean)"
    if value > 2 * guess + 0.1:
        course = learn(context, overfit_samples(context)[0], _RATE, _UNDONE + 1, SHARE * context.left)
        # Large features with a wide last layer, as in EfficientNet: what is undone at once costs nothing.
        if context.classes and min(course.losses) <= guess:
            return passed(
                f"{evidence}; AdamW with {_RATE:g} is below that after {len(course.losses) - 1} steps or fewer"
            )
    if value > 10 * guess + 1:
        return failed(evidence, fix)
    low = bool(context.classes) and value < 0.5 * guess
    if low and (prior := _loss_of_shares(context, outputs, targets)) is not None:
        evidence += f", and the shares of the classes {prior:.4g}"
        low = value < 0.5 * min(guess, prior)
    return warned(evidence, fix) if value > 2 * guess + 0.1 or low else passed(evidence)


def _loss_of_shares(context: CheckContext, outputs: Tensor, targets: Tensor) -> float | None:
    """The loss of outputs that know how common each class is and no more, as `init=prior_bias` makes them."""
    counts = context.splits.class_counts
    if counts is None or outputs.ndim != 2 or len(counts) != outputs.shape[1]:
        return None
    shares = (counts.clamp_min(1) / counts.clamp_min(1).sum()).to(outputs)
    try:
        return _loss(context, shares.log().expand_as(outputs), targets)
    except (RuntimeError, ValueError):  # a loss that takes probabilities alone
        return None


@check
def loss_of_samples(context: CheckContext) -> Result:
    """A loss that is not the mean over the samples: a sum, or one that depends on which samples come together."""
    targets = _targets(context)
    outputs = _outputs(context, len(targets))
    together = _loss(context, outputs, targets)
    alone = [_loss(context, outputs[place : place + 1], targets[place : place + 1]) for place in range(len(targets))]
    mean = sum(alone) / len(alone)
    evidence = f"{together:.4g} for {len(alone)} samples together, {mean:.4g} on average for each alone"
    if _close(together, mean):
        return passed(evidence)
    if _close(together, sum(alone)):
        return failed(
            f"{evidence}: it is their sum", "reduction='mean': a batch's size, and accumulate, change the step else"
        )
    fix = "compare each row of outputs with its own target, and average over the batch"
    return warned(evidence, fix)


@check
def loss_axis(context: CheckContext) -> Result:
    """A softmax over the batch in place of the classes."""
    targets = _targets(context)
    outputs = _outputs(context, len(targets))
    if outputs.shape[1] < 2 or len(targets) < 2:
        return skipped("one output")
    generator = torch.Generator().manual_seed(1)
    value = _loss(context, outputs, targets)
    try:
        by_row, by_column = (
            _loss(context, outputs + torch.rand(shape, generator=generator).to(outputs), targets)
            for shape in ((len(outputs), 1), (1, outputs.shape[1]))
        )
    except (RuntimeError, ValueError):  # a loss that takes probabilities alone
        return passed("the loss takes probabilities, and computes no softmax")
    changes = f"by {by_row - value:.3g}, to those of each class by {by_column - value:.3g}"
    evidence = f"adding a number to the outputs of each sample changes the loss {changes}"
    if _close(by_column, value) and not _close(by_row, value):
        return failed(evidence, "dim=1 in softmax or log_softmax: dim=0 is the batch")
    return passed(evidence)


@check
def loss_broadcast(context: CheckContext) -> Result:
    """Shapes that broadcast, (B,) against (B, 1): every output is compared with every target."""
    targets = _targets(context)
    outputs = _outputs(context, len(targets))
    count = len(targets)
    together = _loss(context, outputs, targets)
    pairs = [_loss(context, outputs[a : a + 1], targets[b : b + 1]) for a in range(count) for b in range(count)]
    own = sum(pairs[:: count + 1]) / count
    every = sum(pairs) / count**2
    evidence = f"{together:.4g}, where each output with its own target gives {own:.4g}, all with all {every:.4g}"
    if _close(own, every):
        return skipped("the targets are all alike")
    if _close(together, every) or _close(together, every * count):
        return failed(evidence, "give outputs and targets one shape: squeeze both or none")
    return passed(evidence)


@check
def accumulation(context: CheckContext) -> Result:
    """Gradients of small batches that do not add up to that of the large one, as accumulate needs."""
    training, batch = context.training, context.batch
    model, parts = training.model, training.parts
    half = len(batch.images) // 2
    if half < 1:
        raise NotApplicable("there is one image only")
    targets = context.targets(batch)
    model.eval()  # sets BatchNorm and dropout apart, which depend on the batch by design

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
    evidence = f"{apart:.2g} apart, the large batch's is {ratio:.3g} times as long"
    if apart > 0.02:
        return failed(
            evidence, "a loss that is the mean over the samples, and samples that do not depend on each other"
        )
    return passed(evidence)
