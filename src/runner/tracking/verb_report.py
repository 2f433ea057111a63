"""Reports of verbs: tables and sentences for people, or one JSON object for programs, and the phrases that they share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.base.files import finite
from runner.base.reading import is_true
from runner.tracking.console import Console


class Report(Console):
    """The console of a verb; if it is `as_json`, standard output is one JSON object, and all else goes to standard error."""

    def __init__(self, as_json: object) -> None:
        self.as_json = is_true(as_json)
        super().__init__(None, progress=False, stream=sys.stderr if self.as_json else None)

    def warnings(self, *groups: Iterable[str]) -> None:
        """Show texts as warnings, each once."""
        for text in dict.fromkeys(text for group in groups for text in group):
            self.warn(text)

    def lines(self, *texts: object) -> None:
        """Show each text, or path, on its own line."""
        for text in texts:
            self.line(str(text))

    def json(self, record: Mapping[str, Any], **more: Any) -> bool:
        """Print a record as one JSON object if that was asked for, NaN and infinities as null; returns whether it was."""
        if self.as_json:
            print(json.dumps(finite({**record, **more}), allow_nan=False), flush=True)
        return self.as_json

    def folder(self, path: Path | str) -> None:
        """Print where the results are: the last line, unless there is JSON."""
        if not self.as_json:
            print(path, flush=True)


@contextlib.contextmanager
def ending_in_json(as_json: object) -> Iterator[dict[str, Any]]:
    """Send what this and its child processes print to standard error, and end with what the caller adds to the dict as JSON.

    Unless `as_json`, everything is printed as usual, and no JSON.
    """
    record: dict[str, Any] = {}
    if not is_true(as_json):
        yield record
        return
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # which may be other streams than those of the process
            yield record
    finally:
        sys.stdout.flush()  # of those who kept the stream
        os.dup2(output, 1)
        os.close(output)
        if record:  # it is empty after a mistake
            print(json.dumps(finite(record), allow_nan=False), flush=True)


def mib(count: float, digits: int = 2) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:.{digits}f}"
