"""Image files of folders: how they are listed, and the index of many of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from runner.base.errors import UserError, nearest_path
from runner.base.files import write_atomically
from runner.base.reading import LARGEST_DATA, read_regular
from runner.data.bad_samples import Place

_PHOTOS = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff")
_ENDINGS = (*_PHOTOS, ".pgm", ".ppm", ".pbm", ".pnm")
EXTENSIONS = frozenset(_ENDINGS)
_UNREAD = (".heic", ".heif", ".hif", ".jxl", ".jp2", ".tga", ".dng", ".cr2", ".cr3", ".nef", ".arw")
# Folders of thumbnails and metadata that systems add: of Synology, macOS, QNAP and Windows
_NO_DATA = ("@eaDir", "__MACOSX", "@Recycle", "#recycle", "$RECYCLE.BIN", "System Volume Information")
INDEXED_FROM = 100_000  # files; fewer are listed within a second
_KEY = "key"  # in an index
_RULES = 2  # to be raised when other files are listed, or in another order
_SETTLED_S = 2.0  # a folder that changed less than this before it was read may change again within the same timestamp

Times = dict[str, list[int]]
"""What tells whether a folder changed: its times of change and modification, in nanoseconds, and its number."""


@dataclass(frozen=True)
class Files:
    """Paths of files, or other texts, as one array.

    Reading strings in a forked worker writes their reference counts, which copies their pages.
    """

    names: Tensor  # uint8 (B,), one after the other
    ends: Tensor  # int64 (N + 1,), where each begins and ends
    sizes: Tensor | None = None  # int64 (N,), in bytes, as they were listed
    unread: Tensor | None = None  # int64 (), how many images of other types there are

    @classmethod
    def of(cls, names: Sequence[bytes], unread: int = 0) -> Files:
        """The files of some paths."""
        joined = torch.frombuffer(bytearray(b"".join(names) or b"/"), dtype=torch.uint8)
        return cls(joined, torch.tensor([0, *map(len, names)]).cumsum(0), unread=torch.tensor(unread))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def name(self, index: int) -> bytes:
        """The path at a place; raises `IndexError` if there is none."""
        place = range(len(self))[index]
        begin, end = self.ends[place : place + 2].tolist()
        return self.names[begin:end].numpy().tobytes()

    def all_names(self) -> list[bytes]:
        """All paths: a Path for each of a million would cost much more."""
        joined = self.names.numpy().tobytes()
        return [joined[begin:end] for begin, end in itertools.pairwise(self.ends.tolist())]


def common_part(paths: Sequence[bytes]) -> int:
    """How many bytes all paths begin with: digests leave them out, so that a folder may move."""
    if not paths or min(paths).startswith(b"/") != max(paths).startswith(b"/"):
        return 0
    return len(os.path.commonpath((min(paths), max(paths))))


def images_below(folder: Path, times: Times | None = None) -> tuple[list[str], list[str]]:
    """The images under a folder, sorted as paths are, and those of types that are not read; see `folders_below`."""
    images, unread, nested = list[str](), list[str](), False
    for here, names in folders_below(folder, times):
        nested, before = nested or here != str(folder), here if here.endswith("/") else f"{here}/"
        images += (before + name for name in names if is_image(name))
        unread += (before + name for name in names if is_unread(name))
    if nested:  # as Path sorts: part by part
        for some in (images, unread):
            some.sort(key=lambda path: path.split("/"))
    return images, unread


def is_inside(name: str, *folders: Path) -> bool:
    """Whether a file that annotations name is in one of some folders, whose links may lead elsewhere.

    Annotations may come from someone else, and must not have other files read. The name is relative to the first folder.
    """
    if not (name.startswith("/") or ".." in name):
        return True
    path = (folders[0] / name).absolute()
    places = {os.path.normpath(path), os.path.realpath(path)}
    known = [*map(os.path.abspath, folders), *map(os.path.realpath, folders)]
    return any(Path(place).is_relative_to(folder) for place in places for folder in known)


def written(path: Path) -> Path:
    """The file of a path, also if its name has another Unicode form there, as macOS and Linux write é; else the path."""
    forms = (path.with_name(unicodedata.normalize(form, path.name)) for form in ("NFC", "NFD"))
    return next((each for each in (path, *forms) if os.path.lexists(each)), path)


def absent(path: Path) -> str:
    """The path for a message if there is no such file, else nothing. Its name may be too long, as of a line without an end."""
    text = str(path) if len(str(path)) <= 500 else f"{str(path)[:100]}... ({len(str(path)):,} letters)"
    return "" if os.path.isfile(path) else text  # noqa: PTH113  Path.is_file raises for such a name


def existing(root: str, allowed: str = "the folder that holds the data") -> Path:
    """The path of `data.root`; raises `UserError` if there is none, or it is not a folder and `allowed` says what to give."""
    base = Path(root).expanduser()
    if not base.exists():
        raise UserError("data.root", f"{base.absolute()} does not exist", "", nearest_path(base))
    if allowed and not base.is_dir():
        raise UserError("data.root", f"{base.absolute()} is not a folder", allowed)
    return base


def check_names(key: str, where: Path | str, names: Sequence[str]) -> None:
    """Raise `UserError` if two classes have one name."""
    counts = Counter(unicodedata.normalize("NFC", name) for name in names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(key, f"{where} has two classes of one name, '{twice[0]}'")


def in_two_splits(kind: str, splits: Mapping[str, Iterable[object]]) -> list[str]:
    """Warnings about what two splits share, such as groups or files, which `kind` names."""
    warnings, members = [], {name: dict.fromkeys(split) for name, split in splits.items()}
    for one, other in itertools.combinations(members, 2):
        if shared := [member for member in members[one] if member in members[other]]:
            count = f"1 {kind} is" if len(shared) == 1 else f"{len(shared):,} {kind}s are"
            warnings.append(f"{count} in '{one}' and in '{other}', such as {shared[0]}")
    return warnings


def is_image(name: str) -> bool:
    """Whether the name of a file has the extension of an image."""
    return name.lower().endswith(_ENDINGS)


def is_unread(name: str) -> bool:
    """Whether the name of a file has the extension of an image that is not read."""
    return name.lower().endswith(_UNREAD)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or a folder of thumbnails or metadata that a system adds."""
    return name.startswith(".") or name in _NO_DATA


