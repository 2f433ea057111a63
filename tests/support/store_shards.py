"""Shards of a store in tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from s3_server import Store
from tar_files import encoded

from runner.data.sources.shards import Shards, shards

SMALL = (
    "data=shards", "data.image_size=8", "data.batch_size=4", "model=mlp", "epochs=2", "scheduler=constant", "logger=none",
    "evaluate.test=false", "name=x",
)  # fmt: skip
"""Words of a quick training on shards."""


def opened(store: Store, tmp_path: Path, **arguments: Any) -> dict[str, Shards]:
    """The data sets of a run, which keeps its indexes."""
    made = shards(store.url, cache_folder=str(tmp_path / "cache"), **arguments)
    assert made["train"].keep_indexes() == []
    return made


def pixels(number: int) -> torch.Tensor:
    """The image of a number, without a store."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded(number))))).permute(2, 0, 1)
