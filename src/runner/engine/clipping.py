"""Gradients held within bounds before an optimizer step; nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SMALLEST = 1e-3  # the norm that a unit's weights count with at least, so that one that starts at zero can leave it


@dataclass(frozen=True)
class AdaptiveClip:
    """Bounds the gradient of each unit by a multiple of the norm of its weights (Brock et al., arXiv:2102.06171).

    A unit is what computes one output: a row of a matrix, a filter of a convolution; a vector, such as a bias, is one unit.
    Norms are 2-norms, and that of the weights counts as at least 0.001. As in the paper the last linear layer is left alone.

    Attributes:
        ratio: largest norm of a unit's gradient, as a multiple of the norm of its weights.
        parameters: what is bounded.
    """

    ratio: float
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, model: nn.Module, ratio: float) -> AdaptiveClip:
        """Bounds for all parameters of a model but those of its last linear layer."""
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        spared = {id(parameter) for parameter in linear[-1].parameters()} if linear else set()
        return cls(ratio, tuple(parameter for parameter in model.parameters() if id(parameter) not in spared))

    @torch.no_grad()
    def __call__(self) -> None:
        """Scale down, in place, the gradient of every unit that is above its bound."""
        pairs = [(each, each.grad) for each in self.parameters if each.grad is not None]
        if not pairs:
            return
        factors: Any = [_norms(weight) for weight, _ in pairs]
        norms: Any = [_norms(gradient) for _, gradient in pairs]
        torch._foreach_clamp_min_(factors, _SMALLEST)
        torch._foreach_mul_(factors, self.ratio)
        torch._foreach_clamp_min_(norms, torch.finfo(torch.float32).tiny)
        torch._foreach_div_(factors, norms)
        torch._foreach_clamp_max_(factors, 1.0)
        for (_, gradient), factor in zip(pairs, factors, strict=True):
            gradient.mul_(factor)


def clip_gradients(
    model: nn.Module, norm: float | None, value: float | None, adaptive: AdaptiveClip | None = None
) -> None:
    """Bound the gradients: each element by `value`, then each unit as `adaptive` says, then all together by the 2-norm `norm`."""
    if value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), value)
    if adaptive is not None:
        adaptive()
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def _norms(tensor: Tensor) -> Tensor:
    """2-norm of each unit, in a shape that broadcasts against the tensor."""
    inside = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=inside, keepdim=True)
    return norms
