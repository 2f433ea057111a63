"""Values of a composed config that are true or false, before the schema converts them."""

from __future__ import annotations

from typing import Any


def is_true(value: Any) -> bool:
    """Whether a value is true; quotes and environment variables make a text of it, which the schema accepts as pydantic does."""
    return str(value).lower() in ("true", "t", "yes", "y", "on", "1", "1.0")
