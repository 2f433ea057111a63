"""Find the transform that gives different pixels for the same sample: each is tried alone, several times."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.data.loaders import Loader, MemoryLoader
from runner.data.sample_rng import SampleRNG, preserved_rng, seed_generators
from runner.data.samples import SeededDataset, collate
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.mixing import Mixing
from runner.data.workers import WorkerLoader

_TRIES = 5
_WORKERS = 3
_NONE: Any = None
_Step = tuple[str, Any, Callable[[Any], Any]]  # key of the config, what it is, and what it does with the result before


class Nondeterminism(NamedTuple):
    """What gives different results for the same sample: key of the config, and type of the transform or data set.

    `by_worker` is whether the result depends on the worker process alone, and not on the number of calls.
    """

    key: str
    name: str
    by_worker: bool


def find_nondeterminism(loader: Loader, seed: int, epoch: int, indices: Sequence[int]) -> Nondeterminism | None:
    """Find what gives different images, or targets, for the same samples of a training split; None if all repeats.

    Every part gets the same input several times, with the generators seeded alike, as if in this process and as if in
    different workers. State that the data set or the transforms keep between calls is changed.
    """
    # Samples that are read one by one may differ already before batches are made
    if isinstance(loader, WorkerLoader):
        seeded = loader._loader.dataset
        assert isinstance(seeded, SeededDataset), "a worker loader reads with SeededDataset"
        for index in indices:
            steps = _of_sample(seeded, index)
            if found := _first_to_differ(steps, None, seed, epoch, number=index, workers=_WORKERS, pairs=seeded._pairs):
                return found
        if not seeded._pairs:
            return None
        read = collate(seeded.__getitems__([(epoch, index) for index in indices]))
        images, targets = read.data[0].to(loader._device), torch.from_numpy(read.data[1]).to(loader._device)
    else:
        assert isinstance(loader, MemoryLoader), "there are two kinds of loaders"
        chosen = torch.tensor(list(indices), device=loader._images.device)
        images, targets = (
            whole.index_select(0, chosen).to(loader._device) for whole in (loader._images, loader._targets)
        )
    # What acts on batches is called again with the same images and numbers
    places = torch.tensor(list(indices), device=images.device)
    prepare, mix = loader._prepare, loader._mix
    steps = []
    if isinstance(prepare, Pipeline):
        for stream, transform in enumerate(prepare.transforms):
            rng = functools.partial(SampleRNG, seed, epoch, places, stream)
            call = functools.partial(lambda transform, rng, images: transform(images.clone(), rng()), transform, rng)
            steps.append((f"transform.train.{stream}", transform, call))
    if isinstance(mix, Mixing):

        def mixed(_: Tensor) -> Any:
            prepared = images.clone() if not isinstance(prepare, Pipeline) else prepare(images.clone(), places, epoch)
            return mix(prepared, targets.clone(), places, epoch)

        steps.append(("transform.mix", mix.mix, mixed))
    return _first_to_differ(steps, images, seed, epoch, number=0, workers=0)


def _of_sample(seeded: SeededDataset, index: int) -> list[_Step]:
    """Reading a sample, and each transform of its image."""
    dataset, cut = seeded.dataset, seeded._cut
    if cut is None:
        steps: list[_Step] = [("data.dataset", dataset, lambda _: dataset[index])]
    else:
        part: Callable[..., Any] = dataset.read_part  # type: ignore[attr-defined]
        steps = [("transform.sample_train.0", cut, lambda _: part(index, cut.region, cut.size))]
    for place, transform in enumerate(seeded._transforms, start=cut is not None):
        call = functools.partial(lambda transform, image: transform(copy.deepcopy(image)), transform)
        steps.append((f"transform.sample_train.{place}", transform, call))
    return steps


def _first_to_differ(
    steps: Sequence[_Step], value: Any, seed: int, epoch: int, *, number: int, workers: int, pairs: bool = True
) -> Nondeterminism | None:
    """The first step that does not repeat; each gets what the one before gave, and of a sample its image."""
    for key, part, call in steps:

        def run(call: Callable[[Any], Any] = call, given: Any = value) -> Any:
            with preserved_rng():
                seed_generators(seed, epoch, number)
                return call(given)

        value, by_worker = _tried(run, workers)
        if by_worker is not None:
            return Nondeterminism(key, type(part).__name__, by_worker)
        value = value[0] if pairs and isinstance(value, tuple | list) else value
    return None


def _tried(call: Callable[[], Any], workers: int) -> tuple[Any, bool | None]:
    """The result of a call, and None if it is always the same, else whether it depends on the worker alone."""
    first = call()
    if not all(_same(first, call()) for _ in range(_TRIES)):
        return first, False
    for number in range(workers):
        try:
            with _as_worker(number, workers):
                other = call()
        except Exception:  # a simulated worker may lack what a transform needs
            continue
        if not _same(first, other):
            return first, True
    return first, None


@contextlib.contextmanager
def _as_worker(number: int, workers: int) -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info` answer as in worker `number`."""
    import torch.utils.data._utils.worker as torch_worker  # private: without it nothing is tried as a worker

    before = torch_worker._worker_info
    info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=number, dataset=_NONE)
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _same(a: Any, b: Any) -> bool:
    """Whether two images, targets, or containers of them are equal; what cannot be compared counts as equal."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, 0.0, 0.0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
    try:
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    except (TypeError, ValueError):
        return True
