"""Configs in files, and overrides applied to them.

A stored config is plain YAML: it is read with the safe loader into plain containers and never as a Hydra or OmegaConf
object, so that neither a tag nor an interpolation in it does anything.
"""

from __future__ import annotations

import copy
from typing import Any

import yaml

from runner.base.errors import UserError, nearest
from runner.base.secrets import mask_values, unmasked
from runner.config.composition import Composition
from runner.config.frozen import to_plain
from runner.config.gone import drop
from runner.config.keys import at, flatten, within
from runner.config.overrides import parsed
from runner.config.schema.train import Train
from runner.config.sources import Sources, text_of
from runner.config.validate import shown
from runner.config.yaml_files import plain


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
    """A stored config with the command line laid on top.

    A selected group replaces the stored section as a whole; a preset sets the keys in its file; any other override sets
    its key. Everything else stays as stored. Secrets are not stored, and come from the call. Raises `UserError` for a
    key to delete that is not in the file, and is spelled much like one.

    Args:
        stored: the config from the file.
        composition: what the same command line gives without the file.
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
    for key in (*chosen, *given):
        _set(merged, key, copy.deepcopy(at(composed, key)))
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


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, or delete it if the value is `...`."""
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    if value is ...:
        values.pop(last, None)
    else:
        values[last] = value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose values differ, as (key, before, after); an absent one is shown as `-`."""
    old, new = flatten(mask_values(before)), flatten(mask_values(after))
    changed = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, ...) != new.get(key, ...):
            before_text, after_text = (shown(side[key]) if key in side else "-" for side in (old, new))
            changed.append((key, before_text, after_text))
    return changed
