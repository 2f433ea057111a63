"""The config of a checkpoint with the command line on top.

Whom to trust, where to read, write and send, and how long to run come from the command line only, never from a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.config import keys, stored
from runner.config.changes import other_run
from runner.config.composition import Composition
from runner.config.frozen import to_plain
from runner.config.schema.train import Train
from runner.config.targets import FACTS
from runner.config.untrusted import fetch_nothing, own_loggers, problems_in_file
from runner.config.validate import typed

PREPARATION = ("image_size", "normalize")
"""Keys of `data` that trained weights of a model can ask for."""

_OF_THE_CALL = (
    "trust", "output_root", "ckpt_path", "resume", "max_time", "post_mortem", "dry_run", "slurm", *keys.OF_THE_SWEEP
)  # fmt: skip
# Fetching writes to disk, so the command line decides.
_FETCHING = ("data.download", "data.dataset.download")


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
    fetch_nothing(values, composition.values)
    if problems := [*problems_in_file(values, composition.values, builds)]:
        raise ConfigError([dataclasses.replace(problem, origin=problem.origin or where) for problem in problems])
    fetch_nothing(original, composition.values)  # which is not a change of the user's
    # Loggers of a file could send data elsewhere, so only those of the command line may
    if "logger" in values:
        values["logger"] = own_loggers(_at(values, "logger"), composition.values["logger"])
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


def says(key: str, words: Sequence[str]) -> bool:
    """Tell whether a command line names a key, or one inside it."""
    return any(keys.within(keys.key_of(word), [key]) for word in words)


def two_rates(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """A problem if the command line gives both `lr` and `optimizer.lr`."""
    named = {keys.key_of(word): word.partition("=")[2] for word in words}
    if values.get("lr") is None or named.get("lr", "null") == "null" or "optimizer.lr" not in named:
        return []
    return [Problem("lr", f"is {named['lr']}, and optimizer.lr is given too", "one of them")]
