"""`show`: the files of options with their comments, or what a key means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.config.errors import UserError, nearest
from runner.config.sources import Option, Sources, text_of
from runner.verbs._folders import sources_and_words
from runner.verbs._table import VERBS

# The page of the documentation for keys that begin so; longer beginnings come first.
# Pages below docs/, or docs/reference/ if there is no folder.
PAGES = {
    "data.split": "data", "data": "data", "model": "models", "transform": "transforms", "optimizer": "optimization",
    "scheduler": "optimization", "loss": "optimization", "grad_clip": "optimization", "accumulate": "optimization",
    "metrics": "optimization", "lr": "reference/verbs/find-lr", "task": "tasks", "callbacks": "callbacks", "logger": "logging",
    "log": "logging", "checkpoint": "checkpoints", "resume": "checkpoints", "ckpt_path": "checkpoints",
    "averaging": "averaging", "ema": "averaging", "swa": "averaging", "init": "howto/fine-tuning", "init_from": "howto/fine-tuning",
    "init_mismatch": "howto/fine-tuning", "freeze": "howto/fine-tuning", "unfreeze_at": "howto/fine-tuning", "devices": "scale",
    "strategy": "scale", "dist": "scale", "fsdp": "scale", "dry_run": "scale", "max_restarts": "scale", "dtype": "scale",
    "sync_batchnorm": "scale", "amp": "toggles", "channels_last": "toggles", "compile": "toggles", "compiler": "toggles",
    "activation_checkpointing": "toggles", "cudnn_benchmark": "toggles", "tf32": "toggles", "matmul_precision": "toggles",
    "on_oom": "optimization", "on_nonfinite": "howto/debug", "watch": "howto/debug",
    "detect_anomaly": "howto/debug", "post_mortem": "howto/debug",
    "limit": "howto/debug", "deterministic": "explanation/reproducibility", "trust": "project/security",
}  # fmt: skip
_KEY = re.compile(r"^( *(?:- )*)([A-Za-z_]\w*):(?:\s+(?!#)(.*?))?(?:\s*#\s*(.*))?$")


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
    groups = sources.groups()
    if not group and name in groups:
        return [option.path for option in sources.options(name)]
    if group not in groups:
        if not group:
            return []
        raise UserError("show", f"there is no group '{group}'", ", ".join(groups), nearest(group, groups))
    return files_of(option_named("show", group, name, sources))


def option_named(verb: str, group: str, name: str, sources: Sources) -> Option:
    """The option `name` of a group; raises `UserError` if there is none."""
    option = sources.option(group, name)
    if option is None:
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
    inside = [name for name in below if re.fullmatch(r"(\d+\.)?\w+", name)]  # of items of a list, with their number
    of_training = keys.find(SCHEMAS["train"], key) is not None
    if of_training and not inside:
        lines.append(f"  resuming  a change is {declared(key).value}")
    lines.append(f"  docs      {page_of(key) if of_training else page_of_verb(places[0].option)}")
    if inside:
        lines.append(f"  keys      {', '.join(dict.fromkeys(inside))}")
    return lines


def page_of(key: str) -> str:
    """The page of the documentation for a key."""
    longest = sorted(PAGES, key=len, reverse=True)
    page = next((PAGES[begin] for begin in longest if f"{key}.".startswith(f"{begin}.")), "run")
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
    above: list[tuple[int, str]] = []
    items: dict[int, int] = {}  # the column of the dashes of a list, and its items so far
    for line in text_of(path).splitlines():
        match = _KEY.match(line)
        if match is None:
            continue
        indent, name, value, comment = len(match[1]), match[2], match[3], match[4]
        first = match[1].find("-")  # an item of a list has its number in the key
        while above and above[-1][0] >= (indent if first < 0 else first):
            above.pop()
        items = {column: count for column, count in items.items() if column <= (first if first >= 0 else indent)}
        if first >= 0:
            items[first] = items.get(first, -1) + 1
            above.append((first, str(items[first])))
        key = ".".join([*(outer for _, outer in above), name])
        if above and above[0][1] in ("defaults", "hydra"):
            continue
        above.append((indent, name))
        if key not in ("defaults", "hydra"):
            yield Commented(section + key, value or "", comment or "", option)
