"""Configs in files, and the command line on top of them.

A stored config is plain YAML: it is read with the safe loader into plain containers and never as a Hydra or OmegaConf
object, so that neither a tag nor an interpolation in it does anything. Whom to trust, where to read, write and send, and how
long to run come from the command line only, never from a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml

from runner.base.errors import ConfigError, UserError, nearest
from runner.base.secrets import mask_values, unmasked
from runner.config.changes import other_run
from runner.config.composition import Composition
from runner.config.gone import drop
from runner.config.keys import OF_THE_SWEEP, at, flatten, hints, put, says, to_plain, within
from runner.config.load import PREPARATION, problems_in, two_rates
from runner.config.overrides import parsed
from runner.config.schema.train import Train
from runner.config.sources import Sources, text_of
from runner.config.targets import FACTS
from runner.config.untrusted import fetch_nothing, own_loggers, problems_in_file
from runner.config.validate import shown, typed
from runner.config.yaml_files import plain

T = TypeVar("T", bound=Train)

_OF_THE_CALL = (
    "trust", "output_root", "ckpt_path", "resume", "max_time", "post_mortem", "json", "dry_run", "slurm", *OF_THE_SWEEP
)  # fmt: skip
# Fetching writes to disk, so the command line decides.
_FETCHING = ("data.download", "data.dataset.download")


def dump(config: Train | dict[str, Any]) -> str:
    """A config, or its plain form, as YAML text, secrets masked."""
    values = config if isinstance(config, dict) else to_plain(config)
    return yaml.dump(mask_values(values), Dumper=_WithoutAliases, sort_keys=False, default_flow_style=None, width=120)


class _WithoutAliases(yaml.SafeDumper):
    """Writes a value that occurs twice twice, as aliases are refused when reading."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load(text: str, where: str) -> dict[str, Any]:
    """YAML text as plain containers, without what is gone.

    Raises:
        UserError: if `text` is not a YAML mapping or asks for objects.
    """
    values = copy.deepcopy(plain(text, where))
    if not isinstance(values, dict):
        raise UserError(f"{where}: its config is not a mapping")
    drop(values)
    return values


def overlay(stored: dict[str, Any], composition: Composition) -> dict[str, Any]:
    """A stored config with the command line, composed without the file, laid on top.

    A selected group replaces the stored section as a whole; a preset sets the keys in its file; any other override sets
    its key. Everything else stays as stored. Secrets are not stored, and come from the call. Raises `UserError` for a
    key to delete that is not in the file, and is spelled much like one.
    """
    composed, choices, sources = composition.values, composition.group_choices, composition.sources
    groups = set(sources.groups())
    # Only keys that the command line names replace stored ones: its defaults are not the user's wish
    chosen, given = list[str](), list[str]()
    for override in parsed(composition.overrides):
        key, value = override.key_or_group, override.value()
        if isinstance(value, dict) and value:
            given += [f"{key}.{inner}" for inner in flatten(value)]
        elif key not in groups:
            given.append(key)
        elif not isinstance(value, dict):
            chosen += _keys_of_choice(key, choices.get(key), sources)
    # What is deleted may be gone already, but a name much like another one is a mistake; a job that continues made none
    for key in (word[1:] for word in composition.overrides if word.startswith("~") and not composition.resumes):
        section, _, name = key.rpartition(".")
        there = None if within(key, chosen) else at(stored, section)
        if isinstance(there, dict) and name not in there and (close := nearest(name, there)):
            raise UserError(key, "cannot be deleted, because it does not exist", "", f"{section}.{close}")
    merged = copy.deepcopy(stored)
    for key in (_of_mapping(composed, each) for each in (*chosen, *given)):
        put(merged, key, copy.deepcopy(at(composed, key)))
    restored: dict[str, Any] = unmasked(merged, composed)
    return restored


def _keys_of_choice(group: str, name: str | None, sources: Sources) -> list[str]:
    """The keys that selecting an option sets: its section, or for a preset the keys in its file."""
    option = sources.option(group, str(name)) if name else None
    if option is None or not option.is_global:
        return [group.replace("/", ".")]
    content = yaml.safe_load(text_of(option.path)) or {}
    found = []
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            for target, choice in entry.items():
                inner = str(target).removeprefix("override").strip().lstrip("/")
                found += _keys_of_choice(inner, choice, sources)
    content.pop("hydra", None)
    return found + list(flatten(content)) if content else found


