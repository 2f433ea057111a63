"""One step of the run, measured: signals, gradients, modes, weights and rates. The checks of the model and the step read it."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer
from runner.lab.check.context import BATCH_NORM, CheckContext, shared
from runner.lab.check.result import LIMITS
from runner.run.evaluation import evaluate_both
from runner.run.metrics import build_callbacks, fresh_metrics

_DEPTH = 5  # of nested containers and objects that are searched for tensors
_NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)


@dataclass
class Signals:
    """A forward and a backward pass over a batch, in training mode but without dropout."""

    last_layer: str = ""  # the last module with a weight of two dimensions that ran
    biased: list[str] = field(default_factory=list)  # modules with a bias, each with the norm that takes its outputs
    norm_calls: Counter[str] = field(default_factory=Counter)  # of BatchNorm that updates statistics, see `calls` below
    missing: list[str] = field(default_factory=list)  # trainable parameters without a gradient
    gradients: list[tuple[str, float]] = field(default_factory=list)  # root mean square, of weights with two dimensions
    equal: list[str] = field(default_factory=list)  # weights whose units are equal and get equal gradients
    similar: list[str] = field(default_factory=list)  # weights whose units are equal, and get other gradients
    loose: list[str] = field(default_factory=list)  # tensors that require gradients, and that nobody trains


@shared
def measure_signals(context: CheckContext) -> Signals:
    """Send a batch through model, loss and back; or through the step of a task."""
    found, model = Signals(), context.model
    last: tuple[str, Any, int] = ("", None, 0)  # a module without submodules, its output, and the version of that
    # A step may call a network for each view, or for real and generated samples, so that each of its calls counts alone
    running, calls = list[str](), Counter[str]()

    def before(name: str, module: nn.Module, inputs: list[Any]) -> None:
        source, output, version = last
        if not running:
            calls.clear()
        running.append(name)
        # Between them nothing may have changed the output in place, such as a ReLU.
        if isinstance(module, _NORMS) and inputs and inputs[0] is output and inputs[0]._version == version:
            bias = getattr(model.get_submodule(source), "bias", None)
            if isinstance(bias, nn.Parameter) and bias.requires_grad:
                found.biased.append(f"{source} before {name} ({type(module).__name__})")
        if isinstance(module, BATCH_NORM) and module.training and module.track_running_stats:
            calls[name] += 1
            found.norm_calls |= calls

    def after(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal last
        running.pop()
        if isinstance(output, Tensor) and next(module.children(), None) is None:
            last, weight = (name, output, output._version), getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
                found.last_layer = name

    groups = context.training.state.optimizer.param_groups
    # Before the pass, which may register more
    known = {id(each) for each in model.parameters()} | {id(each) for group in groups for each in group["params"]}
    context.disable_dropout()
    with Observer(model, before, after):
        loss = context.training.steps(context.batch.data)
    found.loose = _loose_tensors(context, loss, known)
    if loss.requires_grad:
        loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if parameter.requires_grad and gradient is None:
            found.missing.append(name)
        if gradient is None or parameter.ndim < 2:
            continue
        found.gradients.append((name, float(gradient.float().square().mean().sqrt())))
        rows, slopes = parameter.detach().flatten(1), gradient.flatten(1)
        largest = float(slopes.abs().max())
        # Units that start equal and get the same gradients stay equal
        if len(rows) < 2 or largest == 0 or bool((rows != rows[0]).any()):
            continue
        if float((slopes - slopes[0]).abs().max()) < 1e-4 * largest:
            found.equal.append(name)
        elif min(rows.shape) >= 4 and bool(rows.any()):
            found.similar.append(name)
    return found


def _loose_tensors(context: CheckContext, root: Tensor, known: set[int]) -> list[str]:
    """Tensors that the loss depends on, that require gradients, and that are not among the known ones."""
    found, batch = [each for each in _leaves(root) if id(each[0]) not in known], context.batch.data
    if not found:
        return []
    # What a gradient penalty differentiates by is the batch, or made in each step: only what stays can be trained
    stays = {storage for _, storage in _leaves(context.training.steps(batch))}
    stays -= {each.untyped_storage().data_ptr() for each in tensors_in(batch)}
    modules = [*context.model.named_modules(), *context.training.loss.named_modules(prefix="loss")]
    names: dict[int, str] = {}
    for place, owner in [("task", context.training.task), *modules]:
        for name, tensor in _nested_tensors(owner, place):
            names.setdefault(id(tensor), name.lstrip("."))
    kept = [each for each, storage in found if isinstance(each, nn.Parameter) or storage in stays]
    return sorted(names.get(id(each), f"made in forward, {tuple(each.shape)}") for each in kept)


def _leaves(root: Tensor) -> list[tuple[Tensor, int]]:
    """Tensors that require gradients and that a result depends on, each with its storage."""
    nodes: list[Any] = [root.grad_fn]
    seen: set[Any] = {None}
    found: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [each for each, _ in node.next_functions]
    return [(each, each.untyped_storage().data_ptr()) for each in found]


def _nested_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers, objects and modules, by the Python expression that reaches them."""
    items: dict[str, Any] = {}
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        items = {f"[{key!r}]": each for key, each in value.items()}
    elif isinstance(value, list | tuple | set):
        items = {f"[{place}]": each for place, each in enumerate(value)}
    elif not isinstance(value, type | ModuleType):
        own = value.named_parameters() if isinstance(value, nn.Module) else ()
        items = {f".{key}": each for key, each in [*own, *getattr(value, "__dict__", {}).items()]}
        items = {key: each for key, each in items.items() if key not in ("._parameters", "._buffers", "._modules")}
    for key, each in items.items() if depth else ():
        yield from _nested_tensors(each, f"{name}{key}", depth - 1)


