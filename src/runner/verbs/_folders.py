"""What `list`, `show` and the help of verbs share: the folders to search and the other words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import UserError
from runner.config.sources import Sources


def sources_and_words(verb: str, argv: Sequence[str], other_flags: bool = False) -> tuple[Sources, list[str]]:
    """Split the arguments into the folders to search (`--config-dir DIR`) and the other words.

    Args:
        verb: name of the verb, for messages.
        argv: the words after the verb.
        other_flags: whether other flags are allowed, and ignored.

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
                raise UserError(verb, f"{flag} needs a folder")
            folders.append(Path(folder))
        elif not word.startswith("-"):
            words.append(word)
        elif not other_flags:
            raise UserError(verb, f"unknown flag '{word}'", "--config-dir DIR")
    return Sources(folders), words
