"""The config of a checkpoint with the command line on top.

Whom to trust, where to read, write and send, and how long to run come from the command line only, never from a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.reading import is_url
from runner.config import keys, stored
from runner.config.allowed_targets import not_packages, packages_in, refusal, remedy, section_of
from runner.config.changes import other_run
from runner.config.composition import Composition
from runner.config.frozen import to_plain
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.config.space import text_of
from runner.config.targets import FACTS, targets_in
from runner.config.validate import shown, typed

PREPARATION = ("image_size", "normalize")
"""Keys of `data` that trained weights of a model can ask for."""

_OF_THE_CALL = (
    "trust", "output_root", "ckpt_path", "resume", "max_time", "post_mortem", "dry_run", "slurm", *keys.OF_THE_SWEEP
)  # fmt: skip
# Fetching writes to disk, so the command line decides.
_FETCHING = ("data.download", "data.dataset.download")
# The largest numbers, and the most items of a list, that a file may have in these sections. They multiply processes, memory
# or time. How large a model can be in all is bounded where it is built.
_MOST = {
    "devices": 1024, "threads": 1024, "max_restarts": 1024, "fsdp.replicas": 1024, "dist.timeout_s": 10**6, "epochs": 10**7,
    "max_steps": 10**12, "accumulate": 2**20, "data.num_workers": 128, "data.prefetch": 128, "data.image_size": 2**14,
    "data.batch_size": 2**20, "evaluate.batch_size": 2**20, "data.split.folds": 10**4, "checkpoint.keep": 10**4,
    "data.dataset.classes": 2**20, **dict.fromkeys(("model", "transform", "loss", "task", "metrics"), 2**22),
}  # fmt: skip
_WEIGHED = ("loss", "task")  # where floats weigh terms of a loss, which may be large
_LONGEST_NAME = 200
_NOT_OPENED = ("name", "tags", "notes", "logger")  # texts for people, and loggers, of which none that sends is kept


def merge_with_checkpoint(
    text: str, where: str, composition: Composition, builds: Sequence[str] | None = None
) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The config of a checkpoint with the command line on top, and what that changed.

    `builds` are the sections whose components will be built, None for all: others may name anything, as nobody imports it.

    Raises:
        ConfigError: if the file names something to build that is neither allowed nor trusted.
    """
    # What was stored comes first, and the command line changes it
    original = stored.load(text, where)
    values = stored.overlay(original, composition)
    _keep_found(original, values, composition)
    rate = values.get("lr")
    if isinstance(rate, int | float) and rate is not True and rate > 0 and not two_rates(values, composition.overrides):
        # The file has it under `optimizer.lr`, so that the same rate is not a change.
        _at(values, "optimizer")["lr"], values["lr"] = float(rate), None
    # Keys of the call say how this command works, and never come from a file
    values |= {key: composition.values[key] for key in _OF_THE_CALL}
    # A file must not make this machine download anything
    _fetch_nothing(values, composition.values)
    if problems := _refused(values, composition, builds):
        raise ConfigError([dataclasses.replace(problem, origin=problem.origin or where) for problem in problems])
    _fetch_nothing(original, composition.values)  # which is not a change of the user's
    # Loggers of a file could send data elsewhere, so only those of the command line may
    if "logger" in values:
        values["logger"] = _own_loggers(_at(values, "logger"), composition.values["logger"])
    changed = stored.differences(original, values)
    return values, [found for found in changed if not keys.within(found[0], (*_OF_THE_CALL[2:], *_FETCHING))]


def settings_changed(text: str, where: str, values: dict[str, Any], composition: Composition) -> list[str]:
    """Keys in which a stored config is that of another run than `values`, those of a command line; what a run finds is none."""
    # The typed config has keys that an older version did not know
    config, _ = typed(Train, stored.load(text, where))
    original = to_plain(config) if config else {}
    given = ["data.image_size", *(["data.normalize"] if _at(values, "data.normalize").get("mean") else [])]
    _keep_found(original, values, dataclasses.replace(composition, overrides=[*composition.overrides, *given]))
    return [key for key, _, _ in stored.differences(original, values) if other_run(key)]


