"""Metrics are passed on in order, and soon enough."""

from __future__ import annotations

import pytest

from runner.tracking import background
from runner.tracking.background import MetricsBuffer


@pytest.mark.parametrize(
    "calls",  # seconds since the one before, the split, and how many have been passed on then
    [
        [(0.0, "train", 1), (0.4, "train", 1), (0.6, "train", 3)],
        [(1.0, "train", 1), (1.0, "train", 2), (1.0, "train", 3)],
        [(0.0, "train", 1), (0.1, "train", 1), (0.0, "val", 3), (0.1, "train", 3)],
    ],
    ids=["quick steps wait for a second", "slow steps come one by one", "an evaluation takes along what waits"],
)
def test_metrics_are_passed_on_in_order_after_a_second(monkeypatch, calls):
    now, first, second = [100.0], [], []
    monkeypatch.setattr(background.time, "monotonic", lambda: now[0])
    buffer = MetricsBuffer([lambda *metrics: first.append(metrics), lambda *metrics: second.append(metrics)])
    for step, (later, split, passed) in enumerate(calls):
        now[0] += later
        buffer(split, {"loss": 1.0 / (step + 1)}, step, 1)
        assert len(first) == passed
    buffer.empty()
    buffer.empty()
    assert first == second == [(split, {"loss": 1 / (step + 1)}, step, 1) for step, (_, split, _) in enumerate(calls)]


def test_what_could_not_be_passed_on_is_not_tried_again():
    def full(*metrics):
        raise OSError("no space")

    buffer = MetricsBuffer([full])
    with pytest.raises(OSError, match="no space"):
        buffer("train", {}, 1, 1)
    buffer.empty()
