"""A data set without images."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Plain(Dataset[Any]):
    """Samples with targets and anything else that is given."""

    def __init__(self, size: int, **attributes: Any) -> None:
        self.size = size
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), 0
