"""Both data paths give the same batches, whatever workers read them and wherever an epoch is entered."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from extended import some
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.data.loaders import Batch, BatchPlan, Fields, MemoryLoader
from runner.data.samples import SeededDataset, as_target, as_tensor
from runner.data.sources.synthetic import synthetic
from runner.data.workers import WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

CPU = torch.device("cpu")
ARRAYS = synthetic(samples=37, image_size=6)["train"]
PART = torch.arange(37)[torch.arange(37) % 4 != 0]  # 27 samples: three batches of 8 and one of 3
BATCHES = 4


def noisy(image: Any) -> Tensor:
    """A sample transform that draws from every library."""
    pixels = as_tensor(image).float() / 255
    pixels = pixels + random.random() + float(np.random.rand())
    return pixels + torch.rand(pixels.shape)


class Listed(Dataset[Any]):
    """A data set made of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


def through_workers(
    dataset: Dataset[Any] = ARRAYS,
    indices: Tensor = PART,
    transforms: tuple[Callable[[Any], Any], ...] = (),
    seed: int = 5,
    shuffle: bool = True,
    **options: Any,
) -> WorkerLoader:
    return WorkerLoader(SeededDataset(dataset, seed, transforms), BatchPlan(indices, 8, seed, shuffle), CPU, **options)


def in_memory(seed: int = 5, shuffle: bool = True) -> MemoryLoader:
    return MemoryLoader(ARRAYS.images, ARRAYS.targets, BatchPlan(PART, 8, seed, shuffle), CPU)


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for a, b in zip(first, second, strict=True)
        for name in ("images", "targets", "indices")
    )


def test_a_batch_holds_the_samples_that_its_indices_name() -> None:
    batches = list(in_memory().batches(0, 0, BATCHES))
    assert [len(batch.images) for batch in batches] == [8, 8, 8, 3]
    for batch in batches:
        assert torch.equal(batch.images, ARRAYS.images[batch.indices])
        assert torch.equal(batch.targets, ARRAYS.targets[batch.indices])
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == PART.tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 1, "prefetch": 1, "persistent": False},
        {"workers": 3, "prefetch": 8, "persistent": True},
    ],
    ids=str,
)
def test_memory_and_workers_give_the_same_batches_in_every_epoch(options: dict[str, Any], shuffle: bool) -> None:
    loader, reference = through_workers(shuffle=shuffle, **options), in_memory(shuffle=shuffle)
    try:
        for epoch in (0, 1, 5):
            assert same(list(loader.batches(epoch, 0, BATCHES)), list(reference.batches(epoch, 0, BATCHES)))
    finally:
        loader.close()


@pytest.mark.parametrize("options", [{}, {"workers": 2, "persistent": True}], ids=str)
def test_any_slice_of_an_epoch_equals_that_part_of_the_whole(options: dict[str, Any]) -> None:
    loader = through_workers(transforms=(noisy,), **options)
    try:
        whole = list(loader.batches(2, 0, BATCHES))
        for start, stop in itertools.combinations(range(BATCHES + 1), 2):
            assert same(list(loader.batches(2, start, stop)), whole[start:stop])
    finally:
        loader.close()
    memory = in_memory()
    for start, stop in itertools.combinations(range(BATCHES + 1), 2):
        assert same(list(memory.batches(2, start, stop)), list(memory.batches(2, 0, BATCHES))[start:stop])


def test_an_epoch_that_was_left_early_does_not_leak_into_the_next() -> None:
    loader = through_workers(workers=2, prefetch=4, persistent=True)
    try:
        abandoned = loader.batches(0, 0, BATCHES)
        next(abandoned)
        assert same(list(loader.batches(1, 0, BATCHES)), list(in_memory().batches(1, 0, BATCHES)))
    finally:
        loader.close()


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"workers": 1, "persistent": False, "prefetch": 1},
            {"workers": 1, "persistent": True, "prefetch": 8},
            {"workers": 3, "persistent": False, "prefetch": 8},
            {"workers": 3, "persistent": True, "prefetch": 1},
        ],
        1,
        2,
    ),
    ids=str,
)
def test_random_sample_transforms_draw_the_same_for_any_worker_count(options: dict[str, Any]) -> None:
    alone, loader = through_workers(transforms=(noisy,)), through_workers(transforms=(noisy,), **options)
    try:
        for epoch in (0, 1):
            expected = list(alone.batches(epoch, 0, BATCHES))
            assert same(list(loader.batches(epoch, 0, BATCHES)), expected)
    finally:
        loader.close()
    assert not same(expected, list(alone.batches(0, 0, BATCHES))), "another epoch has other random numbers"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_main_process_draws_on_as_if_nothing_was_read(workers: int) -> None:
    loader = through_workers(transforms=(noisy,), workers=workers)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    try:
        for _ in loader.batches(0, 0, BATCHES):
            assert random.getstate() == before[0]
            assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index,union-attr]
            assert torch.equal(torch.get_rng_state(), before[2])
    finally:
        loader.close()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_reading_does_not_depend_on_what_was_drawn_before() -> None:
    first = list(through_workers(transforms=(noisy,)).batches(0, 0, BATCHES))
    torch.rand(5), random.random(), np.random.rand(2)
    assert same(list(through_workers(transforms=(noisy,)).batches(0, 0, BATCHES)), first)


