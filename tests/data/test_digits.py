"""The digits data set."""

import numpy as np
import pytest
import torch

from runner.data.sources import digits as module
from runner.data.sources.digits import digits


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
