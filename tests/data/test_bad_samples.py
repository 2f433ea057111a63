"""Samples that cannot be read: others take their places, the same ones however they are read, and they are listed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_loaders
import torch
from extended import some
from PIL import Image
from plain_data import noise_image
from read_splits import read_splits
from small_loaders import CPU, Listed, noisy, same

from runner.base.errors import UserError
from runner.config.schema.sections import Data, Split
from runner.data.bad_samples import DRAWS, BadSample, BadSamples, ReplacementSampler
from runner.data.cache import Cache
from runner.data.loaders import BatchPlan, MemoryLoader
from runner.data.sampler import AllSamples
from runner.data.samples import SeededDataset
from runner.data.sources.folders import image_folder
from runner.data.workers import WorkerLoader

PART = torch.arange(40)[torch.arange(40) % 5 != 0]  # 32 samples: four batches
BROKEN = {1, 7, 8, 23, 38}


class Damaged(Listed):
    """Images that say which they are, some of which cannot be read."""

    def __init__(self, broken: set[int], error: Exception | None = None) -> None:
        images: list[Any] = [(torch.full((1, 2, 2), index, dtype=torch.uint8), index) for index in range(40)]
        super().__init__([error or OSError("the disk says no") if item[1] in broken else item for item in images])

    def __getitem__(self, index: int) -> Any:
        torch.rand(3)  # reading may draw before it fails
        return super().__getitem__(index)


def loader(broken: set[int] = BROKEN, found: list[BadSample] | None = None, **options: Any) -> WorkerLoader:
    note, damaged = ([] if found is None else found).extend, Damaged(broken, options.pop("error", None))
    options = {"workers": 0, "on_skipped": note, "replacements": ReplacementSampler(3, PART), **options}
    made: WorkerLoader = small_loaders.small_loader(dataset=damaged, indices=PART, **options)
    return made


read = functools.partial(small_loaders.read, stop=4)


def test_a_replacement_is_another_sample_of_the_split_and_the_rest_are_unchanged() -> None:
    batches, whole = read(loader()), read(loader(set()))
    replacements = ReplacementSampler(3, PART)
    for batch, expected in zip(batches, whole, strict=True):
        assert torch.equal(batch.indices, expected.indices), "a batch names the samples that are its own"
        for image, target, index in zip(*batch.data, batch.indices, strict=True):
            index = int(index)
            source = next(i for i in (index, *replacements.candidates(0, index)) if i not in BROKEN)
            assert int(target) == source
            assert image.unique().tolist() == [source]
            assert source in PART


@pytest.mark.parametrize(
    "options",
    some([{}, {"workers": 1, "prefetch": 1}, {"workers": 3, "prefetch": 8, "persistent_workers": False}], 0, 2),
    ids=str,
)
def test_replacements_and_their_log_are_the_same_for_any_workers_and_wherever_an_epoch_is_entered(
    options: dict[str, Any],
) -> None:
    for epoch in (0, 1):
        expected_skipped: list[BadSample] = []
        expected = read(loader(found=expected_skipped, transforms=(noisy,)), epoch)
        skipped: list[BadSample] = []
        assert same(read(loader(found=skipped, transforms=(noisy,), **options), epoch), expected)
        assert skipped == expected_skipped
        assert {entry.sample for entry in skipped} == BROKEN
        assert {entry.reason for entry in skipped} == {"OSError: the disk says no"}
        assert same(read(loader(transforms=(noisy,), **options), epoch, 2), expected[2:])


def test_who_stands_in_depends_on_seed_epoch_and_sample_and_is_drawn_evenly() -> None:
    draws = {
        (seed, epoch, index): tuple(ReplacementSampler(seed, PART).candidates(epoch, index))
        for seed, epoch, index in itertools.product(range(4), range(4), range(4))
    }
    assert len(set(draws.values())) == len(draws)
    many = torch.tensor([next(ReplacementSampler(0, PART).candidates(0, index)) for index in range(3200)])
    counts = torch.bincount(many, minlength=40)
    assert counts[::5].sum() == 0
    assert 60 < counts[PART].min() <= counts[PART].max() < 140  # 100 each, give or take four standard deviations
    assert next(ReplacementSampler(0, AllSamples(10**12)).candidates(0, 0)) > 10**9


def test_what_happens_to_a_replacement_is_drawn_as_for_the_sample() -> None:
    damaged, whole = (read(loader(broken, transforms=(noisy,))) for broken in (BROKEN, set[int]()))
    for batch, expected in zip(damaged, whole, strict=True):
        noise, expected_noise = (each.images - each.targets.view(-1, 1, 1, 1) / 255 for each in (batch, expected))
        assert torch.allclose(noise, expected_noise, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {},
            UserError,
            rf"^data.on_error: .* \d+ cannot be read, nor can any of {DRAWS}.*the disk says no$",
        ),
        ({"replacements": None}, UserError, r"sample \d+ cannot be read: OSError: the disk .*\n.*data.on_error=skip"),
        ({"error": MemoryError("of the machine")}, MemoryError, "of the machine"),
    ],
    ids=["nothing can be read", "without replacements", "too little memory"],
)
def test_what_is_not_replaced_is_an_error(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    found: list[BadSample] = []
    with pytest.raises(kind, match=words):
        read(loader(set(range(40)), found, **options))
    assert not found


def test_from_memory_the_same_samples_are_replacements() -> None:
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 1, 2, 2).contiguous()
    source_of = functools.partial(ReplacementSampler(3, PART).sources, unreadable=torch.tensor(sorted(BROKEN)))
    memory = MemoryLoader(images, torch.arange(40), BatchPlan(PART, 8, 3, True), CPU, source_of=source_of)
    for epoch in (0, 1):
        assert same(list(memory.batches(epoch, 0, 4)), read(loader(), epoch))


# The whole way, from image files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty images of two classes, four of which are damaged."""
    for number in range(40):
        noise_image(tmp_path / "images" / "ab"[number % 2] / f"{number:02}.png", 6, 6, number)
    damage(tmp_path / "images", "a/00.png", "a/10.png", "b/07.png", "b/39.png")
    return tmp_path / "images"


