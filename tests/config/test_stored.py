"""Configs read back from files: what the command line changes in them, and that nothing in them does anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from runner.base.errors import UserError
from runner.config import stored
from runner.config.load import resolve_config
from runner.config.schema.sections import Normalize
from runner.config.schema.train import Train
from runner.config.stored import merge_with_checkpoint, resolve_with_checkpoint


@pytest.fixture
def overlaid(original, compose):
    """`original` with the words of a command line on top, and what that changed."""

    def call(*words: str) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
        before = copy.deepcopy(original)
        line = compose(*words)
        values = stored.overlay(original, line)
        assert original == before
        return values, {key: (old, new) for key, old, new in stored.differences(original, values)}

    return call


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["optimizer.lr=0.25"], {"optimizer.lr": ("0.5", "0.25")}),
        (["seed=0"], {"seed": ("9", "0")}),  # the default
        (["grad_clip.norm=null"], {"grad_clip.norm": ("1", "null")}),
        (["model=mlp", "model.hidden=[128]"], {"model.hidden": ("[3, 4]", "[128]")}),
        (["optimizer={lr: 0.25}"], {"optimizer.lr": ("0.5", "0.25")}),
        (["grad_clip={value: 2}"], {"grad_clip.value": ("null", "2")}),
        (["performance=fast"], {"amp": ("false", "auto"), "channels_last": ("false", "true")}),
        (["trust=[a,b]", "tags=[]"], {"trust": ("[]", "[a, b]")}),
        (
            ["optimizer.lr_mult={stages.0: 0.1}"],
            {"optimizer.lr_mult": ("null", "-"), "optimizer.lr_mult.stages.0": ("-", "0.1")},
        ),
    ],
    ids=str,
)
def test_a_value_a_mapping_and_a_preset_set_their_keys_and_no_other(words, expected, overlaid):
    assert overlaid(*words)[1] == expected


def test_a_value_inside_a_list_leaves_the_rest_of_the_list(overlaid, original):
    values, changed = overlaid("transform.train.1.p=0.5")
    assert set(changed) == {"transform.train"}
    first, second = values["transform"]["train"]
    assert [first, {**second, "p": 0}] == [
        original["transform"]["train"][0],
        {**original["transform"]["train"][1], "p": 0},
    ]
    assert second["p"] == 0.5


def test_a_group_replaces_its_section_whole(original, overlaid, compose):
    values, changed = overlaid("optimizer=adam")
    assert values["optimizer"] == compose("optimizer=adam").values["optimizer"]
    assert all(key.startswith("optimizer.") for key in changed)
    assert changed["optimizer.nesterov"] == ("true", "-")
    assert changed["optimizer.betas"] == ("-", "[0.9, 0.999]")
    assert set(overlaid("callbacks=default")[0]["callbacks"]) == {"lr_monitor"}
    assert overlaid("callbacks=null")[0].get("callbacks", {}) == {}
    for words in (("optimizer=adam", "optimizer.lr=0.125"), ("optimizer.lr=0.125", "optimizer=adam")):
        values, _ = overlaid(*words)
        assert (values["optimizer"]["_target_"], values["optimizer"]["lr"]) == ("torch.optim.Adam", 0.125)


def test_a_preset_that_selects_options_replaces_their_sections_too_and_a_value_counts_more(overlaid):
    values, changed = overlaid("epochs=5", "debug=overfit")
    assert changed["epochs"] == ("3", "5")
    assert changed["scheduler._target_"][1] == "runner.optim.schedules.Constant"
    assert not any(key.startswith(("optimizer", "model", "seed")) for key in changed)
    assert values["transform"]["train"] == []


def test_deletions_delete_and_a_component_can_be_added(overlaid):
    assert overlaid("optimizer=sgd", "~optimizer.nesterov")[1]["optimizer.nesterov"] == ("true", "-")
    assert "early_stopping" not in overlaid("callbacks=early_stopping", "~callbacks.early_stopping")[0]["callbacks"]
    values, _ = overlaid("callbacks.mine._target_=a.B", "callbacks.mine.x=1")
    assert values["callbacks"]["mine"] == {"_target_": "a.B", "x": 1}
    assert set(values["callbacks"]) == {"lr_monitor", "early_stopping", "mine"}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("~callbacks.lr_monitr",), "callbacks.lr_monitor"),
        (("~callbacks.early_stopping.patienc",), "callbacks.early_stopping.patience"),
        (("~callbacks.gone",), ""),  # a run that was resumed before may have deleted it
        (("optimizer=adam", "~optimizer.amsgrad"), ""),
        (("model=mlp", "~model.hidden"), ""),  # a list
    ],
)
def test_a_deletion_of_what_is_not_there_is_refused_if_it_is_spelled_much_like_what_is(overlaid, words, meant):
    if not meant:
        overlaid(*words, "ckpt_path=last")
        return
    with pytest.raises(UserError) as raised:
        overlaid(*words, "ckpt_path=last")
    (problem,) = raised.value.problems
    assert (problem.key, problem.nearest) == (words[-1][1:], meant)
    overlaid(*words, "ckpt_path=last", "resume=auto")  # the first of these jobs may have deleted it


def test_differences_name_every_key_that_differs_once_with_both_values():
    before = {"a": 1, "b": {"c": [1], "d": None}, "gone": {"x": 1}, "same": {}}
    after = {"a": 1, "b": {"c": [1, 2], "d": "~"}, "new": {"y": "text"}, "same": {}}
    assert stored.differences(before, after) == [
        ("b.c", "[1]", "[1, 2]"),
        ("b.d", "null", "'~'"),
        ("gone.x", "1", "-"),
        ("new.y", "-", "text"),
    ]


# Files


def test_what_is_dumped_is_read_back_the_same():
    numbers = [1, -1, 1e-8, 1e22, 0.1, float("inf"), 2**70]
    text = ["null", "true", "1e3", "007", "2026-11-20", "${x}", "é", "on", "0x1f", "1_000", "a: b", "- x", " ", ""]
    values = {
        "text": text,
        "numbers": numbers,
        "twice": numbers,
        "others": {"a": None, "b": True, "c": [], "d": {}, "e": [[1], {"f": 2}]},
        "long": "x" * 500,
    }
    assert stored.load(stored.dump(values), "here") == values


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch hacked']",
        "a: !!python/object/new:subprocess.Popen [['touch', 'hacked']]",
        "a: !!python/name:os.system",
        "a: !!python/module:antigravity",
        "a: !mine 3",
        "a: [1",
        "a: b: c",
        "[" * 5000,
        "[" * 5000 + "]" * 5000,
        "- 1\n- 2",
        "just text",
        "",
        "a0: &a0 [x, x]\na1: &a1 [*a0, *a0]\na2: [*a1, *a1]",  # a few more lines: billions of values
        "a: " + "x" * 300_000,
        *["a: !!binary aGVsbG8=", "{3: 5}", "a: 2026-11-20", "a: {b: [1, !!set {x}]}", "3", "a: !!timestamp xx"],
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_is_no_plain_mapping_is_refused_by_name(text, workdir):
    with pytest.raises(UserError, match=r"^mine\.pt: its config is not "):
        stored.load(text, "mine.pt")
    assert list(workdir.iterdir()) == []


def test_interpolations_in_a_file_stay_text(compose, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    values = compose("model=mlp").values
    for text in ("${oc.env:SECRET}", "${seed}", "${oc.create:{a: 1}}", "${nothing.at.all}"):
        values["data"]["root"] = text
        loaded, changed = merge_with_checkpoint(stored.dump(values), "here", compose("epochs=4"))
        assert loaded["data"]["root"] == text
        assert [key for key, *_ in changed] == ["epochs"]
        assert resolve_with_checkpoint(stored.dump(values), "here", compose(), Train)[0].data.root == text


WANTED = """
from torch import nn

