"""The program as a library: compose a config, train, evaluate, load a trained model, and predict.

Each function takes the overrides of the command line as strings: `train("data=digits", "epochs=2")`. Mistakes raise
`runner.base.errors.UserError`, and what went wrong in a run raises as it is. The names in `__all__` are public.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from runner.base.errors import OK, UserError, system_limit
from runner.base.reading import read_summary
from runner.config import keys
from runner.config.composition import Composition
from runner.config.load import opened, resolve_config
from runner.config.schema.train import Train
from runner.config.schema.verbs import Eval, Predict
from runner.config.task_file import with_task_file
from runner.data.loaders import Batch
from runner.data.module import callables
from runner.data.sources.bands import check_kind
from runner.data.sources.image_files import ImageFiles, files_loader
from runner.data.transforms.augment import Pipeline
from runner.instrument.no_trace import evaluating
from runner.run.evaluation import Predictions
from runner.run.from_checkpoint import MODEL, activation_of, class_names, resolve_checkpoint, run_directory_of
from runner.run.model import model_of, prepared
from runner.run.setup import why_occupied
from runner.runtime.device import choose_device, switches_kept
from runner.runtime.precision import choose_precision
from runner.tasks.task import Task
from runner.tracking.verb_report import Report
from runner.verbs import eval as eval_verb
from runner.verbs import train as train_verb
from runner.verbs.predict.rows import RowBuilder
from runner.verbs.predict.run import files_in

__all__ = ["Preprocess", "Result", "Trained", "compose", "evaluate", "load", "train"]

Picture: TypeAlias = "str | Path | Image.Image | np.ndarray[Any, Any] | Tensor"
"""A file, folder or pattern such as `photos/*.jpg`, a Pillow image, or uint8: array (H, W) or (H, W, C), tensor (C, H, W)."""

_BATCH = 64
_PICTURES = "a path, a Pillow image, an array, a tensor, or a list of these"

_COMPOSING = threading.Lock()  # Hydra keeps what it composes in one place
_RUNNING = threading.RLock()  # torch's switches are those of the process: threads run one after the other


@contextlib.contextmanager
def _files_reported() -> Iterator[None]:
    """A file or folder that the system refuses is a `UserError`."""
    try:
        yield
    except OSError as error:
        if not (text := system_limit(error)):
            raise
        raise UserError(text) from error


class WrongType(UserError, TypeError):
    """An argument of a type or shape that a function does not take."""


class Preprocess:
    """Turns images into the input of a model, as the evaluation of its training did."""

    def __init__(self, files: ImageFiles, pipeline: Pipeline, device: torch.device) -> None:
        self._files, self._pipeline, self._device = files, pipeline, device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the model takes."""
        return self._files.shape

    def __call__(self, images: Picture | Sequence[Picture]) -> Tensor:
        """Read, resize and normalise images: float (N, C, H, W) on the device of the model.

        Raises:
            UserError: if an image cannot be read.
        """
        if not (sources := _sources(images)):
            raise UserError("images", "is empty", "at least one image")
        return self.batch(sources)

    def batch(self, sources: Sequence[Path | Image.Image]) -> Tensor:
        """The same for files, or images in memory."""
        images = [self._files.read(source) for source in sources]
        for source, image in zip(sources, images, strict=True):
            name = source if isinstance(source, Path) else "in memory"
            check_kind(name, image, "auto", images[0].dtype)  # a stack would turn bytes into floats up to 255
        return prepared(self._pipeline, torch.stack(images).to(self._device))


