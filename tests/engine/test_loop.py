"""The loop stops where it should, evaluates when it should, and tells callbacks in order."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from runner.checkpoint.weights import weights_sha256
from runner.engine.callbacks import Checkpointing, Log
from runner.engine.errors import Interrupted, Preempted
from runner.engine.loop import Loop


class Diary:
    """Writes down every call with the step it came at."""

    def __init__(self, name: str = "", book: list[str] | None = None) -> None:
        self.name, self.book = name, [] if book is None else book

    def _note(self, event: str, loop: Loop, metrics: Iterable[str] = ()) -> None:
        assert list(metrics) == ["val/loss"] * (event == "evaluation")
        position = loop.state.position
        place = f"{position.global_step}:{position.epoch}.{position.batch}"
        self.book.append(" ".join(filter(None, [self.name, event, place])))

    on_start = functools.partialmethod(_note, "start")
    on_step = functools.partialmethod(_note, "step")
    on_evaluation = functools.partialmethod(_note, "evaluation")
    on_boundary = functools.partialmethod(_note, "boundary")
    on_end = functools.partialmethod(_note, "end")


def limits(**keys: Any) -> dict[str, Any]:
    return {"epochs": 2, "max_steps": None, **keys}


def keeping(states: list[Any]) -> Checkpointing:
    """Saves the state into a list."""
    return Checkpointing(None, None, lambda loop, *_: states.append(copy.deepcopy(loop.state.state_dict())))


def evaluations(one: Any) -> list[int]:
    diary = Diary()
    one.loop(diary).run()
    return [int(entry.split()[1].split(":")[0]) for entry in diary.book if entry.startswith("evaluation")]


def test_events_come_in_the_documented_order(bench: Any) -> None:
    diary = Diary()
    bench(10, accumulate=2).loop(diary).run()  # three batches an epoch: a window of two and one of one
    assert diary.book == [
        "start 0:0.0",
        "step 1:0.2",
        "boundary 1:0.2",
        "step 2:1.0",
        "evaluation 2:1.0",
        "boundary 2:1.0",
        "step 3:1.2",
        "boundary 3:1.2",
        "step 4:2.0",
        "evaluation 4:2.0",
        "boundary 4:2.0",
        "end 4:2.0",
    ]


def test_callbacks_are_called_in_the_order_of_their_list(bench: Any) -> None:
    book: list[str] = []
    bench(4, limits=limits(epochs=1)).loop(Diary("first", book), Diary("second", book)).run()
    assert [entry.split()[0] for entry in book] == ["first", "second"] * 5


def test_callbacks_with_few_methods_or_none_train_the_same_weights(bench: Any) -> None:
    class OnlyEnd:
        def on_end(self, loop: Loop) -> None:
            self.steps = loop.state.position.global_step

    only, plain, mixed = OnlyEnd(), bench().loop(), None
    plain.run()
    mixed = bench().loop(object(), only, Diary())
    mixed.run()
    assert only.steps == 6
    assert weights_sha256(plain.state.model.state_dict()) == weights_sha256(mixed.state.model.state_dict())


@pytest.mark.parametrize(
    ("keys", "steps", "position"),
    [
        ({"epochs": 2}, 6, (2, 0)),
        ({"epochs": None, "max_steps": 4}, 4, (1, 1)),
        ({"epochs": 2, "max_steps": 3}, 3, (1, 0)),
        ({"epochs": 1, "max_steps": 50}, 3, (1, 0)),
    ],
    ids=str,
)
def test_training_ends_exactly_at_its_limit(
    bench: Any, keys: dict[str, Any], steps: int, position: tuple[int, int]
) -> None:
    loop = bench(10, limits=limits(**keys)).loop()
    loop.run()
    assert loop.state.position.global_step == steps
    assert (loop.state.position.epoch, loop.state.position.batch) == position


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [3, 6, 9, 12]),
        ({"evaluate_every_epochs": 2}, [6, 12]),
        ({"evaluate_every_epochs": 3}, [9, 12]),
        ({"evaluate_every_epochs": None, "evaluate_every_steps": 5}, [5, 10, 12]),
        ({"evaluate_every_epochs": 2, "evaluate_every_steps": 4}, [4, 6, 8, 12]),
        ({"evaluate_every_epochs": None}, []),
        ({"max_steps": 5}, [3, 5]),
    ],
    ids=str,
)
def test_evaluations_come_as_often_as_asked_and_at_the_end(
    bench: Any, keys: dict[str, Any], expected: list[int]
) -> None:
    assert evaluations(bench(10, limits=limits(**{"epochs": 4, **keys}))) == expected
    assert evaluations(bench(10, limits=limits(**{"epochs": 4, **keys}), validate=False)) == []


@pytest.mark.parametrize(
    ("method", "at"),
    [
        *((method, at) for method in ("on_step", "on_log", "on_boundary") for at in (1, 2, 3)),
        ("on_boundary", 15),
        ("on_evaluation", 2),
        ("on_evaluation", 3),
    ],
)
def test_a_run_that_a_callback_ends_is_evaluated_and_saved_once_at_its_last_step(
    bench: Any, method: str, at: int
) -> None:
    evaluated: list[int] = []
    saved: list[tuple[int, bool]] = []
    logged: list[tuple[str, int]] = []

    def ask(loop: Loop, *_: Any) -> None:
        if loop.state.position.global_step == at:
            loop.request_stop("it is enough")

    class Seen:
        def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
            evaluated.append(loop.state.position.global_step)

    def save(loop: Loop, is_best: bool, best: Any) -> None:
        saved.append((loop.state.position.global_step, loop.state.position.evaluation_due))

    asking = type("Asking", (), {method: staticmethod(ask)})()
    log = Log(1 if method == "on_log" else 1000, [lambda split, metrics, step, epoch: logged.append((split, step))])
    limits = {"epochs": 5, "max_steps": None, "evaluate_every_steps": 2}
    loop = bench(limits=limits).loop(asking, log, Seen(), Checkpointing(None, None, save))
    loop.run()
    assert (loop.state.position.global_step, loop.stop_reason) == (at, "it is enough")
    assert evaluated.count(at) == 1
    assert [save for save in saved if save[0] == at] == [(at, False)]
    if method in ("on_step", "on_log"):
        assert ("train", at) in logged, "the last line of training is logged"


def test_the_best_evaluation_is_remembered_with_its_step(bench: Any) -> None:
    values = iter([3.0, 1.0, float("nan"), 2.0, 1.5])
    improved: list[bool] = []

    class Watch:
        def on_boundary(self, loop: Loop) -> None:
            improved.append(loop.improved)

    one = bench(4, limits=limits(epochs=5))
    loop = one.loop(Watch())
    loop._evaluate = lambda: {"val/loss": next(values)}
    loop.run()
    assert improved == [True, True, False, False, False]
    assert loop.state.best is not None
    assert (loop.state.best.value, loop.state.best.global_step, loop.state.best.epoch) == (1.0, 2, 2)


def test_the_learning_rate_of_a_step_is_that_of_its_number(bench: Any) -> None:
    class Halving:
        def factor(self, step: int) -> float:
            return 0.5**step

        def observe(self, metric: float) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    used: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            used.append(self.param_groups[0]["lr"])
            return super().step(closure)

    one = bench(10, optimizer=Noting, lr=0.8)
    state = one.state()
    state.schedule = Halving()
    one.loop(state=state).run()
    assert used == [0.8 * 0.5**step for step in range(6)]


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_signal_is_obeyed_at_the_next_boundary_once_the_state_is_saved(bench: Any, at: int) -> None:
    one, received = bench(10), [""]
    saved: list[Any] = []

    class Signal:
        def on_step(self, loop: Loop) -> None:
            if loop.state.position.global_step == at:
                received[0] = "SIGTERM"

    with pytest.raises(Preempted, match="SIGTERM"):
        one.loop(Signal(), keeping(saved), signals=lambda: received[0]).run()
    assert saved[-1]["position"]["global_step"] == at
    assert saved[-1]["position"]["evaluation_due"] == (at == 3), "an evaluation that was due is made after resuming"

    whole, rest = bench(10).loop(), one.state()
    whole.run()
    rest.load_state_dict(saved[-1])
    one.loop(state=rest).run()
    assert weights_sha256(rest.model.state_dict()) == weights_sha256(whole.state.model.state_dict())
    assert rest.best == whole.state.best


def test_a_signal_that_comes_while_callbacks_run_is_not_obeyed_before_the_state_is_saved(
    bench: Any,
) -> None:
    received, saved = [""], list[Any]()

    class Late:
        """Stands behind the callback that saves, as a signal that comes just after it has looked."""

        def on_boundary(self, loop: Loop) -> None:
            if loop.state.position.global_step == 1:
                received[0] = "SIGTERM"

    loop = bench(10).loop(keeping(saved), Late(), signals=lambda: received[0])
    with pytest.raises(Preempted):
        loop.run()
    assert saved[-1]["position"]["global_step"] == loop.state.position.global_step, (
        "stopped at a step that was not saved"
    )


def test_an_evaluation_that_a_signal_broke_off_is_made_after_resuming(bench: Any) -> None:
    one, received, saved = bench(10, limits=limits(epochs=1)), [""], list[Any]()

    def evaluate() -> dict[str, float]:
        received[0] = "SIGTERM"
        raise Interrupted

    loop = one.loop(keeping(saved), signals=lambda: received[0])
    loop._evaluate = evaluate
    with pytest.raises(Preempted):
        loop.run()
    position = {"epoch": 1, "batch": 0, "global_step": 3, "evaluation_due": True, "turns": []}
    assert (saved[-1]["position"], saved[-1]["metrics"]["best"]) == (position, None)
    rest, diary = one.state(), Diary()
    rest.load_state_dict(saved[-1])
    one.loop(diary, state=rest).run()
    assert diary.book == ["start 3:1.0", "evaluation 3:1.0", "boundary 3:1.0", "end 3:1.0"]
    assert rest.best is not None


@pytest.mark.parametrize(("automatic", "fails"), [(True, True), (False, False)])
def test_garbage_is_collected_between_steps_only_and_as_before_afterwards(
    bench: Any, automatic: bool, fails: bool
) -> None:
    seen: list[bool] = []

    class Cycles:
        """Leaves garbage at each step that only the collector can find."""

        left: ClassVar[list[weakref.ref[Any]]] = []

        def on_step(self, loop: Loop) -> None:
            seen.append(gc.isenabled())
            one = Cycles()
            one.itself = one  # type: ignore[attr-defined]
            self.left.append(weakref.ref(one))
            if fails and len(seen) == 1200:
                raise RuntimeError("mine")

    before = gc.isenabled()
    try:
        gc.enable() if automatic else gc.disable()
        loop = bench(4, limits={"epochs": 1200, "max_steps": None}, validate=False).loop(Cycles())
        with pytest.raises(RuntimeError, match="mine") if fails else contextlib.nullcontext():
            loop.run()
        assert seen == [False] * 1200
        assert gc.isenabled() == automatic
        # The first thousand steps' worth was found, whatever came since may still lie about.
        assert sum(reference() is not None for reference in Cycles.left) <= 201
    finally:
        gc.enable() if before else gc.disable()


class Boundaries:
    """Notes the steps of boundaries, and what stops the loop there."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_boundary(self, loop: Loop) -> None:
        self.seen.append((loop.state.position.global_step, loop.stopping))


