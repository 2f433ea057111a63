"""Masks passwords and keys wherever a command line, a config or an error is stored or shown.

One list of names decides. A name is compared in snake case, `apiKey` and `api-key` as `api_key`, without digits at its end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MASK = "***"

_OF_FILES = r"(?!.*_(?:file|path|dir|folder|name|length|len)$)"
_NOT_TOKENS = (
    "class|cls|mask|pad|patch|bos|eos|unk|sep|register|special|start|end|image|text|mix|num|n|max|min|per|time"
)
_OF_KEYS = (
    "access|account|admin|api|app|aws|azure|auth|client|deploy|encryption|gcp|hf|host|license|master|private|s3|secret|"
    "service|session|shared|signing|ssh|storage|subscription|user|wandb"
)
PATTERNS = (
    rf"{_OF_FILES}(?:.+_)?(?:passwords?|passwd|passphrases?|passcodes?|pwd|secrets?|credentials?|creds)(?:_.+)?",
    rf"(?!(?:.+_)?(?:{_NOT_TOKENS})_)(?:.+_)?token",
    r"(?:.+_)?(?:auth|authorization|bearer|jwt|webhook|dsn)",
    rf"(?:(?:.+_)?(?:{_OF_KEYS})_)?key",
    r"(?:.+_)?apikey",
    r"(?:.+_)?(?:sig|signature)",
    r"pass",
    r"(?:.+_)?cookies?",
    r"session(?:_?id)?",
)
"""Names of arguments whose values are secret."""

_SECRET = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS))
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PARTS = re.compile(r"[.@/ ]")
_PASSWORD_IN_URL = re.compile(r"""(?<=://)([^/\s:@'"]*):([^/\s'"]+)@""")
_USER_IN_URL = re.compile(r"""(?<=http://|ttps://)([^/\s:@'"]+)@""")
_QUERY = re.compile(r"""(?<=[?&#;])([\w.\-]+)=([^&#;\s'"]+)""")
_BEARER = re.compile(r"\b([Bb]earer)\s+(?!tokens?\b|auth)[\w.~+/=\-]+")
# Begins where a name does and never backtracks: a text from a checkpoint may have a million letters.
_NAME = re.compile(r"""(?<![\w.\-])([\w.\-]++)(['"]?\s*[=:]\s*)""")
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_VALUE = re.compile(rf"""{_QUOTED}|[^\s,;&'"{{}}\[\]()]+""")
# A value after a colon in an override may have spaces, and be a list or a dictionary; one without its end is masked as a whole.
_NESTED_VALUE = re.compile(
    rf"{_QUOTED}|\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|['\"\[{{].*|[^,{{}}\[\]]+", re.DOTALL
)
_MASKED = re.compile(r"(?:^|[=:/])\*\*\*(?:$|[@&])")


@functools.cache
def is_secret(name: str) -> bool:
    """Whether the value of an argument of this name, without dots, is secret."""
    plain = _HUMP.sub("_", name).lower().replace("-", "_").rstrip("0123456789").strip("_")
    return _SECRET.fullmatch(plain) is not None


def mask_text(text: str) -> str:
    """A text for people with the secrets in its URLs and in its pairs such as `api_key=abc` masked."""
    return _pairs_masked(_urls_masked(text), in_override=False)


def mask_word(word: str) -> str:
    """A word of a command line with its secrets masked, also those in a nested value."""
    key, equals, _ = word.partition("=")
    if equals and any(is_secret(part) for part in _PARTS.split(key.lstrip("+~-"))):
        return f"{key}={MASK}"
    return _pairs_masked(_urls_masked(word), in_override=True)


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
    return _urls_masked(value) if isinstance(value, str) else value


def mask_sweep(path: Path) -> None:
    """Mask the secrets in what Hydra writes of a sweep; other jobs may do the same meanwhile."""
    import yaml  # what is light enough for every start does not need it

    with contextlib.suppress(OSError, yaml.YAMLError):
        if _version(path) == _masked_sweep:
            return  # by an earlier job; reading it takes longer than all else that comes before training
        stored = yaml.safe_load(path.read_bytes())
        masked = mask_values(stored)
        job = masked["hydra"]["job"]
        dirname, separator = job["override_dirname"], job["config"]["override_dirname"]["kv_sep"]
        # The words are searched for, as commas inside them look like those between them; long ones may hold short ones.
        for word in sorted(masked["hydra"]["overrides"]["task"], key=len, reverse=True):
            dirname = dirname.replace(word.replace("=", separator), mask_word(word).replace("=", separator))
        job["override_dirname"] = dirname
        for kind, words in masked["hydra"]["overrides"].items():
            masked["hydra"]["overrides"][kind] = mask_words(words)
        if masked != stored:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_text(yaml.safe_dump(masked, sort_keys=False), encoding="utf-8")
            temporary.replace(path)
        _masked_sweep[:] = _version(path)


_masked_sweep: list[int] = []
"""The version of the file that `mask_sweep` left last."""


def _version(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size]


def is_masked(value: Any) -> bool:
    """Whether a value was masked, or a part of it."""
    return isinstance(value, str) and MASK in value and _MASKED.search(value) is not None


def unmasked(value: Any, given: Any) -> Any:
    """`value` with what is masked in it taken from the same place in `given`, where that has something."""
    if isinstance(value, dict):
        found = given if isinstance(given, dict) else {}
        return {key: unmasked(item, found.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        items = given if isinstance(given, list) and len(given) == len(value) else [None] * len(value)
        return [unmasked(item, other) for item, other in zip(value, items, strict=True)]
    return given if is_masked(value) and isinstance(given, str | int) else value


def _urls_masked(text: str) -> str:
    if "://" in text:
        text = _PASSWORD_IN_URL.sub(rf"\1:{MASK}@", text)
        text = _USER_IN_URL.sub(f"{MASK}@", text)
    if "=" in text:
        text = _QUERY.sub(lambda found: f"{found[1]}={MASK}" if is_secret(found[1]) else found[0], text)
    return text


def _pairs_masked(text: str, in_override: bool) -> str:
    parts, done = [], 0
    for found in _NAME.finditer(text) if "=" in text or ":" in text else ():
        name, mark = found[1].rpartition(".")[2], found[2]
        if found.start() < done or not is_secret(name):
            continue
        value = (_NESTED_VALUE if in_override and ":" in mark else _VALUE).match(text, found.end())
        # In prose, `name: ...` is the start of a message, and `key=` is an argument in a line of code.
        certain = in_override or mark[0] in "'\"" or ("=" in mark and name != "key")
        if value and (certain or (mark == ":" and value[0][0] in "'\"")):
            parts += [text[done : found.end()], MASK]
            done = value.end()
    return _BEARER.sub(rf"\1 {MASK}", "".join([*parts, text[done:]]))