@dataclass(frozen=True)
class Step:
    """An optimizer step of the run at its full learning rate, with callbacks and an evaluation after it."""

    moved: dict[str, float]  # share of its size that each weight moves by
    downhill: dict[str, float]  # standard errors by which it moves against its gradient
    norm: float  # of all gradients, before clipping
    stale: list[str]  # gradients that are not zero when the next step begins
    in_evaluation: set[str]  # modules in evaluation mode when a step begins
    left: float  # share of the step that is left after callbacks and evaluation
    pushed: float  # change of the weights by callbacks, in steps
    slowed: float  # learning rate after the callbacks, as a share of that before
    own_callbacks: bool  # whether the user wrote one


@shared
def measure_step(context: CheckContext) -> Step:
    """Run one step in the loop of the run with its callbacks and an evaluation, and look at what the next one begins with."""
    training, state, plan = context.training, context.training.state, context.training.plan
    weights = {name: each for name, each in state.named_parameters() if each.requires_grad and each.ndim >= 2}
    kept: dict[str, Any] = {"stale": [], "stuck": set()}

    def copied() -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in weights.items()}

    def in_evaluation() -> set[str]:
        return {name or "the model" for name, module in context.model.named_modules() if not module.training}

    def accumulate(batch: Any, weight: float, samples: int) -> None:
        if "stepped" in kept:  # the next step begins: nothing more is trained
            if "next" not in kept:
                kept.update(next=copied(), stale=_nonzero_gradients(context.model), stuck=in_evaluation() - usual)
            return
        if "start" not in kept:
            kept["start"] = copied()
            for group in state.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        train(context.shortened(batch), weight, samples)

    def update() -> None:
        if "stepped" not in kept:
            change()
            kept["stepped"] = copied()

    # Without a guard, gradients that are not finite reach the weights, where they are found
    step: Any = dataclasses.replace(training.step, guard=None)
    train, change, step.accumulate, step.update = step.accumulate, step.update, accumulate, update

    state.train()
    usual = in_evaluation()
    gradients = _gradients(context, weights)
    context.restore()
    rates = [float(group["initial_lr"]) for group in state.optimizer.param_groups]
    own = build_callbacks(context.config, training.task, training.monitor, training.scalars)
    metrics = fresh_metrics(context.config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        autocast, held_out = training.precision.autocast, context.held_out
        how: dict[str, Any] = {"loss": training.loss, "metrics": metrics(), "autocast": autocast, "limit": 1}
        values = evaluate(training.model, held_out.loader, context.evaluated, **how)
        return {f"val/{name}": value for name, value in values.items()}

    with tempfile.TemporaryDirectory() as scratch:  # for callbacks that write
        Loop(
            step,
            training.data.train.loader,
            dataclasses.replace(plan, limit=min(plan.batches, 2 * plan.accumulate)),
            limits=Limits(epochs=None, max_steps=2, evaluate_every_epochs=None, evaluate_every_steps=1),
            evaluate=(lambda: evaluate_both(training, evaluate_once)) if context.evaluates else None,
            callbacks=[*own.values()],
            monitor=training.monitor,
            directory=Path(scratch),
        ).run()
    # A callback may end the run after the first step
    start, stepped, after = kept["start"], kept["stepped"], kept.get("next") or copied()
    moved, downhill = _movements(start, stepped, gradients)

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return math.hypot(*(float((a[name] - b[name]).norm()) for name in start))

    size, now = apart(stepped, start), [float(group["initial_lr"]) for group in state.optimizer.param_groups]
    return Step(
        moved,
        downhill,
        norm=float(torch.nn.utils.get_total_norm(list(gradients.values()))),
        stale=kept["stale"],
        in_evaluation=kept["stuck"],
        left=apart(after, start) / size if size > 0 else 1.0,
        pushed=apart(after, stepped) / size if size > 0 else 0.0,
        slowed=max((new / old for new, old in zip(now, rates, strict=False) if old), default=1.0),
        own_callbacks=any(not type(each).__module__.startswith("runner.") for each in own.values()),
    )


def _gradients(context: CheckContext, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Those of the batches of the first step, with the noise that the step has."""
    plan, steps = context.training.plan, context.training.steps
    batches = context.training.data.train.loader.batches(0, 0, min(plan.batches, plan.accumulate))
    for batch, (_, weight, _) in zip(batches, plan.parts(0), strict=False):
        loss = steps(context.shortened(batch).data) * weight
        if loss.requires_grad:
            loss.backward()
    return {name: each.grad.detach().clone() for name, each in weights.items() if each.grad is not None}


def _movements(
    start: dict[str, Tensor], stepped: dict[str, Tensor], gradients: dict[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """By how much of its size each weight moves, and by how many standard errors against its gradient."""
    moved, downhill = dict[str, float](), dict[str, float]()
    for name, old in start.items():
        change, gradient = stepped[name] - old, gradients.get(name)
        if bool(old.any()):
            moved[name] = float(change.norm() / old.norm())
        if gradient is not None and gradient.numel() >= LIMITS.direction:
            # Without the part along the weights: weight decay moves along them, and may exceed a small gradient
            scale = old.square().sum().clamp_min(1e-12)
            change, gradient = (each - (each * old).sum() / scale * old for each in (change, gradient))
            if bool(gradient.any()) and bool(change.any()):
                cosine = -float((change * gradient).sum() / (change.norm() * gradient.norm()))
                downhill[name] = cosine * math.sqrt(change.numel())
    return moved, downhill


def _nonzero_gradients(model: nn.Module) -> list[str]:
    gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, gradient in gradients if gradient is not None and bool(gradient.count_nonzero())]


def hooked_gradients(context: CheckContext) -> list[str]:
    """Parameters to whose gradients a hook adds: those of a loss times zero are not zero."""
    context.disable_dropout()
    loss = context.training.steps(context.batch.data)
    if not (loss.requires_grad and bool(loss.isfinite())):
        return []
    (loss * 0).backward()
    return _nonzero_gradients(context.model)
