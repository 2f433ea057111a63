"""One call of `inspect`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import write_json
from runner.base.secrets import mask_words
from runner.checkpoint import find, resume
from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.rules import never_evaluates
from runner.config.schema.sections import Transform, components_of
from runner.config.schema.verbs import FEATURE_FILES, Inspect
from runner.engine.plan import Position
from runner.engine.step import Supervised
from runner.instrument.no_trace import evaluating
from runner.lab.inspect.parts import PARTS, Inspection, batches_of, shape_text
from runner.models.features import Extractor, write_features
from runner.run import from_checkpoint
from runner.run.describe import describe
from runner.run.from_checkpoint import ResolvedCheckpoint, output_folder, resolve_checkpoint
from runner.run.model import model_of
from runner.run.run import Run
from runner.tracking.formats import compact
from runner.tracking.verb_report import Report
from runner.train import build_run


def run(composition: Composition) -> float:
    """Inspect a model; returns the number of parameters, for sweepers."""
    resolved: ResolvedCheckpoint[Inspect] | None = None
    if composition.values.get("ckpt_path") is None:
        config = resolve_config(composition, Inspect)
    else:
        resolved = resolve_checkpoint(composition, Inspect, from_checkpoint.MODEL)
        config = _without_data(resolved) or resolve_checkpoint(composition, Inspect).config
    found = resolved.found if resolved else None
    report = Report(config.json)
    # A model is inspected without what only updates it; whatever else the config names is not even imported.
    update = {"_target_": "torch.optim.SGD", "lr": 0.0}
    names = [key.partition(".")[2] for key in components_of("optimizer", config.optimizer)]
    # Compiled code calls no hooks, and what is computed again in backward would be observed twice.
    plain = dataclasses.replace(
        config,
        compile=False,
        activation_checkpointing=False,
        optimizer=update if names == [""] else dict.fromkeys(names, update),
        scheduler={"_target_": "runner.optim.schedules.Constant", "total_steps": None},
    )
    # Batches are those of the epoch that the checkpoint stands in, from its beginning.
    start = dataclasses.replace(resume.made_of(found, "position", Position), batch=0) if found else None
    training = build_run(plain, start, make_cache=False)
    training.state.position = start or Position()  # which says what is frozen
    with contextlib.closing(training.data):
        training.data.bad_samples.open(report.warn)
        kind = ""
        if resolved is not None:
            if own := (resolved.config.data == config.data):
                from_checkpoint.check_classes(resolved.classes, training.data.classes)
            resolved.load_weights(training.model, training.task, training.loss if own else None)
            kind = resolved.weights[1]
        averaged = "" if kind in ("", "raw") else f", averaged weights ({kind})"
        where = f"{found.path}{averaged}" if found else "untrained"
        beside = [("weights", text, "")] if found and (text := find.beside(found.path)) else []
        report.header(f"{config.name}  seed {config.seed}  {where}", [*beside, *describe(plain, training)[:2]])
        report.warnings(found.warnings if found else [], training.warnings)
        record: dict[str, Any] = {
            "checkpoint": str(found.path) if found else None,
            "global_step": found.contents["position"]["global_step"] if found else 0,
            "weights_are": kind or None,
            "overrides": mask_words(composition.overrides),
        }
        folder = functools.partial(_folder, config, found, composition)
        if config.features:
            record |= _written_features(config, training, folder, report)
        if not config.features or config.what is not None:
            record |= _inspected(config, training, found, folder(), report)
        if said := training.data.bad_samples.summary():
            report.warn(said)
    if not report.json(record) and "folder" in record:
        report.folder(record["folder"])
    return float(sum(parameter.numel() for parameter in training.model.parameters()))


def _without_data(resolved: ResolvedCheckpoint[Inspect]) -> Inspect | None:
    """The config with blank images and a plain loss, if it asks for layers alone, which need no more; None otherwise."""
    config, images = resolved.config, resolved.found.contents["metrics"].get("images")
    if not (images and set(config.what or ()) == {"layers"} and not config.features and resolved.classes):
        return None
    blank = {"_target_": "torchvision.datasets.FakeData", "size": 64, "image_size": images}
    blank["num_classes"] = len(resolved.classes)
    data = dataclasses.replace(config.data, dataset=blank, batch_size=8, num_workers=0)
    loss = {"_target_": "torch.nn.CrossEntropyLoss"}
    return dataclasses.replace(config, data=data, transform=Transform(eval=config.transform.eval), loss=loss)


def _inspected(
    config: Inspect, training: Run, found: find.LoadedCheckpoint | None, folder: Path, report: Report
) -> dict[str, Any]:
    """Inspect the parts that the config names; returns the content of `inspect.json`."""
    plain = training.data.pairs and isinstance(training.steps, Supervised)
    need = "needs pairs of image and target, and a task without steps of its own"
    lacks = {} if plain else dict.fromkeys(("layers", "inputs", "features"), need)
    if not plain and not config.evaluate.test and never_evaluates(config):
        lacks["errors"] = "needs evaluations, and the run has none"
    what = [name for name in PARTS if (name in config.what if config.what else name != "errors" or found is not None)]
    skipped = [name for name in what if name in lacks]
    if skipped and config.what:
        raise UserError("what", f"{skipped[0]} {lacks[skipped[0]]}", "other parts")
    report.lines(*(f"{name}: {lacks[name]}" for name in skipped))
    what = [name for name in what if name not in lacks]
    seen, record = Inspection(config, training, folder, report, plain), dict[str, Any]()
    with report.counting("inspect", len(what)) as begin:
        for name in what:
            begin(name)
            record |= PARTS[name](seen)
    record = {"folder": str(folder), "what": what, **record, "files": [path.name for path in seen.files]}
    write_json(folder / "inspect.json", record, named=True)
    report.lines(*seen.files, folder / "inspect.json")
    return record


def _folder(config: Inspect, found: find.LoadedCheckpoint | None, composition: Composition) -> Path:
    """The folder of the results; a new one inside the checkpoint's run unless something else is asked for."""
    run = from_checkpoint.run_directory_of(found.path) if found is not None else None
    root, kind = (config.output_root, "inspections") if run is None else (str(run), "inspect")
    output = config.output if not config.features else None
    return output_folder(output, composition.job_dir or composition.run_dir, root, kind)


def _written_features(config: Inspect, training: Run, new_folder: Callable[[], Path], report: Report) -> dict[str, Any]:
    """Write features of a split, with the targets and the place of each sample in its data set."""
    if not training.data.pairs:
        raise UserError("features", "needs samples that are pairs of image and target", "[]")
    split = from_checkpoint.split_of(training.data, config.split)
    features = Extractor(model_of(training.model), config.features).rows
    folder, name = config.output, f"features_{config.split}.npz"
    if folder is not None and Path(folder).suffix in FEATURE_FILES:
        folder, name = str(Path(folder).parent), Path(folder).name
    path = (new_folder() if folder is None else output_folder(folder, None, "", "")) / name

    def batches() -> Iterator[dict[str, Tensor]]:
        with evaluating(training.model):
            for batch in batches_of(split, config.limit.eval_batches):
                with training.precision.autocast():
                    here = features(batch.images)
                yield {**here, "targets": batch.targets, "indices": batch.indices}

    shapes = write_features(batches(), path)
    rows = [[name, shape_text(shape), compact(math.prod(shape))] for name, shape in shapes.items()]
    report.table(f"features of {config.data.name} {config.split}", ["array", "shape", "elements"], rows)
    report.line(str(path))
    return {"features": {"file": str(path), "split": config.split, "shapes": {n: list(s) for n, s in shapes.items()}}}
