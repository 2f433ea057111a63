"""A model that is exported to the Hugging Face Hub is read from there as any file from somebody else."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from extras import needs
from hub_server import TOKEN, Hub
from PIL import Image
from safetensors.torch import load_file, save

from faults import forging
from runner import __version__
from runner.checkpoint.file import read, write

pytestmark = needs("huggingface")
SMALL = ("epochs=1", "model=mlp", "model.hidden=[8]")
QUIET = ("threads=1", "logger=none", "log.progress=false", "log.curves=false", "max_steps=1", "evaluate.test=false")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the processes of a test know as their endpoint, with a new cache."""
    hub = Hub()
    hub.open()
    for name, value in hub.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    yield hub
    hub.stop()


@pytest.fixture
def refused(spawn: Callable[..., Any]) -> Callable[..., str]:
    """The error of a command of a user's mistake."""

    def call(*words: str) -> str:
        result = spawn(*words)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr + result.stdout
        return str(result.stderr)

    return call


def scripted(source: str) -> Any:
    """What a script prints, as JSON."""
    Path("script.py").write_text(source)
    result = forked.run((), script="script.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


LOAD = """
import json, runner
trained = runner.load("hf://user/digits{}", device="cpu")
print(json.dumps([trained.step, trained.classes, trained.preprocess.shape, trained.weights, trained.metrics]))
"""


def test_an_uploaded_model_is_loaded_predicts_and_starts_a_run_as_the_checkpoint_does(
    hub: Hub, spawn: Any, trained: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    Image.new("L", (8, 8), 100).save("image.png")
    (trained / "export").mkdir()
    for stale in ("model.safetensors.data", "model.json.data", "model.onnx", "model.onnx.data"):
        (trained / "export" / stale).write_text("of an earlier export")
    exported = spawn("export", f"ckpt_path={trained}", "hub=user/digits", "json=true", "threads=1")
    assert exported.returncode == 0, exported.stderr
    record, files = json.loads(exported.stdout), hub.repositories["user/digits"]["main"]
    assert record["hub"] == f"http://127.0.0.1:{hub.port}/user/digits"
    assert set(files) == {"model.safetensors", "model.json", "config.yaml", "README.md"}
    assert {row["max_abs"] for row in record["comparison"]} == {0}
    # Nothing but the weights, under their names, and what belongs to them
    best = read(trained / "checkpoints" / "best.safetensors")
    weights = load_file(trained / "export" / "model.safetensors")
    assert set(weights) == set(best["model"])
    assert all(torch.equal(weights[name], value) for name, value in best["model"].items())
    # The card says what the run was
    card, summary = files["README.md"].decode(), json.loads((trained / "summary.json").read_text())
    for said in (
        "python -m runner train threads=1",
        "model.hidden=[8]",
        f"| test/accuracy | {summary['test']['accuracy']:.4g} |",
        f"| val/accuracy | {best['metrics']['last']['val/accuracy']:.4g} |",
        record["weights_sha256"],
        f"| torch | {best['versions']['torch']} |",
        f"| runner | {__version__} |",
        f"With `runner` {__version__} or newer",
        "init_from=hf://user/digits",
        f"| train samples | {best['metrics']['data']['train']['samples']} |",
        'runner.load("hf://user/digits")',
    ):
        assert said in card.replace("'", ""), said

    for extra in ("", "@main"):
        step, classes, shape, kind, metrics = scripted(LOAD.format(extra))
        assert (step, classes, shape) == (record["global_step"], record["classes"], [1, 8, 8])
        assert (kind, metrics) == ("raw", best["metrics"]["last"])
    # Without the hub, the cache has it
    hub.stop()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = []
    for place in ("hf://user/digits", str(trained)):
        result = spawn(
            "predict", f"ckpt_path={place}", "input=image.png", "output=rows.csv", "threads=1", "probabilities=true"
        )
        assert result.returncode == 0, result.stderr
        rows.append(Path("rows.csv").read_text())
    assert rows[0] == rows[1]
    sums = []
    for place in ("hf://user/digits", str(trained)):
        result = spawn("train", f"init_from={place}", *SMALL, *QUIET, "json=true")
        assert result.returncode == 0, result.stderr
        sums.append(json.loads(result.stdout.splitlines()[-1]))
    assert sums[0]["weights_sha256"] == sums[1]["weights_sha256"]
    assert sums[0]["init_from"]["weights_sha256"] == sums[1]["init_from"]["weights_sha256"]
    assert "ckpt_path: " in refused("train", "ckpt_path=hf://user/digits", "epochs=9", *QUIET[:4])
    assert "init_from: hf://user/digits@other: " in refused("train", "init_from=hf://user/digits@other", *SMALL, *QUIET)
    # A run that began with it is resumed without it, and nothing asks for it
    monkeypatch.setenv("HF_HOME", "empty")
    resumed = spawn("train", f"ckpt_path={sums[0]['directory']}", "max_steps=2", *QUIET[:4], "json=true")
    assert resumed.returncode == 0, resumed.stderr
    assert refused("predict", "ckpt_path=hf://user/digits", "input=image.png")


def test_files_of_strangers_run_nothing_and_are_bounded(hub: Hub, refused: Any, spawn: Any, trained: Path) -> None:
    best, target = read(trained / "checkpoints" / "best.safetensors"), Path("ran").absolute()
    bomb = pickle.dumps(forging.Bomb(target))

    def evil(config: dict[str, Any]) -> None:
        config["model"] = {"_target_": "os.system", "command": f"touch {target}"}

    hub.repositories = {
        "evil/pickle": {"main": {"pytorch_model.bin": bomb, "model.pt2": bomb}},
        "evil/renamed": {"main": {"model.safetensors": bomb}},
        "evil/config": {"main": {"model.safetensors": forging.with_config(best, evil)}},
        "evil/large": {"main": {"model.safetensors": bomb}},
        "other/weights": {"main": {"model.safetensors": save(best["model"])}},
    }
    hub.sizes = {"evil/large": 2**37}
    for words, reason in (
        ("evil/pickle", "Entry Not Found"),
        ("evil/renamed", "model.safetensors"),
        ("evil/config", "'os.system'"),
        ("evil/large", "137,438,953,472 bytes, and at most"),
        ("evil/none", "Repository Not Found"),
        ("other/weights@v2", "Revision Not Found"),
        ("../../etc", "Repo id must"),
    ):
        said = refused("predict", f"ckpt_path=hf://{words}", "input=image.png", "threads=1")
        assert reason in said, said
        if words != "evil/config":  # of a config, init_from takes nothing
            said = refused("train", f"init_from=hf://{words}", *SMALL, *QUIET)
            assert said.startswith("error: init_from: "), said
            assert "model.safetensors" in said
    assert not target.exists()
    assert not [each for each in hub.asked if "evil/large" in each and each.startswith("GET")]
    # Weights of other programs start a run, as a file of them does
    result = spawn("train", "init_from=hf://other/weights", *SMALL, *QUIET)
    assert result.returncode == 0, result.stderr


def test_what_the_hub_refuses_is_a_sentence(
    hub: Hub, refused: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("export", f"ckpt_path={trained}", "threads=1")
    hub.repositories["user/there"] = {"main": {}}
    for name, token, reason in (
        ("user/there", TOKEN, "You already created this model repo"),
        ("others/digits", TOKEN, "403 Forbidden"),
        ("user/digits", "hf_wrong", "401"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        said = refused(*words, f"hub={name}")
        assert said.startswith(f"error: hub: {name}: "), said
        assert reason in said
        assert f"hf upload {name}" in said
    assert hub.repositories == {"user/there": {"main": {}}}
    hub.stop()
    silent = f"http://127.0.0.1:{hub.port} does not answer"
    assert f"error: hub: user/digits: {silent}" in refused(*words, "hub=user/digits")
    said = refused("predict", "ckpt_path=hf://user/digits", "input=image.png")
    assert f"error: ckpt_path: hf://user/digits: {silent}" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refused(*words, "hub=user/digits")
    assert "error: ckpt_path: hf://user/digits: " in refused("predict", "ckpt_path=hf://user/digits", "input=image.png")


def test_the_files_are_written_without_the_hub(
    accepted: Any, rejected: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    hidden = "huggingface_hub"
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == hidden else find(asked))
    words = ("export", f"ckpt_path={trained}", "threads=1", "hub=user/digits")
    for said in (rejected(*words).err, rejected("predict", "ckpt_path=hf://user/digits", "input=.").err):
        assert "needs packages that are not installed: huggingface_hub" in said
        assert "runner[huggingface]" in said
    assert not (trained / "export").exists(), "a missing package is reported before anything is written"
    others = ("format=torch_export", "include_preprocessing=true", "split=train")
    accepted(*words, "push=false", "output=shared", *others)
    assert "| train/accuracy | " in Path("shared/README.md").read_text()
    names = {path.name for path in Path("shared").iterdir()}
    assert names == {"model.safetensors", "model.pt2", "model.json", "config.yaml", "README.md"}
    # What was written is a checkpoint of a model, which is evaluated, and no state of a run
    accepted("eval", "ckpt_path=shared/model.safetensors", "threads=1")
    assert (
        "has no state of a training"
        in rejected("train", "ckpt_path=shared/model.safetensors", "epochs=9", *QUIET[:4]).err
    )


def test_an_average_is_shared_as_the_weights_without_passwords(train: Any, json_of: Any) -> None:
    noted = ("notes='see https://me:opensesame@host/x'", "evaluate.test=false")
    last = train(*SMALL, "ema=0.9", *noted).directory / "checkpoints" / "last.safetensors"
    words = ("threads=1", "hub=user/digits", "push=false", "weights=averaged", "output=shared")
    record = json_of("export", f"ckpt_path={last}", *words)
    shared = read(Path("shared/model.safetensors"))
    assert record["weights"] == "ema"
    assert shared["averaged"] is None
    assert all(torch.equal(shared["model"][name], value) for name, value in read(last)["averaged"]["weights"].items())
    files = {path.name: path.read_bytes() for path in Path("shared").iterdir()}
    # The card has the metrics of these weights, and not those of the raw ones
    card = files["README.md"].decode()
    assert f"| val/ema_accuracy | {shared['metrics']['last']['val/ema_accuracy']:.4g} |" in card
    assert "| val/accuracy" not in card
    assert b"https://me:***@host" in files["config.yaml"]
    assert not [name for name, content in files.items() if b"opensesame" in content]


def test_the_card_says_that_metrics_are_of_an_earlier_evaluation(accepted: Any, trained: Path) -> None:
    # As a killed run leaves it: trained for another step after the evaluation
    contents, folder = read(trained / "checkpoints" / "best.safetensors"), trained / "checkpoints"
    contents["position"]["global_step"] += 1
    write(folder / "step_later.safetensors", contents)
    accepted("export", f"ckpt_path={folder}/step_later.safetensors", "threads=1", "hub=user/digits", "push=false")
    card = (trained / "export" / "README.md").read_text()
    assert f"| val/accuracy (last evaluation) | {contents['metrics']['last']['val/accuracy']:.4g} |" in card
    assert "| val/accuracy |" not in card
    assert "test/" not in card  # which was of other weights


def test_the_card_of_a_resumed_run_names_the_command_that_began_it(train: Any, accepted: Any) -> None:
    first = train(*SMALL, "optimizer.lr=0.002").directory
    last = train(f"ckpt_path={first}", "epochs=2").directory

    def commands() -> list[str]:
        accepted("export", f"ckpt_path={last}", "threads=1", "hub=user/digits", "push=false", "output=shared")
        training = Path("shared/README.md").read_text().partition("## Training")[2].partition("## Facts")[0]
        return [line for line in training.splitlines() if line.startswith("python -m runner train ")]

    began, resumed = commands()
    assert "optimizer.lr=0.002" in began
    assert (f"ckpt_path={first}" in resumed, "epochs=2" in resumed) == (True, True)
    shutil.rmtree(first)
    assert commands() == [resumed]


def test_a_model_that_differs_is_written_and_not_uploaded(hub: Hub, spawn: Any, trained: Path) -> None:
    contents = read(trained / "checkpoints" / "best.safetensors")
    next(iter(contents["model"].values())).fill_(math.nan)
    write(trained / "checkpoints" / "best.safetensors", contents)
    result = spawn("export", f"ckpt_path={trained}", "threads=1", "hub=user/digits")
    assert (result.returncode, "differs from the model" in result.stderr) == (1, True), result.stderr
    assert (trained / "export" / "README.md").is_file()
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("word", "key"),
    [("push=false", "push"), ("hub=digits", "hub"), ("hub=hf://user/digits", "hub"), ("hub=user/a/b", "hub")],
)
def test_keys_of_the_hub_that_cannot_be(word: str, key: str, problems: Any) -> None:
    assert set(problems(word, verb="export")) == {key}