def _of_mapping(values: dict[str, Any], key: str) -> str:
    """The dotted key, or that of the mapping around it if its own name has dots, as patterns of `optimizer.lr_mult` do."""
    parts = key.split(".")
    for end in range(1, len(parts) - 1):
        mapping = at(values, outer := ".".join(parts[:end]))
        if isinstance(mapping, dict) and ".".join(parts[end:]) in mapping:
            return outer
    return key


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose values differ, as (key, before, after); an absent one is shown as `-`."""
    old, new = flatten(mask_values(before)), flatten(mask_values(after))
    changed = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, ...) != new.get(key, ...):
            before_text, after_text = (shown(side[key]) if key in side else "-" for side in (old, new))
            changed.append((key, before_text, after_text))
    return changed


def resolve_with_checkpoint(
    text: str,
    where: str,
    composition: Composition,
    schema: type[T],
    *,
    normalize: Mapping[str, Any] | None = None,
    builds: Sequence[str] | None = None,
) -> tuple[T, list[tuple[str, str, str]]]:
    """The validated config of a checkpoint with the command line on top.

    Args:
        text: the config in the checkpoint, whose path is `where`.
        composition: the command line, which alone gives the keys that a verb adds to those of `train`.
        normalize: statistics of the images to use, unless the command line gives others; None for those of the result.
        builds: sections whose components will be built, None for all; others are not even imported.

    Returns:
        The config, and what the command line changed: see `differences`.

    Raises:
        ConfigError: with every problem there is.
    """
    values, changed = merge_with_checkpoint(text, where, composition, builds)
    # Statistics of the training data belong to the weights, so other data are normalised with them
    if normalize is not None and not says("data.normalize", composition.overrides):
        _section(values, "data")["normalize"] = dict(normalize)
    kind: type = schema
    values |= {key: composition.values[key] for key in hints(kind) if key not in hints(Train)}
    config, problems = problems_in(values, composition, schema, where=where, builds=builds)
    if problems or config is None:
        raise ConfigError(problems)
    return config, changed


def merge_with_checkpoint(
    text: str, where: str, composition: Composition, builds: Sequence[str] | None = None
) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The config of a checkpoint with the command line on top, and what that changed; arguments as above.

    Raises:
        ConfigError: if the file names something to build that is neither allowed nor trusted.
    """
    # What was stored comes first, and the command line changes it
    original = load(text, where)
    values = overlay(original, composition)
    _keep_found(original, values, composition)
    rate = values.get("lr")
    if isinstance(rate, int | float) and rate is not True and rate > 0 and not two_rates(values, composition.overrides):
        # The file has it under `optimizer.lr`, so that the same rate is not a change.
        _section(values, "optimizer")["lr"], values["lr"] = float(rate), None
    # Keys of the call say how this command works, and never come from a file
    values |= {key: composition.values[key] for key in _OF_THE_CALL}
    # A file must not make this machine download anything
    fetch_nothing(values, composition.values)
    if problems := [*problems_in_file(values, composition.values, builds)]:
        raise ConfigError([dataclasses.replace(problem, origin=problem.origin or where) for problem in problems])
    fetch_nothing(original, composition.values)  # which is not a change of the user's
    # Loggers of a file could send data elsewhere, so only those of the command line may
    if "logger" in values:
        values["logger"] = own_loggers(_section(values, "logger"), composition.values["logger"])
    changed = differences(original, values)
    return values, [found for found in changed if not within(found[0], (*_OF_THE_CALL[2:], *_FETCHING))]


def settings_changed(text: str, where: str, values: dict[str, Any], composition: Composition) -> list[str]:
    """Keys in which a stored config is that of another run than `values`, those of a command line; what a run finds is none."""
    # The typed config has keys that an older version did not know
    config, _ = typed(Train, load(text, where))
    original = to_plain(config) if config else {}
    given = ["data.image_size", *(["data.normalize"] if _section(values, "data.normalize").get("mean") else [])]
    _keep_found(original, values, dataclasses.replace(composition, overrides=[*composition.overrides, *given]))
    return [key for key, _, _ in differences(original, values) if other_run(key)]


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a dotted key; an empty one if a file has something else there."""
    inner = at(values, key)
    return inner if isinstance(inner, dict) else {}


def _keep_found(original: dict[str, Any], values: dict[str, Any], composition: Composition) -> None:
    """Keep what was found or measured for a component that the command line selects again without saying otherwise."""

    def same(section: str) -> bool:
        return bool(_section(original, section).get("_target_") == _section(values, section).get("_target_"))

    # Facts from the data are kept while their component stays the same
    for section, names in FACTS.items():
        before, after = _section(original, section), _section(values, section)
        if same(section):
            kept = [name for name in names if name in after or (section == "model" and before.get(name) is not None)]
            after |= {name: before.get(name) for name in kept if after.get(name) is None}
    before, after = _section(original, "data.split"), _section(values, "data.split")
    if same("data.dataset") and after.get("test") is None and not says("data.split.test", composition.overrides):
        after["test"] = before.get("test")
    # The number of steps that was found for a budget is part of the run
    if original.get("budget") is not None and original["budget"] == values.get("budget"):
        values |= {key: original.get(key) for key in ("epochs", "max_steps") if not says(key, composition.overrides)}
    # A batch size that was found is part of the run, so it is not searched again
    before, after = _section(original, "data"), _section(values, "data")
    if before and after.get("batch_size") == "auto":
        after["batch_size"] = before.get("batch_size")
    for name in PREPARATION if same("model") and same("data.dataset") else ():
        if name in before and not says(f"data.{name}", composition.overrides):
            after[name] = copy.deepcopy(before[name])
