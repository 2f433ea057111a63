"""Losses with parameters or buffers, and what kills a run."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Weighted(nn.Module):
    """Two terms with learned weights."""

    def __init__(self, start: float = 0.0, **unused: Any) -> None:
        super().__init__()
        self.log_scales = nn.Parameter(torch.full((2,), start))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        terms = torch.stack([F.cross_entropy(logits, targets), logits.square().mean()])
        return (terms * torch.exp(-self.log_scales) + self.log_scales).sum()


class Root(Weighted):
    """Its own weights have an infinite gradient."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets) + self.log_scales.sqrt().sum()


class Bank(nn.Module):
    """Remembers the outputs of earlier steps; not finite from update `fails` on."""

    def __init__(self, fails: int = 10**6, **unused: Any) -> None:
        super().__init__()
        self.fails = fails
        self.register_buffer("bank", torch.zeros(10))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.bank: Tensor
        self.updates: Tensor

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits - self.bank, targets)
        if self.training:
            self.bank = 0.9 * self.bank + 0.1 * logits.detach().mean(0).to(self.bank.dtype)
            self.updates = self.updates + 1
            loss = loss * torch.where(self.updates > self.fails, torch.nan, 1.0)
        return loss


class Constant(nn.CrossEntropyLoss):
    """Class weights from the config."""

    def __init__(self, last: float = 1.0, **unused: Any) -> None:
        super().__init__(weight=torch.tensor([1.0] * 9 + [last]))


class Spoiled(nn.Module):
    """Not finite once, on the second of two ranks."""

    def __init__(self, call: int = 6, **unused: Any) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        wrong = self.training and self.calls == self.call and os.environ["RANK"] == "1"
        return F.cross_entropy(logits, targets) * (torch.nan if wrong else 1.0)
