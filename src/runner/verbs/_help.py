"""`--help` of the verbs that take a config: groups and commented keys, read as text, so that it answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.sources import Sources
from runner.verbs._folders import sources_and_words


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether `--help` or `-h` is among the words after a verb."""
    return "--help" in argv or "-h" in argv


def print_help(verb: str, doc: str | None, argv: Sequence[str]) -> int:
    """Print what a verb does, the groups and their options, and the keys with their comments."""
    folders = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word in ("--config-dir", "-cd"):
            folders += [word, following]
        elif word.startswith("--config-dir="):
            folders.append(word)
    sources, _ = sources_and_words(verb, folders)
    lines = [
        (doc or "").splitlines()[0],
        "",
        f"  python -m runner {verb} [key=value ...] [group=option ...] [flags]",
        "",
        "groups (python -m runner list tells what each option is)",
        *(f"  {group:<16} {', '.join(o.name for o in sources.options(group))}" for group in sources.groups()),
        "",
        "keys (python -m runner show data=digits, and so on, for those of an option)",
        *_keys(verb, sources),
        "",
        "flags",
        "  --multirun, -m        run every combination of key=a,b values",
        "  --cfg job             print the config and stop; with --resolve, interpolations filled in",
        "  --info                print what Hydra searched and found",
        "  --config-dir DIR      search a folder of your own as well",
        "  --config-name NAME    start from another primary config",
        "  --hydra-help          all flags of Hydra's",
    ]
    print("\n".join(lines))
    return 0


def _keys(verb: str, sources: Sources) -> list[str]:
    lines: list[str] = []
    for name in dict.fromkeys([verb, "train"]):
        path = sources.primary(name)
        assert path is not None, f"the primary config {name} is shipped"
        body = path.read_text(encoding="utf-8").split("\n\n", 1)[1]
        lines += ["  " + line for line in body.split("\nhydra:")[0].rstrip().splitlines()]
    return [line.rstrip() for line in lines]
