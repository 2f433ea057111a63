"""The confusion matrix of pixels against torchmetrics and the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.engine.metrics import PixelCounts


def score(name: str, predicted: Tensor, true: Tensor, size: int, classes: int = 5, ignored: int = 255) -> Tensor:
    metric = PixelCounts(classes, ignored, torch.device("cpu"), name)  # type: ignore[arg-type]
    for start in range(0, len(true), size):
        metric.update(predicted[start : start + size], true[start : start + size])
    return metric.compute()


@pytest.fixture
def pixels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 4, (7, 9, 11), generator=generator)  # class 4 is neither predicted nor true
    others = torch.randint(0, 3, (7, 9, 11), generator=generator)
    true = predicted.where(torch.rand(7, 9, 11, generator=generator) < 0.5, others)
    true[:, :2] = 255
    return predicted, true


@pytest.mark.parametrize("size", [1, 3, 7])
def test_scores_are_those_of_torchmetrics_for_any_batches(pixels: tuple[Tensor, Tensor], size: int) -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

    predicted, true = pixels
    jaccard = MulticlassJaccardIndex(5, ignore_index=255)(predicted, true)
    assert float(score("miou", predicted, true, size)) == pytest.approx(float(jaccard), abs=1e-6)
    right = MulticlassAccuracy(5, average="micro", ignore_index=255)(predicted, true)
    assert float(score("accuracy", predicted, true, size)) == pytest.approx(float(right), abs=1e-6)
    assert score("matrix", predicted, true, size).equal(MulticlassConfusionMatrix(5, ignore_index=255)(predicted, true))


def test_scores_follow_their_definition(pixels: tuple[Tensor, Tensor]) -> None:
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
