"""Metrics are handed on in order, and soon enough."""

import pytest

from runner.tracking import reporting
from runner.tracking.reporting import MetricsBuffer


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(reporting.time, "monotonic", lambda: Clock.now)
    return Clock


def test_what_comes_quickly_waits_for_a_second_and_comes_in_order(clock):
    taken = []
    box = MetricsBuffer([lambda split, metrics, step, epoch: taken.append((split, metrics["loss"], step, epoch))])
    box("train", {"loss": 3.0}, 1, 1)
    assert taken == [("train", 3.0, 1, 1)]
    clock.now += 0.4
    box("train", {"loss": 2.0}, 2, 1)
    assert len(taken) == 1
    clock.now += 0.6
    box("train", {"loss": 1.0}, 3, 2)
    assert taken[1:] == [("train", 2.0, 2, 1), ("train", 1.0, 3, 2)]


def test_slow_steps_are_handed_on_one_by_one_and_an_evaluation_takes_along_what_waits(clock):
    taken = []
    box = MetricsBuffer([lambda split, *_: taken.append(split)])
    for step in range(3):
        clock.now += 1.0
        box("train", {}, step, 1)
        assert len(taken) == step + 1
    for split in ("train", "val"):
        box(split, {}, 4, 1)
    assert taken == ["train"] * 4 + ["val"]


def test_emptying_hands_on_once_to_every_taker(clock):
    first, second = [], []
    box = MetricsBuffer([lambda *metrics: first.append(metrics[2]), lambda *metrics: second.append(metrics[2])])
    for step in (1, 2, 3):
        box("train", {}, step, 1)
    box.empty()
    box.empty()
    assert first == second == [1, 2, 3]


def test_what_could_not_be_handed_on_is_not_tried_again(clock):
    def full(*metrics):
        raise OSError("no space")

    box = MetricsBuffer([full])
    with pytest.raises(OSError, match="no space"):
        box("train", {}, 1, 1)
    box.empty()
