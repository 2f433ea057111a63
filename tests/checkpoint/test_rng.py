"""Generators continue where they were, after a trip through a file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.checkpoint import rng
from runner.checkpoint.file import read, write
from runner.checkpoint.weights import weights_sha256


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
        float(torch.rand(())), float(torch.randn(())),
    ]  # fmt: skip


def test_all_generators_continue_after_a_trip_through_a_file(tmp_path: Path, contents: Any) -> None:
    rng.seed_everything(3)
    draw()  # leaves half a pair of normal numbers cached in Python and NumPy
    write(tmp_path / "a.pt", contents())
    expected = [draw() for _ in range(400)]
    rng.seed_everything(4)
    rng.restore(read(tmp_path / "a.pt")["rng"])
    assert [draw() for _ in range(400)] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**40 + 1])
def test_a_seed_fixes_every_generator_and_another_gives_other_numbers(seed: int) -> None:
    rng.seed_everything(seed)
    first = draw()
    rng.seed_everything(seed)
    rng.capture()  # draws nothing
    assert draw() == first
    rng.seed_everything(seed + 1)
    assert not set(draw()) & set(first)


def test_the_fingerprint_depends_on_names_dtypes_shapes_and_bytes_and_not_on_order() -> None:
    base = {"b": torch.zeros(2, 3), "a": torch.arange(4)}
    variants = {
        "name": {"c": torch.zeros(2, 3), "a": torch.arange(4)},
        "dtype": {"b": torch.zeros(2, 3, dtype=torch.int32), "a": torch.arange(4)},
        "shape": {"b": torch.zeros(3, 2), "a": torch.arange(4)},
        "bytes": {"b": torch.zeros(2, 3), "a": torch.tensor([0, 1, 2, 4])},
        "sign of zero": {"b": -torch.zeros(2, 3), "a": torch.arange(4)},
        "more": base | {"d": torch.zeros(0)},
    }
    digests = {name: weights_sha256(variant) for name, variant in variants.items()}
    assert len({weights_sha256(base), *digests.values()}) == len(variants) + 1
    assert weights_sha256(dict(reversed(base.items()))) == weights_sha256(base)
    assert weights_sha256({"b": torch.zeros(3, 2).t(), "a": torch.arange(4)}) == weights_sha256(base)
    assert weights_sha256(base | {"note": "text"}) == weights_sha256(base)
    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8, torch.complex64]
    digests = {weights_sha256({"x": torch.ones((), dtype=kind)}) for kind in kinds}
    assert len(digests) == len(kinds)
