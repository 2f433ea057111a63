"""`show`: the files of options with their comments, or what a key means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.base.errors import UserError, nearest
from runner.config.sources import Option, Sources, text_of
from runner.config.yaml_files import compose, walk
from runner.verbs._folders import sources_and_words
from runner.verbs._table import VERBS

# The keys of each page below docs/, or docs/reference/ if there is no folder.
_KEYS_OF_PAGES = {
    "data": "data",
    "models": "model",
    "transforms": "transform",
    "optimization": "optimizer scheduler loss grad_clip accumulate metrics",
    "reference/verbs/find-lr": "lr",
    "tasks": "task",
    "callbacks": "callbacks",
    "logging": "logger log",
    "checkpoints": "checkpoint resume ckpt_path",
    "averaging": "averaging ema swa",
    "howto/fine-tuning": "init init_from init_mismatch freeze unfreeze_at",
    "scale": "devices strategy dist fsdp dry_run max_restarts dtype sync_batchnorm",
    "toggles": "amp channels_last compile compiler activation_checkpointing cudnn_benchmark tf32 matmul_precision",
    "howto/debug": "on_nonfinite watch detect_anomaly post_mortem limit",
    "explanation/reproducibility": "deterministic",
    "project/security": "trust",
}
_PAGES = {key: page for page, keys in _KEYS_OF_PAGES.items() for key in keys.split()}


class Commented(NamedTuple):
    """A key in a YAML file."""

    key: str  # dotted, with the group in front
    value: str  # as it is written; empty for a section
    comment: str
    option: str  # `group=option`, or the name of a primary config


def main(argv: Sequence[str]) -> int:
    """Print the files of options (`group=option` or `group/option`), what a key means (`optimizer.lr`), or all top-level keys."""
    sources, words = sources_and_words("show", argv)
    for word in words or ["train"]:
        if files := _files(word, sources):
            for path in files:
                print(f"# {path}")
                print(text_of(path).rstrip(), end="\n\n")
        else:
            print("\n".join(_explained(word, sources)), end="\n\n")
    return 0


def _files(word: str, sources: Sources) -> list[Path]:
    """The files of the options that a word names; none for a key."""
    primary = sources.primary(word)
    if primary is not None:
        return [primary]
    group, _, name = word.replace("=", "/").rpartition("/")
    if not group:
        return [option.path for option in sources.options(name)] if name in sources.groups() else []
    return files_of(option_named("show", group, name, sources))


def option_named(verb: str, group: str, name: str, sources: Sources) -> Option:
    """The option `name` of a group; raises `UserError` if there is none."""
    option = sources.option(group, name)
    if option is None:
        if group not in (groups := sources.groups()):
            raise UserError(verb, f"there is no group '{group}'", ", ".join(groups), nearest(group, groups))
        names = [known.name for known in sources.options(group)]
        raise UserError(verb, f"{group} has no option '{name}'", ", ".join(names), nearest(name, names))
    return option


def files_of(option: Option) -> list[Path]:
    """The file of an option, and the file that it shares with others of its group."""
    base = option.path.with_name("_base.yaml")
    uses_base = base.is_file() and "_base" in text_of(option.path)
    return [option.path, base] if uses_base else [option.path]


def _explained(key: str, sources: Sources) -> list[str]:
    """Type, default, meaning and page of a key.

    Raises:
        UserError: if there is no such key.
    """
    # Nothing but the standard library is imported for files.
    from runner.config import keys
    from runner.config.changes import CHANGES, declared
    from runner.config.schema import VERBS as SCHEMAS

    known = list(_commented(sources))
    # A key may occur in several options, each with its own default
    places = [place for place in known if place.key == key]
    schemas = [schema for schema in SCHEMAS.values() if keys.find(schema, key) is not None]
    if not places and (key in CHANGES or "." not in key) and schemas:
        places = [Commented(key, "", "", "")]
    if not places:
        names = [*dict.fromkeys(place.key for place in known), *sources.groups()]
        close = keys.closest(key, names)
        allowed = "group=option, a group, or a key (python -m runner show prints the top-level keys)"
        raise UserError("show", f"there is no group and no key '{key}'", allowed, close)
    annotation = keys.find(schemas[0], key) if schemas else None
    lines = [key]
    if comment := next((place.comment for place in places if place.comment), ""):
        lines.append(f"  meaning   {comment}")
    if annotation is not None and (kind := keys.describe(annotation)) != "any value":
        lines.append(f"  values    {kind}")
    given = [place for place in places if place.value]
    if len({place.value for place in given}) > 1:
        width = max(len(place.option) for place in given)
        defaults = [f"{place.option:<{width}}  {place.value}" for place in given]
        lines += [f"  {'default' if not at else '':<10}{text}" for at, text in enumerate(defaults)]
    elif given:
        lines.append(f"  default   {given[0].value}")
    below = [place.key.removeprefix(f"{key}.") for place in known if place.key.startswith(f"{key}.")]
    # Items of lists have their number in the name
    inside = [name for name in below if re.fullmatch(r"(\d+\.)?\w+", name)]
    of_training = keys.find(SCHEMAS["train"], key) is not None
    if of_training and not inside:
        lines.append(f"  resuming  a change is {declared(key).value}")
    lines.append(f"  docs      {page_of(key) if of_training else page_of_verb(places[0].option)}")
    if inside:
        lines.append(f"  keys      {', '.join(dict.fromkeys(inside))}")
    return lines


def page_of(key: str) -> str:
    """The page of the documentation for a key."""
    page = _PAGES.get(key.partition(".")[0], "run")
    return f"docs/{page}.md" if "/" in page else f"docs/reference/{page}.md"


def page_of_verb(verb: str) -> str:
    """The page of the documentation for the keys of a verb."""
    return f"docs/reference/verbs/{verb}.md"


def _commented(sources: Sources) -> Iterator[Commented]:
    """Every key of the primary configs and of the options, with the comment beside it."""
    for verb in ("train", *(verb.name for verb in VERBS.values() if verb.takes_config and verb.name != "train")):
        if path := sources.primary(verb):
            yield from _read(path, "", verb)
    for group in sources.groups():
        for option in sources.options(group):
            for path in files_of(option):
                section = "" if option.is_global else f"{group.replace('/', '.')}."
                yield from _read(path, section, f"{group}={option.name}")


def _read(path: Path, section: str, option: str) -> Iterator[Commented]:
    lines, last = text_of(path).splitlines(), -1
    for name, key, value in walk(compose(path)):
        # Items of lists have no comment, nor have keys that share the line of another.
        if key is not value and key.start_mark.line != last and name.split(".")[0] not in ("defaults", "hydra"):
            last = key.start_mark.line
            given, _, comment = lines[last][key.end_mark.column + 1 :].partition("#")
            yield Commented(section + name, given.strip(), comment.strip(), option)
