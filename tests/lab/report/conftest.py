"""Runs for reports: made once for each process by the script that makes synthetic ones."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from synthetic_runs import make_runs

_TEMPLATE: list[Path] = []
_MADE: dict[int, Path] = {}


@pytest.fixture
def many(train_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder with as many synthetic runs as asked for; tests must not change it."""

    def call(count: int) -> Path:
        if count not in _MADE:
            if not _TEMPLATE:
                template = train_once("model=small_cnn", "model.width=8", "epochs=1", "limit.train_batches=4").directory
                kept = tmp_path_factory.mktemp("template") / "run"
                _TEMPLATE.append(shutil.copytree(template, kept))
            root = tmp_path_factory.mktemp("many") / "runs"
            make_runs(_TEMPLATE[0], root, count)
            _MADE[count] = root
        return _MADE[count]

    return call
