"""A run goes on from a checkpoint, its generators too; what does not fit the objects of a run is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.base.errors import UserError
from runner.checkpoint import rng
from runner.checkpoint.file import read, write
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.resume import restore
from runner.checkpoint.weights import weights_sha256

Make = Callable[..., dict[str, Any]]


class Counting:
    """What a run restores, with a key that it needs."""

    def __init__(self, needed: str) -> None:
        self.needed = needed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state[self.needed]


@pytest.mark.parametrize(
    ("saved", "named"),
    [({"counted": 3, "best": 1.0}, "saved are: counted, best"), ({}, "saved are: nothing"), ([1], "saved are: list")],
)
def test_a_callback_that_cannot_load_its_state_is_named_with_the_key_and_what_to_set(
    contents: Make, saved: Any, named: str
) -> None:
    found = LoadedCheckpoint(Path("last.safetensors"), contents(metrics={"callbacks": {"mine": saved}}), [])
    with pytest.raises(UserError) as raised:
        restore(found, Counting("position"), {"mine": Counting("count")})
    message = str(raised.value)
    assert message.startswith("callbacks.mine: Counting cannot load its state from last.safetensors: ")
    assert named in message
    assert "callbacks=none" in message
    assert ("there is no 'count'" in message) == isinstance(saved, dict)


def test_a_missing_key_of_anything_else_is_told_as_one(contents: Make) -> None:
    with pytest.raises(UserError, match=r"last\.safetensors: does not fit this run: there is no 'positions'"):
        restore(LoadedCheckpoint(Path("last.safetensors"), contents(), []), Counting("positions"), {})


COUNTING = """
class Counting:
    def __init__(self, named: str = "count"): self.named, self.count = named, 0
    def on_step(self, loop): self.count += 1
    def state_dict(self): return {self.named: self.count}
    def load_state_dict(self, state): self.count = state[self.named]
"""


def test_a_run_whose_callback_has_changed_says_what_to_set_and_that_works(
    accepted: Any, rejected: Any, workdir: Path, own_module: Any
) -> None:
    own_module("counting", COUNTING)
    words = (
        "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "model=mlp", "threads=1", "logger=none",
        "log.progress=false", "log.curves=false", "evaluate.test=false", "max_steps=2", "hydra.run.dir=run",
    )  # fmt: skip
    accepted("train", *words, "+callbacks.mine._target_=counting.Counting")
    changed = rejected("train", "ckpt_path=run", "max_steps=3", "callbacks.mine.named=counted")
    assert "callbacks.mine: Counting cannot load its state" in changed.err
    assert "there is no 'counted'" in changed.err
    accepted("train", "ckpt_path=run", "max_steps=3", "callbacks=none")
    without = ("~callbacks.mine", "hydra.run.dir=without")
    accepted("train", "ckpt_path=run", "max_steps=3", *without)
    assert "Counting" not in (workdir / "without" / "config.yaml").read_text()
    assert "LearningRateMonitor" in (workdir / "without" / "config.yaml").read_text()
    accepted("train", "ckpt_path=without", "max_steps=4", *without)
    assert "callbacks.mine: cannot be deleted" in rejected("train", *words, "~callbacks.mine").err


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
