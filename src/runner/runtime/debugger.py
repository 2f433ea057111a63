"""Python's debugger, opened where an exception was raised."""

from __future__ import annotations

import multiprocessing
import os
import pdb
import sys


def post_mortem(error: BaseException) -> None:
    """Open the debugger in the frame that raised an exception, or what caused it; returns when it is left.

    Only the main process of a run has a terminal to talk to: in any other, and in all ranks but the first, nothing happens.
    """
    # Workers and other ranks have no terminal
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return
    while error.__cause__ is not None:  # errors of user code are wrapped in ours
        error = error.__cause__
    print(f"post_mortem: {type(error).__name__}: {error} (q to quit, h for help)", file=sys.stdout, flush=True)
    tracer = sys.gettrace()  # of a debugger or a measurement of coverage, which goes on afterwards
    try:
        pdb.post_mortem(error.__traceback__)
    finally:
        sys.settrace(tracer)
    print(flush=True)  # lines that are not typed leave the prompt without an end
