"""Checks of the model: its parameters, what reaches them, and how signals pass through its depth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.verbs.check.context import CheckContext
from runner.verbs.check.observed_pass import observe_pass
from runner.verbs.check.result import Result, failed, graded, join_names, passed, skipped, warned

_MOST_TRIED = 32  # modules that are changed one by one
_DEAD_WARN, _DEAD_FAIL = 0.5, 0.9
_SMALL, _TINY = 1e-3, 1e-6  # shares of the largest signal
_FAINT, _FAINTEST = 1e-9, 1e-12  # shares of the largest gradient; ConvNeXt scales some layers by 1e-6
_DEPTH = 4  # of nested containers that are searched for tensors
_RANDOM = "random initial weights (nn.init.kaiming_normal_)"


def frozen_parameters(context: CheckContext) -> Result:
    """Parameters that do not require gradients, although the config freezes nothing."""
    frozen = [name for name, parameter in context.model.named_parameters() if not parameter.requires_grad]
    total = sum(1 for _ in context.model.parameters())
    if not frozen:
        return passed(f"all {total} require gradients")
    evidence = f"{len(frozen)} of {total} parameters do not require gradients: {join_names(frozen)}"
    if context.config.freeze is not None:
        return passed(f"{evidence}, as set by `freeze`")
    return warned(evidence, "requires_grad=True; if this is intended, set freeze=...")


def optimizer_parameters(context: CheckContext) -> Result:
    """Trainable parameters that the optimizer does not have."""
    groups = context.training.state.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    trainable = [(name, p) for name, p in context.model.named_parameters() if p.requires_grad]
    missing = [name for name, parameter in trainable if id(parameter) not in known]
    if missing:
        evidence = f"{len(missing)} of {len(trainable)} are in no parameter group: {join_names(missing)}"
        return failed(evidence, "pass all parameters on to the optimizer")
    return passed(f"all {len(trainable)} are in its {len(groups)} group{'' if len(groups) == 1 else 's'}")


def _without_gradient(context: CheckContext) -> tuple[list[str], list[str]]:
    """Parameters without a gradient: those that change the outputs, and those that do not."""
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in context.cached(observe_pass).missing:
        by_module[name.rpartition(".")[0]].append(name)
    model, images = context.model, context.batch.images
    parameters = dict(model.named_parameters())
    used: list[str] = []
    unused: list[str] = []
    model.eval()
    with torch.no_grad():
        before = model(images)
        for names in list(by_module.values())[:_MOST_TRIED]:
            kept = [parameters[name].clone() for name in names]
            for name in names:
                # Large random changes: a small one may hide behind a rectifier.
                parameters[name].add_(torch.randn_like(parameters[name])).mul_(3)
            (unused if torch.equal(before, model(images)) else used).extend(names)
            for name, values in zip(names, kept, strict=True):
                parameters[name].copy_(values)
    return used, unused


def detached_parameters(context: CheckContext) -> Result:
    """Parameters that change the outputs but get no gradient, because of detach, no_grad, .data or .item."""
    used, _ = context.cached(_without_gradient)
    if used:
        evidence = f"{len(used)} parameters change the outputs and get no gradient: {join_names(used)}"
        return failed(evidence, "remove detach(), no_grad, .data, .item() or numpy() between these and the loss")
    return passed("all parameters that change the outputs get a gradient")


def unused_parameters(context: CheckContext) -> Result:
    """Parameters that do not change the outputs: a branch that is never used."""
    _, unused = context.cached(_without_gradient)
    if unused:
        evidence = f"{len(unused)} parameters do not change the outputs: {join_names(unused)}"
        return warned(evidence, "use the branch in forward, or remove it")
    return passed("none without a gradient")


def shared_weights(context: CheckContext) -> Result:
    """A weight that occurs several times in the model, for example in a list that repeats one block."""
    places = defaultdict(list)
    for name, parameter in context.model.named_parameters(remove_duplicate=False):
        if parameter.numel() and parameter.device.type != "meta":
            places[parameter.data_ptr(), parameter.numel()].append(name)
    shared = [names for names in places.values() if len(names) > 1]
    if shared:
        evidence = f"{len(shared)} weights occur several times, such as {' = '.join(shared[0][:3])}"
        return warned(evidence, "unless intended, build each layer: [Block() for _ in range(n)], not [Block()] * n")
    return passed(f"{len(places)} weights, each in one place")


def bias_before_norm(context: CheckContext) -> Result:
    """A bias without effect, because a norm follows."""
    modules = dict(context.model.named_modules())
    found = []
    for name, norm in context.cached(observe_pass).before_norm:
        bias = getattr(modules[name], "bias", None)
        if isinstance(bias, nn.Parameter) and bias.requires_grad:
            found.append(f"{name} before {norm} ({type(modules[norm]).__name__})")
    if found:
        return warned(f"{len(found)}: {join_names(found)}", "bias=False in the layer before the norm")
    return passed("no layer before a norm has one")


def dead_units(context: CheckContext) -> Result:
    """Units of a ReLU that are zero for every sample: they output nothing and learn nothing."""
    units = context.cached(observe_pass).units
    if not units:
        return skipped("the model has no rectifier")
    name, count, dead = max(units, key=lambda each: each[2] / each[1])
    total, all_dead = sum(each[1] for each in units), sum(each[2] for each in units)
    evidence = f"{all_dead:,} of {total:,} units never fire on {len(context.batch.images)} samples; "
    evidence += f"most in {name or 'the model'}: {dead} of {count}"
    fix = "smaller or centered initial weights and biases, normalized inputs, or LeakyReLU"
    return graded(evidence, fix, fail=dead > _DEAD_FAIL * count, warn=dead > _DEAD_WARN * count)


def activation_scale(context: CheckContext) -> Result:
    """Activations that vanish or explode with the depth of the model."""
    observed = context.cached(observe_pass)
    scales = observed.scales[:-1]  # the last layer gives the outputs, which may well start near 0
    if len(scales) < 2:
        return skipped("fewer than three layers")
    wrong = next((name for name, scale in scales if not math.isfinite(scale)), None)
    fix = "initial weights of variance 2 / fan-in (nn.init.kaiming_normal_), or normalization layers"
    if wrong is not None:
        return failed(f"the output of {wrong} is not finite", fix)
    low, high = min(scales, key=lambda each: each[1]), max(scales, key=lambda each: each[1])
    evidence = f"the deviation between samples is {high[1]:.3g} after {high[0]}, {low[1]:.3g} after {low[0]}, of {len(scales)} "
    evidence += f"layers, and {observed.input_scale:.3g} before the last"
    # A layer in between may output next to nothing: a norm scales it up again, or a shortcut bypasses it.
    share = observed.input_scale / high[1] if high[1] else 0.0
    fail, warn = (share < bound or high[1] > 1 / bound for bound in (_TINY, _SMALL))
    return graded(evidence, fix, fail=fail, warn=warn)


def gradient_scale(context: CheckContext) -> Result:
    """Gradients that vanish or explode with the depth of the model."""
    gradients = context.cached(observe_pass).gradients
    if len(gradients) < 2:
        return skipped("fewer than two weights get a gradient")
    wrong = next((name for name, gradient in gradients.items() if not math.isfinite(gradient)), None)
    fix = "initial weights, normalization layers or shortcuts; grad_clip.norm=1.0 against exploding gradients"
    if wrong is not None:
        return failed(f"the gradient of {wrong} is not finite", fix)
    zero = [name for name, gradient in gradients.items() if gradient == 0]
    if zero and any(not bool(p.any()) for name, p in context.model.named_parameters() if not name.endswith("bias")):
        return skipped("a weight starts at zero, which lets no gradient through before the first step")
    if zero:
        return failed(f"the gradient of {len(zero)} of {len(gradients)} weights is zero: {join_names(zero)}", fix)
    low, high = (pick(gradients, key=lambda name: gradients[name]) for pick in (min, max))
    least, most = gradients[low], gradients[high]
    evidence = f"root mean square {most:.3g} of {high}, {least:.3g} of {low}, of {len(gradients)} weights"
    share = least / most
    return graded(evidence, fix, fail=share < _FAINTEST or most > 1e6, warn=share < _FAINT or most > 1e4)


def _graph_leaves(root: Tensor) -> list[Tensor]:
    """Tensors that backward would accumulate gradients into."""
    seen: set[Any] = set()
    found: list[Tensor] = []
    nodes = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(variable)
        nodes += [each for each, _ in node.next_functions]
    return found


def _nested_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers, objects and modules in them, by the Python expression that reaches them."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            yield from _nested_tensors(each, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for place, each in enumerate(value):
            yield from _nested_tensors(each, f"{name}[{place}]", depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__module__ != "builtins":
        for key, each in list(vars(value).items()):
            if isinstance(each, Tensor | nn.Module | list | tuple | dict):
                yield from _nested_tensors(each, f"{name}.{key}", depth - 1)


def unregistered_parameters(context: CheckContext) -> Result:
    """Tensors that require gradients but are not parameters: layers in lists or dicts, plain tensors, layers made in forward."""
    model, loss = context.model, context.training.parts.loss
    groups = context.training.state.optimizer.param_groups
    known = {id(each) for each in model.parameters()} | {id(each) for group in groups for each in group["params"]}
    graph = context.loss()  # keeps the tensors alive, so no two have one identity
    found = [each for each in _graph_leaves(graph) if id(each) not in known]
    if not found:
        return passed("the loss depends on no trainable tensors other than parameters")
    of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    names = {id(each): f"loss.{name}" for name, each in of_loss}
    for place, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for name, tensor in _nested_tensors(value, f"{place}.{key}" if place else key):
                    names.setdefault(id(tensor), name)
    shown = sorted(names.get(id(each), f"made in forward, {tuple(each.shape)}") for each in found)
    evidence = f"{len(found)} tensors that require gradients are not in the optimizer: {join_names(shown)}"
    fix = "nn.ModuleList, nn.ModuleDict or nn.Parameter, created in __init__: others are neither trained nor saved"
    return failed(evidence, fix)


def equal_units(context: CheckContext) -> Result:
    """Units of a layer that start equal and get equal gradients, so that they stay equal: constant initial weights."""
    context.disable_dropout()  # it makes gradients differ by chance
    loss = context.loss()
    if not loss.requires_grad or not math.isfinite(float(loss.detach())):
        return skipped("the loss has no gradient")
    loss.backward()  # type: ignore[no-untyped-call]
    equal, similar, count = [], [], 0
    for name, weight in context.model.named_parameters():
        gradient = weight.grad
        if gradient is None or weight.ndim < 2 or len(weight) < 2 or gradient.layout is not torch.strided:
            continue
        count += 1
        rows, slopes = weight.detach().flatten(1), gradient.flatten(1)
        largest = float(slopes.abs().max())
        if bool((rows != rows[0]).any()) or largest == 0:
            continue
        if float((slopes - slopes[0]).abs().max()) < 1e-4 * largest:
            equal.append(name)
        elif len(rows) >= 4 and rows.shape[1] >= 4 and float(rows.abs().max()) > 0:
            similar.append(name)
    if equal:
        return failed(f"all units of {join_names(equal)} are equal and get equal gradients", _RANDOM)
    if similar:
        evidence = f"all units of {join_names(similar)} start equal; only other layers make their gradients differ"
        return warned(evidence, _RANDOM)
    return passed(f"the units of {count} weights differ, or learn to")
