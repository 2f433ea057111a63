"""Callbacks: stopping early, logging, saving; and how they are restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.callbacks import Checkpointing, EarlyStopping, LearningRateMonitor, Log
from runner.engine.errors import BadMetric, Diverged
from runner.engine.loop import Loop


def stops_at(callback: EarlyStopping, values: list[float]) -> int | None:
    loop = Mock()
    for number, value in enumerate(values):
        callback.on_evaluation(loop, {"val/loss": value})
        if loop.request_stop.called:
            return number
    return None


@pytest.mark.parametrize(
    ("mode", "patience", "min_delta", "values", "expected"),
    [
        ("min", 2, 0.0, [3, 2, 2, 2, 2], 3),
        ("min", 1, 0.0, [3, 2, 2], 2),
        ("min", 2, 0.0, [3, 2, 2.5, 1, 1.5, 1.5], 5),
        ("max", 2, 0.0, [1, 2, 3, 3, 2], 4),
        ("max", 3, 0.0, [1, 2, 3, 4, 5], None),
        ("min", 2, 0.5, [3, 2.8, 2.6, 1], 2),
        ("min", 2, 0.0, [3, float("nan"), float("nan"), 1], 2),
        ("min", 2, 0.0, [float("nan"), 3, 3, 3], 3),
        ("min", 2, 0.0, [float("nan"), float("nan"), 3], 1),
        ("max", 2, 0.0, [float("nan"), 3, float("nan"), 4, float("nan"), float("nan")], 5),
        ("max", 2, 0.0, [float("inf"), 3, 4, 5], None),
        ("max", 2, 0.0, [float("-inf"), float("-inf"), 5], 1),
    ],
)
def test_training_stops_after_as_many_evaluations_without_improvement_as_asked(
    mode: Any, patience: int, min_delta: float, values: list[float], expected: int | None
) -> None:
    assert stops_at(EarlyStopping("val/loss", mode, patience, min_delta), values) == expected


@given(
    st.lists(st.floats(-5, 5) | st.just(float("nan")), min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 5)
)
def test_an_interruption_anywhere_changes_nothing_about_when_it_stops(
    values: list[float], cut: int, patience: int
) -> None:
    whole = stops_at(EarlyStopping("val/loss", "min", patience), values)
    first, second = EarlyStopping("val/loss", "min", patience), EarlyStopping("val/loss", "min", patience)
    before = stops_at(first, values[:cut])
    second.load_state_dict(first.state_dict())
    after = stops_at(second, values[cut:]) if before is None else None
    assert (before if before is not None else None if after is None else after + min(cut, len(values))) == whole


def test_a_metric_that_was_never_finite_is_named_as_the_reason_to_stop() -> None:
    loop = Mock()
    EarlyStopping("val/loss", "min", 1).on_evaluation(loop, {"val/loss": float("nan")})
    loop.request_stop.assert_called_once_with("val/loss was not finite in any of 1 evaluations")


def test_what_was_the_best_of_another_metric_is_not_the_best_of_this_one() -> None:
    loss = EarlyStopping("val/loss", "min", 2)
    assert stops_at(loss, [0.1, 0.2]) is None
    for other in (EarlyStopping("val/accuracy", "max", 2), EarlyStopping("val/loss", "max", 2)):
        other.load_state_dict(loss.state_dict())
        assert other.state_dict()["best"] is None
        assert other.state_dict()["waited"] == 0


def test_a_run_that_had_stopped_stops_again_when_resumed(bench: Any) -> None:
    waited = EarlyStopping("val/loss", "min", 1)
    waited.load_state_dict({"best": -1.0, "waited": 1})
    loop = bench().loop(waited)
    loop.run()
    assert loop.state.position.global_step == 0
    assert "has not improved on -1.0" in loop.stop_reason


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="patience must be at least 1"):
        EarlyStopping("val/loss", "min", 0)
    with pytest.raises(ValueError, match="min_delta must be at least 0"):
        EarlyStopping("val/loss", "min", 1, -0.1)


class Records:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.train: list[tuple[int, int, dict[str, float]]] = []
        self.val: list[tuple[int, int, dict[str, float]]] = []

    def __call__(self, split: str, metrics: dict[str, float], step: int, epoch: int) -> None:
        getattr(self, split).append((step, epoch, metrics))


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1, [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]), (4, [(4, 2), (6, 2)]), (100, [(6, 2)])],
)
def test_training_is_logged_as_often_as_asked_and_at_the_end(
    bench: Any, every: int, expected: list[tuple[int, int]]
) -> None:
    records = Records()
    bench(10).loop(Log(every, [records])).run()
    assert [(step, epoch) for step, epoch, _ in records.train] == expected
    assert [(step, epoch) for step, epoch, _ in records.val] == [(3, 1), (6, 2)]
    assert all(set(metrics) == {"loss", "samples_per_s", "data_wait"} for _, _, metrics in records.train)


def test_evaluations_and_pauses_do_not_count_as_training_time_and_gauges_get_the_rate(bench: Any) -> None:
    class Pause:
        def on_step(self, loop: Loop) -> None:
            time.sleep(0.1)
            loop.paused_s += 0.1

    def evaluate() -> dict[str, float]:
        time.sleep(0.1)
        return {"val/loss": 1.0}

    records = Records()
    loop = bench(10).loop(Pause(), Log(2, [records], lambda rate: {"twice": 2 * rate}))
    loop._evaluate = evaluate
    loop.run()
    for _, _, metrics in records.train:
        assert metrics["samples_per_s"] > 6 / 0.1
        assert metrics["twice"] == 2 * metrics["samples_per_s"]


def test_waiting_for_batches_is_logged_as_a_share_of_the_time(bench: Any) -> None:
    records, one = Records(), bench(40, validate=False, limits={"epochs": 1, "max_steps": None})
    loop = one.loop(Log(5, [records]))
    source = loop.source

    class Slow:
        def __len__(self) -> int:
            return len(source)

        def batches(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
            for number, batch in enumerate(source.batches(epoch, start, stop)):
                if number < 5:
                    time.sleep(0.02)
                yield batch

    loop.source = Slow()
    loop.run()
    slow, quick = (metrics["data_wait"] for _, _, metrics in records.train)
    assert 0.5 < slow <= 1
    assert 0 < quick < 0.8 * slow


def test_the_logged_loss_is_the_mean_over_the_samples_since_the_last_time(bench: Any) -> None:
    often, seldom = Records(), Records()
    bench(10).loop(Log(1, [often])).run()
    bench(10).loop(Log(3, [seldom])).run()
    sizes = [4, 4, 2]
    losses = [metrics["loss"] for _, _, metrics in often.train]
    for epoch in (0, 1):
        expected = sum(size * loss for size, loss in zip(sizes, losses[3 * epoch :], strict=False)) / 10
        assert seldom.train[epoch][2]["loss"] == pytest.approx(expected, rel=1e-5)


def test_nothing_waits_for_the_device_between_two_log_points(bench: Any, waits: Any) -> None:
    counts: list[int] = []

    class Count:
        def on_step(self, loop: Loop) -> None:
            counts.append(len(waits.found))

    one = bench(40, parts={"clip_norm": 1.0}, validate=False, limits={"epochs": 2, "max_steps": None})
    with waits:
        one.loop(LearningRateMonitor(), Log(5, [Records()]), Checkpointing(None, 9, lambda *_: None), Count()).run()
    assert counts == [step // 5 for step in range(1, 21)], "one reading at each log point, and none besides"


def test_learning_rates_are_logged_beside_the_loss(bench: Any) -> None:
    records, one = Records(), bench(10)
    one.loop(LearningRateMonitor(), Log(3, [records])).run()
    assert records.train[0][2]["lr"] == 0.1
    state = one.state()
    weight, bias = state.model.parameters()
    groups = [{"params": [weight], "lr": 0.1, "initial_lr": 0.1}, {"params": [bias], "lr": 0.2, "initial_lr": 0.2}]
    state.optimizer = torch.optim.SGD(groups)
    records = Records()
    one.loop(LearningRateMonitor(), Log(3, [records]), state=state).run()
    assert (records.train[0][2]["lr_0"], records.train[0][2]["lr_1"]) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("note", "good", "'note' is a str, not a number"),
        ("parts", torch.zeros(3), r"'parts' is a Tensor of shape \(3,\), not a number"),
        ("nothing", None, "'nothing' is a NoneType, not a number"),
        ("global_step", -1, "cannot be named 'global_step'"),
        (7, 1.0, "cannot be named 7"),
    ],
)
@pytest.mark.parametrize("event", ["on_log", "on_evaluation"])
def test_a_metric_that_cannot_be_logged_is_named_with_its_callback(
    bench: Any, event: str, name: Any, value: Any, reason: str
) -> None:
    class Adds:
        pass

    setattr(Adds, event, lambda self, loop, metrics: metrics.update({name: value}))
    records = Records()
    with pytest.raises(BadMetric, match=f"Adds, {event}: .*{reason}"):
        bench(10).loop(Adds(), Log(2, [records])).run()
    assert (records.train if event == "on_log" else records.val) == []


def test_numbers_of_every_kind_are_logged(bench: Any) -> None:
    class Adds:
        def on_log(self, loop: Loop, metrics: dict[str, Any]) -> None:
            metrics |= {"integer": 2, "tensor": torch.tensor(0.5), "numpy": np.float32(0.25), "infinite": float("inf")}

    records = Records()
    bench(10).loop(Adds(), Log(2, [records])).run()
    assert set(records.train[0][2]) >= {"integer", "tensor", "numpy", "infinite"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_training_when_it_is_read(bench: Any, value: float) -> None:
    one = bench(10, parts={"loss": lambda logits, targets: logits.sum() * value})
    with pytest.raises(Diverged, match=r"the training loss is (nan|-?inf) at step 2"):
        one.loop(Log(2, [Records()])).run()


class Clock:
    """A callback that lets a second pass in each step, by a clock of its own."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now, self.saved, self._takes_s = 0.0, list[int](), takes_s

    def on_step(self, loop: Any) -> None:
        self.now += 1.0

    def save(self, loop: Any, *_: Any) -> None:
        self.saved.append(loop.state.position.global_step)
        self.now += self._takes_s


