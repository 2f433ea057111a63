"""Keys that the other verbs add to the config of `train`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from runner.config.schema.sections import Count, NonNegative
from runner.config.schema.train import Train

Weights = Literal["auto", "raw", "averaged"]
View = Literal["flip", "hflip", "vflip", "rotations", "shifts", "scales", "five_crop", "ten_crop"]
TtaMean = Literal["logits", "probabilities"]


class Audit(Train):
    """Keys of `audit`: how many steps are compared, under which settings, or which two checkpoints are."""

    steps: Count = 10
    vary: dict[str, Any] = field(default_factory=dict)
    a: str | None = None
    b: str | None = None


Toggle = Literal[
    "amp",
    "channels_last",
    "compile",
    "activation_checkpointing",
    "optimizer.fused",
    "optimizer.foreach",
    "cudnn_benchmark",
    "tf32",
    "matmul_precision",
    "threads",
    "data.placement",
    "data.num_workers",
    "performance",
]


class Bench(Train):
    """Keys of `bench`: what is compared with what, and how long that may take."""

    toggles: list[Toggle] | None = None
    vary: dict[str, Any] = field(default_factory=dict)
    steps: Count = 10
    repeats: Annotated[int, Ge(2)] = 5
    budget_s: Annotated[float, Gt(0)] = 300.0


class Check(Train):
    """Keys of `check`: which checks are made, on how much, and what counts as failed."""

    only: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    strict: bool = False
    samples: Annotated[int, Ge(16)] = 1024


class Eval(Train):
    """Keys of `eval`: the split to evaluate, with which weights, the views that are averaged, and where to write the result."""

    split: Literal["train", "val", "test"] = "test"
    weights: Weights = "auto"
    tta: View | list[View] | None = None
    tta_mean: TtaMean = "logits"
    output: str | None = None


Format = Literal["safetensors", "torch_export", "onnx", "torchscript"]


class Export(Train):
    """Keys of `export`: the formats, what goes into them, and how closely they have to agree with the model."""

    format: Format | list[Format] | None = None
    weights: Weights = "auto"
    include_preprocessing: bool = False
    batch_sizes: list[Count] = field(default_factory=lambda: [1, 8])
    tolerance: Annotated[float, Gt(0)] = 1e-5
    split: Literal["train", "val", "test"] | None = None
    quantize: Literal["int8"] | None = None
    hub: str | None = None
    push: bool = True
    output: str | None = None


class FindLr(Train):
    """Keys of `find-lr`: how many steps it takes, the first rate and the last one, and where to write."""

    num_steps: Annotated[int, Ge(10)] = 300
    start: Annotated[float, Gt(0)] = 1e-5
    end: Annotated[float, Gt(0)] = 10.0
    output: str | None = None


class Pack(Train):
    """Keys of `pack`: where it writes, how many samples a shard has, and the size of images."""

    output: str | None = None
    shard_samples: Count = 1000
    max_side: Count | None = None
    quality: Annotated[int, Ge(1), Le(95)] = 95
    workers: Count | None = None


Part = Literal["layers", "activations", "gradients", "inputs", "features", "errors"]

FEATURE_FILES = (".npz", ".safetensors")
"""Endings of a file of features."""


class Inspect(Train):
    """Keys of `inspect`: which parts of a model are looked at, and which features are written."""

    what: list[Part] | None = None
    tensors: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    split: Literal["train", "val", "test"] = "val"
    weights: Weights = "auto"
    samples: Annotated[int, Ge(1), Le(100)] = 16
    output: str | None = None


class Predict(Train):
    """Keys of `predict`: the images, what is said of each, and where it is written."""

    input: str | list[str] | None = None
    samples: Count | None = None
    weights: Weights = "auto"
    output: str | None = None
    format: Literal["table", "coco", "yolo", "masks"] = "table"
    threshold: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: Count = 1
    probabilities: bool = False
    logits: bool = False
    pictures: bool = False
    features: str | list[str] | None = None
    tta: View | list[View] | None = None
    tta_mean: TtaMean = "logits"
    strict: bool = False


class Profile(Train):
    """Keys of `profile`: how many steps are measured, how long that may take, and where to write."""

    warmup_steps: NonNegative = 5
    steps: Count = 20
    trace_steps: NonNegative = 3
    budget_s: Annotated[float, Gt(0)] = 45.0
    output: str | None = None


VERBS: dict[str, type[Train]] = {
    "train": Train,
    "audit": Audit,
    "bench": Bench,
    "check": Check,
    "eval": Eval,
    "export": Export,
    "find-lr": FindLr,
    "inspect": Inspect,
    "pack": Pack,
    "predict": Predict,
    "profile": Profile,
}
"""The schema of each verb that takes a config."""
