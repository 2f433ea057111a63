"""Checks of what the model gives: logits or not, of which samples, and in which mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_CERTAIN = 20.0  # a logit that stands for certainty
_MIXED, _REPEATED = 1e-3, 1e-4  # shares of the outputs' own change, and of their size


def _evaluated(context: CheckContext, images: Tensor | None = None) -> Tensor:
    """Outputs in evaluation mode, float32 (B, outputs)."""
    context.model.eval()
    with torch.no_grad():
        made: Tensor = context.model(context.batch.images if images is None else images)
    return made.float()


@check
def logits(context: CheckContext) -> Result:
    """Softmax, log-softmax or sigmoid before a loss that wants logits."""
    outputs, targets = _evaluated(context), context.targets(context.batch)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or targets.is_floating_point():
        return skipped("the outputs are not those of classes")
    low, high = float(outputs.min()), float(outputs.max())
    sums = outputs.sum(1)
    probabilities = low >= 0 and bool((sums - 1).abs().max() < 1e-3)
    if not (probabilities or (low > 0 and high < 1)):
        logs = high <= 1e-6 and bool((outputs.exp().sum(1) - 1).abs().max() < 1e-3)
        return passed(f"values from {low:.3g} to {high:.3g}" + (", logarithms of probabilities" if logs else ""))
    right = F.one_hot(targets, outputs.shape[1]).to(outputs)
    what = "rows that sum to 1: a softmax" if probabilities else f"values from {low:.3g} to {high:.3g}: a sigmoid"
    try:
        with torch.no_grad():
            best = float(context.training.parts.loss(right, targets))
            certain = float(context.training.parts.loss((2 * right - 1) * _CERTAIN, targets))
    except (RuntimeError, ValueError):  # a loss that takes probabilities alone
        return passed(f"{what}, and the loss takes nothing else")
    if best <= certain + 0.05:
        return passed(f"{what}, and the loss is lowest at probabilities")
    evidence = f"{what}; with every answer right the loss is {best:.3g}, with logits {certain:.3g}"
    return failed(evidence, "give the loss what comes before the last activation")


@check
def sample_mixing(context: CheckContext) -> Result:
    """Outputs of a sample that depend on the other samples of its batch, as with view in place of permute."""
    images = context.batch.images[:8]
    before = _evaluated(context, images)
    worst, own = 0.0, 0.0
    for place in (0, len(images) // 2):
        changed = images.clone()
        changed[place] = images[place].flip(-1) * -1.5 + 0.5
        apart = (_evaluated(context, changed) - before).abs().flatten(1).amax(1)
        own = max(own, float(apart[place]))
        apart[place] = 0
        worst = max(worst, float(apart.max()))
    if max(own, worst) <= 1e-9:
        return skipped("the outputs do not depend on the images at all at the start")
    evidence = f"changing one image changes the outputs of others by {worst:.3g}, its own by {own:.3g}"
    if worst > _MIXED * own:
        return failed(
            evidence, "keep the batch first: permute or flatten(1) in place of view or reshape across samples"
        )
    return passed(evidence)


def _active(module: nn.Module) -> bool:
    """Whether a module does something else in training than in an evaluation."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or isinstance(module, nn.modules.batchnorm._BatchNorm)


@check
def modes(context: CheckContext) -> Result:
    """Modules that stay in training mode in an evaluation, or in evaluation mode in training."""
    model, images = context.model, context.batch.images
    found = {}
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            model(images)  # which may change modes as well
        found[training] = [name or "the model" for name, module in model.named_modules() if module.training != training]
    stuck = dict(model.named_modules()) | {"the model": model}
    if found[False]:
        evidence = f"{len(found[False])} modules stay in training mode after eval(): {join_names(found[False])}"
        return failed(evidence, "let train(mode) pass on the mode, and set none in forward")
    if found[True]:
        evidence = f"{len(found[True])} modules stay in evaluation mode after train(): {join_names(found[True])}"
        fix = "let train(mode) pass on the mode, and set none in forward"
        serious = "the model" in found[True] or any(
            isinstance(stuck[name], nn.modules.dropout._DropoutNd) for name in found[True]
        )
        return failed(evidence, fix) if serious else warned(evidence, f"{fix}; unless these are meant to be frozen")
    count = sum(_active(module) for module in model.modules())
    return passed(f"both reach every module, of which {count} are BatchNorm or dropout")


@check
def repeatable_evaluation(context: CheckContext) -> Result:
    """Outputs that differ when the same images are evaluated again, as with dropout that is always on."""
    torch.manual_seed(1)
    first = _evaluated(context)
    torch.manual_seed(2)
    apart = float((_evaluated(context) - first).abs().max())
    size = max(float(first.abs().max()), 1e-12)
    evidence = f"the outputs of the same images are {apart:.3g} apart, of {size:.3g}"
    if apart > _REPEATED * size:
        return failed(evidence, "F.dropout(x, p, self.training) or nn.Dropout; no random draws in evaluation mode")
    return passed(evidence)
