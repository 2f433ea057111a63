"""The words after a verb that takes no config: flags with their values, and the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.base.errors import UserError
from runner.config.sources import Sources

_VALUES = {"DIR": "folder", "NAME": "name"}


def split_words(
    verb: str, argv: Sequence[str], flags: Mapping[str, str], other_flags: bool = False
) -> tuple[list[str], list[tuple[str, str]]]:
    """Split the words after a verb into those that are not flags, and (flag, value).

    `flags` gives the flags and what their values are, `DIR` or `NAME`; with `other_flags`, others are ignored.
    """
    words: list[str] = []
    given: list[tuple[str, str]] = []
    rest = iter(argv)
    for word in rest:
        flag, _, value = word.partition("=")
        # Both forms are usual: --flag value and --flag=value
        if flag in flags:
            if not (value := value or next(rest, "")):
                raise UserError(verb, f"{flag} needs a {_VALUES[flags[flag]]}")
            given.append((flag, value))
        elif not word.startswith("-"):
            words.append(word)
        elif not other_flags:
            allowed = ", ".join(f"{name} {value}" for name, value in flags.items() if name.startswith("--"))
            raise UserError(verb, f"unknown flag '{flag}'", allowed)
    return words, given


def sources_and_words(verb: str, argv: Sequence[str], other_flags: bool = False) -> tuple[Sources, list[str]]:
    """The folders to search (`--config-dir DIR`) and the words that are not flags; arguments as `split_words` takes them."""
    words, given = split_words(verb, argv, {"--config-dir": "DIR", "-cd": "DIR"}, other_flags)
    return Sources([Path(folder) for _, folder in given]), words
