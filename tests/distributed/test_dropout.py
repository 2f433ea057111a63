"""Rows of masks on a rank are those that one process draws for the whole batch, in every memory layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.distributed.dropout import SharedMasks
from runner.models.vit import ViT

ROWS = 23
SHARES = (slice(0, 23), slice(0, 12), slice(12, 23), slice(5, 6))
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda values: F.dropout(values, 0.4),
    "torch.dropout": lambda values: torch.dropout(values, 0.4, True),
    "bernoulli_": lambda values: torch.empty_like(values).bernoulli_(0.6),
    "dropout2d": lambda values: F.dropout2d(values, 0.4),
}


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Values of a shape in every order of the dimensions behind the first one."""
    for order in itertools.permutations(range(1, len(shape))):
        permuted = torch.randn([ROWS, *(shape[dim] for dim in order)], dtype=dtype)
        yield permuted.permute(0, *(1 + order.index(dim) for dim in range(1, len(shape))))


def compare(draw: Callable[[Tensor], Tensor], values: Tensor, tolerance: float = 0.0) -> None:
    torch.manual_seed(1)
    whole, state = draw(values), torch.get_rng_state()
    for own in SHARES:
        masks = SharedMasks()
        masks.samples, masks.own = ROWS, own
        torch.manual_seed(1)
        with masks:
            rows = draw(values[own])
        torch.testing.assert_close(rows, whole[own], rtol=0, atol=tolerance)
        assert torch.equal(torch.get_rng_state(), state), "the next draw is the same too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_masks_do_not_depend_on_how_a_batch_is_divided(way: str, dtype: torch.dtype) -> None:
    shapes = [(ROWS, 3, 4, 2), (ROWS, 1, 4, 4), (ROWS, 5, 1, 1)]
    for shape in shapes if way == "dropout2d" else [(ROWS, 6), (ROWS, 3, 5), *shapes]:
        for values in layouts(shape, dtype):
            compare(WAYS[way], values)


def test_a_transformer_with_all_kinds_of_dropout() -> None:
    model = ViT(1, (8, 8), 10, patch_size=4, dim=24, depth=2, heads=2, dropout=0.1, drop_path=0.3).double().train()
    compare(model, torch.randn(ROWS, 1, 8, 8, dtype=torch.float64), tolerance=1e-12)
