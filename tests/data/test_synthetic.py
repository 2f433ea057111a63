"""The synthetic data set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.sources.synthetic import synthetic


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_images_are_a_function_of_the_arguments_alone(kind):
    before = torch.get_rng_state()
    first, second, other = (synthetic(40, 8, kind=kind, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    for split in ("train", "test"):
        assert torch.equal(first[split].images, second[split].images)
        assert torch.equal(first[split].targets, second[split].targets)
    assert not torch.equal(first["train"].images, other["train"].images)


def test_the_number_of_threads_does_not_change_it():
    threads = torch.get_num_threads()
    one = synthetic(300, 32, kind="regression")["train"]
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = synthetic(300, 32, kind="regression")["train"]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.targets, other.targets)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 4), st.integers(1, 12), st.sampled_from(["c", "r"]))
def test_shapes_and_types_are_as_asked(samples, size, channels, classes, kind):
    names = {"c": "classification", "r": "regression"}
    splits = synthetic(samples, size, channels, classes, kind=names[kind])
    assert splits["train"].images.shape == (samples, channels, size, size)
    assert len(splits["test"]) == max(1, samples // 4)
    assert splits["train"].targets.dtype == (torch.int64 if kind == "c" else torch.float32)
    assert len(splits["train"].classes) == (classes if kind == "c" else 0)


def test_nearest_training_mean_tells_the_test_classes_apart():
    splits = synthetic(400, None)
    train, test = splits["train"], splits["test"]
    assert train.images.shape == (400, 3, 32, 32)
    assert torch.bincount(train.targets).tolist() == [40] * 10
    means = torch.stack([train.images[train.targets == c].float().mean(0).flatten() for c in range(10)])
    nearest = torch.cdist(test.images.float().flatten(1), means).argmin(1)
    assert (nearest == test.targets).float().mean() > 0.99


def test_a_linear_model_of_the_pixels_regresses_the_targets():
    splits = synthetic(600, 8, channels=1, kind="regression")
    train, test = splits["train"], splits["test"]
    inputs = (train.images.double().flatten(1) - 128) / 48
    weights = torch.linalg.lstsq(inputs, train.targets.double()).solution
    predicted = ((test.images.double().flatten(1) - 128) / 48) @ weights
    assert (predicted - test.targets).abs().max() < 1e-4
    assert 0.5 < test.targets.std() < 2


def test_noise_makes_it_harder():
    spread = [synthetic(200, 8, classes=1, noise=noise)["train"].images.float().std(0).mean() for noise in (0, 0.5, 2)]
    assert spread[0] == 0
    assert spread[0] < spread[1] < spread[2]
