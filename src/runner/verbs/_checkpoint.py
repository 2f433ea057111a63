"""What the verbs that use a checkpoint have in common: its config with the line on top, and its model, data or no data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from runner.build.model import KnownData, build_model, build_task, prepared
from runner.checkpoint import find
from runner.checkpoint.weights import part_with, weights_of
from runner.config import stored
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.resolve import resolve_config, resolve_with_checkpoint
from runner.config.schema.checkpoints import Weights
from runner.config.schema.train import Train
from runner.data.build import DataModule, build_data, callables
from runner.data.transforms.augment import Pipeline
from runner.engine.state import load_weights
from runner.engine.tasks import Task
from runner.engine.tta import TTAModel, views_named
from runner.runtime.device import choose_device, configure_torch, prepare_repeating
from runner.runtime.precision import Precision, choose_precision
from runner.tracking.console import Console
from runner.tracking.run_directory import claim, timestamp

T = TypeVar("T", bound=Train)


@dataclass(frozen=True)
class Settled(Generic[T]):
    """A checkpoint and the config that it is used with.

    Attributes:
        found: the checkpoint.
        config: its config with the command line on top, validated.
        words: the overrides of the command line.
        which: the weights that are meant, the key `weights` of the verb.
    """

    found: find.LoadedCheckpoint
    config: T
    words: list[str]
    which: Weights

    @property
    def weights(self) -> tuple[dict[str, Any], str]:
        """The weights that `weights` means, and what they are: see `runner.checkpoint.weights.weights_of`."""
        return weights_of(self.found.contents, self.which)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that it was trained on."""
        return tuple(self.found.contents["classes"])


@dataclass(frozen=True)
class FromCheckpoint:
    """What a checkpoint says of the data that its model was trained on.

    Attributes:
        classes: their names; empty for regression.
        channels: colour channels of an image.
        image_size: height and width.
    """

    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]


def settle(composition: Composition, schema: type[T], prefer: str = "best") -> Settled[T]:
    """Find the checkpoint that `ckpt_path` names and lay the command line over its config.

    Args:
        composition: what the command line amounts to.
        schema: of the verb; the keys that it has beyond those of `train` come from the line alone.
        prefer: `last` or `best`: which one a run directory stands for.

    Raises:
        UserError: with everything that is wrong.
    """
    if composition.values.get("ckpt_path") is None:
        raise UserError("ckpt_path: is missing\n    allowed: a checkpoint file, a run directory, last or best")
    # Of the checkpoint's tensors, only the weights that are meant are read.
    parts = part_with(composition.values["weights"])
    found = find.load(str(composition.values["ckpt_path"]), composition.runs, prefer=prefer, parts=parts)
    # Other data still has to look to the model like the data that it was trained on.
    statistics = stored_data(found).get("normalize") or {}
    text, where = found.contents["config"], str(found.path)
    config, _ = resolve_with_checkpoint(text, where, composition, schema, statistics)
    return Settled(found, config, composition.words, getattr(config, "weights", "auto"))


def line_or_checkpoint(
    composition: Composition, schema: type[T], prefer: str = "last"
) -> tuple[T, find.LoadedCheckpoint | None]:
    """The config of a verb that needs no checkpoint: that of the line, or of the one that `ckpt_path` names with the line on top.

    Args:
        composition: what the command line amounts to.
        schema: of the verb; the keys that it has beyond those of `train` come from the line alone.
        prefer: `last` or `best`: which one a run directory stands for.

    Returns:
        The config, and the checkpoint, if there is one.

    Raises:
        UserError: with everything that is wrong.
    """
    if composition.values.get("ckpt_path") is None:
        return resolve_config(composition, schema), None
    found = find.load(str(composition.values["ckpt_path"]), composition.runs, prefer=prefer)
    config, _ = resolve_with_checkpoint(found.contents["config"], str(found.path), composition, schema)
    return config, found


def stored_data(found: find.LoadedCheckpoint) -> dict[str, Any]:
    """The section `data` of the config in a checkpoint, empty if it has none."""
    data = stored.load(found.contents["config"], str(found.path)).get("data")
    return data if isinstance(data, dict) else {}


def prepare(settled: Settled[Any], verb: str, console: Console) -> tuple[torch.device, Precision]:
    """Choose device and precision as the config says, set torch's switches, and tell what is without effect."""
    config = settled.config
    prepare_repeating(config.deterministic)
    device, _ = choose_device(config.device)
    switches = (config.cudnn_benchmark, config.tf32, False, config.matmul_precision)
    warnings = configure_torch(device, config.threads, config.deterministic, *switches)
    precision = choose_precision(config.amp, device)
    told = (settled.found.warnings, warnings, precision.warnings, _of_training_alone(settled.words, verb))
    for warning in (warning for some in told for warning in some):
        console.warn(warning)
    return device, precision


def _of_training_alone(words: list[str], verb: str) -> list[str]:
    """Warnings about keys of the line that only training has a use for."""
    given = {word.split("=")[0] for word in words}
    reasons = {
        "activation_checkpointing": "which computes no gradients",
        "compile": "which runs the model as it is",
    }
    return [f"{key} has no effect on {verb}, {reason}" for key, reason in reasons.items() if key in given]


def splits_of(settled: Settled[Any], device: torch.device) -> DataModule:
    """The data that the config names, which must have the checkpoint's classes.

    Raises:
        UserError: if the data cannot be read, or has other classes.
    """
    config = settled.config
    parts = (config.data, config.transform, config.seed, device, config.evaluate.batch_size, config.channels_last)
    splits = build_data(*parts, make_cache=False)
    try:
        check_classes(settled.classes, splits.classes)
    except UserError:
        splits.close()
        raise
    return splits


