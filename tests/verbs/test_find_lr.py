"""`find-lr` suggests a rate that trains well, and `lr` sets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from extended import some

from runner.checkpoint.file import read
from runner.run.find_rate import find_rate

SMALL = ("threads=1", "model=mlp", "model.hidden=[32]", "transform=none", "scheduler=constant")
QUICK = ("logger=none", "log.progress=false", "log.curves=false", "epochs=1", "evaluate.test=false")
# Steeper than most: rates of a digit or two are enough to tell.
STEPS = ("num_steps=40", "start=1e-4", "end=10")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return read(directory / "checkpoints" / "last.safetensors")["model"]


def test_it_leaves_a_picture_the_numbers_and_the_override_to_use(accepted: Any) -> None:
    result = accepted("find-lr", *SMALL, *STEPS)
    assert result.directory.parent == Path("outputs/find-lr")
    assert (result.directory / "lr_range.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads((result.directory / "lr_range.json").read_text())
    line = next(line for line in result.out.splitlines() if line.startswith("use "))
    assert line.split()[1] == found["overrides"] == f"optimizer.lr={found['recommended']:g}"
    curve = found["curve"]
    assert curve["rates"][0] == pytest.approx(1e-4)
    assert len(curve["rates"]) == len(curve["losses"]) == len(curve["smoothed"]) <= 40
    assert found["recommended"] == pytest.approx(found["suggestions"]["edge"] / 5, rel=0.06)
    assert min(curve["smoothed"]) < 0.7 * curve["smoothed"][0]
    assert "recommended" in result.out


def test_json_is_one_object_and_the_folder_is_ones_own(run: Any, workdir: Path) -> None:
    result = run("find-lr", *SMALL, *STEPS, "json=true", "output=mine")
    found = json.loads(result.out)
    assert found["folder"] == "mine"
    assert yaml.safe_load((workdir / "mine" / "config.yaml").read_text())["num_steps"] == 40
    assert found["command"][-2:] == ["json=true", "output=mine"]


def test_every_rate_of_an_optimizer_is_scaled_alike(run: Any) -> None:
    result = run("find-lr", *SMALL, *STEPS, "optimizer=muon", "optimizer.adamw_lr=0.01", "json=true")
    settings = dict(word.split("=") for word in json.loads(result.out)["overrides"].split())
    ratio = float(settings["optimizer.adamw_lr"]) / float(settings["optimizer.lr"])
    assert ratio == pytest.approx(0.01 / 0.02, rel=0.1)


def test_a_checkpoint_is_searched_from_its_weights(run: Any, train: Any) -> None:
    trained = train(*SMALL, "epochs=4", "evaluate.test=false")
    result = run("find-lr", f"ckpt_path={trained.directory}", *STEPS, "json=true")
    assert result.status in (0, 2)
    fresh = json.loads(run("find-lr", *SMALL, *STEPS, "json=true").out)
    if result.status == 0:
        assert json.loads(result.out)["curve"]["losses"][0] < 0.5 * fresh["curve"]["losses"][0]
    else:  # a model that is trained already may not get better at any rate
        assert "the loss hardly falls" in result.err


def test_lr_is_short_for_the_rate_of_the_optimizer_and_may_change_on_resuming(train: Any) -> None:
    short, long = (train(*SMALL, *QUICK, "max_steps=5", f"{key}=0.02") for key in ("lr", "optimizer.lr"))
    assert short.summary["weights_sha256"] == long.summary["weights_sha256"]
    configs = [yaml.safe_load((each.directory / "config.yaml").read_text()) for each in (short, long)]
    assert configs[0] == configs[1]
    changed = train(f"ckpt_path={short.directory}", "lr=0.001", "max_steps=6")
    config = yaml.safe_load((changed.directory / "config.yaml").read_text())
    assert (config["lr"], config["optimizer"]["lr"]) == (None, 0.001)


def test_two_rates_on_a_line_are_a_mistake(problems: Any) -> None:
    assert problems("lr=0.1", "optimizer.lr=0.2")["lr"].message == "is 0.1, and optimizer.lr is given too"
    assert not problems("lr=null", "optimizer.lr=0.2")
    assert problems("lr=-1")["lr"].allowed == "a number above 0 or null"


@pytest.mark.extended
def test_the_rate_that_is_found_trains_as_well_as_the_preset(train: Any, run: Any) -> None:
    words = ("epochs=8", "data=digits", "model=small_cnn")
    rate = json.loads(run("find-lr", *words, "json=true").out)["overrides"]
    preset, found = (train(*words, *more).summary["test"]["accuracy"] for more in ((), (rate,)))
    assert found > preset - 0.01
    assert found > 0.97


@pytest.mark.extended
def test_a_checkpoint_is_searched_with_what_is_trained_there(
    run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []

    def look(training: Any, *settings: Any) -> Any:
        training.state.train()
        frozen.append(not all(weight.requires_grad for weight in training.model.parameters()))
        return find_rate(training, *settings)

    monkeypatch.setattr("runner.verbs.find_lr.find_rate", look)
    freezing = ("freeze=all-but-head", "unfreeze_at=400")
    fresh = run("find-lr", *SMALL, *STEPS, *freezing)
    assert "is never trained" not in fresh.out + fresh.err
    words = ("limit.train_batches=1", "evaluate.every_epochs=null", "epochs=3", "evaluate.test=false")
    trained = train(*SMALL, *words, "freeze=all-but-head", "unfreeze_at=2ep")
    run("find-lr", f"ckpt_path={trained.directory}", *STEPS)
    assert frozen == [True, False]


@pytest.mark.parametrize("kind", some(["ema=0.9", "swa=0.75"], 1))
def test_averages_that_decide_what_is_best_are_no_obstacle(kind: str, accepted: Any) -> None:
    name = f"val/{kind.partition('=')[0]}_accuracy"
    for verb, words in (("find-lr", STEPS), ("profile", ("warmup_steps=0", "steps=2", "trace_steps=0"))):
        accepted(verb, *SMALL, *words, kind, f"checkpoint.monitor={name}")
