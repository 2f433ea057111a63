"""Positions of objects keep their digits where autocast computes in 16 bits."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from runner.instrument.nested import mapped_items


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
    return mapped_items(
        output, Tensor, lambda each: each.float() if each.is_floating_point() and each.itemsize < 4 else each
    )
