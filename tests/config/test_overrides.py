"""The words of the command line: three spellings of one meaning, recorded in one, and what a wrong one is meant to be."""

from __future__ import annotations

import re

import pytest
import yaml

from runner.base.errors import ConfigError, UserError
from runner.config import keys, overrides
from runner.config.keys import MEANINGS
from runner.config.schema.train import Train
from runner.config.sources import Sources

PREFIXES = ("", "+", "++")
# A key of the schema, one of a section, one of a component, one that a component's file omits, a group.
WORDS = ["seed=7", "data.batch_size=16", "model.dropout=0.3", "optimizer.maximize=true", "optimizer=sgd"]
WORDS += ["metrics.f1._target_=torchmetrics.F1Score", "callbacks.mine._target_=a.B", "grad_clip={norm: 1}"]
KNOWN = [*keys.all_keys(Train), *Sources().groups()]


def examine(*words: str, multirun: bool = False) -> overrides.CheckedOverrides:
    return overrides.check_overrides(words, Train, Sources(), multirun)


@pytest.mark.parametrize("word", WORDS)
def test_key_plus_key_and_plus_plus_key_mean_the_same(word, compose):
    plain, *others = (compose(prefix + word) for prefix in PREFIXES)
    assert plain.overrides == [word]
    assert others == [plain, plain]


def test_the_recorded_overrides_are_canonical_and_give_the_same_config_again(accepted, compose):
    words = ["+threads=1", "++logger=none", "log.progress=false", "device=cpu", "+data=synthetic", "epochs=1"]
    words += ["++data.dataset.samples=32", "data.image_size=8", "model=mlp", "+model.hidden=[3]", "evaluate.test=false"]
    result = accepted("train", *words)
    recorded = yaml.safe_load((result.directory / "overrides.yaml").read_text())
    assert recorded == [word.lstrip("+") for word in words]
    assert compose(*recorded).values == compose(*words).values


# The words, a key, and the value that it has; `...` if there is none.
VALUES = [
    ("seed=1 seed=2", "seed", 2),
    ("optimizer=sgd optimizer=adam", "optimizer._target_", "torch.optim.Adam"),
    ("epochs=4 debug=smoke", "epochs", 4),  # a value counts more than a preset, wherever it stands
    ("debug=smoke epochs=4", "epochs", 4),
    ("debug=smoke epochs=4", "limit.train_batches", 2),
    ("optimizer={lr:0.5,maximize:true}", "optimizer.maximize", True),
    ("optimizer={lr:0.5,maximize:true}", "optimizer.betas", [0.9, 0.999]),
    (
        "callbacks=[default,early_stopping]",
        "callbacks.lr_monitor._target_",
        "runner.engine.callbacks.LearningRateMonitor",
    ),
    ("callbacks=[default,early_stopping]", "callbacks.early_stopping.patience", 5),
    ("~model.dropout", "model.dropout", ...),
    ("~callbacks.lr_monitor", "callbacks.lr_monitor", ...),
    ("name='007'", "name", "007"),
    ("amp=bf16", "amp", "bf16"),
    ("data.hflip=1", "data.hflip", 1),
    ("trust=[a,b]", "trust", ["a", "b"]),
    ("grad_clip.norm=1e-3", "grad_clip.norm", 0.001),
]


@pytest.mark.parametrize(("line", "key", "value"), VALUES, ids=[f"{row[0]}: {row[1]}" for row in VALUES])
def test_what_words_set(line, key, value, compose):
    found = keys.at(compose(*line.split()).values, key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("group", ["experiment", "debug", "sweep", "logger", "callbacks"])
def test_null_selects_no_option(group, compose):
    composition = compose(f"{group}=null")
    assert group not in composition.group_choices
    assert composition.values.get(group, {}) == (compose().values["sweep"] if group == "sweep" else {})


def test_one_wrong_word_hides_no_other():
    found = examine("seed", "optimizer=adma", "seed=1,2", "~epochs", "sede=1", "epochs=3")
    assert [problem.key for problem in found.explained()] == ["seed", "optimizer", "seed", "epochs", "sede"]
    assert found.accepted == ["epochs=3"]


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        ("hydra.run.dir=x", "hydra.run.dir=x"),  # words for Hydra itself pass untouched
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("+hydra.job.env_set.A=1", "+hydra.job.env_set.A=1"),
        ("seed=range(3)", "seed=range(3)"),
        ("seed='1,2'", "seed='1,2'"),
        ("logger=none,csv", "logger=none,csv"),
        ("model=glob([m*,s*])", "model=mlp,small_cnn,smp"),  # a pattern stands for the options of a group
        ("model=glob([m*,s*],exclude=s*)", "model=mlp"),
    ],
)
def test_words_of_a_sweep_are_accepted(word, accepted):
    found = examine(word, multirun=True)
    assert (found.accepted, found.problems) == ([accepted], [])


def test_the_first_job_of_a_sweep_has_the_first_of_all_values():
    words = "seed=3,4 model=mlp,small_cnn optimizer.lr=choice(0.1,0.2) data.split.seed=range(5,9) epochs=1"
    first = "seed=3 model=mlp optimizer.lr=0.1 data.split.seed=5 epochs=1"
    assert overrides.first_of_sweeps(words.split()) == first.split()


