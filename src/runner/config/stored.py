"""Configs in files, and overrides applied to them.

A stored config is plain YAML: it is read with the safe loader into plain containers and never as a Hydra or OmegaConf
object, so that neither a tag nor an interpolation in it does anything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.errors import UserError, first_line
from runner.config.frozen import to_plain
from runner.config.keys import flatten
from runner.config.renamed import migrate
from runner.config.schema.train import Train
from runner.config.secrets import mask_values, unmasked
from runner.config.sources import Sources, text_of
from runner.config.validate import shown

_MISSING = object()
_DEEPEST = 64  # levels of nesting; configs have about six
_LONGEST = 2**18  # characters; configs have about six thousand, and reading takes a second for each such length
_MOST_EVENTS = 2**15  # of the YAML reader, one or two a value; configs have about a thousand


def dump(config: Train | dict[str, Any]) -> str:
    """A config, or its plain form, as YAML text, secrets masked."""
    values = config if isinstance(config, dict) else to_plain(config)
    return yaml.dump(mask_values(values), Dumper=_WithoutAliases, sort_keys=False, default_flow_style=None, width=120)


class _WithoutAliases(yaml.SafeDumper):
    """Writes a value that occurs twice twice, as aliases are refused when reading."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load(text: str, where: str) -> dict[str, Any]:
    """YAML text as plain containers.

    Raises:
        UserError: if `text` is no YAML mapping or asks for objects.
    """
    if len(text) > _LONGEST:
        raise UserError(f"{where}: its config is not plain YAML: it has over {_LONGEST:,} characters")
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            if number > _MOST_EVENTS:
                raise UserError(f"{where}: its config is not plain YAML: it has over {_MOST_EVENTS:,} keys and values")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # A few lines of aliases of aliases stand for more values than fit into memory.
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                what = "YAML aliases" if isinstance(event, yaml.AliasEvent) else f"over {_DEEPEST} levels of nesting"
                raise UserError(f"{where}: its config is not plain YAML: it has {what}")
        values = yaml.safe_load(text)
    except UserError:
        raise
    except Exception as error:  # the reader raises whatever a value's text makes Python raise
        reason = first_line(error)
        raise UserError(f"{where}: its config is not plain YAML: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: its config is not a mapping")
    if place := _foreign(values, ""):
        raise UserError(f"{where}: its config is not plain YAML: {place}")
    return migrate(values)


def _foreign(value: Any, place: str) -> str:
    """Where a value is no text, number, list, or mapping with text keys; an empty string if all are."""
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            return f"{place or 'the top level'} has the key {wrong[0]!r}"
        return next(filter(None, (_foreign(item, f"{place}.{key}".lstrip(".")) for key, item in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_foreign(item, f"{place}.{index}") for index, item in enumerate(value))), "")
    if isinstance(value, int) and abs(value) >= 2**1000:
        return f"{place} is a number of over 1,000 bits"
    return "" if value is None or isinstance(value, str | int | float) else f"{place} is a {type(value).__name__}"


def overlay(
    stored: dict[str, Any], composed: dict[str, Any], words: Sequence[str], choices: dict[str, str], sources: Sources
) -> dict[str, Any]:
    """A stored config with the command line laid on top.

    A selected group replaces the stored section as a whole; a preset sets the keys in its file; any other override sets
    its key. Everything else stays as stored. Secrets are not stored, and come from the call.

    Args:
        stored: the config from the file.
        composed: the config that the same command line gives without the file.
        words: overrides of the command line, without those of `hydra.*`.
        choices: options chosen for each group in `composed`.
        sources: where options are found.
    """
    merged = copy.deepcopy(stored)
    groups = set(sources.groups())
    parser = OverridesParser.create()
    overrides = [(word, parser.parse_override(word)) for word in words]
    for _, override in overrides:
        group = override.key_or_group
        if group in groups and not isinstance(override.value(), dict):
            for key in _keys_of_choice(group, choices.get(group), sources):
                _set(merged, key, _get(composed, key))
    for _, override in overrides:
        key, given = override.key_or_group, override.value()
        if isinstance(given, dict) and given:
            for inner in flatten(given):
                _set(merged, f"{key}.{inner}", _get(composed, f"{key}.{inner}"))
        elif key not in groups:
            _set(merged, key, _get(composed, key))
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


def _get(values: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return _MISSING
    return copy.deepcopy(values)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        _delete(values, key)
        return
    *parents, last = key.split(".")
    for part in parents:
        inner = values.get(part)
        if not isinstance(inner, dict):
            inner = values[part] = {}
        values = inner
    values[last] = value


def _delete(values: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(values.get(part), dict):
            return
        values = values[part]
    values.pop(last, None)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose values differ, as (key, before, after); an absent one is shown as `-`."""
    old, new = flatten(mask_values(before)), flatten(mask_values(after))
    changed = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, _MISSING) != new.get(key, _MISSING):
            before_text, after_text = (shown(side[key]) if key in side else "-" for side in (old, new))
            changed.append((key, before_text, after_text))
    return changed