def unread_warnings(folder: Path, count: int) -> list[str]:
    """What to say of the images of a folder that are not read, if there are any."""
    skipped = f"{folder}: images of types that are not read here ({' '.join(_UNREAD)}) are skipped: {count:,}"
    return [f"{skipped}; convert them to JPEG or PNG"] if count else []


def folders_below(folder: Path, times: Times | None = None) -> Iterator[tuple[str, list[str]]]:
    """A folder and those under it, each with the names of its files, sorted; hidden ones are skipped, see `is_hidden`.

    Links to folders are followed, but not to a parent, and no folder is visited twice. `times` gets those of each folder, from
    before it is read, and zeros for links below the first folder that are not to files.

    Raises `UserError` if a folder cannot be read; it names the folder.
    """
    seen = {folder.resolve(), *folder.resolve().parents}
    pending = [str(folder)]
    while pending:
        here = pending.pop()
        inner, files, below = [], [], []
        with Place(f"the folder {here}"):
            if times is not None:
                times[here] = times_of(here)
            with os.scandir(here) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    linked = entry.is_symlink()
                    if entry.is_dir(follow_symlinks=False) or (linked and Path(entry.path).is_dir()):
                        inner.append(entry.path)
                    else:
                        files.append(entry.name)
                    # Where such a link leads can change, and its folder does not show it
                    if linked and times is not None and not Path(entry.path).is_file():
                        times[entry.path] = [0, 0, 0]
            for path in sorted(inner):
                if (real := Path(path).resolve()) not in seen:
                    seen.add(real)
                    below.append(path)
        yield here, sorted(files)
        pending += reversed(below)


