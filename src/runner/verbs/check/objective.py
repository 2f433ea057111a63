"""Checks of what a loss is lowest at: the targets, for all samples, all classes and all outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_SAMPLES = 32
_STEPS, _RATE = 120, 0.1
_RIGHT, _CORRELATED = 0.9, 0.9
_IGNORED = 1e-6  # share of the largest gradient


def _free(context: CheckContext, targets: Tensor, probabilities: bool) -> tuple[Tensor, Tensor]:
    """Outputs that nothing makes, as a parameter and as the loss is given them."""
    outputs = context.training.task.outputs(context.splits.classes)
    generator = torch.Generator().manual_seed(0)
    start = 0.1 * torch.randn(len(targets), outputs, generator=generator)
    free = start.to(targets.device).requires_grad_()
    if probabilities:
        return free, free.sigmoid()
    if context.classes or not targets.is_floating_point():
        return free, free
    values = targets.float()
    return free, free * values.std().clamp_min(1e-6) + values.mean()


def _loss(context: CheckContext, targets: Tensor) -> tuple[Tensor, bool]:
    """The loss of free outputs, and whether it takes probabilities alone."""
    try:
        return context.training.parts.loss(_free(context, targets, False)[1], targets), False
    except (RuntimeError, ValueError):
        return context.training.parts.loss(_free(context, targets, True)[1], targets), True


@check
def loss_minimum(context: CheckContext) -> Result:
    """A loss that is not lowest at the right answers: of the wrong sign, detached, constant, or blind to the targets."""
    parts, targets = context.training.parts, context.targets(context.batch)[:_SAMPLES]
    if len(torch.unique(targets, dim=0)) < 2:
        return skipped("the targets are all alike")
    loss, probabilities = _loss(context, targets)
    fix = "compare the outputs with the targets by operations that have a gradient, and give what is lower for better"
    if not loss.requires_grad:
        return failed("no gradient reaches the outputs: argmax, round, detach(), .item() or no_grad in the loss", fix)
    free, _ = _free(context, targets, probabilities)
    optimizer = torch.optim.Adam([free], lr=_RATE)
    first = last = float(loss.detach())
    values = targets.float()
    numbers = not context.classes and targets.is_floating_point()
    for _ in range(_STEPS):
        if probabilities:
            outputs = free.sigmoid()
        else:
            outputs = free * values.std().clamp_min(1e-6) + values.mean() if numbers else free
        loss = parts.loss(outputs, targets)
        last = float(loss.detach())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    told = f"outputs that are free to take any value bring the loss from {first:.4g} to {last:.4g}"
    made = outputs.detach().float()
    if targets.ndim == 1 and not targets.is_floating_point():
        right = float((made.argmax(1) == targets).float().mean())
        evidence = f"{told}, and are right for {right:.0%} of {len(targets)} samples"
        return passed(evidence) if right >= _RIGHT else failed(evidence, fix)
    if made.shape != values.shape:
        return skipped("outputs and targets have different shapes")
    together = torch.stack([made.flatten(), values.flatten()])
    related = float(torch.corrcoef(together)[0, 1].nan_to_num()) if float(made.std()) > 0 else 0.0
    evidence = f"{told}, and have a correlation of {related:.2f} with the targets"
    return passed(evidence) if related >= _CORRELATED else failed(evidence, fix)


@check
def loss_coverage(context: CheckContext) -> Result:
    """Samples, classes or outputs that the loss leaves out, as with a class weight of 0 or ignore_index."""
    parts, targets = context.training.parts, context.targets(context.batch)
    _, probabilities = _loss(context, targets)
    free, outputs = _free(context, targets, probabilities)
    loss = parts.loss(outputs, targets)
    if not loss.requires_grad:
        return skipped("no gradient reaches the outputs")
    (gradient,) = torch.autograd.grad(loss, free)
    sizes = gradient.norm(dim=1)
    if not bool(sizes.isfinite().all()) or float(sizes.max()) == 0:
        return skipped("the gradient of the outputs is zero or not finite")
    left_out = sizes <= _IGNORED * sizes.max()
    if targets.ndim == 1 and not targets.is_floating_point():
        present = torch.unique(targets).tolist()
        groups = {each: float(sizes[targets == each].mean()) for each in present}
        blind = [str(each) for each in present if bool(left_out[targets == each].all())]
        if blind and len(blind) < len(present) and not _by_place(left_out, targets):
            evidence = f"samples of class {join_names(blind)} have no gradient: the loss leaves them out"
            return failed(evidence, "no class weight of 0, and no ignore_index that is a class")
        low, high = min(groups, key=lambda each: groups[each]), max(groups, key=lambda each: groups[each])
        if groups[high] > 300 * groups[low] and not bool(left_out.any()):
            ratio = groups[high] / max(groups[low], 1e-12)
            evidence = f"a sample of class {high} counts {ratio:,.0f} times as much as one of class {low}"
            return warned(evidence, "class weights that are less far apart")
        columns = gradient.abs().amax(0)
        unused = [
            str(each)
            for each in present
            if each < len(columns) and float(columns[each]) <= _IGNORED * float(columns.max())
        ]
        if unused:
            return failed(
                f"outputs of class {join_names(unused)} have no gradient", "compare all outputs with the targets"
            )
    if bool(left_out.any()):
        share = float(left_out.float().mean())
        evidence = f"{int(left_out.sum())} of {len(sizes)} samples of a batch have no gradient"
        fix = "average over all samples of the batch, not over one or a part of it"
        return (
            failed(evidence, fix) if share > 0.8 else warned(f"{evidence}; unless it is meant, as in hard mining", fix)
        )
    return passed(f"each of {len(sizes)} samples and its output has a gradient")


def _by_place(left_out: Tensor, targets: Tensor) -> bool:
    """Whether samples are left out by where they are in the batch: some classes are left out in part."""
    partly = [
        bool(left_out[targets == each].any()) and not bool(left_out[targets == each].all())
        for each in torch.unique(targets)
    ]
    return any(partly)
