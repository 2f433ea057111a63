"""`predict`: what a checkpoint says of images or other samples, written row by row."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError, nearest_path
from runner.base.files import write_atomically
from runner.config.composition import Composition
from runner.config.schema.verbs import Predict
from runner.config.validate import shown
from runner.data.bad_samples import BadSamples, path_of
from runner.data.loaders import Batch, Loader
from runner.data.module import callables
from runner.data.sampler import AllSamples, Indices
from runner.data.sources.image_files import files_loader
from runner.data.sources.listing import EXTENSIONS, folders_below, images_below
from runner.distributed.world import world
from runner.instrument.no_trace import evaluating
from runner.models.features import Extractor, write_features
from runner.run.directory import claim
from runner.run.evaluation import Predictions, generated, write_samples
from runner.run.from_checkpoint import (
    MODEL,
    SPLITS,
    ResolvedCheckpoint,
    activation_of,
    as_list,
    class_names,
    output_folder,
    resolve_checkpoint,
    split_of,
    with_tta,
)
from runner.run.model import KnownData, build_task, model_of
from runner.runtime.precision import Precision
from runner.tasks.task import STEPS
from runner.tracking.formats import amount, clean, compact, number
from runner.tracking.verb_report import Report
from runner.verbs.predict.labels import FilePixels, Labels
from runner.verbs.predict.rows import Row, RowBuilder, check_ending, open_table, target_cells

_INPUTS = "images, folders, patterns such as photos/*.jpg, or a split: train, val or test"
_OF_OUTPUTS = ("top_k", "probabilities", "logits", "features", "tta")  # keys
_BATCH = 64  # files of a batch: each worker decodes one batch at a time, and all should have some to do
_SHOWN = 10  # rows, and unreadable images


@dataclasses.dataclass
class Source:
    """Samples to predict, and what is known of each."""

    data: KnownData  # what the model has to know of them
    loader: Loader  # gives them in batches
    indices: Indices  # of its samples
    first_cells: Callable[[int, Any], Row]  # the first cells of a sample's row, from its number and its target
    bad: BadSamples  # those that could not be read so far
    split: str  # what they are called there


@dataclasses.dataclass
class Predictor:
    """What makes rows of batches."""

    model: nn.Module  # everything that has modes
    rows: Callable[[Batch], list[Row]]  # without the first cells
    lists: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)  # see `open_table`
    layers: Extractor | None = None  # gives features
    pixels: FilePixels | None = None  # of what a task says itself
    labels: Labels | None = None  # writes them instead of a table


def run(composition: Composition) -> float:
    """Predict images; returns how many a second, for sweepers."""
    report, main = Report(composition.values["json"]), world().first
    resolved = resolve_checkpoint(composition, Predict, MODEL)
    config = resolved.config
    # Unreadable samples are listed; the one that replaces a sample gets no row
    data = dataclasses.replace(config.data, on_error="skip", max_skipped=1.0)
    resolved = dataclasses.replace(resolved, config=dataclasses.replace(config, data=data))
    if config.samples is not None:
        return _generate(resolved, report)
    if not as_list(config.input):
        raise UserError("input", "is missing", _INPUTS)
    as_table = config.format == "table"
    refused = {"table": ("threshold",), "masks": ()}.get(config.format, ("pictures",))
    _refuse_keys(config, refused, f"format={config.format}")
    if as_table and config.output is not None:
        check_ending(Path(config.output))
    device, precision = resolved.set_up_device("predict", report)
    with opened(resolved, device, report) as source:
        predictor = _predictor(resolved, source, device)
        # Only rank 0 writes; the others compute batches for it.
        path = Path(config.output or "predictions.csv") if main else Path(os.devnull)
        labels = predictor.labels if main else None
        if labels is not None:
            path = output_folder(config.output, None, config.output_root, "predictions")
        elif main and config.output is None:
            path = claim(Path(config.output_root) / "predictions") / path
        features_file = path.with_name(f"{path.stem}_features.npz") if predictor.layers and main else None
        first, count, began = list[Row](), 0, time.perf_counter()
        table = open_table(path, predictor.lists) if labels is None else labels.open(path)
        with table as write, evaluating(predictor.model):

            def written() -> Iterator[dict[str, Tensor]]:
                nonlocal count
                for rows, features in _predicted(predictor, source, precision, config.strict, report):
                    if main:
                        first.extend(write(rows)[: _SHOWN - len(first)])
                        count += len(rows)
                    yield features

            # Nobody stores the features: the batches still have to be drawn, as the table is written meanwhile
            if features_file is None:
                deque(written(), maxlen=0)
            else:
                write_features(written(), features_file)
        if not main:
            return 0.0
        seconds = time.perf_counter() - began
    if predictor.pixels is not None and predictor.pixels.problem:
        report.warn(f"what is found has the pixels that the model saw: {predictor.pixels.problem}")
    reasons = [reason for _, reason in sorted(source.bad.reasons(source.split).items())]
    unreadable_list = path.parent / f"{path.stem}_unreadable.txt" if reasons else None
    if unreadable_list is not None:
        write_atomically(unreadable_list, "".join(f"{_one_line(each)}\n" for each in reasons).encode(), named=True)
    record = resolved.record() | {
        "predicted": count,
        "unreadable": reasons,
        "unreadable_list": str(unreadable_list) if unreadable_list is not None else None,
        "seconds": round(seconds, 3),
        "images_per_s": round(count / seconds, 3),
        "output": str(path),
        "features": str(features_file) if features_file is not None else None,
    }
    if not report.json(record):
        report.line(resolved.described())
    _show(record, first, report)
    return float(record["images_per_s"])


def _generate(resolved: ResolvedCheckpoint[Predict], report: Report) -> float:
    """Write what the task generates with `sample(modules, count)` into a folder; returns how many samples a second."""
    config, began = resolved.config, time.perf_counter()
    _refuse_keys(config, ("input", "format", "threshold", "pictures", *_OF_OUTPUTS), "what the task generates")
    device, precision = resolved.set_up_device("predict", report)
    task, modules = resolved.restore_model(resolved.data_facts(), device)
    if config.dtype == "float64":
        modules.to(torch.float64)
    found = generated(task, modules, precision, config.seed, config.samples)
    if not world().first:
        return 0.0
    folder = output_folder(config.output, None, config.output_root, "predictions")
    files = [str(path) for path in write_samples(found, folder).values()]
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    record = {"samples": config.samples, "numbers": numbers, "files": files, "output": str(folder)}
    if not report.json(resolved.record() | record):
        report.line(resolved.described())
        report.lines(*(f"{name} {number(value)}" for name, value in numbers.items()), *files)
    report.folder(folder)
    return (config.samples or 0) / (time.perf_counter() - began)


def _refuse_keys(config: Predict, keys: Sequence[str], what: str) -> None:
    """Refuse the first of these keys that is not at its default, as it has no effect on `what`."""
    for key in keys:
        if getattr(config, key) != (default := Predict.__dataclass_fields__[key].default):
            raise UserError(key, f"does not apply to {what}", shown(default))


def _show(record: dict[str, Any], first: list[Row], report: Report) -> None:
    predicted, unreadable = record["predicted"], record["unreadable"]
    if first and not report.as_json:

        def text(value: Any) -> str:  # nested values are JSON in CSV; a path is shown whole
            shown = number(value) if isinstance(value, float) else str(value)
            return shorten(shown, 40, placeholder=" ...") if shown.startswith(("[", "{")) else shown

        columns = [name for name, value in first[0].items() if not isinstance(value, list | dict)]
        rows = [[text(row[name]) for name in columns] for row in first]
        more = f", the first {len(rows)}" if predicted > len(rows) else ""
        report.table(f"{predicted:,} predicted{more}", columns, rows)
    if unreadable:
        were, they = ("was", "it") if len(unreadable) == 1 else ("were", "they")
        report.warn(f"{amount(len(unreadable), 'image')} {were} not predicted, as {they} could not be read:")
        report.lines(*(f"  {_one_line(reason)}" for reason in unreadable[:_SHOWN]))
        if len(unreadable) > _SHOWN:
            report.line(f"  and {len(unreadable) - _SHOWN:,} more: {record['unreadable_list']}")
    rate = compact(record["images_per_s"])
    report.line(f"{predicted:,} images in {record['seconds']:.2f} s, {rate} images/s with reading and writing")
    if not report.as_json:
        report.lines(*filter(None, (record["output"], record["features"])))


def _predictor(resolved: ResolvedCheckpoint[Predict], source: Source, device: torch.device) -> Predictor:
    """What makes rows of the outputs of the model, or of what the task gives for each sample."""
    config, data = resolved.config, source.data
    task, modules = resolved.restore_model(data, device)
    formats = "table", *(getattr(task, "formats", ()) if hasattr(task, "predict_step") else ())
    if config.format not in formats:
        raise UserError("format", f"cannot be {config.format} for {type(task).__name__}", ", ".join(formats))
    dtype = getattr(torch, config.dtype)
    if dtype == torch.float64:  # as in training: in float32 each tensor keeps its type
        modules.to(dtype)
    own_steps = any(hasattr(task, name) for name in STEPS)
    if hasattr(task, "predict_step") or config.pictures or (config.data.images is not None and own_steps):
        _refuse_keys(config, _OF_OUTPUTS, "rows that the task makes in predict_step")
        options = {"threshold": config.threshold} if config.format == "masks" and config.threshold else {}
        made = Predictions(config, task, modules, config.pictures, resolved.classes, **options)
        pairs = source.split != "input" and config.data.images in (None, ["0"])
        made.truth = config.format == "table" and pairs and hasattr(task, "shown")
        transforms = callables("transform.sample_eval", config.transform.sample_eval)
        pixels = FilePixels(config, transforms, resolved.classes, task)
        predictor = Predictor(made, made, pixels=pixels)
        if config.format != "table":
            files = [source.first_cells(index, None).get("path") for index in source.indices[:].tolist()]
            predictor.labels = Labels(config, files, class_names(resolved, task), pixels)
        return predictor
    plain = model = model_of(modules)
    threshold = getattr(task, "threshold", 0.5) if activation_of(task) == "sigmoid" else None
    builder = RowBuilder(class_names(resolved, task), config.top_k, config.probabilities, config.logits, threshold)
    if config.tta:
        model = with_tta(model, task, resolved.blank_input(data).to(dtype), config.tta, config.tta_mean)
    # Features come from the plain model, as its views would have one each
    layers = Extractor(plain, as_list(config.features)) if config.features else None
    return Predictor(model, lambda batch: builder.rows(model(batch.images).float().cpu()), builder.lists, layers)


def _predicted(
    predictor: Predictor, source: Source, precision: Precision, strict: bool, report: Report
) -> Iterator[tuple[list[Row], dict[str, Tensor]]]:
    """Rows and features of the readable samples of each batch; others are noted in the source, or refused if `strict`.

    Several ranks compute a batch each, and rank 0 gets what all have found.
    """
    loader, ranks, with_targets = source.loader, world(), not isinstance(predictor.model, Predictions)

    def computed(batch: Batch | None) -> tuple[list[Row], dict[str, Tensor]]:
        if batch is None:
            return [], {}
        with precision.autocast():
            rows = predictor.rows(batch)
            features = predictor.layers.rows(batch.images) if predictor.layers is not None else {}
        indices, bad = batch.indices.tolist(), source.bad.reasons(source.split)
        targets = batch.targets.tolist() if with_targets else [None] * len(indices)
        readable = [place for place, index in enumerate(indices) if index not in bad]
        rows = [source.first_cells(indices[place], targets[place]) | rows[place] for place in readable]
        if makes := predictor.labels or predictor.pixels:
            rows = [makes.of(at, indices[at], batch.data, row) for at, row in zip(readable, rows, strict=True)]
        return rows, {name: tensor[readable].cpu() for name, tensor in features.items()}

    # Each rank computes every n-th batch, and all gather after each, so that rows are written in order.
    batches = len(loader)
    with report.counting("predict", math.ceil(batches / ranks.size)) as begin:
        own = iter(loader.batches(0, ranks.rank, batches, ranks.size))
        for first in range(0, batches, ranks.size):
            begin()
            torch.manual_seed(first + ranks.rank)  # what the task draws is that of the batch, as in evaluations
            parts = ranks.gather(computed(next(own, None)))
            source.bad.join(ranks)
            if strict and (unreadable := source.bad.reasons(source.split)):
                allowed = "strict=false, which lists such images and continues"
                raise UserError("input", unreadable[min(unreadable)], allowed)
            yield from (part for part in parts if part[0])


def _one_line(reason: str) -> str:
    """A reason without the line ends and other controls that a file's name may hold."""
    return " ".join(clean(reason).encode("utf-8", "backslashreplace").decode().split())


