"""The kernels of an optimizer: it updates its tensors in one fused kernel, many tensors per kernel (foreach), or one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.base.errors import UserError, first_line
from runner.config.targets import Component, optimizers_taking
from runner.distributed.sharding import divided_like
from runner.optim.muon import Muon

KINDS = ("fused", "foreach")


@dataclass(frozen=True)
class Kernels:
    """The chosen kernels."""

    arguments: dict[str, bool]  # of the optimizer; empty if it has no choice
    name: str  # for messages; empty if it has no choice
    reason: str  # a clause


def choose_kernels(
    node: Mapping[str, Any], parameters: Sequence[Tensor], sparse: bool = False, key: str = "optimizer"
) -> Kernels:
    """Choose `optimizer.fused` and `optimizer.foreach` if they are null.

    Fused kernels if the class has them for this device and these parameters, else foreach on GPUs: on the CPU foreach is no
    faster, and slower for millions of weights (docs/reference/toggles.md). Custom optimizers keep their own defaults.

    Args:
        node: section `optimizer` of the config.
        parameters: trained parameters.
        sparse: whether the model has layers with sparse gradients.
        key: of the section, or of one of several optimizers.

    Raises:
        UserError: if a setting is not supported, or the optimizer cannot take a step at all.
    """
    component = Component(key, node)
    target, name = component.target, str(getattr(component.target, "__name__", component.target))
    has = [kind for kind in KINDS if component.takes(kind)]
    # A request that the optimizer does not know would be dropped silently
    for kind in KINDS:
        if node.get(kind) and kind not in has:
            allowed = f"null, or another optimizer; {', '.join(optimizers_taking(kind))} have them"
            raise UserError(f"{key}.{kind}", f"{name} has no such kernels", allowed)
    # Other classes choose for themselves
    if not (target is Muon or (inspect.isclass(target) and target.__module__.startswith("torch.optim"))):
        return Kernels({}, "", "")

    def obstacle(kind: str) -> str:
        if kind == "fused" and sparse:
            return "fused kernels do not support sparse gradients, which a layer with sparse=true has"
        if kind == "fused" and node.get("momentum") and node.get("dampening"):
            return (
                "fused SGD with dampening initialises its momentum wrongly if the first step is skipped as not finite"
            )
        # A kernel has to work for every kind of weight, so each is tried with one number
        types = {(parameter.device, parameter.dtype) for parameter in parameters}
        failures = (_failure(component, kind, parameters[0], *each) for each in sorted(types, key=str))
        return next(filter(None, failures), "")

    # The order is that of speed: one fused kernel, several for all tensors, one tensor after the other
    def automatic() -> tuple[str, str]:
        device, reason = parameters[0].device.type, f"{name} has no fused kernel"
        if "fused" in has:
            reason = f"{key}.fused=false" if node.get("fused") is False else obstacle("fused")
            if not reason:
                whose = "its AdamW" if target is Muon else name
                return "fused", f"auto: {whose} has one kernel for the whole update on {device}"
        if "foreach" not in has:
            return "", f"auto: {reason}"
        if node.get("foreach") is False:
            return "", f"{reason}, and {key}.foreach=false"
        if device == "cpu":
            return "", f"auto: {reason}, and foreach is no faster on the CPU"
        against = obstacle("foreach")
        return ("", f"auto: {reason}; {against}") if against else ("foreach", f"auto: {reason}")

    chosen = next((kind for kind in has if node.get(kind)), "")
    # What the user asks for is used or refused, and never replaced
    if chosen:
        reason = f"{key}.{chosen}=true"
        if problem := obstacle(chosen):
            raise UserError(f"{key}.{chosen}", f"true is not supported: {problem}", "null or false")
    else:
        chosen, reason = automatic()
    # What a class cannot do at all is found here, before the first epoch.
    if not chosen and not sparse and (problem := obstacle("")):
        raise UserError(key, f"{name} cannot take a step: {problem}", "other arguments, or another optimizer")
    if not has:
        return Kernels({}, "", "")
    return Kernels({kind: kind == chosen for kind in has}, chosen or "one tensor after the other", reason)


def _failure(component: Component, kind: str, like: Tensor, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why an optimizer cannot update one weight with a kind of kernels (empty for plain ones), or an empty string."""
    # A weight of one value is enough to see whether a kernel exists
    weight = divided_like(torch.zeros(1, device=device, dtype=dtype), like).requires_grad_()
    weight.grad = torch.zeros_like(weight)

    def optimizer(kind: str) -> Optimizer:
        if component.target is Muon:  # only its AdamW has a choice
            return torch.optim.AdamW([weight], fused=kind == "fused", foreach=kind == "foreach")
        given = {name: value for name, value in component.arguments.items() if name not in KINDS}
        kinds = {name: name == kind for name in KINDS if component.takes(name)}
        return component.target([weight], **given, **kinds)  # type: ignore[no-any-return]

    try:
        optimizer("")
    except Exception:
        # Arguments that are wrong with any kernel are reported when the optimizer itself is built
        return ""
    try:
        optimizer(kind).step(lambda: 0.0)
    except Exception as error:
        return first_line(error)
    return ""


def start_momentum(optimizer: Optimizer) -> None:
    """Initialise the momentum of fused SGD with zeros, which does not change its first step.

    torch allocates the buffers without initialising them, and the kernel writes nothing if gradients are not finite: the next
    step would then use whatever was in memory.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def plain_step(optimizer: Optimizer) -> Callable[[], object]:
    """`optimizer.step()` without the bookkeeping around it, which costs time in small steps.

    torch wraps the steps of its optimizers in a profiler range and in hooks; if none are registered and the class is torch's
    own, the function inside can be called directly. A replaced `step` is kept.
    """
    # The bookkeeping of other classes may matter
    if not type(optimizer).__module__.startswith("torch.optim") or "step" in vars(optimizer):
        return optimizer.step
    inside = inspect.unwrap(type(optimizer).step)
    hooks = [vars(optimizer).get(name, {}) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]

    def step() -> None:
        # Hooks can be registered later, so each step looks
        if any(hooks) or optimizer.defaults.get("differentiable"):
            optimizer.step()
            return
        with torch.no_grad():
            inside(optimizer)

    return step
