"""Reports of verbs: tables and sentences for people, or one JSON object for programs, and the phrases that they share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.files import finite
from runner.tracking.console import Console


class Report(Console):
    """The console of a verb; if it is `as_json`, standard output is one JSON object, and all else goes to standard error."""

    def __init__(self, as_json: bool) -> None:
        as_json = str(as_json).lower() == "true"  # quotes on the command line make a text of it
        super().__init__(None, progress=False, stream=sys.stderr if as_json else None)
        self.as_json = as_json

    def warnings(self, *groups: Iterable[str]) -> None:
        """Show texts as warnings, each once."""
        for text in dict.fromkeys(text for group in groups for text in group):
            self.warn(text)

    def lines(self, *texts: object) -> None:
        """Show each text, or path, on its own line."""
        for text in texts:
            self.line(str(text))

    def skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        """Show what was skipped, each with the reason; nothing if nothing was."""
        if skipped:
            self.table("skipped", ["what", "why"], [list(pair) for pair in skipped])

    def json(self, record: Mapping[str, Any], **more: Any) -> bool:
        """Print a record as one JSON object if that was asked for, NaN and infinities as null; returns whether it was."""
        if self.as_json:
            print(json.dumps(finite({**record, **more}), allow_nan=False), flush=True)
        return self.as_json

    def folder(self, path: Path | str) -> None:
        """Print where the results are: the last line, unless there is JSON."""
        if not self.as_json:
            print(path, flush=True)


def mib(count: float, digits: int = 2) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:.{digits}f}"
