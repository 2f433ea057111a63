"""`GrowingSize`: images grow during training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.growing import GrowingSize

GROWING = "{_target_: runner.data.transforms.growing.GrowingSize, smallest: 16, begin: 1, end: 3}"
WORDS = ("data=synthetic", "data.dataset.image_size=32", "model=small_cnn", f"transform.train=[{GROWING}]", "epochs=4")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_size_is_that_of_the_epoch(dtype: torch.dtype) -> None:
    images = torch.full((2, 3, 192, 192), 7).to(dtype)
    transform = GrowingSize(smallest=128, begin=1, end=5)
    seen = [transform(images, SampleRNG(0, epoch, torch.arange(2))) for epoch in range(7)]
    assert [each.shape[-1] for each in seen] == [128, 128, 128, 160, 192, 192, 192]
    assert all(each.shape[-2] == each.shape[-1] and each.dtype == dtype for each in seen)
    assert all(torch.allclose(each.float(), torch.tensor(7.0)) for each in seen)


def test_images_that_are_too_small_are_refused(rejected: Any) -> None:
    result = rejected("train", *WORDS, "transform.train.0.smallest=64")
    assert "smallest=64 pixels, got 32x32" in result.err
