"""The sections `data` and `transform` become splits, and every choice is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from read_splits import read_splits
from small_loaders import Listed, joined, read
from torch import Tensor

from runner.base.errors import UserError
from runner.config.schema.sections import Data, Normalize, Split, Transform
from runner.data.loaders import Batch
from runner.data.module import DataModule
from runner.data.samples import SeededDataset
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.synthetic import synthetic
from runner.data.workers import WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# Data sets and transforms, as a user would have


class Images(Listed):
    """Forty images of floats, and their classes."""

    def __init__(self, classes: bool = True) -> None:
        self.pixels = pixels = torch.arange(40 * 3 * 6 * 6, dtype=torch.float32).view(40, 3, 6, 6) / 10000
        self.targets = [index % 4 for index in range(40)]
        super().__init__(list(zip(pixels, self.targets, strict=True)))
        if classes:
            self.classes = ["a", "b", "c", "d"]


def unlisted() -> Images:
    """Classes have names, and no attribute tells those of the samples."""
    dataset = Images()
    del dataset.targets
    return dataset


class Triples(Images):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), 1


def constant(samples: int = 20) -> ImageArrays:
    return ImageArrays(torch.ones((samples, 1, 4, 4), dtype=torch.uint8), torch.arange(samples) % 2, ("no", "yes"))


def stream() -> Any:
    return iter([])


def blackened(image: Tensor) -> Tensor:
    return image.mul_(0)


def node(name: str = "", **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}" if name else "runner.data.sources.synthetic.synthetic", **arguments}


def put_together(dataset: dict[str, Any] | None = None, transform: Transform | None = None, **keys: Any) -> DataModule:
    dataset = dataset or node(samples=60, image_size=8, classes=5)
    data = Data(dataset=dataset, **{"batch_size": 16, "num_workers": 0, "pin_memory": False, **keys})
    return read_splits(data, transform)


def choice(splits: DataModule, label: str) -> tuple[str, str]:
    return next((value, reason) for name, value, reason in splits.choices if name == label)


def whole(splits: DataModule, name: str) -> Batch:
    """All samples of a split as they are evaluated."""
    split = splits.eval_split(name)
    assert split is not None
    return joined(read(split.loader, stop=-(-split.samples // split.loader.batch_size)))


def indices(splits: DataModule, name: str) -> set[int]:
    return set(whole(splits, name).indices.tolist())


def test_sample_transforms_go_through_workers() -> None:
    transform = Transform(sample_train=[node("blackened", _partial_=True)])
    assert choice(put_together(transform=transform), "data path") == ("workers", "transform has sample transforms")


@pytest.mark.parametrize("name", ["", "Images"], ids=["in memory", "one by one"])
def test_statistics_are_those_of_the_training_pixels(name: str) -> None:
    splits = put_together(node(name) if name else None)
    chosen = sorted(indices(splits, "train"))
    stored = Images().pixels if name else synthetic(samples=60, image_size=8, classes=5)["train"].images / 255
    pixels = stored[chosen].numpy().astype(np.float64)
    assert splits.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert splits.std == pytest.approx(pixels.std((0, 2, 3)).tolist(), abs=1e-6)
    assert choice(splits, "normalize")[1] == "measured on the training split"
    expected = (pixels - pixels.mean((0, 2, 3), keepdims=True)) / pixels.std((0, 2, 3), keepdims=True)
    assert np.allclose(whole(splits, "train").images.numpy(), expected, atol=1e-4)


def test_constant_pixels_do_not_divide_by_zero() -> None:
    splits = put_together(node("constant"))
    assert splits.std == [1.0]
    assert splits.mean == pytest.approx([1 / 255], abs=1e-6)


def test_given_statistics_are_kept() -> None:
    splits = put_together(normalize=Normalize(mean=[0.25], std=[0.5]))
    assert (splits.mean, splits.std) == ([0.25], [0.5])


def test_without_a_test_split_one_is_carved_and_no_sample_is_in_two() -> None:
    splits = put_together(node("Images"), split=Split(val=0.1, test=0.25))
    train, val, test = (indices(splits, name) for name in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (26, 4, 10)
    assert train | val | test == set(range(40))
    # What training reads, with augmentation and shuffling, is the same set of samples.
    assert set(joined(read(splits.train.loader, 4)).indices.tolist()) == train


def test_classes_are_counted_in_the_training_split_alone() -> None:
    splits = put_together(node("Images"), split=Split(val=0.1, test=0.25))
    targets = whole(splits, "train").targets
    assert splits.classes == ("a", "b", "c", "d")
    assert splits.class_counts is not None
    assert splits.class_counts.tolist() == torch.bincount(targets, minlength=4).tolist()
    assert splits.class_counts.dtype == torch.int64


def test_classes_without_names_are_numbered_and_regression_has_none() -> None:
    assert put_together(node("Images", classes=False)).classes == ("0", "1", "2", "3")
    regression = put_together(node(samples=40, image_size=8, kind="regression"))
    assert regression.classes == ()
    assert regression.class_counts is None


def test_only_training_is_augmented_and_shuffled() -> None:
    transform = Transform(train=[{"_target_": "runner.data.transforms.augment.RandomErasing", "p": 1.0, "share": 1.0}])
    splits = put_together(transform=transform)
    images, places = torch.full((4, 3, 8, 8), 255, dtype=torch.uint8), torch.arange(4)
    assert not torch.equal(splits.train.prepare(images, places, 0), splits.train_for_eval.prepare(images, places, 0))
    for loader, ordered in ((splits.train_for_eval.loader, True), (splits.train.loader, False)):
        order = joined(read(loader, 7, stop=2)).indices.tolist()
        assert (order == sorted(order)) == ordered
    assert splits.train.loader.batch_size == 16
    assert splits.train_for_eval.loader.batch_size == 32


@pytest.mark.parametrize(
    ("dataset", "keys", "words"),
    [
        (node("stream"), {}, "no length or no items"),
        (node("Triples"), {}, r"a pair \(image, target\)"),
        (None, {"transform": Transform(train=[{"_target_": "builtins.dict"}])}, "transform.train.0: builtins.dict gives"),
        (None, {"normalize": Normalize(mean=[0.1, 0.2], std=[0.5, 0.5])}, "data.normalize: has 2 values, but the images"),
        (node(samples=40, kind="regression"), {"sampler": "balanced"}, r"data.sampler: .* are not one class per sample"),
        (node("unlisted"), {"sampler": "balanced"}, r"data.sampler: is balanced.* are not known without reading"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reported(dataset: dict[str, Any] | None, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        put_together(dataset, **keys)


def test_the_example_is_the_first_training_sample() -> None:
    splits = put_together()
    image, target = splits.example
    stored = synthetic(samples=60, image_size=8, classes=5)["train"]
    first = int(next(iter(splits.train_for_eval.loader.batches(0, 0, 1))).indices[0])
    assert torch.equal(image[0], stored.images[first])
    assert int(target[0]) == int(stored.targets[first])


@pytest.mark.parametrize("name", ["", "Images"])
def test_a_transform_that_works_in_place_leaves_the_data_set_as_it_is(name: str) -> None:
    steps = [node("blackened", _partial_=True)]
    splits = put_together(node(name), Transform(sample_train=steps, sample_eval=steps), num_workers=0)
    assert isinstance(splits.train.loader, WorkerLoader)
    keyed = splits.train.loader._loader.dataset
    assert isinstance(keyed, SeededDataset)
    before = [keyed.dataset[index][0].clone() for index in range(1, 20)]
    assert all(image.any() for image in before)
    assert not next(iter(splits.train.loader.batches(0, 0, 1))).images.any()
    assert all(torch.equal(keyed.dataset[place + 1][0], image) for place, image in enumerate(before))


def test_copies_of_the_first_sample_do_not_copy_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = read_splits(Data(dataset={"_target_": "runner.data.sources.synthetic.synthetic"}, num_workers=0))
    monkeypatch.setattr("copy.deepcopy", lambda value: pytest.fail("a view would be copied with all of its storage"))
    assert len(splits.example_batch(64).indices) == 64
