"""Words of a command line that are not overrides: what they are meant to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.config.errors import Problem, nearest
from runner.config.synonyms import key_meant

_NAME = re.compile(r"[A-Za-z_][\w./-]*")
_SHAPE = "key=value, group=option, ~key or a verb's flag"


def not_overrides(
    words: Sequence[str], reads: Callable[[str], bool], paths: Sequence[str] = ()
) -> tuple[list[str], list[Problem]]:
    """Split words into those that Hydra reads and the problems of the others; words that belong together are one problem.

    Args:
        words: the words after the verb, without flags.
        reads: whether Hydra reads a word as an override.
        paths: the keys that are meant by words that are paths, in this order.
    """
    good, problems, at = list[str](), list[Problem](), 0
    while at < len(words):
        count, meant = _together(words[at:])
        word = " ".join(words[at : at + count])
        if count > 1:
            problems.append(Problem(word, "is one override, written as several words", meant))
        elif reads(word):
            good.append(word)
        else:
            problems.append(_unread(word, words[:at], paths))
        at += count
    return good, problems


def _together(words: Sequence[str]) -> tuple[int, str]:
    """How many words in front are one override with spaces in it, and that override."""
    first, rest = words[0], words[1:]
    if len(rest) > 1 and _NAME.fullmatch(first) and rest[0] == "=":
        return 3, f"{first}={rest[1]}"
    if rest and _NAME.fullmatch(first) and rest[0].startswith("=") and len(rest[0]) > 1:
        return 2, first + rest[0]
    if not rest or "=" in rest[0]:
        return 1, first
    if _NAME.fullmatch(first) and not _is_path(first):
        return 2, f"{_key(first)}={rest[0]}"
    if "=" in first and first.endswith((",", "=")):
        count = 1 + next((n for n, word in enumerate(rest, 1) if not word.endswith(",")), len(rest))
        return count, "".join(words[:count])
    return 1, first


def _is_path(word: str) -> bool:
    return "=" not in word and not word.endswith(".yaml") and ("/" in word or word.endswith(".safetensors"))


def _key(word: str) -> str:
    meant = key_meant(word)
    return meant if meant and word.replace("-", "_") != meant and "=" not in meant and " " not in meant else word


def _unread(word: str, before: Sequence[str], paths: Sequence[str]) -> Problem:
    """The problem of one word that Hydra cannot read."""
    key, sign, value = word.partition("=")
    earlier = sum(map(_is_path, before))
    if earlier < len(paths) and (_is_path(word) or (earlier and not sign and Path(word).exists())):
        return Problem(word, "is a path without a key", f"{paths[earlier]}={word}")
    if not sign:
        if match := re.fullmatch(r"([A-Za-z_][\w.]*):\s*(.+)", word):
            return Problem(word, "has a colon instead of =", f"{match[1]}={match[2]}")
        if before and "=" in before[-1] and re.fullmatch(r"[\d.eE+-]+", word):
            return Problem(word, "is not an override", f"{before[-1]},{word} with --multirun, or {_SHAPE}")
        if _NAME.fullmatch(word.lstrip("+")):
            return Problem(word, "is not an override", f"{_SHAPE}; such as {_key(word.lstrip('+'))}=VALUE")
        return Problem(word, "is not an override", _SHAPE)
    if key != key.strip() or (value != value.strip() and _NAME.fullmatch(key.strip())):
        return Problem(word, "has spaces around =", f"{key.strip()}={value.strip()}")
    if _NAME.fullmatch(dotted := re.sub(r"\[(\d+)\]", r".\1", key)) and dotted != key:
        return Problem(word, "has an index in brackets", f"{dotted}={value}")
    problem = "has a value that cannot be read"
    if value.startswith("="):
        return Problem(word, "has = twice", f"{key}={value.lstrip('=')}")
    if value.endswith(","):
        return Problem(word, problem, f"no comma at the end: {key}={value.rstrip(',')}")
    for left, right in ("[]", "{}", "()"):
        if value.count(left) != value.count(right):
            return Problem(
                word, problem, f"as many {right} as {left}, with quotes around the word for the shell: '{key}=...'"
            )
    if sum(map(value.count, "'\"")) % 2:
        return Problem(
            word, problem, f"a second quote, or \\ before the first: quote special characters: '{key}=\"...\"'"
        )
    return Problem(word, problem, f"quote special characters: '{key}=\"{value}\"'")


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
