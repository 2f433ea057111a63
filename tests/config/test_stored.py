"""Configs read back from files: what the command line changes in them, and that nothing in them does anything."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.base.errors import ConfigError, UserError
from runner.checkpoint import file as checkpoint_file
from runner.config import stored
from runner.config.composition import Composition
from runner.config.schema.train import Train
from runner.config.stored import merge_with_checkpoint, resolve_with_checkpoint
from runner.config.untrusted import may_write_cache

TINY = ("threads=1", "device=cpu", "data=synthetic", "data.dataset.samples=32", "data.image_size=8", "epochs=3")


@pytest.fixture
def original(compose) -> dict[str, Any]:
    """A config as a checkpoint has it, far from the defaults."""
    words = (
        *TINY,
        *["model=mlp", "model.hidden=[3,4]", "optimizer=sgd", "optimizer.lr=0.5", "grad_clip.norm=1", "seed=9"],
    )
    return copy.deepcopy(compose(*words, "callbacks=early_stopping", "metrics.f1._target_=torchmetrics.F1Score").values)


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


def test_without_words_everything_stays_as_it_was_stored(original, overlaid):
    values, changed = overlaid()
    assert values == original
    assert changed == {}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer.lr=0.25", {"optimizer.lr": ("0.5", "0.25")}),
        ("seed=0", {"seed": ("9", "0")}),
        ("epochs=30", {"epochs": ("3", "30")}),
        ("grad_clip.norm=null", {"grad_clip.norm": ("1", "null")}),
        ("model.hidden=[128]", {"model.hidden": ("[3, 4]", "[128]")}),
    ],
)
def test_a_value_sets_its_key_and_no_other_even_if_it_is_the_default(word, expected, overlaid):
    _, changed = overlaid("model=mlp", word) if word.startswith("model") else overlaid(word)
    assert changed == expected


def test_a_group_replaces_its_section_whole(original, overlaid, compose):
    values, changed = overlaid("optimizer=adam")
    assert values["optimizer"] == compose("optimizer=adam").values["optimizer"]
    assert all(key.startswith("optimizer.") for key in changed)
    assert changed["optimizer.nesterov"] == ("true", "-")
    assert changed["optimizer.betas"] == ("-", "[0.9, 0.999]")


def test_a_group_of_named_components_replaces_all_of_them(overlaid):
    values, _ = overlaid("callbacks=default")
    assert set(values["callbacks"]) == {"lr_monitor"}
    assert overlaid("callbacks=null")[0].get("callbacks", {}) == {}


def test_a_group_and_a_value_inside_it_both_count_in_either_order(overlaid):
    for words in (("optimizer=adam", "optimizer.lr=0.125"), ("optimizer.lr=0.125", "optimizer=adam")):
        values, _ = overlaid(*words)
        assert values["optimizer"]["_target_"] == "torch.optim.Adam"
        assert values["optimizer"]["lr"] == 0.125


def test_a_mapping_sets_the_keys_in_it_and_no_other(overlaid):
    assert overlaid("optimizer={lr: 0.25}")[1] == {"optimizer.lr": ("0.5", "0.25")}
    assert overlaid("grad_clip={value: 2}")[1] == {"grad_clip.value": ("null", "2")}


def test_a_preset_sets_the_keys_of_its_file_and_no_other(overlaid):
    _, changed = overlaid("performance=fast")
    assert changed == {"amp": ("false", "auto"), "channels_last": ("false", "true")}
    values, changed = overlaid("debug=overfit")
    assert changed["epochs"] == ("3", "200")
    assert changed["scheduler._target_"][1] == "runner.optim.schedules.Constant"
    assert not any(key.startswith(("optimizer", "model", "seed")) for key in changed)
    assert values["transform"]["train"] == []


def test_a_value_counts_more_than_a_preset(overlaid):
    values, _ = overlaid("epochs=5", "debug=overfit")
    assert values["epochs"] == 5


def test_lists_are_replaced_whole(overlaid):
    values, changed = overlaid("trust=[a,b]", "transform.train=[]")
    assert values["trust"] == ["a", "b"]
    assert values["transform"]["train"] == []
    assert set(changed) == {"trust", "transform.train"}


def test_deletions_delete(overlaid):
    values, changed = overlaid("optimizer=sgd", "~optimizer.nesterov")
    assert "nesterov" not in values["optimizer"]
    assert changed["optimizer.nesterov"] == ("true", "-")
    assert "early_stopping" not in overlaid("callbacks=early_stopping", "~callbacks.early_stopping")[0]["callbacks"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("~callbacks.lr_monitr",), "callbacks.lr_monitor"),
        (("~callbacks.early_stopping.patienc",), "callbacks.early_stopping.patience"),
        (("~callbacks.gone",), ""),  # a run that was resumed before may have deleted it
        (("optimizer=adam", "~optimizer.amsgrad"), ""),
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


def test_a_component_can_be_added(overlaid):
    values, _ = overlaid("callbacks.mine._target_=a.B", "callbacks.mine.x=1")
    assert values["callbacks"]["mine"] == {"_target_": "a.B", "x": 1}
    assert set(values["callbacks"]) == {"lr_monitor", "early_stopping", "mine"}
    assert set(values["metrics"]) == {"f1"}


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
    values = {
        "text": [
            *["null", "true", "1e3", "007", "2026-11-20", "${x}", "é", "on", "0x1f", "1_000"],
            "a: b",
            "- x",
            " ",
            "",
        ],
        "numbers": [1, -1, 1e-8, 1e22, 0.1, float("inf"), 2**70],
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
        *["a: !!binary aGVsbG8=", "{3: 5}", "a: 2026-11-20", "a: {b: [1, !!set {x}]}", "3", "a: !!timestamp xx"],
    ],
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


def test_interpolations_in_a_checkpoint_stay_text_in_a_run(accepted, monkeypatch, workdir):
    monkeypatch.setenv("SECRET", "hunter2")
    words = (*TINY, "epochs=1", "model=mlp", "model.hidden=[2]", "logger=none", "evaluate.test=false")
    first = accepted("train", *words)
    contents = checkpoint_file.read(first.directory / "checkpoints" / "last.safetensors")
    values = yaml.safe_load(contents["config"])
    values["data"]["name"] = values["name"] = "${oc.env:SECRET}"
    contents["config"] = stored.dump(values)
    Path("theirs").mkdir()
    checkpoint_file.write(Path("theirs/last.safetensors"), contents)
    result = accepted("eval", "ckpt_path=theirs/last.safetensors", "split=val", "output=out")
    assert "${oc.env:SECRET}" in result.out
    everything = result.out + result.err + "".join(p.read_text() for p in Path("out").glob("*.json"))
    assert "hunter2" not in everything


# Whom a file may make the program trust


def test_a_file_cannot_say_whom_to_trust_or_where_to_write(compose):
    values = compose().values | {"trust": ["os"], "output_root": "/", "ckpt_path": "elsewhere.pt"}
    loaded, changed = merge_with_checkpoint(stored.dump(values), "here", compose("trust=[mine]", "ckpt_path=here.pt"))
    assert (loaded["trust"], loaded["output_root"], loaded["ckpt_path"]) == (["mine"], "outputs", "here.pt")
    assert "ckpt_path" not in [key for key, *_ in changed]


@pytest.mark.parametrize(
    "key", ["model", "metrics.x", "callbacks.x", "transform.train.0", "model.deep.inside", "hidden"]
)
def test_a_file_may_build_nothing_strange_wherever_it_names_it(key, compose):
    values = compose("model=mlp").values
    node = {"_target_": "os.system", "command": "touch hacked"}
    place: Any = values
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(place, list):
            place = place[int(part)]
            continue
        place[part] = place.get(part) or {}
        place = place[part]
    if isinstance(place, list):
        place[int(last)] = node
    else:
        place[last] = node
    with pytest.raises(ConfigError) as caught:
        merge_with_checkpoint(stored.dump(values), "theirs.pt", compose())
    [problem] = caught.value.problems
    assert problem.key == f"{key}._target_"
    assert "'os.system' comes from a file and its package is not trusted" in problem.message
    assert "trust=[os]" in problem.allowed
    assert "conf/local" in problem.allowed
    assert "RUNNER_TRUST" in problem.allowed
    assert problem.origin == "theirs.pt"


def test_what_the_command_line_names_is_the_users_word(compose):
    values = compose("model=mlp").values
    values["model"] = {"_target_": "strange_package.Net"}
    with pytest.raises(ConfigError):
        merge_with_checkpoint(stored.dump(values), "theirs.pt", compose())
    loaded, _ = merge_with_checkpoint(stored.dump(values), "theirs.pt", compose("model._target_=strange_package.Net"))
    assert loaded["model"]["_target_"] == "strange_package.Net"
    loaded, _ = merge_with_checkpoint(stored.dump(values), "theirs.pt", compose("model=small_cnn"))
    assert loaded["model"]["_target_"] == "runner.models.small_cnn.SmallCNN"


def test_aliases_that_stand_for_billions_of_values_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(UserError, match="aliases"):
        stored.load("\n".join(lines), "a file")


def test_a_value_that_occurs_twice_is_written_twice_and_read_back() -> None:
    shared = [0.5, 0.5]
    assert stored.load(stored.dump({"mean": shared, "std": shared}), "a file") == {"mean": shared, "std": shared}


def test_a_config_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="over 262,144 characters"):
        stored.load("a: " + "x" * 300_000, "c.pt")


@pytest.mark.parametrize("name", ["../up", "/absolute", "a/../../b", "line\nend", "\x1b[2J", "x" * 300, ""])
def test_a_file_cannot_name_a_folder_outside_for_the_run(name: str, original, compose) -> None:
    text = stored.dump(original | {"name": name})
    with pytest.raises(ConfigError, match="name: cannot be"):
        merge_with_checkpoint(text, "c.pt", compose())
    if name.isprintable() and 0 < len(name) < 100:
        values, _ = merge_with_checkpoint(text, "c.pt", compose(f"name={name}"))
        assert values["name"] == name


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("threads", 10**6), ("devices", 10**6), ("devices", list(range(2000))), ("max_restarts", 10**9),
        ("data.num_workers", 10**6), ("data.prefetch", 10**6), ("data.split.folds", 10**9), ("data.image_size", 10**6),
        ("epochs", 10**15), ("model.dropout", 1e9), ("model.hidden", [3, 10**9]), ("task.num_classes", 10**9),
        ("transform.eval", [{"_target_": "torchvision.transforms.Resize", "size": 10**9}]),
    ],
    ids=str,
)  # fmt: skip
def test_a_file_cannot_ask_for_a_million_threads_or_processes(key: str, given: Any, original, compose) -> None:
    *sections, last = key.split(".")
    functools.reduce(dict.__getitem__, sections, original)[last] = given
    text = stored.dump(original)
    with pytest.raises(ConfigError, match=rf"{key}[\w.]*: cannot be .*, as it comes from a file"):
        merge_with_checkpoint(text, "c.pt", compose())
    if "." not in key or key.startswith("data"):
        assert merge_with_checkpoint(text, "c.pt", compose(f"{key}=2"))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("data.root", "http://host/photos", "data.root=http://host/photos"),
        ("data.root", "s3://bucket/a b", "'data.root=\"s3://bucket/a b\"'"),
        ("data.dataset.root", "simplecache::s3://bucket", "data.dataset.root=simplecache::s3://bucket"),
        ("data.dataset.train", ["a.tar", "memory://b"], "'data.dataset.train=[a.tar,memory://b]'"),
        ("model.hidden", [{"a": "ftp://b"}], "'model.hidden=[{a:ftp://b}]'"),
    ],
)
def test_a_file_cannot_choose_an_address(key: str, value: Any, word: str, original, compose) -> None:
    section, *names, last = key.split(".")
    functools.reduce(dict.__getitem__, [section, *names], original)[last] = value
    text = stored.dump(original | {"notes": "see https://host/page", "tags": ["https://host"]})
    with pytest.raises(ConfigError, match=rf"(?s){key}[\w.]*: is the address .*: {re.escape(word)}"):
        merge_with_checkpoint(text, "c.pt", compose())
    merge_with_checkpoint(text, "c.pt", compose(), [{"data": "model", "model": "data"}[section]])
    values, _ = merge_with_checkpoint(text, "c.pt", compose(f"+{shlex.split(word)[0]}"))
    assert functools.reduce(dict.__getitem__, [section, *names, last], values) == value


def test_a_file_may_weigh_a_term_of_a_loss_with_any_float(original, compose) -> None:
    original["task"]["style_weight"] = 1e10
    values, _ = merge_with_checkpoint(stored.dump(original), "c.pt", compose())
    assert values["task"]["style_weight"] == 1e10


def test_loggers_that_may_send_elsewhere_come_from_the_command_line_alone(original, compose, monkeypatch) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "yaml")
    original["logger"] = {
        "csv": {"_target_": "runner.tracking.loggers.Csv"},
        "mlflow": {"_target_": "runner.tracking.trackers.loggers.MLflow", "tracking_uri": "http://other"},
        "own": {"_target_": "yaml.YAMLObject", "url": "http://other"},
    }
    text = stored.dump(original)

    def loggers(*words: str, **values: Any) -> dict[str, Any]:
        line = compose(*words)
        return merge_with_checkpoint(text, "c.pt", dataclasses.replace(line, values=line.values | values))[0]["logger"]

    assert list(loggers()) == ["csv"]
    assert list(loggers("logger.mlflow.wait_s=1")) == ["csv"], "a part of it does not bring the rest back"
    assert loggers("logger=mlflow")["mlflow"]["tracking_uri"] is None
    in_folder = loggers(logger=compose("logger=mlflow").values["logger"])
    assert (list(in_folder), in_folder["mlflow"]["tracking_uri"]) == (["csv", "mlflow"], None)


def test_a_file_cannot_have_data_fetched(original, compose) -> None:
    original["data"]["download"] = True
    original["data"]["dataset"] = {"_target_": "runner.data.sources.torchvision_sets.mnist", "download": True}
    text = stored.dump(original)
    values, differences = merge_with_checkpoint(text, "c.pt", compose())
    assert (values["data"]["download"], values["data"]["dataset"]["download"]) == (False, False)
    assert not any("download" in key for key, _, _ in differences)
    assert merge_with_checkpoint(text, "c.pt", compose("data.download=true"))[0]["data"]["download"] is True


def test_a_cache_is_made_only_in_a_folder_that_the_user_has_named(compose) -> None:
    def allowed(text: str, line: Composition) -> bool:
        return may_write_cache(resolve_with_checkpoint(text, "c.pt", line, Train)[0], line.values)

    line = compose()
    original = line.values
    assert allowed(stored.dump(original), line)
    for key in ("root", "cache_dir"):
        elsewhere = copy.deepcopy(original)
        elsewhere["data"][key] = "/elsewhere"
        text = stored.dump(elsewhere)
        assert not allowed(text, line)
        assert allowed(text, compose(f"data.{key}=/elsewhere"))


def test_data_of_an_own_option_that_says_only_the_data_set_have_the_defaults(original, compose) -> None:
    line = compose()
    text, whole = stored.dump(original | {"data": original["data"] | {"download": True}}), line.values["data"]
    short = dataclasses.replace(line, values=line.values | {"data": {"dataset": whole["dataset"]}})
    values, _ = merge_with_checkpoint(text, "c.pt", short)
    assert values["data"]["download"] is False
    config, _ = resolve_with_checkpoint(stored.dump(line.values), "c.pt", short, Train)
    assert may_write_cache(config, short.values)


WANTED = """
from torch import nn

def small(in_channels, num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * in_channels, num_classes))

small.preferred_data = lambda: {"image_size": 12, "normalize": {"mean": [0.4], "std": [0.2]}}
"""


@pytest.mark.extended
def test_a_run_whose_model_wants_its_images_so_goes_on_with_the_same_command(run, train, workdir, monkeypatch):
    (workdir / "wanting.py").write_text(WANTED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.setenv("RUNNER_TRUST", "wanting")
    data = ("data=digits",)
    first = train(*data, "model._target_=wanting.small", "model=null", "max_steps=1", "evaluate.test=false")
    again = ("ckpt_path=last", "data=digits")
    second = train(*again, "max_steps=2")
    for result in (first, second):
        data = yaml.safe_load((result.directory / "config.yaml").read_text())["data"]
        assert (data["image_size"], data["normalize"]) == (12, {"mean": [0.4], "std": [0.2]})
    assert "data." not in second.out.partition("changed on the command line")[2].partition("warning")[0]
    assert run("eval", *again, "threads=1").status == 0
    refused = run("train", *again, "data.image_size=8", "threads=1")
    assert "data.image_size: cannot change when resuming" in refused.err


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
