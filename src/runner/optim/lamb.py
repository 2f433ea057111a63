"""LAMB, from timm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from runner.base.errors import require


def lamb(
    params: Iterable[Any],
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """timm's LAMB (You et al., arXiv:1904.00962): Adam whose step for each tensor has a norm relative to the tensor's.

    Args:
        params, lr, betas, eps, weight_decay: see `torch.optim.AdamW`.
        max_grad_norm: norm to which all gradients together are clipped; None does not clip.

    Raises:
        UserError: timm is not installed.
    """
    require("optimizer", "runner[timm]", "timm")
    from timm.optim.lamb import Lamb

    return Lamb(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