@contextlib.contextmanager
def opened(resolved: ResolvedCheckpoint[Predict], device: torch.device, report: Report) -> Iterator[Source]:
    """The samples that `input` names, while their workers run; only a split needs the data set."""
    words = as_list(resolved.config.input)
    named = [word for word in words if word in SPLITS]
    if named and len(words) > 1:
        allowed = f"input={named[0]} alone, or ./{named[0]} for a folder of that name"
        raise UserError("input", f"'{named[0]}' is a split of the data and cannot be mixed with others", allowed)
    if not named:
        paths = files_in(words)
        loader, unreadable = _files(resolved, paths, device)
        with contextlib.closing(loader):
            facts, every = resolved.data_facts(), AllSamples(len(paths))
            yield Source(facts, loader, every, lambda index, _: {"path": str(paths[index])}, unreadable, "input")
        return
    (name,) = named
    if Path(name).is_dir():
        report.warn(f"input={name} is the split of the data; input=./{name} is the folder of that name")
    with contextlib.closing(resolved.data(device)) as data:
        loader = split_of(data, name, "input").loader
        report.warnings(text for text in data.warnings if text.startswith("data.image_size"))
        task = build_task(resolved.config, data, fetch_weights=False)
        classes, activation, (dataset, indices) = class_names(resolved, task), activation_of(task), data.parts[name]

        def first_cells(index: int, target: Any) -> Row:
            file = path_of(dataset, index)
            cells: Row = {"sample": index} if file is None else {"sample": index, "path": file}
            return cells if target is None else cells | target_cells(target, classes, activation)

        yield Source(data, loader, indices, first_cells, data.bad_samples, name)