@pytest.mark.parametrize(
    ("samples", "steps", "epochs", "min_seconds", "takes_s", "expected"),
    [
        # as often as asked, and at the end
        (10, None, 1, 0, 0, [3, 6, 9, 12]),
        (10, None, 2, 0, 0, [6, 12]),
        (10, 5, None, 0, 0, [5, 10, 12]),
        (10, 4, 2, 0, 0, [4, 6, 8, 12]),
        (10, None, None, 0, 0, [12]),
        # the first one after two seconds, others delayed unless steps ask for them
        (10, None, 1, 1000, 0, [2, 12]),
        (10, 5, None, 1000, 0, [2, 5, 10, 12]),
        (10, 5, 1, 1000, 0, [2, 5, 10, 12]),
        (14, None, 1, 10, 0, [2, 12, 16]),
        (14, None, 1, 1, 0, [1, 4, 8, 12, 16]),
        (14, 100, None, 1000, 0, [2, 16]),
        (14, 1, None, 10, 0, list(range(1, 17))),
        (14, None, None, 10, 0, [16]),
        # saves that take long are further apart
        (8, None, 1, 2, 0.0, [2, 4, 6, 8]),
        (8, None, 1, 2, 0.2, [2, 8]),
        (8, None, 1, 2, 10.0, [2, 8]),
    ],
)
def test_states_are_saved_as_often_as_asked_and_at_the_end(
    bench: Any,
    samples: int,
    steps: int | None,
    epochs: int | None,
    min_seconds: float,
    takes_s: float,
    expected: list[int],
) -> None:
    clock = Clock(takes_s)
    saving = Checkpointing(steps, epochs, clock.save, min_seconds=min_seconds, clock=lambda: clock.now)
    bench(samples, limits={"epochs": 4, "max_steps": None}, validate=False).loop(clock, saving).run()
    assert clock.saved == expected


