"""`eval` needs a checkpoint alone, and reports to the last digit what training reported."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from runner.api import evaluate as api_evaluate
from runner.api import load
from runner.checkpoint.file import read
from runner.config.schema.verbs import Eval
from runner.run import from_checkpoint as _checkpoint
from runner.tracking.formats import digits
from runner.tracking.verb_report import Report

SMALL = (
    "data=synthetic", "data.dataset.samples=80", "data.dataset.classes=4", "data.image_size=8", "data.batch_size=8",
    "epochs=3", "model=small_cnn", "model.width=4", "transform=standard", "optimizer.lr=0.02", "data.split.val=0.3",
)  # fmt: skip
EVAL = ("eval", "threads=1")


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confusion matrices take half of an evaluation, so they are only drawn where a test asks for `pictures`."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("runner.tracking.plots.confusion_matrix", lambda *_: None)


@pytest.fixture
def pictures() -> None:
    """Draw confusion matrices."""


@pytest.fixture
def trained(train_once: Callable[..., Any]) -> Any:
    return train_once(*SMALL)


@pytest.fixture
def evaluate(json_of: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return functools.partial(json_of, *EVAL)


def test_eval_repeats_what_training_reported_to_the_last_digit(trained: Any, evaluate: Any) -> None:
    best, last = trained.summary["best"], trained.directory / "checkpoints" / "last.safetensors"
    test = evaluate(f"ckpt_path={trained.directory}")
    assert test["metrics"] == trained.summary["test"]
    assert test["global_step"] == best["global_step"]
    by_step = {m["global_step"]: m for m in trained.metrics if m["split"] == "val"}
    for path in (trained.directory, last):
        val = evaluate(f"ckpt_path={path}", "split=val")
        assert val["metrics"] == {name: by_step[val["global_step"]][name] for name in ("loss", "accuracy")}
    assert evaluate(f"ckpt_path={last}", "split=val")["metrics"] == trained.summary["last"]
    assert evaluate(f"ckpt_path={last}")["weights_sha256"] == trained.summary["weights_sha256"]


# Training diverges and the largest loss counts as the best, so the best step is not the last
TWICE = (*SMALL, "name=twice", "hydra.run.dir=outputs/twice/first", "optimizer.lr=0.1", "checkpoint.monitor=loss",
         "checkpoint.mode=max")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ((), ()),
        (("ema=0.5",), ()),
        (("swa=1",), ()),
        (("data.split.val=0",), ()),
        (("data.split.val=0", "ema=0.5"), ()),
        (("evaluate.every_epochs=null",), ()),
        ((), ("hydra.run.dir=outputs/twice/second", "epochs=5")),
        # The metric changes and nothing is evaluated any more: what was best before is not
        (("ema=0.5",), ("hydra.run.dir=outputs/twice/first", "epochs=4", "ema=null", "evaluate.every_epochs=null")),
    ],
    ids=["best", "ema", "swa", "no split", "no split, ema", "not evaluated", "resumed", "other metric"],
)
def test_last_repeats_the_test_of_the_newest_run(
    words: tuple[str, ...], again: tuple[str, ...], train: Any, evaluate: Any
) -> None:
    result = train(*TWICE, *words)
    if again:
        result = train(f"ckpt_path={result.directory}", *again)
    found, tested = evaluate("ckpt_path=last", "name=twice"), result.summary
    assert found["metrics"] == {name: tested["test"][name] for name in ("loss", "accuracy")}
    assert (found["global_step"], Path(found["checkpoint"]).parents[1]) == (tested["test_step"], result.directory)


def test_every_verb_takes_the_best_weights_of_the_newest_run_and_says_where_the_last_ones_are(
    train: Any, accepted: Any
) -> None:
    folder = train(*TWICE).directory / "checkpoints"
    best, last = (read(folder / f"{name}.safetensors")["position"]["global_step"] for name in ("best", "last"))
    assert best < last
    common = ("ckpt_path=last", "name=twice", "threads=1")
    for verb, *more in (
        ["eval"], ["predict", "input=test"], ["export", "format=safetensors"], ["inspect", "what=layers"]
    ):  # fmt: skip
        shown = accepted(verb, *common, *more).out
        assert f"best, step {best} (last: step {last}, ckpt_path={folder / 'last.safetensors'})" in shown, verb
    named = accepted("eval", f"ckpt_path={folder / 'last.safetensors'}", "threads=1").out
    assert f"last, step {last} (best: step {best}, ckpt_path={folder / 'best.safetensors'})" in named
    assert load("last", "name=twice").step == api_evaluate("last", "name=twice", "threads=1")["global_step"] == best
    started = train(*SMALL, "epochs=1", "name=twice", "init_from=last").out
    assert f"best, step {best} (last: step {last}, init_from={folder / 'last.safetensors'})" in started


def test_the_batch_size_of_an_evaluation_and_workers_change_nothing_worth_a_digit(trained: Any, evaluate: Any) -> None:
    whole = evaluate(f"ckpt_path={trained.directory}")
    small = evaluate(
        f"ckpt_path={trained.directory}", "evaluate.batch_size=3", "data.placement=disk", "data.num_workers=1"
    )
    assert small["metrics"]["accuracy"] == whole["metrics"]["accuracy"]
    assert small["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-6)
    assert small["confusion"] == whole["confusion"]


@pytest.mark.usefixtures("pictures")
def test_the_confusion_matrix_counts_every_sample_and_is_drawn(trained: Any, evaluate: Any) -> None:
    found = evaluate(f"ckpt_path={trained.directory}")
    matrix = torch.tensor(found["confusion"])
    assert int(matrix.sum()) == found["samples"] == 20
    assert int(matrix.trace()) / 20 == pytest.approx(found["metrics"]["accuracy"])
    shares = (matrix.diag() / matrix.sum(1)).tolist()
    assert list(found["per_class"].values()) == pytest.approx(shares)
    assert list(found["per_class"]) == ["0", "1", "2", "3"]
    written, picture = (Path(path) for path in found["written"])
    assert json.loads(written.read_text())["metrics"] == found["metrics"]
    assert picture == trained.directory / "plots" / "confusion_test.png"
    with Image.open(picture) as image:
        image.verify()


@pytest.mark.usefixtures("pictures")
def test_people_get_the_same_numbers_in_full(trained: Any, accepted: Any) -> None:
    result = accepted(*EVAL, f"ckpt_path={trained.directory}", "tta=[five_crop]")
    averaged = json.loads((trained.directory / "eval_test.json").read_text())["tta"]["metrics"]
    for value in (*trained.summary["test"].values(), averaged["loss"]):
        assert digits(value) in result.out
    assert "with five_crop (mean of logits)" in result.out
    assert "confusion_test.png" in result.out


def test_a_checkpoint_moved_alone_still_evaluates(
    trained: Any, evaluate: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = workdir / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(trained.directory / "checkpoints" / "best.safetensors", elsewhere / "model.pt")
    expected = trained.summary["test"]
    shutil.rmtree(workdir / "outputs")
    monkeypatch.chdir(elsewhere)
    found = evaluate("ckpt_path=model.pt")
    assert found["metrics"] == expected
    assert Path(found["written"][0]).parent.parent == Path("outputs/evaluations")


def test_the_checkpoint_and_the_training_files_are_not_touched(trained: Any, evaluate: Any) -> None:
    def state() -> dict[str, bytes]:
        files = [path for path in trained.directory.rglob("*") if path.is_file()]
        return {path.name: path.read_bytes() for path in files if not path.name.startswith(("eval_", "confusion_"))}

    before = state()
    evaluate(f"ckpt_path={trained.directory}")
    assert state() == before


def test_other_data_is_evaluated_with_the_training_statistics_and_leaves_the_evaluation_of_its_own_data_alone(
    trained: Any, evaluate: Any
) -> None:
    checkpoint = f"ckpt_path={trained.directory}"
    own = evaluate(checkpoint)
    before = (trained.directory / "eval_test.json").read_bytes()
    other = evaluate(checkpoint, "data.dataset.seed=5", "data.dataset.samples=200", "output=other")
    assert (other["samples"], Path(other["written"][0])) == (50, Path("other/eval_test.json"))
    assert other["metrics"] != own["metrics"]
    assert evaluate(checkpoint, "data.name=others", "data.dataset.seed=5")["metrics"]["loss"] != own["metrics"]["loss"]
    assert (trained.directory / "eval_test.json").read_bytes() == before
    assert (trained.directory / "eval_others_test.json").is_file()
    selected = evaluate(
        checkpoint, "data=synthetic", "data.dataset.samples=80", "data.dataset.classes=4", "data.image_size=8",
        "data.split.val=0.3",
    )  # fmt: skip
    assert selected["metrics"] == own["metrics"], "the same data said in full is the same data"


def test_regression_has_its_metrics_no_confusion_and_no_mean_of_probabilities(
    train_once: Any, evaluate: Any, rejected: Any
) -> None:
    result = train_once(*SMALL, "data.dataset.kind=regression", "task=regression", "loss=mse")
    found = evaluate(f"ckpt_path={result.directory}", "tta=flip")
    assert found["metrics"] == result.summary["test"]
    assert not {"confusion", "per_class"} & set(found)
    refused = rejected(*EVAL, f"ckpt_path={result.directory}", "tta=flip", "tta_mean=probabilities")
    assert "tta_mean: this task has no classes" in refused.err


def test_a_limited_evaluation_counts_the_samples_that_it_used(trained: Any, evaluate: Any) -> None:
    limited = evaluate(f"ckpt_path={trained.directory}", "limit.eval_batches=1", "evaluate.batch_size=7")
    assert limited["samples"] == 7
    assert sum(map(sum, limited["confusion"])) == 7


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_augmented_metrics_stand_beside_the_plain_ones_and_are_of_the_mean_of_the_views(
    mean: str, trained: Any, evaluate: Any, compose: Any
) -> None:
    plain = evaluate(f"ckpt_path={trained.directory}")
    found = evaluate(f"ckpt_path={trained.directory}", "tta=flip,vflip", f"tta_mean={mean}")
    assert found["metrics"] == plain["metrics"]
    assert found["confusion"] == plain["confusion"]
    assert found["tta"]["views"] == ["flip", "vflip"]
    resolved = _checkpoint.resolve_checkpoint(compose(f"ckpt_path={trained.directory}", verb="eval"), Eval)
    splits = resolved.data(torch.device("cpu"))
    _, model = resolved.restore_model(splits, torch.device("cpu"))
    with torch.inference_mode():
        (batch,) = splits.test.loader.batches(0, 0, 1)
        views = torch.stack([model(batch.images.flip(axes)) for axes in ((), (-1,), (-2,), (-1, -2))])
        logits = views.mean(0) if mean == "logits" else views.softmax(2).mean(0).log()
    assert found["tta"]["metrics"]["loss"] == pytest.approx(float(F.cross_entropy(logits, batch.targets)), rel=1e-5)
    right = (logits.argmax(1) == batch.targets).double().mean()
    assert found["tta"]["metrics"]["accuracy"] == pytest.approx(float(right))
    assert found["tta"]["metrics"]["loss"] != found["metrics"]["loss"]


def test_a_loss_that_is_not_of_softmax_is_left_out_of_averaged_probabilities(trained: Any, accepted: Any) -> None:
    words = (*EVAL, f"ckpt_path={trained.directory}", "tta=flip", "tta_mean=probabilities")
    result = accepted(*words, "loss=bce", "json=true")
    assert "warning: tta_mean=probabilities: the averaged views have no loss" in result.err
    found = json.loads(result.out)
    assert list(found["tta"]["metrics"]) == ["accuracy"]
    assert found["metrics"]["loss"] > 0
    assert "accuracy" in accepted(*words, "loss=mse").out


def test_numbers_that_are_none_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert Report(as_json=True).json({"loss": float("nan")}, accuracy=float("inf"))
    assert capsys.readouterr().out == '{"loss": null, "accuracy": null}\n'
