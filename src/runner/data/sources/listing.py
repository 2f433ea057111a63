"""Image files of folders: how they are listed, and the index file that lets the next run skip listing many."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.base.errors import UserError

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm", ".pbm", ".pnm")
)
_ENDINGS = tuple(EXTENSIONS)
INDEXED_FROM = 100_000  # files; fewer are listed within a second
_FORMAT = "runner files 1"
_SETTLED_S = 2.0  # a folder changed later than this before it was read may have got another file within its timestamp


@dataclass(frozen=True)
class Files:
    """Paths of files as one array: reading strings in a forked worker writes their reference counts, which copies their pages."""

    names: Tensor  # uint8 (B,), one after the other
    ends: Tensor  # int64 (N + 1,), where each begins and ends
    sizes: Tensor | None = None  # int64 (N,), in bytes, as they were listed

    @classmethod
    def of(cls, names: Sequence[bytes]) -> Files:
        """The files of some paths."""
        joined = torch.frombuffer(bytearray(b"".join(names)) or bytearray(1), dtype=torch.uint8)
        return cls(joined, torch.tensor([0, *map(len, names)]).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def name(self, index: int) -> bytes:
        """The path at a place."""
        begin, end = self.ends[index : index + 2].tolist()
        return self.names[begin:end].numpy().tobytes()

    def all_names(self) -> list[bytes]:
        """All paths: a Path for each of a million would cost much more."""
        joined = self.names.numpy().tobytes()
        return [joined[begin:end] for begin, end in itertools.pairwise(self.ends.tolist())]


def images_below(folder: Path) -> Iterator[Path]:
    """All images under a folder, see `folders_below`."""
    for here, names in folders_below(folder):
        yield from (Path(here, name) for name in names if is_image(name))


def is_image(name: str) -> bool:
    """Whether the name of a file has the extension of an image."""
    return name.lower().endswith(_ENDINGS)


def folders_below(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and those under it, each with the names of its files, sorted; hidden ones are skipped.

    Links to folders are followed, but not to a parent, and no folder is visited twice.

    Raises:
        UserError: if a folder cannot be read; it names the folder.
    """
    seen = {folder.resolve(), *folder.resolve().parents}
    pending = [str(folder)]
    while pending:
        here = pending.pop()
        inner, files = [], []
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and Path(entry.path).is_dir()):
                        inner.append(entry.path)
                    else:
                        files.append(entry.name)
            below = []
            for path in sorted(inner):
                if (real := Path(path).resolve()) not in seen:
                    seen.add(real)
                    below.append(path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"cannot read the folder {here}: {reason}. Make it readable or remove it.") from error
        yield here, sorted(files)
        pending += reversed(below)


def list_classes(folder: Path, classes: Sequence[str], visited: list[str]) -> tuple[Files, Tensor]:
    """The images of folders of classes, in order of class and path, and the class numbers, int64 (N,).

    Appends all folders that were read to `visited`.

    Raises:
        UserError: if a class has no image.
    """
    names: list[bytes] = []
    counts = []
    for name in classes:
        found = [(here, list(filter(is_image, files))) for here, files in folders_below(folder / name)]
        paths = [f"{here}/{file}" for here, files in found for file in files]
        if len(found) > 1:  # as Path sorts: part by part
            paths.sort(key=lambda path: path.split("/"))
        if not paths:
            problem = f"the class folder {(folder / name).absolute()} has no images ({' '.join(sorted(EXTENSIONS))})"
            raise UserError("data.root", problem, "add some, or remove the folder")
        names += map(os.fsencode, paths)
        counts.append(len(paths))
        visited += [here for here, _ in found]
    return Files.of(names), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def list_splits(
    folders: Mapping[str, Path], classes: Sequence[str], cache_dir: Path
) -> tuple[dict[str, tuple[Files, Tensor]], str]:
    """What `list_classes` gives for the folder of each split: read from an index in `cache_dir`, or listed, and kept there if many.

    The index counts as long as no folder has got, lost or renamed a file: its time of change (ctime) tells, which nothing can
    set back. Sizes are those of the files when they were listed.

    Returns:
        The files and class numbers of each split, and a warning or "".
    """
    key = json.dumps([_FORMAT, {split: str(folder) for split, folder in folders.items()}, [*classes]])
    index = cache_dir / f"files-{hashlib.sha256(key.encode()).hexdigest()[:12]}.safetensors"
    if (known := _read(index, key)) is not None:
        return known, ""
    begun, visited = time.time_ns(), [str(path) for path in {folder.parent for folder in folders.values()}]
    visited += map(str, folders.values())
    times = {path: os.stat(path).st_ctime_ns for path in visited}  # noqa: PTH116
    splits = {split: list_classes(folder, classes, visited) for split, folder in folders.items()}
    if sum(len(files) for files, _ in splits.values()) < INDEXED_FROM:
        return splits, ""
    splits = {split: (replace(files, sizes=_sizes(files)), numbers) for split, (files, numbers) in splits.items()}
    times |= {path: os.stat(path).st_ctime_ns for path in visited}  # noqa: PTH116
    if max(times.values()) < begun - _SETTLED_S * 1e9:
        try:
            _write(index, splits, {"key": key, "folders": json.dumps(times)})
        except OSError as error:
            return splits, f"cannot keep the list of files in {index} ({error.strerror}): each run lists them again"
    return splits, ""


def _sizes(files: Files) -> Tensor:
    sizes = []
    for name in files.all_names():
        try:
            sizes.append(os.stat(name).st_size)  # noqa: PTH116  a Path for each of a million files would cost more
        except OSError:  # reported when it is read
            sizes.append(-1)
    return torch.tensor(sizes)


def _write(path: Path, splits: Mapping[str, tuple[Files, Tensor]], known: dict[str, str]) -> None:
    tensors = {
        f"{split}.{name}": tensor
        for split, (files, numbers) in splits.items()
        for name, tensor in {**vars(files), "classes": numbers}.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        save_file(tensors, temporary, known)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(None, str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, key: str) -> dict[str, tuple[Files, Tensor]] | None:
    """What an index holds; None if there is none, or it is of other folders, or one of them has changed since."""
    with contextlib.suppress(OSError, SafetensorError, ValueError, KeyError):
        with safe_open(path, "pt") as file:
            known = file.metadata() or {}
            if known.get("key") != key or not _unchanged(json.loads(known["folders"]).items()):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        return {
            split: (
                Files(*(tensors[f"{split}.{name}"] for name in ("names", "ends", "sizes"))),
                tensors[f"{split}.classes"],
            )
            for split in json.loads(key)[1]
        }
    return None


def _unchanged(folders: Iterable[tuple[str, int]]) -> bool:
    return all(os.stat(folder).st_ctime_ns == then for folder, then in folders)  # noqa: PTH116