class Failing:
    """A source that fails instead of giving a batch."""

    def __init__(self, source: Any, batch: int) -> None:
        self.source, self.batch = source, batch

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        yield from self.source.batches(epoch, start, self.batch)
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("accumulate", "batch", "saved"),
    [(1, 0, []), (1, 3, [(3, "OSError")]), (2, 2, [(1, "OSError")]), (2, 3, [])],
    ids=["before the first step", "between steps", "between windows", "inside a window"],
)
def test_when_reading_fails_callbacks_see_the_boundary_that_the_state_stands_at(
    accumulate: int, batch: int, saved: list[tuple[int, str]], bench: Any
) -> None:
    boundaries = Boundaries()
    loop = bench(20, batch_size=4, accumulate=accumulate).loop(boundaries)
    loop.source = Failing(loop.source, batch)
    with pytest.raises(OSError, match="the disk is gone"):
        loop.run()
    assert [seen for seen in boundaries.seen if seen[1]] == saved


def test_when_an_evaluation_fails_it_is_still_due_in_what_is_saved(bench: Any) -> None:
    class Due(Boundaries):
        def on_boundary(self, loop: Loop) -> None:
            super().on_boundary(loop)
            assert loop.state.position.evaluation_due

    def fails() -> dict[str, float]:
        raise OSError("the disk is gone")

    due = Due()
    loop = bench(8, batch_size=8).loop(due)
    loop._evaluate = fails
    with pytest.raises(OSError, match="the disk is gone"):
        loop.run()
    assert due.seen == [(1, "OSError")]


def test_a_save_that_fails_too_does_not_hide_what_failed_first(bench: Any) -> None:
    class Full:
        def on_boundary(self, loop: Loop) -> None:
            if loop.stopping:
                raise ValueError("the disk is full")

    loop = bench(20, batch_size=4).loop(Full())
    loop.source = Failing(loop.source, 3)
    with pytest.raises(OSError, match="the disk is gone"):
        loop.run()
