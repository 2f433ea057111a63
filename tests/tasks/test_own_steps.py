"""Samples that are not pairs of image and target, and tasks that compute their own steps, through the program."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extended import some
from safetensors.torch import load_file

from runner.checkpoint.file import read, write
from runner.run.model import DataFacts, build_model
from runner.tasks.task import Task

COMMON = (
    "transform=none", "~model.dropout", "~model.width", "epochs=2", "data.batch_size=16", "data.num_workers=0",
    "scheduler=constant", "logger=none",
)  # fmt: skip
COLLATE = "data.collate._target_=own_steps.scenes"
VECTORS = (
    *COMMON, "data=own", "data.images=[]", "data.dataset._target_=own_steps.Digits", "model._target_=own_steps.VAE",
    "task._target_=own_steps.Reconstruction", "loss=none", "log.every_steps=1",
)  # fmt: skip
NORMED = (*VECTORS, "model._target_=own_steps.Normed")
BOXES = (
    *COMMON, "data.images=[image]", "data.normalize.mean=[0.0]", "data.normalize.std=[1.0]",
    "data.dataset._target_=own_steps.Scenes", "model._target_=own_steps.Pooled", "task._target_=own_steps.CountBoxes",
)  # fmt: skip
PAIRS = (
    "transform=none", "epochs=1", "data=own", "data.images=[]", "data.dataset._target_=own_steps.Pairs", "task.num_classes=3",
    "model=mlp", "model.hidden=[8]", "model.in_channels=1", "model.image_size=[8,8]",
)  # fmt: skip
SAID = ("logger=none", "data=digits", "transform=none", "loss=none", "epochs=1", "task._target_=own_steps.Said")
MLP = ("model=mlp", "model.hidden=[8]")
FAILING = (*SAID, *MLP, "task._target_=own_steps.Failing", "data.batch_size=1")
CONTRAST = ("logger=none", "model=mlp", "transform=none", "loss=none", "task._target_=own_steps.Contrast")


def test_a_task_with_a_step_of_its_own_trains_logs_its_terms_and_is_tested(train: Callable[..., Any]) -> None:
    result = train(*VECTORS, "epochs=10", "optimizer.lr=0.01")
    steps = [record for record in result.metrics if record["split"] == "train"]
    assert all(0 <= record["divergence"] < record["loss"] for record in steps)
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"], "nothing was learned"
    assert result.summary["best"]["metric"] == "val/loss"
    assert set(result.summary["test"]) == {"loss"}


@pytest.mark.parametrize("words", some([VECTORS, BOXES], 1), ids=["vectors", "boxes"])
def test_workers_and_resumes_give_the_same_weights(train: Callable[..., Any], words: tuple[str, ...]) -> None:
    whole = train(*words)
    expected = whole.summary["weights_sha256"]
    assert train(*words, "data.num_workers=2").summary["weights_sha256"] == expected
    part = train(*words, "max_steps=3", "name=part")
    resumed = train(f"ckpt_path={part.directory}", "max_steps=null")
    assert resumed.summary["weights_sha256"] == expected
    assert resumed.summary["test"] == whole.summary["test"]


def test_modules_that_a_task_adds_are_trained_averaged_and_saved(train: Callable[..., Any], printed: Any) -> None:
    result = train(*BOXES, "ema=0.9", "epochs=1")
    saved = load_file(next((result.directory / "checkpoints").glob("step_*.safetensors")))
    assert {"model.features.1.weight", "head.weight"} <= saved.keys()
    assert not saved["head.weight"].equal(saved["averaged/weights/head.weight"])
    evaluated = printed("eval", f"ckpt_path={result.directory}", "split=test")
    assert evaluated["metrics"] == result.summary["test"]


def test_a_task_goes_on_from_the_weights_after_each_step(train: Callable[..., Any]) -> None:
    words = (*BOXES, "task._target_=own_steps.MomentumHead", "max_steps=1", "dtype=float64")
    start, after = (
        load_file(train(*words, rate).directory / "checkpoints" / "last.safetensors")
        for rate in ("optimizer.lr=0", "optimizer.lr=0.1")
    )
    expected = start["slow.weight"].lerp(after["head.weight"], 0.1)
    torch.testing.assert_close(after["slow.weight"], expected, rtol=0, atol=1e-12)
    assert not torch.equal(start["slow.weight"], after["slow.weight"])


def test_a_ramp_and_a_momentum_schedule_follow_the_progress_of_killed_accumulated_and_distributed_runs(
    train: Callable[..., Any], killed: Callable[..., Any]
) -> None:
    # 67 samples are 4 steps in each of 2 epochs
    words = (
        *BOXES, "task._target_=own_steps.Scheduled", "data.drop_last=true", "dtype=float64", "log.every_steps=1",
        "threads=1", "checkpoint.every_steps=1", "checkpoint.min_seconds=0",
    )  # fmt: skip
    whole = train(*words)
    resumed = train(f"ckpt_path={killed(6, *words)}", "callbacks=none")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    one, *others = whole, train(*words, "devices=2"), train(*words, "data.batch_size=8", "accumulate=2")
    weights = load_file(one.directory / "checkpoints" / "last.safetensors")
    for each in (one, *others):
        steps = [row for row in each.metrics if row["split"] == "train"]
        told = [tuple(row[name] for name in ("at", "of", "epochs")) for row in steps]
        assert told == [(step, 8, step // 4) for step in range(8)]
        found = load_file(each.directory / "checkpoints" / "last.safetensors")
        for name in ("model.features.1.weight", "head.weight", "slow.weight"):
            torch.testing.assert_close(found[name], weights[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("task", some(["CountBoxes", "MeanOverBoxes", "MomentumHead"], 1))
def test_ranks_and_accumulation_train_the_weights_of_one_large_batch_to_rounding(
    train: Callable[..., Any], task: str
) -> None:
    words = (*BOXES, "epochs=1", "dtype=float64", f"task._target_=own_steps.{task}", "max_steps=4")
    small = ("accumulate=3", "data.batch_size=5")
    divided = (("devices=2", "data.batch_size=15"), small, ("devices=2", *small))
    one, *others = (train(*words, *each) for each in (("data.batch_size=15",), *divided))
    weights = load_file(one.directory / "checkpoints" / "last.safetensors")
    for other in others:
        found = load_file(other.directory / "checkpoints" / "last.safetensors")
        for name in weights.keys() & {"model.features.1.weight", "head.weight", "slow.weight"}:
            torch.testing.assert_close(found[name], weights[name], rtol=0, atol=1e-10)
        assert other.summary["test"]["loss"] == pytest.approx(one.summary["test"]["loss"], abs=1e-10)


def test_a_loss_of_gathered_rows_is_that_of_the_whole_batch_on_any_number_of_ranks(
    train: Callable[..., Any], refused: Callable[..., None]
) -> None:
    # Of 67 samples; a batch of 22 is divided unevenly, and the last one has a single sample, so the other ranks have none.
    words = (*BOXES, "task._target_=own_steps.Compared", "epochs=1", "dtype=float64", "log.every_steps=1")
    one, ranks = (train(*words, "data.batch_size=22", f"devices={count}") for count in (1, 3))
    steps = [[row for row in each.metrics if row["split"] == "train"] for each in (one, ranks)]
    assert [row["rows"] for row in steps[1]] == [row["rows"] for row in steps[0]]
    assert [row["loss"] for row in steps[1]] == pytest.approx([row["loss"] for row in steps[0]], abs=1e-10)
    found, weights = (load_file(each.directory / "checkpoints" / "last.safetensors") for each in (ranks, one))
    torch.testing.assert_close(found["head.weight"], weights["head.weight"], rtol=0, atol=1e-10)
    refused((*words, "accumulate=2"), "accumulate", "runner.gather")


def test_further_scalars_of_an_evaluation_are_means_and_may_decide_which_one_is_best(
    train: Callable[..., Any], printed: Any, refused: Callable[..., None]
) -> None:
    words = (*BOXES, "task._target_=own_steps.Measured", "dtype=float64", "evaluate.batch_size=7")
    result, ranks = train(*words), train(*words, "devices=2")
    assert result.summary["best"]["metric"] == "val/first"
    seen = printed("eval", f"ckpt_path={result.directory}", "split=val")["metrics"]
    whole = train(*words, "evaluate.batch_size=96").summary
    assert result.summary["test"]["first"] == pytest.approx(whole["test"]["first"], abs=1e-9)
    assert seen["first"] == result.summary["best"]["value"]
    assert ranks.summary["test"] == result.summary["test"]
    assert train(*words, "checkpoint.monitor=loss").summary["best"]["metric"] == "val/loss"
    refused((*words, "checkpoint.monitor=first_one"), "checkpoint.monitor", "val/first")
    refused((*words, "task._target_=own_steps.MeasuredAsMetric"), "task", "gives 'wrong'")
    refused((*words, "task._target_=own_steps.MeasuredAsWeight"), "task", "gives 'weight'")


def test_an_evaluation_draws_the_same_random_numbers_each_time(train: Callable[..., Any], printed: Any) -> None:
    words = (*VECTORS, "task._target_=own_steps.Noisy", "evaluate.batch_size=4")
    whole, ranks = train(*words), train(*words, "devices=2")
    first, second = (record["loss"] for record in whole.metrics if record["split"] == "val")
    assert first == second
    assert ranks.summary["test"] == whole.summary["test"]
    assert printed("eval", f"ckpt_path={whole.directory}", "split=test")["metrics"] == whole.summary["test"]


def test_a_checkpoint_with_damaged_terms_is_a_sentence(train: Callable[..., Any], rejected: Any) -> None:
    path = train(*VECTORS, "epochs=1", "log.every_steps=3").directory / "checkpoints" / "last.safetensors"
    contents = read(path)
    contents["metrics"]["terms"] = {"divergence": {"sum": torch.zeros(2), "samples": 3}}
    write(path, contents)
    assert "metrics.terms is not running means by name" in rejected("train", f"ckpt_path={path}", "epochs=2").err


@pytest.mark.extended
def test_a_model_that_was_trained_with_a_projection_is_used_without_it(
    train: Callable[..., Any], accepted: Any, refused: Callable[..., None]
) -> None:
    words = (*CONTRAST, "model.hidden=[16]")
    trained = train(*words, "epochs=3")
    assert trained.summary["last"]["loss"] < 4
    checkpoint = f"ckpt_path={trained.directory}"
    accepted("predict", checkpoint, "input=test", "output=rows.csv")
    refused((checkpoint, "tta=hflip"), "tta", "averages", verb="eval")
    probed = train("model=mlp", "model.hidden=[16]", "transform=none", "epochs=1", f"init_from={trained.directory}")
    assert probed.summary["init_from"]["tensors"] == 4
    refused((*words, "compile=step"), "compile", "is step")


def test_a_task_gets_the_names_of_the_classes_and_the_model_their_number(
    train: Callable[..., Any], printed: Any, accepted: Any
) -> None:
    result = train(*SAID, *MLP)
    stored = (result.directory / "config.yaml").read_text()
    assert "num_classes: 10" in stored
    assert "classes: [" not in stored
    assert "classes:\n" not in stored
    assert load_file(result.directory / "checkpoints" / "last.safetensors")["head.weight"].shape == (10, 8)
    found = printed("eval", f"ckpt_path={result.directory}", "split=test")
    assert found["metrics"]["loss"] == result.summary["test"]["loss"]
    accepted("export", f"ckpt_path={result.directory}", "format=torch_export")  # of the checkpoint alone
    other = train(*SAID, *MLP, "model.num_classes=12")
    assert load_file(other.directory / "checkpoints" / "last.safetensors")["head.weight"].shape == (12, 8)


def test_a_number_of_classes_that_no_task_asks_for_is_only_given_to_new_models_that_need_one(
    train: Callable[..., Any], printed: Any
) -> None:
    for model, layers in (("Backbone", {"1"}), ("Numbered", {"1", "2"})):
        words = (*SAID, "model=null", f"model._target_=own_steps.{model}", "task._target_=own_steps.Seven")
        result = train(*words)
        weights = load_file(result.directory / "checkpoints" / "last.safetensors")
        assert {name.partition(".")[0] for name in weights if name.endswith(".weight")} == layers
        found = printed("eval", f"ckpt_path={result.directory}", "split=test")
        assert found["metrics"]["loss"] == result.summary["test"]["loss"]
        # The same words again, which do not have the number that the run stored
        assert train(*words, f"ckpt_path={result.directory}", "epochs=2").summary["status"] == "finished"
    assert weights["2.weight"].shape == (10, 12)
    # Checkpoints from before have no number, and were made without one
    config: Any = SimpleNamespace(model={"_target_": "own_steps.Numbered"}, adapters=SimpleNamespace(rank=None))
    facts = DataFacts(("cat", "dog"), 1, (8, 8))
    old = build_model(config, Task(), facts, lambda: torch.zeros(1, 1, 8, 8), fetch_weights=False)
    assert len([*old.children()]) == 2


def test_the_default_steps_take_inputs_of_any_kind(train: Callable[..., Any]) -> None:
    assert set(train(*PAIRS).summary["test"]) == {"loss", "accuracy"}


def test_frames_are_normalised_by_their_channels_and_drawn(
    train: Callable[..., Any], accepted: Any, refused: Callable[..., None]
) -> None:
    words = (
        *COMMON, "data=own", "data.images=[frames]", "data.dataset._target_=own_steps.Videos", "loss=none",
        "model._target_=own_steps.Pooled", "task._target_=own_steps.Watching", "max_steps=2", "channels_last=true",
    )  # fmt: skip
    # The second channel has 128 of 255 more
    result = train(*words, "data.normalize.mean=[0.0,0.501960784]", "data.normalize.std=[0.5,0.5]")
    accepted("predict", f"ckpt_path={result.directory}", "input=test", "output=rows.csv", "pictures=true", "threads=1")
    of_frames = ("data.normalize.mean=[0,0,0,0,0]", "data.normalize.std=[1,1,1,1,1]")
    refused((*words, *of_frames), "data.normalize", "5 values, but the images have 2 channels")


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*VECTORS, "transform=standard"), "transform.train", "(image, target)"),
        ((*VECTORS, "data.images=null", COLLATE, "data.collate._partial_=true"), "data.collate", "(image, target)"),
        ((*VECTORS, "data.sampler=balanced"), "data.sampler", "classes_of(index)"),
        (
            (*VECTORS, "data.sampler=balanced", "data.dataset._target_=own_steps.Unclassified"),
            "data.sampler",
            "classes_of(index) of the data set fails",
        ),
        ((*BOXES, "data.images=[picture]"), "data.images", "'picture'"),
        ((*BOXES, "data.images=[name]"), "data.images", "'name'"),
        ((*PAIRS, "data.images=['-1']"), "data.images", "'-1'"),
        ((*VECTORS, COLLATE, "data.collate._partial_=true"), "data.collate", "cannot make a batch"),
        ((*BOXES, "task._target_=own_steps.Vectors"), "task", "(2,)"),
        ((*BOXES, "task._target_=own_steps.Detached"), "task", "no gradient"),
        ((*BOXES, "task._target_=own_steps.TermOfShape"), "task", "'term' of shape (2,)"),
        ((*BOXES, "task._target_=own_steps.NoLoss"), "task", "gives no loss"),
        ((*BOXES, "task._target_=own_steps.OtherModel"), "task", "another model"),
        ((*VECTORS, "data.images=[image]"), "data.images", "one tensor"),
        ((*VECTORS, "task._target_=own_steps.Slip"), "task._target_", "trainig_step"),
        (
            (*VECTORS, "task._target_=own_steps.IsModule"),
            "task._target_",
            "whose Module.modules(",
        ),
        (
            (*BOXES, "task._target_=own_steps.WeightIsNumber"),
            "task._target_",
            "whose attribute weight is 3, and hides its method weight",
        ),
        (FAILING, "task", "evaluate a batch, in a trial with 2 samples:"),
        (
            (*FAILING, "evaluate.every_epochs=null", "evaluate.test=false"),
            "task",
            "train on a batch, in a trial with 2",
        ),
        ((*VECTORS, "data.dataset._target_=own_steps.Graphs"), "data.dataset", "sparse or nested tensors"),
        (
            (*BOXES, "task._target_=own_steps.ProgressFirst"),
            "task._target_",
            "does not take modules and batch and progress",
        ),
        ((*BOXES, "task._target_=own_steps.StepNumber"), "task._target_", "after_step(self, modules[, progress])"),
        ((*PAIRS, "loss=none"), "task", "training_step"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    refused: Callable[..., None], words: tuple[str, ...], key: str, reason: str
) -> None:
    refused(words, key, reason)


def test_predicting_without_predict_step_takes_images_alone(
    train_once: Callable[..., Any], refused: Callable[..., None]
) -> None:
    refused((f"ckpt_path={train_once(*VECTORS, 'epochs=1').directory}",), "task", verb="predict input=test")


@pytest.mark.extended
@pytest.mark.parametrize("words", some([VECTORS, BOXES], 0), ids=["vectors", "boxes"])
def test_bench_and_profile_measure_steps_of_a_task(printed: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = printed("bench", *words, "toggles=[activation_checkpointing,data.num_workers]", "repeats=2")
    assert found["baseline"]["samples_per_s"]["median"] > 0
    profiled = printed("profile", *words, "steps=4", "trace_steps=0")
    assert profiled["samples_per_s"] > 0
    assert min(profiled["shares"].values()) > 0


@pytest.mark.extended
@pytest.mark.parametrize("words", [VECTORS, BOXES], ids=["vectors", "boxes"])
def test_audit_compares_steps_of_a_task(printed: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = printed("audit", *words, "steps=2", "vary={data.num_workers: [0, 1]}")
    assert found["same"], found["difference"]
    assert found["step"] == 2


def test_a_dry_run_tries_a_step(accepted: Callable[..., Any]) -> None:
    result = accepted("train", *VECTORS, "dry_run=true", "devices=2", "threads=1", "logger=none")
    assert "a step with batches of 8, of one of 2 ranks: " in result.out


def test_an_automatic_batch_size_fits_the_samples(train: Callable[..., Any]) -> None:
    result = train(*NORMED, "data.batch_size=auto", "epochs=1")
    assert "64 samples" in result.out  # the largest power of two among 67


def test_activation_checkpointing_keeps_the_bits(train: Callable[..., Any]) -> None:
    plain = train(*NORMED, "epochs=1")
    again = train(*NORMED, "epochs=1", "activation_checkpointing=true")
    assert again.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert "recomputed in 4 blocks" in again.out
    assert "has no effect" not in again.err


def test_initial_weights_are_drawn_and_residual_blocks_start_as_shortcuts(
    train: Callable[..., Any], refused: Callable[..., None]
) -> None:
    result = train(*NORMED, "max_steps=1", "optimizer.lr=1e-9", "init=[orthogonal,zero_gamma]", "scheduler=constant")
    weights = load_file(result.directory / "checkpoints" / "last.safetensors")
    assert weights["blocks.0.norm.weight"].abs().max() < 1e-6
    rows = weights["encoder.weight"]
    assert (rows @ rows.T).diagonal().sub(1).abs().max() < 1e-4
    refused((*VECTORS, "init=prior_bias"), "init", "prior_bias does not apply")


@pytest.mark.extended
def test_check_finds_nothing_in_healthy_tasks_and_skips_what_does_not_apply(printed: Callable[..., Any]) -> None:
    of_pairs = (*CONTRAST, "data=digits", "model.hidden=[32]", "optimizer.lr=0.001")
    texts = (*VECTORS, "data.dataset._target_=own_steps.pieces", "task._target_=own_steps.Padded", "data.shuffle=false")
    for words, least, skipped in (
        (VECTORS, {"readable", "duplicates", "step-size"}, ("normalization", "not pairs of image and target")),
        (texts, {"readable", "evaluation-transform", "step-size"}, ("logits", "not pairs of image and target")),
        (BOXES, {"readable", "gradient-scale", "step-size"}, ("logits", "not pairs of image and target")),
        (of_pairs, {"normalization", "class-balance", "step-size"}, ("logits", "the task computes its steps itself")),
    ):
        checks = {each["name"]: each for each in printed("check", *words)["checks"]}
        assert {name: each["evidence"] for name, each in checks.items() if each["status"] in ("fail", "warn")} == {}
        assert least <= {name for name, each in checks.items() if each["status"] == "pass"}
        assert (checks[skipped[0]]["status"], skipped[1] in checks[skipped[0]]["evidence"]) == ("skip", True)
