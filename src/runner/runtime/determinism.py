"""Operations that do not repeat bit for bit, as `torch.use_deterministic_algorithms` refuses them or warns of them."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from runner.base.errors import UserError

_NO_FORM = re.compile(
    r"\S+ does not have a deterministic implementation"
    r"|.*not deterministic because it uses CuBLAS.*"  # with the variable to set
    r"|[\w -]+ defaults to a non-deterministic algorithm"
)


def refusal(error: BaseException) -> UserError | None:
    """The error that users see for an operation that `deterministic=true` refused; None for any other error."""
    found = _NO_FORM.search(str(error)) if isinstance(error, RuntimeError) else None
    ways = "deterministic=warn to continue with a warning, or a module without this operation"
    return UserError("deterministic", found[0], ways) if found else None


@contextlib.contextmanager
def operations_named(warn: Callable[[str], None]) -> Iterator[None]:
    """Report operations without a deterministic form: refused ones as a UserError, others by `warn`, once each.

    Raises:
        UserError: instead of torch's error about such an operation.
    """
    reported: set[str] = set()
    with warnings.catch_warnings():
        # torch's warning would appear once for each line of code
        warnings.filterwarnings("default", message=rf"[\s\S]*({_NO_FORM.pattern})", category=UserWarning)
        show = warnings.showwarning

        def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if (found := _NO_FORM.search(str(message))) is None:
                show(message, *args, **kwargs)
            elif found[0] not in reported:
                reported.add(found[0])
                warn(f"deterministic=warn: {found[0]}")

        warnings.showwarning = shown
        try:
            yield
        except RuntimeError as error:
            if (known := refusal(error)) is None:
                raise
            raise known from error
