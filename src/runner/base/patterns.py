"""Patterns of dotted names, which select parts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from runner.base.errors import UserError, nearest


def matching(
    key: str, pattern: str, names: Iterable[str], what: str, *, others: Sequence[str] = (), prose: str = ""
) -> set[str]:
    """The dotted names that match a pattern with `*` and `?`, which stand for dots, too.

    Args:
        key: where the pattern stands in the config.
        pattern: the pattern.
        names: all there are.
        what: what they are names of, such as `module`.
        others: words that the key may be instead, such as `all-but-head`.
        prose: what else it may be, for people, such as `a number`.

    Raises:
        UserError: if there is none, with the nearest name and what names begin with.
    """
    pool = list(dict.fromkeys(names))
    found = {name for name in pool if fnmatchcase(name, pattern)}
    if not found:
        close = nearest(pattern.replace("*", "").strip("."), [*others, *pool])
        top = ", ".join(dict.fromkeys(name.partition(".")[0] for name in pool))
        besides = [*others, prose] if prose else others
        allowed = ", ".join([*besides, "or names"] if besides else ["names"])
        allowed = f"{allowed} with * and ?, which begin with {top}"
        raise UserError(key, f"the model has no {what} '{pattern}'", allowed, close)
    return found
