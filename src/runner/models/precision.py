"""Positions of objects keep their digits where autocast computes in 16 bits."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn


def keep_digits(model: nn.Module, parts: str) -> nn.Module:
    """Let the modules whose dotted name matches `parts` give float32 instead of 16 bits; returns the model.

    Anchors and boxes have the dtype of the features and offsets that they are computed from. A bfloat16 has 8 bits: between 512
    and 1024 pixels, it is a multiple of 4.
    """
    for name, module in model.named_modules():
        if re.fullmatch(parts, name):
            module.register_forward_hook(_in_float32)
    return model


def _in_float32(_: nn.Module, __: Any, output: Any) -> Any:
    """Tensors in nested containers, which are of the same kinds."""
    if isinstance(output, Tensor):
        return output.to(torch.promote_types(output.dtype, torch.float32))
    if isinstance(output, dict):
        return type(output)((name, _in_float32(_, __, each)) for name, each in output.items())
    return type(output)(_in_float32(_, __, each) for each in output)
