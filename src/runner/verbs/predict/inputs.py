"""Which images `input` means: files, folders, patterns, or a split of the data."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.config.errors import UserError, nearest
from runner.data.sources.folders import EXTENSIONS, folders_below, images_below

SPLITS = ("train", "val", "test")
_PATTERN = frozenset("*?[")


def split_in(words: Sequence[str]) -> str | None:
    """The split of the data that `input` names, if it names one.

    Raises:
        UserError: if it is one of several inputs.
    """
    named = [word for word in words if word in SPLITS]
    if named and len(words) > 1:
        raise UserError(
            f"input: '{named[0]}' is a split of the data and cannot be mixed with others\n"
            f"    allowed: input={named[0]} alone, or ./{named[0]} for a folder of that name"
        )
    return named[0] if named else None


def files_in(words: Sequence[str]) -> list[Path]:
    """The image files that words mean, in their order, those of a folder or pattern by name, each once.

    A word is a file, whatever its ending; a folder, of which all images at any depth are meant, links to folders followed
    but nothing twice; or a pattern such as `photos/**/*.jpg`, of which files with the ending of an image are meant, and
    whose `**` goes into folders in the same way. Hidden files are passed over unless they are named.

    Raises:
        UserError: if a word means nothing, or a folder cannot be read.
    """
    found: dict[Path, None] = {}
    for word in words:
        try:
            files = _meant_by(word)
        except OSError as error:
            raise UserError(f"input: cannot read {word}: {(error.strerror or str(error)).lower()}") from error
        if not files:
            raise UserError(
                f"input: there is no image in {word}\n    allowed: files that end in {' '.join(sorted(EXTENSIONS))}"
            )
        found |= dict.fromkeys(files)
    return list(found)


def _meant_by(word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        return sorted(images_below(path))
    if path.exists() or path.is_symlink():
        return [path]
    if _PATTERN & set(word):
        matches = set(_matches(path))
        return sorted(match for match in matches if match.suffix.lower() in EXTENSIONS and not match.is_dir())
    close = ""
    if path.parent.is_dir():
        close = nearest(path.name, [other.name for other in path.parent.iterdir()])
    hint = f"; did you mean '{path.parent / close}'?" if close else ""
    raise UserError(
        f"input: there is no {path}{hint}\n    allowed: images, folders, patterns such as photos/*.jpg, train, val or test"
    )


def _matches(pattern: Path) -> Iterator[Path]:
    """What fits a pattern. `**` is not left to `glob`, which follows links to folders round and round."""
    parts = pattern.parts
    if "**" not in parts:
        # `glob.glob` and not Path.glob, which from an absolute pattern cannot start.
        yield from (Path(match) for match in glob.glob(str(pattern)))  # noqa: PTH207
        return
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    for start in _matches(Path(*parts[:place])) if place else [Path()]:
        for folder, _ in folders_below(start) if start.is_dir() else ():
            yield from _matches(Path(glob.escape(str(folder)), *rest))
