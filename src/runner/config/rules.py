"""Rules between keys: what cannot be combined, and what has no effect next to something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runner.config.durations import DURATION, seconds
from runner.config.errors import Problem
from runner.config.freezing import MOMENT, entries
from runner.config.schema.audit import Audit
from runner.config.schema.bench import Bench
from runner.config.schema.train import Train
from runner.config.verb_rules import verb_conflicts


def conflicts(config: Train) -> list[Problem]:
    """Combinations that cannot be run; each says what to set."""
    rules = (_of_length, _of_repeating, _of_speed, _of_weights, _of_averaging, _of_data, _of_evaluations, _of_names)
    return [*(problem for rule in rules for problem in rule(config)), *verb_conflicts(config)]


def _of_length(config: Train) -> Iterator[Problem]:
    """How long a run is."""
    if config.epochs is None and config.max_steps is None:
        message = "is null and so is max_steps, so the run would never end"
        yield Problem("epochs", message, "set epochs=30 or max_steps=10000")
    if config.lr == "auto" and type(config) is not Train:
        message = "is auto, which is for train: it searches, and trains with what it finds"
        yield Problem("lr", message, "a number, or null")
    if config.max_time is not None and not _is_duration(config.max_time):
        yield Problem("max_time", f"cannot be {config.max_time}", f"{DURATION}, or null")


def _of_repeating(config: Train) -> Iterator[Problem]:
    """What a run that repeats bit for bit cannot use."""
    if config.deterministic is not True:
        return
    if config.cudnn_benchmark:
        message = "picks algorithms by timing them, which deterministic=true rules out"
        yield Problem("cudnn_benchmark", message, "cudnn_benchmark=false, or deterministic=false")
    if config.tf32:
        message = "rounds matrix products, which deterministic=true rules out"
        yield Problem("tf32", message, "tf32=false, or deterministic=false")
    if config.matmul_precision not in (None, "highest"):
        message = f"is {config.matmul_precision}, which rounds matrix products, which deterministic=true rules out"
        yield Problem("matmul_precision", message, "matmul_precision=highest, or deterministic=false")
    if config.compile is not False and config.compiler.mode.startswith("max-autotune"):
        message = f"{config.compiler.mode} picks kernels by timing them, which deterministic=true rules out"
        yield Problem("compiler.mode", message, "compiler.mode=default, or deterministic=false")


def _of_speed(config: Train) -> Iterator[Problem]:
    """Settings of speed and memory that cannot be combined."""
    optimizer, mode = config.optimizer, config.compiler.mode
    if config.tf32 and config.matmul_precision == "highest":
        message = "is highest, but tf32=true asks for TensorFloat-32 in matrix products"
        yield Problem("matmul_precision", message, "matmul_precision=null, or tf32=false")
    if config.compile is not False and mode in ("reduce-overhead", "max-autotune"):
        replays = "replays CUDA graphs, which overwrite the gradients that"
        others = "compiler.mode=default or max-autotune-no-cudagraphs"
        if config.accumulate > 1:
            message = f"{mode} {replays} accumulate={config.accumulate} adds up"
            yield Problem("compiler.mode", message, f"{others}, or accumulate=1")
        if config.on_oom == "split":
            message = f"is split, but compiler.mode={mode} {replays} micro-batches add up"
            yield Problem("on_oom", message, f"on_oom=raise, or {others}")
    if isinstance(config, Audit | Bench) and config.data.batch_size == "auto":
        yield Problem("data.batch_size", "is auto, which may find another number for each side", "a number")
    if optimizer.get("fused") and optimizer.get("foreach"):
        message = "is true, and so is optimizer.foreach, but they are two different kernels"
        yield Problem("optimizer.fused", message, "one of them, or null for both")
    blocks = config.activation_checkpointing
    if isinstance(blocks, str | list) and not blocks:
        yield Problem("activation_checkpointing", "names no module", "false, true, a number, or names of modules")
    for key in ("shapes", "finite"):
        if getattr(config.watch, key) and config.compile is not False:
            message = "observes every module, but a compiled model does not run its modules one by one"
            yield Problem(f"watch.{key}", message, "compile=false")
            break


def _of_weights(config: Train) -> Iterator[Problem]:
    """What initial and frozen weights cannot be."""
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    drawn = [scheme for scheme in schemes if scheme not in ("zero_gamma", "prior_bias")]
    if len(drawn) > 1:
        yield Problem("init", f"draws the weights {len(drawn)} times: {', '.join(drawn)}", "one of them")
    if drawn and config.model.get("weights") is not None:
        message = f"has {', '.join(drawn)}, which would overwrite the weights that model.weights loads"
        yield Problem("init", message, "model.weights=null, or init without it")
    if config.init_mismatch != "head" and config.init_from is None:
        yield Problem("init_mismatch", "has no effect without init_from", "init_from=PATH, or init_mismatch=head")
    if config.unfreeze_at is not None and not config.freeze:
        message = "has no effect, as freeze names nothing"
        yield Problem("unfreeze_at", message, "freeze=[...], or unfreeze_at=null")
    for key, freeze, moment in (("unfreeze_at", "all", config.unfreeze_at), ("freeze", config.freeze, None)):
        try:
            entries(freeze, moment)
        except ValueError as error:
            allowed = f"null, or {'names with @ and ' * (key == 'freeze')}{MOMENT}"
            yield Problem(key, f"is not valid: {error}", allowed)


def _of_averaging(config: Train) -> Iterator[Problem]:
    """What averages of the weights cannot be, and what has no effect without them."""
    if config.ema is not None and config.swa is not None:
        yield Problem("swa", "is set, and so is ema, but one average is kept", "swa=null, or ema=null")
    if config.swa is not None and _never_evaluates(config):
        message = f"computes BatchNorm's statistics at evaluations, but {_NO_EVALUATIONS}"
        yield Problem("swa", message, "evaluate.every_epochs=1, or swa=null")
    kinds = [kind for kind in ("ema", "swa") if getattr(config, kind) is not None]
    for name in config.metrics or {}:
        for kind in kinds:
            if name.startswith(f"{kind}_"):
                yield Problem(f"metrics.{name}", f"has the name of a metric of the {kind} average", "another name")
    for key in ("lr_factor", "recalibrate_batches"):
        if getattr(config.averaging, key) is not None and config.swa is None:
            yield Problem(f"averaging.{key}", "has no effect without swa", f"averaging.{key}=null, or swa=0.75")


def _of_data(config: Train) -> Iterator[Problem]:
    """How the data are split, normalised and placed."""
    data, split = config.data, config.data.split
    if split.val + split.test >= 1:
        message = f"val={split.val} and test={split.test} leave nothing to train on"
        yield Problem("data.split", message, "shares that add up to less than 1")
    if split.folds is not None and split.fold >= split.folds:
        yield Problem(
            "data.split.fold", f"is {split.fold}, and there are {split.folds} folds", f"0 to {split.folds - 1}"
        )
    if split.folds is not None and _has_val_folder(config):
        message = f"is {split.folds}, but the folder of images has its own validation split"
        allowed = "data.split.folds=null, or another data.dataset.val_folder to ignore that split"
        yield Problem("data.split.folds", message, allowed)
    if split.folds is None and split.fold > 0:
        message = "picks one of several folds, but data.split.folds is null"
        yield Problem("data.split.fold", message, "data.split.folds=5, or another number of folds")
    mean, std = data.normalize.mean, data.normalize.std
    if (mean is None) != (std is None):
        allowed = "both, or null for both to measure them on the training split"
        yield Problem("data.normalize", "has only one of mean and std", allowed)
    if std is not None and any(value <= 0 for value in std):
        yield Problem("data.normalize.std", "has a value that is not positive", "positive numbers")
    if mean is not None and std is not None and len(mean) != len(std):
        yield Problem("data.normalize", "has mean and std of different lengths", "one number per channel in each")
    if data.placement in ("device", "ram"):
        workers = data.num_workers
        if data.cache is None and isinstance(workers, int) and workers > 0:
            message = f"is {workers}, but data.placement={data.placement} reads no sample through workers"
            yield Problem("data.num_workers", message, "data.num_workers=auto, or data.placement=disk")
        if config.transform.sample_train or config.transform.sample_eval:
            message = f"has sample transforms, which data.placement={data.placement} does not run"
            yield Problem("transform", message, "data.placement=disk or auto, or batch transforms")
    if config.transform.mix is not None and data.batch_size == 1:
        message = "blends samples of a batch, but data.batch_size=1 has a single one"
        yield Problem("transform.mix", message, "transform.mix=null, or a larger data.batch_size")


_NO_EVALUATIONS = "evaluate.every_epochs and evaluate.every_steps are null"


def _never_evaluates(config: Train) -> bool:
    return config.evaluate.every_epochs is None and config.evaluate.every_steps is None


def _of_evaluations(config: Train) -> Iterator[Problem]:
    """What waits for evaluations that are never made."""
    if not _never_evaluates(config):
        return
    for name, node in config.callbacks.items():
        if str(node.get("_target_", "")).endswith("EarlyStopping"):
            message = f"waits for evaluations, but {_NO_EVALUATIONS}"
            yield Problem(f"callbacks.{name}", message, "evaluate.every_epochs=1")
    if str(config.scheduler.get("_target_", "")).endswith("Plateau"):
        message = f"follows a metric, but {_NO_EVALUATIONS}"
        yield Problem("scheduler", message, "evaluate.every_epochs=1, or another schedule")


def _of_names(config: Train) -> Iterator[Problem]:
    """What cannot name the folder of a run."""
    parts = config.name.split("/")
    if any(part in ("", ".", "..") or part.startswith("~") for part in parts) or set("=,") & set(config.name):
        message = f"'{config.name}' cannot be a folder name"
        yield Problem("name", message, "letters, digits, - _ . and / between folders")


def _has_val_folder(config: Train) -> bool:
    """Whether the data are a folder of images with one for validation; known before the data are read."""
    dataset = config.data.dataset
    root, name = dataset.get("root") or config.data.root, dataset.get("val_folder", "val")
    is_folder = dataset.get("_target_") == "runner.data.sources.folders.image_folder" and isinstance(root, str)
    return is_folder and isinstance(name, str) and Path(root, name).expanduser().is_dir()


def _is_duration(text: str) -> bool:
    try:
        return seconds(text) > 0
    except ValueError:
        return False
