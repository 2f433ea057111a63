"""Gradient clipping; nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sharding import local, whole

_SMALLEST = 1e-3  # lower bound of a unit's weight norm, so that a unit that starts at zero can grow


@dataclass(frozen=True)
class AdaptiveClip:
    """Bounds the gradient of each unit by a multiple of the norm of its weights (Brock et al., arXiv:2102.06171).

    A unit computes one output: a row of a matrix, a filter of a convolution; a vector, such as a bias, is one unit. Norms
    are 2-norms; weight norms below 0.001 count as 0.001. As in the paper, the last linear layer is not clipped."""

    ratio: float  # largest norm of a unit's gradient, as a multiple of the norm of its weights
    parameters: tuple[nn.Parameter, ...]  # the parameters whose gradients are bounded

    @classmethod
    def of(cls, model: nn.Module, ratio: float) -> AdaptiveClip:
        """Bounds for all parameters of a model except those of its last linear layer."""
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        spared = {id(parameter) for parameter in linear[-1].parameters()} if linear else set()
        return cls(ratio, tuple(parameter for parameter in model.parameters() if id(parameter) not in spared))

    @torch.no_grad()
    def __call__(self) -> None:
        """Scale down, in place, the gradient of every unit that exceeds its bound."""
        pairs = [(each, each.grad) for each in self.parameters if each.grad is not None]
        if not pairs:
            return
        # foreach kernels: a loop over weights would launch thousands of small ones
        factors: Any = [_norms(weight) for weight, _ in pairs]
        norms: Any = [_norms(gradient) for _, gradient in pairs]
        torch._foreach_clamp_min_(factors, _SMALLEST)
        torch._foreach_mul_(factors, self.ratio)
        torch._foreach_clamp_min_(norms, torch.finfo(torch.float32).tiny)
        torch._foreach_div_(factors, norms)
        torch._foreach_clamp_max_(factors, 1.0)
        for (_, gradient), factor in zip(pairs, factors, strict=True):
            local(gradient).mul_(factor)


def clip_gradients(
    parameters: Sequence[nn.Parameter], norm: float | None, value: float | None, adaptive: AdaptiveClip | None = None
) -> None:
    """Clip each gradient element to `value`, then each unit as `adaptive` says, then the 2-norm of all to `norm`."""
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters, value)
    if adaptive is not None:
        adaptive()
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)


def _norms(tensor: Tensor) -> Tensor:
    """2-norm of each unit, in a shape that broadcasts against the tensor."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)) or None, keepdim=True)
    # Rows of a matrix are whole on a rank, and vectors are not
    return local(norms) if tensor.ndim > 1 else whole(norms)
