"""The config is frozen: a change gives a new one, and what is stored is dumped from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from runner.config import stored
from runner.config.keys import to_plain, with_changes
from runner.config.load import problems_with, resolve_config
from runner.config.schema import VERBS, Train
from runner.config.validate import typed

Compose = Callable[..., Any]


def test_a_config_and_its_sections_cannot_be_changed(compose: Compose) -> None:
    config = resolve_config(compose(), Train)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.data.batch_size = 1


def test_a_change_gives_another_config_and_leaves_the_first(compose: Compose) -> None:
    config = resolve_config(compose(), Train)
    before = to_plain(config)
    changed = with_changes(config, {"optimizer.lr": 0.5, "data.split.val": 0.25, "seed": 3, "checkpoint.async_": False})
    assert (changed.optimizer["lr"], changed.data.split.val, changed.seed) == (0.5, 0.25, 3)
    assert to_plain(changed)["checkpoint"]["async"] is False
    assert to_plain(config) == before
    assert changed.model is config.model, "what does not change is shared"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_plain_form_is_read_back_as_the_same_config(verb: str, compose: Compose) -> None:
    config = resolve_config(compose(verb=verb), VERBS[verb])
    assert typed(VERBS[verb], to_plain(config)) == (config, [])


@pytest.mark.parametrize(
    "words",
    [(), ("data=synthetic", "model=resnet18_cifar"), ("data=cifar10", "transform=strong"), ("callbacks=early_stopping",),
     ("optimizer=muon", "scheduler=cosine", "metrics.f1._target_=torchmetrics.classification.MulticlassF1Score")],
    ids=" ".join,
)  # fmt: skip
def test_what_is_stored_is_what_was_composed_in_the_same_order(words: tuple[str, ...], compose: Compose) -> None:
    composition = compose(*words)
    assert stored.dump(resolve_config(composition, Train)) == stored.dump(composition.values)


def test_changes_are_validated_and_those_inside_a_value_are_refused(compose: Compose) -> None:
    composition = compose()
    config = resolve_config(composition, Train)
    assert problems_with(config, {"optimizer.lr": 0.5}, composition) == []
    assert [problem.key for problem in problems_with(config, {"epochs": -1}, composition)] == ["epochs"]
    assert [problem.key for problem in problems_with(config, {"seed.x": 1}, composition)] == ["seed"]
