"""The data set of the last job of a sweep, which the next job in this process need not read again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from runner.data.sources.arrays import ImageArrays

_OURS = "runner.data.sources."  # what others make may draw random numbers, or change between jobs


class KeptSource:
    """Keeps at most one data set, and none unless `in_sweep`."""

    def __init__(self) -> None:
        self._in_sweep = False
        self._key: str | None = None
        self._made: dict[str, ImageArrays] = {}

    @property
    def in_sweep(self) -> bool:
        """Whether the next job of a sweep may use the data set of this one."""
        return self._in_sweep

    @in_sweep.setter
    def in_sweep(self, value: bool) -> None:
        self._in_sweep = value
        if not value:
            self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self._key, self._made = None, {}

    def get(self, node: dict[str, Any], facts: dict[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` gives, or gave for the same node and facts.

        Only images in memory are kept, as a job changes neither them nor, by reading them, anything else.
        """
        if not (self._in_sweep and str(node.get("_target_")).startswith(_OURS)):
            return make()
        key = json.dumps([node, facts, os.getcwd()], sort_keys=True, default=str)  # noqa: PTH109  a path may be relative
        if key != self._key:
            self.forget()  # before the next one is read, so that no two are in memory
            made = make()
            if not isinstance(made, dict) or not all(isinstance(split, ImageArrays) for split in made.values()):
                return made
            self._key, self._made = key, made
        return dict(self._made)


kept_source = KeptSource()
"""That of this process."""
