"""Samples that cannot be read: which ones take their places, and the list of them."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.config.reading import read_regular
from runner.data.indices import AllSamples, Indices
from runner.data.sample_rng import hash_ints

DRAWS = 16
"""Stand-ins that are tried for one sample: with a tenth of a data set damaged, all fail once in 10^16."""
_LARGEST_LIST = 2**28  # bytes; a line has about 200
_OWN_STREAM = 2

T = TypeVar("T")


class BadSample(NamedTuple):
    """A sample that could not be read.

    Attributes:
        sample: its identity in the data set.
        reason: what reading it raised, in one line.
    """

    sample: int
    reason: str


@dataclass(frozen=True)
class ReplacementSampler:
    """Other samples of a split in place of those that cannot be read.

    Who stands in for a sample is a function of (seed, epoch, sample), drawn evenly from the split; if that one cannot be
    read either, the next draw is taken. So it is the same for any workers, batches and order of reading, and after a resume.

    Attributes:
        seed: seed of the run.
        indices: samples of the split.
    """

    seed: int
    indices: Indices

    def candidates(self, epoch: int, index: int) -> Iterator[int]:
        """The stand-ins of a sample, in the order in which they are tried."""
        for draw in range(DRAWS):
            yield int(self.indices[hash_ints(self.seed, epoch, index, _OWN_STREAM, draw) % len(self.indices)])

    def read(self, read: Callable[[int], T], epoch: int, index: int, skipped: list[BadSample]) -> T:
        """Read a sample, or the first stand-in that can be read.

        Args:
            read: reads the sample of an index; whatever it raises but `MemoryError` means that it cannot be read.
            epoch: number of the epoch.
            index: the sample.
            skipped: samples that could not be read are added to it.

        Raises:
            UserError: if no stand-in can be read either.
        """
        errors: list[Exception] = []
        for source in (index, *self.candidates(epoch, index)):
            try:
                return read(source)
            except MemoryError:
                raise
            except Exception as error:  # what a decoder or a data set of one's own raises has no end
                skipped.append(BadSample(source, _reason(error)))
                errors.append(error)
        raise UserError(
            f"data.on_error: sample {index} cannot be read, nor can any of {DRAWS} drawn in its place; the first: "
            f"{_reason(errors[0])}"
        ) from errors[0]

    def sources(self, places: Tensor, epoch: int, unreadable: Tensor) -> Tensor:
        """Which sample is read for each, where it is known beforehand which ones cannot be read.

        Args:
            places: samples, int64 of shape (B,), on the CPU.
            epoch: number of the epoch.
            unreadable: those that cannot be read, int64 of shape (U,), on the CPU.

        Raises:
            UserError: if no stand-in of a sample can be read.
        """
        missing = torch.isin(places, unreadable)
        if not bool(missing.any()):
            return places
        known, sources = set(unreadable.tolist()), places.clone()

        def read(source: int) -> int:
            if source in known:
                raise UserError("it could not be read when the cache was made")
            return source

        for spot in missing.nonzero()[:, 0].tolist():
            sources[spot] = self.read(read, epoch, int(places[spot]), [])
        return sources


def missing(unreadable: Tensor, indices: Indices) -> Tensor:
    """Those of the samples that cannot be read which belong to a split."""
    return unreadable if isinstance(indices, AllSamples) else unreadable[torch.isin(unreadable, indices)]


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


class BadSampleLog:
    """The list of samples that could not be read: each is told once, and written down as soon as it is found."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], dict[str, Any]] = {}
        self._waiting: list[dict[str, Any]] = []  # found before it was known where to write
        self._path: Path | None = None
        self._cut_short = False
        self._tell: Callable[[str], None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def reasons(self, split: str) -> dict[int, str]:
        """The samples of a split that could not be read so far, each with the file if it has one, and the reason."""
        return {
            sample: entry["reason"] if entry["path"] is None else f"{entry['path']}: {entry['reason']}"
            for (name, sample), entry in self._entries.items()
            if name == split
        }

    def noting(self, split: str, dataset: Any) -> Callable[[Sequence[BadSample]], None]:
        """Gives a function that takes down samples of a split, whose files the data set names if it has `path`."""

        def note(found: Sequence[BadSample]) -> None:
            for sample, reason in found:
                if (split, sample) not in self._entries:
                    path = str(dataset.path(sample)) if hasattr(dataset, "path") else None
                    entry = {"split": split, "sample": sample, "path": path, "reason": reason}
                    self._entries[split, sample] = entry
                    self._waiting.append(entry)
            if self._tell is not None and self._waiting:
                self._write(self._tell)

        return note

    def open(self, path: Path | None, tell: Callable[[str], None]) -> None:
        """Say where the list is written, and who is told of the first one.

        Args:
            path: a file of JSON lines, which is continued; None writes none.
            tell: called with a sentence.
        """
        self._path, self._tell = path, tell
        if path is not None and path.is_file():
            try:
                text = read_regular(path, _LARGEST_LIST).decode("utf-8", "replace")
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}; move it away") from error
            for line in text.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut the last line short
                    entry = json.loads(line)
                    self._entries[str(entry["split"]), int(entry["sample"])] = entry
                    self._waiting = [new for new in self._waiting if new != entry]
            self._cut_short = bool(text) and not text.endswith("\n")
        if self._waiting:
            self._write(tell)

    def _write(self, tell: Callable[[str], None]) -> None:
        new, self._waiting = self._waiting, []
        if len(new) == len(self._entries):
            first = new[0]
            told = first["reason"] if first["path"] is None or first["path"] in first["reason"] else first["path"]
            tell(f"sample {first['sample']} of {first['split']} cannot be read and another takes its place: {told}")
        if self._path is None:
            return
        try:
            if len(new) < len(self._entries) and not self._path.exists():
                tell(f"{self._path} was deleted during the run; it was written again")
                new, self._cut_short = list(self._entries.values()), False
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" if self._cut_short else "")
                self._cut_short = False
                file.writelines(json.dumps(entry) + "\n" for entry in new)
        except OSError as error:
            tell(f"cannot write {self._path}: {error.strerror}")
            self._path = None

    def summary(self) -> str:
        """How many there were, for the end of a run; empty if there were none."""
        if not self._entries:
            return ""
        counts = Counter(split for split, _ in self._entries)
        share = ", ".join(f"{count:,} of {split}" for split, count in counts.items())
        where = f"; they are listed in {self._path}" if self._path else ""
        return f"samples could not be read, and others took their places: {share}{where}"