class SamplePreprocess(Preprocess):
    """Turns images into a batch as `predict_step` takes it; those of detectors keep their sizes, so there is no `shape`."""

    def __init__(self, config: Train, device: torch.device, predictions: Predictions) -> None:
        # A file that cannot be read raises, and a few images need no processes
        data = dataclasses.replace(config.data, on_error="raise", num_workers=0)
        self._config, self._device, self._predictions = dataclasses.replace(config, data=data), device, predictions

    def batch(self, sources: Sequence[Path | Image.Image]) -> Any:
        """The data of one batch, for files or images in memory."""
        evaluate = dataclasses.replace(self._config.evaluate, batch_size=len(sources))
        loader, _ = files_loader(dataclasses.replace(self._config, evaluate=evaluate), self._device, sources, (0, 0, 0))
        return next(iter(loader.batches(0, 0, 1))).data

    def rows(self, sources: Sequence[Path | Image.Image]) -> list[dict[str, Any]]:
        """What the task predicts for each."""
        return self._predictions.forward(Batch(self.batch(sources), torch.arange(len(sources))))


@dataclass(frozen=True)
class Trained:
    """A trained model and what is needed to use it."""

    model: nn.Module = field(repr=False)  # in evaluation mode, on the device; takes what `preprocess` returns
    classes: tuple[str, ...]  # their names, in the order of the outputs; empty for regression
    preprocess: Preprocess = field(repr=False)
    config: Train = field(repr=False)  # that it was trained with
    path: Path  # the checkpoint
    step: int  # optimizer steps until then
    weights: str  # which ones: raw, or how they were averaged
    metrics: dict[str, float]  # of the validation split at that step
    task: Task = field(repr=False)
    device: torch.device

    @property
    def directory(self) -> Path | None:
        """The run directory that the checkpoint lies in, if it does."""
        return run_directory_of(self.path)

    def predict(
        self, images: Picture | Sequence[Picture], top_k: int = 1, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """Predictions for images: one dict an image, with the columns that `python -m runner predict` writes.

        Those of a task with `predict_step`, such as boxes, are tensors, and in pixels of the image that the model got.

        Args:
            images: one or several.
            top_k: number of classes to name.
            probabilities: whether to add the probability of every class.

        Raises:
            UserError: if an image cannot be read.
        """
        if not isinstance(top_k, int) or top_k < 1:
            raise UserError("top_k", f"cannot be {top_k}", "a whole number of at least 1")
        threshold = getattr(self.task, "threshold", 0.5) if activation_of(self.task) == "sigmoid" else None
        rows = RowBuilder(self.classes, top_k, probabilities, logits=False, threshold=threshold)
        precision = choose_precision(self.config.amp, self.device, self.config.dtype)
        sources, predicted, preprocess, size = _sources(images), [], self.preprocess, _BATCH
        if isinstance(preprocess, SamplePreprocess):
            if top_k > 1 or probabilities:
                raise UserError("top_k", "and probabilities do not apply to rows that the task makes", "their defaults")
            size = self.config.evaluate.batch_size  # as the verb does
        with evaluating(self.model):
            for start in range(0, len(sources), size):
                batch = sources[start : start + size]
                with precision.autocast():
                    if isinstance(preprocess, SamplePreprocess):
                        found = preprocess.rows(batch)
                    else:
                        outputs = self.model(preprocess.batch(batch).to(precision.weights))
                        found = rows.rows(outputs.float().cpu())
                for source, row in zip(batch, found, strict=True):
                    predicted.append(({"path": str(source)} if isinstance(source, Path) else {}) | row)
        return predicted


@dataclass(frozen=True)
class Result:
    """A run that has ended."""

    directory: Path  # with checkpoints, metrics and logs
    summary: dict[str, Any] = field(repr=False)  # the content of `summary.json`
    value: float | None  # best value of the monitored metric

    def _repr_html_(self) -> str:
        from runner.lab.report.report import runs

        return runs(self.directory)[0]._repr_html_()


def compose(*overrides: str, config_dir: str | Path | None = None) -> Train:
    """The config that a command line amounts to, validated and frozen; nothing is created.

    Args:
        overrides: as on the command line.
        config_dir: a folder of own configs.

    Raises:
        UserError: with everything that is wrong.
    """
    return resolve_config(_composition("train", overrides, config_dir), Train)


def train(*overrides: str | Train, config_dir: str | Path | None = None) -> Result:
    """Train a model, and wait until it is done.

    Args:
        overrides: as on the command line, or one config, such as `dataclasses.replace` made of what `compose` returned.
        config_dir: a folder of own configs.

    Raises:
        UserError: with everything that is wrong.
        Exception: what ended the run early. Its directory has the log, and `train(f"ckpt_path={directory}")` resumes it.
    """
    config = overrides[0] if len(overrides) == 1 and isinstance(overrides[0], Train) else None
    if config and config_dir:
        raise UserError("config_dir", "has no effect on a config that is composed", "compose(..., config_dir=...)")
    composition = _composition("train", () if config else overrides, config_dir)
    if config is not None:
        composition = dataclasses.replace(composition, values=keys.to_plain(config), group_choices={}, primary="")
    if mistake := why_occupied(composition):
        raise mistake
    if composition.values["dry_run"] is True:
        raise UserError("dry_run", "makes no run that train() could return", "python -m runner train dry_run=true")
    with _RUNNING, switches_kept():
        directory, value = train_verb.run(composition)
    if directory.exit_code != OK and directory.error is not None:
        with _files_reported():
            raise directory.error
    path = directory.finished or directory.path
    return Result(path, read_summary(path) or {}, value)


@_files_reported()
def evaluate(checkpoint: str | Path, *overrides: str, config_dir: str | Path | None = None) -> dict[str, Any]:
    """The metrics of a checkpoint on a split, as `python -m runner eval` writes them; nothing is written.

    Args:
        checkpoint: a file, a run directory or `last`, the newest run (its best one, or the last one without), `best`, or `hf://user/name`.
        overrides: such as `split=val` or `tta=hflip`.
        config_dir: a folder of own configs.

    Raises:
        UserError: with everything that is wrong.
    """
    composition = _of_checkpoint("eval", checkpoint, overrides, config_dir)
    with _RUNNING, switches_kept():
        return eval_verb.evaluation(resolve_checkpoint(composition, Eval), _Warnings())


@_files_reported()
def load(
    checkpoint: str | Path, *overrides: str, device: str = "auto", config_dir: str | Path | None = None
) -> Trained:
    """A trained model, ready to predict. Of the packages that trained it, only those of the model have to be installed.

    Args:
        checkpoint: see `evaluate`.
        overrides: such as `weights=raw` or `trust=[my_package]`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        config_dir: a folder of own configs.

    Raises:
        UserError: if there is no such checkpoint, or its model cannot be built here.
    """
    composition = _of_checkpoint("predict", checkpoint, overrides, config_dir)
    # Keys of the verb would be dropped silently here
    for key in keys.hints(Predict).keys() - keys.hints(Train).keys() - {"weights"}:
        if keys.says(key, composition.overrides):
            allowed = "predict(images, top_k=3, probabilities=True), or python -m runner predict"
            raise UserError(key, "is a key of the verb predict, and has no effect in load()", allowed)
    resolved = resolve_checkpoint(composition, Predict, MODEL)
    report = _Warnings()
    report.warnings(resolved.found.warnings)
    place, _ = choose_device(device)
    # The data set itself need not be there
    data = resolved.data_facts()
    task, modules = resolved.restore_model(data, place)
    if resolved.config.data.images is not None:
        rows = Predictions(resolved.config, task, modules, False, resolved.classes)
        preprocess: Preprocess = SamplePreprocess(resolved.config, place, rows)
    else:
        steps = callables("transform.sample_eval", resolved.config.transform.sample_eval)
        files = ImageFiles([], resolved.config.data, steps, (data.channels, *data.image_size))
        preprocess = Preprocess(files, resolved.input_pipeline(place), place)
    record = resolved.record()
    return Trained(
        model=model_of(modules).to(choose_precision(resolved.config.amp, place, resolved.config.dtype).weights),
        classes=class_names(resolved, task),
        preprocess=preprocess,
        config=resolved.config,
        path=resolved.found.path,
        step=record["global_step"],
        weights=record["weights"],
        metrics=dict(resolved.found.contents["metrics"].get("last") or {}),
        task=task,
        device=place,
    )


@_files_reported()
def _composition(verb: str, words: Sequence[Any], config_dir: str | Path | None) -> Composition:
    """The composition of overrides, without a job of Hydra's.

    Raises:
        UserError: with everything that is wrong.
    """
    for word in words:
        if not isinstance(word, str):
            problem = f"an override is a string of the command line, not a {type(word).__name__}"
            allowed = 'such as train("model=mlp", "epochs=2"), or one config of compose() alone'
            raise WrongType("overrides", problem, allowed)
        if word.startswith("-"):
            loop = "a loop over train(), or " if word in ("-m", "--multirun") else ""
            allowed = f"overrides such as seed=1, config_dir=, or {loop}python -m runner {verb} {word}"
            raise UserError("overrides", f"{word} is a flag of the command line", allowed)
    argv = [*with_task_file(words), *([f"--config-dir={config_dir}"] if config_dir else [])]
    with _COMPOSING, opened(verb, argv, True) as composition:
        assert composition is not None, "flags that show something are refused"
        return composition


def _of_checkpoint(
    verb: str, checkpoint: str | Path, overrides: Sequence[str], config_dir: str | Path | None
) -> Composition:
    """The same for a verb and its checkpoint, whose path is taken as it is: in an override, `${seed}` would be an expression."""
    if not isinstance(checkpoint, str | Path) or not str(checkpoint):
        given = repr(checkpoint) if checkpoint is None or checkpoint == "" else f"a {type(checkpoint).__name__}"
        raise WrongType("checkpoint", f"cannot be {given}", "a checkpoint file, a run directory, 'last' or 'best'")
    composition = _composition(verb, ["ckpt_path=last", *overrides], config_dir)
    return dataclasses.replace(composition, values=composition.values | {"ckpt_path": str(checkpoint)})


def _sources(images: Picture | Iterable[Picture]) -> list[Path | Image.Image]:
    """Files, and images in memory."""
    if isinstance(images, str | Path):
        return list(files_in([str(images)]))
    if isinstance(images, Image.Image | Tensor | np.ndarray):
        return [_image(images)]
    if not isinstance(images, Iterable) or isinstance(images, bytes | Mapping):
        raise WrongType("images", f"cannot be of type {type(images).__name__}", _PICTURES)
    return [source for image in images for source in _sources(image)]


def _image(image: Image.Image | Tensor | np.ndarray[Any, Any]) -> Image.Image:
    if not isinstance(image, Image.Image):
        shape, is_tensor = tuple(image.shape), isinstance(image, Tensor)
        if not (len(shape) == 3 and shape[0 if is_tensor else -1] <= 4) and (is_tensor or len(shape) != 2):
            allowed = "an array (H, W) or (H, W, C), a tensor (C, H, W), with C up to 4, or a list of these"
            raise WrongType("images", f"one has the shape {shape}", allowed)
        array = image.detach().cpu().permute(1, 2, 0).numpy() if isinstance(image, Tensor) else image
        if array.dtype != np.uint8 or not array.size:
            problem = f"one is {array.dtype}" if array.size else "one has no pixels"
            raise WrongType("images", problem, "uint8 with values 0 to 255, which the model's preprocessing scales")
        image = Image.fromarray(array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array)
    return image


class _Warnings(Report):
    """Reports nothing but warnings, as Python's own."""

    def __init__(self) -> None:
        super().__init__(as_json=True)

    def warn(self, text: str) -> None:
        """Issue a `UserWarning`."""
        warnings.warn(text, UserWarning, stacklevel=3)
