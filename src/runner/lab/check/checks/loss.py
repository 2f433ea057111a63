"""Checks of the loss: its value before training, what it compares, where it is lowest, and how it weights classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext, shared
from runner.lab.check.result import LIMITS, NotApplicable, Result, check, failed, graded, need, passed, warned
from runner.lab.check.sample import is_classes

_COMPARED, _FREE = 12, 32  # samples that are compared with each other, and whose outputs are optimized
_TRAINED, _RATE, _STEPS = 16, 1e-3, 4  # samples, and rate and steps of AdamW, in which a high first loss may come down
_FREE_RATE, _FREE_STEPS = 0.1, 120  # of Adam for free outputs


def _loss(context: CheckContext, outputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(context.training.loss(outputs, targets))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=LIMITS.close, abs_tol=1e-5)


@shared
def takes_logits(context: CheckContext) -> bool:
    """True if the loss takes outputs of any size, not only probabilities."""
    targets = context.targets(context.batch)
    outputs = torch.linspace(-20, 20, len(targets) * context.training.task.outputs(context.splits.classes))
    try:
        context.training.loss(outputs.view(len(targets), -1).to(targets.device), targets)
    except (RuntimeError, ValueError):
        return False
    return True


def _free_outputs(context: CheckContext, targets: Tensor) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """A parameter, and a function that turns it into outputs as the loss takes them, and gives these and their loss."""
    shape = len(targets), context.training.task.outputs(context.splits.classes)
    free = (0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(targets.device).requires_grad_()
    values = targets.float()
    numbers = not context.classes and targets.is_floating_point()
    scale, shift = (values.std().clamp_min(1e-6), values.mean()) if numbers else (1.0, 0.0)
    logits = takes_logits(context)

    def scored() -> tuple[Tensor, Tensor]:
        outputs = free * scale + shift if logits else free.sigmoid()
        return outputs, context.training.loss(outputs, targets)

    return free, scored


def _left_after_steps(context: CheckContext, guess: float) -> float:
    """What is left of the difference between the first loss and that of a guess after a few steps."""
    images, targets = context.batch.images[:_TRAINED], context.targets(context.batch)[:_TRAINED]
    context.restore()
    context.disable_noise()
    trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.0), list[float]()
    for _ in range(1 + _STEPS):
        loss = context.training.loss(context.model(images), targets)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (min(losses) - guess) / max(losses[0] - guess, 1e-12)


@check("loss", any_task=True)
def initial_loss(context: CheckContext) -> Result:
    """A first loss that is not that of a guess: ln C for C equally likely classes, the variance for regression."""
    if not context.supervised:
        first = float(context.training.steps(context.batch.data).detach())
        return graded(f"{first:.4g}", "find the operation with debug=anomaly", fail=not math.isfinite(first))
    need(context.found is None, "the weights come from a checkpoint")
    pretrained = context.config.init_from is not None or context.config.model.get("weights") is not None
    need(not pretrained, "the weights are pretrained")
    targets = context.targets(context.batch)
    context.training.state.train()
    with torch.no_grad():
        outputs = context.model(context.batch.images)
    value = _loss(context, outputs, targets)
    guessed, what = torch.zeros_like(outputs), "equal outputs give"
    if not context.classes and targets.is_floating_point():
        guessed, what = targets.float().mean(0, keepdim=True).expand_as(outputs), "the mean of the targets gives"
    guess = _loss(context, guessed, targets)
    evidence = f"{value:.4g}, where {what} {guess:.4g}"
    if context.classes and _close(guess, math.log(context.classes)):
        evidence += f" = ln {context.classes}"
    if not math.isfinite(value):
        return failed(evidence, "find the operation with debug=anomaly")
    high = value > LIMITS.high_warn * guess + 0.1
    low = bool(context.classes) and value < guess / LIMITS.high_warn
    if high and context.classes:
        # Large features with a wide last layer, as in EfficientNet: what a few steps undo costs nothing.
        left = _left_after_steps(context, guess)
        if left <= LIMITS.left:
            return passed(f"{evidence}; {_STEPS} steps of AdamW undo {min(1.0, 1 - left):.0%} of the difference")
    counts = context.splits.class_counts
    if low and counts is not None and outputs.ndim == 2 and len(counts) == outputs.shape[1]:
        # Outputs that know only the class frequencies, as `init=prior_bias` makes them.
        shares = (counts.clamp_min(1) / counts.clamp_min(1).sum()).to(outputs)
        known = shares.log() if takes_logits(context) else shares
        prior = _loss(context, known.expand_as(outputs), targets)
        evidence += f", and the class shares {prior:.4g}"
        low = value < min(guess, prior) / LIMITS.high_warn
    fix = "small initial weights in the last layer (for regression also a bias equal to the mean of the targets)"
    return graded(evidence, fix, fail=value > LIMITS.high_fail * guess + 1, warn=high or low)


@shared
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
    outputs, targets, pairs = _probe(context)
    together, alone = _loss(context, outputs, targets), float(pairs.diagonal().mean())
    evidence = f"{together:.4g} for {len(pairs)} samples together, {alone:.4g} on average for each alone"
    if _close(together, alone):
        return passed(evidence)
    if _close(together, alone * len(pairs)):
        fix = "reduction='mean': otherwise batch size and accumulate change the size of a step"
        return failed(f"{evidence}: it is their sum", fix)
    return warned(evidence, "compare each row of the outputs with its own target, and average over the batch")


@check("loss")
def loss_broadcast(context: CheckContext) -> Result:
    """Shapes that broadcast, (B,) against (B, 1): every output is compared with every target."""
    outputs, targets, pairs = _probe(context)
    together, own, every = _loss(context, outputs, targets), float(pairs.diagonal().mean()), float(pairs.mean())
    need(not _close(own, every), "all targets are alike")
    evidence = f"{together:.4g}; each output with its own target gives {own:.4g}, all with all {every:.4g}"
    fix = "give outputs and targets the same shape: squeeze both or none"
    return graded(evidence, fix, fail=_close(together, every) or _close(together, every * len(pairs)))


@check("loss")
def loss_minimum(context: CheckContext) -> Result:
    """A loss that is not lowest at the right answers: of the wrong sign, detached, constant, or independent of the targets."""
    targets = context.targets(context.batch)[:_FREE]
    need(len(torch.unique(targets, dim=0)) >= 2, "all targets are alike")
    free, scored = _free_outputs(context, targets)
    optimizer = torch.optim.Adam([free], lr=_FREE_RATE)
    reached, loss = scored()
    losses = [float(loss.detach())]
    while loss.requires_grad and len(losses) <= _FREE_STEPS:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        reached, loss = scored()
        losses.append(float(loss.detach()))
    fix = "compare outputs and targets by differentiable operations, and return a lower value for better outputs"
    if len(losses) == 1:
        return failed("no gradient reaches the outputs: argmax, round, detach(), .item() or no_grad in the loss", fix)
    evidence = f"optimizing the outputs directly brings the loss from {losses[0]:.4g} to {losses[-1]:.4g}; they "
    reached, values = reached.detach().float(), targets.float()
    if is_classes(targets):
        right = float((reached.argmax(1) == targets).float().mean())
        evidence += f"are right for {right:.0%} of {len(targets)} samples"
        return graded(evidence, fix, fail=not right >= LIMITS.right)
    need(reached.shape == values.shape, "outputs and targets have different shapes")
    related = float(torch.corrcoef(torch.stack([reached.flatten(), values.flatten()]))[0, 1].nan_to_num())
    evidence += f"have a correlation of {related:.2f} with the targets"
    return graded(evidence, fix, fail=not related >= LIMITS.right)


@check("loss")
def class_share(context: CheckContext) -> Result:
    """Classes that the loss ignores or hardly counts, for example with a class weight near 0 or ignore_index."""
    targets = context.targets(context.batch)
    need(is_classes(targets), "the targets are not class numbers")
    free, scored = _free_outputs(context, targets)
    _, loss = scored()
    need(loss.requires_grad, "no gradient reaches the outputs")
    (gradient,) = torch.autograd.grad(loss, free)
    sizes = gradient.norm(dim=1)
    need(sizes.isfinite().all() and sizes.any(), "the gradient of the outputs is zero or not finite")
    mean = {each: float(sizes[targets == each].mean()) for each in torch.unique(targets).tolist()}
    low, high = min(mean, key=mean.__getitem__), max(mean, key=mean.__getitem__)
    factor = mean[high] / max(mean[low], 1e-12 * mean[high])
    evidence = f"a sample of class {high} counts {factor:,.3g} times as much as one of class {low}"
    fix = "class weights that differ less, and no ignore_index that is a class"
    return graded(evidence, fix, fail=factor > 1 / LIMITS.ignored, warn=factor > LIMITS.unequal)


@check("loss")
def class_weights(context: CheckContext) -> Result:
    """Class weights that favor the frequent classes."""
    counts = context.training.data.class_counts
    need(counts is not None and len(counts) > 1, "the classes are not counted")
    sizes = counts.double().cpu().clamp_min(1).log()  # type: ignore[union-attr]
    for name, buffer in context.training.loss.named_buffers():
        if "weight" not in name or buffer.shape != sizes.shape or not bool((buffer > 0).all()):
            continue
        weights = buffer.double().cpu().log()
        need(min(float(each.max() - each.min()) for each in (sizes, weights)) > 0.05, "classes or weights are equal")
        agree = float(torch.corrcoef(torch.stack([sizes, weights]))[0, 1])
        evidence = f"the correlation of {name} of the loss with the sizes of the classes is {agree:.2f}"
        return graded(evidence, "the inverse: loss.class_weights=balanced", warn=agree > LIMITS.weights_agree)
    raise NotApplicable("the loss has no class weights")
