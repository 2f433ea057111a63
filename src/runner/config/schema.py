"""The typed surface of a run: one dataclass a section, each field with its type, range and default.

The YAML files in `conf/` repeat the defaults with a comment for each key; a test holds the two together. Ranges are
`annotated_types` constraints, choices are `Literal`s, and a mapping with `_target_` (a component) is a `Node`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, Strict

Count = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class HasTarget:
    """Marks a mapping that must name what it builds under `_target_`."""


Node = Annotated[dict[str, Any], HasTarget()]


@dataclass
class Normalize:
    """Statistics that pixels in [0, 1] are normalised with; null means measured on the training split."""

    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass
class Split:
    """How validation and test samples are set apart where the data set does not come with them."""

    val: Share = 0.1
    test: Share = 0.2
    seed: NonNegative = 0
    stratified: bool = True


@dataclass
class Data:
    """Where samples come from and how they reach the device."""

    dataset: Node
    name: str = "data"
    root: str = "data"
    download: bool = False
    batch_size: Count = 64
    image_size: Annotated[int, Ge(1)] | None = None
    shift: Annotated[float, Ge(0), Le(0.5)] = 0.125
    hflip: Annotated[float, Ge(0), Le(1)] = 0.0
    shuffle: bool = True
    drop_last: bool = False
    residency: Literal["auto", "device", "ram", "disk"] = "auto"
    cache: Literal["disk"] | None = None
    cache_dir: str | None = None
    num_workers: Literal["auto"] | NonNegative = "auto"
    prefetch: Count = 2
    persistent_workers: bool = True
    pin_memory: bool | Literal["auto"] = "auto"
    non_blocking: bool = True
    normalize: Normalize = field(default_factory=Normalize)
    split: Split = field(default_factory=Split)


@dataclass
class Transform:
    """Sample transforms run where a sample is read, batch transforms on the device, in the order listed; then mixing."""

    sample_train: list[Node] = field(default_factory=list)
    sample_eval: list[Node] = field(default_factory=list)
    train: list[Node] = field(default_factory=list)
    eval: list[Node] = field(default_factory=list)
    mix: Node | None = None


@dataclass
class Clip:
    """Gradient clipping, by value first and then by norm."""

    norm: Annotated[float, Gt(0)] | None = None
    value: Annotated[float, Gt(0)] | None = None


@dataclass
class Compiler:
    """How `compile` compiles: arguments of torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False
    dynamic: bool | None = False


@dataclass
class Evaluate:
    """When the validation split is evaluated, and how."""

    every_epochs: Count | None = 1
    every_steps: Count | None = None
    batch_size: Count = 512
    test: bool = True


@dataclass
class Checkpoint:
    """When checkpoints are written, which are kept, and what `best` means."""

    every_epochs: Count | None = 1
    every_steps: Count | None = None
    min_seconds: Annotated[float, Ge(0)] = 10.0
    async_: Annotated[bool, Field(alias="async")] = False  # `async` is a keyword of Python's
    keep: Count = 2
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None


@dataclass
class Log:
    """How often the device is asked for numbers, whether a live progress bar is shown, and utilisation logged."""

    every_steps: Count = 50
    progress: bool | Literal["auto"] = "auto"
    utilization: bool | Literal["auto"] = "auto"


@dataclass
class Limit:
    """Batches to use of each epoch and of each evaluation; null means all."""

    train_batches: Count | None = None
    eval_batches: Count | None = None


@dataclass
class Train:
    """Everything that `train` needs to know; the top-level keys are those that people type every day."""

    data: Data
    model: Node
    loss: Node
    task: Node
    optimizer: Node
    scheduler: Node
    name: str = "data"
    seed: NonNegative = 0
    epochs: Count | None = 30
    max_steps: Count | None = None
    max_time: str | None = None
    ckpt_path: str | None = None
    resume: Literal["auto"] | None = None
    output_root: str = "outputs"
    device: str = "auto"
    threads: Count | None = None
    amp: bool | Literal["bf16", "fp16"] = False
    channels_last: bool = False
    compile: bool | Literal["model", "step"] = False
    activation_checkpointing: (  # strict, as 1 is not true here, nor 1.0 or the text 1 the same as 1
        Annotated[bool, Strict()]
        | Annotated[int, Strict(), Ge(1)]
        | Annotated[float, Strict(), Gt(0), Lt(1)]
        | Annotated[str, Strict()]
        | list[str]
    ) = False
    cudnn_benchmark: bool = False
    tf32: bool = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    deterministic: bool | Literal["warn"] = False
    accumulate: Count = 1
    detect_anomaly: bool = False
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise"
    trust: list[str] = field(default_factory=list)
    metrics: dict[str, Node] | None = None
    clip: Clip = field(default_factory=Clip)
    compiler: Compiler = field(default_factory=Compiler)
    transform: Transform = field(default_factory=Transform)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    limit: Limit = field(default_factory=Limit)
    callbacks: dict[str, Node] = field(default_factory=dict)
    logger: dict[str, Node] = field(default_factory=dict)


@dataclass
class Eval(Train):
    """What `eval` adds: the split to evaluate and where to write the result."""

    split: Literal["train", "val", "test"] = "test"
    output: str | None = None
    json: bool = False


EVAL_ONLY = ("split", "output", "json")


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
    "data.residency",
    "data.num_workers",
    "data.prefetch",
    "performance",
]


@dataclass
class Bench(Train):
    """What `bench` adds: what is compared with what, and how long that may take."""

    part: Literal["train", "data"] = "train"
    toggles: list[Toggle] | None = None
    vary: dict[str, Any] = field(default_factory=dict)
    combine: bool = True
    steps: Count | None = None
    repeats: Annotated[int, Ge(2)] = 7
    compare_steps: Annotated[int, Ge(2)] = 20
    budget_s: Annotated[float, Gt(0)] = 60.0
    tolerance: Annotated[float, Ge(0)] | None = None
    json: bool = False


@dataclass
class Profile(Train):
    """What `profile` adds: how many steps are measured, how long that may take, and where to write."""

    warmup_steps: NonNegative = 5
    steps: Count = 20
    trace_steps: NonNegative = 3
    budget_s: Annotated[float, Gt(0)] = 45.0
    output: str | None = None
    json: bool = False


PROFILE_ONLY = ("warmup_steps", "steps", "trace_steps", "budget_s", "output", "json")


@dataclass
class Audit(Train):
    """What `audit` adds: how many steps are compared, under which settings, or which two checkpoints are."""

    steps: Count = 10
    vary: dict[str, Any] = field(default_factory=dict)
    a: str | None = None
    b: str | None = None
    json: bool = False


# The verbs that take a config, each with the schema of its own.
VERBS: dict[str, type[Train]] = {"train": Train, "eval": Eval, "profile": Profile, "bench": Bench, "audit": Audit}
