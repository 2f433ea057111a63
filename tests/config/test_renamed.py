"""Keys and components that were renamed: refused with the new name on the command line, migrated where they are stored."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from runner.cli import main
from runner.config import renamed, stored
from runner.config.keys import find
from runner.config.schema.train import Train


def command(*words: str) -> int:
    return main(["train", "--cfg", "job", *words])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("clip.norm=1", "grad_clip.norm"),
        ("+clip={norm: 1}", "grad_clip"),
        ("data.residency=ram", "data.placement"),
        ("optimizer.scale_lr=256", "optimizer.lr_base_batch_size"),
        ("averaging.lr=0.2", "averaging.lr_factor"),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(old) == 2
    errors = capsys.readouterr().err
    assert errors.count("was renamed to") == 1
    assert f"was renamed to {new}\n" in errors


def test_old_keys_and_components_in_a_file_of_the_user_are_refused_with_their_new_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "# @package _global_\nclip: {norm: 1.0}\ntransform:\n  train: [{_target_: runner.data.augment.RandomFlip, p: 0.5}]\n"
    )
    assert main(["check", "--config-dir", str(tmp_path), "experiment=mine"]) == 2
    errors = capsys.readouterr().err
    assert "clip.norm: was renamed to grad_clip.norm" in errors
    assert "transform.train.0._target_: runner.data.augment.RandomFlip was renamed to" in errors


def test_a_stored_config_is_migrated_and_keeps_its_order() -> None:
    text = (
        "clip: {norm: 1.0, value: null}\n"
        "data: {residency: ram, shift: 0.1}\n"
        "averaging: {warmup: true, lr: 0.5}\n"
        "optimizer: {scale_lr: 64, lr: 0.1}\n"
        "transform: {train: [{_target_: runner.data.policies.RandAugment}]}\n"
    )
    values = stored.load(text, "a file")
    assert list(values) == ["grad_clip", "data", "averaging", "optimizer", "transform"]
    assert values["grad_clip"] == {"norm": 1.0, "value": None}
    assert list(values["data"].items()) == [("placement", "ram"), ("shift", 0.1)]
    assert values["averaging"] == {"warmup": True, "lr_factor": 0.5}
    assert values["optimizer"] == {"lr_base_batch_size": 64, "lr": 0.1}
    assert values["transform"]["train"][0]["_target_"] == "runner.data.transforms.auto_augment.RandAugment"


def test_new_names_exist_and_old_ones_do_not() -> None:
    for old, new in renamed.KEYS.items():
        assert find(Train, new) is not None
        assert new != old
        assert renamed.new_key(new) is None
    for old, new in renamed.MODULES.items():
        importlib.import_module(new)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(old)


def test_docs_list_every_renamed_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "project" / "migrating.md").read_text()
    for old, new in [*renamed.KEYS.items(), *renamed.MODULES.items()]:
        assert f"| `{old}` | `{new}` |" in text
