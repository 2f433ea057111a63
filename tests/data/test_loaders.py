"""Memory, any workers and any ranks give the same batches, wherever an epoch is entered and in whatever order."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from extended import some
from PIL import Image
from small_loaders import ARRAYS, BATCHES, CPU, PART, Listed, joined, noisy, read, same, small_loader
from torch import Tensor

from runner.base.errors import UserError
from runner.data.loaders import Batch, BatchPlan, Fields, MemoryLoader
from runner.data.sampler import BalancedOrder, BlockOrder, ClassBalance, EpochOrder, GivenOrder
from runner.data.samples import SeededDataset, as_tensor
from runner.data.workers import WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def drawn(generator: torch.Generator) -> Tensor:
    """A function of `data.batch_sampler`, without its data set."""
    return torch.randint(45, (45,), generator=generator)


ORDERS: dict[str, Callable[[int], EpochOrder] | None] = {
    "shuffled": None,
    "balanced": functools.partial(BalancedOrder, ClassBalance(ARRAYS.targets[PART]), 3),
    "blocks": functools.partial(BlockOrder, torch.tensor([3, 3, 9, 15, 15, 30, 33, 45]), 2, 3),
    "given": functools.partial(GivenOrder, drawn, 45, 3),
}


@pytest.mark.parametrize("draws", ORDERS.values(), ids=ORDERS)
def test_a_batch_holds_the_samples_that_its_indices_name(draws: Any) -> None:
    batches = read(small_loader(draws=draws))
    assert [len(batch.images) for batch in batches] == [8, 8, 8, 8, 8, 5]
    for batch in batches:
        assert torch.equal(batch.images, ARRAYS.images[batch.indices])
        assert torch.equal(batch.targets, ARRAYS.targets[batch.indices])
    samples = joined(batches).indices
    assert torch.isin(samples, PART).all()
    assert (len(samples.unique()) < 45) == (draws in (ORDERS["balanced"], ORDERS["given"])), "which draw some again"


@pytest.mark.parametrize("draws", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"workers": 1, "prefetch": 1}, {"workers": 3, "prefetch": 8, "persistent_workers": True}],
    ids=str,
)
def test_memory_and_workers_give_the_same_batches_in_every_epoch(options: dict[str, Any], draws: Any) -> None:
    loader = small_loader(draws=draws, **options)
    for epoch, start in ((0, 0), (1, 2), (5, 0)):
        found = list(loader.batches(epoch, start, BATCHES))
        assert same(found, read(small_loader(draws=draws), epoch, start))
    loader.close()
    assert same(read(small_loader(0, shuffle=False)), read(small_loader(shuffle=False)))


@pytest.mark.parametrize("draws", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("workers", [None, 0])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_have_the_batches_of_one_process(workers: int | None, draws: Any, ranks: int) -> None:
    whole = read(small_loader(workers, draws=draws), 1, 1)
    parts = [read(small_loader(workers, draws=draws, rank=rank, ranks=ranks), 1, 1) for rank in range(ranks)]
    assert all(same([joined(list(of_ranks))], [batch]) for batch, *of_ranks in zip(whole, *parts, strict=True))


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2, "persistent_workers": True}, {}], ids=str)
def test_any_slice_of_an_epoch_equals_that_part_of_the_whole(options: dict[str, Any]) -> None:
    loader = small_loader(transforms=(noisy,), **options)
    whole = list(loader.batches(2, 0, BATCHES))
    for start, stop in itertools.combinations(range(BATCHES + 1), 2):
        assert same(list(loader.batches(2, start, stop)), whole[start:stop])
    assert same(list(loader.batches(2, 1, BATCHES, 2)), whole[1::2])
    loader.close()


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"workers": 1, "prefetch": 1},
            {"workers": 1, "persistent_workers": True, "prefetch": 8},
            {"workers": 3, "prefetch": 8},
            {"workers": 3, "persistent_workers": True, "prefetch": 1},
        ],
        1,
        2,
    ),
    ids=str,
)
@pytest.mark.parametrize("draws", [ORDERS["shuffled"], ORDERS["balanced"]], ids=["shuffled", "balanced"])
def test_random_sample_transforms_draw_the_same_for_any_worker_count(options: dict[str, Any], draws: Any) -> None:
    loader = small_loader(transforms=(noisy,), draws=draws, **options)
    for epoch in (0, 1):
        expected = read(small_loader(0, transforms=(noisy,), draws=draws), epoch)
        torch.rand(5), random.random(), np.random.rand(2)  # what was drawn before does not matter
        assert same(list(loader.batches(epoch, 0, BATCHES)), expected)
    loader.close()
    assert not same(expected, read(small_loader(0, transforms=(noisy,), draws=draws), 0)), "other numbers in an epoch"


def test_a_sample_that_is_drawn_again_is_augmented_in_another_way() -> None:
    batch = joined(read(small_loader(0, transforms=(noisy,), draws=ORDERS["balanced"])))
    again = [place for place, index in enumerate(batch.indices.tolist()) if index in batch.indices[:place].tolist()]
    first = batch.indices.tolist().index(int(batch.indices[again[0]]))
    assert not torch.equal(batch.images[first], batch.images[again[0]])


@pytest.mark.parametrize("persistent", [True, False])
def test_an_epoch_that_was_left_early_neither_leaks_into_the_next_nor_ends_its_workers(persistent: bool) -> None:
    loader = small_loader(2, prefetch=4, persistent_workers=persistent)
    abandoned = loader.batches(0, 0, BATCHES)
    next(abandoned)
    following = loader.batches(1, 0, BATCHES)
    first = next(following)
    del abandoned
    assert same([first, *following], read(small_loader(), 1))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_main_process_draws_on_as_if_nothing_was_read(workers: int) -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]

    loader, before = small_loader(workers, transforms=(noisy,)), state()
    for _ in loader.batches(0, 0, BATCHES):
        assert state() == before
    loader.close()
    assert state() == before


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
    (batch,) = read(small_loader(0, Listed([(image, 1), (image, 0)]), torch.arange(2), shuffle=False), stop=1)
    assert (batch.images.shape, batch.images.dtype) == ((2, *shape), dtype)
    assert float(batch.images[1, 0, 0, 0]) == value
    assert (batch.targets.tolist(), batch.targets.dtype) == ([1, 0], torch.int64)


GREY = torch.zeros(1, 4, 4)


@pytest.mark.parametrize("target", [0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_numbers_to_predict_are_float32(target: Any) -> None:
    (_, made) = SeededDataset(Listed([(GREY, target)]), 0)[0, 0]
    assert (made.dtype, made.item()) == (torch.float32, 0.5)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(GREY, 0), (torch.zeros(1, 4, 5), 0)], r"different shapes.*\n.*data\.image_size"),
        ([(GREY, 0), (GREY.to(torch.uint8), 0)], "different kinds: torch.float32, torch.uint8"),
        ([("path.png", 0)] * 2, "gave str where an image was expected"),
        ([(GREY[None], 0)] * 2, r"shape \(1, 1, 4, 4\)"),
        ([(GREY, "cat")] * 2, "'cat', which is not a number"),
        ([UserError("data.root: the file 7.png is broken")] * 2, r"^data.root: the file 7.*\n.*data.on_error=skip"),
    ],
    ids=["shapes", "kinds", "path", "dimensions", "target", "own"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_one_sentence_on_either_side_of_a_process(items: list[Any], words: str, workers: int) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(small_loader(workers, Listed(items), torch.arange(2), shuffle=False), stop=1)
    assert "Traceback" not in str(caught.value)
    assert "Caught" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2, "the problem, and what is allowed"


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
    batches = read(small_loader(prepare=first), 3, 3)
    assert same(batches, read(small_loader(0, prepare=second), 3, 3))
    for batch in batches:
        assert torch.equal(batch.images, ARRAYS.images[batch.indices].float() + 3 + batch.indices.view(-1, 1, 1, 1))
    # A transform that may look at its whole batch is given batches; any other all there is at once.
    assert [len(places) for _, places in first.calls] == ([21] if per_sample else [8, 8, 5])
    assert {epoch for epoch, _ in first.calls} == {3}


def test_slices_of_a_chunk_lie_where_tensors_of_their_own_would() -> None:
    odd, targets = torch.zeros(40, 1, 3, 3, dtype=torch.uint8), torch.zeros(40, dtype=torch.int64)

    class Cut(Noting):
        """Changes the size: what fitted no longer does."""

        def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
            return images[..., :1].float().contiguous()

    for size, prepare in itertools.product((7, 16), (Noting(True), Cut(True))):
        plan = BatchPlan(torch.arange(40), size, 0, True, Fields(["0"], prepare))
        for batch in MemoryLoader(odd, targets, plan, CPU).batches(0, 0, 2):
            assert batch.images.data_ptr() % 64 == 0


@pytest.fixture
def busy() -> Iterator[tuple[WorkerLoader, Iterator[Batch], list[Batch], list[int]]]:
    loader = small_loader(2, prefetch=1, persistent_workers=True)
    batches = loader.batches(0, 0, BATCHES)
    first = next(batches)
    yield loader, batches, [first], [worker.pid for worker in loader._loader._iterator._workers]
    loader.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_workers_go_on_reading_when_the_whole_group_is_signalled(name: str, busy: Any) -> None:
    loader, batches, seen, workers = busy
    for pid in workers:
        os.kill(pid, getattr(signal, name))
    seen += [*batches, *loader.batches(1, 0, BATCHES)]
    assert same(seen, [*read(small_loader(), 0), *read(small_loader(), 1)])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_that_comes_while_a_worker_starts_does_not_end_it(name: str) -> None:
    loader = small_loader(1)
    start: Any = loader._loader.worker_init_fn

    def signalled(worker: int) -> None:
        os.kill(os.getpid(), getattr(signal, name))
        start(worker)

    loader._loader.worker_init_fn = signalled
    assert same(read(loader), read(small_loader()))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_closing_ends_the_workers(busy: Any) -> None:
    loader, _, _, workers = busy
    loader.close()
    loader.close()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def counted(image: Tensor) -> Tensor:
    """The number of threads that torch computes on where an image is read."""
    return torch.full_like(image, torch.get_num_threads())


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_computed_on_one_thread_wherever_they_are_read(workers: int, threads: Any) -> None:
    threads(2)
    (batch,) = read(small_loader(workers, indices=torch.arange(4), transforms=(counted,)), stop=1)
    assert batch.images.eq(1).all()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_writes_a_batch_straight_into_shared_memory(workers: int) -> None:
    (batch,) = read(small_loader(workers, indices=torch.arange(8)), stop=1)
    assert batch.images.is_shared() == bool(workers)
    assert batch.images.is_contiguous()


def test_an_array_that_must_not_be_written_to_is_copied() -> None:
    array = np.zeros((4, 5, 3), np.uint8)
    array.setflags(write=False)
    as_tensor(array).add_(1)
    view = np.zeros((3, 4, 5), np.uint8).transpose(1, 2, 0)
    as_tensor(view).add_(1)
    assert not view.any()
