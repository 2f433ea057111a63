"""Ranks whose buffers differ are named, as only those of the first one are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

MODULE = '''
import torch
from torch import nn


class Remembers(nn.Module):
    """Adds to the features what it had for the sample before, or, as BatchNorm does, normalises them."""

    def __init__(self, num_classes=10, remembers=True, queue=True):
        super().__init__()
        self.remembers, self.queued = remembers, queue
        self.norm, self.layer = nn.BatchNorm1d(64), nn.Linear(64, num_classes)
        self.register_buffer("hidden", torch.zeros(64))
        self.register_buffer("queue", torch.zeros(4, 64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        features = self.norm(images.flatten(1))
        if self.training:
            self.steps += 1
            if self.remembers:
                self.hidden = features[-1].detach().clone()
            if self.queued and self.steps > 5:
                self.queue[0] = features[0].detach()
        return self.layer(features + self.hidden)
'''
WORDS = (
    "data.batch_size=64", "epochs=1", "model._target_=own_buffers.Remembers", "~model.dropout", "~model.width", "transform=none",
    "evaluate.test=false", "max_steps=12", "device=cpu",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    some(
        [
            (("devices=2",), "hidden"),
            (("devices=2", "+model.remembers=false"), "queue"),
            (("devices=2", "+model.remembers=false", "+model.queue=false"), ""),
            ((), ""),
        ],
        *(0, 2),
        several=True,
    ),
)
def test_buffers_that_differ_between_ranks_are_named_once(
    train: Callable[..., Any],
    pool: Any,
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    named: str,
) -> None:
    (workdir / "own_buffers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(workdir))
    with pool.installed():
        result = train(*WORDS, *words)
    lines = (result.directory / "run.log").read_text().splitlines()
    warnings = [line for line in lines if "buffers differ" in line]
    assert [f"are kept: {named};" in line for line in warnings] == [True] * bool(named), warnings