def damage(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.write_bytes(path.read_bytes()[:40])


def data(folder: Path, **keys: Any) -> Data:
    node = {"_target_": "runner.data.sources.folders.image_folder"}
    keys = {"on_error": "skip", "batch_size": 8, "image_size": 6, "num_workers": 0} | keys
    return Data(dataset=node, root=str(folder), split=Split(val=0.25, test=0.0), **keys)


def test_if_no_measured_image_can_be_read_this_is_what_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.data.build._MEASURED", 2)
    indices = read_splits(data(folder)).parts["train"][1]
    for index in indices[:: len(indices) // 2]:
        path = sorted(folder.rglob("*.png"))[int(index)]
        damage(path.parent, path.name)
    with pytest.raises(UserError, match=r"data.dataset: no sample of .* can be read"):
        read_splits(data(folder))


def test_a_cache_with_gaps_is_rebuilt_for_a_run_that_wants_all_images_and_once_they_are_repaired(folder: Path) -> None:
    settings = data(folder, cache="disk")
    read_splits(settings)
    with pytest.raises(UserError, match=r"cannot read the image .*00\.png"):
        read_splits(data(folder, cache="disk", on_error="raise"))
    Image.new("RGB", (6, 6)).save(folder / "a" / "00.png")
    splits = read_splits(settings)
    assert "was rebuilt: it was made from other files" in splits.warnings[0]
    assert {sample for _, sample in splits.bad_samples._found} == {5, 23, 39}


def test_a_cache_says_of_which_images_it_has_none(folder: Path) -> None:
    dataset = image_folder(str(folder), image_size=6)["train"]
    mapped = Cache(folder.with_name("cache"), "images", {}, skips=True).open(dataset, "train", 0).images
    assert mapped is not None
    assert mapped.unreadable.tolist() == [0, 5, 23, 39]
    for index in (0, 39):
        with pytest.raises(UserError, match="could not be read when the cache was made"):
            mapped[index]
    assert len(mapped) == 40


# The count

NAMED: Any = Listed([ValueError("no image")] * 40)  # knows the files of its samples
NAMED.path = "folder/{}.png".format


def test_a_sample_is_counted_once_and_only_the_first_is_reported() -> None:
    skipped, said = BadSamples(), list[str]()
    assert (skipped.summary(), len(skipped)) == ("", 0)
    note: Callable[[list[BadSample]], None] = functools.partial(skipped.note, "train", NAMED, 100)
    note([BadSample(3, "early")])  # as a cache does, before there is a console
    skipped.open(said.append)
    note([BadSample(3, "early"), BadSample(9, "later")])
    note([BadSample(9, "later")])
    skipped.note("val", object(), 100, [BadSample(9, "elsewhere")])
    assert said == ["sample 3 of train cannot be read and is replaced by another: folder/3.png: early"]
    assert skipped.reasons("train") == {3: "folder/3.png: early", 9: "folder/9.png: later"}
    assert skipped.summary() == "samples could not be read and were replaced by others: 2 of train, 1 of val"


@pytest.mark.parametrize(("share", "samples", "allowed"), [(0.1, 40, 4), (0.1, 4, 1), (0.0, 40, 0), (1.0, 40, 40)])
def test_more_than_a_share_of_a_split_is_refused(share: float, samples: int, allowed: int) -> None:
    skipped = BadSamples(share)
    note = functools.partial(skipped.note, "train", NAMED, samples)
    note([BadSample(sample, "bad") for sample in range(allowed)])
    skipped.note("val", object(), 9, [BadSample(0, "bad")] if share else [])
    if allowed < samples:
        words = rf"max_skipped: {allowed + 1} of the {samples} samples of 'train'.*\.png: bad"
        with pytest.raises(UserError, match=words):
            note([BadSample(39, "bad")])


def test_an_error_names_the_file_of_the_sample_if_the_data_set_knows_it() -> None:
    with pytest.raises(UserError, match=r"sample 7 of 'train', folder/7.png, cannot be read: ValueError: no image \("):
        SeededDataset(NAMED, 0, split="train")[0, 7]
    with pytest.raises(UserError, match=r"sample 7 of 'train' cannot be read"):
        SeededDataset(Damaged({7}), 0, split="train")[0, 7]
