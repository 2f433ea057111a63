"""Evaluation gives exact numbers and leaves training as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.data.loaders import Batch
from runner.engine.errors import BadMetric, Interrupted
from runner.engine.evaluation import evaluate
from runner.engine.step import Supervised
from runner.instrument.no_trace import evaluating
from runner.tasks.classification import Classification


class Model(nn.Module):
    """BatchNorm that trains, BatchNorm that is frozen, dropout, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(12, 3)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append((torch.is_inference_mode_enabled(), self.drop.training))
        return self.head(self.drop(self.frozen(self.first(images)).flatten(1)))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model().train()
    made.frozen.eval()
    return made


def evaluated(model: nn.Module, source: Any, metrics: dict[str, Any], **keys: Any) -> dict[str, float]:
    steps = Supervised(model, nn.CrossEntropyLoss(), lambda targets: targets)
    return evaluate(model, source, steps.evaluated, metrics=metrics, **keys)


def test_the_model_is_in_evaluation_and_inference_mode(bench: Any, model: Model) -> None:
    bench().evaluate(model)
    assert set(model.seen) == {(True, False)}
    assert not torch.is_inference_mode_enabled()


def test_a_metric_that_keeps_outputs_keeps_them_although_the_model_writes_over_them(bench: Any) -> None:
    class Reuses(nn.Module):
        """Gives the same memory for every batch, as a CUDA graph does."""

        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.zeros(4, 3)
            self.calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return self.memory.fill_(self.calls)[: len(images)]

    class Keeps:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

        def update(self, logits: Tensor, targets: Tensor) -> None:
            self.kept.append(logits)

        def compute(self) -> Tensor:
            return torch.stack([logits[0, 0] for logits in self.kept])

    one, keeps, reuses = bench(12), Keeps(), Reuses()
    evaluated(reuses, one.source, {"kept": keeps})
    assert keeps.compute().tolist() == [1, 2, 3]


def test_modes_and_generators_come_back_after_an_error(model: Model) -> None:
    before = torch.get_rng_state()

    def fails() -> None:
        with evaluating(model):
            torch.rand(3)
            assert not model.first.training
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fails()
    assert model.first.training
    assert not model.frozen.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("samples", "size"), [(10, 4), (9, 2), (8, 4), (3, 100)])
def test_the_loss_is_the_mean_over_samples_whatever_the_batches(
    bench: Any, model: Model, samples: int, size: int
) -> None:
    one = bench(samples, batch_size=size)
    found = one.evaluate(model)["val/loss"]
    model.eval()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(one.images).double(), one.targets)
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_accuracy_tables_and_confusion_equal_a_count_by_hand(bench: Any, model: Model) -> None:
    one, task = bench(31), Classification(3)
    tables, metrics = task.tables(torch.device("cpu")), task.metrics(torch.device("cpu"))
    found = evaluated(model, one.source, metrics | tables)
    model.eval()
    guesses = model(one.images).argmax(1)
    assert found["accuracy"] == pytest.approx(int((guesses == one.targets).sum()) / 31, abs=1e-6)
    assert set(found) == {"loss", "accuracy"}, "tables are not scalars"
    by_hand = torch.zeros(3, 3, dtype=torch.int64)
    for truth, guess in zip(one.targets.tolist(), guesses.tolist(), strict=True):
        by_hand[truth, guess] += 1
    with torch.inference_mode():
        assert tables["confusion"].compute().tolist() == by_hand.tolist()
        per_class = tables["per_class"].compute().tolist()
    assert per_class == pytest.approx((by_hand.diag() / by_hand.sum(1)).tolist(), abs=1e-6)


def test_a_limit_uses_the_first_batches_alone(bench: Any, model: Model) -> None:
    one = bench(10)
    limited = evaluated(model, one.source, {}, limit=2)
    chosen = torch.cat([batch.indices for batch in one.source.batches(0, 0, 2)])
    model.eval()
    expected = nn.functional.cross_entropy(model(one.images[chosen]).detach().double(), one.targets[chosen])
    assert limited["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_the_device_is_asked_for_numbers_only_at_the_end(bench: Any, model: Model) -> None:
    one, asked = bench(20), []
    read: list[int] = []
    original = Tensor.__float__

    class Source:
        def __len__(self) -> int:
            return 5

        def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
            for batch in one.source.batches(epoch, start, stop):
                asked.append(len(read))
                yield batch

    def noting(tensor: Tensor) -> float:
        read.append(1)
        return original(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__float__", noting)
        evaluated(model, Source(), {})
    assert asked == [0, 0, 0, 0, 0]
    assert len(read) == 1


def test_an_interrupted_evaluation_ends_before_the_next_batch(bench: Any, model: Model) -> None:
    answers = iter([False, True])
    with pytest.raises(Interrupted):
        bench(20).evaluate(model, lambda: next(answers))
    assert len(model.seen) == 1
    assert model.first.training


def test_nothing_to_evaluate_is_an_error_and_no_number(bench: Any, model: Model) -> None:
    one = bench(4)
    one.images, one.targets = one.images[:0], one.targets[:0]
    with pytest.raises(BadMetric, match="no sample"):
        one.evaluate(model)


def test_each_batch_draws_the_numbers_of_its_place_without_a_visit_of_every_backend(
    bench: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = [], [float(torch.rand((), generator=torch.Generator().manual_seed(place))) for place in range(2)]

    def drawing(data: Any) -> dict[str, Any]:
        found.append(float(torch.rand(())))
        return {"loss": torch.zeros(())}

    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it takes a stack trace while no GPU is in use"))
    evaluate(model, bench(8, batch_size=4).source, drawing, metrics={})
    assert found[:2] == expected