# The words, the key that is named, and what the message says.
WRONG: list[tuple[str, str, str]] = [
    ("epochs 5 seed=1", "epochs", "is not an override|epochs=5"),
    ("learning_rate 0.1", "learning_rate", "optimizer.lr=0.1"),
    ("epochs", "epochs", "is not an override|epochs=VALUE"),
    ("epochs:5", "epochs:5", "is not an override|key=value"),
    ("seed=1,", "seed=1,", "has a value that cannot be read|no spaces around = and commas"),
    ("name=a#b", "name=a#b", "cannot be read|quotes around special characters: 'name="),
    ("seed=range(3)", "seed", "--multirun"),
    ("model.hidden=256,128", "model.hidden", "--multirun|model.hidden=[256,128]"),
    ("callbacks=default,early_stopping", "callbacks", "callbacks=[default,early_stopping]"),
    ("logger=[none,csv]", "logger", "none and others"),
    ("callbacks=[default,none]", "callbacks", "none and others"),
    ("model=resnet50", "model", "model=torchvision model.name=resnet50"),
    ("model=fcos", "model", "did you mean 'torchvision_detection model.name=fcos_resnet50_fpn'"),
    ("model=vit", "model", "did you mean 'vit_tiny'"),
    ("model=mlp.yaml", "model", "did you mean 'mlp'"),
    ("model=conf/model/mlp.yaml", "model", "did you mean 'mlp'"),
    ("model=my_package.Net", "model", "model._target_=my_package.Net"),
    ("optimizer=Adam", "optimizer", "did you mean 'adam'"),
    ("optimizer=Adagrad", "optimizer", "optimizer._target_=torch.optim.Adagrad"),
    ("loss=ce", "loss", "did you mean 'cross_entropy'"),
    ("data=imagenet", "data", "image_folder data.root=DIR"),
    ("debug=true", "debug", "did you mean 'smoke'"),
    ("~epochs", "epochs", "cannot be deleted"),
    ("~optimizer.betas.0", "optimizer.betas.0", "cannot be deleted: it is an item of a list|optimizer.betas=[...]"),
    ("trainer=1", "trainer", "is not a key"),
    ("-m model=glob(zzz*)", "model", "has no option of that pattern|from: the override model=glob(zzz*)"),
    ("-m seed=glob(*)", "seed", "cannot be glob(...), which is for groups"),
    ("-m seed=range(0)", "seed", "has no values"),
    ("-m model=interval(1,2)", "model", "is chosen by name"),
    ("-m seed=int(interval(1,5))", "seed", "cannot be an interval|sweep=optuna"),
]


@pytest.mark.parametrize(("line", "key", "says"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_word_is_told_with_what_is_meant(line, key, says):
    problems = examine(*line.removeprefix("-m ").split(" "), multirun=line.startswith("-m ")).explained()
    assert problems[0].key == key
    text = "\n".join(problems[0].lines())
    assert [word for word in says.split("|") if word not in text] == [], text
    assert not re.search(r"\btransform\b", text)  # options of no other group


CLOSE = {
    "weight_decay": "optimizer.weight_decay", "batch_size": "data.batch_size", "train.betas": "optimizer.betas", "modle": "model",
    "data.bathc_size": "data.batch_size", "checkpoints.keep": "checkpoint.keep", "label_smothing": "loss.label_smoothing",
    "qqqqqq": "",
}  # fmt: skip


def test_an_unknown_key_gets_the_nearest_of_those_that_the_call_has(compose):
    with pytest.raises(ConfigError) as caught:
        compose(*(f"{key}=1" for key in CLOSE))
    assert {problem.key: problem.nearest for problem in caught.value.problems} == CLOSE
    assert {problem.origin for problem in caught.value.problems} == {f"the override {key}=1" for key in CLOSE}


@pytest.mark.parametrize(("name", "meant"), MEANINGS.items())
def test_what_other_programs_call_a_key_leads_to_one_that_exists(name, meant):
    key = meant.split(" ")[-1].split("=")[0]
    assert keys.find(Train, key) is not None or key in ("DIR", "experiment", "debug", "callbacks")
    assert name not in KNOWN or name == "checkpoint"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--epochs 5", "no flag --epochs; did you mean 'epochs=5'"),
        ("-e 5", "did you mean 'epochs=5'"),
        ("--seed=1", "did you mean 'seed=1'"),
        ("--learning-rate 0.1", "did you mean 'optimizer.lr=0.1'"),
        ("--model mlp", "did you mean 'model=mlp'"),
        ("--fp16", "did you mean 'amp=fp16'"),
        ("--multrun", "did you mean '--multirun'"),
        ("-p model", "--package is refused"),
        ("--experimental-rerun x", "a pickle, which could run anything; use ckpt_path= instead"),
        ("--config-path x", "--config-path is refused: it would replace the configs of the program"),
        ("-c conf", "invalid choice: 'conf'"),
        ("--zzzz", "no flag --zzzz"),
    ],
)
def test_a_wrong_flag_is_told_with_the_key_that_is_meant(line, says):
    with pytest.raises(UserError) as caught:
        overrides.parse_flags(line.split(), KNOWN)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"), [("absent", "is not a folder"), ("file", "is not a folder"), ("empty", "has no .yaml file")]
)
def test_a_config_folder_that_cannot_be_used_is_told(name, says, tmp_path):
    (tmp_path / "file").write_text("seed: 1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--config-dir: ") as caught:
        Sources([tmp_path / name])
    assert says in str(caught.value)
