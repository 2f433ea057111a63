"""Operations that make the host wait for the device, counted on any device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2", "unique_dim"}


class Waits(TorchDispatchMode):
    """Keeps the names of the operations whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
