"""The digits data set."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from runner.data import digits as module
from runner.data.digits import digits


@pytest.fixture(scope="module")
def reference() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * 255 / 16).astype(np.uint8)
    return torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(bunch.target.astype(np.int64))


def test_images_and_labels_are_those_of_scikit_learn(reference):
    train = digits()["train"]
    assert train.images.shape == (1797, 1, 8, 8)
    assert torch.equal(train.images, reference[0])
    assert torch.equal(train.targets, reference[1])
    assert train.classes == tuple("0123456789")


def test_grey_levels_span_the_whole_byte():
    images = digits()["train"].images
    assert images.min() == 0
    assert images.max() == 255
    assert len(images.unique()) == 17


def test_only_the_training_split_is_given():
    assert list(digits()) == ["train"]


def test_reading_imports_neither_scikit_learn_nor_torchvision():
    code = (
        "import sys; from runner.data.digits import digits; digits();"
        "assert not {'sklearn', 'scipy', 'torchvision'} & set(sys.modules), 'a slow import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("spec", ["nowhere", None])
def test_a_release_without_the_file_is_read_through_scikit_learn(monkeypatch, tmp_path, reference, spec):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: Spec() if spec else None)
    rows = module._packaged_rows()
    assert rows is None
    assert np.array_equal(module._rows_by_sklearn()[:, -1], reference[1].numpy())
    monkeypatch.setattr(module, "_packaged_rows", lambda: None)
    assert torch.equal(digits()["train"].images, reference[0])
