"""What a wrong word on the command line is meant to be: spelling of other programs, spaces, flags, quotes."""

from __future__ import annotations

import pytest

from runner.base.errors import UserError
from runner.config import keys
from runner.config.overrides import check_overrides, parse_flags
from runner.config.schema.train import Train
from runner.config.sources import Sources
from runner.config.synonyms import MEANINGS
from runner.config.validate import typed

KNOWN = [*keys.all_keys(Train), *Sources().groups()]

# The words, the key that is named, and what the message says.
WORDS: list[tuple[str, str, str]] = [
    ("epochs 5 seed=1", "epochs", "is not an override|epochs=5"),
    ("learning_rate 0.1", "learning_rate", "optimizer.lr=0.1"),
    ("epochs", "epochs", "is not an override|epochs=VALUE"),
    ("epochs:5", "epochs:5", "is not an override|key=value"),
    ("seed=1,", "seed=1,", "has a value that cannot be read|no spaces around = and commas"),
    ("name=a#b", "name=a#b", "cannot be read|quotes around special characters: 'name="),
    ("model.hidden=256,128", "model.hidden", "--multirun|model.hidden=[256,128]"),
    ("callbacks=default,early_stopping", "callbacks", "callbacks=[default,early_stopping]"),
    ("model=resnet50", "model", "model=torchvision model.name=resnet50"),
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
    ("trainer=1", "trainer", "is not a key"),
]


@pytest.mark.parametrize(("line", "key", "says"), WORDS, ids=[row[0] for row in WORDS])
def test_a_wrong_word_is_told_with_what_is_meant(line, key, says):
    checked = check_overrides(line.split(" "), Train, Sources(), False)
    problems = checked.problems + checked.unknown_keys()
    assert problems[0].key == key
    text = "\n".join(problems[0].lines())
    assert [word for word in says.split("|") if word not in text] == [], text
    assert "transform" not in text


@pytest.mark.parametrize(("name", "meant"), MEANINGS.items())
def test_what_other_programs_call_a_key_leads_to_one_that_exists(name, meant):
    key = meant.split(" ")[-1].split("=")[0]
    assert keys.find(Train, key) is not None or key in ("DIR", "experiment", "debug", "callbacks")
    assert name not in KNOWN or name == "checkpoint"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--epochs", "5"], "no flag --epochs; did you mean 'epochs=5'"),
        (["-e", "5"], "did you mean 'epochs=5'"),
        (["--seed=1"], "did you mean 'seed=1'"),
        (["--learning-rate", "0.1"], "did you mean 'optimizer.lr=0.1'"),
        (["--model", "mlp"], "did you mean 'model=mlp'"),
        (["--fp16"], "did you mean 'amp=fp16'"),
        (["--multrun"], "did you mean '--multirun'"),
        (["-p", "model"], "--package is refused"),
        (["-c", "conf"], "invalid choice: 'conf'"),
        (["--zzzz"], "no flag --zzzz"),
    ],
)
def test_a_wrong_flag_is_told_with_the_key_that_is_meant(argv, says):
    with pytest.raises(UserError) as caught:
        parse_flags(argv, KNOWN)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("resume", "last", "ckpt_path=last"),
        ("checkpoint", "last", "ckpt_path"),
        ("amp", 16, "fp16"),
        ("dtype", "float16", "amp=fp16"),
    ],
)
def test_a_wrong_value_is_told_with_the_one_that_is_meant(key, value, meant):
    problems = {problem.key: problem for problem in typed(Train, {key: value})[1]}
    assert problems[key].nearest == meant


@pytest.mark.parametrize(
    ("name", "says"), [("absent", "there is no folder"), ("file", "is a file"), ("empty", "has no .yaml file")]
)
def test_a_config_folder_that_cannot_be_used_is_told(name, says, tmp_path):
    (tmp_path / "file").write_text("seed: 1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--config-dir: ") as caught:
        Sources([tmp_path / name])
    assert says in str(caught.value)
