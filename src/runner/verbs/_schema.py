"""JSON schemas of run configs and of the files of options, for editors: `show --schema`.

They come from what validates a config: the typed schema, the signatures of the components that options name, and the comments in
`conf/`. As a YAML file may be a part of a config, nothing is required, and any value may be an interpolation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_origin, get_type_hints

import yaml

from runner.base.errors import UserError
from runner.config import keys
from runner.config.schema import VERBS as SCHEMAS
from runner.config.schema.sections import extras_class
from runner.config.schema.train import Train
from runner.config.sources import Sources, text_of
from runner.config.targets import FACTS, Component, plain_kind, targets_in
from runner.config.validate import adapter

Schema = dict[str, Any]

_LATER: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}  # an interpolation, or what has to be given
_OF_HYDRA: Schema = {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
_NESTED: Schema = {"type": "object", "required": ["_target_"]}  # any argument may be a component
_CONTROL: Schema = {"_target_": {"type": "string"}, "_partial_": {"type": "boolean"}, "_args_": {"type": "array"}}


def json_schemas(names: Sequence[str], sources: Sources, comments: Mapping[tuple[str, str], str]) -> dict[str, Schema]:
    """The schemas of primary configs, such as `train`, and of the files of groups, such as `model`.

    `comments` are those of `conf/` by (`group=option` or primary config, dotted key). Imports the modules of all components that
    options name. An option whose component cannot be imported, such as that of an extra, may have any argument.
    """
    known: dict[str, dict[str, Schema]] = {}  # schemas of components by section and `_target_`
    options = {group: sources.options(group) for group in sources.groups()}
    for option in (each for several in options.values() for each in several):
        where = f"{option.group}={option.name}"
        about = {key: text for (place, key), text in comments.items() if place == where}
        prefix = "" if option.is_global else f"{option.group.replace('/', '.')}."
        for inside, target in targets_in(yaml.safe_load(text_of(option.path)) or {}):
            section = prefix.rstrip(".") if inside in ("", "_target_") else prefix + inside
            with contextlib.suppress(UserError):
                known.setdefault(section.split(".")[0], {})[target] = _component(section, target, about)
    schemas = {}
    for name in names:
        of_keys = {key: text for (where, key), text in comments.items() if where in ("train", name) or where in options}
        schema = _section(SCHEMAS.get(name, Train), "", of_keys, known)
        if name in options and not all(option.is_global for option in options[name]):
            for part in name.split("/"):  # a section that the schema does not have may hold anything
                schema = schema.get("properties", {}).get(part, {})
            # Null and interpolations are for the key, not for a file
            schema = next(iter(schema.get("anyOf", [schema])))
        properties = schema.get("properties", {}) | _OF_HYDRA
        schemas[name] = {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "properties": properties}
    return schemas


def _section(
    section: type, prefix: str, comments: Mapping[str, str], known: Mapping[str, Mapping[str, Schema]]
) -> Schema:
    properties: Schema = {}
    own = adapter(section).json_schema()["properties"]
    for name, annotation in keys.hints(section).items():
        key = prefix + name
        if dataclasses.is_dataclass(annotation):
            found = _section(annotation, f"{key}.", comments, known)  # type: ignore[arg-type]
        else:
            node, members = _node(known.get(key.split(".")[0], {})), keys.members(annotation)
            several = {
                dict: {"type": "object", "properties": {}, "additionalProperties": node},
                list: {"type": "array", "items": node},
            }
            kinds = [node] if any(map(keys.is_node, members)) else []
            if keys.component_inside(annotation) is not None:
                kinds = [several[kind] for each in members if (kind := get_origin(keys.bare(each))) in several]
            null = [{"type": "null"}] if type(None) in members else []
            found = _either(*kinds, *null) if kinds else _either(_with_numbers(own[name]))
        properties[name] = found | ({"description": comments[key]} if comments.get(key) else {})
    return {"type": "object", "properties": properties, "additionalProperties": prefix == "search."}


def _with_numbers(schema: Any) -> Any:
    """A schema whose texts may be numbers, such as `name: 2024`, which validation turns into text."""
    if isinstance(schema, list):
        return [_with_numbers(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_numbers(value) for key, value in schema.items()}
    return found | ({"type": ["string", "number"]} if found.get("type") == "string" and "enum" not in found else {})


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, _LATER]}


def _node(known: Mapping[str, Schema]) -> Schema:
    """A component: the arguments of a `_target_` that an option names are known."""
    cases = [
        {"if": {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}, "then": schema}
        for target, schema in known.items()
    ]
    return {"type": "object", "properties": _CONTROL, **({"allOf": cases} if cases else {})}


def _component(key: str, target: str, comments: Mapping[str, str]) -> Schema:
    """The arguments of a component, and the keys beside them. Raises `UserError` if there is no such component."""
    component = Component(key, {"_target_": target})
    annotations = dict[str, Any]()
    with contextlib.suppress(Exception):  # annotations of foreign code may name anything
        annotations = get_type_hints(
            component.target.__init__ if inspect.isclass(component.target) else component.target
        )
    extras = extras_class(key)
    annotations |= (
        {name: kind for name, kind in keys.hints(extras).items() if name in component.known_extras} if extras else {}
    )
    arguments: Schema = {}
    for name in [*component.parameters, *component.known_extras]:
        kind = plain_kind(annotations.get(name))
        default = getattr(component.parameters.get(name), "default", None)
        facts = FACTS.get(key if key in FACTS else key.split(".")[0], ())
        others = [_NESTED, *([{"type": "null"}] if default is None or name in facts else [])]
        found = _either(adapter(kind).json_schema(), *others) if kind is not None else {}
        arguments[name] = found | ({"description": text} if (text := comments.get(f"{key}.{name}")) else {})
    return {"properties": arguments | _CONTROL | _OF_HYDRA, "additionalProperties": component.takes_any}
