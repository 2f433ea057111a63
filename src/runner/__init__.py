"""`runner` trains PyTorch vision models: `python -m runner train`, or `from runner import train` in Python."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # nothing is imported here: Ctrl-C would show Python's traceback
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from runner.api import compose, evaluate, load, train
    from runner.distributed.gather import gather
    from runner.lab.report.report import report, runs
else:
    ModuleType = type(sys)

began: float | None = None  # seconds since 1970 at the start of the command; None in other programs
__version__ = "1.0.0"
__all__ = ["compose", "evaluate", "gather", "load", "report", "runs", "train"]


def __getattr__(name: str) -> Any:
    # The command line starts without torch.
    if name in ("report", "runs"):
        from runner.lab.report import report as module

        return getattr(module, name)
    if name == "gather":
        from runner.distributed.gather import gather

        return gather
    if name in __all__:
        from runner import api

        return getattr(api, name)
    # With these, Python names the nearest one.
    raise AttributeError(f"module 'runner' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the module runner.train would hide the function of that name.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
