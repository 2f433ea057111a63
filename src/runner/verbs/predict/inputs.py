"""The images that `input` means: files, folders, patterns, or a split of the data."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.base.errors import UserError, nearest_path
from runner.data.sources.listing import EXTENSIONS, folders_below, images_below
from runner.run.from_checkpoint import SPLITS

INPUTS = "images, folders, patterns such as photos/*.jpg, or a split: train, val or test"
_PATTERN = frozenset("*?[")


def split_in(words: Sequence[str]) -> str | None:
    """The split of the data that `input` names, if it names one."""
    named = [word for word in words if word in SPLITS]
    if named and len(words) > 1:
        allowed = f"input={named[0]} alone, or ./{named[0]} for a folder of that name"
        raise UserError("input", f"'{named[0]}' is a split of the data and cannot be mixed with others", allowed)
    return named[0] if named else None


def files_in(words: Sequence[str]) -> list[Path]:
    """The image files that words name, in their order, those of a folder or pattern sorted by name, each once.

    A word is a file, with any ending; a folder, which stands for all images below it, with links to folders followed once;
    or a pattern such as `photos/**/*.jpg`, which matches files with the ending of an image, and whose `**` follows links in
    the same way. Hidden files are skipped unless they are named.
    """
    found: dict[Path, None] = {}
    for word in words:
        try:
            files = _named_by(word)
        except OSError as error:
            raise UserError("input", f"cannot read {word}: {(error.strerror or str(error)).lower()}") from error
        if not files:
            allowed = f"files that end in {' '.join(sorted(EXTENSIONS))}"
            raise UserError("input", f"there is no image in {word}", allowed)
        found |= dict.fromkeys(files)
    return list(found)


def _named_by(word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        # What cannot be read is listed as such
        return sorted([*images_below(path, unread := list[Path]()), *unread])
    if path.exists() or path.is_symlink():
        return [path]
    if _PATTERN & set(word):
        matches = set(_matches(path))
        return sorted(match for match in matches if match.suffix.lower() in EXTENSIONS and not match.is_dir())
    raise UserError("input", f"there is no {path}", INPUTS, nearest_path(path))


def _matches(pattern: Path) -> Iterator[Path]:
    """The matches of a pattern. `glob` does not get the `**`, as it would follow a link to a folder above without end."""
    parts = pattern.parts
    if "**" not in parts:
        # Path.glob does not take an absolute pattern.
        yield from (Path(match) for match in glob.glob(str(pattern)))  # noqa: PTH207
        return
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    for start in _matches(Path(*parts[:place])) if place else [Path()]:
        for folder, _ in folders_below(start) if start.is_dir() else ():
            yield from _matches(Path(glob.escape(folder), *rest))
