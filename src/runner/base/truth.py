"""Values of a composed config that are true or false, before the schema converts them."""

from __future__ import annotations

from typing import Any


def is_true(value: Any) -> bool:
    """Tell whether a value is true, also as a text, which quotes and environment variables make of it."""
    return str(value).lower() in ("true", "t", "yes", "y", "on", "1", "1.0")
