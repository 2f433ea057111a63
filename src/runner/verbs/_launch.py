"""What the verbs that take a config have in common on the command line; imports nothing heavy until one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.config.app import Outcome


def launch_verb(
    verb: str, argv: Sequence[str], job: Callable[..., Any], sweep_root: Callable[[dict[str, Any]], Path]
) -> Outcome:
    """Check the command line against a schema, then run one job, or several with `--multirun`.

    Args:
        verb: name of the verb, and of its primary config in `conf/`.
        argv: the words after the verb.
        job: what Hydra calls; a function of an importable module.
        sweep_root: makes the folder of a sweep, from the config's values.
    """
    from runner.config.app import launch
    from runner.config.resolve import problems_in
    from runner.config.schema import VERBS

    expected = VERBS[verb]
    return launch(
        job,
        expected,
        verb,
        argv,
        also=lambda composition: problems_in(composition.values, composition, expected)[1],
        sweep_root=sweep_root,
    )


def claimed(folder: Callable[[dict[str, Any]], Path]) -> Callable[[dict[str, Any]], Path]:
    """A function that makes a new dated folder below the one that `folder` gives for a config's values."""

    def claim_one(values: dict[str, Any]) -> Path:
        from runner.tracking.run_directory import claim, timestamp

        return claim(Path(str(values["output_root"])) / folder(values), timestamp())

    return claim_one


def with_lists(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words after a verb with `key=[a,b]` in place of `key=a,b` for keys that take several values, unless it is a sweep."""
    if {"--multirun", "-m"} & set(argv):
        return list(argv)
    return [_as_list(word, names) for word in argv]


def _as_list(word: str, names: Sequence[str]) -> str:
    key, equals, value = word.partition("=")
    plain = "," in value and not set("[](){}'\"") & set(value)
    return f"{key}{equals}[{value}]" if plain and key.lstrip("+") in names else word


def complete_verb(verb: str, argv: Sequence[str], job: Callable[..., Any]) -> int:
    """Answer a query of tab completion."""
    from runner.config.app import complete

    return complete(job, verb, argv)
