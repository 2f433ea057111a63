"""What objects of the config must be able to do, found out before they are used."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from runner.base.errors import UserError

Calls = Mapping[str, tuple[str, ...]]
"""Names of methods, each with the names of the arguments that it is called with; those of `_OPTIONAL` only if it takes them."""

_OPTIONAL = ("progress", "count")


def calls_of(protocol: type) -> Calls:
    """The methods of a protocol."""
    methods = {name: each for name, each in vars(protocol).items() if inspect.isfunction(each) and name[0] != "_"}
    return {name: tuple(inspect.signature(each).parameters)[1:] for name, each in methods.items()}


def require_methods(key: str, target: str, found: Any, calls: Calls, optional: Collection[str] = ()) -> None:
    """Refuse what a component built if it lacks methods or attributes, or its methods take other arguments than `calls` names.

    Of `optional` methods it may lack some, but there has to be one of all. `key` and `target` are the component's. Raises
    `UserError` with what is wrong and what is needed.
    """
    given = [name for name in calls if callable(getattr(found, name, None))]
    missing = [name for name in calls if name not in given and name not in optional]
    listed = ", ".join(f"{name}({_written(names)})" for name, names in calls.items())
    what = f"{target} gives a {type(found).__name__}"
    # A method with a slip in its name would never be called
    for name in dir(found) if optional else ():
        method = name[0] != "_" and name not in calls and callable(getattr(type(found), name, None))
        if method and (spelt := get_close_matches(name, set(optional) - set(given), 1, 0.8)):
            raise UserError(f"{key}._target_", f"{what} whose {name} is never called", listed, spelt[0])
    for name, names in calls.items():
        if (value := getattr(found, name, None)) is not None and name not in given:
            problem = f"{what} whose attribute {name} is {value!r:.40}, and not the method {name}({_written(names)})"
            raise UserError(f"{key}._target_", problem, "another name for the attribute")
    if missing or not given:
        problem = f"{what} without {', '.join(missing) or 'any of the methods that are called'}"
        raise UserError(f"{key}._target_", problem, f"an object with {listed}")
    # Arguments are checked here, as a call with wrong ones would fail hours later
    for name in given:
        try:
            signature = inspect.signature(getattr(found, name))
        except (ValueError, TypeError):  # of some methods that are not written in Python
            continue
        taken = [each for each in calls[name] if each not in _OPTIONAL or each in signature.parameters]
        try:
            # Arguments are bound to their own names, which tells whether the optional one is at its place
            bound = signature.bind(*taken).arguments
            fits = all(bound.get(each, each) == each for each in _OPTIONAL)
        except TypeError:
            fits = False
        if not fits:
            owner = next((kind for kind in type(found).__mro__ if name in vars(kind)), type(found))
            of = f" of its base {owner.__qualname__}" if owner is not type(found) else ""
            problem = f"{what} whose {name}{signature}{of} does not take {' and '.join(taken) or 'no arguments'}"
            allowed = f"{name}({_written(('self', *calls[name]))})" + ", or a class without this base" * bool(of)
            raise UserError(f"{key}._target_", problem, allowed)


def _written(names: Sequence[str]) -> str:
    """Arguments as documentation writes them: `modules, batch[, progress]`."""
    return ", ".join(names[:1]) + "".join(f"[, {each}]" if each in _OPTIONAL else f", {each}" for each in names[1:])
