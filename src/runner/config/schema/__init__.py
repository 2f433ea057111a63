"""The typed config of every verb: one file per verb, one dataclass per section; each field has a type, range and default.

The YAML files in `conf/` repeat the defaults with a comment for each key; a test compares the two. Ranges are
`annotated_types` constraints, choices are `Literal`s, and a mapping with `_target_` (a component) is a `Node`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from runner.config.schema.train import Train


def _of_verbs() -> dict[str, type[Train]]:
    """The schema of each verb that takes a config: the dataclass derived from `Train` in the file named after the verb."""
    found: dict[str, type[Train]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        for made in vars(module).values():
            own = getattr(made, "__module__", "") == module.__name__
            if own and dataclasses.is_dataclass(made) and isinstance(made, type) and issubclass(made, Train):
                found[name.replace("_", "-")] = made
    return found


VERBS = _of_verbs()
