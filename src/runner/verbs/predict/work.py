"""One call of `predict`, from the checkpoint to the last row."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from runner.build.model import KnownData
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.schema.predict import Predict
from runner.data.bad_samples import BadSample
from runner.data.build import callables
from runner.data.loaders import Loader
from runner.data.sources.image_files import files_loader
from runner.engine.tasks import Task
from runner.instrument.no_trace import evaluating
from runner.models.features import Extractor, ExtractorPerImage
from runner.runtime.precision import Precision
from runner.tracking.console import Console
from runner.tracking.files import write_atomically, writing
from runner.tracking.formats import clean, compact, number
from runner.tracking.run_directory import claim, timestamp
from runner.verbs._checkpoint import (
    Settled,
    augmented,
    blank_given,
    class_count,
    distinct,
    given_to_model,
    known_data,
    listed,
    prepare,
    restored,
    settle,
    splits_of,
)
from runner.verbs._work import guarded
from runner.verbs.inspect.features_file import write_features
from runner.verbs.predict.inputs import SPLITS, files_in, split_in
from runner.verbs.predict.rows import Teller
from runner.verbs.predict.tables import Row, Sink, check_ending, table

_BATCH = 64  # files of a batch: each worker decodes one at a time, and all should have some to do
_SHOWN = 10  # rows, and unreadable images, that are shown


def run(cfg: DictConfig) -> float | None:
    """Predict once: the entry point that Hydra calls.

    Returns:
        Images a second, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_predict, cfg)


@dataclass
class Source:
    """Images to predict, and what is known of each.

    Attributes:
        loader: gives them in batches.
        subject: what a row begins with, from the number of an image and its target.
        unreadable: images that could not be read, by number, with the reason; filled in as they are found.
        close: ends worker processes.
    """

    loader: Loader
    subject: Callable[[int, Any], Row]
    unreadable: Callable[[], dict[int, str]]
    close: Callable[[], None]


def _predict(composition: Composition) -> float:
    # With --json, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if composition.values["json"] else None)
    settled = settle(composition, Predict)
    config = settled.config
    words = listed(config.input)
    if not words:
        raise UserError(
            "input: is missing\n    allowed: images, folders, patterns such as photos/*.jpg, or a split: test"
        )
    if config.output is not None:
        check_ending(Path(config.output))
    device, precision = prepare(settled, "predict", console)
    split = split_in(words)
    if split is None:
        data: KnownData = known_data(settled)
        source = _of_files(settled, files_in(words), (data.channels, *data.image_size), device)
        task, model = restored(settled, data, device)
    else:
        if Path(split).is_dir():
            console.warn(f"input={split} is the split of the data; input=./{split} is the folder of that name")
        source, task, model, data = _of_split(settled, split, device)
    with contextlib.closing(source):
        teller = Teller(_names(settled, task), config.top_k, config.probabilities, config.logits)
        seen: nn.Module = model
        if config.tta:
            seen = augmented(model, task, blank_given(settled, data), config.tta, config.tta_mean)
        names = listed(config.features)
        layers = ExtractorPerImage(Extractor(model, names)) if names else None
        path = _output_file(config)
        began = time.perf_counter()
        written = Written(path, console.line if not config.json else None)
        features_file = path.with_name(f"{path.stem}_features.npz") if layers is not None else None
        with table(path, teller.lists) as sink:
            batches = _written(_outputs(seen, layers, source, precision, config), teller, sink, written)
            if features_file is None:
                deque(batches, maxlen=0)
            else:
                write_features(batches, features_file)
        seconds = time.perf_counter() - began
        unreadable = [reason for _, reason in sorted(source.unreadable().items())]
    listed_in = path.with_name(f"{path.stem}_unreadable.txt")
    if unreadable:
        write_atomically(listed_in, "".join(f"{_one_line(reason)}\n" for reason in unreadable).encode())
    record = {
        "checkpoint": str(settled.found.path),
        "global_step": settled.found.contents["position"]["global_step"],
        "weights": settled.weights[1],
        "predicted": written.count,
        "unreadable": unreadable,
        "unreadable_list": str(listed_in) if unreadable else None,
        "seconds": round(seconds, 3),
        "images_per_s": round(written.count / seconds, 3),
        "output": str(path),
        "features": str(features_file) if features_file is not None else None,
    }
    if config.json:
        print(json.dumps(record))
    _tell(record, written, console)
    return float(record["images_per_s"])


@dataclass
class Written:
    """The first rows, to be shown, and how many there were."""

    path: Path
    tell: Callable[[str], None] | None
    first: list[Row] = dataclasses.field(default_factory=list)
    count: int = 0

    def note(self, rows: Sequence[Row]) -> None:
        """Count rows, and keep those that are to be shown."""
        self.count += len(rows)
        self.first += rows[: _SHOWN - len(self.first)]


