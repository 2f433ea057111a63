"""Sample order: a pure function of seed and epoch, any slice of which can be computed alone.

Batch k of an epoch is a slice of its order, so resuming starts at a slice. The order depends on the number of samples, the seed and
the epoch alone, where shards are shuffled also on the samples of each and on the window: not on workers, on the batch size, or on
where an epoch is entered.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError, with_place
from runner.data.sample_rng import hash_ints, preserved_rng, splitmix64

LISTED = 2**16
"""Up to so many samples an order is a list."""
SAMPLE_BITS = 32
_BALANCED, _GIVEN, _BLOCKS = 3, 4, 5  # separate these random numbers from those of other orders
_AT_ONCE = 2**14  # positions that are computed together: for few, calls cost more than numbers
_TURNS = 8


@dataclass(frozen=True)
class AllSamples:
    """All samples of a data set in order, without a list: reads like `torch.arange(samples)`."""

    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, place: int | slice | Tensor) -> Any:
        """The index at a place; those of a slice, or at an int64 tensor of places from 0 on, as a tensor."""
        if isinstance(place, Tensor):
            return place
        found = range(self.samples)[place]
        return torch.arange(found.start, found.stop, found.step) if isinstance(found, range) else found


Indices: TypeAlias = Tensor | AllSamples
"""Samples of a split: int64 of shape (N,), or all there are."""


def sample_of(place: Any) -> Any:
    """The sample of a place, an integer or int64 of any shape: without the number of its draw, which some orders add."""
    return place & (2**SAMPLE_BITS - 1)


class EpochOrder:
    """The order of the samples in an epoch: a permutation of 0 to `samples` - 1, given in slices.

    Up to `LISTED` samples it is `torch.randperm`, once per epoch: every permutation is about equally likely, and the list
    takes at most half a megabyte. Beyond, a list would cost memory and time in proportion to the data set, in every epoch and
    at every resume; the permutation is computed instead: a slice of k positions costs O(k), wherever it lies. Without
    `shuffle` it is 0, 1, 2, ... in every epoch.
    """

    def __init__(self, samples: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.samples, self.seed, self.epoch, self.shuffle = samples, seed, epoch, shuffle

    def slice(self, start: int, stop: int) -> Tensor:
        """The samples at positions `start` to `stop` - 1, int64 on the CPU; positions beyond the last are skipped.

        The global generator is untouched.
        """
        stop = min(stop, self.samples)
        start = min(start, stop)
        if not self.shuffle:
            return torch.arange(start, stop)
        if self.samples <= LISTED:
            return self._listed[start:stop]
        return torch.from_numpy(self._permuted(np.arange(start, stop, dtype=np.uint64)).view(np.int64))

    def pieces(self, size: int, start: int, stop: int) -> Iterator[Tensor]:
        """The same in pieces of `size` samples, the last one shorter, computed many at a time."""
        stop = min(stop, self.samples)
        at_once = max(1, _AT_ONCE // size) * size
        for first in range(start, stop, at_once):
            yield from self.slice(first, min(stop, first + at_once)).split(size)  # type: ignore[no-untyped-call]

    @functools.cached_property
    def _listed(self) -> Tensor:
        generator = torch.Generator().manual_seed(hash_ints(self.seed, self.epoch, 0))
        return torch.randperm(self.samples, generator=generator)

    def _permuted(self, positions: np.ndarray) -> np.ndarray:
        """The permuted positions: numbers beyond the last sample are permuted again, which keeps it one to one."""
        numbers = self._shuffled(positions)
        beyond = np.flatnonzero(numbers >= self.samples)
        while len(beyond):
            numbers[beyond] = self._shuffled(numbers[beyond])
            beyond = beyond[numbers[beyond] >= self.samples]
        return numbers

    def _shuffled(self, numbers: np.ndarray) -> np.ndarray:
        """A keyed permutation, uint64 (N,), of the cells of the smallest nearly square rectangle with room for all samples.

        A Feistel network over rows and columns (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): in turns,
        each row number is shifted by a hash of the column number, and vice versa. A shift can be undone, so whatever the hash,
        no two cells collide.

        Up to four rounds are visibly not random: of the pairs of samples in one column, twice as many as by chance keep their
        distance in rows. From five rounds on, tens of thousands of such pairs show nothing. Eight leave a margin, as in the
        NIST standard for small domains (SP 800-38G, FF3).
        """
        # A permutation that is computed for single positions needs no memory, however many samples there are
        rows = math.isqrt(self.samples - 1) + 1
        columns = -(-self.samples // rows)
        (moved, size), (others, other_size) = zip(np.divmod(numbers, np.uint64(columns)), (rows, columns), strict=True)
        # Each turn shifts one coordinate by a hash of the other, which can be undone and so is a permutation
        for turn in range(_TURNS):
            key = hash_ints(self.seed, self.epoch, 0, 0, turn)
            step = splitmix64(others + np.uint64(key)) >> np.uint64(32)
            moved = moved + (step * np.uint64(size) >> np.uint64(32))
            np.subtract(moved, np.uint64(size), out=moved, where=moved >= size)
            moved, size, others, other_size = others, other_size, moved, size
        shuffled: np.ndarray = moved * np.uint64(columns) + others
        return shuffled


class BlockOrder(EpochOrder):
    """Blocks of samples that are stored together, such as shards, in random order; samples are shuffled within windows of them.

    A window is the next `window` blocks in the order of the epoch; the last window may have fewer. Within a window the order is
    an `EpochOrder` with a seed of its own. Only the blocks are listed, so a slice of k positions costs O(k), wherever it lies,
    once the order of the blocks is known.

    Args:
        ends: of each block among the samples of the split, int64 (S,), see `block_ends`.
        window: number of blocks.
    """

    def __init__(self, ends: Tensor, window: int, seed: int, epoch: int) -> None:
        super().__init__(int(ends[-1]), seed, epoch)
        ends = ends[ends > 0].unique_consecutive()  # type: ignore[no-untyped-call]  # a block may have no sample in the split
        generator = torch.Generator().manual_seed(hash_ints(seed, epoch, 0, _BLOCKS))
        blocks = torch.randperm(len(ends), generator=generator)
        self._ends = ends.diff(prepend=ends.new_zeros(1))[blocks].cumsum(0)
        self._moved = ends[blocks] - self._ends
        self._windows = torch.cat([ends.new_zeros(1), self._ends[window - 1 : -1 : window], self._ends[-1:]])
        self._window = functools.lru_cache(maxsize=1)(  # as batches follow each other in a window
            lambda number, size: EpochOrder(size, hash_ints(seed, epoch, 0, _BLOCKS, number), epoch)
        )

    def slice(self, start: int, stop: int) -> Tensor:
        """See `EpochOrder.slice`."""
        stop = min(stop, self.samples)
        first, places = int(torch.searchsorted(self._windows, start, right=True)) - 1, [torch.arange(0)]
        for number in range(first, int(torch.searchsorted(self._windows, stop))):
            offset, end = self._windows[number : number + 2].tolist()
            places.append(self._window(number, end - offset).slice(max(start - offset, 0), stop - offset) + offset)
        joined = torch.cat(places)
        return torch.add(joined, self._moved[torch.searchsorted(self._ends, joined, right=True)])


def block_ends(dataset: Dataset[Any], indices: Indices) -> Tensor:
    """Where the blocks of a data set end among the samples of a split, int64 (S,): samples of the split up to there.

    Args:
        dataset: has an attribute `block_ends`, S whole numbers in ascending order: its samples up to the end of each block.
        indices: of the split, ascending.

    Raises:
        UserError: if there is no such attribute, or its numbers are not those of the data set.
    """
    given, samples = getattr(dataset, "block_ends", None), len(dataset)  # type: ignore[arg-type]
    if given is None:
        problem = "is blocks, and the data set has no shards: it has no attribute block_ends"
        raise UserError("data.shuffle", problem, "true, false, or a data set in shards, such as data=shards")
    found = np.asarray(given)
    whole = found.dtype.kind in "iu" and found.ndim == 1 and found[-1:].tolist() == [samples]
    if not whole or (np.diff(found.astype(np.int64), prepend=0) < 0).any():
        allowed = f"whole numbers in ascending order, the last of them the number of samples, {samples:,}"
        raise UserError("data.dataset", "its attribute block_ends does not say where its shards end", allowed)
    ends = torch.from_numpy(found.astype(np.int64))
    return ends if isinstance(indices, AllSamples) else torch.searchsorted(indices, ends)


class ClassBalance:
    """The samples of a split by class.

    Args:
        classes: of each sample, int64 (N,) from 0 on.
    """

    def __init__(self, classes: Tensor) -> None:
        sizes = torch.bincount(classes)
        self.samples, self.sizes = len(classes), sizes[sizes > 0].numpy().astype(np.uint64)
        self._starts = np.cumsum(self.sizes) - self.sizes
        self._members = torch.sort(classes, stable=True).indices.numpy()

    def drawn(self, bits: np.ndarray, key: int) -> np.ndarray:
        """The samples of draws with these random bits, uint64 (N,): every class is equally likely, and so are its samples."""
        group = _below(bits, np.uint64(len(self.sizes)))
        place = _below(splitmix64(bits + np.uint64(key)), self.sizes[group]) + self._starts[group]
        found: np.ndarray = self._members[place]
        return found


class RepeatFactors:
    """Images that show several classes: the rarest class in an image decides how often it is drawn.

    An image is drawn in proportion to 1 / sqrt(f), where f is the share of images with its rarest class; f is 1 for an image
    without objects. These are the repeat factors of Gupta et al., "LVIS" (CVPR 2019), with the threshold 1.

    Args:
        classes: numbers of the classes that each image shows; none for an image without objects.
    """

    def __init__(self, classes: Sequence[Collection[int]]) -> None:
        self.samples = len(classes)
        shown = collections.Counter(itertools.chain.from_iterable(map(set, classes)))
        factors = {number: math.sqrt(self.samples / count) for number, count in shown.items()}
        self.factors = np.array([max((factors[each] for each in some), default=1.0) for some in classes])
        self._ends = np.cumsum(self.factors)

    def drawn(self, bits: np.ndarray, key: int) -> np.ndarray:
        """The images of draws with these random bits, uint64 (N,)."""
        at = (bits >> np.uint64(11)) * 2.0**-53 * self._ends[-1]
        found: np.ndarray = np.searchsorted(self._ends, at, side="right")
        return found.clip(max=self.samples - 1)


class BalancedOrder(EpochOrder):
    """As many draws with replacement as there are samples; `balance` gives the probability of each sample.

    A draw is a function of the seed, the epoch and its position, so a slice costs as much as it is long. Its place has the
    number of the draw in the high bits, see `sample_of`: random numbers follow the place, so that a sample that is drawn
    again is augmented in another way.
    """

    def __init__(self, balance: ClassBalance | RepeatFactors, seed: int, epoch: int) -> None:
        super().__init__(balance.samples, seed, epoch)
        self.balance = balance

    def slice(self, start: int, stop: int) -> Tensor:
        """See `EpochOrder.slice`; places instead of samples."""
        draws = np.arange(start, max(start, min(stop, self.samples)), dtype=np.uint64)
        key = hash_ints(self.seed, self.epoch, 0, _BALANCED)
        found = self.balance.drawn(splitmix64(draws + np.uint64(key)), key)
        drawn = found.astype(np.uint64) | draws << np.uint64(SAMPLE_BITS)
        return torch.from_numpy(drawn.view(np.int64))


class GivenOrder(EpochOrder):
    """The order that the function of `data.batch_sampler` gives for an epoch; places have numbers of draws, as above.

    Args:
        batch_sampler: (generator) -> samples, int64 (N,) or a list, from 0 to below `samples`.
        samples: of the split.

    Raises:
        UserError: if the function gives something else.
    """

    def __init__(self, batch_sampler: Callable[[torch.Generator], Any], samples: int, seed: int, epoch: int) -> None:
        allowed = f"a list or an int64 tensor (N,) of numbers from 0 to {samples - 1:,}"
        try:
            with preserved_rng():
                drawn = torch.as_tensor(batch_sampler(torch.Generator().manual_seed(hash_ints(seed, epoch, 0, _GIVEN))))
        except Exception as error:
            problem = f"cannot give the samples of an epoch: {with_place(error)}"
            raise UserError("data.batch_sampler", problem, allowed) from error
        numbers = drawn.dtype in (torch.int64, torch.int32) and drawn.ndim == 1 and len(drawn) > 0
        if not numbers or drawn.min() < 0 or drawn.max() >= samples:
            raise UserError("data.batch_sampler", f"does not give samples of 'train' in epoch {epoch + 1}", allowed)
        super().__init__(len(drawn), seed, epoch)
        self._places = drawn.cpu().long() | torch.arange(len(drawn)) << SAMPLE_BITS

    def slice(self, start: int, stop: int) -> Tensor:
        """See `EpochOrder.slice`; places instead of samples."""
        return self._places[start:stop]


def _below(bits: np.ndarray, sizes: Any) -> np.ndarray:
    """Numbers from 0 to below `sizes`, uint64, from the high half of random bits."""
    scaled: np.ndarray = (bits >> np.uint64(32)) * sizes >> np.uint64(32)
    return scaled
