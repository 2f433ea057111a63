"""Arguments of transforms and data sets that are out of range are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runner.data.sample_rng import beta
from runner.data.sources.digits import digits
from runner.data.sources.image_io import Decoding
from runner.data.sources.synthetic import synthetic
from runner.data.transforms import crops, resized_crop
from runner.data.transforms.augment import RandomBrightnessContrast, RandomErasing, RandomFlip, RandomShift
from runner.data.transforms.auto_augment import RandAugment, TrivialAugment
from runner.data.transforms.color_jitter import ColorJitter
from runner.data.transforms.growing import GrowingSize
from runner.data.transforms.mixing import CutMix, Mixup, OneOf

ALPHAS = (0.0, -1.0, 1e-4, 1e7, math.nan)
DIFFERENT = "two or more different digits from 0 to 9"


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        (RandomShift, {"share": 0.6}, "share must be from 0 to 0.5"),
        (RandomShift, {"padding": "wrap"}, "padding must be zeros, edge or reflect, got 'wrap'"),
        (RandomFlip, {"p": 1.1}, "p must be from 0 to 1"),
        (RandomErasing, {"share": 0}, "share above 0"),
        (RandomBrightnessContrast, {"brightness": -0.1}, "brightness"),
        (ColorJitter, {"brightness": -0.1}, "at least 0"),
        (ColorJitter, {"saturation": -1}, "at least 0"),
        (ColorJitter, {"hue": 0.6}, "hue must be from 0 to 0.5"),
        (RandAugment, {"p": 1.5}, "p must be from 0 to 1"),
        (RandAugment, {"num_ops": 0}, "num_ops must be at least 1"),
        (RandAugment, {"magnitude": 31}, "magnitude from 0 to 30, got 2 and 31"),
        (TrivialAugment, {"num_magnitude_bins": 1}, "num_magnitude_bins must be at least 2, got 1"),
        (Mixup, {"alpha": 0}, "alpha must be from"),
        (CutMix, {"alpha": -1}, "alpha must be from"),
        (Mixup, {"p": 0}, "p must be above 0 and at most 1, got 0"),
        (CutMix, {"p": 1.5}, "p must be above 0 and at most 1, got 1.5"),
        (OneOf, {"choices": []}, "at least one way to mix"),
        (OneOf, {"choices": [3]}, "at least one way to mix"),
        (GrowingSize, {"smallest": 16, "begin": 3, "end": 3}, "end above begin"),
        (crops.RandomResizedCrop, {"size": 0}, "^size must be"),
        (crops.RandomResizedCrop, {"size": 8, "scale": [0.0, 1.0]}, "^scale must be two shares"),
        (crops.RandomResizedCrop, {"size": 8, "scale": [0.5, 0.2]}, "^scale must be two shares"),
        (crops.RandomResizedCrop, {"size": 8, "scale": [0.5, 1.5]}, "^scale must be two shares"),
        (resized_crop.RandomResizedCrop, {"ratio": [1.0]}, "^ratio must be two numbers above 0"),
        (resized_crop.RandomResizedCrop, {"ratio": [2.0, 1.0]}, "^ratio must be two numbers above 0"),
        (resized_crop.RandomResizedCrop, {"ratio": [0.0, 1.0]}, "^ratio must be two numbers above 0"),
        (Decoding, {"image_size": 0}, "image_size"),
        (Decoding, {"channels": 17}, "channels"),
        (Decoding, {"crop_share": 0.0}, "crop_share"),
        (Decoding, {"crop_share": 1.1}, "crop_share"),
        (synthetic, {"samples": 0}, "samples"),
        (synthetic, {"image_size": 0}, "image_size"),
        (synthetic, {"channels": 0}, "channels"),
        (synthetic, {"classes": 0}, "classes"),
        (synthetic, {"noise": -0.1}, "noise"),
        (synthetic, {"noise": math.nan}, "noise"),
        (synthetic, {"kind": "ranking"}, "kind"),
        (synthetic, {"samples": 10**12}, "samples"),
        (synthetic, {"image_size": 4000}, "image_size"),
        *((beta, {"alpha": alpha}, "alpha must be from 0.001 to 1000000") for alpha in ALPHAS),
        *((digits, {"classes": classes}, DIFFERENT) for classes in ([], [3], [1, 1], [3, 10], [-1, 2])),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_arguments_out_of_range_are_named(target: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        target(**arguments)