def test_the_best_evaluation_is_always_saved_and_marked(bench: Any) -> None:
    saved: list[tuple[int, bool]] = []
    values = iter([3.0, 1.0, 2.0, 0.5])
    one = bench(4, limits={"epochs": 4, "max_steps": None})
    loop = one.loop(Checkpointing(None, None, lambda loop, b, _: saved.append((loop.state.position.global_step, b))))
    loop._evaluate = lambda: {"val/loss": next(values)}
    loop.run()
    assert saved == [(1, True), (2, True), (4, True)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0, 2.5], (4, False, 2)),
        ([3.0, 1.0, 2.0, 0.5], (4, True, None)),
        ([3.0, 4.0, 5.0, 6.0], (4, False, 1)),
    ],
)
def test_the_best_state_that_was_put_off_is_handed_over_with_the_next_save(
    bench: Any, values: list[float], expected: tuple[int, bool, int | None]
) -> None:
    saved: list[tuple[int, bool, int | None]] = []
    left = iter(values)
    one = bench(4, limits={"epochs": 4, "max_steps": None})
    step = lambda loop: loop.state.position.global_step  # noqa: E731
    save = lambda loop, best, earlier: saved.append((step(loop), best, earlier))  # noqa: E731
    loop = one.loop(Checkpointing(None, 1, save, step, min_seconds=1000))
    loop._evaluate = lambda: {"val/loss": next(left)}
    loop.run()
    assert saved == [expected]


def test_a_loss_far_above_the_lines_before_and_the_first_one_of_exactly_zero_are_warned_of(bench: Any) -> None:
    warnings: list[str] = []
    log = Log(1, [], warn=warnings.append)
    losses = iter([1.0, 2.0] * 6 + [7.0, 1.0, 4.4, 6.5, 0.5, 0.0, 1e-9, 0.0])
    loop = bench(8, validate=False, limits={"epochs": None, "max_steps": 20}).loop(log)
    loop.state.meter.read = lambda: next(losses)
    loop.run()
    assert [text.split(", from")[0] for text in warnings] == [
        "the training loss jumped to 7 at step 13",
        "the training loss jumped to 6.5 at step 16",
        "the training loss is exactly 0: no target counts, or nothing is left to learn",
    ]
