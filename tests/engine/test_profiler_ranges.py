"""A marked step trains the same bits as a plain one, and a plain one pays nothing for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from runner.checkpoint.weights import weights_sha256
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, step_in_ranges


class Diary:
    """Notes the ranges as they begin and end."""

    def __init__(self) -> None:
        self.book: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.book.append(name)
        yield
        self.book.append(f"/{name}")


def both(*names: str) -> list[str]:
    return [entry for name in names for entry in (name, f"/{name}")]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 2, "parts": {"weight_of": lambda data: data[1].sum()}},
        {"parts": {"clip_norm": 0.1, "clip_value": 0.05}},
        {"parts": {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}},
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0), "accumulate": 3},
    ],
    ids=["plain", "accumulate", "weight", "clip", "amp", "scaler"],
)
def test_a_marked_step_trains_the_same_bits(bench: Any, keys: dict[str, Any]) -> None:
    weights = []
    for mark in (None, Diary()):
        made = keys | ({"scaler": keys["scaler"]()} if "scaler" in keys else {})
        loop = bench(10, **made).loop()
        if mark is not None:
            loop.step = step_in_ranges(loop.step, mark)
        loop.run()
        weights.append(weights_sha256(loop.state.model.state_dict()))
    assert weights[0] == weights[1]


def test_the_ranges_come_in_the_order_of_the_step(bench: Any) -> None:
    diary = Diary()
    loop = bench(10, accumulate=2, limits={"epochs": 1, "max_steps": None}).loop()
    loop.step = step_in_ranges(loop.step, diary)
    loop.run()
    window = both(FORWARD, BACKWARD)
    assert diary.book == [*window, *window, *both(OPTIMIZER), *window, *both(OPTIMIZER)]
