"""The words of the command line: three spellings of one meaning, recorded in one."""

from __future__ import annotations

import re

import pytest
import yaml

from runner.base.errors import ConfigError
from runner.cli import main
from runner.config import overrides
from runner.config.schema.train import Train
from runner.config.sources import Sources

PREFIXES = ("", "+", "++")
# A key of the schema, one of a section, one of a component, one that a component's file omits, a group.
WORDS = ["seed=7", "data.batch_size=16", "model.dropout=0.3", "optimizer.maximize=true", "optimizer=sgd"]
WORDS += ["metrics.f1._target_=torchmetrics.F1Score", "callbacks.mine._target_=a.B", "grad_clip={norm: 1}"]


@pytest.mark.parametrize("word", WORDS[::2])
def test_key_plus_key_and_plus_plus_key_mean_the_same(word, compose):
    plain, *others = (compose(prefix + word) for prefix in PREFIXES)
    assert plain.overrides == [word]
    for other in others:
        assert (other.values, other.overrides, other.group_choices) == (
            plain.values,
            plain.overrides,
            plain.group_choices,
        )


@pytest.mark.parametrize("word", WORDS)
def test_the_three_spellings_print_the_same_config(word, workdir, capsys):
    texts = []
    for prefix in PREFIXES:
        assert main(["train", "--cfg", "job", "--resolve", prefix + word]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert yaml.safe_load(texts[0])["epochs"] == 30


def test_the_recorded_overrides_are_canonical_and_give_the_same_config_again(accepted, compose):
    words = ["+threads=1", "++logger=none", "log.progress=false", "device=cpu", "+data=synthetic", "epochs=1"]
    words += ["++data.dataset.samples=32", "data.image_size=8", "model=mlp", "+model.hidden=[3]", "evaluate.test=false"]
    result = accepted("train", *words)
    recorded = yaml.safe_load((result.directory / "overrides.yaml").read_text())
    assert recorded == [word.lstrip("+") for word in words]
    assert compose(*recorded).values == compose(*words).values


def test_the_later_of_two_overrides_counts(compose):
    assert compose("seed=1", "seed=2").values["seed"] == 2
    assert compose("optimizer=sgd", "optimizer=adam").group_choices["optimizer"] == "adam"


def test_an_override_counts_more_than_a_preset_wherever_it_stands(compose):
    for words in (("epochs=4", "debug=smoke"), ("debug=smoke", "epochs=4")):
        values = compose(*words).values
        assert (values["epochs"], values["limit"]["train_batches"]) == (4, 2)


@pytest.mark.parametrize("group", ["experiment", "debug", "sweep", "logger", "callbacks"])
def test_null_selects_no_option(group, compose):
    composition = compose(f"{group}=null")
    assert group not in composition.group_choices
    assert composition.values.get(group, {}) == (compose().values["sweep"] if group == "sweep" else {})


def test_a_mapping_for_a_group_changes_single_keys_of_it(compose):
    values = compose("optimizer={lr: 0.5, maximize: true}").values["optimizer"]
    expected = compose().values["optimizer"] | {"lr": 0.5, "maximize": True}
    assert values == expected


def test_several_options_of_a_group_are_merged(compose):
    assert set(compose("callbacks=[default,early_stopping]").values["callbacks"]) == {"lr_monitor", "early_stopping"}
    assert set(compose("logger=[csv,tensorboard]").values["logger"]) == {"csv", "tensorboard"}


def test_a_key_of_a_component_can_be_deleted(compose):
    assert "dropout" not in compose("~model.dropout").values["model"]
    assert "lr_monitor" not in compose("~callbacks.lr_monitor").values["callbacks"]


def test_values_keep_their_types(compose):
    values = compose("name='007'", "amp=bf16", "data.hflip=1", "trust=[a,b]", "grad_clip.norm=1e-3").values
    assert (values["name"], values["amp"], values["data"]["hflip"], values["trust"]) == ("007", "bf16", 1, ["a", "b"])
    assert values["grad_clip"]["norm"] == pytest.approx(1e-3)


def examine(*words: str, multirun: bool = False) -> overrides.CheckedOverrides:
    return overrides.check_overrides(words, Train, Sources(), multirun)


def test_one_wrong_word_hides_no_other():
    found = examine("seed", "optimizer=adma", "seed=1,2", "~epochs", "sede=1", "epochs=3")
    assert [problem.key for problem in found.problems] == ["seed", "optimizer", "seed", "epochs"]
    assert found.unknown == [("sede", "sede=1")]
    assert found.accepted == ["epochs=3"]


def test_words_for_hydra_itself_pass_untouched():
    words = ["hydra.run.dir=x", "hydra/launcher=joblib", "+hydra.job.env_set.A=1"]
    assert examine(*words).accepted[:2] == words[:2]


def test_several_values_are_for_sweeps():
    assert [problem.key for problem in examine("seed=1,2", "seed=range(3)").problems] == ["seed", "seed"]
    assert examine("seed=1,2", "seed=range(3)", multirun=True).problems == []
    assert examine("seed='1,2'").problems == []


def test_the_first_job_of_a_sweep_has_the_first_of_all_values():
    words = [
        "seed=3,4",
        "model=mlp,small_cnn",
        "optimizer.lr=choice(0.1,0.2)",
        "data.split.seed=range(5,9)",
        "epochs=1",
    ]
    first = overrides.first_of_sweeps(words)
    assert first == ["seed=3", "model=mlp", "optimizer.lr=0.1", "data.split.seed=5", "epochs=1"]


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("weight_decay", "optimizer.weight_decay"),
        ("batch_size", "data.batch_size"),
        ("train.betas", "optimizer.betas"),
        ("modle", "model"),
        ("data.bathc_size", "data.batch_size"),
        ("checkpoints.keep", "checkpoint.keep"),
        ("label_smothing", "loss.label_smoothing"),
        ("qqqqqq", ""),
    ],
)
def test_an_unknown_key_gets_the_nearest_of_those_that_the_call_has(key, close, compose):
    with pytest.raises(ConfigError) as caught:
        compose(f"{key}=1")
    [problem] = caught.value.problems
    assert (problem.key, problem.nearest, problem.origin) == (key, close, f"the override {key}=1")


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        ("model=glob([m*,s*])", "model=mlp,small_cnn,smp"),
        ("model=glob([m*,s*],exclude=s*)", "model=mlp"),
        ("seed=int(interval(1,5))", "seed=int(interval(1,5))"),
    ],
)
def test_a_pattern_stands_for_the_options_of_a_group(word, accepted):
    assert overrides.check_overrides([word], Train, Sources(), True).accepted == [accepted]
    assert overrides.check_overrides([word], Train, Sources(), True).problems == []


@pytest.mark.parametrize("word", ["logger=[none,csv]", "callbacks=[default,none]"])
def test_none_with_others_contradicts_itself(word):
    [problem] = overrides.check_overrides([word], Train, Sources(), False).problems
    assert problem.key == word.partition("=")[0]
    assert "none and others" in problem.message
    assert overrides.check_overrides(["logger=none,csv"], Train, Sources(), True).problems == []


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("model=glob(zzz*)", "has no option of that pattern"),
        ("seed=glob(*)", r"cannot be glob\(...\), which is for groups"),
        ("seed=range(0)", "has no values"),
        ("model=interval(1,2)", "is chosen by name"),
    ],
)
def test_a_sweep_without_jobs_is_a_problem(word, reason):
    [problem] = overrides.check_overrides([word], Train, Sources(), True).problems
    assert problem.key == word.split("=")[0]
    assert re.search(reason, problem.message)
    assert problem.origin == f"the override {word}"
