"""Muon for hidden weight matrices, and for kernels if asked, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.distributed.sharding import is_divided

_log = logging.getLogger(__name__)

_JORDAN = (3.4445, -4.7750, 2.0315)  # of each Newton-Schulz iteration, from Jordan's post
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""Of the iterations in turn, by Amsel et al. (arXiv:2505.16932, algorithm 1); later ones have the limit (1.875, -1.25, 0.375)."""
_ROOM = 1.01  # as rounding to bfloat16 makes some singular values larger than 1

Batch = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Weights of one shape, their gradients and their momentum."""


class _Muon(Optimizer):
    """What `torch.optim.Muon` computes, also for kernels, which are matrices (outputs, all else), and normalised weights."""

    def __init__(self, groups: Iterable[Any], options: dict[str, Any]) -> None:
        super().__init__(groups, options)
        self.update: Callable[..., None] = _update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            batches = []
            for weights in _of_one_shape(weight for weight in group["params"] if weight.grad is not None):
                gradients = [weight.grad for weight in weights]
                for weight in weights:
                    if "momentum_buffer" not in self.state[weight]:
                        self.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)  # type: ignore[arg-type]
                batches.append((weights, gradients, [self.state[weight]["momentum_buffer"] for weight in weights]))
            options = {name: group[name] for name in self.defaults if name != "lr"}
            self.update(batches, getattr(self, "found_inf", None), group["lr"], **options)


def _of_one_shape(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Weights that are updated together: those of one shape, except on the CPU, where a kernel costs nothing to launch.

    Weights divided among ranks stay alone, as each rank has a part of each.
    """
    found: dict[Any, list[Tensor]] = {}
    for weight in weights:
        alone = weight.device.type == "cpu" or is_divided(weight)
        found.setdefault(id(weight) if alone else (weight.shape, weight.dtype, weight.device), []).append(weight)
    return list(found.values())


def _update(
    batches: Sequence[Batch],
    flag: Any,
    rate: float | Tensor,
    *,
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    coefficients: str,
    adjust_lr_fn: str | None,
    normalize: bool,
    weight_decay: float,
) -> None:
    """Update the weights of a group in place, unless the tensor `flag` is above 0; `rate` is a tensor if this is compiled."""
    for weights, gradients, buffers in batches:
        kept = [] if flag is None else [(tensor, tensor.clone()) for tensor in (*weights, *buffers)]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum) if nesterov else buffers
        matrices = [update.flatten(1) for update in updates]
        rows, columns = matrices[0].shape
        alone = len(weights) == 1
        found = _orthogonal(matrices[0] if alone else torch.stack(matrices), ns_steps, coefficients).to(
            weights[0].dtype
        )
        directions = [direction.view_as(weights[0]) for direction in ([found] if alone else found.unbind())]
        matches_adamw = adjust_lr_fn == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches_adamw else math.sqrt(max(1, rows / columns))
        if normalize:
            for weight in weights:
                weight.mul_(math.sqrt(rows) / weight.norm().clamp(min=1e-7))
            scale = 1.0
        torch._foreach_mul_(weights, 1 - rate * weight_decay)
        if isinstance(rate, Tensor):
            torch._foreach_sub_(weights, torch._foreach_mul(directions, rate * scale))
        else:
            torch._foreach_add_(weights, directions, alpha=-rate * scale)
        for tensor, before in kept:
            tensor.copy_(torch.where(flag > 0, before, tensor))


def _orthogonal(matrices: Tensor, steps: int, coefficients: str) -> Tensor:
    """About the nearest matrix with orthonormal rows, or columns if there are more rows, in bfloat16; of one matrix or many."""
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.bfloat16()
    wide = wide.mT if tall else wide
    norm = wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    wide = wide / (norm if coefficients == "jordan" else norm * _ROOM)
    for step in range(steps):
        a, b, c = _JORDAN if coefficients == "jordan" else _polar_express(step)
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


def _polar_express(step: int) -> tuple[float, float, float]:
    """Coefficients of an iteration, the tabulated ones for values up to `_ROOM`."""
    if step >= len(_POLAR_EXPRESS):
        return 1.875, -1.25, 0.375
    a, b, c = _POLAR_EXPRESS[step]
    return a / _ROOM, b / _ROOM**3, c / _ROOM**5


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
        coefficients: of the Newton-Schulz iterations: "jordan" or "polar_express" (Amsel et al., arXiv:2505.16932).
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
        coefficients: Literal["jordan", "polar_express"] = "jordan",
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
        if coefficients not in ("jordan", "polar_express"):
            raise ValueError(f"coefficients must be jordan or polar_express, got {coefficients}")
        # Two optimizers with their own arguments: Muon for hidden matrices, AdamW for everything else
        own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "normalize": normalize}
        own |= {"coefficients": coefficients, "adjust_lr_fn": adjust_lr_fn}
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

    def compile_update(self, compiler: Callable[[Callable[..., None]], Callable[..., None]]) -> bool:
        """Compile the update of Muon's weights, one function for all of a group; False if there are none, or divided ones."""
        part = self._parts.get("muon")
        if part is None or any(is_divided(weight) for group in part.param_groups for weight in group["params"]):
            return False
        compiled = compiler(_update)
        # A rate that is a number would be compiled into the code
        part.update = lambda batches, flag, rate, **options: compiled(batches, flag, torch.tensor(rate), **options)  # type: ignore[attr-defined]
        return True

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
