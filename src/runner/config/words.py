"""Words of a command line that are not overrides: what they are meant to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.base.errors import Problem, nearest
from runner.config import keys
from runner.config.synonyms import key_meant

_NAME = re.compile(r"[A-Za-z_][\w./-]*")


def not_overrides(
    words: Sequence[str], reads: Callable[[str], bool], paths: Sequence[str] = ()
) -> tuple[list[str], list[Problem]]:
    """Split words into those that Hydra reads and the problems of the others.

    Args:
        words: the words after the verb, without flags.
        reads: tells whether Hydra reads a word as an override.
        paths: the keys that are meant by words that are paths, in this order.
    """
    good, problems, open_ = list[str](), list[Problem](), [*paths]
    for number, word in enumerate(words):
        # Users type paths as other programs take them
        if open_ and "=" not in word and ("/" in word or word.endswith(".safetensors") or Path(word).is_dir()):
            problems.append(Problem(word, "is a path without a key", f"{open_.pop(0)}={word}"))
        elif reads(word):
            good.append(word)
        elif "=" in word:
            allowed = "no spaces around = and commas, and quotes around special characters: "
            problems.append(
                Problem(word, "has a value that cannot be read", f"{allowed}'{word.partition('=')[0]}=\"...\"'")
            )
        else:
            # The usual form of other programs is a key, then its value
            value = words[number + 1] if number + 1 < len(words) and "=" not in words[number + 1] else "VALUE"
            example = f"; such as {key_meant(word) or word}={value}" if _NAME.fullmatch(word) else ""
            problems.append(Problem(word, "is not an override", f"key=value, group=option, ~key{example}"))
    return good, problems


def flag_meant(flag: str, value: str, known: Iterable[str], options: Sequence[str]) -> str:
    """The flag or override that is meant by a flag that there is not; an empty string if neither comes close.

    Args:
        flag: as it was given, without its value.
        value: what followed it, or an empty string.
        known: the keys and groups.
        options: the flags that there are.
    """
    name, pool = flag.lstrip("-").replace("-", "_"), sorted(known)
    if close := nearest(flag, options, 0.85):
        return close
    key = name if name in pool else keys.closest(name, pool) if len(name) > 1 or key_meant(name) else ""
    return key if "=" in key or not key else f"{key}={value or 'VALUE'}"
