"""Muon for the hidden weight matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

_log = logging.getLogger(__name__)

_Part = Literal["muon", "adamw"]
_KINDS: dict[_Part, Callable[..., Optimizer]] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


class Muon(Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` behind one list of parameter groups.

    Muon (Jordan, https://kellerjordan.github.io/posts/muon/) is designed for the weight matrices of hidden layers. It gets
    the two-dimensional parameters except the last one in the given order, which is the head; AdamW gets the rest: the head,
    biases, norms, positions and convolution kernels. Each given group becomes up to two, distinguished by the key
    "algorithm" ("muon" or "adamw"), each with its own "initial_lr".

    Args:
        params: parameters, (name, parameter) pairs, or groups of either. A group's "lr" applies to Muon; AdamW's is scaled
            in the same proportion. A group's "weight_decay" applies to both.
        lr, momentum, nesterov, ns_steps, adjust_lr_fn: of Muon; None for `adjust_lr_fn` is "original".
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
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        for name, value, least in (("lr", lr, 0), ("adamw_lr", adamw_lr, 0), ("ns_steps", ns_steps, 1)):
            if not value >= least:
                raise ValueError(f"{name} must {'be at least 1' if least else 'not be negative'}, got {value}")
        # Two optimizers with their own arguments: Muon for hidden matrices, AdamW for everything else
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        adamw = {"betas": (betas[0], betas[1]), "eps": eps, "foreach": foreach, "fused": fused}
        self._options: dict[_Part, dict[str, Any]] = {
            "muon": {"lr": lr, "weight_decay": weight_decay, **own},
            "adamw": {"lr": adamw_lr, "weight_decay": weight_decay, **adamw},
        }
        self._parts: dict[_Part, Optimizer] = {}
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
        parts: dict[_Part, list[Any]] = {"muon": [], "adamw": []}
        for item in _listed(param_group["params"]):
            is_hidden = _tensor(item).ndim == 2 and _tensor(item) is not self._head
            parts["muon" if is_hidden else "adamw"].append(item)
        for algorithm, items in parts.items():
            if items:
                self._add_part(algorithm, {**param_group, "params": items})
        if self._parts:  # the constructor connects its groups itself
            self._connect()

    def _add_part(self, algorithm: _Part, group: dict[str, Any]) -> None:
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
        for algorithm, kind in _KINDS.items():
            groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            if not groups:
                continue
            if algorithm not in self._parts:
                self._parts[algorithm] = kind(groups, **self._options[algorithm])
            part = self._parts[algorithm]
            for group in groups:
                group.update({name: value for name, value in part.defaults.items() if name not in group})
            part.param_groups = groups
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options, "_head": self._head}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Unpickled and deep-copied optimizers have no parts, and load_state_dict creates new groups.
        self._parts = self.__dict__.get("_parts", {})
        self._connect()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; returns the loss of `closure`, which computes the gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        for part in self._parts.values():
            if found_inf is not None:  # a flag on the device; the fused kernel of AdamW obeys it
                part.found_inf = found_inf  # type: ignore[attr-defined]
            part.step()
        return loss


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _tensor(item: Any) -> Tensor:
    """The parameter of a parameter or a (name, parameter) pair."""
    tensor: Tensor = item[1] if isinstance(item, tuple) else item
    return tensor
