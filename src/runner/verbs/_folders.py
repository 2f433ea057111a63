"""What `list` and `show` share: the folders to search and the words that are left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import UserError
from runner.config.sources import Sources


def sources_and_words(verb: str, argv: Sequence[str]) -> tuple[Sources, list[str]]:
    """Split the arguments into the folders to search (`--config-dir DIR`) and the other words.

    Raises:
        UserError: for any other flag, or a folder that does not exist.
    """
    folders: list[Path] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = value or next(rest, "")
            if not folder:
                raise UserError(f"{verb}: {flag} needs a folder")
            folders.append(Path(folder))
        elif word.startswith("-"):
            raise UserError(f"{verb}: unknown flag '{word}'\n    allowed: --config-dir DIR")
        else:
            words.append(word)
    return Sources(folders), words
