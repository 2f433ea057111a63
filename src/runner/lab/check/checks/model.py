"""Checks of the model: its parameters, what reaches them, and how signals pass through its depth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.instrument.observer import Observer
from runner.lab.check.context import BATCH_NORM, CheckContext
from runner.lab.check.result import Result, check, failed, graded, join_names, need, none_of, passed, warned
from runner.tracking.formats import amount

_DEAD_WARN, _DEAD_FAIL = 0.5, 0.9
_SMALL, _TINY = 1e-3, 1e-6  # shares of the largest signal
_FAINT, _FAINTEST = 1e-9, 1e-12  # shares of the largest gradient; ConvNeXt scales some layers by 1e-6
_DEPTH = 4  # of nested containers that are searched for tensors
_RECTIFIERS = ("relu", "relu_", "hardtanh", "hardtanh_", "clamp_min", "clamp_min_", "threshold", "threshold_")
_NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)


@dataclass
class ObservedPass:
    """A forward and a backward pass over a batch, in training mode but without dropout."""

    scales: list[tuple[str, float]] = field(default_factory=list)  # deviation of the outputs of modules with weights
    input_scale: float = math.nan  # deviation of the input of the last of these modules
    biased: list[str] = field(default_factory=list)  # modules with a bias, each with the norm that takes its outputs
    units: list[tuple[str, int, int]] = field(
        default_factory=list
    )  # of rectifiers: module, units, those that never fired
    missing: list[str] = field(default_factory=list)  # trainable parameters without a gradient
    gradients: list[tuple[str, float]] = field(default_factory=list)  # root mean square, of weights with two dimensions


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function with the name, the arguments and the output of each operation of torch."""

    def __init__(self, look: Callable[[str, Sequence[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._look(func.overloadpacket.__name__, args, output)
        return output


def observe_pass(context: CheckContext) -> ObservedPass:
    """Send a batch through model, loss and back; or through the step of a task."""
    found, model, batch = ObservedPass(), context.model, context.batch
    inside = [""]  # names of the modules that are running
    last: tuple[str, Any, int] = ("", None, 0)  # a module without submodules, its output, and the version of that
    rectified: Tensor | None = None  # the output of the last rectifier

    def deviation(values: Tensor) -> float:
        return float(values.detach().float().std(0).mean())  # between samples

    def before(name: str, module: nn.Module, inputs: list[Any]) -> None:
        inside.append(name)
        source, output, version = last
        # Between them nothing may have changed the output in place, such as a ReLU.
        if isinstance(module, _NORMS) and inputs and inputs[0] is output and inputs[0]._version == version:
            bias = getattr(model.get_submodule(source), "bias", None)
            if isinstance(bias, nn.Parameter) and bias.requires_grad:
                found.biased.append(f"{source} before {name} ({type(module).__name__})")

    def after(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal last
        inside.pop()
        if isinstance(output, Tensor) and next(module.children(), None) is None:
            last, weight = (name, output, output._version), getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
                found.scales.append((name, deviation(output)))
                if inputs and isinstance(inputs[0], Tensor):
                    found.input_scale = deviation(inputs[0])

    def count_dead_units(name: str, arguments: Sequence[Any], output: Any) -> None:
        nonlocal rectified
        if name in _RECTIFIERS and isinstance(output, Tensor) and output.ndim >= 2:
            # Features come last in tokens (B, N, D), and second in images (B, C, H, W).
            values = output.detach() if output.ndim == 3 else output.detach().transpose(1, -1)
            top = values.flatten(0, -2).amax(0)
            rectified = output
            found.units.append((inside[-1], len(top), int((top <= 0).sum())))

    context.disable_dropout()
    with Observer(model, before, after):
        if context.supervised:
            # Not modules but operations, because most models call F.relu.
            with Operations(count_dead_units):
                logits = model(batch.images)
            loss = context.training.loss(logits, context.targets(batch))
        else:
            loss = context.loss()
    if rectified is not None and rectified.data_ptr() == logits.data_ptr():
        found.units.pop()  # outputs that are never negative by design: reachable-targets judges them
    if loss.requires_grad:
        loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if parameter.requires_grad and gradient is None:
            found.missing.append(name)
        elif gradient is not None and parameter.ndim >= 2:
            found.gradients.append((name, float(gradient.float().square().mean().sqrt())))
    return found


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


def _without_gradient(context: CheckContext) -> tuple[list[str], list[str]]:
    """Parameters without a gradient: those that do not change the outputs, and those that do."""
    model, images, missing = context.model, context.batch.images, context.cached(observe_pass).missing
    found: tuple[list[str], list[str]] = [], []
    model.eval()
    with torch.no_grad():
        before = model(images)
        for name in missing:
            parameter = model.get_parameter(name)
            kept = parameter.clone()
            # Large random changes: a small one may hide behind a rectifier.
            parameter.add_(torch.randn_like(parameter)).mul_(3)
            found[not torch.equal(before, model(images))].append(name)
            parameter.copy_(kept)
    return found


@check("model")
def detached_parameters(context: CheckContext) -> Result:
    """Parameters that change the outputs but get no gradient, because of detach, no_grad, .data or .item."""
    used = context.cached(_without_gradient)[1]
    fix = "remove detach(), no_grad, .data, .item() or numpy() before the loss"
    otherwise = "all parameters that change the outputs get a gradient"
    return none_of(used, "parameters change the outputs and get no gradient", fix, otherwise)


@check("model", any_task=True)
def unused_parameters(context: CheckContext) -> Result:
    """Parameters that do not change the outputs: a branch that is never used."""
    if not context.supervised:
        missing, fix = context.cached(observe_pass).missing, "use them in the step of the task, freeze or remove them"
        return none_of(missing, "parameters get no gradient in a step", fix, "all get a gradient in a step", "warn")
    unused, fix = context.cached(_without_gradient)[0], "use the branch in forward, or remove it"
    return none_of(unused, "parameters do not change the outputs", fix, "none without a gradient", "warn")


@check("model", any_task=True)
def shared_weights(context: CheckContext) -> Result:
    """A weight that occurs several times in the model, for example in a list that repeats one block."""
    places = defaultdict(list)
    for name, parameter in context.model.named_parameters(remove_duplicate=False):
        places[parameter].append(name)
    shared = [" = ".join(names[:3]) for names in places.values() if len(names) > 1]
    fix = "unless intended, build each layer: [Block() for _ in range(n)], not [Block()] * n"
    return none_of(shared, "weights occur several times", fix, f"{len(places)} weights, each in one place", "warn")


@check("model", any_task=True)
def bias_before_norm(context: CheckContext) -> Result:
    """A bias without effect, because a norm follows."""
    biased, fix = context.cached(observe_pass).biased, "bias=False in the layer before the norm"
    return none_of(biased, "have no effect", fix, "no layer before a norm has one", "warn")


@check("model")
def dead_units(context: CheckContext) -> Result:
    """Units of a ReLU that are zero for every sample: they output nothing and learn nothing."""
    units = context.cached(observe_pass).units
    need(units, "the model has no rectifier before its outputs")
    name, count, dead = max(units, key=lambda each: each[2] / each[1])
    total, all_dead = sum(each[1] for each in units), sum(each[2] for each in units)
    evidence = f"{all_dead:,} of {total:,} units never fire on {len(context.batch.images)} samples; "
    evidence += f"most in {name or 'the model'}: {dead} of {count}"
    fix = "smaller or centered initial weights and biases, normalized inputs, or LeakyReLU"
    return graded(evidence, fix, fail=dead > _DEAD_FAIL * count, warn=dead > _DEAD_WARN * count)


def _extremes(signals: Sequence[tuple[str, float]], where: str) -> tuple[float, float, str]:
    """The smallest and the largest signal, NaN as infinity, and both as text."""
    ordered = sorted((signal if math.isfinite(signal) else math.inf, name) for name, signal in signals)
    (least, low), (most, high) = ordered[0], ordered[-1]
    return least, most, f"{most:.3g} {where} {high}, {least:.3g} {where} {low}, of {len(signals)}"


@check("model")
def activation_scale(context: CheckContext) -> Result:
    """Activations that vanish or explode with the depth of the model."""
    observed = context.cached(observe_pass)
    scales = observed.scales[:-1]  # the last layer gives the outputs, which may well start near 0
    need(len(scales) >= 2, "fewer than three layers")
    fix = "initial weights of variance 2 / fan-in (nn.init.kaiming_normal_), or normalization layers"
    _, most, extremes = _extremes(scales, "after")
    evidence = f"the deviation between samples is {extremes} layers, and {observed.input_scale:.3g} before the last"
    # A layer in between may output next to nothing: a norm scales it up again, or a shortcut bypasses it.
    share = observed.input_scale / most if most else 0.0
    fail, warn = (not share >= bound or most > 1 / bound for bound in (_TINY, _SMALL))
    return graded(evidence, fix, fail=fail, warn=warn)


@check("model", any_task=True)
def gradient_scale(context: CheckContext) -> Result:
    """Gradients that vanish or explode with the depth of the model."""
    gradients = context.cached(observe_pass).gradients
    need(len(gradients) >= 2, "fewer than two weights get a gradient")
    if not context.supervised:  # a batch need not reach every part of a model, such as that for large objects
        _, most, evidence = _extremes(gradients, "of")
        return graded(
            evidence,
            "initial weights, normalization layers; grad_clip.norm=1.0 against exploding gradients",
            fail=not 0 < most < 1e6,
        )
    if zero := [name for name, gradient in gradients if gradient == 0]:
        weights = [p for name, p in context.model.named_parameters() if not name.endswith("bias")]
        need(all(bool(p.any()) for p in weights), "a weight starts at zero, which lets no gradient through at first")
        fix = "see dead-units and reachable-targets: a ReLU that is always 0, a saturated output, a product with 0"
        return failed(f"the gradient of {len(zero)} of {len(gradients)} weights is zero: {join_names(zero)}", fix)
    least, most, evidence = _extremes(gradients, "of")
    fail, warn = (least / most < share or most > bound for share, bound in ((_FAINTEST, 1e6), (_FAINT, 1e4)))
    fix = "initial weights, normalization layers or shortcuts; grad_clip.norm=1.0 against exploding gradients"
    return graded(f"root mean square {evidence} weights", fix, fail=fail, warn=warn)


def _graph_leaves(root: Tensor) -> list[Tensor]:
    """Tensors that backward would accumulate gradients into."""
    nodes: list[Any] = [root.grad_fn]
    seen: set[Any] = {None}
    found: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [each for each, _ in node.next_functions]
    return found


def _nested_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers, objects and modules in them, by the Python expression that reaches them."""
    items: dict[str, Any] = {}
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        items = {f".{key}": each for key, each in value.named_parameters()}
    elif isinstance(value, dict):
        items = {f"[{key!r}]": each for key, each in value.items()}
    elif isinstance(value, list | tuple | set):
        items = {f"[{place}]": each for place, each in enumerate(value)}
    elif not isinstance(value, type | ModuleType):
        items = {f".{key}": each for key, each in getattr(value, "__dict__", {}).items()}
    for key, each in items.items() if depth else ():
        yield from _nested_tensors(each, f"{name}{key}", depth - 1)


@check("reach", any_task=True)
def unregistered_parameters(context: CheckContext) -> Result:
    """Tensors that require gradients but are not parameters: layers in lists or dicts, plain tensors, layers made in forward."""
    model, loss = context.model, context.training.loss
    groups = context.training.state.optimizer.param_groups
    known = {id(each) for each in model.parameters()} | {id(each) for group in groups for each in group["params"]}
    graph = context.loss()  # keeps the tensors alive, so no two have one identity
    found = [each for each in _graph_leaves(graph) if id(each) not in known]
    names: dict[int, str] = {}
    modules = [*model.named_modules(), *(loss.named_modules(prefix="loss") if isinstance(loss, nn.Module) else ())]
    for place, module in modules if found else ():
        own = {key: each for key, each in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for key, value in own.items():
            for name, tensor in _nested_tensors(value, f"{place}.{key}".lstrip(".")):
                names.setdefault(id(tensor), name)
    shown = sorted(names.get(id(each), f"made in forward, {tuple(each.shape)}") for each in found)
    fix = "nn.ModuleList, nn.ModuleDict or nn.Parameter, created in __init__: others are neither trained nor saved"
    otherwise = "the loss depends on no trainable tensors other than parameters"
    return none_of(shown, "tensors that require gradients are not in the optimizer", fix, otherwise)


@check("reach", any_task=True)
def equal_units(context: CheckContext) -> Result:
    """Units of a layer that start equal and get equal gradients, so that they stay equal: constant initial weights."""
    context.disable_dropout()  # it makes gradients differ by chance
    loss = context.loss()
    need(loss.requires_grad and bool(loss.isfinite()), "the loss has no gradient")
    loss.backward()  # type: ignore[no-untyped-call]
    equal, similar, count = [], [], 0
    for name, weight in context.model.named_parameters():
        if weight.grad is None or weight.ndim < 2 or len(weight) < 2:
            continue
        count += 1
        rows, slopes = weight.detach().flatten(1), weight.grad.flatten(1)
        largest = float(slopes.abs().max())
        if bool((rows != rows[0]).any()) or largest == 0:
            continue
        if float((slopes - slopes[0]).abs().max()) < 1e-4 * largest:
            equal.append(name)
        elif min(rows.shape) >= 4 and bool(rows.any()):
            similar.append(name)
    fix = "random initial weights (nn.init.kaiming_normal_)"
    if similar and not equal:
        evidence = f"all units of {join_names(similar)} start equal; only other layers make their gradients differ"
        return warned(evidence, fix)
    what = f"of {count} weights have equal units that get equal gradients"
    return none_of(equal, what, fix, f"the units of {count} weights differ, or learn to")


@check("model", any_task=True)
def trainable_set(context: CheckContext) -> Result:
    """Parameters whose requires_grad changes during a step or an evaluation."""
    need(context.config.freeze is None, "freeze is set")

    def trainable() -> set[str]:
        return {name for name, each in context.model.named_parameters() if each.requires_grad}

    before = trainable()
    context.training.state.train()
    loss = context.loss()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    changed = before ^ trainable()
    context.model.eval()
    with torch.no_grad():
        context.evaluated(context.batch.data)
    changed |= before ^ trainable()
    fix = "freeze=..., or set requires_grad once in the constructor"
    return none_of(sorted(changed), "parameters change requires_grad", fix, f"{len(before)} stay trainable")
