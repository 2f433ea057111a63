"""The config of `train`, which those of the other verbs extend."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Strict

from runner.config.schema.sections import (
    Checkpoint,
    Compiler,
    Count,
    Data,
    Dist,
    Evaluate,
    Init,
    Node,
    NonNegative,
    Section,
    Share,
    Transform,
)

Warning_ = Literal["TERM", "USR1", "USR2"]


class Clip(Section):
    """Gradient clipping: by value first, then each unit by its weights, then all together by norm."""

    norm: Annotated[float, Gt(0)] | None = None
    value: Annotated[float, Gt(0)] | None = None
    agc: Annotated[float, Gt(0)] | None = None


class Adapters(Section):
    """Low-rank adapters, which are trained instead of the weights of the model; none without a rank."""

    rank: Count | None = None
    alpha: Annotated[float, Gt(0)] = 8.0
    dropout: Share = 0.0
    modules: list[str] = field(default_factory=lambda: ["*qkv"])
    trained: list[str] | None = None


class Averaging(Section):
    """Settings of the averages of `ema` and `swa`."""

    warmup: bool = True
    lr_factor: Annotated[float, Ge(0)] | None = None
    anneal_epochs: Count = 1
    recalibrate_batches: Count | None = None


class Limit(Section):
    """Batches to use of each epoch and of each evaluation; null means all."""

    train_batches: Count | None = None
    eval_batches: Count | None = None


class Log(Section):
    """Reading numbers from the device, showing and logging them, and drawing curves."""

    every_steps: Count | Literal["auto"] = "auto"
    progress: bool | Literal["auto"] = "auto"
    utilization: bool | Literal["auto"] = "auto"
    device: bool | Literal["auto"] = "auto"
    curves: bool = True
    pictures: bool | Literal["auto"] = "auto"


class Watch(Section):
    """Checks of every module during training."""

    shapes: bool = False
    finite: bool = False


class Fsdp(Section):
    """Settings with which `strategy=fsdp` divides weights, gradients and optimizer state among the processes."""

    reshard_after_forward: bool = True
    blocks: list[str] | None = None
    replicas: Count = 1


class Sweep(Section):
    """Settings of a sweep as a whole, which its jobs do not depend on."""

    dir: str | None = None
    new: bool = False
    retry: Literal["failed", "never", "all"] = "failed"
    ablate: Literal["all"] | list[str] | None = None


class Search(Section):
    """Settings of `sweep=optuna`; any other key, such as `search.optimizer.lr`, is one of `space`."""

    sampler: Literal["tpe", "random", "cmaes"] | None = None
    trials: Count = 30
    pruner: Literal["none", "median", "halving", "hyperband"] = "median"
    warmup: NonNegative = 0
    reduction: Annotated[int, Ge(2)] = 3
    seeds: list[NonNegative] = field(default_factory=list)
    jobs: Count | None = None
    storage: str | None = None
    space: dict[str, Any] = field(default_factory=dict)


class Slurm(Section):
    """The behaviour of a run in a job of SLURM."""

    signal: Warning_ | list[Warning_] | None = field(default_factory=lambda: ["TERM", "USR1", "USR2"])
    requeue: bool = True


class Train(Section):
    """The config of `train`; the top-level keys are those that people type every day."""

    name: str = "data"
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    seed: NonNegative = 0
    epochs: Count | None = 30
    max_steps: Count | None = None
    budget: str | None = None
    max_time: str | None = None
    ckpt_path: str | None = None
    lr: Annotated[float, Gt(0)] | None = None
    resume: Literal["auto"] | None = None
    init: Init | list[Init] | None = None
    init_from: str | dict[str, str] | None = None
    init_mismatch: Literal["head", "skip", "raise"] = "head"
    freeze: str | list[str] | None = None
    unfreeze_at: Annotated[int, Ge(1)] | str | None = None
    output_root: str = "outputs"
    device: str = "auto"
    devices: Literal["auto"] | Count | list[NonNegative] = 1
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    dry_run: bool = False
    max_restarts: NonNegative = 0
    threads: Annotated[int, Ge(1), Le(1024)] | None = None  # far more end the process in libgomp
    dtype: Literal["float32", "float64"] = "float32"
    amp: bool | Literal["auto", "bf16", "fp16"] = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    compile: bool | Literal["model", "blocks", "step"] = False
    # Strict, as the numbers 1 and 2 are neither true nor names
    activation_checkpointing: Annotated[bool, Strict()] | Annotated[str, Strict()] | list[str] = False
    cudnn_benchmark: bool = False
    tf32: bool = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    deterministic: bool | Literal["warn"] = False
    accumulate: Count = 1
    detect_anomaly: bool = False
    post_mortem: bool = False
    json: bool = False
    on_nonfinite: Literal["raise", "skip"] = "raise"
    ema: Annotated[float, Gt(0), Lt(1)] | None = None
    swa: Annotated[float, Gt(0)] | None = None
    trust: list[str] = field(default_factory=list)
    metrics: dict[str, Node] | None = None
    grad_clip: Clip = field(default_factory=Clip)
    averaging: Averaging = field(default_factory=Averaging)
    compiler: Compiler = field(default_factory=Compiler)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    limit: Limit = field(default_factory=Limit)
    watch: Watch = field(default_factory=Watch)
    dist: Dist = field(default_factory=Dist)
    fsdp: Fsdp = field(default_factory=Fsdp)
    sweep: Sweep = field(default_factory=Sweep)
    search: Search = field(default_factory=Search)
    slurm: Slurm = field(default_factory=Slurm)
    data: Data
    model: Node
    transform: Transform = field(default_factory=Transform)
    optimizer: Node
    scheduler: Node
    loss: Node
    task: Node
    adapters: Adapters = field(default_factory=Adapters)
    logger: dict[str, Node] = field(default_factory=dict)
    callbacks: dict[str, Node] = field(default_factory=dict)
