"""Matrices of cases, of which some stand for all others in the default suite; `make test-all` runs the others too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MARK = pytest.mark.extended


def some(cases: Iterable[Any], *by_default: int) -> list[Any]:
    """The cases of a parametrization, those at other places than `by_default` marked as `extended`."""
    return [case if place in by_default else pytest.param(case, marks=MARK) for place, case in enumerate(cases)]
