"""Find the transform that gives different pixels for the same sample: each is tried alone, several times."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
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
    if isinstance(loader, WorkerLoader):
        seeded = loader._loader.dataset
        assert isinstance(seeded, SeededDataset), "a worker loader reads with SeededDataset"
        found = _of_samples(seeded, seed, epoch, indices)
        if found is not None:
            return found
        read = collate(seeded.__getitems__([(epoch, index) for index in indices]))
        images, targets = read.images.to(loader._device), torch.from_numpy(read.targets).to(loader._device)
    elif isinstance(loader, MemoryLoader):
        chosen = torch.tensor(list(indices), device=loader._images.device)
        images, targets = (
            whole.index_select(0, chosen).to(loader._device) for whole in (loader._images, loader._targets)
        )
    else:
        return None
    return _of_batch(loader._prepare, loader._mix, images, targets, seed, epoch, indices)


def _of_samples(seeded: SeededDataset, seed: int, epoch: int, indices: Sequence[int]) -> Nondeterminism | None:
    """The data set or a sample transform that does not repeat."""
    dataset, cut = seeded._dataset, seeded._cut
    for index in indices:

        def run_seeded(call: Callable[[], Any], index: int = index) -> Any:
            with preserved_rng():
                seed_generators(seed, epoch, index)
                return call()

        def read(index: int = index) -> Any:
            if cut is not None:
                return dataset.read_part(index, cut.region, cut.size)  # type: ignore[attr-defined]
            return dataset[index]

        item, verdict = _tried(lambda: run_seeded(read))
        if verdict is not None:
            name = dataset if cut is None else cut
            return Nondeterminism(
                "data.dataset" if cut is None else "transform.sample_train.0", type(name).__name__, verdict
            )
        image = item[0]
        for place, transform in enumerate(seeded._transforms, start=cut is not None):
            image, verdict = _tried(lambda: run_seeded(lambda: transform(copy.deepcopy(image))))  # noqa: B023
            if verdict is not None:
                return Nondeterminism(f"transform.sample_train.{place}", type(transform).__name__, verdict)
    return None


def _of_batch(
    prepare: Any, mix: Any, images: Tensor, targets: Tensor, seed: int, epoch: int, indices: Sequence[int]
) -> Nondeterminism | None:
    """The batch transform, or the way to mix, that does not repeat."""
    places = torch.tensor(list(indices), device=images.device)
    before = images
    with preserved_rng():
        if isinstance(prepare, Pipeline):
            for stream, transform in enumerate(prepare.transforms):

                def again(transform: Any = transform, stream: int = stream) -> Any:
                    seed_generators(seed, epoch, stream)
                    return transform(images.clone(), SampleRNG(seed, epoch, places, stream))  # noqa: B023

                images, verdict = _tried(again, workers=0)
                if verdict is not None:
                    return Nondeterminism(f"transform.train.{stream}", type(transform).__name__, verdict)
        if isinstance(mix, Mixing):
            prepared = prepare(before, places, epoch) if prepare is not None else before

            def mixed() -> Any:
                seed_generators(seed, epoch, 0)
                return mix(prepared.clone(), targets.clone(), places, epoch)

            _, verdict = _tried(mixed, workers=0)
            if verdict is not None:
                return Nondeterminism("transform.mix", type(mix.mix).__name__, verdict)
    return None


def _tried(call: Callable[[], Any], workers: int = _WORKERS) -> tuple[Any, bool | None]:
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
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, 0.0, 0.0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
    try:
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    except (TypeError, ValueError):
        return True
