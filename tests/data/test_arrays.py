"""Images in memory: what ImageArrays accepts and how it is read, the digits, and synthetic images."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.sources import digits as module
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.digits import digits
from runner.data.sources.synthetic import synthetic


def _arrays(count: int = 6) -> ImageArrays:
    images = torch.arange(count * 3 * 4 * 5).remainder(256).to(torch.uint8).reshape(count, 3, 4, 5)
    return ImageArrays(images, torch.arange(count) % 2, ("a", "b"))


def test_items_are_image_and_target_also_of_a_copy():
    arrays = _arrays()
    for each in (arrays, pickle.loads(pickle.dumps(arrays))):
        image, target = each[3]
        assert torch.equal(image, arrays.images[3])
        assert (target.item(), len(each), each.classes) == (1, 6, ("a", "b"))


BLANK = torch.zeros(2, 1, 3, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "targets", "classes", "message"),
    [
        (BLANK.float(), torch.tensor([0, 1]), ("a", "b"), "uint8"),
        (BLANK[:, 0], torch.tensor([0, 1]), ("a", "b"), r"\(N, C, H, W\)"),
        (BLANK[:0], torch.tensor([0, 1])[:0], ("a", "b"), "empty"),
        (BLANK, torch.tensor([0, 1, 1]), ("a", "b"), "one for each image"),
        (BLANK, torch.tensor([[0], [1]]), ("a", "b"), r"\(2, 1\)"),
        (BLANK, torch.tensor([0, 1], dtype=torch.int32), ("a", "b"), "int32"),
        (BLANK, torch.tensor([0, 2]), ("a", "b"), "from 0 to 2"),
        (BLANK, torch.tensor([-1, 1]), ("a", "b"), "from -1 to 1"),
        (BLANK.to("meta"), torch.tensor([0, 1]), ("a", "b"), "on the cpu"),
        (BLANK, torch.tensor([0.5, -1.0]), ("a",), "no classes"),
        (BLANK, torch.tensor([0.5, float("nan")]), (), "finite"),
    ],
)
def test_wrong_tensors_are_refused(images, targets, classes, message):
    with pytest.raises(ValueError, match=message):
        ImageArrays(images, targets, classes)


@pytest.fixture(scope="module")
def reference() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * 255 / 16).astype(np.uint8)
    return torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(bunch.target.astype(np.int64))


def test_images_and_labels_are_those_of_scikit_learn(reference):
    assert list(digits()) == ["train"]
    train = digits()["train"]
    assert train.images.shape == (1797, 1, 8, 8)
    assert torch.equal(train.images, reference[0])
    assert torch.equal(train.targets, reference[1])
    assert train.classes == tuple("0123456789")


@pytest.mark.parametrize("spec", ["nowhere", None])
def test_a_release_without_the_file_is_read_through_scikit_learn(monkeypatch, tmp_path, reference, spec):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: Spec() if spec else None)
    assert torch.equal(digits()["train"].images, reference[0])


def test_classes_may_be_kept_in_any_order():
    whole, some = digits()["train"], digits([7, 2, 5])["train"]
    assert some.classes == ("7", "2", "5")
    for number, digit in enumerate((7, 2, 5)):
        assert torch.equal(some.images[some.targets == number], whole.images[whole.targets == digit])
    assert len(some) == sum(int((whole.targets == digit).sum()) for digit in (7, 2, 5))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_images_are_a_function_of_the_arguments_alone(kind):
    before = torch.get_rng_state()
    first, second, other = (synthetic(40, 8, kind=kind, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    for split in ("train", "test"):
        assert torch.equal(first[split].images, second[split].images)
        assert torch.equal(first[split].targets, second[split].targets)
    assert not torch.equal(first["train"].images, other["train"].images)


def test_the_number_of_threads_does_not_change_it(threads):
    one = synthetic(300, 32, kind="regression")["train"]
    threads(1 if torch.get_num_threads() > 1 else 2)
    other = synthetic(300, 32, kind="regression")["train"]
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