def check_classes(trained: Sequence[str], given: Sequence[str]) -> None:
    """Refuse data with other classes than those that a model was trained on, or the same in another order.

    Raises:
        UserError: if they are.
    """
    if len(trained) != len(given):
        raise UserError(
            f"data: has {len(given)} classes, but the checkpoint was trained on {len(trained)}\n"
            f"    allowed: data with the classes {', '.join(trained[:20])}"
        )
    if list(trained) != list(given) and sorted(trained) == sorted(given):
        raise UserError(
            "data: has the checkpoint's classes in another order, so class numbers mean something else\n"
            f"    allowed: the order {', '.join(trained[:20])}"
        )


def known_data(settled: Settled[Any]) -> FromCheckpoint:
    """What the model was trained on: from the checkpoint, or from the data where a checkpoint of old does not say.

    A `data.image_size` on the line is the size that images are to have here.

    Raises:
        UserError: if neither says.
    """
    shape = settled.found.contents["metrics"].get("images")
    if shape is None:
        splits = splits_of(settled, torch.device("cpu"))
        splits.close()
        shape = splits.image_shape
    channels, height, width = shape
    if any(word.startswith("data.image_size=") for word in settled.words) and settled.config.data.image_size:
        height = width = settled.config.data.image_size
    return FromCheckpoint(settled.classes, channels, (height, width))


def given_to_model(settled: Settled[Any], device: torch.device) -> Pipeline:
    """What makes of decoded images those that the model is given: `transform.eval`, then normalisation.

    Raises:
        UserError: if a transform cannot be built, or the checkpoint does not say how images are normalised.
    """
    config = settled.config
    mean, std = config.data.normalize.mean, config.data.normalize.std
    if mean is None or std is None:
        raise UserError(
            "data.normalize: the checkpoint does not say how images were normalised\n"
            "    allowed: data.normalize.mean and data.normalize.std on the line, one number a channel"
        )
    steps = callables("transform.eval", config.transform.eval)
    return Pipeline(steps, mean, std, config.seed, device, config.channels_last)


def restored(settled: Settled[Any], data: KnownData, device: torch.device) -> tuple[Task, nn.Module]:
    """The task, and the model with the checkpoint's weights on the device, in evaluation mode.

    Raises:
        UserError: if the config does not fit the data, or the weights do not fit the model.
    """
    task, model = built(settled, data)
    fill(model, settled)
    model.to(device)
    if settled.config.channels_last:
        model.to(memory_format=torch.channels_last)
    return task, model.eval()


def built(settled: Settled[Any], data: KnownData) -> tuple[Task, nn.Module]:
    """The task, and a model with initial weights, on the CPU."""
    task = build_task(settled.config, data)
    return task, build_model(settled.config, task, data, lambda: blank_given(settled, data), fetch_weights=False)


def blank_given(settled: Settled[Any], data: KnownData) -> Tensor:
    """A blank image as the model is given it: (1, C, H, W) on the CPU, after `transform.eval`, which may change its size."""
    pixels = torch.zeros((1, data.channels, *data.image_size), dtype=torch.uint8)
    return prepared(given_to_model(settled, torch.device("cpu")), pixels)


def fill(model: nn.Module, settled: Settled[Any]) -> None:
    """Load the checkpoint's weights, those that `weights` means, into the model.

    Raises:
        UserError: if they do not fit, or are not there.
    """
    try:
        load_weights(model, settled.weights[0])
    except ValueError as error:
        raise UserError(f"{settled.found.path}: {error}") from error


def augmented(model: nn.Module, task: Task, image: Tensor, names: str | Sequence[str], mean: str) -> TTAModel:
    """The model with test-time augmentation.

    Args:
        model: the model.
        task: what it was trained for.
        image: one as the model is given them, (1, C, H, W).
        names: of the views.
        mean: `logits` or `probabilities`.

    Raises:
        UserError: if there are no probabilities to average, or a view cannot be made of such images.
    """
    probabilities = mean == "probabilities"
    if probabilities and class_count(task) is None:
        raise UserError("tta_mean: this task has no classes, and so no probabilities\n    allowed: logits")
    views = views_named(listed(names))
    try:
        for view in views:
            view(image)
    except ValueError as error:
        raise UserError(f"tta: {error}\n    allowed: other views") from error
    return TTAModel(model, views, probabilities)


def class_count(task: Task) -> int | None:
    """Classes that a task tells apart; None if it does not."""
    count = getattr(task, "num_classes", None)
    return count if isinstance(count, int) else None


def listed(value: str | Sequence[str] | None) -> list[str]:
    """One name, several or none as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def distinct(classes: Sequence[str]) -> list[str]:
    """Names of classes; those that several share with the number of their class."""
    count = Counter(classes)
    return [f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(classes)]


def run_directory_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, if it does."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def folder_for(output: str | None, otherwise: Path | None, root: str, kind: str) -> Path:
    """The folder to write into: `output`, or a given one, or a new one below the output root; made if it is not there.

    Raises:
        UserError: if it cannot be made.
    """
    folder = Path(output) if output is not None else otherwise
    if folder is None:
        return claim(Path(root) / kind, timestamp())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot make the folder {folder}: {error.strerror}") from error
    return folder