def _own_loggers(loggers: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The loggers that write into the run directory; of those that may send elsewhere, the ones that the user has, too."""
    found = dict[str, Any]()
    for name, node in loggers.items():
        target = node.get("_target_") if isinstance(node, dict) else None
        if keys.within(str(target), ["runner.tracking.loggers"]):
            found[name] = node
        elif isinstance(own.get(name), dict) and own[name].get("_target_") == target:
            found[name] = copy.deepcopy(own[name])
    return found


def _at(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a dotted key; an empty one if a file has something else there."""
    inner = keys.at(values, key)
    return inner if isinstance(inner, dict) else {}


def _keep_found(original: dict[str, Any], values: dict[str, Any], composition: Composition) -> None:
    """Keep what was found or measured for a component that the command line selects again without saying otherwise."""

    def same(section: str) -> bool:
        return bool(_at(original, section).get("_target_") == _at(values, section).get("_target_"))

    # Facts from the data are kept while their component stays the same
    for section, names in FACTS.items():
        before, after = _at(original, section), _at(values, section)
        if same(section):
            after |= {name: before.get(name) for name in names if name in after and after[name] is None}
    before, after = _at(original, "data.split"), _at(values, "data.split")
    if same("data.dataset") and after.get("test") is None and not says("data.split.test", composition.overrides):
        after["test"] = before.get("test")
    # A batch size that was found is part of the run, so it is not searched again
    before, after = _at(original, "data"), _at(values, "data")
    if before and after.get("batch_size") == "auto":
        after["batch_size"] = before.get("batch_size")
    for name in PREPARATION if same("model") and same("data.dataset") else ():
        if name in before and not says(f"data.{name}", composition.overrides):
            after[name] = copy.deepcopy(before[name])


def _refused(values: dict[str, Any], composition: Composition, builds: Sequence[str] | None) -> list[Problem]:
    """Problems of what a file asks for: a name outside `output_root`, numbers that are too large, addresses, strange targets."""
    # A name with .. or an absolute path could write anywhere
    name, composed, problems = str(values.get("name")), composition.values, list[Problem]()
    path = PurePath(name)
    inside = path.parts and not path.is_absolute() and ".." not in path.parts and name.isprintable()
    if name != str(composed["name"]) and not (inside and len(name) <= _LONGEST_NAME):
        allowed = "a short name without .. and control characters, given on the command line: name=..."
        problems.append(Problem("name", f"cannot be {shown(name)}", allowed))
    # Large numbers cost memory or time before anyone notices
    for section, most in _MOST.items():
        for key, value in keys.walk(keys.at(values, section), section):
            number = len(value) if isinstance(value, list) else value
            multiplies = isinstance(number, int if section in _WEIGHED else int | float)
            if multiplies and number > most and value != keys.at(composed, key):
                what = f"{len(value):,} items" if isinstance(value, list) else shown(value)
                allowed = f"at most {most:,}, or {key}=... on the command line"
                problems.append(Problem(key, f"cannot be {what}, as it comes from a file", allowed))
    # A file must not make this machine send requests
    for key, value in keys.walk(values):
        used = not keys.within(key, _NOT_OPENED) if builds is None else keys.within(key, builds)
        if used and isinstance(value, str) and is_url(value) and value != keys.at(composed, key):
            whole = re.sub(r"\.\d+(\..*)?$", "", key)  # an override sets no single item of a list
            word = shlex.quote(f"{whole}={text_of(keys.at(values, whole))}")
            allowed = f"the same on the command line, if this machine may send requests there: {word}"
            problems.append(Problem(key, f"is the address {shown(value)}, which a file cannot choose", allowed))
    # Only the command line and the environment extend what is trusted
    trust = [*packages_in(composed["trust"]), *packages_in(os.environ.get("RUNNER_TRUST", ""))]
    problems += [Problem(*wrong, origin="trust") for wrong in not_packages(trust)]
    # The command line allows a target only in the section that names it: a data set is not a loss.
    named = {(section_of(key), path) for key, path in targets_in(composed)}
    for key, target in targets_in(values):
        if builds is not None and not keys.within(key, builds):
            continue
        section = section_of(key)
        if (section, target) not in named and (reason := refusal(target, trust, section)):
            problems.append(Problem(f"{key}._target_", f"'{target}' {reason}", remedy(target, trust, section)))
    return problems


def _fetch_nothing(values: dict[str, Any], composed: dict[str, Any]) -> None:
    """Let a config from a file fetch data only if the command line does, too: fetching writes into the folder it names."""
    data, own = _at(values, "data"), _data_of(composed)
    data["download"] = own["download"]
    dataset = _at(values, "data.dataset")
    if dataset != own["dataset"]:
        for _, node in keys.walk(dataset):
            if isinstance(node, dict) and node.get("download"):
                node["download"] = node is dataset and own["download"]


def _data_of(composed: dict[str, Any]) -> dict[str, Any]:
    """The data of a command line; keys that a custom option does not have get their defaults."""
    found: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Data)}
    return {**found, "dataset": {}, **composed["data"]}


def may_write_cache(config: Train, composition: Composition) -> bool:
    """Tell whether `data.cache` would write to a folder that the command line names, or to the default one.

    A config from a checkpoint must not choose a folder that is written to.
    """
    data, own = config.data, _data_of(composition.values)
    if own["cache_dir"] is not None:
        return data.cache_dir == str(own["cache_dir"])
    folders = (data.root, data.cache_dir, data.dataset.get("root"))
    return folders == (str(own["root"]), None, own["dataset"].get("root"))


def says(key: str, words: Sequence[str]) -> bool:
    """Tell whether a command line names a key, or one inside it."""
    return any(keys.within(keys.key_of(word), [key]) for word in words)


def two_rates(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """A problem if the command line gives both `lr` and `optimizer.lr`."""
    named = {keys.key_of(word): word.partition("=")[2] for word in words}
    if values.get("lr") is None or named.get("lr", "null") == "null" or "optimizer.lr" not in named:
        return []
    return [Problem("lr", f"is {named['lr']}, and optimizer.lr is given too", "one of them")]
