"""The metrics of the shipped tasks, and of pixels, are those of torchmetrics, to the last bit where it has the same one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from runner.engine.evaluation import merges
from runner.engine.metrics import Accuracy, AveragePrecision, Errors, LabelCounts, PixelCounts, class_numbers
from runner.tasks.classification import Classification
from runner.tasks.multilabel import MultiLabel
from runner.tasks.regression import Regression

CPU = torch.device("cpu")


def drawn(samples: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits with some equal ones, and 0 or 1 for each."""
    source = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(samples, width, generator=source)).round(decimals=1)
    return logits, (torch.rand(samples, width, generator=source) < 0.3).float()


def of(metric: Any, outputs: Tensor, targets: Tensor, size: int = 7) -> Any:
    """The value over batches; the last one is smaller."""
    metric.reset()
    for some, their in zip(outputs.split(size), targets.split(size), strict=True):
        metric.update(some, their)
    return metric.compute()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("samples", [5, 64, 1001])
def test_the_values_are_the_bits_of_torchmetrics(samples: int, width: int) -> None:
    from torchmetrics import classification, regression

    logits, labels = drawn(samples, width)
    numbers = logits.roll(1, 0) / 3
    if width > 1:
        classes = labels.argmax(1)
        theirs = classification.MulticlassAccuracy(width, average="micro")
        assert of(Accuracy(CPU), logits, classes) == of(theirs, logits, classes)
        assert of(Accuracy(CPU), logits, torch.nn.functional.one_hot(classes, width).float()) == theirs.compute()
        for name, each in (("mae", regression.MeanAbsoluteError), ("mse", regression.MeanSquaredError)):
            found = of(Errors(width, CPU, name == "mse", each=True), logits, numbers)
            expected = of(each(num_outputs=width), logits, numbers)
            assert torch.equal(found, expected.sqrt() if name == "mse" else expected)
            whole = of(Errors(width, CPU, name == "mse"), logits, numbers)
            torch.testing.assert_close(whole, expected.mean().sqrt() if name == "mse" else expected.mean())
        kinds = {"f1": classification.MultilabelF1Score, "precision": classification.MultilabelPrecision}
        for score, kind in (kinds | {"recall": classification.MultilabelRecall}).items():
            for average in ("none", "macro"):
                own = LabelCounts(width, CPU, 0.6, score, each=average == "none")  # type: ignore[arg-type]
                expected = of(kind(width, threshold=0.6, average=average), logits.sigmoid(), labels.long())
                found = of(own, logits, labels)
                torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-6, atol=0)
        return
    assert of(Errors(1, CPU, False), logits, numbers) == of(regression.MeanAbsoluteError(), logits, numbers)
    root = regression.MeanSquaredError(squared=False)
    assert of(Errors(1, CPU, True), logits, numbers) == of(root, logits, numbers)


def test_average_precision_is_scikit_learn_s_and_leaves_out_labels_without_samples() -> None:
    logits, labels = drawn(90, 3)
    labels[:, 1] = 0
    found = of(AveragePrecision(each=True), logits, labels)
    expected = [float(average_precision_score(labels[:, at], logits[:, at])) for at in (0, 2)]
    assert [float(found[0]), float(found[2])] == pytest.approx(expected, rel=1e-6)
    assert found[1].isnan()
    assert float(of(AveragePrecision(), logits, labels)) == pytest.approx(sum(expected) / 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Classification(3).metrics(CPU)["accuracy"],
        lambda: Regression(3).metrics(CPU)["rmse"],
        lambda: MultiLabel(3).metrics(CPU)["f1"],
        lambda: MultiLabel(3).metrics(CPU)["map"],
    ],
)
def test_states_of_ranks_add_up(build: Callable[[], Any]) -> None:
    logits, labels = drawn(20, 3)
    targets = labels.argmax(1) if isinstance(build(), Accuracy) else labels
    parts, joined = [build(), build()], build()
    ways = merges(joined)
    assert ways is not None
    for part, rows in zip(parts, (slice(0, 12), slice(12, 20)), strict=True):
        part.update(logits[rows], targets[rows])
    for name, way in ways.items():
        assert way is operator.add
        setattr(joined, name, way(getattr(parts[0], name), getattr(parts[1], name)))
    assert joined.compute() == of(build(), logits, targets, 12)


def test_metrics_of_the_config_get_what_torchmetrics_takes() -> None:
    logits, labels = drawn(20, 3)
    probabilities, numbers = MultiLabel(3).for_metrics(logits, labels)
    assert numbers.dtype == torch.int64
    assert bool(((probabilities >= 0) & (probabilities <= 1)).all())
    soft = torch.tensor([[0.2, 0.7, 0.1]])
    assert class_numbers(soft).tolist() == [1]
    assert Classification(3).for_metrics(soft, soft)[1].tolist() == [1]


def score(name: str, predicted: Tensor, true: Tensor, size: int, classes: int = 5, ignored: int = 255) -> Tensor:
    return of(PixelCounts(classes, ignored, CPU, name), predicted, true, size)  # type: ignore[arg-type]


@pytest.fixture
def pixels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 4, (7, 9, 11), generator=generator)  # class 4 is neither predicted nor true
    others = torch.randint(0, 3, (7, 9, 11), generator=generator)
    true = predicted.where(torch.rand(7, 9, 11, generator=generator) < 0.5, others)
    true[:, :2] = 255
    return predicted, true


@pytest.mark.parametrize("size", [1, 3, 7])
def test_scores_of_pixels_are_those_of_torchmetrics_for_any_batches(pixels: tuple[Tensor, Tensor], size: int) -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

    predicted, true = pixels
    jaccard = MulticlassJaccardIndex(5, ignore_index=255)(predicted, true)
    assert float(score("miou", predicted, true, size)) == pytest.approx(float(jaccard), abs=1e-6)
    right = MulticlassAccuracy(5, average="micro", ignore_index=255)(predicted, true)
    assert float(score("accuracy", predicted, true, size)) == pytest.approx(float(right), abs=1e-6)
    assert score("matrix", predicted, true, size).equal(MulticlassConfusionMatrix(5, ignore_index=255)(predicted, true))


def test_scores_of_pixels_follow_their_definition(pixels: tuple[Tensor, Tensor]) -> None:
    predicted, true = pixels
    counts, found = true != 255, score("iou", predicted, true, 2)
    for number in range(4):
        both = ((predicted == number) & (true == number)).sum()
        either = (((predicted == number) | (true == number)) & counts).sum()
        assert float(found[number]) == float(both / either.double())
    assert bool(found[4].isnan())
    assert float(score("miou", predicted, true, 2)) == float(found[:4].mean())
    recall = score("recall", predicted, true, 2)
    assert float(recall[1]) == float(((predicted == 1) & (true == 1)).sum() / (true == 1).sum().double())


def test_an_ignored_class_may_be_one_of_the_classes(pixels: tuple[Tensor, Tensor]) -> None:
    predicted, true = pixels
    assert int(score("matrix", predicted, true, 7, ignored=0)[0].sum()) == 0
