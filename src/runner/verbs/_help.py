"""`--help` of the verbs that take a config: groups and commented keys, read as text, so that it answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.sources import Sources
from runner.verbs._folders import sources_and_words
from runner.verbs._table import Verb


def print_help(verb: Verb, argv: Sequence[str]) -> None:
    """Print what a verb does, the groups and their options, and the keys with their comments."""
    sources, _ = sources_and_words(verb.name, argv, other_flags=True)
    lines = [
        verb.help,
        "",
        f"  python -m runner {verb.name} [key=value ...] [group=option ...] [flags]",
        "",
        "groups (python -m runner list explains the options)",
        *(f"  {group:<16} {', '.join(o.name for o in sources.options(group))}" for group in sources.groups()),
        "",
        "keys (python -m runner show data=digits, and so on, for those of an option)",
        *_keys(verb.name, sources),
        "",
        "flags",
        "  --multirun, -m        run every combination of key=a,b values",
        "  --cfg job             print the config and stop; with --resolve, interpolations resolved",
        "  --info                print what Hydra searched and found",
        "  --config-dir DIR      also search your own config folder",
        "  --config-name NAME    start from another primary config",
        "  --hydra-help          all flags of Hydra",
    ]
    print("\n".join(lines))


def _keys(verb: str, sources: Sources) -> list[str]:
    lines: list[str] = []
    for name in dict.fromkeys([verb, "train"]):
        path = sources.primary(name)
        assert path is not None, f"the primary config {name} is shipped"
        body = path.read_text(encoding="utf-8").split("\n\n", 1)[1]
        lines += [f"  {line}".rstrip() for line in body.split("\nhydra:")[0].rstrip().splitlines()]
    return lines
