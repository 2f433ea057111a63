"""Same config, same seed, same weights; and stopping never shows.

Each test runs the program and compares `weights_sha256` of the summaries: one different bit is a different text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extended import some

from runner.checkpoint.file import read
from runner.checkpoint.weights import weights_sha256
from runner.tracking.formats import HARDWARE_METRICS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# 43 training samples: five batches of 8 and one of 3 an epoch, 12 steps in all.
SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "evaluate.test=false", "transform=strong", "data.hflip=0.5",
)  # fmt: skip
MLP = (*SMALL, "model=mlp", "model.hidden=[16]", "model.dropout=0.3")
CNN = (*SMALL, "model=small_cnn", "model.width=4", "model.dropout=0.3")


def weights(result: Any) -> str:
    return str(result.summary["weights_sha256"])


def resumed_equals_uninterrupted(train: Any, stopped: Any, step: int, *words: str) -> tuple[Any, Any]:
    whole = train(*words)
    rest = train(f"ckpt_path={stopped(step, *words).directory}")
    assert rest.summary["resumed_from"].endswith("last.safetensors")
    for key in ("weights_sha256", "best", "last", "global_step"):
        assert rest.summary[key] == whole.summary[key], key
    # What is logged is the same to the last digit, too; only the speed is another.
    before, after = (
        sorted(
            str({name: value for name, value in record.items() if name not in ("samples_per_s", *HARDWARE_METRICS)})
            for record in run.metrics
        )
        for run in (whole, rest)
    )
    assert before == after
    return whole, rest


def test_nothing_that_should_not_matter_changes_a_bit(train: Any, train_once: Any) -> None:
    reference = weights(train_once(*CNN))
    for words in (
        ("data.num_workers=0", "log.every_steps=1", "log.progress=true", "logger=all"),
        (
            *("data.num_workers=1", "data.prefetch=1", "data.persistent_workers=false"),
            *("evaluate.every_steps=1", "evaluate.every_epochs=null", "evaluate.batch_size=3"),
        ),
        (
            *("data.num_workers=3", "data.prefetch=8", "evaluate.test=true", "callbacks=none"),
            *("evaluate.every_epochs=2", "checkpoint.every_steps=1", "checkpoint.keep=1"),
        ),
    ):
        assert weights(train(*CNN, "data.placement=disk", *words)) == reference, words


def test_another_seed_gives_other_weights(train: Any) -> None:
    assert len({weights(train(*MLP, f"seed={seed}")) for seed in (0, 1, 2)}) == 3


def test_the_whole_run_counts_and_not_what_ran_before_it(train: Any) -> None:
    first = weights(train(*MLP))
    train(*CNN, "amp=true", "reproducibility=strict", "seed=9")
    assert weights(train(*MLP)) == first


@pytest.mark.parametrize(
    ("step", "words"),
    some([
        (1, (*CNN, "optimizer=sgd", "scheduler=plateau", "scheduler.patience=1", "evaluate.every_steps=2", "accumulate=4",
             "log.every_steps=1")),
        (3, (*CNN, "optimizer=adam", "scheduler=cosine", "scheduler.warmup=3", "accumulate=4", "log.every_steps=2")),
        (6, (*CNN, "optimizer=adamw", "scheduler=onecycle", "evaluate.test=true", "amp=true", "channels_last=true")),
        (8, (*MLP, "optimizer=rmsprop", "scheduler=step", "scheduler.every=1", "amp=fp16", "grad_clip.norm=1.0")),
        (3, (*MLP, "optimizer=muon", "scheduler=wsd", "max_steps=7", "data.drop_last=true")),
        (11, (*CNN, "optimizer=sgd", "scheduler=constant", "grad_clip.norm=0.5", "data.placement=disk",
              "data.num_workers=2")),
    ], 0, 2, 3, 4, several=True),
    ids=["sgd plateau accumulate 1", "adam cosine accumulate 2", "adamw onecycle bf16", "rmsprop step fp16",
         "muon wsd max_steps", "sgd constant workers"],
)  # fmt: skip
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    step: int, words: tuple[str, ...], train: Any, stopped: Any
) -> None:
    resumed_equals_uninterrupted(train, stopped, step, *words)


def test_stopped_at_every_step_in_turn_it_still_equals_one_that_was_not(train: Any, stopped: Any, run: Any) -> None:
    words = (*MLP, "epochs=1", "amp=fp16", "log.every_steps=3")
    whole, last = train(*words), stopped(1, *words)
    for step in range(2, 6):
        last = stopped(step, f"ckpt_path={last.directory}")
    assert weights(train(f"ckpt_path={last.directory}")) == weights(whole)


@pytest.mark.parametrize("step", some([2, 6], 0))
def test_early_stopping_stops_at_the_same_evaluation_after_resuming(step: int, train: Any, stopped: Any) -> None:
    words = (*MLP, "epochs=4", "optimizer=sgd", "optimizer.lr=0.5", "scheduler=constant", "evaluate.every_steps=2",
             "evaluate.every_epochs=null", "callbacks=early_stopping", "callbacks.early_stopping.patience=3",
             "callbacks.early_stopping.monitor=val/loss", "callbacks.early_stopping.mode=min")  # fmt: skip
    whole, rest = resumed_equals_uninterrupted(train, stopped, step, *words)
    assert step < whole.summary["global_step"] < 4 * 6, "it was to stop early, but not before the interruption"
    # Resumed once more, it has nothing left to do.
    assert weights(train(f"ckpt_path={rest.directory}")) == weights(whole)


def test_workers_may_change_when_resuming(train: Any, train_once: Any, stopped: Any) -> None:
    whole = train_once(*CNN)
    last = stopped(4, *CNN, "data.placement=disk", "data.num_workers=2").directory
    rest = train(f"ckpt_path={last}", "data.num_workers=0", "log.every_steps=1", "checkpoint.every_steps=5")
    assert weights(rest) == weights(whole)
    assert "data.num_workers" in rest.out
    assert "log.every_steps" in rest.out


def test_a_finished_run_goes_on_with_more_epochs_as_if_it_had_been_asked_at_once(train: Any) -> None:
    words = (*MLP, "scheduler=constant")
    whole, first = train(*words, "epochs=3"), train(*words, "epochs=1")
    rest = train(f"ckpt_path={first.directory}", "epochs=3")
    assert weights(rest) == weights(whole)
    row = next(line for line in rest.out.splitlines() if line.strip().startswith("epochs"))
    assert row.split() == ["epochs", "1", "3", "yes"], "the difference is printed"
    assert rest.logged("val") == whole.logged("val")


def test_resuming_in_the_same_directory_continues_its_files(train: Any, stopped: Any) -> None:
    words = (*MLP, "log.every_steps=2", "logger=csv")
    whole = train(*words)
    last = stopped(7, *words).directory
    rest = train(f"ckpt_path={last}", f"hydra.run.dir={last}", "logger=csv")
    assert rest.directory.resolve() == last.resolve()
    assert weights(rest) == weights(whole)
    assert rest.summary["status"] == "finished"
    places = [(m["split"], m["global_step"]) for m in rest.metrics]
    assert len(set(places)) == len(places), "a step was logged twice"
    assert sorted(places) == sorted((m["split"], m["global_step"]) for m in whole.metrics)
    rows = (rest.directory / "metrics_train.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)) == 1 + 6


def test_resuming_from_an_older_checkpoint_forgets_the_best_of_the_abandoned_future(train: Any, workdir: Path) -> None:
    # Under a vanishing learning rate no later evaluation beats the one of step 12.
    words = (*MLP, "checkpoint.keep=9", "checkpoint.min_seconds=0", "checkpoint.monitor=loss")
    words += ("evaluate.test=true", "optimizer.lr=0.01")
    first = train(*words, "epochs=2")
    assert first.summary["best"]["global_step"] == 12
    older = first.directory / "checkpoints" / "step_0000000006.safetensors"
    rest = train(f"ckpt_path={older}", "optimizer.lr=1e-12", "log.every_steps=1")
    best = read(rest.directory / "checkpoints" / "best.safetensors")
    assert best["position"]["global_step"] == rest.summary["best"]["global_step"]
    assert best["metrics"]["best"] == rest.summary["best"]


def test_putting_saves_off_changes_neither_the_weights_nor_which_state_is_the_best(train: Any) -> None:
    # The rate is so high that the best evaluation is an early one.
    words = (*MLP, "epochs=6", "optimizer=sgd", "optimizer.lr=0.7", "scheduler=constant", "evaluate.test=true")
    often, seldom = (train(*words, f"checkpoint.min_seconds={seconds}") for seconds in (0, 1000))
    assert often.summary["best"]["global_step"] < 36
    assert [often.summary[key] for key in ("best", "test", "weights_sha256")] == [
        seldom.summary[key] for key in ("best", "test", "weights_sha256")
    ]
    best = [read(result.directory / "checkpoints" / "best.safetensors") for result in (often, seldom)]
    assert best[0]["position"] == best[1]["position"]
    assert weights_sha256(best[0]["model"]) == weights_sha256(best[1]["model"])


@pytest.mark.parametrize(
    "word", ["model.hidden=[8]", "optimizer=sgd", "data.batch_size=4", "accumulate=2", "seed=5", "data.dataset.seed=1"]
)
def test_a_change_that_would_not_be_the_same_run_is_refused_inside_an_epoch(
    word: str, train_once: Any, rejected: Any
) -> None:
    result = rejected("train", f"ckpt_path={train_once(*MLP, 'max_steps=4').directory}", word)
    assert "cannot change when resuming" in result.err
    assert word.split("=")[0] in result.err


def test_the_same_command_resumes_with_a_checkpoint_moved_alone_to_another_folder(
    train: Any, train_once: Any, stopped: Any, workdir: Path
) -> None:
    whole = train_once(*MLP)
    last = stopped(8, *MLP).directory
    (last / "checkpoints" / "last.safetensors").rename(workdir / "moved.pt")
    last.rename(workdir / "gone")
    rest = train(*MLP, "ckpt_path=moved.pt")
    assert weights(rest) == weights(whole)
