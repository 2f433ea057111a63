"""Rules between keys: combinations that cannot be run, and settings without effect next to others; the entries of `freeze`.

Each rule yields the fields of a `Problem`: the key, what is wrong with it, what to set, and maybe the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, get_origin

from runner.base.durations import DURATION, seconds
from runner.base.errors import Problem
from runner.config import keys
from runner.config.schema.sections import ADJUSTMENTS, TEST_SHARE, components_of
from runner.config.schema.train import Adapters, Fsdp, Train
from runner.config.schema.verbs import FEATURE_FILES, Audit, Bench, Export, FindLr, Inspect, Pack
from runner.config.untrusted import not_packages, packages_in

Broken = Iterator[tuple[str, ...]]

_WHOLE = {"runner.data.sources.masks": "segmentation", "mask": "segmentation"}
_WHOLE |= {"runner.data.sources.detection": "detection", "boxes": "detection"}
ALL_BUT_HEAD = "all-but-head"
MOMENT = "a number of optimizer steps such as 100, or of epochs such as 2ep, from 1 on"
_MOMENT = re.compile(r"([1-9]\d*)(ep)?")
_NO_EVALUATIONS = "evaluate.every_epochs and evaluate.every_steps are null"


def conflicts(config: Train) -> list[Problem]:
    """Combinations that cannot be run; each says what to set."""
    rules = (
        _of_length, _of_repeating, _of_speed, _of_weights, _of_averaging, _of_data, _of_samples, _of_evaluations, _of_ranks,
        _of_sharding, _of_verbs,
    )  # fmt: skip
    return [Problem(*broken) for rule in rules for broken in rule(config)]


def _of_length(config: Train) -> Broken:
    """The length of a run, and its name."""
    measured = config.budget is not None and type(config) is Train
    if config.epochs is None and config.max_steps is None and not measured:
        yield "epochs", "is null and so is max_steps, so the run would never end", "set epochs=30 or max_steps=10000"
    optimizers = components_of("optimizer", config.optimizer)
    if "optimizer" not in optimizers and (config.lr is not None or type(config) is FindLr):
        message = "sets or finds the rate of one optimizer, and there are several"
        yield "lr", message, f"null, and {', '.join(f'{key}.lr' for key in optimizers)}"
    if config.dry_run and type(config) is not Train:
        yield "dry_run", "is true, which is for train: it builds a run and tries one step", "false, or the verb train"
    for key, time in (("max_time", config.max_time), ("budget", config.budget)):
        try:
            seconds(time or "1")
        except ValueError:
            yield key, f"cannot be {time}", f"{DURATION}, or null"
    parts = config.name.split("/")
    if any(part in ("", ".", "..") or part.startswith("~") for part in parts) or set("=,") & set(config.name):
        yield "name", f"'{config.name}' cannot be a folder name", "letters, digits, - _ . and / between folders"


def _of_repeating(config: Train) -> Broken:
    """Settings that a run that repeats bit for bit cannot use."""
    times_kernels = config.compile is not False and config.compiler.mode.startswith("max-autotune")
    for key, used, why, instead in (
        ("cudnn_benchmark", config.cudnn_benchmark, "picks algorithms by timing them", "false"),
        ("tf32", config.tf32, "rounds matrix products", "false"),
        ("matmul_precision", config.matmul_precision not in (None, "highest"), "rounds matrix products", "highest"),
        ("compiler.mode", times_kernels, "picks kernels by timing them", "default"),
    ):
        if used and config.deterministic is True:
            yield key, f"{why}, which deterministic=true rules out", f"{key}={instead}, or deterministic=false"


def _of_speed(config: Train) -> Broken:
    """Settings of speed and memory that cannot be combined."""
    mode, blocks = config.compiler.mode, config.activation_checkpointing
    if config.dtype == "float64" and config.amp is not False:
        yield "dtype", f"is float64, but amp={str(config.amp).lower()} computes in 16 bits", "amp=false"
    if config.dtype == "float64" and config.log.utilization is True:
        yield "log.utilization", "is true, but the peak of a device in float64 is not known", "auto or false"
    if config.tf32 and config.matmul_precision == "highest":
        yield "matmul_precision", "is highest, but tf32=true asks for TensorFloat-32 in matrix products"
    if config.compile is not False and mode in ("reduce-overhead", "max-autotune") and config.accumulate > 1:
        message = f"{mode} replays CUDA graphs, which overwrite the gradients of accumulate={config.accumulate}"
        yield "compiler.mode", message, "compiler.mode=default or max-autotune-no-cudagraphs, or accumulate=1"
    if isinstance(config, Audit | Bench) and config.data.batch_size == "auto":
        yield "data.batch_size", "is auto, which may find another number for each side", "a number"
    for key, node in components_of("optimizer", config.optimizer).items():
        if node.get("fused") and node.get("foreach"):
            yield f"{key}.fused", f"is true, and so is {key}.foreach, another kernel", "one of them, or null for both"
    if isinstance(blocks, str | list) and not blocks:
        yield "activation_checkpointing", "names no module", "false, true, or names of modules"
    for key in ("shapes", "finite"):
        if getattr(config.watch, key) and config.compile is not False:
            yield f"watch.{key}", "observes each module, and a compiled model is run as a whole", "compile=false"


def _of_weights(config: Train) -> Broken:
    """Initial and frozen weights."""
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    drawn = [scheme for scheme in schemes if scheme not in ADJUSTMENTS]
    if len(drawn) > 1:
        yield "init", f"draws the weights {len(drawn)} times: {', '.join(drawn)}", "one of them"
    for key in ("weights", "pretrained"):
        if drawn and config.model.get(key) not in (None, False):
            yield "init", f"has {', '.join(drawn)}, which would overwrite the weights that model.{key} loads"
    if config.init_mismatch != "head" and config.init_from is None:
        yield "init_mismatch", "has no effect without init_from", "init_from=PATH, or init_mismatch=head"
    if config.unfreeze_at is not None and not config.freeze:
        yield "unfreeze_at", "has no effect, as freeze names nothing", "freeze=[...], or unfreeze_at=null"
    if config.adapters.rank is None and config.adapters != Adapters():
        yield "adapters", "has settings without effect, as adapters.rank is null", "adapters=lora"
    elif not config.adapters.modules:
        yield "adapters.modules", "names no layer", "patterns of layers, such as ['*qkv'], or adapters=none"
    for key, freeze, moment in (("unfreeze_at", "all", config.unfreeze_at), ("freeze", config.freeze, None)):
        try:
            entries(freeze, moment)
        except ValueError as error:
            yield key, f"is not valid: {error}", f"null, or {'names with @ and ' * (key == 'freeze')}{MOMENT}"


def _of_averaging(config: Train) -> Broken:
    """Averages of the weights."""
    if config.ema is not None and config.swa is not None:
        yield "swa", "is set, and so is ema, but only one average is supported", "swa=null, or ema=null"
    if config.swa is not None and never_evaluates(config):
        yield "swa", f"computes BatchNorm's statistics at evaluations, but {_NO_EVALUATIONS}", "evaluate.every_epochs=1"
    averages = [kind for kind in ("ema", "swa") if getattr(config, kind) is not None]
    for name in config.metrics or {}:
        if (kind := name.partition("_")[0]) in averages and "_" in name:
            yield f"metrics.{name}", f"has the name of a metric of the {kind} average", "another name"
    for key in ("lr_factor", "recalibrate_batches"):
        if getattr(config.averaging, key) is not None and config.swa is None:
            yield f"averaging.{key}", "has no effect without swa", "swa=0.75"


def _of_data(config: Train) -> Broken:
    """Splitting, normalising and placing the data."""
    data, split, mean, std = config.data, config.data.split, config.data.normalize.mean, config.data.normalize.std
    test = TEST_SHARE if split.test is None else split.test
    if split.val == "test":
        for name in ("test", "folds", "group"):
            if (value := getattr(split, name)) is not None:
                yield "data.split.val", f"is test, and data.split.{name}={value} divides the data", "one of the two"
    elif split.val + test >= 1:
        yield "data.split", f"val={split.val} and test={test} leave nothing to train on"
    if split.folds is not None and split.fold >= split.folds:
        yield "data.split.fold", f"is {split.fold}, and there are {split.folds} folds", f"0 to {split.folds - 1}"
    if split.folds is not None and _has_val_folder(config):
        message = f"is {split.folds}, but the folder of images has its own validation split"
        yield "data.split.folds", message, "data.split.folds=null, or another data.dataset.val_folder to ignore it"
    if split.folds is None and split.fold > 0:
        yield "data.split.fold", "picks one of several folds, but data.split.folds is null"
    shuffle = str(data.shuffle).lower()
    if data.sampler is not None and shuffle != "true":
        yield "data.shuffle", f"is {shuffle}, but data.sampler=balanced draws in random order"
    for key, value, allowed in (("sampler", data.sampler or "null", "null"), ("shuffle", shuffle, "true")):
        if data.batch_sampler is not None and value != allowed:
            yield f"data.{key}", f"is {value}, and data.batch_sampler gives the order of the samples", allowed
    if data.sampler is not None and config.task.get("_target_") == "runner.tasks.regression.Regression":
        yield "data.sampler", "is balanced, which draws every class equally often, and task=regression has none"
    if (mean is None) != (std is None):
        yield "data.normalize", "has only one of mean and std", "both, or null for both, which measures them"
    if std is not None and any(value <= 0 for value in std):
        yield "data.normalize.std", "has a value that is not positive"
    if mean is not None and std is not None and len(mean) != len(std):
        yield "data.normalize", "has mean and std of different lengths", "one number per channel in each"
    if data.placement in ("device", "ram"):
        placed = f"data.placement={data.placement}"
        if data.cache is None and data.num_workers not in ("auto", 0):
            yield "data.num_workers", f"is {data.num_workers}, but {placed} reads no sample through workers", "auto"
        if config.transform.sample_train or config.transform.sample_eval:
            yield "transform", f"has sample transforms, which {placed} does not run", "data.placement=disk or auto"
    if data.decode == "device" and data.cache is not None:
        yield "data.cache", "keeps images as the host decodes them, not the device", "null, or data.decode=auto"
    if config.transform.mix is not None and data.batch_size == 1:
        yield "transform.mix", "blends samples of a batch, but data.batch_size=1 has a single one"


def _has_val_folder(config: Train) -> bool:
    """Tell whether the data are a folder of images with one for validation; known before the data are read."""
    dataset = config.data.dataset
    folder = Path(str(dataset.get("root") or config.data.root), str(dataset.get("val_folder", "val"))).expanduser()
    return dataset.get("_target_") == "runner.data.sources.folders.image_folder" and folder.is_dir()


def never_evaluates(config: Train) -> bool:
    """Tell whether a run is never evaluated while it trains."""
    return config.evaluate.every_epochs is None and config.evaluate.every_steps is None


def _of_samples(config: Train) -> Broken:
    """Samples that are not pairs of image and target: what needs such pairs is refused."""
    data, task = config.data, str(config.task["_target_"])
    source = str(data.dataset.get("_target_")).rpartition(".")[0]
    kind = _WHOLE.get(data.dataset.get("target", "") if source.endswith(".shards") else source)
    if kind and task.startswith("runner.") and f".{kind}." not in task and not isinstance(config, Pack):
        message = f"is {task.rpartition('.')[2]}, and samples have {'masks' if kind == 'segmentation' else 'boxes'}"
        yield "task", message, f"experiment={kind}, which also selects the transform and the model"
        return
    if data.images is None:
        if data.collate is not None:
            allowed = "data.images=[], or the names of the fields that are images"
            yield "data.collate", "is for samples of any kind, and data.images=null means (image, target)", allowed
        if source.endswith(".shards") and kind:
            yield "data.images", f"is null, and data.dataset.target={data.dataset['target']}", "['0']"
        return
    only, freeze = "needs samples that are pairs (image, target), and data.images declares another kind", config.freeze
    for name in ("train", "eval", "mix"):
        if getattr(config.transform, name):
            yield f"transform.{name}", only, "transform=none, and transforms of whole samples in transform.sample_train"
    for key, given, allowed in (
        ("data.cache", data.cache is not None, "null"),
        ("data.decode", data.decode == "device", "auto, pillow or torchcodec"),
        ("data.placement", data.placement in ("device", "ram"), "auto or disk"),
        ("adapters.trained", config.adapters.rank is not None and config.adapters.trained is None, "name patterns"),
        ("freeze", ALL_BUT_HEAD in str(freeze), "name patterns, or null"),
        ("compile", config.compile == "step", "true or false"),
    ):
        if given:
            yield key, only, allowed


def _of_evaluations(config: Train) -> Broken:
    """Parts that wait for evaluations that are never made."""
    if not never_evaluates(config):
        return
    for name, node in config.callbacks.items():
        if str(node.get("_target_", "")).endswith("EarlyStopping"):
            yield f"callbacks.{name}", f"waits for evaluations, but {_NO_EVALUATIONS}", "evaluate.every_epochs=1"
    for key, node in components_of("scheduler", config.scheduler).items():
        if str(node.get("_target_", "")).endswith("Plateau"):
            yield key, f"follows a metric, but {_NO_EVALUATIONS}", "evaluate.every_epochs=1, or another schedule"


def _of_ranks(config: Train) -> Broken:
    """Settings that several processes cannot have."""
    given = config.devices
    if type(config) is not Train or given in (1, "auto") or (isinstance(given, list) and len(given) == 1):
        return
    if isinstance(given, list) and len(set(given)) != len(given):
        yield "devices", f"names a device twice: {given}", "each device once, such as [0, 1]"
    yield from needing_one_process(config, f"devices={given}".replace(" ", ""))


def needing_one_process(config: Train, several: str) -> Broken:
    """Settings for one process; `several` says why there are more."""
    if config.strategy == "single":
        yield "strategy", f"is single, which is one process, but {several}", "auto, ddp or fsdp, or devices=1"
    if config.data.batch_size == "auto":
        allowed = "a number: what it finds with devices=1 max_steps=1, times the number of processes; or devices=1"
        yield "data.batch_size", f"is auto, which searches with one process, but {several}", allowed
    if config.post_mortem:
        allowed = "false; to debug, repeat the run with devices=1 post_mortem=true, or resume its checkpoint so"
        yield "post_mortem", f"needs a terminal, which several processes do not share, but {several}", allowed


def _of_sharding(config: Train) -> Broken:
    """Settings that cannot be combined with weights divided among processes, or have no effect without these."""
    if config.strategy != "fsdp":
        for key, default in vars(Fsdp()).items():
            if getattr(config.fsdp, key) != default:
                yield f"fsdp.{key}", f"has no effect with strategy={config.strategy}", "strategy=fsdp"
        return
    odd_moments = str(config.optimizer.get("_target_", "")).endswith("Adafactor")
    for key, given, why, allowed in (
        ("compile", config.compile is not False, "cannot compile a model whose weights strategy=fsdp shards", "false"),
        ("amp", config.amp == "fp16", "is fp16, whose scaled loss strategy=fsdp does not support", "bf16 or false"),
        ("dist.find_unused_parameters", config.dist.find_unused_parameters,
         "is for strategy=ddp: with fsdp the same weights must have gradients on all processes", "false"),
        ("optimizer", odd_moments, "has moments of another shape than the weights, which strategy=fsdp cannot shard",
         "another optimizer"),
    ):  # fmt: skip
        if given:
            yield key, why, f"{allowed}, or strategy=ddp"


def _of_verbs(config: Train) -> Broken:
    """Names that no package can have, and the keys that verbs add."""
    yield from not_packages(packages_in(config.trust))
    if isinstance(config, Audit | Bench):
        for key, value in keys.flatten(config.vary).items() if config.vary else ():
            yield from _of_varied(config, key, value)
    if isinstance(config, Audit) and (config.a is None) != (config.b is None):
        given, missing = ("a", "b") if config.b is None else ("b", "a")
        yield missing, f"is missing, and {given} is given", f"{missing}=PATH, or neither to compare steps"
    if isinstance(config, Audit) and config.a is not None and config.vary:
        yield "vary", "has no effect on checkpoints that are there", "vary={}, or neither a nor b"
    if isinstance(config, Export):
        if config.format == []:
            yield "format", "names no format", "one or several of safetensors, torch_export, onnx, torchscript"
        if not config.batch_sizes:
            yield "batch_sizes", "names no batch size", "such as [1,8]"
        if config.hub is None and not config.push:
            yield "push", "has no effect without hub", "hub=user/name"
        if config.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", config.hub):
            yield "hub", "names no repository", "hub=user/name"
    ending = PurePath(getattr(config, "output", None) or "").suffix
    if isinstance(config, Inspect) and config.features and ending not in ("", *FEATURE_FILES):
        allowed = f"a file that ends in {' or '.join(FEATURE_FILES)}, a folder, or null"
        yield "output", f"cannot be {config.output} where features are written", allowed
    if isinstance(config, FindLr) and config.start >= config.end:
        yield "start", f"is {config.start:g}, and end is {config.end:g}", "less than end"


def _of_varied(config: Audit | Bench, key: str, value: Any) -> Broken:
    """Keys to vary that there are not, or that are whole sections."""
    kind = keys.find(Train, key)
    if kind is None:
        close = keys.closest(key, keys.all_keys(Train))
        yield f"vary.{key}", "varies what is not a key", "a key of the schema", f"vary.{close}" if close else ""
    elif any(dataclasses.is_dataclass(part) or get_origin(keys.bare(part)) is dict for part in keys.members(kind)):
        yield f"vary.{key}", "varies a whole section", f"keys inside it, such as vary.{key}.name=[a,b]"
    if isinstance(config, Audit) and isinstance(value, list) and len(value) != 2:
        message = f"has {len(value)} value{'' if len(value) == 1 else 's'}, but there are two sides"
        yield f"vary.{key}", message, f"vary={key}:A,B, or the other value alone"


@dataclass(frozen=True)
class Entry:
    """Modules and parameters that are frozen together; with neither a number of steps nor of epochs, permanently."""

    pattern: str  # of their names, or `all-but-head`
    steps: int | None  # of the optimizer
    epochs: int | None


def entries(freeze: str | list[str] | None, unfreeze_at: str | int | None) -> list[Entry]:
    """The entries that `freeze` lists; `unfreeze_at` applies to entries without their own moment, such as the one in `stem@2ep`.

    Raises:
        ValueError: if something is not a moment, or there is no pattern before it; the message says what.
    """
    words = [freeze] if isinstance(freeze, str) else freeze or []
    found = []
    for word in words:
        pattern, at, own = word.partition("@")
        if not pattern or (at and not own):
            raise ValueError(f"'{word}' is not a pattern, or a pattern with @ and a moment")
        found.append(Entry(pattern, *moment(own if at else unfreeze_at)))
    return found


def moment(text: str | int | None) -> tuple[int | None, int | None]:
    """Steps and epochs of `100`, `2ep` or null; one of them is None, or both.

    Raises:
        ValueError: if it is none of these.
    """
    if text is None:
        return None, None
    matched = _MOMENT.fullmatch(str(text))
    if matched is None:
        raise ValueError(f"'{text}' is not {MOMENT}")
    number = int(matched[1])
    return (None, number) if matched[2] else (number, None)
