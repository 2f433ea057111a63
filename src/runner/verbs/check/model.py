"""Checks of the model: its parameters, what reaches them, and how signals go through its depth."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from runner.verbs.check.context import CheckContext
from runner.verbs.check.observed_pass import observe_pass
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_MOST_TRIED = 32  # modules that are tried one by one
_DEAD_WARN, _DEAD_FAIL = 0.5, 0.9
_SMALL, _TINY = 1e-3, 1e-6  # shares of the largest signal
_FAINT, _FAINTEST = 1e-9, 1e-12  # shares of the largest gradient; ConvNeXt scales some layers by 1e-6


@check
def frozen_parameters(context: CheckContext) -> Result:
    """Parameters that do not require gradients, though the config freezes nothing."""
    frozen = [name for name, parameter in context.model.named_parameters() if not parameter.requires_grad]
    total = sum(1 for _ in context.model.parameters())
    if not frozen:
        return passed(f"all {total} require gradients")
    evidence = f"{len(frozen)} of {total} parameters do not require gradients: {join_names(frozen)}"
    if context.config.freeze is not None:
        return passed(f"{evidence}, as `freeze` says")
    return warned(evidence, "requires_grad=True; if it is meant, freeze=... says so")


@check
def optimizer_parameters(context: CheckContext) -> Result:
    """Trainable parameters that the optimizer does not know."""
    groups = context.training.state.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    trainable = [(name, p) for name, p in context.model.named_parameters() if p.requires_grad]
    left_out = [name for name, parameter in trainable if id(parameter) not in known]
    if left_out:
        evidence = f"{len(left_out)} of {len(trainable)} are in no group of the optimizer: {join_names(left_out)}"
        return failed(evidence, "give the optimizer all parameters that it is given")
    return passed(f"all {len(trainable)} are in its {len(groups)} group{'' if len(groups) == 1 else 's'}")


def _without_gradient(context: CheckContext) -> tuple[list[str], list[str]]:
    """Parameters that got no gradient: those that the outputs depend on nevertheless, and those that they do not."""
    missing = context.cached(observe_pass).missing
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in missing:
        by_module[name.rpartition(".")[0]].append(name)
    model, images = context.model, context.batch.images
    parameters = dict(model.named_parameters())
    matter: list[str] = []
    matter_not: list[str] = []
    model.eval()
    with torch.no_grad():
        before = model(images)
        for number, names in enumerate(by_module.values()):
            if number >= _MOST_TRIED:
                break
            kept = [parameters[name].clone() for name in names]
            for name in names:
                # Two weights that are far apart: one may hide behind a rectifier.
                parameters[name].add_(torch.randn_like(parameters[name])).mul_(3)
            after = model(images)
            (matter_not if torch.equal(before, after) else matter).extend(names)
            for name, values in zip(names, kept, strict=True):
                parameters[name].copy_(values)
    return matter, matter_not


@check
def detached_parameters(context: CheckContext) -> Result:
    """Parameters that the outputs depend on, but that no gradient reaches: detach, no_grad, .data or .item on the way."""
    matter, _ = context.cached(_without_gradient)
    if matter:
        evidence = f"{len(matter)} parameters change the outputs and get no gradient: {join_names(matter)}"
        return failed(evidence, "look for detach(), no_grad, .data, .item() or numpy() between these and the loss")
    return passed("a gradient reaches whatever the outputs depend on")


@check
def unused_parameters(context: CheckContext) -> Result:
    """Parameters that the outputs do not depend on: a branch that is never used."""
    _, unused = context.cached(_without_gradient)
    if unused:
        evidence = f"{len(unused)} parameters change nothing in the outputs: {join_names(unused)}"
        return warned(evidence, "use the branch in forward, or remove it")
    return passed("none without a gradient")


@check
def shared_weights(context: CheckContext) -> Result:
    """One weight in several places of the model, such as a list of the same block repeated."""
    places = defaultdict(list)
    for name, parameter in context.model.named_parameters(remove_duplicate=False):
        if parameter.numel() and parameter.device.type != "meta":
            places[parameter.data_ptr(), parameter.numel()].append(name)
    shared = [names for names in places.values() if len(names) > 1]
    if shared:
        evidence = f"{len(shared)} weights are in several places, such as {' = '.join(shared[0][:3])}"
        return warned(
            evidence, "build each layer anew: [Block() for _ in range(n)], not [Block()] * n; unless it is meant"
        )
    return passed(f"{len(places)} weights, each in one place")


@check
def bias_before_norm(context: CheckContext) -> Result:
    """A bias whose effect the norm after it takes away."""
    modules = dict(context.model.named_modules())
    found = []
    for name, norm in context.cached(observe_pass).follows:
        bias = getattr(modules[name], "bias", None)
        if isinstance(bias, nn.Parameter) and bias.requires_grad:
            found.append(f"{name} before {norm} ({type(modules[norm]).__name__})")
    if found:
        return warned(f"{len(found)}: {join_names(found)}", "bias=False in the layer before the norm")
    return passed("no layer before a norm has one")


@check
def dead_units(context: CheckContext) -> Result:
    """Rectified units that no sample brings above zero: they give nothing and learn nothing."""
    units = context.cached(observe_pass).units
    if not units:
        return skipped("the model has no rectifier")
    name, count, dead = max(units, key=lambda each: each[2] / each[1])
    total, all_dead = sum(each[1] for each in units), sum(each[2] for each in units)
    where = f"{name or 'the model'}: {dead} of {count}"
    evidence = f"{all_dead:,} of {total:,} units never fire on {len(context.batch.images)} samples; most in {where}"
    fix = "smaller or centred initial weights and biases, normalised inputs, or LeakyReLU"
    if dead > _DEAD_FAIL * count:
        return failed(evidence, fix)
    return warned(evidence, fix) if dead > _DEAD_WARN * count else passed(evidence)


@check
def activation_scale(context: CheckContext) -> Result:
    """Activations that vanish or explode on the way through the depth of the model."""
    watched = context.cached(observe_pass)
    scales = watched.scales[:-1]  # the last layer gives the outputs, which may well start near 0
    if len(scales) < 2:
        return skipped("fewer than three layers")
    wrong = next((name for name, scale in scales if not math.isfinite(scale)), None)
    fix = "initial weights of variance 2 / fan-in (nn.init.kaiming_normal_), or normalisation layers"
    if wrong is not None:
        return failed(f"the output of {wrong} is not finite", fix)
    low, high = min(scales, key=lambda each: each[1]), max(scales, key=lambda each: each[1])
    evidence = (
        f"samples deviate by {high[1]:.3g} after {high[0]}, by {low[1]:.3g} after {low[0]}, of {len(scales)} layers, "
        f"by {watched.reaches:.3g} before the last"
    )
    # A layer in between may give next to nothing: a norm scales it up again, or a shortcut goes past it.
    share = watched.reaches / high[1] if high[1] else 0.0
    if share < _TINY or high[1] > 1 / _TINY:
        return failed(evidence, fix)
    return warned(evidence, fix) if share < _SMALL or high[1] > 1 / _SMALL else passed(evidence)


@check
def gradient_scale(context: CheckContext) -> Result:
    """Gradients that vanish or explode on the way back through the depth of the model."""
    gradients = context.cached(observe_pass).gradients
    if len(gradients) < 2:
        return skipped("fewer than two weights get a gradient")
    wrong = next((name for name, (gradient, _) in gradients.items() if not math.isfinite(gradient)), None)
    fix = "initial weights, normalisation layers or shortcuts; grad_clip.norm=1.0 for those that explode"
    if wrong is not None:
        return failed(f"the gradient of {wrong} is not finite", fix)
    zero = [name for name, (gradient, _) in gradients.items() if gradient == 0]
    starts_at_zero = any(
        not bool(parameter.any()) for name, parameter in context.model.named_parameters() if not name.endswith("bias")
    )
    if zero and starts_at_zero:
        return skipped("a weight starts at zero, which lets no gradient through before the first step")
    if zero:
        return failed(f"the gradient of {len(zero)} of {len(gradients)} weights is zero: {join_names(zero)}", fix)
    low, high = (pick(gradients.items(), key=lambda item: item[1][0]) for pick in (min, max))
    evidence = (
        f"root mean square {high[1][0]:.3g} of {high[0]}, {low[1][0]:.3g} of {low[0]}, of {len(gradients)} weights"
    )
    share = low[1][0] / high[1][0]
    if share < _FAINTEST or high[1][0] > 1e6:
        return failed(evidence, fix)
    return warned(evidence, fix) if share < _FAINT or high[1][0] > 1e4 else passed(evidence)
