"""What cannot be read: one sentence for files of all formats, what replaces samples, and how many there are."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from runner.base.errors import DataFailed, UserError
from runner.data.sample_rng import hash_ints
from runner.data.sampler import Indices
from runner.distributed.world import World

DRAWS = 16
"""Replacements that are tried for one sample: with a tenth of a data set damaged, all fail once in 10^16."""
NOT_READ = "it could not be read when the cache was made"
_OWN_STREAM = 2
_NAMED = 3  # samples in an error

T = TypeVar("T")


class Place:
    """Errors in the block become a `UserError` that names what is read, but `MemoryError` and those that are one already.

    Args:
        name: what is read, such as a file.
        key, allowed: see `UserError`.
    """

    def __init__(self, name: object, key: str = "", allowed: str = "") -> None:
        self.name, self.part, self.key, self.allowed = name, "", key, allowed

    def each(self, section: str, entries: Iterable[T]) -> Iterator[T]:
        """The entries of a list; errors name the last one that was given."""
        for number, entry in enumerate(entries):
            self.part = f"{section}[{number}] of "
            yield entry
        self.part = ""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        # Readers of untrusted files raise a dozen types, SyntaxError among them
        if isinstance(error, Exception) and not isinstance(error, UserError | MemoryError):
            problem = f"cannot read {self.part}{self.name}: {reason_of(error)}"
            raise UserError(self.key, problem, self.allowed) from error


def reason_of(error: Exception) -> str:
    """What is wrong with what was read, in one line and without the names of Python's objects."""
    text = (getattr(error, "strerror", None) or "").lower() or str(error)
    if isinstance(error, KeyError):
        text = f"there is no {error}"
    elif isinstance(error, RecursionError):
        text = "it is nested too deeply"
    elif isinstance(error, UnidentifiedImageError):
        text = "its content is not an image of a known type"
    elif isinstance(error, UnicodeDecodeError):
        text = "it is not UTF-8 text"
    elif isinstance(error, json.JSONDecodeError):
        text = f"it is not JSON, or cut short: {error}"
    return " ".join(text.split()) or type(error).__name__


class BadSample(NamedTuple):
    """A sample that could not be read: its index in the data set, and the error in one line."""

    sample: int
    reason: str


@dataclass(frozen=True)
class ReplacementSampler:
    """Chooses other samples of a split for those that cannot be read.

    The replacement is a function of (seed, epoch, sample), uniform over the split; if it cannot be read either, the next one
    is tried. So it is the same for any workers, batches and order of reading, and after a resume.
    """

    seed: int
    indices: Indices

    def candidates(self, epoch: int, index: int) -> Iterator[int]:
        """The replacements of a sample, in the order in which they are tried."""
        for draw in range(DRAWS):
            yield int(self.indices[hash_ints(self.seed, epoch, index, _OWN_STREAM, draw) % len(self.indices)])

    def read(self, read: Callable[[int], T], epoch: int, index: int, skipped: list[BadSample]) -> T:
        """Read sample `index`, or the first replacement that can be read; those that cannot are appended to `skipped`.

        Any error of `read` means that the sample cannot be read, but `MemoryError` and `DataFailed`. Raises `UserError` if all
        replacements fail.
        """
        first: Exception | None = None
        # Candidates depend on seed, epoch and sample only, so a resume replaces in the same way
        for source in itertools.chain([index], self.candidates(epoch, index)):
            try:
                return read(source)
            except (MemoryError, DataFailed):
                raise
            except Exception as error:  # a decoder or user code can raise anything
                skipped.append(BadSample(source, _reason(error)))
                first = first or error
        assert first is not None
        raise self.refused(index, _reason(first)) from first

    def refused(self, index: int, reason: str) -> UserError:
        """The error if all replacements of a sample fail."""
        problem = f"is skip, and sample {index} cannot be read, nor can any of {DRAWS} others: {reason}"
        return UserError("data.on_error", problem)

    def sources(self, places: Tensor, epoch: int, unreadable: Tensor) -> Tensor:
        """The sample that is read for each of `places`, given those that are known to be unreadable.

        Both are int64 on the CPU, of shape (B,) and (U,). Raises `UserError` if all replacements of a sample fail.
        """
        sources = places.clone()

        def read(source: int) -> int:
            if bool((unreadable == source).any()):
                raise UserError(NOT_READ)
            return source

        for spot in torch.isin(places, unreadable).nonzero()[:, 0].tolist():
            sources[spot] = self.read(read, epoch, int(places[spot]), [])
        return sources


def one_line(error: Exception) -> str:
    """The message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):  # without its advice to skip the sample, which is done already
        return " ".join(error.problems[0].lines()[0].split())
    kind, text = type(error).__name__, one_line(error)
    return text if text == kind else f"{kind}: {text}"


def path_of(dataset: Any, sample: int) -> str | None:
    """The file of a sample, if the data set has a method `path` that tells it."""
    with contextlib.suppress(Exception):  # user code: it must not hide the error that is being handled
        return str(dataset.path(sample))
    return None


class BadSamples:
    """The samples that this process could not read: the first is a warning, and the end of a run has their number.

    Args:
        share: share of a split, rounded up to whole samples, beyond which the run is refused.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._found: dict[tuple[str, int], str] = {}  # the reason, by split and sample
        self._warn: Callable[[str], None] | None = None

    def __len__(self) -> int:
        return len(self._found)

    def reasons(self, split: str) -> dict[int, str]:
        """The unreadable samples of a split so far, each with its file, if it has one, and the reason."""
        return {sample: reason for (name, sample), reason in self._found.items() if name == split}

    def note(self, split: str, dataset: Any, samples: int, found: Sequence[BadSample]) -> None:
        """Count samples of a split, which has `samples`; the data set names their files, see `path_of`.

        Raises `UserError` once they are more than the share that is allowed.
        """
        for sample, reason in found:
            # A sample is counted once, however many epochs it fails in
            if (split, sample) not in self._found:
                path = path_of(dataset, sample)
                named = path is None or " ".join(path.split()) in reason
                self._found[split, sample] = reason if named else f"{path}: {reason}"
                if len(self._found) == 1:
                    self._report()
        # A few bad samples are normal; too many mean that something else is wrong
        reasons = self.reasons(split)
        if len(reasons) > math.ceil(self._share * samples):
            shown = "; ".join(f"{sample}: {reason}" for sample, reason in list(reasons.items())[:_NAMED])
            problem = f"{len(reasons):,} of the {samples:,} samples of '{split}' cannot be read"
            problem += f", more than {self._share:g} of them; among them {shown}"
            allowed = "repair the samples and start a new run, or set a larger share"
            raise UserError("data.max_skipped", problem, allowed)

    def open(self, warn: Callable[[str], None]) -> None:
        """Set the callback for warnings; a sample that was found before is reported now."""
        self._warn = warn
        self._report()

    def _report(self) -> None:
        if self._warn is not None and self._found:
            (split, sample), reason = next(iter(self._found.items()))
            self._warn(f"sample {sample} of {split} cannot be read and is replaced by another: {reason}")

    def join(self, ranks: World) -> None:
        """Add what other ranks have found, without reporting it; all have to call this."""
        for found in ranks.gather(self._found):
            self._found |= found

    def summary(self) -> str:
        """The counts per split, for the end of a run; empty if there were none."""
        counts = Counter(split for split, _ in self._found)
        share = ", ".join(f"{count:,} of {split}" for split, count in counts.items())
        return f"samples could not be read and were replaced by others: {share}" if counts else ""
