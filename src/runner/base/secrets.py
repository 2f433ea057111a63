"""Masks passwords and keys wherever a command line or a config is stored or shown, and passwords in every URL.

A name is compared in snake case, `apiKey` and `api-key` as `api_key`, without digits at its end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"(?:.+_)?(?:passwords?|passwd|pwd|passphrase|secrets?|credentials?|authorization|api_?key|(?:access|private|secret)_key"
    r"|(?:access|api|auth|bearer|hf|refresh)_token)"
)
"""Names of arguments whose values are secret; none that also names a column, a file or a part of a model."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PASSWORD_IN_URL = re.compile(r"""(?<=://)([^/\s:@'"]*):([^/\s'"]+)@""")
# Begins where a name does and never backtracks: a text from a checkpoint may have a million letters.
_NAME = re.compile(r"""(?<![\w.\-])([\w.\-]++)['"]?\s*[=:]""")


@functools.cache
def is_secret(name: str) -> bool:
    """Tell whether the value of an argument of this name, without dots, is secret."""
    plain = _HUMP.sub("_", name).lower().replace("-", "_").rstrip("0123456789").strip("_")
    return _SECRET.fullmatch(plain) is not None


def mask_text(text: str) -> str:
    """A text with the passwords in its URLs masked."""
    return _PASSWORD_IN_URL.sub(rf"\1:{MASK}@", text) if "://" in text else text


def mask_word(word: str) -> str:
    """A word of a command line; without its value if the key, or a name in the value, is that of a secret."""
    key, equals, value = word.partition("=")
    names = re.split("[.@/ ]", key.lstrip("+~-")) if equals else []
    names += [found[1].rpartition(".")[2] for found in _NAME.finditer(value)]
    return f"{key}={MASK}" if any(map(is_secret, names)) else mask_text(word)


def mask_words(words: Iterable[str]) -> list[str]:
    """The words of a command line with their secrets masked."""
    return [mask_word(word) for word in words]


def mask_values(value: Any, secret: bool = False) -> Any:
    """A copy of nested plain containers with the texts and whole numbers under secret names masked, and URLs' passwords."""
    if isinstance(value, dict):
        return {
            key: item
            if str(key).startswith("_")
            else mask_values(item, secret or any(map(is_secret, str(key).split("."))))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [mask_values(item, secret) for item in value]
    if secret and isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def is_masked(value: Any) -> bool:
    """Tell whether a value was masked, or a part of it."""
    return isinstance(value, str) and (value == MASK or f"{MASK}@" in value)


def unmasked(value: Any, given: Any) -> Any:
    """`value` with what is masked in it taken from the same place in `given`, where that has something."""
    if isinstance(value, dict):
        found = given if isinstance(given, dict) else {}
        return {key: unmasked(item, found.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        items = given if isinstance(given, list) and len(given) == len(value) else [None] * len(value)
        return [unmasked(item, other) for item, other in zip(value, items, strict=True)]
    return given if is_masked(value) and isinstance(given, str | int) else value
