"""Fixtures of these tests."""

from tiny_runs import made_once, tiny, trained

__all__ = ["made_once", "tiny", "trained"]
