"""Matrices of cases, of which some stand for all others in the default suite; `make test-all` runs the others too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MARK = pytest.mark.extended


def some(cases: Iterable[Any], *by_default: int, several: bool = False) -> list[Any]:
    """The cases of a parametrization, those at other places than `by_default` marked as `extended`.

    `several` says that a case is a tuple of several parameters.
    """
    params = [pytest.param(*case) if several else pytest.param(case) for case in cases]
    return [
        each if place in by_default else pytest.param(*each.values, marks=MARK) for place, each in enumerate(params)
    ]
