"""Checks of the loss: its value before training, what it compares, and where it is lowest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.lab.check.checks.loop import train_on_batch
from runner.lab.check.context import CheckContext
from runner.lab.check.guess import free_outputs, optimize_outputs, overfit_samples, takes_logits
from runner.lab.check.result import Result, check, failed, graded, join_names, need, passed, warned
from runner.lab.check.split_stats import is_classes

_COMPARED, _FREE = 12, 32  # samples that are compared with each other, and whose outputs are optimized
_TOLERANCE = 1e-3  # relative
_RATE, _STEPS = 1e-3, 4  # of AdamW, in which a high first loss may come down
_LEFT = 0.2  # of what it is too high by; of MNASNet up to 0.16 is left, with too large a head at least 0.27
_RIGHT, _CORRELATED = 0.9, 0.9
_IGNORED = 1e-6  # share of the largest gradient


def _loss(context: CheckContext, outputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(context.training.loss(outputs, targets))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-5)


@check("loss", any_task=True)
def initial_loss(context: CheckContext) -> Result:
    """A first loss that is not that of a guess: ln C for C equally likely classes, the variance for regression."""
    if not context.supervised:
        first = float(context.loss().detach())
        return graded(f"{first:.4g}", "find the operation with debug=anomaly", fail=not math.isfinite(first))
    need(context.found is None, "the weights come from a checkpoint")
    pretrained = context.config.init_from is not None or context.config.model.get("weights") is not None
    need(not pretrained, "the weights are pretrained")
    targets = context.targets(context.batch)
    context.training.state.train()
    with torch.no_grad():
        outputs = context.model(context.batch.images)
    value = _loss(context, outputs, targets)
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
    high, low = value > 2 * guess + 0.1, bool(context.classes) and value < 0.5 * guess
    if high and context.classes:
        curve = train_on_batch(context, overfit_samples(context).images, _RATE, _STEPS + 1)
        # Large features with a wide last layer, as in EfficientNet: what a few steps undo costs nothing.
        left = (min(curve.losses) - guess) / max(curve.losses[0] - guess, 1e-12)
        if left <= _LEFT:
            undone = f"{len(curve.losses) - 1} steps of AdamW undo {min(1.0, 1 - left):.0%} of the difference"
            return passed(f"{evidence}; {undone}")
    counts = context.splits.class_counts
    if low and counts is not None and outputs.ndim == 2 and len(counts) == outputs.shape[1]:
        # Outputs that know only the class frequencies, as `init=prior_bias` makes them.
        shares = (counts.clamp_min(1) / counts.clamp_min(1).sum()).to(outputs)
        known = shares.log() if context.cached(takes_logits) else shares
        prior = _loss(context, known.expand_as(outputs), targets)
        evidence += f", and the class shares {prior:.4g}"
        low = value < 0.5 * min(guess, prior)
    fix = "small initial weights in the last layer (for regression also a bias equal to the mean of the targets)"
    return graded(evidence, fix, fail=value > 10 * guess + 1, warn=high or low)


def _probe(context: CheckContext) -> tuple[Tensor, Tensor, Tensor]:
    """Random outputs (N, outputs), different targets (N, ...), and the loss of each output with each target (N, N)."""
    targets = context.targets(context.batch)
    _, kinds = torch.unique(targets.view(len(targets), -1), dim=0, return_inverse=True)
    first = [int((kinds == kind).nonzero()[0]) for kind in range(int(kinds.max()) + 1)]
    # One of each kind first, then the others.
    targets = targets[[*first, *(place for place in range(len(targets)) if place not in set(first))][:_COMPARED]]
    size = len(targets), context.training.task.outputs(context.splits.classes)
    # Between 0.05 and 0.95, as some losses take only probabilities.
    outputs = 0.05 + 0.9 * torch.rand(size, generator=torch.Generator().manual_seed(0)).to(targets.device)
    pairs = [[_loss(context, a[None], b[None]) for b in targets] for a in outputs]
    return outputs, targets, torch.tensor(pairs, dtype=torch.float64)


@check("loss")
def loss_of_samples(context: CheckContext) -> Result:
    """A loss that is not the mean over the samples: a sum, or one that depends on which samples are together."""
    outputs, targets, pairs = context.cached(_probe)
    together, alone = _loss(context, outputs, targets), float(pairs.diagonal().mean())
    evidence = f"{together:.4g} for {len(pairs)} samples together, {alone:.4g} on average for each alone"
    if _close(together, alone):
        return passed(evidence)
    if _close(together, alone * len(pairs)):
        fix = "reduction='mean': otherwise batch size and accumulate change the size of a step"
        return failed(f"{evidence}: it is their sum", fix)
    return warned(evidence, "compare each row of the outputs with its own target, and average over the batch")


@check("loss")
def loss_axis(context: CheckContext) -> Result:
    """A softmax over the batch instead of the classes."""
    outputs, targets, _ = context.cached(_probe)
    need(min(outputs.shape) >= 2, "one output")
    generator = torch.Generator().manual_seed(1)
    value = _loss(context, outputs, targets)
    shifts = [torch.rand(shape, generator=generator) for shape in ((len(outputs), 1), (1, outputs.shape[1]))]
    need(context.cached(takes_logits), "the loss takes probabilities, and computes no softmax")
    by_row, by_column = (_loss(context, outputs + shift.to(outputs), targets) for shift in shifts)
    evidence = f"adding a number to the outputs of each sample changes the loss by {by_row - value:.3g}, "
    evidence += f"to those of each class by {by_column - value:.3g}"
    over_batch = _close(by_column, value) and not _close(by_row, value)
    return graded(evidence, "dim=1 in softmax or log_softmax: dim=0 is the batch", fail=over_batch)


@check("loss")
def loss_broadcast(context: CheckContext) -> Result:
    """Shapes that broadcast, (B,) against (B, 1): every output is compared with every target."""
    outputs, targets, pairs = context.cached(_probe)
    together, own, every = _loss(context, outputs, targets), float(pairs.diagonal().mean()), float(pairs.mean())
    need(not _close(own, every), "all targets are alike")
    evidence = f"{together:.4g}; each output with its own target gives {own:.4g}, all with all {every:.4g}"
    fix = "give outputs and targets the same shape: squeeze both or none"
    return graded(evidence, fix, fail=_close(together, every) or _close(together, every * len(pairs)))


@check("loss")
def accumulation(context: CheckContext) -> Result:
    """Gradients of small batches that do not add up to that of the large batch, as accumulate requires."""
    batch, model, loss_of = context.batch, context.model, context.training.loss
    half, targets = len(batch.images) // 2, context.targets(batch)
    model.eval()  # BatchNorm and dropout depend on the batch by design

    def gradient(*pieces: slice) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        for piece in pieces:
            loss = loss_of(model(batch.images[piece]), targets[piece])
            if loss.requires_grad:
                (loss / len(pieces)).backward()
        found = [p.grad.detach().flatten().double() for p in model.parameters() if p.grad is not None]
        need(found, "there is no gradient")
        return torch.cat(found)

    large, small = gradient(slice(0, 2 * half)), gradient(slice(0, half), slice(half, 2 * half))
    apart = float((large - small).norm() / large.norm().clamp_min(1e-12))
    ratio = float(large.norm() / small.norm().clamp_min(1e-12))
    evidence = f"they differ by {apart:.2g}, the large batch's is {ratio:.3g} times as long"
    fix = "a loss that is the mean over the samples, and samples that do not depend on each other"
    return graded(evidence, fix, fail=apart > 0.02)


@check("objective")
def loss_minimum(context: CheckContext) -> Result:
    """A loss that is not lowest at the right answers: of the wrong sign, detached, constant, or independent of the targets."""
    targets = context.targets(context.batch)[:_FREE]
    need(len(torch.unique(targets, dim=0)) >= 2, "all targets are alike")
    reached, losses = optimize_outputs(context, targets)
    fix = "compare outputs and targets by differentiable operations, and return a lower value for better outputs"
    if len(losses) == 1:
        return failed("no gradient reaches the outputs: argmax, round, detach(), .item() or no_grad in the loss", fix)
    evidence = f"optimizing the outputs directly brings the loss from {losses[0]:.4g} to {losses[-1]:.4g}; they "
    reached, values = reached.float(), targets.float()
    if is_classes(targets):
        right = float((reached.argmax(1) == targets).float().mean())
        return graded(f"{evidence}are right for {right:.0%} of {len(targets)} samples", fix, fail=not right >= _RIGHT)
    need(reached.shape == values.shape, "outputs and targets have different shapes")
    related = float(torch.corrcoef(torch.stack([reached.flatten(), values.flatten()]))[0, 1].nan_to_num())
    evidence += f"have a correlation of {related:.2f} with the targets"
    return graded(evidence, fix, fail=not related >= _CORRELATED)


@check("objective")
def loss_coverage(context: CheckContext) -> Result:
    """Samples, classes or outputs that the loss ignores, for example with a class weight of 0 or ignore_index."""
    targets = context.targets(context.batch)
    free, scored = free_outputs(context, targets)
    _, loss = scored()
    need(loss.requires_grad, "no gradient reaches the outputs")
    (gradient,) = torch.autograd.grad(loss, free)
    sizes = gradient.norm(dim=1)
    need(sizes.isfinite().all() and sizes.any(), "the gradient of the outputs is zero or not finite")
    ignored = sizes <= _IGNORED * sizes.max()
    if is_classes(targets):
        present = torch.unique(targets).tolist()
        mean = {each: float(sizes[targets == each].mean()) for each in present}
        share = {each: float(ignored[targets == each].float().mean()) for each in present}
        blind = [each for each in present if share[each] == 1]
        # If classes are ignored in part, the loss ignores samples by their place in the batch, not by their class.
        if blind and len(blind) < len(present) and set(share.values()) <= {0, 1}:
            evidence = f"samples of class {join_names(blind)} have no gradient: the loss ignores them"
            return failed(evidence, "no class weight of 0, and no ignore_index that is a class")
        low, high = min(mean, key=mean.__getitem__), max(mean, key=mean.__getitem__)
        if mean[high] > 300 * mean[low] and not bool(ignored.any()):
            evidence = f"a sample of class {high} counts {mean[high] / max(mean[low], 1e-12):,.0f} times as much "
            return warned(f"{evidence}as one of class {low}", "class weights that differ less")
        columns = gradient.abs().amax(0)
        used = columns > _IGNORED * columns.max()
        if unused := [each for each in present if each < len(columns) and not bool(used[each])]:
            evidence = f"outputs of class {join_names(unused)} have no gradient"
            return failed(evidence, "compare all outputs with the targets")
    if not bool(ignored.any()):
        return passed(f"each of {len(sizes)} samples and its output has a gradient")
    evidence = f"{int(ignored.sum())} of {len(sizes)} samples of a batch have no gradient"
    fix = "average over all samples of the batch, not over a part of it, unless intended, as in hard example mining"
    return graded(evidence, fix, fail=float(ignored.float().mean()) > 0.8, warn=True)
