"""A fingerprint of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over a state dict: for each tensor in order of name, its name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
