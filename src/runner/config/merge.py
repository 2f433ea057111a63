"""The config of a checkpoint with the command line on top.

Whom to trust, where to read and write, and how long to run come from the command line only, never from a checkpoint.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from runner.config import keys, stored
from runner.config.allowed_targets import refusal, remedy, section_of
from runner.config.composition import Composition
from runner.config.errors import ConfigError, Problem
from runner.config.schema.train import Train
from runner.config.targets import targets_in
from runner.config.validate import shown

# Arguments that the program adds where a component's signature names them.
FACTS: dict[str, tuple[str, ...]] = {
    "data.dataset": ("root", "download", "image_size", "max_pixels"),
    "model": ("in_channels", "image_size", "num_classes"),
    "loss": ("num_classes", "class_counts"),
    "task": ("num_classes",),
    "scheduler": ("total_steps", "steps_per_epoch", "mode", "clock"),
    "metrics": ("num_classes", "task"),
    "callbacks": ("monitor", "mode"),
    "logger": ("warn",),
    "optimizer": ("foreach", "fused"),
}
PREPARATION = ("image_size", "normalize")
"""Keys of `data` that trained weights of a model can ask for."""

_FETCHING = ("data.download", "data.dataset.download")  # fetching writes to disk, so the command line decides
_OF_THE_CALL = ("trust", "output_root", "ckpt_path", "resume", "max_time", "post_mortem")
_MOST = 1024  # threads or processes that a file may ask for
_LONGEST_NAME = 200


def merge_with_checkpoint(
    text: str, where: str, composition: Composition
) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The config of a checkpoint with the command line on top, and what that changed.

    Raises:
        ConfigError: if the file names something to build that is neither allowed nor trusted.
    """
    original = stored.load(text, where)
    values = stored.overlay(
        original, composition.values, composition.overrides, composition.group_choices, composition.sources
    )
    _keep_facts(original, values)
    _keep_preparation(original, values, composition.overrides)
    _keep_found_rates(original, values, composition)
    if not two_rates(values, composition.overrides):
        _use_number(values)
    for key in _OF_THE_CALL:
        values[key] = composition.values[key]
    _fetch_nothing(values, composition.values)
    problems = [*_too_many(values, composition.values, where), *_outside(values, composition.values, where)]
    trust = [*composition.values["trust"], *filter(None, os.environ.get("RUNNER_TRUST", "").split(","))]
    # The command line allows a target only in the section that names it: a data set is no loss.
    named = {(section_of(key), path) for key, path in targets_in(composition.values)}
    for key, path in targets_in(values):
        section = section_of(key)
        reason = "" if (section, path) in named else refusal(path, trust, section)
        if reason:
            fix = remedy(path, trust, section)
            problems.append(Problem(f"{key}._target_", f"'{path}' {reason}", fix, origin=where))
    if problems:
        raise ConfigError(problems)
    _fetch_nothing(original, composition.values)
    changed = stored.differences(original, values)
    return values, [difference for difference in changed if difference[0] not in (*_OF_THE_CALL[2:], *_FETCHING)]


def _fetch_nothing(values: dict[str, Any], composed: dict[str, Any]) -> None:
    """Let a config from a file fetch data only if the command line does, too: fetching writes into the folder it names."""
    data, own = values.get("data"), composed["data"]
    if not isinstance(data, dict):
        return
    data["download"] = own["download"]
    dataset, chosen = data.get("dataset"), own["dataset"]
    if isinstance(dataset, dict) and dataset != chosen:
        if dataset.get("download"):
            dataset["download"] = own["download"]
        for inner in [value for name, value in dataset.items() if name != "download"]:
            _download_nothing(inner)


def _download_nothing(value: Any) -> None:
    """Turn off every `download` in nested values."""
    if isinstance(value, dict) and value.get("download"):
        value["download"] = False
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _download_nothing(inner)


def _outside(values: dict[str, Any], composed: dict[str, Any], where: str) -> list[Problem]:
    """A problem if the run's name in a file, a folder below `output_root`, leads out of it."""
    name = str(values.get("name"))
    path = PurePath(name)
    inside = path.parts and not path.is_absolute() and ".." not in path.parts and name.isprintable()
    if name == str(composed["name"]) or (inside and len(name) <= _LONGEST_NAME):
        return []
    allowed = "a short name without .. and control characters, given on the command line: name=..."
    return [Problem("name", f"cannot be {shown(name)}", allowed, origin=where)]


