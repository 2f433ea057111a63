"""Rules between keys: what cannot be combined, and what has no effect beside something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runner.config.durations import DURATION, seconds
from runner.config.errors import Problem
from runner.config.freezing import MOMENT, entries
from runner.config.schema.audit import Audit
from runner.config.schema.bench import Bench
from runner.config.schema.train import Train
from runner.config.verb_rules import of_verb


def conflicts(config: Train) -> list[Problem]:
    """Combinations that cannot be run; each says what to set."""
    found: list[Problem] = []

    def forbid(wrong: bool, key: str, message: str, allowed: str) -> None:
        if wrong:
            found.append(Problem(key, message, allowed))

    forbid(
        config.epochs is None and config.max_steps is None,
        "epochs",
        "is null and so is max_steps, so the run would never end",
        "set epochs=30 or max_steps=10000",
    )
    forbid(
        config.lr == "auto" and type(config) is not Train,
        "lr",
        "is auto, which is for train: it searches, and trains with what it finds",
        "a number, or null",
    )
    forbid(
        config.max_time is not None and not _is_duration(config.max_time),
        "max_time",
        f"cannot be {config.max_time}",
        f"{DURATION}, or null",
    )
    deterministic = config.deterministic is True
    forbid(
        deterministic and config.cudnn_benchmark,
        "cudnn_benchmark",
        "picks algorithms by timing them, which deterministic=true rules out",
        "cudnn_benchmark=false, or deterministic=false",
    )
    forbid(
        deterministic and config.tf32,
        "tf32",
        "rounds matrix products, which deterministic=true rules out",
        "tf32=false, or deterministic=false",
    )
    _of_speed(config, forbid)
    _of_weights(config, forbid)
    _of_averaging(config, forbid)
    split = config.data.split
    forbid(
        split.val + split.test >= 1,
        "data.split",
        f"val={split.val} and test={split.test} leave nothing to train on",
        "shares that add up to less than 1",
    )
    forbid(
        split.folds is not None and split.fold >= split.folds,
        "data.split.fold",
        f"is {split.fold}, and there are {split.folds} folds",
        f"0 to {(split.folds or 1) - 1}",
    )
    forbid(
        split.folds is not None and _has_val_folder(config),
        "data.split.folds",
        f"is {split.folds}, but the folder of images has a validation split of its own",
        "data.split.folds=null, or another data.dataset.val_folder to leave that split out",
    )
    forbid(
        split.folds is None and split.fold > 0,
        "data.split.fold",
        "picks one of several folds, but data.split.folds is null",
        "data.split.folds=5, or another number of folds",
    )
    watched = [key for key in ("shapes", "finite") if getattr(config.watch, key)]
    forbid(
        bool(watched) and config.compile is not False,
        f"watch.{watched[0]}" if watched else "watch",
        "looks at every module, which a compiled model does not run one by one",
        "compile=false",
    )
    mean, std = config.data.normalize.mean, config.data.normalize.std
    forbid(
        (mean is None) != (std is None),
        "data.normalize",
        "has only one of mean and std",
        "both, or null for both to measure them on the training split",
    )
    forbid(
        std is not None and any(value <= 0 for value in std),
        "data.normalize.std",
        "has a value that is not positive",
        "positive numbers",
    )
    forbid(
        mean is not None and std is not None and len(mean) != len(std),
        "data.normalize",
        "has mean and std of different lengths",
        "one number a channel in each",
    )
    in_memory = config.data.placement in ("device", "ram")
    workers = config.data.num_workers
    forbid(
        in_memory and config.data.cache is None and isinstance(workers, int) and workers > 0,
        "data.num_workers",
        f"is {workers}, but data.placement={config.data.placement} reads no sample through workers",
        "data.num_workers=auto, or data.placement=disk",
    )
    forbid(
        in_memory and bool(config.transform.sample_train or config.transform.sample_eval),
        "transform",
        f"has sample transforms, which data.placement={config.data.placement} does not run",
        "data.placement=disk or auto, or batch transforms",
    )
    forbid(
        config.transform.mix is not None and config.data.batch_size == 1,
        "transform.mix",
        "blends samples of a batch, but data.batch_size=1 leaves each alone",
        "transform.mix=null, or a larger data.batch_size",
    )
    never_evaluated = config.evaluate.every_epochs is None and config.evaluate.every_steps is None
    for name, node in config.callbacks.items():
        forbid(
            never_evaluated and str(node.get("_target_", "")).endswith("EarlyStopping"),
            f"callbacks.{name}",
            "waits for evaluations, but evaluate.every_epochs and evaluate.every_steps are null",
            "evaluate.every_epochs=1",
        )
    forbid(
        never_evaluated and str(config.scheduler.get("_target_", "")).endswith("Plateau"),
        "scheduler",
        "follows a metric, but evaluate.every_epochs and evaluate.every_steps are null",
        "evaluate.every_epochs=1, or another schedule",
    )
    forbid(
        any(part in ("", ".", "..") or part.startswith("~") for part in config.name.split("/"))
        or "=" in config.name
        or "," in config.name,
        "name",
        f"'{config.name}' cannot be a folder name",
        "letters, digits, - _ . and / between folders",
    )
    return found + of_verb(config)


def _has_val_folder(config: Train) -> bool:
    """Whether the data are a folder of images with one for validation; told before the data are read."""
    dataset = config.data.dataset
    root, name = dataset.get("root") or config.data.root, dataset.get("val_folder", "val")
    is_folder = dataset.get("_target_") == "runner.data.sources.folders.image_folder" and isinstance(root, str)
    return is_folder and isinstance(name, str) and Path(root, name).expanduser().is_dir()


def _is_duration(text: str) -> bool:
    try:
        return seconds(text) > 0
    except ValueError:
        return False


def _of_speed(config: Train, forbid: Callable[[bool, str, str, str], None]) -> None:
    """What the toggles of speed and memory cannot do together."""
    precision, optimizer, mode = config.matmul_precision, config.optimizer, config.compiler.mode
    deterministic = config.deterministic is True
    forbid(
        deterministic and precision not in (None, "highest"),
        "matmul_precision",
        f"is {precision}, which rounds matrix products, as deterministic=true rules out",
        "matmul_precision=highest, or deterministic=false",
    )
    forbid(
        config.tf32 and precision == "highest",
        "matmul_precision",
        "is highest, but tf32=true asks for TensorFloat-32 in matrix products",
        "matmul_precision=null, or tf32=false",
    )
    compiled = config.compile is not False
    forbid(
        compiled and deterministic and mode.startswith("max-autotune"),
        "compiler.mode",
        f"{mode} picks kernels by timing them, which deterministic=true rules out",
        "compiler.mode=default, or deterministic=false",
    )
    forbid(
        compiled and mode in ("reduce-overhead", "max-autotune") and config.accumulate > 1,
        "compiler.mode",
        f"{mode} replays CUDA graphs, which overwrite the gradients that accumulate={config.accumulate} adds up",
        "compiler.mode=default or max-autotune-no-cudagraphs, or accumulate=1",
    )
    forbid(
        compiled and mode in ("reduce-overhead", "max-autotune") and config.on_oom == "split",
        "on_oom",
        f"is split, but compiler.mode={mode} replays CUDA graphs, which overwrite the gradients that pieces add up",
        "on_oom=raise, or compiler.mode=default or max-autotune-no-cudagraphs",
    )
    forbid(
        isinstance(config, Audit | Bench) and config.data.batch_size == "auto",
        "data.batch_size",
        "is auto, which may find another number for each side that is compared",
        "a number",
    )
    forbid(
        bool(optimizer.get("fused")) and bool(optimizer.get("foreach")),
        "optimizer.fused",
        "is true, and so is optimizer.foreach, but a step is made in one of the two ways",
        "one of them, or null for both",
    )
    forbid(
        isinstance(config.activation_checkpointing, str | list) and not config.activation_checkpointing,
        "activation_checkpointing",
        "names no module",
        "false, true, a number, or names of modules",
    )


def _of_weights(config: Train, forbid: Callable[[bool, str, str, str], None]) -> None:
    """What initial and frozen weights cannot be."""
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    drawn = [scheme for scheme in schemes if scheme not in ("zero_gamma", "prior_bias")]
    forbid(len(drawn) > 1, "init", f"draws the weights {len(drawn)} times: {', '.join(drawn)}", "one of them")
    forbid(
        bool(drawn) and config.model.get("weights") is not None,
        "init",
        f"has {', '.join(drawn)}, which would overwrite the weights that model.weights loads",
        "model.weights=null, or init without it",
    )
    forbid(
        config.init_mismatch != "head" and config.init_from is None,
        "init_mismatch",
        "has no effect without init_from",
        "init_from=PATH, or init_mismatch=head",
    )
    forbid(
        config.unfreeze_at is not None and not config.freeze,
        "unfreeze_at",
        "has no effect, as freeze names nothing",
        "freeze=[...], or unfreeze_at=null",
    )
    for key, freeze, moment in (("unfreeze_at", "all", config.unfreeze_at), ("freeze", config.freeze, None)):
        try:
            entries(freeze, moment)
        except ValueError as error:
            forbid(True, key, f"cannot be had: {error}", f"null, or {'names with @ and ' * (key == 'freeze')}{MOMENT}")


def _of_averaging(config: Train, forbid: Callable[[bool, str, str, str], None]) -> None:
    """What averages of the weights cannot be, and what has no effect without them."""
    averaging = config.averaging
    forbid(
        config.ema is not None and config.swa is not None,
        "swa",
        "is set, and so is ema, but one average is kept",
        "swa=null, or ema=null",
    )
    forbid(
        config.swa is not None and config.evaluate.every_epochs is None and config.evaluate.every_steps is None,
        "swa",
        "computes BatchNorm's statistics at evaluations, but evaluate.every_epochs and evaluate.every_steps are null",
        "evaluate.every_epochs=1, or swa=null",
    )
    for kind, value in (("ema", config.ema), ("swa", config.swa)):
        for name in config.metrics or {}:
            forbid(
                value is not None and name.startswith(f"{kind}_"),
                f"metrics.{name}",
                f"is called as metrics of the average that {kind} keeps are",
                "another name",
            )
    for key, value in (("lr_factor", averaging.lr_factor), ("recalibrate_batches", averaging.recalibrate_batches)):
        forbid(
            value is not None and config.swa is None,
            f"averaging.{key}",
            "has no effect without swa",
            f"averaging.{key}=null, or swa=0.75",
        )
