"""A config as a checkpoint has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

TINY = ("threads=1", "device=cpu", "data=synthetic", "data.dataset.samples=32", "data.image_size=8", "epochs=3")


@pytest.fixture
def original(compose) -> dict[str, Any]:
    """A config as a checkpoint has it, far from the defaults."""
    words = (
        "model=mlp model.hidden=[3,4] optimizer=sgd optimizer.lr=0.5 grad_clip.norm=1 seed=9 callbacks=early_stopping"
    )
    return copy.deepcopy(compose(*TINY, *words.split(), "metrics.f1._target_=torchmetrics.F1Score").values)
