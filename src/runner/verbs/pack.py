"""`pack`: the images of a data set in tar files."""

from __future__ import annotations

import math
import multiprocessing
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.base.cores import cores
from runner.base.errors import DataFailed, UserError
from runner.base.files import write_atomically, write_json, writing
from runner.base.reading import is_url, read_json
from runner.config.composition import Composition
from runner.config.schema.sections import Data, Split
from runner.config.schema.verbs import Pack
from runner.config.validate import shown
from runner.data.cache import recipe_of
from runner.data.module import read_datasets
from runner.data.packing import Packer
from runner.data.preparation import exclusive
from runner.data.samples import as_tensor
from runner.data.sources.folders import ImageList
from runner.data.sources.masks import MaskFolder
from runner.data.sources.shards import MANIFEST
from runner.data.splits import make_splits
from runner.launch.processes import end_with_parent
from runner.run.from_checkpoint import config_and_checkpoint
from runner.sweeps.run import quoted
from runner.tracking.formats import amount
from runner.tracking.verb_report import Report

_RULES = 1  # to be raised when the same data and options give other bytes
_SHOWN = 5  # reasons why images were skipped


def run(composition: Composition) -> float:
    """Pack the data; returns the number of shards, for sweepers."""
    config, _ = config_and_checkpoint(composition, Pack)
    report, data = Report(config.json), config.data
    if config.output is None:
        raise UserError("output", "is missing", "a folder for the shards")
    if is_url(config.output):
        raise UserError("output", f"is {config.output}", "a folder, which you can upload")
    # Splits that the data set does not have are made when training begins, from shards as from any data
    parts = make_splits(read_datasets(data), Split(val=0.0, test=0.0))
    report.warnings(*(getattr(dataset, "warnings", ()) for dataset, _ in parts.values()))
    folder = Path(config.output).expanduser()
    packer = Packer(parts, folder, config)
    if data.images is not None and packer.target == "class":
        problem = "the samples are more than an image and its class number, and not of the data sets of masks and boxes"
        raise UserError("data", problem, "such as data=image_folder, segmentation_folder, coco or yolo")
    with writing(folder, "output", "a writable folder"), exclusive(folder / MANIFEST) as locked:
        manifest = _begin(packer, clean=locked)
        try:
            skipped = _write(packer, report)
        finally:
            if locked:
                _remove_temporary(folder)
        shards, counts = packer.shards(), {split: len(indices) for split, (_, indices) in parts.items()}
        samples = {split: sum(packer.samples(*each) or 0 for each in shards if each[0] == split) for split in parts}
        if missing := sum(counts.values()) - sum(samples.values()):
            report.warn(f"{amount(missing, 'image')} skipped, as they cannot be read")
            report.lines(*(f"  {reason}" for reason in skipped[:_SHOWN]))
        for split, count in counts.items():
            if (lost := count - samples[split]) > min(math.ceil(data.max_skipped * count), count - 1):
                problem = f"is {shown(data.max_skipped)}, and {lost:,} of {count:,} images cannot be read in '{split}'"
                raise UserError("data.max_skipped", problem, "more if some can be read, or others in another output")
        write_json(folder / MANIFEST, manifest | {"samples": samples})
    packed, size = sum(samples.values()), sum(packer.path(*shard).stat().st_size for shard in shards)
    command = shlex.join(["python", "-m", "runner", "train", *_training_words(packer, data)])
    record = {"shards": len(shards), "samples": packed, "bytes": size, "skipped": missing, "command": command}
    if not report.json(record, output=str(folder)):
        report.line(f"{amount(len(shards), 'shard')}, {packed:,} samples, {size / 2**20:,.2f} MiB; {command}")
        report.folder(folder)
    return float(len(shards))


