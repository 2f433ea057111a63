"""Errors on standard error. Imports nothing heavy."""

from __future__ import annotations

import sys

from runner.base.secrets import mask_text
from runner.tracking.formats import clean


def print_error(text: str) -> None:
    """Print an error to standard error, without secrets and control characters."""
    print(f"error: {mask_text(clean(text))}", file=sys.stderr)
