"""Words of a command line that are not overrides: what they are meant to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.config.errors import Problem, nearest
from runner.config.synonyms import key_meant

_NAME = re.compile(r"[A-Za-z_][\w./-]*")


def not_overrides(
    words: Sequence[str], reads: Callable[[str], bool], paths: Sequence[str] = ()
) -> tuple[list[str], list[Problem]]:
    """Split words into those that Hydra reads and the problems of the others; words that belong together are one problem.

    Args:
        words: the words after the verb, without flags.
        reads: whether Hydra reads a word as an override.
        paths: the keys that are meant by words that are paths, in this order.
    """
    good, problems, open_, at = list[str](), list[Problem](), [*paths], 0
    while at < len(words):
        word, following = words[at], words[at + 1] if at + 1 < len(words) else None
        is_name = _NAME.fullmatch(word) is not None
        if open_ and "=" not in word and ("/" in word or word.endswith(".safetensors") or Path(word).is_dir()):
            problems.append(Problem(word, "is a path without a key", f"{open_.pop(0)}={word}"))
        elif is_name and following is not None and "=" not in following:
            at += 1
            meant = f"{_key(word)}={following}"
            problems.append(Problem(f"{word} {following}", "is one override, written as several words", meant))
        elif reads(word):
            good.append(word)
        elif "=" in word:
            allowed = f"no spaces around = and commas, and quotes around special characters: '{word.partition('=')[0]}=\"...\"'"
            problems.append(Problem(word, "has a value that cannot be read", allowed))
        else:
            example = f"; such as {_key(word.lstrip('+'))}=VALUE" if is_name else ""
            problems.append(
                Problem(word, "is not an override", f"key=value, group=option, ~key or a verb's flag{example}")
            )
        at += 1
    return good, problems


def _key(word: str) -> str:
    meant = key_meant(word)
    return word if word.replace("-", "_") == meant or "=" in meant or " " in meant else meant or word


def flag_meant(flag: str, value: str, known: Iterable[str], options: Sequence[str]) -> tuple[str, str]:
    """What is meant by a flag that there is not: a flag or an override (empty if neither comes close), and what is allowed.

    Args:
        flag: as it was given, without its value.
        value: what followed it, or an empty string.
        known: the keys and groups.
        options: the flags that there are.
    """
    from runner.config.keys import closest

    long = [option for option in options if option.startswith("--")]
    name = flag.lstrip("-").replace("-", "_")
    pool = sorted(known)
    key = name if name in pool else closest(name, pool) if len(name) > 1 or key_meant(name) else ""
    flags = "--multirun, --config-dir DIR, --config-name NAME, --cfg job, --info, --help"
    allowed = f"{flags}; a key has no dashes before it: key=value"
    if close := nearest(flag, long, 0.85):
        return close, allowed
    if key:
        return key if "=" in key else f"{key}={value or 'VALUE'}", allowed
    return nearest(flag, long, 0.7), allowed
