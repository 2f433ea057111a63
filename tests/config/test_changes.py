"""Every key says what becomes of it when a run is resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.config import keys, stored
from runner.config.changes import CHANGES, Change, changes_refused, changes_result, declared
from runner.config.keys import to_plain, with_changes
from runner.config.load import resolve_config
from runner.config.schema.train import Train
from runner.config.stored import settings_changed


def undeclared(section: type) -> list[str]:
    """Keys of a schema without a separate declaration; sections are what is in them."""
    return [
        key
        for key in keys.all_keys(section)
        if key not in CHANGES and not dataclasses.is_dataclass(keys.find(section, key))
    ]


def test_every_key_of_the_schema_is_declared() -> None:
    assert undeclared(Train) == []


def test_a_new_key_is_not_declared_by_those_around_it() -> None:
    class More(Train):
        new: int = 0

    assert undeclared(More) == ["new"]


def test_nothing_is_declared_that_is_no_key() -> None:
    assert [key for key in CHANGES if keys.find(Train, key) is None] == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model.width", Change.REFUSED),
        ("model", Change.REFUSED),
        ("data.dataset.samples", Change.REFUSED),
        ("optimizer._target_", Change.REFUSED),
        *((key, Change.REFUSED) for key in ("init_from", "freeze", "unfreeze_at", "init", "model.head")),
        *((f"optimizer.{key}", Change.REFUSED) for key in ("no_decay", "lr_mult", "layer_decay")),
        ("optimizer.lr", Change.REPORTED),
        ("optimizer.betas.0", Change.REPORTED),
        ("callbacks.early_stopping.patience", Change.REPORTED),
        ("seed", Change.REFUSED_INSIDE_EPOCH),
        ("log.every_steps", Change.ALLOWED),
        ("logger.tensorboard", Change.ALLOWED),
        ("data.num_workers", Change.ALLOWED),
        ("devices", Change.REPORTED),
        ("strategy", Change.REPORTED),
        ("data.on_error", Change.REPORTED),
        ("modelling", Change.REPORTED),
        ("data.of_an_older_version", Change.REPORTED),
    ],
)
def test_what_lies_in_a_component_goes_by_its_component(key: str, expected: Change) -> None:
    assert declared(key) is expected
    assert changes_result(key) == (expected is not Change.ALLOWED)


@pytest.mark.parametrize("inside_epoch", [True, False])
def test_changes_are_refused_as_declared(inside_epoch: bool) -> None:
    refused = {problem.key: problem for problem in changes_refused(list(CHANGES), inside_epoch)}
    for key, change in CHANGES.items():
        expected = change is Change.REFUSED or (change is Change.REFUSED_INSIDE_EPOCH and inside_epoch)
        assert (key in refused) == expected
    assert all(problem.message and problem.allowed for problem in refused.values())


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("", "", []),
        ("seed=0 epochs=30", "", []),
        ("lr=0.1 model=mlp", "model=mlp optimizer.lr=0.1", []),
        ("devices=2 device=cpu threads=1 tags=[a] log.every_steps=1", "threads=3 name=x data.num_workers=2", []),
        ("ckpt_path=last", "resume=auto", []),
        ("data.batch_size=auto", "data.batch_size=auto resume=auto", []),
        ("data=synthetic", "data=synthetic", []),
        ("seed=1", "", ["seed"]),
        ("epochs=3", "max_steps=5", ["epochs", "max_steps"]),
        ("data=synthetic data.image_size=16", "data=synthetic", ["data.image_size"]),
        ("data.root=a", "", ["data.root"]),
        ("data.batch_size=8", "", ["data.batch_size"]),
        ("callbacks=none", "callbacks=early_stopping", ["callbacks"]),
        ("data.normalize.mean=[0.1] data.normalize.std=[0.2]", "", ["data.normalize"]),
    ],
)
def test_settings_are_compared_by_what_they_mean(compose: Any, before: str, now: str, expected: list[str]) -> None:
    found: dict[str, Any] = {"model.in_channels": 1, "model.num_classes": 10, "task.num_classes": 10}  # in the data
    config = resolve_config(compose(*before.split()), Train)
    if config.data.normalize.mean is None:
        found |= {"data.normalize.mean": [0.5], "data.normalize.std": [0.3]}
    if config.data.batch_size == "auto":
        found |= {"data.batch_size": 512}
    composition = compose(*now.split())
    values = to_plain(resolve_config(composition, Train))
    keys_of = settings_changed(stored.dump(with_changes(config, found)), "config.yaml", values, composition)
    assert all(any(keys.within(key, [section]) for section in expected) for key in keys_of), keys_of
    assert all(any(keys.within(key, [section]) for key in keys_of) for section in expected), keys_of
