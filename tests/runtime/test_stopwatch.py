"""Every second of a step is counted once, in the innermost range."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_runs import TINY

from runner.runtime.stopwatch import OTHER, Stopwatch

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until it is advanced."""

    class Clock:
        now = 100.0

        def on(self, seconds: float) -> None:
            self.now += seconds

    one = Clock()
    monkeypatch.setattr("runner.runtime.stopwatch.perf_counter", lambda: one.now)
    return one


def test_the_ranges_of_a_step_add_up_to_it(clock: Any) -> None:
    watch = Stopwatch(CPU)
    watch.boundary()
    for length in (1.0, 10.0):
        clock.on(length)
        with watch("outer"):
            clock.on(2 * length)
            with watch("inner"):
                clock.on(3 * length)
            clock.on(4 * length)
        with watch("inner"):
            clock.on(5 * length)
        watch.boundary()
    first, second = watch.steps()
    assert first.host == {OTHER: 1.0, "outer": 6.0, "inner": 8.0}
    assert second.seconds == {OTHER: 10.0, "outer": 60.0, "inner": 80.0}


def test_what_came_before_a_reset_is_forgotten(clock: Any) -> None:
    watch = Stopwatch(CPU)
    watch.boundary()
    clock.on(1)
    watch.boundary()
    watch.reset()
    clock.on(1)
    watch.boundary()
    clock.on(7)
    watch.boundary()
    assert [step.host for step in watch.steps()] == [{OTHER: 7.0}]


def test_a_range_ends_when_what_is_in_it_fails(clock: Any) -> None:
    watch = Stopwatch(CPU)

    def fail() -> None:
        clock.on(1)
        raise ValueError("broken")

    watch.boundary()
    with pytest.raises(ValueError, match="broken"), watch("range"):
        fail()
    watch.boundary()
    assert watch.steps()[0].host == {OTHER: 0.0, "range": 1.0}


def test_what_another_thread_does_takes_no_time_of_a_step() -> None:
    watch = Stopwatch(CPU)

    def work() -> None:
        with watch("elsewhere"):
            time.sleep(0.01)

    watch.boundary()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    watch.boundary()
    assert list(watch.steps()[0].host) == [OTHER]


def test_ranges_are_in_the_trace_only_while_they_are_wanted() -> None:
    watch = Stopwatch(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for annotate in (False, True):
            watch.annotate = annotate
            watch.boundary()
            with watch("here"):
                torch.ones(3)
        watch.boundary(last=True)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert (counts["here"], counts["step"], counts["aten::ones"]) == (1, 1, 2)


class Event:
    """A CUDA event: notes the stream that it is recorded on, and the device's time."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        assert stream == "the compute stream"
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_on_cuda_the_device_counts_and_the_ranges_reach_nsight(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the compute stream")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    watch = Stopwatch(torch.device("cuda", 0))
    watch.boundary()
    with watch("forward"):
        clock.on(0.5)
        Event.now += 3000.0
    watch.boundary()
    assert calls == ["push forward", "pop"], "nothing waits before the times are read"
    (step,) = watch.steps()
    assert calls[-1] == "wait"
    assert step.host == {OTHER: 0.0, "forward": 0.5}
    assert step.seconds == step.device == {OTHER: 0.0, "forward": 3.0}


@pytest.mark.parametrize(
    "words",
    [("train",), ("profile", "steps=1", "trace_steps=0")],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_busy_machine_is_named_in_one_line_at_the_end(
    words: tuple[str, ...], share: float, run: Callable[..., Any], workdir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What imports the function comes first: an import after the change would keep it
    for module in ("run.run_record", "lab.profile.run", "runtime.stopwatch"):
        monkeypatch.setattr(f"runner.{module}.waited_for_core", lambda: share * time.perf_counter())
    done = run(*words, *TINY)
    assert done.status == 0, done.err
    said = [line for line in done.out.splitlines()[-4:] if "the machine was busy" in line]
    assert len(said) == (share >= 0.3)
    assert all("50% of the time" in line for line in said)
