"""The typed surface of every verb: one file a verb, one dataclass a section, each field with its type, range and default.

The YAML files in `conf/` repeat the defaults with a comment for each key; a test holds the two together. Ranges are
`annotated_types` constraints, choices are `Literal`s, and a mapping with `_target_` (a component) is a `Node`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from runner.config.schema.train import Train


def _of_verbs() -> dict[str, type[Train]]:
    """Each verb that takes a config with its schema: the dataclass over `Train` in the file that is named after it."""
    found: dict[str, type[Train]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        for made in vars(module).values():
            own = getattr(made, "__module__", "") == module.__name__
            if own and dataclasses.is_dataclass(made) and isinstance(made, type) and issubclass(made, Train):
                found[name.replace("_", "-")] = made
    return found


VERBS = _of_verbs()
