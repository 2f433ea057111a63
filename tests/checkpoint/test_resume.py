"""A checkpoint that does not fit the objects of a run is a sentence that names what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import UserError
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.resume import restore

Make = Callable[..., dict[str, Any]]


class State:
    """What a run restores, with a key that it needs."""

    needed = "position"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state[self.needed]


class Counting(State):
    """A callback that expects a key."""

    needed = "count"


@pytest.mark.parametrize(
    ("saved", "named"),
    [({"counted": 3, "best": 1.0}, "saved are: counted, best"), ({}, "saved are: nothing"), ([1], "saved are: list")],
)
def test_a_callback_that_cannot_load_its_state_is_named_with_the_key_and_what_to_set(
    contents: Make, saved: Any, named: str
) -> None:
    found = LoadedCheckpoint(Path("last.safetensors"), contents(metrics={"callbacks": {"mine": saved}}), [])
    with pytest.raises(UserError) as raised:
        restore(found, State(), {"mine": Counting()})
    message = str(raised.value)
    assert message.startswith("callbacks.mine: Counting cannot load its state from last.safetensors: ")
    assert named in message
    assert "callbacks=none" in message
    assert ("there is no 'count'" in message) == isinstance(saved, dict)


def test_a_missing_key_of_anything_else_is_told_as_one(contents: Make) -> None:
    class Other(State):
        needed = "positions"

    with pytest.raises(UserError, match=r"last\.safetensors: does not fit this run: there is no 'positions'"):
        restore(LoadedCheckpoint(Path("last.safetensors"), contents(), []), Other(), {})


COUNTING = """
class Counting:
    def __init__(self, named: str = "count"): self.named, self.count = named, 0
    def on_step(self, loop): self.count += 1
    def state_dict(self): return {self.named: self.count}
    def load_state_dict(self, state): self.count = state[self.named]
"""


def test_a_run_whose_callback_has_changed_says_what_to_set_and_that_works(
    accepted: Any, rejected: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "counting.py").write_text(COUNTING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.setenv("RUNNER_TRUST", "counting")
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
