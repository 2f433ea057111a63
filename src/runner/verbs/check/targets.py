"""Checks of where the loss is lowest, and whether the outputs can get there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.observed_pass import observe_pass
from runner.verbs.check.result import Result, failed, graded, join_names, passed, skipped, warned

_SAMPLES = 32
_STEPS, _RATE = 120, 0.1
_RIGHT, _CORRELATED = 0.9, 0.9
_IGNORED = 1e-6  # share of the largest gradient
_PUSHED = (1e-2, 1e2, 1e4)  # sizes of random weights in the last layer


def _free_outputs(context: CheckContext, targets: Tensor) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """A parameter, a function that turns it into outputs as the loss takes them, and their loss."""
    shape = len(targets), context.training.task.outputs(context.splits.classes)
    start = 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    free = start.to(targets.device).requires_grad_()
    values, probabilities = targets.float(), False
    regression = not context.classes and targets.is_floating_point()

    def outputs() -> Tensor:
        if probabilities:
            return free.sigmoid()
        return free * values.std().clamp_min(1e-6) + values.mean() if regression else free

    try:
        loss = context.training.parts.loss(outputs(), targets)
    except (RuntimeError, ValueError):  # a loss that takes only probabilities
        probabilities = True
        loss = context.training.parts.loss(outputs(), targets)
    return free, outputs, loss


def loss_minimum(context: CheckContext) -> Result:
    """A loss that is not lowest at the right answers: of the wrong sign, detached, constant, or independent of the targets."""
    targets = context.targets(context.batch)[:_SAMPLES]
    if len(torch.unique(targets, dim=0)) < 2:
        return skipped("all targets are alike")
    free, convert, loss = _free_outputs(context, targets)
    fix = "compare outputs and targets by differentiable operations, and return a lower value for better outputs"
    if not loss.requires_grad:
        return failed("no gradient reaches the outputs: argmax, round, detach(), .item() or no_grad in the loss", fix)
    optimizer = torch.optim.Adam([free], lr=_RATE)
    first = float(loss.detach())
    for _ in range(_STEPS):
        outputs = convert()
        loss = context.training.parts.loss(outputs, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    evidence = f"optimizing the outputs directly brings the loss from {first:.4g} to {float(loss.detach()):.4g}; they "
    reached, values = outputs.detach().float(), targets.float()
    if targets.ndim == 1 and not targets.is_floating_point():
        right = float((reached.argmax(1) == targets).float().mean())
        return graded(f"{evidence}are right for {right:.0%} of {len(targets)} samples", fix, fail=not right >= _RIGHT)
    if reached.shape != values.shape:
        return skipped("outputs and targets have different shapes")
    related = 0.0
    if float(reached.std()) > 0:
        related = float(torch.corrcoef(torch.stack([reached.flatten(), values.flatten()]))[0, 1].nan_to_num())
    evidence += f"have a correlation of {related:.2f} with the targets"
    return graded(evidence, fix, fail=not related >= _CORRELATED)


def loss_coverage(context: CheckContext) -> Result:
    """Samples, classes or outputs that the loss ignores, for example with a class weight of 0 or ignore_index."""
    targets = context.targets(context.batch)
    free, _, loss = _free_outputs(context, targets)
    if not loss.requires_grad:
        return skipped("no gradient reaches the outputs")
    (gradient,) = torch.autograd.grad(loss, free)
    sizes = gradient.norm(dim=1)
    if not bool(sizes.isfinite().all()) or float(sizes.max()) == 0:
        return skipped("the gradient of the outputs is zero or not finite")
    ignored = sizes <= _IGNORED * sizes.max()
    if targets.ndim == 1 and not targets.is_floating_point():
        present = torch.unique(targets).tolist()
        mean = {each: float(sizes[targets == each].mean()) for each in present}
        share = {each: float(ignored[targets == each].float().mean()) for each in present}
        blind = [str(each) for each in present if share[each] == 1]
        # If classes are ignored in part, the loss ignores samples by their place in the batch, not by their class.
        if blind and len(blind) < len(present) and all(each in (0, 1) for each in share.values()):
            evidence = f"samples of class {join_names(blind)} have no gradient: the loss ignores them"
            return failed(evidence, "no class weight of 0, and no ignore_index that is a class")
        low, high = min(mean, key=lambda each: mean[each]), max(mean, key=lambda each: mean[each])
        if mean[high] > 300 * mean[low] and not bool(ignored.any()):
            ratio = mean[high] / max(mean[low], 1e-12)
            evidence = f"a sample of class {high} counts {ratio:,.0f} times as much as one of class {low}"
            return warned(evidence, "class weights that differ less")
        columns = gradient.abs().amax(0)
        used = columns > _IGNORED * columns.max()
        unused = [str(each) for each in present if each < len(columns) and not bool(used[each])]
        if unused:
            evidence = f"outputs of class {join_names(unused)} have no gradient"
            return failed(evidence, "compare all outputs with the targets")
    if not bool(ignored.any()):
        return passed(f"each of {len(sizes)} samples and its output has a gradient")
    evidence = f"{int(ignored.sum())} of {len(sizes)} samples of a batch have no gradient"
    fix = "average over all samples of the batch, not over one or a part of it"
    if float(ignored.float().mean()) > 0.8:
        return failed(evidence, fix)
    return warned(f"{evidence}; this may be intended, as in hard example mining", fix)


def _output_bounds(context: CheckContext) -> tuple[float, float] | None:
    """Lowest and highest output for any weights of the last layer, infinite without a bound; None if they cannot be found."""
    last = [name for name, _ in context.cached(observe_pass).scales][-1:]
    if not last:
        return None
    weight: Tensor = context.model.get_submodule(last[0]).weight  # type: ignore[assignment]
    images = context.batch.images[:_SAMPLES]
    context.model.eval()
    reached: list[tuple[float, float]] = []
    with torch.no_grad():
        for size in _PUSHED:
            generator, low, high = torch.Generator().manual_seed(0), math.inf, -math.inf
            for _ in range(4):
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
                outputs = context.model(images).float()
                low, high = min(low, float(outputs.min())), max(high, float(outputs.max()))
            reached.append((low, high))
    _, (low, high), (lowest, highest) = reached
    if not all(math.isfinite(each) for each in (low, high, lowest, highest)) or lowest == highest:
        return None
    bounded_below, bounded_above = lowest > low - 0.5 * abs(low) - 1e-3, highest < high + 0.5 * abs(high) + 1e-3
    bottom, top = min(each for each, _ in reached), max(each for _, each in reached)
    return bottom if bounded_below else -math.inf, top if bounded_above else math.inf


def _lowest_loss(context: CheckContext, targets: Tensor, low: float, high: float) -> float:
    """The lowest loss of outputs between two bounds, with one value for the right class and one for all others."""
    right = F.one_hot(targets, context.training.task.outputs(context.splits.classes)).float()
    low, high = max(low, -20.0), min(high, 20.0)
    with torch.no_grad():
        return min(
            float(context.training.parts.loss(right * top + (1 - right) * bottom, targets))
            for top in (high, 0.5 * (high + low), 0.75 * high + 0.25 * low, 0.6 * high + 0.4 * low)
            for bottom in (low, 0.5 * (high + low), 0.75 * low + 0.25 * high, 0.6 * low + 0.4 * high)
        )


def reachable_targets(context: CheckContext) -> Result:
    """Outputs that cannot reach the targets with any weights: a ReLU, sigmoid, tanh or log-softmax at the end."""
    bounds = _output_bounds(context)
    if bounds is None:
        return skipped("the last layer cannot be found, or the outputs do not depend on it")
    low, high = bounds
    if math.isinf(low) and math.isinf(high):
        return passed("the outputs have no bounds")
    evidence = f"with any weights in the last layer, outputs are from {low:.3g} to {high:.3g}"
    fix = "no activation after the last layer"
    targets = context.targets(context.batch)
    if targets.ndim == 1 and not targets.is_floating_point():
        try:
            guess, best, floor = (_lowest_loss(context, targets, *pair) for pair in ((0.0, 0.0), bounds, (-20.0, 20.0)))
        except (RuntimeError, ValueError):  # a loss that takes only probabilities
            return passed(f"{evidence}, and the loss takes nothing else")
        evidence += f"; with every answer right the loss is {best:.3g}, unbounded {floor:.3g}, of a guess {guess:.3g}"
        fail = best > floor + 0.15 * max(0.0, guess - floor)
        return graded(evidence, fix, fail=fail, warn=low > -1e-3 and math.isinf(high))
    values = context.targets(context.read("train", context.readable("train", 256))).float()
    margin = 1e-3 * float(values.std())
    outside = float(((values < low - margin) | (values > high + margin)).float().mean())
    fix += ", or targets scaled to its range"
    return graded(f"{evidence}; {outside:.0%} of the targets are outside", fix, fail=outside > 0.01)
