"""`show`: the files of options, with their comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import UserError, nearest
from runner.config.sources import Sources, text_of
from runner.verbs._folders import sources_and_words


def main(argv: Sequence[str]) -> int:
    """Print the files of the options named (`group=option` or `group/option`), or the top-level keys."""
    sources, words = sources_and_words("show", argv)
    for word in words or ["train"]:
        for path in _files(word, sources):
            print(f"# {path}")
            print(text_of(path).rstrip(), end="\n\n")
    return 0


def _files(word: str, sources: Sources) -> list[Path]:
    primary = sources.primary(word)
    if primary is not None:
        return [primary]
    group, _, name = word.replace("=", "/").rpartition("/")
    groups = sources.groups()
    if not group and name in groups:
        return [option.path for option in sources.options(name)]
    if group not in groups:
        unknown = group or name
        raise UserError("show", f"there is no group '{unknown}'", ", ".join(groups), nearest(unknown, groups))
    option = sources.option(group, name)
    if option is None:
        names = [known.name for known in sources.options(group)]
        raise UserError("show", f"{group} has no option '{name}'", ", ".join(names), nearest(name, names))
    base = option.path.with_name("_base.yaml")
    uses_base = base.is_file() and "_base" in text_of(option.path)
    return [option.path, base] if uses_base else [option.path]
