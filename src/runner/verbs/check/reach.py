"""Checks of what training can reach: weights that nothing updates, units that stay equal, targets out of the outputs' range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.verbs.check.context import CheckContext
from runner.verbs.check.observed_pass import observe_pass
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_DEPTH = 4  # of containers in containers that names are looked for in
_PUSHED = (1e-2, 1e2, 1e4)  # sizes of random weights in the last layer
_SAMPLES = 32


def _leaves(root: Tensor) -> list[Tensor]:
    """Tensors that autograd would put gradients into."""
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


def _held(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers and in modules that stand in them, by the path that Python finds them by."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            yield from _held(each, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for place, each in enumerate(value):
            yield from _held(each, f"{name}[{place}]", depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__module__ != "builtins":
        for key, each in list(vars(value).items()):
            if isinstance(each, Tensor | nn.Module | list | tuple | dict):
                yield from _held(each, f"{name}.{key}", depth - 1)


def _names(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that modules hold without being told so, by identity."""
    found: dict[int, str] = {}
    for place, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for name, tensor in _held(value, f"{place}.{key}" if place else key, _DEPTH):
                    found.setdefault(id(tensor), name)
    return found


@check
def unregistered_parameters(context: CheckContext) -> Result:
    """Tensors that require gradients and are no parameters: layers in lists or dicts, plain tensors, layers made in forward."""
    model, parts, batch = context.model, context.training.parts, context.batch
    groups = context.training.state.optimizer.param_groups
    known = {id(each) for each in model.parameters()} | {id(each) for group in groups for each in group["params"]}
    loss = parts.loss(model(batch.images), context.targets(batch))
    # The graph keeps the tensors alive, so no two have one identity.
    found = [each for each in _leaves(loss) if id(each) not in known]
    if not found:
        return passed("autograd finds no other tensors than parameters behind the loss")
    names = _names(model) | {id(each): f"loss.{name}" for name, each in parts_of(parts.loss)}
    shown = [names.get(id(each), f"made in forward, {tuple(each.shape)}") for each in found]
    evidence = f"{len(found)} tensors behind the loss require gradients, and the optimizer never gets them: "
    evidence += join_names(sorted(shown))
    return failed(
        evidence,
        "nn.ModuleList, nn.ModuleDict or nn.Parameter, made in __init__: they are trained and saved only there",
    )


def parts_of(loss: Any) -> list[tuple[str, Tensor]]:
    """Parameters of a loss, if it is a module."""
    return list(loss.named_parameters()) if isinstance(loss, nn.Module) else []


@check
def equal_units(context: CheckContext) -> Result:
    """Units of a layer that start equal and get equal gradients, so that they stay equal: constant initial weights."""
    model, parts, batch = context.model, context.training.parts, context.batch
    context.training.state.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # which makes gradients differ by chance
    loss = parts.loss(model(batch.images), context.targets(batch))
    if not loss.requires_grad or not math.isfinite(float(loss.detach())):
        return skipped("the loss has no gradient")
    loss.backward()  # type: ignore[no-untyped-call]
    found, alike, count = [], [], 0
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if gradient is None or weight.ndim < 2 or len(weight) < 2 or gradient.layout is not torch.strided:
            continue
        count += 1
        rows, slopes = weight.detach().flatten(1), gradient.flatten(1)
        largest = float(slopes.abs().max())
        if bool((rows != rows[0]).any()) or largest == 0:
            continue
        if float((slopes - slopes[0]).abs().max()) < 1e-4 * largest:
            found.append(name)
        elif len(rows) >= 4 and rows.shape[1] >= 4 and float(rows.abs().max()) > 0:
            alike.append(name)
    if found:
        evidence = f"all units of {join_names(found)} are equal and get equal gradients"
        return failed(evidence, "random initial weights (nn.init.kaiming_normal_)")
    if alike:
        told = f"all units of {join_names(alike)} start equal, and other layers alone tell them apart"
        return warned(told, "random initial weights (nn.init.kaiming_normal_)")
    return passed(f"the units of {count} weights differ, or learn to")


def _bounds(context: CheckContext) -> tuple[float, float] | None:
    """Lowest and highest output that any weights of the last layer give, infinite where there is none; None if not known."""
    last = [name for name, _ in context.cached(observe_pass).scales][-1:]
    if not last:
        return None
    weight: Tensor = context.model.get_submodule(last[0]).weight  # type: ignore[assignment]
    images = context.batch.images[:_SAMPLES]
    context.model.eval()
    reached: list[tuple[float, float]] = []
    with torch.no_grad():
        for size in _PUSHED:
            generator = torch.Generator().manual_seed(0)
            low, high = math.inf, -math.inf
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


def _best(context: CheckContext, targets: Tensor, low: float, high: float) -> float:
    """The lowest loss of outputs between two bounds, all the targets' own classes alike and all others alike."""
    right = torch.nn.functional.one_hot(targets, context.training.task.outputs(context.splits.classes)).float()
    low, high = max(low, -20.0), min(high, 20.0)
    with torch.no_grad():
        return min(
            float(context.training.parts.loss(right * top + (1 - right) * bottom, targets))
            for top in (high, 0.5 * (high + low), 0.75 * high + 0.25 * low, 0.6 * high + 0.4 * low)
            for bottom in (low, 0.5 * (high + low), 0.75 * low + 0.25 * high, 0.6 * low + 0.4 * high)
        )


@check
def reachable_targets(context: CheckContext) -> Result:
    """Outputs that no weights bring to the targets: a ReLU, sigmoid, tanh or log-softmax at the end."""
    bounds = _bounds(context)
    if bounds is None:
        return skipped("the last layer cannot be found, or the outputs do not depend on it")
    low, high = bounds
    if math.isinf(low) and math.isinf(high):
        return passed("the outputs have no bounds")
    told = f"whatever the last layer's weights are, outputs are from {low:.3g} to {high:.3g}"
    fix = "no activation after the last layer"
    targets = context.targets(context.batch)
    if targets.ndim == 1 and not targets.is_floating_point():
        try:
            guess, best = _best(context, targets, 0.0, 0.0), _best(context, targets, low, high)
            floor = _best(context, targets, -20.0, 20.0)
        except (RuntimeError, ValueError):  # a loss that takes probabilities alone
            return passed(f"{told}, and the loss takes nothing else")
        told = f"{told}; with every answer right the loss is {best:.3g}, without bounds {floor:.3g}, of a guess {guess:.3g}"
        if best > floor + 0.15 * max(0.0, guess - floor):
            return failed(told, fix)
        return warned(told, fix) if low > -1e-3 and math.isinf(high) else passed(told)
    values = context.targets(context.read("train", context.readable("train", 256))).float()
    margin = 1e-3 * float(values.std())
    outside = float(((values < low - margin) | (values > high + margin)).float().mean())
    told = f"{told}; {outside:.0%} of the targets are outside"
    return failed(told, f"{fix}, or targets scaled to its range") if outside > 0.01 else passed(told)
