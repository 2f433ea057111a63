"""One job of a verb in this process, and how its errors are reported. Imports nothing heavy until a job runs."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from runner.base.errors import OK, UserError, explain
from runner.verbs._table import VERBS, print_error

if TYPE_CHECKING:
    from runner.config.composition import Composition


def status_of(run: Callable[[], object]) -> int:
    """The exit status of a function that may call `sys.exit`."""
    try:
        run()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return OK


def run_job(name: str, composition: Composition) -> None:
    """Run one job of a verb in this process; an error becomes a sentence, or a traceback if it is unexpected.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    verb = VERBS[name]
    # Variables of libraries have to be set before these are imported
    for variable, value in verb.environment.items():
        os.environ.setdefault(variable, value)
    run: Callable[[Composition], float | None] = importlib.import_module(verb.module).run
    if not gc.get_freeze_count():  # a second job in this process must not keep the garbage of the first
        gc.freeze()  # no collection during a run looks at what was imported
    gc.enable()
    if verb.keeps_runs:
        run(composition)
        return
    from runner.runtime.determinism import operations_named
    from runner.verbs._ranks import on_ranks

    try:
        with operations_named(lambda text: print(f"warning: {text}", file=sys.stderr)):
            on_ranks(verb, run, composition)
    except Exception as error:
        if isinstance(error, UserError) and os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        status, _, text = explain(error)
        print_error(text)
        raise SystemExit(status) from None
