"""Muon for hidden weight matrices, and for kernels if asked, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

_log = logging.getLogger(__name__)

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, from Jordan's post


class _Muon(Optimizer):
    """What `torch.optim.Muon` computes, also for kernels, which are matrices (outputs, all else), and normalised weights."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, self.state[weight], group)

    def _update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        flag: Any = getattr(self, "found_inf", None)
        kept = [] if flag is None else [(each, each.clone()) for each in (weight, state["momentum_buffer"])]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrix = _orthogonal(update.flatten(1), group["ns_steps"])
        rows, columns = matrix.shape
        matches_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches_adamw else math.sqrt(max(1, rows / columns))
        if group["normalize"]:
            weight.mul_(math.sqrt(rows) / weight.norm().clamp(min=1e-7))
            scale = 1.0
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(matrix.view_as(weight), alpha=-group["lr"] * scale)
        for tensor, before in kept:
            tensor.copy_(torch.where(flag > 0, before, tensor))


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """About the nearest matrix with orthonormal rows, or columns if there are more rows, in bfloat16."""
    a, b, c = _COEFFICIENTS
    wide = matrix.bfloat16()
    wide = wide.T if len(matrix) > matrix.shape[1] else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if len(matrix) > matrix.shape[1] else wide


class Muon(Optimizer):
    """Muon and `torch.optim.AdamW` behind one list of parameter groups.

    Muon (Jordan, https://kellerjordan.github.io/posts/muon/) is designed for the weight matrices of hidden layers. It gets
    the two-dimensional parameters except the last one in the given order, which is the head, and with `kernels` those of
    two-dimensional convolutions; AdamW gets the rest: the head, biases, norms, positions and other kernels. Each given group
    becomes up to two, distinguished by the key "algorithm" ("muon" or "adamw"), each with its own "initial_lr".

    Args:
        params: parameters, (name, parameter) pairs, or groups of either. A group's "lr" applies to Muon; AdamW's is scaled
            in the same proportion. A group's "weight_decay" applies to both.
        lr, momentum, nesterov, ns_steps, adjust_lr_fn: of Muon; None for `adjust_lr_fn` is "original".
        kernels: whether Muon gets kernels of convolutions, each as a matrix (outputs, all else).
        normalize: whether each weight of Muon has the norm sqrt(outputs) before each update, which then has its plain size;
            for layers that a norm without scale follows. Both as in airbench (Jordan, arXiv:2404.00498).
        adamw_lr, betas, eps, foreach, fused: of AdamW; None for `foreach` and `fused` lets torch choose.
        weight_decay: decoupled weight decay of both.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        adamw_lr: float = 0.003,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        kernels: bool = False,
        normalize: bool = False,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        for name, value, least in (
            ("lr", lr, 0),
            ("adamw_lr", adamw_lr, 0),
            ("momentum", momentum, 0),
            ("ns_steps", ns_steps, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name} must {'be at least 1' if least else 'not be negative'}, got {value}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn must be original, match_rms_adamw or None, got {adjust_lr_fn}")
        # Two optimizers with their own arguments: Muon for hidden matrices, AdamW for everything else
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        own["normalize"] = normalize
        adamw = {"betas": (betas[0], betas[1]), "eps": eps, "foreach": foreach, "fused": fused}
        self._options: dict[str, dict[str, Any]] = {
            "muon": {"lr": lr, "weight_decay": weight_decay, **own},
            "adamw": {"lr": adamw_lr, "weight_decay": weight_decay, **adamw},
        }
        self._parts: dict[str, Optimizer] = {}
        self._kernels = kernels
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        # Parameters are walked through twice, so an iterator becomes a list.
        groups = [{**group, "params": _listed(group["params"])} for group in groups]
        # The head is a matrix too, but AdamW trains it
        matrices = [_tensor(item) for group in groups for item in group["params"] if _tensor(item).ndim == 2]
        self._head = matrices[-1] if matrices else None
        super().__init__(groups, {})
        self._connect()
        if "muon" not in self._parts:
            _log.warning("muon: the model has no hidden weight matrix, so AdamW alone trains it, with adamw_lr")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split into the matrices for Muon and the rest for AdamW."""
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for item in _listed(param_group["params"]):
            is_hidden = (tensor := _tensor(item)) is not self._head and (
                tensor.ndim == 2 or (self._kernels and tensor.ndim > 3)
            )
            parts["muon" if is_hidden else "adamw"].append(item)
        for algorithm, items in parts.items():
            if items:
                self._add_part(algorithm, {**param_group, "params": items})
        if self._parts:  # the constructor connects its groups itself
            self._connect()

    def _add_part(self, algorithm: str, group: dict[str, Any]) -> None:
        options = self._options[algorithm]
        if "lr" in group and algorithm == "adamw":
            reference = self._options["muon"]["lr"]
            group["lr"] = options["lr"] * (group["lr"] / reference if reference else 1.0)
        group.pop("initial_lr", None)  # it belongs to Muon, and the two parts have different ones
        group = {**options, **group, "algorithm": algorithm}
        group["initial_lr"] = group["lr"]
        super().add_param_group(group)

    def _connect(self) -> None:
        """Share groups and state with the inner optimizers, after either was replaced."""
        for algorithm, options in self._options.items():
            groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            if not groups:
                continue
            if (part := self._parts.get(algorithm)) is None:
                part = _Muon(groups, options) if algorithm == "muon" else torch.optim.AdamW(groups, **options)
            self._parts[algorithm] = part
            for group in groups:
                group.update({name: value for name, value in part.defaults.items() if name not in group})
            part.param_groups = groups
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options, "_head": self._head, "_kernels": self._kernels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Unpickled and deep-copied optimizers have no parts, and load_state_dict creates new groups.
        self._parts = self.__dict__.get("_parts", {})
        self._connect()

    @property
    def obeys_flag(self) -> bool:
        """Whether a step does nothing while the attribute `found_inf`, a tensor, is above 0, as with torch's fused kernels."""
        return all(group["algorithm"] == "muon" or group["fused"] for group in self.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; returns the loss of `closure`, which computes the gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
            part.step()
        return loss


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _tensor(item: Any) -> Tensor:
    """The parameter of a parameter or a (name, parameter) pair."""
    tensor: Tensor = item[1] if isinstance(item, tuple) else item
    return tensor
