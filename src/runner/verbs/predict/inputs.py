"""The samples that `input` means: files, folders, patterns, or a split of the data."""

from __future__ import annotations

import contextlib
import functools
import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from runner.base.errors import UserError, nearest_path
from runner.config.schema.verbs import Predict
from runner.data.bad_samples import BadSamples, path_of
from runner.data.loaders import Loader
from runner.data.module import callables
from runner.data.sources.image_files import files_loader, samples_loader
from runner.data.sources.listing import EXTENSIONS, folders_below, images_below
from runner.run.from_checkpoint import SPLITS, ResolvedCheckpoint, activation_of, as_list, class_names, split_of
from runner.run.model import KnownData, build_task
from runner.tracking.verb_report import Report
from runner.verbs.predict.rows import Row, labels_of, numbered

INPUTS = "images, folders, patterns such as photos/*.jpg, or a split: train, val or test"
_PATTERN = frozenset("*?[")
_BATCH = 64  # files of a batch: each worker decodes one batch at a time, and all should have some to do


@dataclass
class Source:
    """Samples to predict, and what is known of each."""

    data: KnownData  # what the model has to know of them
    loader: Loader  # gives them in batches
    first_cells: Callable[[int, Any], Row]  # the first cells of a sample's row, from its number and its target
    found: Callable[[], dict[int, str]]  # the samples that this rank could not read so far, by number, with the reason


@contextlib.contextmanager
def opened(resolved: ResolvedCheckpoint[Predict], device: torch.device, report: Report) -> Iterator[Source]:
    """The samples that `input` names, while their workers run; only a split needs the data set."""
    words = as_list(resolved.config.input)
    if (name := split_in(words)) is None:
        paths = files_in(words)
        loader, unreadable = _files(resolved, paths, device)
        with contextlib.closing(loader):
            facts, found = resolved.data_facts(), functools.partial(unreadable.reasons, "input")
            yield Source(facts, loader, lambda index, _: {"path": str(paths[index])}, found)
        return
    if Path(name).is_dir():
        report.warn(f"input={name} is the split of the data; input=./{name} is the folder of that name")
    with contextlib.closing(resolved.data(device)) as data:
        loader = split_of(data, name, "input").loader
        report.warnings(text for text in data.warnings if text.startswith("data.image_size"))
        task = build_task(resolved.config, data, fetch_weights=False)
        classes, activation, (dataset, _) = class_names(resolved, task), activation_of(task), data.parts[name]

        def first_cells(index: int, target: Any) -> Row:
            file = path_of(dataset, index)
            cells: Row = {"sample": index} if file is None else {"sample": index, "path": file}
            if target is None:
                return cells
            if isinstance(target, list):
                if activation == "sigmoid":
                    return cells | {"target": labels_of(classes, target, 0.5)}
                if activation is None:
                    return cells | numbered("target", target)
                target = max(range(len(target)), key=target.__getitem__)
            is_class = isinstance(target, int) and 0 <= target < len(classes)
            return cells | {"target": classes[target] if is_class else target}

        yield Source(data, loader, first_cells, functools.partial(data.bad_samples.reasons, name))


def _files(resolved: ResolvedCheckpoint[Predict], paths: list[Path], device: torch.device) -> tuple[Loader, BadSamples]:
    """A loader of image files, and those that cannot be read."""
    config, data, unreadable = resolved.config, resolved.data_facts(), BadSamples()
    if config.data.images is not None:
        return samples_loader(config, device, paths)
    batch_size_given = any(word.startswith("evaluate.batch_size=") for word in resolved.words)
    loader = files_loader(
        paths,
        config.data,
        transforms=callables("transform.sample_eval", config.transform.sample_eval),
        shape=(data.channels, *data.image_size),
        prepare=resolved.input_pipeline(device, getattr(torch, config.dtype)),
        device=device,
        batch_size=config.evaluate.batch_size if batch_size_given else min(_BATCH, config.evaluate.batch_size),
        on_unreadable=unreadable.noting("input", SimpleNamespace(path=paths.__getitem__), len(paths)),
    )
    return loader, unreadable


def split_in(words: Sequence[str]) -> str | None:
    """The split of the data that `input` names, if it names one."""
    named = [word for word in words if word in SPLITS]
    if named and len(words) > 1:
        allowed = f"input={named[0]} alone, or ./{named[0]} for a folder of that name"
        raise UserError("input", f"'{named[0]}' is a split of the data and cannot be mixed with others", allowed)
    return named[0] if named else None


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
        # What cannot be read is listed as such
        return sorted([*images_below(path, unread := list[Path]()), *unread])
    if path.exists() or path.is_symlink():
        return [path]
    if _PATTERN & set(word):
        matches = set(_matches(path))
        return sorted(match for match in matches if match.suffix.lower() in EXTENSIONS and not match.is_dir())
    raise UserError("input", f"there is no {path}", INPUTS, nearest_path(path))


def _matches(pattern: Path) -> Iterator[Path]:
    """The matches of a pattern. `glob` does not get the `**`, as it would follow a link to a folder above without end."""
    parts = pattern.parts
    if "**" not in parts:
        # Path.glob does not take an absolute pattern.
        yield from (Path(match) for match in glob.glob(str(pattern)))  # noqa: PTH207
        return
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    for start in _matches(Path(*parts[:place])) if place else [Path()]:
        for folder, _ in folders_below(start) if start.is_dir() else ():
            yield from _matches(Path(glob.escape(folder), *rest))