@pytest.mark.parametrize(
    ("image", "shape", "dtype", "value"),
    [
        (Image.new("RGB", (5, 4), (10, 20, 30)), (3, 4, 5), torch.uint8, 10),
        (Image.new("L", (5, 4), 77), (1, 4, 5), torch.uint8, 77),
        (np.full((4, 5, 3), 9, np.uint8), (3, 4, 5), torch.uint8, 9),
        (np.full((4, 5), 0.25, np.float32), (1, 4, 5), torch.float32, 0.25),
        (torch.full((2, 4, 5), 0.5), (2, 4, 5), torch.float32, 0.5),
        (torch.full((4, 5), 3, dtype=torch.uint8), (1, 4, 5), torch.uint8, 3),
        (np.full((4, 5), 300, np.int64), (1, 4, 5), torch.float32, 300),
    ],
    ids=["RGB", "L", "array", "grey array", "tensor", "grey tensor", "int64"],
)
def test_images_of_all_kinds_become_channels_first_tensors(
    image: Any, shape: tuple[int, ...], dtype: torch.dtype, value: float
) -> None:
    loader = through_workers(Listed([(image, 1), (image, 0)]), torch.arange(2), shuffle=False)
    (batch,) = loader.batches(0, 0, 1)
    assert batch.images.shape == (2, *shape)
    assert batch.images.dtype == dtype
    assert float(batch.images[1, 0, 0, 0]) == value
    assert batch.targets.tolist() == [1, 0]
    assert batch.targets.dtype == torch.int64