def _files(resolved: ResolvedCheckpoint[Predict], paths: list[Path], device: torch.device) -> tuple[Loader, BadSamples]:
    """A loader of image files, and those that cannot be read."""
    config, known = resolved.config, resolved.data_facts()
    if config.data.images is None:
        resolved.input_pipeline(device)  # raises an error if the normalisation is not known
        if not any(word.startswith("evaluate.batch_size=") for word in resolved.words):
            smaller = min(_BATCH, config.evaluate.batch_size)
            config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, batch_size=smaller))
    return files_loader(config, device, paths, (known.channels, *known.image_size))


def files_in(words: Sequence[str]) -> list[Path]:
    """The image files that words name, in their order, those of a folder or pattern sorted by name, each once.

    A word is a file, with any ending; a folder, which stands for all images below it, with links to folders followed once;
    or a pattern such as `photos/**/*.jpg`, which matches files with the ending of an image, and whose `**` follows links in
    the same way. Hidden files are skipped unless they are named.
    """
    found: dict[Path, None] = {}
    for word in words:
        try:
            files = _named_by(word)
        except OSError as error:
            raise UserError("input", f"cannot read {word}: {(error.strerror or str(error)).lower()}") from error
        if not files:
            allowed = f"files that end in {' '.join(sorted(EXTENSIONS))}"
            raise UserError("input", f"there is no image in {word}", allowed)
        found |= dict.fromkeys(files)
    return list(found)


def _named_by(word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        images, unread = images_below(path)  # what cannot be read is listed as such
        return sorted(map(Path, [*images, *unread])) if unread else [*map(Path, images)]
    if path.exists() or path.is_symlink():
        return [path]
    if glob.has_magic(word):
        matches = set(_matches(path))
        return sorted(match for match in matches if match.suffix.lower() in EXTENSIONS and not match.is_dir())
    raise UserError("input", f"there is no {path}", _INPUTS, nearest_path(path))


def _matches(pattern: Path) -> Iterator[Path]:
    """The matches of a pattern. `glob` does not get the `**`, as it would follow a link to a folder above without end."""
    parts = pattern.parts
    if "**" not in parts:
        # Path.glob does not take an absolute pattern.
        yield from map(Path, glob.glob(str(pattern)))  # noqa: PTH207
        return
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    for start in _matches(Path(*parts[:place])) if place else [Path()]:
        for folder, _ in folders_below(start) if start.is_dir() else ():
            yield from _matches(Path(glob.escape(folder), *rest))
