"""Shards of any data set of images with class numbers, masks or boxes: tar files that `runner.data.sources.shards` reads."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, features
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import replacing, write_atomically, writing
from runner.base.reading import LARGEST_DATA, read_regular
from runner.config.schema.verbs import Pack
from runner.data.cache import cache_key
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.sampler import EpochOrder
from runner.data.samples import SeededDataset, as_target
from runner.data.sources.bands import KEPT
from runner.data.sources.detection import DetectionImages
from runner.data.sources.folders import ImageList
from runner.data.sources.image_io import smaller_file
from runner.data.sources.listing import EXTENSIONS
from runner.data.sources.masks import MaskFolder
from runner.data.sources.shards import LocalShard, index_of, packed_index
from runner.data.sources.tar_samples import LARGEST_CLASS, NO_IMAGES, Kind
from runner.data.splits import Parts


@functools.cache
def _order(samples: int, seed: int, shuffle: bool) -> EpochOrder:
    return EpochOrder(samples, seed, 0, shuffle=shuffle)


@dataclass(frozen=True)
class Packer:
    """Writes shards: each is a function of the data, the settings and its number.

    Attributes:
        parts: the splits. The order of the training samples is a permutation of `seed`: folders are sorted by class, and
            each shard is to have samples of all classes.
        folder: gets a folder of shards for each split.
        config: the settings.
    """

    parts: Parts
    folder: Path
    config: Pack

    @property
    def target(self) -> Kind:
        """What samples have besides their image."""
        kinds: dict[type, Kind] = {MaskFolder: "mask", DetectionImages: "boxes"}
        return kinds.get(type(self.parts["train"][0]), "class")

    def shards(self) -> list[tuple[str, int]]:
        """Split and number of each shard."""
        counts = {split: -(-len(indices) // self.config.shard_samples) for split, (_, indices) in self.parts.items()}
        return [(split, number) for split, count in counts.items() for number in range(count)]

    def path(self, split: str, number: int) -> Path:
        """The file of a shard."""
        return self.folder / split / f"{number:06d}.tar"

    def samples(self, split: str, number: int) -> int | None:
        """Samples of a shard that is finished, else None."""
        path = self.path(split, number)
        # The index is written last
        index = packed_index(path, path.stat().st_size, self.target).read() if path.exists() else None
        return None if index is None else len(index["labels"])

    def write(self, split: str, number: int) -> list[str]:
        """Write a shard and its index; returns why images were skipped. Raises `UserError` as `sample`, or if it cannot write."""
        path, skipped, first = self.path(split, number), [], number * self.config.shard_samples
        order = _order(len(self.parts[split][1]), self.config.seed, split == "train")
        samples = order.slice(first, first + self.config.shard_samples).tolist()
        with replacing(path) as file:
            tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)
            for place in samples:
                parts = self.attempt(split, place)
                if isinstance(parts, str):
                    skipped.append(parts)
                    continue
                for name, part in parts.items():
                    member = tarfile.TarInfo(f"{place:09d}.{name}")  # of no time and no user
                    member.size = len(part)
                    with writing(path):
                        tar.addfile(member, io.BytesIO(part))
            with writing(path):
                tar.close()
        index_file = packed_index(path, path.stat().st_size, self.target)
        index = index_of(LocalShard.of(path), "", self.target) if len(skipped) < len(samples) else NO_IMAGES
        write_atomically(index_file.path, index_file.content(index))
        return skipped

    def attempt(self, split: str, index: int) -> dict[str, bytes] | str:
        """`sample`, or why it is skipped: as in training, if its file cannot be read; other errors name a key."""
        try:
            return self.sample(split, index)
        except UserError as error:
            if self.config.data.on_error != "skip" or error.problems[0].key:
                raise
            return str(error)

    def sample(self, split: str, index: int) -> dict[str, bytes]:
        """The files of a sample, by their extensions; raises `UserError` if it is not an image with what `target` says."""
        dataset, name = self.parts[split][0], f"sample {index} of '{split}'"
        if self.target != "class":
            return self._with_target(dataset, index)
        if isinstance(dataset, ImageList) and type(dataset).__getitem__ is ImageList.__getitem__:
            (path, content), target = dataset.encoded(index), dataset.targets[index]
        else:
            image, target = SeededDataset(dataset, self.config.seed, split=split)[0, index]
            path, content = Path(name), _png(image, name)
        number = as_target(target)
        if number.ndim or number.is_floating_point() or not 0 <= int(number) <= LARGEST_CLASS:
            problem = f"the target of {name} is not a class number from 0 to {LARGEST_CLASS:,}"
            raise UserError("data.dataset", f"{problem}, and shards have one for each image")
        extension, content = self._smaller(dataset, path, content)
        return {extension: content, "cls": str(int(number)).encode()}

    def _smaller(self, dataset: Any, path: Path | str, content: bytes | None) -> tuple[str, bytes]:
        config = self.config
        if isinstance(dataset, ImageList | MaskFolder) and dataset.decoding.channels in KEPT:
            if config.max_side is not None:
                raise UserError("max_side", "makes JPEGs, which do not keep data.dataset.channels", "null")
            ending = Path(path).suffix.lower()
            whole = read_regular(Path(path), LARGEST_DATA) if content is None else content
            return ending[1:] if ending in EXTENSIONS else "png", whole
        return smaller_file(path, content, config.max_side, config.quality, max_pixels=config.data.max_pixels)

    def _with_target(self, dataset: Any, index: int) -> dict[str, bytes]:
        # Reading the sample compares sizes, which are then others
        path, most = dataset.path(index), self.config.max_side
        resized = most is not None and max(dataset[index][0].shape[1:]) > most
        extension, content = self._smaller(dataset, path, None)
        if self.target == "boxes":
            return {extension: content, "json": dataset.json_of(index, resized)}
        mask = dataset.mask(index)
        if not 0 <= int(mask.min()) <= int(mask.max()) < 2**16:
            raise UserError(f"the mask of {path} has numbers that PNG files cannot have")
        picture = Image.fromarray(mask.numpy().astype(np.uint8 if mask.dtype == torch.uint8 else np.uint16))
        if resized:
            picture = picture.resize(Image.open(io.BytesIO(content)).size, Image.Resampling.NEAREST)
        return {extension: content, "mask.png": _saved(picture)}

    def fingerprint(self, recipe: dict[str, Any]) -> str:
        """A digest of the data, as far as is known without reading all, and of libraries; for `recipe` see `cache_key`."""
        datasets = {split: dataset for split, (dataset, _) in self.parts.items()}
        known = [
            fingerprint_data(self.parts, datasets, pairs=self.target == "class"),
            {split: cache_key(dataset, recipe) for split, dataset in datasets.items()},
            [features.version(name) for name in ("pil", "jpg", "zlib")],
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _png(image: Tensor, name: str) -> bytes:
    """An image, uint8 (1 or 3, H, W), without loss."""
    if image.dtype != torch.uint8 or len(image) not in (1, 3):
        problem = f"{name} is {image.dtype} {tuple(image.shape)}"
        raise UserError("data.dataset", problem, "files, or images (1 or 3, height, width) of torch.uint8")
    return _saved(Image.fromarray((image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()))


def _saved(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()