def _too_many(values: dict[str, Any], composed: dict[str, Any], where: str) -> list[Problem]:
    """A problem for each number of threads or processes in a file that would overload a machine."""
    own, after = keys.flatten(composed), keys.flatten(values)
    return [
        Problem(
            key,
            f"cannot be {shown(after[key])}, as it comes from a file",
            f"{_MOST}, or {key}=... on the command line",
            origin=where,
        )
        for key in ("threads", "data.num_workers")
        if isinstance(after.get(key), int) and after[key] > _MOST and after[key] != own.get(key)
    ]


def may_write_cache(config: Train, composition: Composition) -> bool:
    """Whether `data.cache` would write to a folder that the command line names, or to the default one.

    A config from a checkpoint must not choose a folder that is written to.
    """
    data, own = config.data, composition.values["data"]
    if own["cache_dir"] is not None:
        return data.cache_dir == str(own["cache_dir"])
    folders = (data.root, data.cache_dir, data.dataset.get("root"))
    return folders == (str(own["root"]), None, own["dataset"].get("root"))


def _keep_facts(original: dict[str, Any], values: dict[str, Any]) -> None:
    """Keep facts from the data if the command line selects the same component again and leaves them null."""
    for section, names in FACTS.items():
        before, after = original.get(section), values.get(section)
        if not isinstance(before, dict) or not isinstance(after, dict):
            continue
        if before.get("_target_") == after.get("_target_"):
            after |= {name: before.get(name) for name in names if name in after and after[name] is None}
    before, after = original.get("data"), values.get("data")
    if isinstance(before, dict) and isinstance(after, dict) and after.get("batch_size") == "auto":
        after["batch_size"] = before.get("batch_size")


def _keep_preparation(original: dict[str, Any], values: dict[str, Any], words: Sequence[str]) -> None:
    """Keep how images are prepared if the command line selects the same data again without saying how."""
    before, after = original.get("data"), values.get("data")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    if _target(original.get("model")) != _target(values.get("model")):
        return
    if _target(before.get("dataset")) != _target(after.get("dataset")):
        return
    for name in PREPARATION:
        if name in before and not says(f"data.{name}", words):
            after[name] = copy.deepcopy(before[name])


def _target(section: Any) -> Any:
    return section.get("_target_") if isinstance(section, dict) else None


def _keep_found_rates(original: dict[str, Any], values: dict[str, Any], composition: Composition) -> None:
    """Keep the rates that `lr=auto` found if the command line selects the same optimizer again.

    Rates on the command line win, unless it is the command that the rates were found with.
    """
    before, after = original.get("optimizer"), values.get("optimizer")
    if values.get("lr") != "auto" or not isinstance(before, dict) or not isinstance(after, dict):
        return
    if _target(before) != _target(after):
        return
    words = [] if composition.values["resume"] == "auto" else composition.overrides
    for name, rate in before.items():
        if (name == "lr" or name.endswith("_lr")) and not says(f"optimizer.{name}", words):
            after[name] = rate


def _use_number(values: dict[str, Any]) -> None:
    """Move a number under `lr` to `optimizer.lr`, where the file has it, so that the same rate is no change."""
    rate, optimizer = values.get("lr"), values.get("optimizer")
    if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0 and isinstance(optimizer, dict):
        optimizer["lr"], values["lr"] = float(rate), None


def says(key: str, words: Sequence[str]) -> bool:
    """Whether a command line names a key, or one inside it."""
    return any(given == key or given.startswith(f"{key}.") for given in map(_key_of, words))


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def two_rates(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """A problem if the command line gives both `lr` and `optimizer.lr`."""
    named = {word.split("=")[0].lstrip("+"): word.partition("=")[2] for word in words}
    if values.get("lr") is None or named.get("lr", "null") == "null" or "optimizer.lr" not in named:
        return []
    return [Problem("lr", f"is {named['lr']}, and optimizer.lr is given too", "one of them")]
