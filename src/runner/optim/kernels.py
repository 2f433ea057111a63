"""The kernels of an optimizer: it updates its tensors in one fused kernel, many tensors per kernel (foreach), or one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach, _device_dtype_check_for_fused

from runner.base.errors import UserError, first_line
from runner.config.targets import Component
from runner.distributed.sharding import is_divided
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

    Fused kernels if the class has them and torch accepts these parameters, else torch's default: foreach on GPUs. Custom
    optimizers keep their own defaults.

    Args:
        node: section `optimizer` of the config.
        parameters: trained parameters.
        sparse: whether the model has layers with sparse gradients.
        key: of the section, or of one of several optimizers.

    Raises:
        UserError: if a setting is not supported.
    """
    component = Component(key, node)
    target, name = component.target, str(getattr(component.target, "__name__", component.target))
    has = [kind for kind in KINDS if component.takes(kind)]
    # A request that the optimizer does not know would be dropped silently
    for kind in KINDS:
        if node.get(kind) and kind not in has:
            raise UserError(f"{key}.{kind}", f"{name} has no such kernels", "null, or another optimizer")
    # Other classes choose for themselves
    if not has or not (target is Muon or (inspect.isclass(target) and target.__module__.startswith("torch.optim"))):
        return Kernels({}, "", "")

    against = _against_fused(node, name, parameters, sparse) if "fused" in has else f"{name} has no fused kernel"
    chosen = next((kind for kind in has if node.get(kind)), "")
    # What the user asks for is used or refused, and never replaced
    if chosen == "fused" and against:
        raise UserError(f"{key}.fused", f"true is not supported: {against}", "null or false")
    if chosen:
        reason = f"{key}.{chosen}=true"
    elif not against and node.get("fused") is None:
        whose = "its AdamW" if target is Muon else name
        chosen, reason = "fused", f"auto: {whose} has one kernel for the whole update on {parameters[0].device.type}"
    else:
        reason = f"{key}.fused=false" if node.get("fused") is False else against
        if node.get("foreach") is False:
            reason = f"{reason}, and {key}.foreach=false"
        else:
            _, foreach = _default_to_fused_or_foreach([*parameters], differentiable=False, use_fused=False)
            chosen, reason = "foreach" if foreach else "", f"auto: {reason}; torch's default"
    arguments = {kind: kind == chosen for kind in has}
    if target is not Muon:
        _require_a_step(component, key, arguments, parameters[0])
    return Kernels(arguments, chosen or "one tensor after the other", reason)


def _require_a_step(component: Component, key: str, kernels: dict[str, bool], like: Tensor) -> None:
    """Update one number, as torch refuses some arguments no earlier, such as `capturable=true` with weights on the CPU."""
    weight = torch.zeros(1, device=like.device, dtype=like.dtype, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        component.target([weight], **{**component.arguments, **kernels}).step()
    except (AssertionError, RuntimeError) as error:
        problem = f"{component.target.__name__} cannot take a step: {first_line(error)}"
        raise UserError(key, problem, "other arguments, or another optimizer") from error
    except (TypeError, ValueError):  # reported where the optimizer is built, or its step takes a closure
        return


def _against_fused(node: Mapping[str, Any], name: str, parameters: Sequence[Tensor], sparse: bool) -> str:
    """The reason why an optimizer that has fused kernels cannot use them, or an empty string."""
    if sparse:
        return "fused kernels do not support sparse gradients, which a layer with sparse=true has"
    if node.get("momentum") and node.get("dampening"):
        return "fused SGD with dampening initialises its momentum wrongly if the first step is skipped as not finite"
    if any(map(is_divided, parameters)) and name not in ("Adam", "AdamW", "Muon"):
        return f"the fused kernel of {name} does not support weights that are divided among processes"
    try:
        for parameter in parameters:
            _device_dtype_check_for_fused(parameter)
    except RuntimeError as error:
        return first_line(error)
    return ""


def start_momentum(optimizer: Optimizer) -> None:
    """Initialise the momentum of fused SGD with zeros, which does not change its first step.

    torch allocates the buffers without initialising them, and the kernel writes nothing if gradients are not finite: the next
    step would then use whatever was in memory.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
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
        if any(hooks):
            optimizer.step()
            return
        with torch.no_grad():
            inside(optimizer)

    return step
