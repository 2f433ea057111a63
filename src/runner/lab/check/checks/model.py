"""Checks of the model: its parameters, what reaches them, and how signals pass through its depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runner.lab.check.context import CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.measured import Signals, measure_signals
from runner.lab.check.result import Result, check, failed, graded, join_names, need, none_of, passed
from runner.tracking.formats import amount


def _signals(context: CheckContext) -> Signals:
    return context.cached(measure_signals)


@check("model", any_task=True)
def frozen_parameters(context: CheckContext) -> Result:
    """Parameters that do not require gradients, although the config freezes nothing."""
    frozen = [name for name, parameter in context.model.named_parameters() if not parameter.requires_grad]
    total = sum(1 for _ in context.model.parameters())
    what, fix = f"of {total} parameters do not require gradients", "requires_grad=True, or freeze=... if intended"
    if frozen and context.config.freeze is not None:
        return passed(f"{len(frozen)} {what}: {join_names(frozen)}, as set by `freeze`")
    return none_of(frozen, what, fix, f"all {total} require gradients", "warn")


@check("model", any_task=True)
def optimizer_parameters(context: CheckContext) -> Result:
    """Trainable parameters that the optimizer does not have."""
    groups = context.training.state.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    trainable = [(name, p) for name, p in context.training.state.named_parameters() if p.requires_grad]
    missing = [name for name, parameter in trainable if id(parameter) not in known]
    what, fix = f"of {len(trainable)} are in no parameter group", "pass all parameters on to the optimizer"
    return none_of(missing, what, fix, f"all {len(trainable)} are in its {amount(len(groups), 'group')}")


@check("model", any_task=True)
def unregistered_parameters(context: CheckContext) -> Result:
    """Tensors that require gradients but are not parameters: layers in lists or dicts, plain tensors, layers made in forward."""
    fix = "nn.ModuleList, nn.ModuleDict or nn.Parameter, created in __init__: others are neither trained nor saved"
    what, otherwise = "tensors that require gradients are not in the optimizer", "the loss depends on no such tensor"
    return none_of(_signals(context).loose, what, fix, otherwise)


@check("model", any_task=True)
def missing_gradients(context: CheckContext) -> Result:
    """Trainable parameters without a gradient: cut off by detach, no_grad, .data or .item, or a branch that is never used."""
    signals, model, cut_off = _signals(context), context.model, list[str]()
    if not context.supervised:
        fix = "use them in the step of the task, freeze or remove them"
        return none_of(signals.missing, "parameters get no gradient in a step", fix, "all get a gradient", "warn")
    model.eval()
    with torch.no_grad():
        before = model(context.batch.images) if signals.missing else None
        for name in signals.missing:
            parameter = model.get_parameter(name)
            kept = parameter.clone()
            # Large random changes: a small one may hide behind a rectifier.
            parameter.add_(torch.randn_like(parameter)).mul_(3)
            if before is not None and not torch.equal(before, model(context.batch.images)):
                cut_off.append(name)
            parameter.copy_(kept)
    if cut_off:
        fix = "remove detach(), no_grad, .data, .item() or numpy() before the loss"
        return none_of(cut_off, "parameters change the outputs and get no gradient", fix, "")
    fix = "use the branch in forward, or remove it"
    return none_of(signals.missing, "parameters do not change the outputs", fix, "all get a gradient", "warn")


@check("model", any_task=True)
def equal_units(context: CheckContext) -> Result:
    """Units of a layer that start equal, so that they stay equal or alike: constant initial weights."""
    signals, fix = _signals(context), "random initial weights (nn.init.kaiming_normal_)"
    need(signals.gradients, "the loss has no gradient")
    what = f"of {len(signals.gradients)} weights have equal units"
    if signals.equal:
        return none_of(signals.equal, f"{what} that get equal gradients", fix, "")
    return none_of(signals.similar, what, fix, f"the units of {len(signals.gradients)} weights differ", "warn")


@check("model", any_task=True)
def bias_before_norm(context: CheckContext) -> Result:
    """A bias without effect, because a norm follows."""
    fix = "bias=False in the layer before the norm"
    return none_of(_signals(context).biased, "have no effect", fix, "no layer before a norm has one", "warn")


@check("model", any_task=True)
def repeated_norms(context: CheckContext) -> Result:
    """BatchNorm layers that update their running statistics several times in a step."""
    calls, fix = _signals(context).norm_calls, "a BatchNorm for each place, or a single call"
    need(calls, "the model has no BatchNorm with running statistics")
    often = [name for name, count in calls.items() if count > 1]
    return none_of(often, "BatchNorm layers run several times in a forward pass", fix, f"{len(calls)} run once", "warn")


def _extremes(signals: Sequence[tuple[str, float]], where: str) -> tuple[float, float, str]:
    """The smallest and the largest signal, NaN as infinity, and both as text."""
    ordered = sorted((signal if math.isfinite(signal) else math.inf, name) for name, signal in signals)
    (least, low), (most, high) = ordered[0], ordered[-1]
    return least, most, f"{most:.3g} {where} {high}, {least:.3g} {where} {low}, of {len(signals)}"


@check("model", any_task=True)
def gradient_scale(context: CheckContext) -> Result:
    """Gradients that vanish or explode with the depth of the model."""
    gradients = _signals(context).gradients
    need(len(gradients) >= 2, "fewer than two weights get a gradient")
    fix = "initial weights, normalization layers or shortcuts; grad_clip.norm=1.0 against exploding gradients"
    least, most, evidence = _extremes(gradients, "of")
    if not context.supervised:  # a batch need not reach every part of a model, such as that for large objects
        return graded(evidence, fix, fail=not 0 < most < 100 * LIMITS.gradient_large)
    if zero := [name for name, gradient in gradients if gradient == 0]:
        weights = [p for name, p in context.model.named_parameters() if not name.endswith("bias")]
        need(all(bool(p.any()) for p in weights), "a weight starts at zero, which lets no gradient through at first")
        fix = "see reachable-targets: a ReLU that is always 0, a saturated output, a product with 0"
        return failed(f"the gradient of {len(zero)} of {len(gradients)} weights is zero: {join_names(zero)}", fix)
    small, large = least / most, most / LIMITS.gradient_large
    return graded(
        f"root mean square {evidence} weights",
        fix,
        fail=small < 1 / LIMITS.gradient_fail or large > 100,
        warn=small < 1 / LIMITS.gradient_warn or large > 1,
    )
