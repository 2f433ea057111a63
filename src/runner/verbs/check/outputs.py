"""Checks of the model's outputs: whether they are logits, which samples they depend on, and in which mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.verbs.check.context import BATCH_NORM, DROPOUT, CheckContext
from runner.verbs.check.result import Result, failed, graded, join_names, passed, skipped, warned

_CERTAIN = 20.0  # a logit that stands for certainty
_MIXED, _REPEATED = 1e-3, 1e-4  # shares of the change of the sample's own outputs, and of their size


def _evaluated(context: CheckContext, images: Tensor | None = None) -> Tensor:
    """Outputs in evaluation mode, float32 (B, outputs)."""
    context.model.eval()
    with torch.no_grad():
        outputs: Tensor = context.model(context.batch.images if images is None else images)
    return outputs.float()


def logits(context: CheckContext) -> Result:
    """Softmax, log-softmax or sigmoid before a loss that expects logits."""
    outputs, targets = _evaluated(context), context.targets(context.batch)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or targets.is_floating_point():
        return skipped("the outputs are not those of classes")
    low, high = float(outputs.min()), float(outputs.max())
    probabilities = low >= 0 and bool((outputs.sum(1) - 1).abs().max() < 1e-3)
    if not (probabilities or (low > 0 and high < 1)):
        logs = high <= 1e-6 and bool((outputs.exp().sum(1) - 1).abs().max() < 1e-3)
        return passed(f"values from {low:.3g} to {high:.3g}" + (", logarithms of probabilities" if logs else ""))
    right = F.one_hot(targets, outputs.shape[1]).to(outputs)
    what = "rows that sum to 1: a softmax" if probabilities else f"values from {low:.3g} to {high:.3g}: a sigmoid"
    loss = context.training.parts.loss
    try:
        with torch.no_grad():
            best, certain = float(loss(right, targets)), float(loss((2 * right - 1) * _CERTAIN, targets))
    except (RuntimeError, ValueError):  # a loss that takes only probabilities
        return passed(f"{what}, and the loss takes nothing else")
    if best <= certain + 0.05:
        return passed(f"{what}, and the loss is lowest at probabilities")
    evidence = f"{what}; with every answer right the loss is {best:.3g}, with logits {certain:.3g}"
    return failed(evidence, "remove the last activation: the loss applies its own")


def sample_mixing(context: CheckContext) -> Result:
    """Outputs of a sample that depend on other samples of its batch, for example after view instead of permute."""
    images = context.batch.images[:8]
    before = _evaluated(context, images)
    others, own = 0.0, 0.0
    for place in (0, len(images) // 2):
        changed = images.clone()
        changed[place] = images[place].flip(-1) * -1.5 + 0.5
        apart = (_evaluated(context, changed) - before).abs().flatten(1).amax(1)
        own = max(own, float(apart[place]))
        apart[place] = 0
        others = max(others, float(apart.max()))
    if max(own, others) <= 1e-9:
        return skipped("the outputs do not depend on the images before training")
    evidence = f"changing one image changes the outputs of others by {others:.3g}, its own by {own:.3g}"
    fix = "keep the batch dimension first: permute or flatten(1) instead of view or reshape across samples"
    return graded(evidence, fix, fail=others > _MIXED * own)


def modes(context: CheckContext) -> Result:
    """Modules that stay in training mode in an evaluation, or in evaluation mode in training."""
    model, fix = context.model, "let train(mode) pass the mode on to all modules, and do not set it in forward"
    stuck = {}
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            model(context.batch.images)  # may also change modes
        stuck[training] = {
            name or "the model": each for name, each in model.named_modules() if each.training != training
        }
    if stuck[False]:
        evidence = f"{len(stuck[False])} modules stay in training mode after eval(): {join_names(list(stuck[False]))}"
        return failed(evidence, fix)
    if stuck[True]:
        evidence = f"{len(stuck[True])} modules stay in evaluation mode after train(): {join_names(list(stuck[True]))}"
        if "the model" in stuck[True] or any(isinstance(each, DROPOUT) for each in stuck[True].values()):
            return failed(evidence, fix)
        return warned(evidence, f"{fix}; unless they are meant to be frozen")
    count = sum(isinstance(each, BATCH_NORM) or (isinstance(each, DROPOUT) and each.p > 0) for each in model.modules())
    return passed(f"both modes reach every module, of which {count} are BatchNorm or dropout")


def repeatable_evaluation(context: CheckContext) -> Result:
    """Outputs that differ when the same images are evaluated again, for example with dropout that is always on."""
    torch.manual_seed(1)
    first = _evaluated(context)
    torch.manual_seed(2)
    apart = float((_evaluated(context) - first).abs().max())
    size = max(float(first.abs().max()), 1e-12)
    evidence = f"two evaluations of the same images differ by {apart:.3g}, of {size:.3g}"
    fix = "F.dropout(x, p, self.training) or nn.Dropout; no randomness in evaluation mode"
    return graded(evidence, fix, fail=apart > _REPEATED * size)