def list_classes(folder: Path, classes: Sequence[str], times: Times) -> tuple[Files, Tensor]:
    """The images of folders of classes, in order of class and path, and the class numbers, int64 (N,).

    `times` gets those of all folders, see `folders_below`.

    Raises `UserError` if a class has no image.
    """
    names, counts, unread = list[bytes](), list[int](), 0
    for name in classes:
        images, others = images_below(folder / name, times)
        if not images:
            problem = f"the class folder {(folder / name).absolute()} has no images ({' '.join(sorted(EXTENSIONS))})"
            raise UserError("data.root", problem, "add some, or remove the folder")
        names += map(os.fsencode, images)
        counts.append(len(images))
        unread += len(others)
    return Files.of(names, unread), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def list_splits(
    folders: Mapping[str, Path], classes: Sequence[str], cache_folder: str | None
) -> tuple[dict[str, tuple[Files, Tensor]], list[tuple[IndexFile, dict[str, Tensor]]]]:
    """What `list_classes` gives for the folder of each split: from an index in `cache_folder`, or from listing them.

    An index counts as long as no folder has changed, as its times tell. Sizes are those of the files when they were listed.

    Returns:
        The files and class numbers of each split, and an index to keep, if there are many files.
    """
    check_names("data.root", folders["train"], classes)
    where = {split: [str(folder), str(folder.absolute())] for split, folder in folders.items()}
    key = json.dumps([_RULES, sorted(EXTENSIONS), list(classes)])
    index = IndexFile.of(cache_folder or "", json.dumps(where), key)
    if cache_folder is not None and (known := index.read()) is not None and (found := _unchanged(known, folders)):
        return found, []
    begun, times = time.time_ns(), {str(folder): times_of(folder) for folder in folders.values()}
    splits = {split: list_classes(folder, classes, times) for split, folder in folders.items()}
    changes = [changed for changed, *_ in times.values()]
    if (
        cache_folder is None
        or sum(len(files) for files, _ in splits.values()) < INDEXED_FROM
        # Writing the index would change the folder
        or Path(cache_folder).resolve() in {folder.resolve() for folder in folders.values()}
        # Without a time of change for each folder, as in some network file systems, a change would not be seen
        or max(changes) > begun - _SETTLED_S * 1e9
        or min(changes) <= 0
        or len(set(changes)) == 1
    ):
        return splits, []
    for split, (files, numbers) in splits.items():
        splits[split] = replace(files, sizes=torch.tensor([*map(size_of, files.all_names())])), numbers
    watched = Files.of([os.fsencode(path) for path in times])
    tensors = {"times": torch.tensor(list(times.values())), "names": watched.names, "ends": watched.ends}
    for split, (files, numbers) in splits.items():
        tensors |= {f"{split}.{name}": tensor for name, tensor in {**vars(files), "classes": numbers}.items()}
    return splits, [(index, tensors)]


def _unchanged(known: Mapping[str, Tensor], splits: Mapping[str, Path]) -> dict[str, tuple[Files, Tensor]] | None:
    """What an index holds, or None if one of its folders has changed."""
    with contextlib.suppress(OSError):
        watched = zip(Files(known["names"], known["ends"]).all_names(), known["times"].tolist(), strict=True)
        if all(times_of(path) == then for path, then in watched):
            names = ("names", "ends", "sizes", "unread", "classes")
            columns = {split: [known[f"{split}.{name}"] for name in names] for split in splits}
            return {split: (Files(*some), numbers) for split, (*some, numbers) in columns.items()}
    return None


def times_of(path: str | bytes | Path) -> list[int]:
    """What tells whether a file or folder has changed, see `Times`."""
    found = os.stat(path)  # noqa: PTH116  a Path for each would cost more
    return [found.st_ctime_ns, found.st_mtime_ns, found.st_ino & (2**63 - 1)]


def size_of(path: bytes) -> int:
    """The size of a file in bytes; -1 if there is none, which is reported when it is read."""
    try:
        return os.stat(path).st_size  # noqa: PTH116  as above
    except OSError:
        return -1


@dataclass(frozen=True)
class IndexFile:
    """A file of tensors that counts only for a key, which is text."""

    path: Path
    key: str

    @classmethod
    def of(cls, folder: str, source: str, key: str) -> IndexFile:
        """The file for a source of data, such as a path, in a folder for all of them."""
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
        return cls(Path(folder, f"{name}.index"), f"{source}\n{key}")

    def read(self) -> dict[str, Tensor] | None:
        """The tensors; None if there is no such file, or it is damaged or has another key."""
        with contextlib.suppress(OSError):
            # Not mapped into memory: the file may be replaced while a run uses it
            return self.parse(read_regular(self.path, LARGEST_DATA), self.key)
        return None

    @staticmethod
    def parse(content: bytes, key: str) -> dict[str, Tensor] | None:
        """The tensors of a file with that content; None if it is damaged or has another key."""
        with contextlib.suppress(SafetensorError):
            tensors = safetensors.torch.load(content)
            found = tensors.pop(_KEY, torch.empty(0))
            if found.tolist() == _stamp(key, tensors).tolist():
                return tensors
        return None

    def write(self, tensors: dict[str, Tensor]) -> str:
        """Write the file; returns a warning if that is not possible, or ""."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.content(tensors))
        except (OSError, UserError) as error:
            problem = f"cannot keep what is known of the files of data in {self.path.parent}: {error}"
            return f"{problem}; each run looks again, unless data.cache_dir is a writable folder"
        return ""

    def content(self, tensors: dict[str, Tensor]) -> bytes:
        """What the file holds."""
        return safetensors.torch.save(tensors | {_KEY: _stamp(self.key, tensors)})


def _stamp(key: str, tensors: dict[str, Tensor]) -> Tensor:
    """What a file holds besides its tensors, uint8 (N,): the key, and checksums of the tensors."""
    checksums = [(name, zlib.crc32(tensor.numpy().data)) for name, tensor in sorted(tensors.items())]
    return torch.tensor(list(f"{key}\n{checksums}".encode(errors="surrogateescape")), dtype=torch.uint8)
