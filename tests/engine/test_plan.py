"""An epoch divides into batches, and batches into optimizer steps, with no sample lost or counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.plan import EpochPlan, Limits

plans = st.builds(
    EpochPlan,
    samples=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    accumulate=st.integers(1, 9),
    drop_last=st.booleans(),
    limit=st.none() | st.integers(1, 20),
)


def windows(plan: EpochPlan) -> list[list[tuple[int, float]]]:
    """Size and weight of each batch of each accumulation window."""
    found: list[list[tuple[int, float]]] = [[]]
    for size, weight, ends_window in plan.parts(0):
        found[-1].append((size, weight))
        if ends_window:
            found.append([])
    assert found[-1] == [], "batches are left over after the last optimizer step"
    return found[:-1]


@given(plans)
def test_windows_divide_the_batches_and_only_the_last_is_shorter(plan: EpochPlan) -> None:
    found = windows(plan)
    assert len(found) == plan.steps
    assert [size for window in found for size, _ in window] == [plan.size(batch) for batch in range(plan.batches)]
    assert plan.steps < 2 or list(plan.parts(plan.accumulate)) == list(plan.parts(0))[plan.accumulate :]
    assert all(len(window) == plan.accumulate for window in found[:-1])
    assert not found or 1 <= len(found[-1]) <= plan.accumulate


@given(plans)
def test_a_batch_weighs_as_much_as_its_samples(plan: EpochPlan) -> None:
    for window in windows(plan):
        total = sum(size for size, _ in window)
        assert all(weight == pytest.approx(size / total) for size, weight in window)


@given(plans)
def test_every_sample_is_in_one_batch_unless_told_otherwise(plan: EpochPlan) -> None:
    sizes = [plan.size(batch) for batch in range(plan.batches)]
    assert all(1 <= size <= plan.batch_size for size in sizes)
    assert all(size == plan.batch_size for size in sizes[:-1])
    if plan.limit is None:
        assert sum(sizes) == (plan.samples - plan.samples % plan.batch_size if plan.drop_last else plan.samples)
    if plan.drop_last:
        assert all(size == plan.batch_size for size in sizes)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"), [(3, None, 9), (None, 7, 7), (3, 7, 7), (3, 20, 9), (1, 1, 1)]
)
def test_training_ends_at_whichever_limit_comes_first(epochs: int | None, max_steps: int | None, expected: int) -> None:
    assert Limits(epochs, max_steps).total_steps(EpochPlan(10, 4)) == expected