def small(in_channels, num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * in_channels, num_classes))

small.preferred_data = lambda: {"image_size": 12, "normalize": {"mean": [0.4], "std": [0.2]}}
"""


def test_images_are_prepared_as_the_model_wants_them_and_stay_so_with_the_same_command(compose, workdir, monkeypatch):
    (workdir / "wanting.py").write_text(WANTED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workdir))
    line = compose("data=digits", "model._target_=wanting.small", "model=null")
    config = resolve_config(line, Train)
    assert (config.data.image_size, config.data.normalize) == (12, Normalize(mean=[0.4], std=[0.2]))
    for again in (line, compose("data=digits", "model._target_=wanting.small", "model=null", "trust=[wanting]")):
        resumed, changed = resolve_with_checkpoint(stored.dump(config), "here", again, Train)
        assert (resumed.data, [key for key, *_ in changed if key.startswith("data")]) == (config.data, [])
    given = resolve_config(
        compose("data=digits", "model._target_=wanting.small", "model=null", "data.image_size=8"), Train
    )
    assert given.data.image_size == 8


def test_other_data_is_prepared_as_its_own_file_says(compose):
    text = stored.dump(compose("data=digits", "data.image_size=12").values)
    values, _ = merge_with_checkpoint(text, "here", compose("data=synthetic"))
    assert values["data"]["image_size"] == compose("data=synthetic").values["data"]["image_size"] != 12
    values, changed = merge_with_checkpoint(text, "here", compose("data=digits"))
    assert (values["data"]["image_size"], changed) == (12, [])


def test_a_rate_under_its_short_name_is_a_change_of_the_rate_alone(original, compose):
    text = stored.dump(original)
    values, changed = merge_with_checkpoint(text, "here", compose("lr=0.25"))
    assert changed == [("optimizer.lr", "0.5", "0.25")]
    assert (values["lr"], values["optimizer"]["lr"]) == (None, 0.25)
    assert merge_with_checkpoint(text, "here", compose("lr=0.5"))[1] == []
    assert merge_with_checkpoint(text, "here", compose("lr=0.5", "optimizer.lr=0.5"))[0]["lr"] == 0.5, (
        "which is then refused"
    )