def _begin(packer: Packer, clean: bool) -> dict[str, Any]:
    """Prepare the folder, or compare it with what is to be packed; returns what the bytes of the shards depend on."""
    config, folder, path = packer.config, packer.folder, packer.folder / MANIFEST
    for split in packer.parts:  # data that cannot be packed are refused before anything is written
        packer.attempt(split, 0)
    if config.max_side and any(getattr(dataset, "has_encodings", False) for dataset, _ in packer.parts.values()):
        problem = "is set, and an outline is a run-length encoding, which cannot be resized"
        raise UserError("max_side", problem, "null, or data.dataset.masks=false")
    classes = [str(name).encode(errors="replace") for name in getattr(packer.parts["train"][0], "classes", ())]
    # Names that a list of lines cannot hold are left to be numbers
    named = len(set(classes)) == len(classes) > 0 and not set(b"\r\n") & set(b"".join(classes))
    if packer.target != "class" and not named:
        raise UserError("data.dataset", "has two classes of one name, or a name of several lines")
    options = {key: getattr(config, key) for key in ("shard_samples", "max_side", "quality", "seed")}
    manifest = {"rules": _RULES, **options, "data": packer.fingerprint(recipe_of(config.data))}
    begun = read_json(path) or {}
    if path.exists():
        for key, value in options.items():
            if begun.get(key) != value:
                problem = f"is {shown(value)}, and {folder} was begun with {shown(begun.get(key))}"
                raise UserError(key, problem, f"{shown(begun.get(key))}, or another output")
        if any(begun.get(key) != manifest[key] for key in ("rules", "data")):
            problem = f"{folder} was begun with other data, or other settings or versions of what reads them"
            raise UserError("output", problem, "another folder, or this one removed")
    elif any(not found.name.startswith(".") for found in folder.iterdir()):
        raise UserError("output", f"{folder} has other files", "a folder that is new or empty, or that pack has begun")
    # The first file: from now on, the folder is one of this pack
    write_json(path, manifest | {"samples": None})
    if clean:
        _remove_temporary(folder)  # of a killed pack
    for split in packer.parts:
        (folder / split).mkdir(exist_ok=True)
    if named:
        write_atomically(folder / "classes.txt", b"".join(name + b"\n" for name in classes))
    return manifest


def _remove_temporary(folder: Path) -> None:
    for left in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        left.unlink(missing_ok=True)


def _write(packer: Packer, report: Report) -> list[str]:
    """Write the shards that are not finished; returns why images were skipped."""
    skipped, shards = [], packer.shards()
    todo = [shard for shard in shards if packer.samples(*shard) is None]
    if len(todo) < len(shards):
        report.line(f"{len(shards) - len(todo):,} of {amount(len(shards), 'shard')} are finished already")
    done, count = len(shards) - len(todo), min(packer.config.workers or cores(), max(1, len(todo)))
    try:
        with report.counting("pack", len(todo)) as begin, _workers(packer, count) as pool:
            begin()
            for future in as_completed([pool.submit(_write_shard, shard) for shard in todo]):
                skipped += future.result()
                done += 1
                begin()
    except KeyboardInterrupt:
        report.warn(f"interrupted with {done:,} of {amount(len(shards), 'shard')}; the same command goes on")
        raise
    except BrokenProcessPool as error:
        problem = "a process that packs was killed, which is often a lack of memory"
        raise DataFailed("workers", problem, "fewer; the same command goes on") from error
    return skipped


@contextmanager
def _workers(packer: Packer, count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the data sets; an error ends them, and a shard that they have begun has no name yet."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _start_worker, (packer,))
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_packer: Packer  # of this worker


def _start_worker(packer: Packer) -> None:
    global _packer
    _packer = packer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    torch.set_num_threads(1)
    end_with_parent()


def _write_shard(shard: tuple[str, int]) -> list[str]:
    return _packer.write(*shard)


def _training_words(packer: Packer, data: Data) -> list[str]:
    """The words of `train` for the shards: what their option does not have as the data set has it."""
    dataset = packer.parts["train"][0]
    if isinstance(dataset, ImageList | MaskFolder):
        channels, size = dataset.decoding.channels, data.image_size
    else:
        channels, height, width = as_tensor(dataset[0][0]).shape
        size = height if height == width else None
    words = ["data=shards", f"data.root={quoted(packer.folder)}"]
    values: dict[str, Any] = {"image_size": size}
    if channels != 3:
        values |= {"dataset.channels": channels, "normalize.mean": None, "normalize.std": None}
    if packer.target != "class":
        values |= {"dataset.target": packer.target, "images": data.images, "batch_size": data.batch_size}
        values |= {"hflip": data.hflip, "normalize.mean": data.normalize.mean, "normalize.std": data.normalize.std}
    return words + [f"data.{key}={shown(value)}" for key, value in values.items()]
