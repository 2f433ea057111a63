"""What objects of the config must be able to do, found out before they are used."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from runner.base.errors import UserError

Calls = Mapping[str, tuple[str, ...]]
"""Names of methods, each with the names of the arguments that it is called with; `[count]` only if it takes it, and by name."""


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
    for name in calls.keys() - given:  # an attribute that a constructor sets, over a method of the class
        if (value := getattr(found, name, None)) is not None and callable(getattr(type(found), name, None)):
            problem = f"{what} whose attribute {name} is {value!r:.40}, and hides its method {name}"
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
        needed = [each for each in calls[name] if each[0] != "["]
        taken = {each: None for each in signature.parameters if f"[{each}]" in calls[name]}
        try:
            signature.bind(*needed, **taken)
        except TypeError as error:
            # With the class that has it, as a base may have a method of this name for something else
            of = getattr(getattr(found, name), "__qualname__", name)
            problem = f"{what} whose {of}{signature} does not take {' and '.join([*needed, *taken]) or 'no arguments'}"
            raise UserError(f"{key}._target_", problem, f"{name}({_written(('self', *calls[name]))})") from error


def _written(names: Sequence[str]) -> str:
    """Arguments as documentation writes them: `modules, batch[, progress]`."""
    return ", ".join(names).replace(", [", "[, ")


def takes(found: Any, method: str, argument: str) -> bool:
    """Whether an object has a method that takes an argument of this name."""
    try:
        return argument in inspect.signature(getattr(found, method)).parameters
    except (AttributeError, ValueError, TypeError):  # it has none, or one that is not written in Python
        return False
