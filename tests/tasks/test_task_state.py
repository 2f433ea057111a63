"""A task may keep a state: it is in checkpoints, and trials before the first step leave no trace in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULE = '''
from collections import deque

import torch

from runner.tasks.classification import Classification


class Counts(Classification):
    """The loss depends on the number of steps, the last losses and drawn numbers."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.step, self.seen, self.recent = 0, torch.zeros(3), {"losses": deque(maxlen=3)}
        self.noise = torch.Generator().manual_seed(1)

    def training_step(self, modules, batch):
        images, targets = batch
        self.step += 1
        drawn = float(torch.rand((), generator=self.noise))
        loss = modules["loss"](modules["model"](images), targets) * (1 + 0.1 * self.step + drawn)
        loss = loss + 0.01 * sum(self.recent["losses"]) * modules["model"].head.weight.square().sum()
        self.seen += 1
        self.recent["losses"].append(self.step * 0.5)
        return loss

    def evaluation_step(self, modules, batch):
        logits = modules["model"](batch[0])
        return {"loss": modules["loss"](logits, batch[1]) + self.step, "outputs": logits, "targets": batch[1]}


class Stateful(Counts):
    def state_dict(self):
        return {"step": self.step, "seen": self.seen, "losses": list(self.recent["losses"]), "noise": self.noise.get_state()}

    def load_state_dict(self, state):
        self.step, self.seen = state["step"], state["seen"].clone()
        self.recent["losses"] = deque(state["losses"], maxlen=3)
        self.noise.set_state(state["noise"])
'''
WORDS = (
    "task._target_=own_tasks.Stateful", "data.batch_size=200", "epochs=2", "evaluate.test=true", "transform=none",
    "model=small_cnn", "model.width=4", "threads=1", "logger=none", "checkpoint.every_steps=1", "checkpoint.min_seconds=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def tasks(own_module: Callable[..., Path]) -> None:
    own_module("own_tasks", MODULE)


def test_a_killed_run_goes_on_from_the_state_of_its_task_and_eval_uses_it(
    train: Callable[..., Any], killed: Callable[..., Path], printed: Any
) -> None:
    whole = train(*WORDS)
    assert "attributes" not in whole.out + whole.err, "a state_dict keeps them"
    resumed = train(f"ckpt_path={killed(9, *WORDS)}", "callbacks=none")
    for key in ("weights_sha256", "best", "test", "test_step"):
        assert resumed.summary[key] == whole.summary[key]
    found = printed("eval", f"ckpt_path={resumed.directory}", "split=test")
    assert found["metrics"]["loss"] == pytest.approx(whole.summary["test"]["loss"])


def test_trials_change_no_attribute_and_one_warning_names_those_of_a_step(train: Callable[..., Any]) -> None:
    stateful, counts = train(*WORDS), train(*WORDS, "task._target_=own_tasks.Counts")
    assert counts.summary["weights_sha256"] == stateful.summary["weights_sha256"]
    (warning,) = [line for line in (counts.out + counts.err).splitlines() if "attributes" in line]
    assert "step, seen, noise, recent" in warning
    assert "state_dict" in warning
    losses = [each["loss"] for each in counts.logged("val")]
    assert 7 < losses[0] < 10 < 14 < losses[1] < 17, "7 steps an epoch were counted"


def test_a_checkpoint_without_a_state_of_the_task_is_loaded_and_one_that_does_not_fit_is_refused(
    train: Callable[..., Any], refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks = importlib.import_module("own_tasks")
    with monkeypatch.context() as patch:
        patch.delattr(own_tasks.Stateful, "state_dict")
        older = train(*WORDS, "max_steps=2").directory
    stateful = train(f"ckpt_path={older}", "max_steps=3").directory
    monkeypatch.setattr(own_tasks.Stateful, "load_state_dict", lambda self, state: state["steps"])
    for verb in ("train", "eval"):
        refused((f"ckpt_path={stateful}",), "", "the task Stateful cannot load its state: 'steps'", verb=verb)
