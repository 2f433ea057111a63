"""The samples of a tar file: the files of each, and the index of all."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from runner.base.reading import digits
from runner.data.bad_samples import Place
from runner.data.sources.detection import Annotated, refuse_shares
from runner.data.sources.listing import EXTENSIONS, is_hidden, is_image, is_unread

LARGEST_CLASS = 2**31 - 1
COLUMNS = ("offsets", "lengths", "checksums", "labels")

Kind = Literal["class", "mask", "boxes"]
"""What a sample has besides its image."""
Index = dict[str, Tensor]
"""Of the samples of a shard, int64 (N,) each: where they lie, their lengths in bytes, CRC-32, and class numbers.

With a class number, that is the content of the image. With a mask or boxes, it is all from the header of the first file to the end
of the last one, which is a tar file, too; the number is 0 with a mask, and with boxes the largest label, or 0.
"""

NO_IMAGES: Index = dict.fromkeys(COLUMNS, torch.zeros(0, dtype=torch.int64))


def usable(index: Index | None, size: int) -> Index | None:
    """An index that was read from a file, if it can be that of a shard of `size` bytes, else None."""
    columns = [(index or {}).get(name, torch.tensor(0.0)) for name in COLUMNS]
    if {(each.dtype, each.ndim) for each in columns} != {(torch.int64, 1)} or len({*map(len, columns)}) > 1:
        return None
    offsets, lengths, _, labels = columns
    inside = (offsets >= 0) & (lengths >= 0) & (lengths <= size) & (offsets <= size - lengths)
    return index if bool((inside & (labels >= 0) & (labels <= LARGEST_CLASS)).all()) else None


def index_of_file(file: BinaryIO, label: str, target: Kind = "class") -> Index:
    """See `runner.data.sources.shards.index_of`; any file that can seek. Raises `ValueError`, and as `tarfile` does."""

    def read(start: int, length: int) -> bytes:
        file.seek(start)
        return file.read(length)

    rows, keys, kinds, annotated = list[Any](), set[str](), set[bool](), list[Any]()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for key, group in itertools.groupby(_files(tar), key=lambda part: part[0]):
            files = [(extension, member) for _, extension, member in group]
            parts, (images, other) = dict(files), _chosen([extension for extension, _ in files], target)
            if key in keys or len(parts) < len(files) or len(images) > 1:
                problem = f"it has sample {key} twice, or two images of it, or other files between its own"
                raise ValueError(f"{problem}; tar --sort=name puts those of one name next to each other")
            keys.add(key)
            # In photo.v2.jpg, v2.jpg is an extension: such as of a mask, or of an image that would be skipped silently
            for each in (each for each in parts if is_image(each) and each != other):
                if not images or {f"{Path(each).stem}.cls", f"{Path(each).stem}.{other}"} & parts.keys():
                    problem = "is the image of no sample: names of samples end at their first dot"
                    raise ValueError(f"{parts[each].name} {problem}")
            if unread := [member.name for _, member in files if not images and is_unread(member.name)]:
                raise ValueError(f"{unread[0]} is an image of a type that is not read")
            if not images:
                continue
            wanted = ("cls", "json", *(images if target == "class" else ()))
            contents = {name: read(member.offset_data, member.size) for name, member in files if name in wanted}
            if target == "class":
                start, content = parts[images[0]].offset_data, contents[images[0]]
                number = _class_number(key, contents, label)
            elif other in parts:
                start, last = files[0][1].offset, files[-1][1]
                content = read(start, last.offset_data + last.size + -last.size % tarfile.BLOCKSIZE - start)
                number = 0
                if target == "boxes":
                    objects, outlined = objects_of(contents["json"], f"sample {key}")
                    number = max(objects.labels, default=0)
                    kinds.add(outlined)
                    annotated.append(objects)
                if len(kinds) > 1:
                    raise ValueError(f"sample {key} has outlines, or has none, as others")
            else:
                raise ValueError(f"sample {key} has no {target}, {key}.{other} next to the image")
            rows.append((start, len(content), zlib.crc32(content), number))
        # tarfile takes a file that was cut between two members for a whole one, and does not look behind the end
        file.seek(tar.offset)
        if len(ending := file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it is truncated")
        if any(map(any, itertools.chain([ending], iter(lambda: file.read(2**16), b"")))):
            raise tarfile.ReadError("something follows the end of its files, such as another tar file")
    refuse_shares(annotated, "data.root", "boxes in pixels, or null as size")
    if not rows:
        raise ValueError("it has no images")
    return {name: tensor.contiguous() for name, tensor in zip(COLUMNS, torch.tensor(rows).T, strict=True)}


def objects_of(text: bytes, place: str, number: int = 0) -> tuple[Annotated, bool]:
    """The objects of an image from JSON of `data=shards`, and whether they have outlines; `number` is its id if there is none.

    Raises `UserError`, which names `place`, if they cannot be used.
    """
    with Place(f"the objects of {place}", "data.root", "JSON with size, boxes and labels, as the documentation says"):
        said = json.loads(text)
        size = None if said["size"] is None else (int(said["size"][0]), int(said["size"][1]))
        image = Annotated(Path(place), int(said.get("image_id", number)), size)
        count, masks = len(said["boxes"]), "outlines" in said
        others = said.get("crowd", [False] * count), said.get("outlines", [None] * count)
        for row, (box, label, crowd, outline) in enumerate(zip(said["boxes"], said["labels"], *others, strict=True)):
            right = type(label) is int and 1 <= label < 2**31 and crowd in (0, 1)
            if not right or (masks and outline is None):
                raise ValueError(f"object {row} has no label from 1 on, no outline, or no crowd of true or false")
            image.add(f"object {row}", box, label, bool(crowd), outline)
        if image.problem:
            raise ValueError(image.problem)
        return image, masks


def read_files(content: bytes, target: Kind) -> tuple[bytes, bytes]:
    """The files of a sample with a mask or boxes: its image, and its mask or boxes; `content` is the bytes that are indexed."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        parts = {extension: content[file.offset_data :][: file.size] for _, extension, file in _files(tar)}
    (image,), other = _chosen(parts, target)
    return parts[image], parts[other]


def _chosen(extensions: Collection[str], target: Kind) -> tuple[list[str], str]:
    """The extensions of images, of which a sample has one, and that of its mask or boxes."""
    images, other = [each for each in extensions if f".{each}" in EXTENSIONS], "json"
    if target == "mask":
        other = "png" if len(images) == 2 and "png" in images and "mask.png" not in extensions else "mask.png"
    return [each for each in images if each != other], other


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, extension and place of each file of a sample; hidden ones, and those without an extension, belong to none."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # half a kilobyte each
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if member.isdir() or not stem or not extension or any(map(is_hidden, folder.split("/"))):
            continue
        if not member.isreg() or member.issparse():
            raise ValueError(f"{member.name} is a link or a sparse file")
        yield f"{folder}/{stem}" if folder else stem, extension.lower(), member


def _class_number(key: str, contents: Mapping[str, bytes], label: str) -> int:
    number: Any = None
    with contextlib.suppress(ValueError, RecursionError, AttributeError):  # a list has no keys
        text = contents.get("cls", b"").decode()
        number = int(digits(text)) if "cls" in contents else json.loads(contents.get("json", b"{}")).get(label)
    if type(number) is not int or not 0 <= number <= LARGEST_CLASS:
        places = f"next to the image in {key}.cls, or in {key}.json as '{label}'"
        raise ValueError(f"sample {key} has no class number from 0 to {LARGEST_CLASS:,} {places}")
    return number
