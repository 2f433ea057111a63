"""The state of every global random number generator, as plain containers and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from runner.base.errors import UserError
from runner.checkpoint.async_writer import mapped
from runner.distributed.world import world


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices; raises `UserError` for a seed that torch does not have."""
    if not 0 <= seed < 2**64:
        raise UserError(f"seed: cannot be {seed}\n    allowed: a whole number from 0 to {2**64 - 1}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, of every device that is in use."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    ranks = world()
    # Asking for the state of a device that was never used would start it
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all() if ranks.size == 1 else [torch.cuda.get_rng_state()]
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    # Ranks with equal generators need one copy: another number of ranks can then resume
    if ranks.size > 1:
        states = ranks.gather(state)
        values = {repr(mapped(one, lambda tensor, _: tensor.numpy().tobytes())) for one in states}
        if len(values) > 1:  # a model or a transform drew different numbers on them
            state["ranks"] = states
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore what `capture` returned; states of missing devices are skipped."""
    # States of every rank fit only the same number of ranks; otherwise all begin with that of the first
    ranks = world()
    if len(state.get("ranks", ())) == ranks.size:
        state = state["ranks"][ranks.rank]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        # Each rank uses one GPU, whatever its number is there
        if ranks.size > 1:
            torch.cuda.set_rng_state(state["cuda"][0])
            return
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
