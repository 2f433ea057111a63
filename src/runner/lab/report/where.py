"""Conditions on runs: `amp=true and test/accuracy>0.99`. Parsed with Python's grammar, never evaluated by it."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Collection
from typing import Any

from runner.base.errors import UserError, nearest

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")
_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")
_ALLOWED = "such as 'amp=true and test/accuracy>0.99', with = != < <= > >= in, and, or, not, brackets"

Value = Callable[[str], Any]
"""The value of a run under a name."""


class _Wrong(Exception):
    pass


def condition(text: str, names: Collection[str]) -> Callable[[Value], bool]:
    """The test of whether a run is meant.

    Args:
        text: comparisons of keys and metrics with values, joined by `and`, `or`, `not`; `=` with `*` or `?` is a pattern.
        names: the names that exist.

    Raises:
        UserError: if it is not such a condition, or names something that no run has.
    """
    # Python's grammar has == for a comparison; what is in quotes stays as it is.
    parts = [part if number % 2 else _EQUALS.sub("==", part) for number, part in enumerate(_QUOTED.split(text))]
    try:
        tree = ast.parse("".join(parts).strip(), mode="eval").body
        return _test(tree, names)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise UserError("where", f"cannot be {text!r}: it is not a condition", _ALLOWED) from None
    except _Wrong as error:
        raise UserError("where", f"cannot be {text!r}: it {error}", _ALLOWED) from None


def _test(node: ast.expr, names: Collection[str]) -> Callable[[Value], bool]:
    if isinstance(node, ast.BoolOp):
        tests = [_test(value, names) for value in node.values]
        every = all if isinstance(node.op, ast.And) else any
        return lambda value: every(test(value) for test in tests)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _test(node.operand, names)
        return lambda value: not inner(value)
    if not isinstance(node, ast.Compare):  # a name alone: it is true
        node = ast.Compare(node, [ast.Eq()], [ast.Constant(True)])
    if len(node.ops) > 1:
        raise _Wrong("compares more than two things at once; join comparisons with and")
    if (name := _name(node.left)) is None:
        raise _Wrong(
            f"has {ast.unparse(node.left)!r}, which is not a comparison, or has no name of a key or metric on its left"
        )
    if name not in names:
        close = meant(name, names)
        raise _Wrong(f"names {name}, which no run has" + (f"; did you mean '{close}'?" if close else ""))
    constant, kind = _constant(node.comparators[0]), type(node.ops[0])
    if kind not in _COMPARED or (kind in (ast.In, ast.NotIn) and not isinstance(constant, list)):
        raise _Wrong("has an unsupported comparison")
    return lambda value: _COMPARED[kind](value(name), constant)


def same(found: Any, wanted: Any) -> bool:
    """True if a value is the one that is meant: texts as patterns, without regard to case and underscores."""
    if not isinstance(wanted, str):
        return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
    text, pattern = (str(each).casefold().replace("_", "") for each in (found, wanted))
    return found is not None and (text == pattern or fnmatch.fnmatchcase(text, pattern))


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A comparison of two numbers or two texts, which holds for nothing else."""

    def holds(found: Any, limit: Any) -> bool:
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (found, limit))
        return (numbers or (isinstance(found, str) and isinstance(limit, str))) and compare(found, limit)

    return holds


_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: same,
    ast.NotEq: lambda found, wanted: not same(found, wanted),
    ast.In: lambda found, choices: any(same(found, choice) for choice in choices),
    ast.NotIn: lambda found, choices: not any(same(found, choice) for choice in choices),
    ast.Lt: _ordered(operator.lt), ast.LtE: _ordered(operator.le), ast.Gt: _ordered(operator.gt), ast.GtE: _ordered(operator.ge),
}  # fmt: skip


def _name(node: ast.expr) -> str | None:
    """A name with dots and slashes, such as `optimizer.lr` and `test/accuracy`; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return None if before is None else f"{before}.{node.attr}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        both = _name(node.left), _name(node.right)
        return None if None in both else f"{both[0]}/{both[1]}"
    return None


def _constant(node: ast.expr) -> Any:
    """A number, a text, true, false, null, a list of them; any other word is a text."""
    name = _name(node)
    if name is not None:
        return _WORDS.get(name.lower(), name)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value  # type: ignore[operator]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(item) for item in node.elts]
    raise _Wrong(f"has {ast.unparse(node)!r}, which is not a value; put strings in quotes")


def meant(name: str, names: Collection[str]) -> str:
    """The name that is probably meant by a wrong one: a metric that begins so, such as `val/accuracy` for `acc`, or the nearest."""
    metrics = [each for each in names if "/" in each and each.rpartition("/")[2].startswith(name.lower())]
    return min(metrics, key=lambda each: (not each.startswith("val/"), each), default="") or nearest(name, names)
