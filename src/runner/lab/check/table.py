"""All checks, by group, in the order in which they run."""

from __future__ import annotations

import importlib
import pkgutil

from runner.lab.check import checks
from runner.lab.check.context import CheckContext
from runner.lab.check.result import REGISTERED, Check, Result, passed

GROUPS = ("data", "labels", "samples", "batches", "baselines", "outputs", "model", "loss", "step", "settings")


def build(context: CheckContext) -> Result:
    """Data, model, loss and optimizer that do not fit together."""
    context.build()
    return passed("data, model, loss and optimizer fit together")


BUILD = Check("config", build, any_task=True)

# Importing a module of the folder registers its checks: a new file needs no entry anywhere.
for module in sorted(each.name for each in pkgutil.iter_modules(checks.__path__)):
    importlib.import_module(f"{checks.__name__}.{module}")
CHECKS = tuple(sorted(REGISTERED, key=lambda each: GROUPS.index(each.group)))
