"""ImageArrays: what it accepts and how it is read."""

import pickle

import pytest
import torch

from runner.data.sources.arrays import ImageArrays


def _arrays(count: int = 6) -> ImageArrays:
    images = torch.arange(count * 3 * 4 * 5).remainder(256).to(torch.uint8).reshape(count, 3, 4, 5)
    return ImageArrays(images, torch.arange(count) % 2, ("a", "b"))


def test_items_are_image_and_target_also_of_a_copy():
    arrays = _arrays()
    for each in (arrays, pickle.loads(pickle.dumps(arrays))):
        image, target = each[3]
        assert torch.equal(image, arrays.images[3])
        assert (target.item(), len(each), each.classes) == (1, 6, ("a", "b"))


def test_regression_targets_have_no_classes():
    images = torch.zeros(2, 1, 3, 3, dtype=torch.uint8)
    assert ImageArrays(images, torch.tensor([0.5, -1.0])).classes == ()
    with pytest.raises(ValueError, match="no classes"):
        ImageArrays(images, torch.tensor([0.5, -1.0]), ("a",))
    with pytest.raises(ValueError, match="finite"):
        ImageArrays(images, torch.tensor([0.5, float("nan")]))


@pytest.mark.parametrize(
    ("images", "targets", "message"),
    [
        (torch.zeros(2, 1, 3, 3), torch.tensor([0, 1]), "uint8"),
        (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.tensor([0, 1]), r"\(N, C, H, W\)"),
        (torch.zeros(0, 1, 3, 3, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), "empty"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1, 1]), "one for each image"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([[0], [1]]), r"\(2, 1\)"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.int32), "int32"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 2]), "from 0 to 2"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([-1, 1]), "from -1 to 1"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8, device="meta"), torch.tensor([0, 1]), "on the cpu"),
    ],
)
def test_wrong_tensors_are_refused(images, targets, message):
    with pytest.raises(ValueError, match=message):
        ImageArrays(images, targets, ("a", "b"))
