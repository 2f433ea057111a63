"""Operations that do not repeat bit for bit: where torch refuses one or warns of one, it is named with who called it.

With `torch.use_deterministic_algorithms` torch says which operation it was, but not where. Frames of the stack say which
module called it in forward; in backward there are none.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from runner.base.errors import UserError
from runner.instrument.observer import module_label

_NO_FORM = re.compile(
    r"(?P<op>\S+) does not have a deterministic implementation"
    r"|(?P<cublas>.*not deterministic because it uses CuBLAS)"
    r"|(?P<usual>[\w -]+) defaults to a non-deterministic algorithm",
    re.DOTALL,
)
_CUBLAS = "a matrix product of cuBLAS"
_PASSED_OVER = ("torch", "warnings")  # packages of frames that say nothing about who called


def operation(message: str) -> str:
    """The operation that a message of torch's says has no deterministic form; empty for any other message."""
    found = _NO_FORM.search(message)
    if found is None:
        return ""
    return found["op"] or (_CUBLAS if found["cublas"] else found["usual"].strip())


def refusal(error: BaseException) -> UserError | None:
    """The error that users see for an operation that `deterministic=true` refused; None for any other error."""
    op = operation(str(error)) if isinstance(error, RuntimeError) else ""
    if not op:
        return None
    caller = _caller([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])
    ways = "deterministic=warn to continue with a warning, or a module without this operation"
    if op == _CUBLAS:
        ways = "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the program starts, or deterministic=warn"
    return UserError("deterministic", f"{op} has no deterministic form{_called_by(caller)}", ways)


def _called_by(caller: str) -> str:
    return f"; it was called by {caller}" if caller else ""


@contextlib.contextmanager
def operations_named(warn: Callable[[str], None]) -> Iterator[None]:
    """Report operations without a deterministic form: refused ones as a UserError, others once each.

    Raises:
        UserError: instead of torch's error about such an operation.
    """
    reported: set[str] = set()
    with warnings.catch_warnings():
        # torch's warning would appear once for each place; here it appears once for each operation, with its module
        warnings.filterwarnings("default", message=rf"[\s\S]*({_NO_FORM.pattern})", category=UserWarning)
        show = warnings.showwarning

        def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            op = operation(str(message))
            if not op:
                show(message, *args, **kwargs)
            elif op not in reported:
                reported.add(op)
                caller = _called_by(_caller([frame for frame, _ in traceback.walk_stack(sys._getframe(1))]))
                warn(f"deterministic=warn: {op} has no deterministic form, so it may not repeat{caller}")

        warnings.showwarning = shown
        try:
            yield
        except RuntimeError as error:
            if (known := refusal(error)) is None:
                raise
            raise known from error


def _caller(frames: list[FrameType]) -> str:
    """Who called an operation: the innermost module, or the line of code where there is none; empty for our own."""
    modules = [found for frame in frames if isinstance(found := frame.f_locals.get("self"), nn.Module)]
    if modules:
        name = next((name for name, other in modules[-1].named_modules() if other is modules[0]), "")
        return module_label(name, modules[0])
    for frame in frames:
        package, code = str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code
        if package == "runner":
            return "backward" if code.co_name == "backward" else ""
        if package not in _PASSED_OVER:
            return f"{code.co_name} in {Path(code.co_filename).name}, line {frame.f_lineno}"
    return ""
