"""Tests of optional parts name the extra that brings the packages, and skip where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest

PACKAGES = {
    "detection": ("faster_coco_eval",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "huggingface": ("datasets", "huggingface_hub"),
    "lora": ("peft",),
    "mlflow": ("mlflow", "sqlalchemy"),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "remote": ("fsspec", "s3fs", "aiohttp", "moto"),
    "tiff": ("tifffile",),
    "timm": ("timm",),
    "torchcodec": ("torchcodec",),
    "smp": ("segmentation_models_pytorch",),
    "transformers": ("transformers",),
    "wandb": ("wandb",),
}
"""The packages that the tests of an extra import."""


def needs(extra: str) -> pytest.MarkDecorator:
    """A marker for tests that skip where the packages of an extra are not installed."""
    assert extra in PACKAGES
    return pytest.mark.extra(name=extra)


def installed(extra: str) -> bool:
    """Tell whether all packages of an extra can be imported."""
    return all(_exists(package) for package in PACKAGES[extra])


def optional(package: str) -> ModuleType | Any:
    """The package, or None where it is not installed; for modules whose tests are all marked with `needs`."""
    return importlib.import_module(package) if _exists(package) else None


def _exists(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package
        return False
