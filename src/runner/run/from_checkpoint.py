"""The checkpoint of a verb: its config with the command line on top, its model and its data."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.base.files import writing
from runner.checkpoint import find
from runner.checkpoint.weights import loss_of, part_with, weights_of
from runner.config import stored
from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.schema.train import Train
from runner.config.schema.verbs import Weights
from runner.data.build import read_data
from runner.data.module import DataModule, SplitData, callables
from runner.data.transforms.augment import Pipeline
from runner.engine.state import load_task, load_weights
from runner.engine.tta import TTAModel, views_named
from runner.run.directory import claim
from runner.run.finetune import explaining
from runner.run.hub import local
from runner.run.model import DataFacts, KnownData, build_model, build_modules, build_task, num_classes_of, prepared
from runner.run.run import choose_hardware
from runner.runtime.precision import Precision
from runner.tasks.task import Task
from runner.tracking.verb_report import Report

T = TypeVar("T", bound=Train)

SPLITS = ("train", "val", "test")
MODEL = ("model", "task", "transform.eval", "transform.sample_eval")
"""Sections of the config that have the components of a model and of its input."""
EVALUATED = ("data", "transform", "model", "task", "loss", "metrics")
"""Those that have the components to evaluate a model on the data of the config."""

_TRAINING_ONLY = {
    "activation_checkpointing": "which computes no gradients",
    "compile": "which runs the model without compiling it",
}


@dataclass(frozen=True)
class ResolvedCheckpoint(Generic[T]):
    """A checkpoint and the config that it is used with."""

    found: find.LoadedCheckpoint
    config: T  # its config with the command line on top, validated
    words: list[str]  # the overrides of the command line
    which: Weights  # the weights to use, the key `weights` of the verb
    with_data: Callable[[], object]  # checks the components of the data, if those were skipped

    @property
    def weights(self) -> tuple[dict[str, Any], str]:
        """The weights that `which` selects, and their kind: see `runner.checkpoint.weights.weights_of`."""
        return weights_of(self.found.contents, self.which)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that the model was trained on."""
        return tuple(self.found.contents["classes"])

    def record(self) -> dict[str, Any]:
        """Path, step and kind of weights, for JSON."""
        step = self.found.contents["position"]["global_step"]
        return {"checkpoint": str(self.found.path), "global_step": step, "weights": self.weights[1]}

    def described(self) -> str:
        """The same for people, with the other checkpoint of the run."""
        record, beside = self.record(), find.beside(self.found.path)
        average = "" if record["weights"] == "raw" else f"  averaged weights ({record['weights']})"
        other = f"\nweights: {beside}" if beside else ""
        return f"{record['checkpoint']}  step {record['global_step']}{average}{other}"

    def set_up_device(self, verb: str, report: Report) -> tuple[torch.device, Precision]:
        """Choose device and precision, set torch's switches, and warn of what has no effect."""
        hardware = choose_hardware(dataclasses.replace(self.config, detect_anomaly=False))
        # A key that has no effect on this verb is often a misunderstanding, so it is named
        given = {word.split("=")[0] for word in self.words}
        unused = [f"{key} has no effect on {verb}, {why}" for key, why in _TRAINING_ONLY.items() if key in given]
        report.warnings(self.found.warnings, hardware.warnings, hardware.precision.warnings, unused)
        return hardware.device, hardware.precision

    def data(self, device: torch.device) -> DataModule:
        """The data that the config names."""
        self.with_data()
        splits = read_data(self.config, device, dtype=getattr(torch, self.config.dtype))
        # Other classes would give metrics that look right and mean nothing.
        try:
            check_classes(self.classes, splits.classes)
        except UserError:
            splits.close()
            raise
        return splits

    def data_facts(self) -> DataFacts:
        """The data that the model was trained on; `data.image_size=` on the command line replaces the size of its images."""
        # The stored config may leave the size to the data, so the shape of the images of pairs is stored beside it
        channels, height, width = self.found.contents["metrics"].get("images", (0, 0, 0))
        if any(word.startswith("data.image_size=") for word in self.words) and self.config.data.image_size:
            height = width = self.config.data.image_size
        return DataFacts(self.classes, channels, (height, width))

    def input_pipeline(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Pipeline:
        """Turns decoded images into the model's input: `transform.eval`, then normalisation."""
        config = self.config
        mean, std = config.data.normalize.mean, config.data.normalize.std
        if config.data.images is not None:
            mean, std = mean or [0.0], std or [1.0]
        if mean is None or std is None:
            allowed = "data.normalize.mean and data.normalize.std on the command line, one number per channel"
            raise UserError("data.normalize", "the checkpoint does not store how images were normalised", allowed)
        steps = callables("transform.eval", config.transform.eval)
        return Pipeline(steps, mean, std, config.seed, device, channels_last=config.channels_last, dtype=dtype)

    def blank_input(self, data: KnownData) -> Tensor:
        """A blank image after `transform.eval`, which may change its size, and normalisation: (1, C, H, W) on the CPU."""
        pixels = torch.zeros((1, data.channels, *data.image_size), dtype=torch.uint8)
        return prepared(self.input_pipeline(torch.device("cpu")), pixels)

    def load_weights(self, model: nn.Module, task: Task, loss: nn.Module | None = None) -> None:
        """Load the selected weights into a model, what belongs to them into a loss, and the state of the task."""
        load_weights_of(self.found, self.config, model, loss=loss, task=task, which=self.which)

    def restore_model(self, data: KnownData, device: torch.device) -> tuple[Task, nn.Module]:
        """The task, and what `build_modules` returns with the selected weights, on the device, in evaluation mode."""
        # No weights are fetched: those of the checkpoint replace them
        task = build_task(self.config, data, fetch_weights=False)
        model = build_model(self.config, task, data, lambda: self.blank_input(data), fetch_weights=False)
        modules = build_modules(task, model, nn.Identity())
        self.load_weights(modules, task)
        modules.to(device)
        if self.config.channels_last:
            modules.to(memory_format=torch.channels_last)
        return task, modules.eval()


def resolve_checkpoint(
    composition: Composition, schema: type[T], builds: Sequence[str] = EVALUATED
) -> ResolvedCheckpoint[T]:
    """Find the checkpoint that `ckpt_path` names, of a run directory the best one, and apply the command line to its config.

    Keys of the verb's schema that `train` does not have come from the command line alone. The components in sections other
    than `builds` are not imported: a model is used where the packages that trained it are not installed. Raises `UserError`
    with everything that is wrong.
    """
    if composition.values.get("ckpt_path") is None:
        raise UserError("ckpt_path", "is missing", "a checkpoint file, a run directory, last or best")
    # Of the checkpoint's tensors, only the selected weights are read.
    read = part_with(composition.values["weights"])
    place = local(str(composition.values["ckpt_path"]), "ckpt_path")
    found = find.load(place, composition.runs, prefer="best", parts=read)
    # Other data has to look to the model like the data that it was trained on.
    statistics = stored_data(found).get("normalize") or {}
    text, where = found.contents["config"], str(found.path)
    resolve = functools.partial(stored.resolve_with_checkpoint, text, where, composition, schema, normalize=statistics)
    config, _ = resolve(builds=builds)
    with_data = functools.partial(resolve, builds=EVALUATED)
    which: Weights = getattr(config, "weights", "auto")
    return ResolvedCheckpoint(found, config, words=composition.overrides, which=which, with_data=with_data)


def config_and_checkpoint(
    composition: Composition, schema: type[T], prefer: str = "last"
) -> tuple[T, find.LoadedCheckpoint | None]:
    """The config of a verb that works with and without `ckpt_path`, and the checkpoint, if there is one.

    `prefer` is `last` or `best`: the checkpoint to use of a run directory. Raises `UserError` with everything that is wrong.
    """
    if composition.values.get("ckpt_path") is None:
        return resolve_config(composition, schema), None
    found = find.load(local(str(composition.values["ckpt_path"]), "ckpt_path"), composition.runs, prefer=prefer)
    config, _ = stored.resolve_with_checkpoint(found.contents["config"], str(found.path), composition, schema)
    return config, found


def load_weights_of(
    found: find.LoadedCheckpoint,
    config: Train,
    model: nn.Module,
    *,
    loss: nn.Module | None = None,
    task: Task | None = None,
    which: Weights = "auto",
) -> str:
    """Load the weights of a checkpoint that `which` selects into a model, and what belongs to them into a loss and a task.

    Returns the kind of the weights, see `runner.checkpoint.weights.weights_of`. Raises `UserError` if they do not fit.
    """
    weights, kind = weights_of(found.contents, which)
    with explaining(str(found.path), "", "no model=..., loss=... or task=... here: a checkpoint brings its own"):
        if task is not None:
            load_task(task, found.contents)
        load_weights(model, weights)
        if loss is not None:
            load_weights(loss, loss_of(found.contents, kind, config, loss), "loss")
    return kind


def stored_data(found: find.LoadedCheckpoint) -> dict[str, Any]:
    """The section `data` of the stored config; empty if it has none."""
    data = stored.load(found.contents["config"], str(found.path)).get("data")
    return data if isinstance(data, dict) else {}


def check_classes(trained: Sequence[str], given: Sequence[str]) -> None:
    """Raise a `UserError` for data whose classes, or their order, are not those that a model was trained on."""
    problem = f"has {len(given)} classes, but the checkpoint was trained on {len(trained)}"
    if len(trained) == len(given):
        # Sorted names agree for the same classes in another order: accuracy would look like chance
        if list(trained) == list(given) or sorted(trained) != sorted(given):
            return
        problem = "has the checkpoint's classes in another order, so class numbers mean something else"
    raise UserError("data", problem, f"data with the classes {', '.join(trained[:20])}")


def split_of(data: DataModule, name: str, key: str = "split") -> SplitData:
    """A split as it is evaluated; raises a `UserError` about `key` if the data has none."""
    split = data.eval_split(name)
    if split is None:
        names = [other for other in SPLITS if data.eval_split(other) is not None]
        raise UserError(key, f"this data has no '{name}' split", ", ".join(names))
    return split


def with_tta(model: nn.Module, task: Task, image: Tensor, names: str | Sequence[str], mean: str) -> TTAModel:
    """The model with test-time augmentation: views by name, their mean of `logits` or `probabilities`; `image` is (1, C, H, W)."""
    # A mean of probabilities needs to know how outputs become probabilities
    activation = activation_of(task) if mean == "probabilities" else None
    if mean == "probabilities" and activation is None:
        raise UserError("tta_mean", "this task has no classes, and so no probabilities", "logits")
    views = views_named(as_list(names))
    # A view such as a transpose needs square images, so each is tried before the long evaluation
    with explaining("tta", "", "other views"):
        for view in views:
            view(image)
    return TTAModel(model, views, activation)


def activation_of(task: Task) -> str | None:
    """The activation that makes probabilities of the outputs: `softmax`, `sigmoid`, or None for a task without classes."""
    found: str | None = getattr(task, "activation", None if num_classes_of(task) is None else "softmax")
    return found


def class_names(resolved: ResolvedCheckpoint[Any], task: Task) -> tuple[str, ...]:
    """Names of the classes or labels, numbers if the data has no names; empty for a task without."""
    count, classes = num_classes_of(task), unique_names(resolved.classes)
    if count is None:
        return ()
    return tuple(classes) if len(classes) == count else tuple(str(index) for index in range(count))


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """One name, several or none as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def unique_names(classes: Sequence[str]) -> list[str]:
    """Names of classes; a name that several classes share gets the number of the class."""
    count = Counter(classes)
    return [f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(classes)]


def run_directory_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, if it does."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def output_folder(output: str | None, default: Path | None, root: str, kind: str) -> Path:
    """The folder to write into, created if needed: `output`, else `default`, else a new dated one in `root`/`kind`."""
    folder = Path(output) if output is not None else default
    if folder is None:
        return claim(Path(root) / kind)
    with writing(folder, "output"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
