"""Every shipped transform gives the same bits in any split of the samples, from memory and through workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some
from read_splits import read_splits, read_words
from small_loaders import CPU, read, same

from runner.config.schema.sections import Data, Transform
from runner.config.targets import build
from runner.data.loaders import Batch
from runner.data.module import DataModule
from runner.data.sample_rng import SampleRNG
from runner.data.transforms import augment, auto_augment, color_jitter, mixing, resized_crop
from runner.data.transforms.augment import Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]

TRAIN: dict[str, dict[str, Any]] = {
    "runner.data.transforms.augment.RandomShift": {"share": 0.3},
    "runner.data.transforms.augment.RandomFlip": {},
    "runner.data.transforms.augment.RandomBrightnessContrast": {},
    "runner.data.transforms.augment.RandomErasing": {"p": 0.8, "share": 0.5},
    "runner.data.transforms.color_jitter.ColorJitter": {"hue": 0.2},
    "runner.data.transforms.resized_crop.RandomResizedCrop": {},
    "runner.data.transforms.auto_augment.RandAugment": {"num_ops": 3, "magnitude": 15},
    "runner.data.transforms.auto_augment.TrivialAugment": {},
}
MIX: dict[str, dict[str, Any]] = {
    "runner.data.transforms.mixing.Mixup": {"alpha": 0.5},
    "runner.data.transforms.mixing.CutMix": {},
    "runner.data.transforms.mixing.OneOf": {
        "choices": [
            {"_target_": "runner.data.transforms.mixing.Mixup"},
            {"_target_": "runner.data.transforms.mixing.CutMix"},
        ]
    },
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *TRAIN.items(),
    ("runner.data.transforms.augment.RandomShift", {"share": 0.3, "padding": "edge"}),
    ("runner.data.transforms.augment.RandomShift", {"share": 0.3, "padding": "reflect"}),
    ("runner.data.transforms.augment.RandomFlip", {"alternate": True}),
]
cases = pytest.mark.parametrize(
    ("target", "arguments"), CASES, ids=[f"{target.rsplit('.')[-1]}-{words}" for target, words in CASES]
)


GROWING = ("runner.data.transforms.growing.GrowingSize", {"smallest": 5, "begin": 2, "end": 4})  # square images only


def built(target: str, arguments: dict[str, Any]) -> Any:
    return build("transform.train.0", {"_target_": target, **arguments})


def test_no_transform_is_left_out() -> None:
    there = {
        f"{module.__name__}.{name}"
        for module in (augment, color_jitter, resized_crop, auto_augment, mixing)
        for name, made in vars(module).items()
        if inspect.isclass(made)
        and made.__module__ == module.__name__
        and name not in ("Pipeline", "Mixing", "_Policy")
    }
    assert there == {*TRAIN, *MIX}


@cases
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_split_of_the_samples_changes_no_bit(
    target: str, arguments: dict[str, Any], dtype: torch.dtype, channels_last: bool, threads: Callable[[int], None]
) -> None:
    transform = built(target, arguments)
    assert transform.per_sample
    pipeline = Pipeline([transform], [0.1, 0.5, 0.7], [0.3, 0.2, 0.21], 0, CPU, channels_last=channels_last)
    # Odd sizes leave tails of all lengths behind the vectors; the larger images are shared out between threads.
    for count, height, width, size in ((70, 5, 7, 9), (33, 13, 11, 1), (6, 90, 75, 5)):
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
        images = images if dtype == torch.uint8 else images / 255
        indices = torch.arange(count) * 5
        threads(1)
        whole = pipeline(images, indices, 2)
        threads(2)
        parts = [pipeline(*part, 2) for part in zip(images.split(size), indices.split(size), strict=True)]
        assert torch.equal(whole, torch.cat(parts))


@cases
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_dtype_shape_and_range_are_kept_and_the_input_is_left_alone(
    target: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 8, 6), generator=generator, dtype=torch.uint8)
    images = images if dtype == torch.uint8 else images.to(dtype) / 255
    before = images.clone()
    out = built(target, arguments)(images, SampleRNG(11, 0, torch.arange(64)))
    assert (out.dtype, out.shape) == (dtype, images.shape)
    assert out.min() >= 0
    assert out.max() <= (255 if dtype == torch.uint8 else 1)
    assert torch.equal(images, before)


def batches(splits: DataModule) -> list[Batch]:
    loader = splits.train.loader
    count = -(-loader.samples // loader.batch_size)
    found = [*read(loader, 0, 0, count), *read(loader, 3, 0, count)]
    # Where a run is resumed inside an epoch, the rest of it is as it was.
    assert same(read(loader, 3, 2, count), found[count + 2 :])
    return found


@pytest.mark.parametrize("channels_last", some([False, True], 1))
@pytest.mark.parametrize(("target", "arguments"), [*CASES, *MIX.items(), GROWING], ids=str)
def test_memory_and_workers_give_the_same_bits(target: str, arguments: dict[str, Any], channels_last: bool) -> None:
    node = {"_target_": target, **arguments}
    transform = Transform(mix=node) if target in MIX else Transform(train=[node])
    dataset = {"_target_": "runner.data.sources.synthetic.synthetic", "samples": 75, "image_size": 8, "classes": 5}
    found = []
    for keys in ({"placement": "ram"}, {"placement": "disk", "num_workers": 2 if channels_last else 0}):
        data = Data(dataset=dataset, batch_size=16, pin_memory=False, **keys)  # type: ignore[arg-type]
        found.append(batches(read_splits(data, transform, channels_last=channels_last)))
    assert same(*found)
    for memory, workers in zip(*found, strict=True):
        assert memory.images.stride() == workers.images.stride()
        assert memory.targets.dtype == (torch.float32 if target in MIX else torch.int64)


@pytest.mark.extended
def test_augmix_changes_images_alike_for_any_number_of_workers(compose: Any) -> None:
    words = ("data=synthetic", "data.dataset.samples=40", "data.image_size=8", "data.batch_size=16", "transform=augmix")
    options = ("data.num_workers=0", "data.num_workers=2", "transform.sample_train=[]")
    alone, shared, unchanged = (batches(read_words(compose, *words, option)) for option in options)
    assert same(alone, shared)
    changed = [not torch.equal(*images) for images in zip(alone[0].images, unchanged[0].images, strict=True)]
    assert sum(changed) > 8, "each image has draws of its own, and few of them leave it as it is"