@pytest.mark.parametrize("target", [0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_numbers_to_predict_are_float32(target: Any) -> None:
    assert as_target(target).dtype == torch.float32
    assert float(as_target(target)) == 0.5


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 4, 5), 0)], r"different shapes.*\n.*data\.image_size"),
        (
            [(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 4, 4, dtype=torch.uint8), 0)],
            "different kinds: torch.float32, torch.uint8",
        ),
        ([("path.png", 0)] * 2, "gave str where an image was expected"),
        ([(torch.zeros(1, 1, 4, 4), 0)] * 2, r"shape \(1, 1, 4, 4\)"),
        ([(torch.zeros(1, 4, 4), "cat")] * 2, "'cat', which is not a number"),
        (
            [UserError("data.root: the file 7.png is broken")] * 2,
            r"^data.root: the file 7.png is broken\n.*data.on_error=skip",
        ),
    ],
    ids=["shapes", "kinds", "path", "dimensions", "target", "own"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_one_sentence_on_either_side_of_a_process(items: list[Any], words: str, workers: int) -> None:
    loader = through_workers(Listed(items), torch.arange(2), shuffle=False, workers=workers)
    try:
        with pytest.raises(UserError, match=words) as caught:
            list(loader.batches(0, 0, 1))
    finally:
        loader.close()
    assert "Traceback" not in str(caught.value)
    assert "Caught" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2, "the problem, and what is allowed"


@pytest.fixture
def busy() -> Iterator[tuple[WorkerLoader, Iterator[Batch], list[Batch], list[int]]]:
    loader = through_workers(workers=2, prefetch=1, persistent=True)
    batches = loader.batches(0, 0, BATCHES)
    first = next(batches)
    yield loader, batches, [first], [worker.pid for worker in loader._loader._iterator._workers]  # type: ignore[union-attr]
    loader.close()


class Noting:
    """A way to prepare images that records its arguments."""

    def __init__(self, per_sample: bool) -> None:
        self.per_sample = per_sample
        self.calls: list[tuple[int, list[int]]] = []

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        self.calls.append((epoch, indices.tolist()))
        return images.float() + epoch + indices.view(-1, 1, 1, 1)


@pytest.mark.parametrize("per_sample", [True, False])
def test_preparing_gets_the_epoch_and_the_samples_and_is_the_same_on_both_paths(per_sample: bool) -> None:
    first, second = Noting(per_sample), Noting(per_sample)
    memory = MemoryLoader(ARRAYS.images, ARRAYS.targets, BatchPlan(PART, 8, 5, True), CPU, prepare=Fields(["0"], first))
    given = list(memory.batches(3, 1, BATCHES))
    assert same(given, list(through_workers(prepare=Fields(["0"], second)).batches(3, 1, BATCHES)))
    for batch in given:
        assert torch.equal(batch.images, ARRAYS.images[batch.indices].float() + 3 + batch.indices.view(-1, 1, 1, 1))
    # A transform that may look at its whole batch is given batches; any other all there is at once.
    assert [len(places) for _, places in first.calls] == ([19] if per_sample else [8, 8, 3])
    assert {epoch for epoch, _ in first.calls} == {3}


def test_slices_of_a_chunk_lie_where_tensors_of_their_own_would() -> None:
    odd = torch.zeros(40, 1, 3, 3, dtype=torch.uint8)
    targets = torch.zeros(40, dtype=torch.int64)

    class Cut(Noting):
        """Changes the size: what fitted no longer does."""

        def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
            return images[..., :1].float().contiguous()

    for size, prepare in itertools.product((7, 16), (Noting(True), Cut(True))):
        loader = MemoryLoader(
            odd, targets, BatchPlan(torch.arange(40), size, 0, True), CPU, prepare=Fields(["0"], prepare)
        )
        for batch in loader.batches(0, 0, 2):
            assert batch.images.data_ptr() % 64 == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_workers_go_on_reading_when_the_whole_group_is_signalled(
    name: str, busy: tuple[WorkerLoader, Iterator[Batch], list[Batch], list[int]]
) -> None:
    loader, batches, seen, workers = busy
    for pid in workers:
        os.kill(pid, getattr(signal, name))
    seen += list(batches)
    seen += list(loader.batches(1, 0, BATCHES))
    memory = in_memory()
    assert same(seen, [*memory.batches(0, 0, BATCHES), *memory.batches(1, 0, BATCHES)])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_that_comes_while_a_worker_starts_does_not_end_it(name: str) -> None:
    loader = through_workers(workers=1)
    start: Any = loader._loader.worker_init_fn

    def signalled(worker: int) -> None:
        os.kill(os.getpid(), getattr(signal, name))
        start(worker)

    loader._loader.worker_init_fn = signalled
    try:
        assert same(list(loader.batches(0, 0, BATCHES)), list(in_memory().batches(0, 0, BATCHES)))
    finally:
        loader.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_closing_ends_the_workers(busy: tuple[WorkerLoader, Iterator[Batch], list[Batch], list[int]]) -> None:
    loader, _, _, workers = busy
    loader.close()
    loader.close()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Counting(Dataset[Any]):
    """Gives the number of threads that torch computes on where it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 2, 2), torch.get_num_threads(), dtype=torch.uint8), index


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_computed_on_one_thread_wherever_they_are_read(workers: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = through_workers(Counting(), torch.arange(4), workers=workers, persistent=False)
        (batch,) = loader.batches(0, 0, 1)
        assert batch.images.eq(1).all()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_worker_writes_a_batch_straight_into_shared_memory() -> None:
    for workers, shared in ((1, True), (0, False)):
        (batch,) = through_workers(indices=torch.arange(8), workers=workers, persistent=False).batches(0, 0, 1)
        assert batch.images.is_shared() == shared
        assert batch.images.is_contiguous()


def test_an_array_that_must_not_be_written_to_is_copied() -> None:
    array = np.zeros((4, 5, 3), np.uint8)
    array.setflags(write=False)
    as_tensor(array).add_(1)
    view = np.zeros((3, 4, 5), np.uint8).transpose(1, 2, 0)
    as_tensor(view).add_(1)
    assert not view.any()


LEFT_RUNNING = """
import torch
from runner.data.loaders import BatchPlan
from runner.data.samples import SeededDataset
from runner.data.sources.synthetic import synthetic
from runner.data.workers import WorkerLoader

arrays = synthetic(samples=40, image_size=6)["train"]
kept = []
for persistent in (True, False):
    loader = WorkerLoader(
        SeededDataset(arrays, 0), BatchPlan(torch.arange(40), 8, 0, True), torch.device("cpu"),
        workers=1, prefetch=1, persistent=persistent,
    )
    batches = loader.batches(0, 0, 5)
    next(batches)
    kept += [loader, batches]
raise SystemExit(3)
"""


def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_wait_for_its_workers() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_RUNNING], timeout=60, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_an_epoch_that_is_left_late_does_not_end_the_workers_of_the_next() -> None:
    loader = through_workers(workers=1, prefetch=1, persistent=False)
    abandoned = loader.batches(0, 0, BATCHES)
    next(abandoned)
    following = loader.batches(1, 0, BATCHES)
    first = next(following)
    del abandoned
    try:
        assert same([first, *following], list(in_memory().batches(1, 0, BATCHES)))
    finally:
        loader.close()
