"""Patterns of dotted names, with which parts of a model are picked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from runner.config.errors import UserError, nearest


def matching(key: str, pattern: str, names: Iterable[str], what: str, others: Sequence[str] = ()) -> set[str]:
    """The dotted names that match a pattern with `*` and `?`, which stand for dots, too.

    Args:
        key: where the pattern stands in the config.
        pattern: the pattern.
        names: all there are.
        what: what they are names of, such as `module`.
        others: what else the key may be, such as `all-but-head`.

    Raises:
        UserError: if there is none, with the nearest name and what names begin with.
    """
    pool = list(dict.fromkeys(names))
    found = {name for name in pool if fnmatchcase(name, pattern)}
    if not found:
        close = nearest(pattern.replace("*", "").strip("."), [*others, *pool])
        hint = f"; did you mean '{close}'?" if close else ""
        top = ", ".join(dict.fromkeys(name.partition(".")[0] for name in pool))
        raise UserError(
            f"{key}: the model has no {what} '{pattern}'{hint}\n"
            f"    allowed: {', '.join([*others, 'or names'] if others else ['names'])} with * and ?, which begin with {top}"
        )
    return found