def _of_files(
    settled: Settled[Predict], paths: list[Path], shape: tuple[int, int, int], device: torch.device
) -> Source:
    config, unreadable = settled.config, dict[int, str]()
    given = any(word.startswith("evaluate.batch_size=") for word in settled.words)

    def note(found: Sequence[BadSample]) -> None:
        for index, reason in found:
            path = " ".join(str(paths[index]).split())
            unreadable[index] = reason if path in reason else f"{path}: {reason}"

    loader = files_loader(
        paths,
        config.data,
        callables("transform.sample_eval", config.transform.sample_eval),
        shape,
        given_to_model(settled, device),
        device,
        config.evaluate.batch_size if given else min(_BATCH, config.evaluate.batch_size),
        note,
    )
    return Source(loader, lambda index, _: {"path": str(paths[index])}, lambda: unreadable, loader.close)


def _of_split(settled: Settled[Predict], name: str, device: torch.device) -> tuple[Source, Task, nn.Module, KnownData]:
    # A sample that cannot be read is listed, as a file is; what takes its place in training has no row.
    data = dataclasses.replace(settled.config.data, on_error="raise" if settled.config.strict else "skip")
    splits = splits_of(dataclasses.replace(settled, config=dataclasses.replace(settled.config, data=data)), device)
    split = splits.eval_split(name)
    if split is None:
        splits.close()
        names = ", ".join(other for other in SPLITS if splits.eval_split(other) is not None)
        raise UserError(f"input: this data has no '{name}' split\n    allowed: {names}, or images")
    try:
        task, model = restored(settled, splits, device)
    except BaseException:
        splits.close()
        raise
    classes = distinct(settled.classes)

    def subject(index: int, target: Any) -> Row:
        is_class = isinstance(target, int) and 0 <= target < len(classes)
        return {"sample": index, "target": classes[target] if is_class else target}

    source = Source(split.loader, subject, lambda: splits.bad_samples.reasons(name), splits.close)
    return source, task, model, splits


def _names(settled: Settled[Predict], task: Task) -> tuple[str, ...]:
    """Names of the classes, numbers where the data has none; empty for a task without classes."""
    count, classes = class_count(task), distinct(settled.classes)
    if count is None:
        return ()
    return tuple(classes) if len(classes) == count else tuple(str(index) for index in range(count))


def _written(
    batches: Iterator[tuple[Tensor, list[Row], dict[str, Tensor]]], teller: Teller, sink: Sink, written: Written
) -> Iterator[dict[str, Tensor]]:
    """Write the rows of each batch, and give the features."""
    for outputs, subjects, features in batches:
        rows = teller.rows(outputs, subjects)
        sink.write(rows)
        written.note(rows)
        yield features


def _outputs(
    model: nn.Module, layers: ExtractorPerImage | None, source: Source, precision: Precision, config: Predict
) -> Iterator[tuple[Tensor, list[Row], dict[str, Tensor]]]:
    """Outputs of the images that could be read, float32 on the CPU, with what their rows begin with, and features."""
    loader = source.loader
    batches = math.ceil(loader.samples / loader.batch_size)
    with evaluating(model):
        for batch in loader.batches(0, 0, batches):
            with precision.autocast():
                outputs = model(batch.images).float().cpu()
                features = layers(batch.images) if layers is not None else {}
            indices, targets = batch.indices.tolist(), batch.targets.tolist()
            unreadable = source.unreadable()
            if config.strict and unreadable:
                raise UserError(
                    f"input: {unreadable[min(unreadable)]}\n    allowed: strict=false, which lists such images and goes on"
                )
            kept = [place for place, index in enumerate(indices) if index not in unreadable]
            if kept:
                subjects = [source.subject(indices[place], targets[place]) for place in kept]
                yield outputs[kept], subjects, {name: tensor[kept] for name, tensor in features.items()}


def _output_file(config: Predict) -> Path:
    if config.output is None:
        return claim(Path(config.output_root) / "predictions", timestamp()) / "predictions.csv"
    path = Path(config.output)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _tell(record: dict[str, Any], written: Written, console: Console) -> None:
    if written.tell is not None and written.first:
        columns = [name for name, value in written.first[0].items() if not isinstance(value, list)]
        rows = [[_shown(row[name]) for name in columns] for row in written.first]
        more = f", the first {len(rows)}" if written.count > len(rows) else ""
        console.table(f"{written.count:,} predicted{more}", columns, rows)
    unreadable = record["unreadable"]
    if unreadable:
        count = len(unreadable)
        console.warn(f"{count:,} image{' was' if count == 1 else 's were'} not predicted, as they could not be read:")
        for reason in unreadable[:_SHOWN]:
            console.line(f"  {_one_line(reason)}")
        if count > _SHOWN:
            console.line(f"  and {count - _SHOWN:,} more: {record['unreadable_list']}")
    rate = compact(record["images_per_s"])
    console.line(f"{written.count:,} images in {record['seconds']:.2f} s, {rate} images/s with reading and writing")
    if written.tell is not None:
        for path in filter(None, (record["output"], record["features"])):
            written.tell(path)


def _one_line(reason: str) -> str:
    """A reason without the line ends and other controls that a file's name may hold."""
    return " ".join(clean(reason).encode("utf-8", "backslashreplace").decode().split())


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
