"""A run that is resumed with another number of steps in an epoch: what is given in epochs or in shares of the run keeps
its place, and what is given in steps keeps its step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

from runner.base.errors import UserError
from runner.config.keys import with_changes
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.engine.plan import EpochPlan, Position, Timeline
from runner.run.run import Run, validate_limits
from runner.train import build_run

# 48 training samples: an epoch has 6 steps with the batch size of 8, 12 with 4 and 3 with 16.
EPOCHS, STEPS = 6, 6
RUN = (
    "data=synthetic", "data.dataset.samples=53", "data.image_size=8", "data.batch_size=8", f"epochs={EPOCHS}",
    "model=mlp", "model.hidden=[4]", "evaluate.test=false", "checkpoint.min_seconds=0",
)  # fmt: skip
SCHEDULES = [
    ("scheduler=step", "scheduler.every=1", "scheduler.gamma=0.5"),
    ("scheduler=step", "scheduler.every=2", "scheduler.gamma=0.5", "scheduler.warmup=0.5"),
    ("scheduler=cosine",),
    ("scheduler=cosine", "scheduler.warmup=0.5"),
    ("scheduler=onecycle", "scheduler.warmup=0.5"),
    ("scheduler=wsd", "scheduler.warmup=0", "scheduler.decay=0.7"),
    ("scheduler=constant", "scheduler.warmup=0.9"),
    ("scheduler=plateau", "scheduler.warmup=0.9"),
    ("scheduler=constant", "swa=0.5", "averaging.lr_factor=0.1", "averaging.anneal_epochs=2"),
    ("scheduler=cosine", "swa=2", "averaging.lr_factor=0.1", "averaging.anneal_epochs=3"),
]


@pytest.fixture
def training(compose: Callable[..., Any]) -> Callable[..., Run]:
    """The objects of a run that starts at a position: `training("scheduler=step", size=4, start=Position(...))`."""

    def build(*words: str, size: int = 8, start: Position | None = None) -> Run:
        composition = compose(*RUN, *words)
        config = with_changes(resolve_config(composition, Train), {"data.batch_size": size})
        built = build_run(config, start, splits[0] if splits else None)
        splits[:] = [built.data]  # reading the data once is enough
        return built

    splits: list[Any] = []

    return build


def factors(training: Run, steps: list[int]) -> list[float]:
    return [training.state.schedule.factor(step) for step in steps]


@pytest.mark.parametrize("words", SCHEDULES, ids=" ".join)
def test_the_rate_goes_on_from_where_it_was_in_epochs(training: Any, words: tuple[str, ...]) -> None:
    whole = training(*words)
    for epoch, size in ((1, 4), (3, 16), (4, 4), (5, 16)):
        start = Position(epoch=epoch, global_step=epoch * STEPS)
        rest = training(*words, size=size, start=start)
        here = [start.global_step + (later - epoch) * rest.plan.steps for later in range(epoch, EPOCHS)]
        expected = factors(whole, [later * STEPS for later in range(epoch, EPOCHS)])
        # A warm-up begins above 0, at a rate that depends on its number of steps.
        assert factors(rest, here) == pytest.approx(expected, abs=0.12)

    for start in (Position(epoch=3, global_step=18), Position(epoch=3, batch=4, global_step=22)):
        rest = training(*words, start=start)  # the same batch size changes no bit
        later = list(range(start.global_step, EPOCHS * STEPS))
        assert factors(rest, later) == factors(whole, later)
        assert rest.state.position.turns == []
    # A second change keeps the first one in mind
    second = Position(epoch=3, global_step=6 + 2 * 12, turns=[[6, 1]])  # batches of 4 from the second epoch on
    rest = training(*words, size=16, start=second)
    assert rest.state.position.turns == [[6, 1], [30, 3]]
    expected = factors(whole, [18, 24, 30])
    assert factors(rest, [30, 33, 36]) == pytest.approx(expected, abs=0.12)
    again = training(*words, size=16, start=Position(epoch=4, global_step=33, turns=[[6, 1], [30, 3]]))
    assert factors(again, list(range(33, 39))) == factors(rest, list(range(33, 39)))


STEPWISE = [(*words, "epochs=null", "max_steps=36") for words in SCHEDULES[2:8]]


WARM_UPS = ("constant", "cosine", "onecycle", "step", "wsd", "plateau")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        *((words, range(18, 36)) for words in STEPWISE),
        (("scheduler=cosine", "scheduler.total_steps=40"), range(18, 36)),
        (("scheduler=step", "scheduler.steps_per_epoch=5", "scheduler.every=1"), range(18, 36)),
        *(((f"scheduler={name}", "scheduler.warmup=15"), range(6, 16)) for name in WARM_UPS),
    ],
    ids=str,
)
def test_what_is_given_in_steps_stays_where_it_is(training: Any, words: tuple[str, ...], steps: range) -> None:
    whole = training(*words)
    for size in (4, 16):
        rest = training(*words, size=size, start=Position(epoch=steps[0] // STEPS, global_step=steps[0]))
        assert factors(rest, list(steps)) == factors(whole, list(steps))


def test_swa_that_begins_after_a_share_of_the_steps_begins_at_the_same_step(training: Any) -> None:
    words = ("epochs=null", "max_steps=36", "scheduler=constant", "swa=0.5", "averaging.lr_factor=0.1")
    for size in (4, 16):
        rest = training(*words, size=size, start=Position(epoch=2, global_step=12))
        assert rest.state.schedule.factor(17) == 1 > rest.state.schedule.factor(18)


def test_a_step_schedule_under_max_steps_counts_epochs_and_its_warm_up_shares_of_the_steps(
    training: Any,
) -> None:
    words = ("scheduler=step", "scheduler.every=2", "scheduler.gamma=0.5", "epochs=null", "max_steps=36")
    rest = training(*words, "scheduler.warmup=0.25", size=16, start=Position(epoch=1, global_step=6))
    # Epochs of 3 steps begin at step 6: the third one at 9, the fifth at 15.
    assert factors(rest, [6, 7, 8, 9, 14, 15]) == [0.7, 0.8, 0.9, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("swa", "size"), some(itertools.product(("swa=2", "swa=0.35", "swa=0.6"), (4, 16)), 1, 2, several=True)
)
def test_swa_takes_the_weights_of_as_many_epochs(train: Any, swa: str, size: int, workdir: Path) -> None:
    words = (*RUN, swa, "averaging.lr_factor=0.5", "checkpoint.keep=99", "evaluate.every_epochs=6", "scheduler=cosine")
    whole = train(*words)
    expected = whole.last["averaged"]["updates"]
    checkpoint = whole.directory / "checkpoints" / "step_0000000018.safetensors"
    first = train(f"ckpt_path={checkpoint}", f"data.batch_size={size}", f"hydra.run.dir={workdir}/first")
    assert first.last["averaged"]["updates"] == expected
    # Stopped once more on the way, and resumed without a change, also in the middle of an epoch.
    saved = first.last["position"]
    assert saved["turns"] == [[18, 3]]
    steps = 48 // size
    middle = first.directory / "checkpoints" / f"step_{18 + steps:010d}.safetensors"
    second = train(f"ckpt_path={middle}", f"hydra.run.dir={workdir}/second")
    assert second.summary["weights_sha256"] == first.summary["weights_sha256"]
    averages = [each.last["averaged"] for each in (first, second)]
    assert averages[0]["updates"] == averages[1]["updates"]
    # A resume that changes nothing keeps the turns.
    assert second.last["position"]["turns"] == [[18, 3]]


@pytest.mark.parametrize(
    "words", some([("data.batch_size=4",), ("accumulate=2",), ("limit.train_batches=2",)], 0), ids=" ".join
)
def test_epochs_of_freezing_and_evaluations_are_those_of_the_run(
    train: Any, workdir: Path, words: tuple[str, ...]
) -> None:
    first = train(
        *RUN, "freeze=[layers.0@4ep]", "evaluate.every_epochs=2", "checkpoint.keep=99",
        "log.every_steps=1", "scheduler=step", "scheduler.every=4", "scheduler.gamma=0.5",
    )  # fmt: skip
    checkpoint = first.directory / "checkpoints" / "step_0000000012.safetensors"
    rest = train(f"ckpt_path={checkpoint}", *words, f"hydra.run.dir={workdir}/rest")
    steps = {"data.batch_size=4": 12, "accumulate=2": 3, "limit.train_batches=2": 2}[words[0]]
    assert f"step {12 + 2 * steps}: layers.0 is trained from now on" in rest.out
    assert [line["epoch"] for line in rest.logged("val")] == [2, 4, 6]
    rates = [line["lr"] for line in rest.logged("train") if line["global_step"] > 12]
    assert len(rates) == 4 * steps
    falls = [number for number, (one, two) in enumerate(itertools.pairwise(rates), 1) if two < one]
    assert len(falls) == 1
    assert falls[0] in (2 * steps - 1, 2 * steps)  # the log shows the rate of the step, or of the next


def test_what_is_said_ahead_counts_the_epochs_as_they_were(training: Any) -> None:
    start = Position(epoch=4, global_step=24)
    compared = training("freeze=[layers.0@5ep]", size=16, start=start)
    assert compared.total_steps == 30
    assert not [warning for warning in validate_limits(compared) if "freeze" in warning]
    late = training("freeze=[layers.0@6ep]", size=16, start=start)
    assert [warning for warning in validate_limits(late) if "is never trained" in warning]


def test_swa_that_has_begun_is_not_refused_where_epochs_become_longer(training: Any) -> None:
    longer = ("swa=2", "epochs=null", "max_steps=30")
    validate_limits(training(*longer, size=2, start=Position(epoch=3, global_step=18)))  # weights were taken at step 18
    with pytest.raises(UserError, match="swa: 2 begins after"):
        validate_limits(training(*longer, size=2, start=Position(epoch=2, global_step=12)))


def test_moments_in_steps_and_in_epochs_belong_together() -> None:
    plan = EpochPlan(samples=48, batch_size=4)
    timeline = Timeline.of(Position(epoch=3, batch=2, global_step=20), plan)
    assert timeline.turns == ((18, 3),)
    assert [timeline.step(epoch) for epoch in (0, 1.5, 3, 3.25, 5)] == [0, 9, 18, 21, 42]
    assert [timeline.scaled(step) for step in (0, 9, 18, 21, 42)] == [0, 18, 36, 39, 60]
    assert Timeline.of(Position(epoch=4, global_step=30, turns=[[18, 3]]), plan).turns == ((18, 3),)


def test_a_batch_larger_than_the_training_split_is_told(train: Any) -> None:
    shown = train("model=mlp", "epochs=1", "data.batch_size=5000").out
    assert "warning: data.batch_size=5000 has no effect above 1,258" in shown
    assert "warning: data.batch_size" not in train("model=mlp", "epochs=1").out
