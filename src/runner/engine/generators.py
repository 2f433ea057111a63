"""The global random number generators, restored after use."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def untouched_generators(model: nn.Module) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch, on the CPU and on the model's devices."""
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    # fork_rng handles the CPU and one kind of device, and takes other arguments for Apple's GPU.
    on_mps = any(tensor.device.type == "mps" for tensor in model.parameters())
    apple = torch.mps.get_rng_state() if on_mps else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if apple is not None:
            torch.mps.set_rng_state(apple)
