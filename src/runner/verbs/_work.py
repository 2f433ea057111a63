"""How the verbs that work on a model end: with a sentence and a status, or with a traceback if we are to blame."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from omegaconf import DictConfig

from runner.config.app import Composition, current
from runner.config.errors import FAILED, USAGE, UserError, called_exit, too_many_files
from runner.config.secrets import mask_text
from runner.runtime.determinism import operations_named
from runner.tracking.formats import clean

T = TypeVar("T")


def guarded(work: Callable[[Composition], T], cfg: DictConfig) -> T:
    """Do a job of a verb that keeps no run directory.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    composition = current(cfg)
    try:
        with operations_named(lambda text: print(f"warning: {text}", file=sys.stderr)):
            return work(composition)
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(f"error: {mask_text(clean(str(error)))}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    except SystemExit as stop:
        if not (told := called_exit(stop)):
            raise
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except Exception as error:
        if told := too_many_files(error):
            print(f"error: {told}", file=sys.stderr)
        else:
            traceback.print_exc()
        raise SystemExit(FAILED) from None
