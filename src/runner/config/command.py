"""A command line of a verb that takes a config: its flags, overrides and sources, and its first job composed."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from runner.base.errors import ConfigError, Problem, UserError
from runner.config import overrides
from runner.config.app import Composition, application, compose, files_checked, main, sources_of
from runner.config.flags import parse
from runner.config.gone import explained
from runner.config.keys import OF_THE_SWEEP, all_keys, flatten, key_of, within
from runner.config.sources import Sources, text_of

ProblemsOf = Callable[[Composition], list[Problem]]
"""Finds the problems of a composition, with or without importing torch."""


@dataclass(frozen=True)
class Command:
    """A command line, and its first job composed."""

    verb: str
    primary: str  # name of the primary config
    schema: type  # that the overrides are checked against
    flags: argparse.Namespace  # those of Hydra
    checked: overrides.CheckedOverrides
    sources: Sources
    problems_of: ProblemsOf
    app: Any  # Hydra's object for the application
    composition: Composition
    cfg: DictConfig  # the composition with `hydra`

    @property
    def is_sweep(self) -> bool:
        """Tell whether there are several jobs: by the flag, or by a selected preset."""
        return bool(self.flags.multirun) or str(self.cfg.hydra.mode or "").endswith("MULTIRUN")

    def composed(self, words: Sequence[str]) -> Composition:
        """The composition of a job with other overrides."""
        checked, known = dataclasses.replace(self.checked, accepted=list(words)), list(flatten(self.composition.values))
        composition, _ = compose(
            self.app, self.primary, checked, self.schema, self.sources, also=self.problems_of, known=known
        )
        return composition

    def chosen(self, group: str) -> str:
        """The option of a group of Hydra's own."""
        return str(self.cfg.hydra.runtime.choices.get(group))

    @property
    def words(self) -> list[str]:
        """The overrides without those about the sweep as a whole."""
        return [word for word in self.checked.accepted if not is_about_sweep(word)]

    @property
    def place(self) -> Path | None:
        """The folder of the sweep, if `sweep.dir` or `hydra.sweep.dir` names one."""
        named = [word for word in self.checked.accepted if key_of(word) == "hydra.sweep.dir"]
        given = named[-1].split("=", 1)[1].strip("'\"") if named else self.composition.values["sweep"]["dir"]
        return Path(str(given)) if given is not None else None

    @property
    def flags_of_jobs(self) -> list[str]:
        """The flags, as far as one job alone needs them."""
        named = {"--config-dir": self.flags.config_dir, "--config-name": self.flags.config_name}
        return [f"{flag}={value}" for flag, value in named.items() if value]

    def refuse_keys_of_sweeps(self, why: str, allowed: str) -> None:
        """Refuse keys about a sweep as a whole.

        Raises:
            UserError: for the first one.
        """
        for word in filter(is_about_sweep, self.checked.accepted):
            key = key_of(word)
            # One that is gone from sweeps too has its own advice
            problem = explained(Problem(key, why, "sweep=optuna too" if key.startswith("search.") else allowed))
            raise UserError(problem.key, problem.message, problem.allowed)


def is_about_sweep(word: str) -> bool:
    """Tell whether an override sets a key about a sweep as a whole; `sweep=PRESET` selects a preset, and is not one."""
    return within(key := key_of(word), OF_THE_SWEEP) and key != "sweep"


@contextlib.contextmanager
def opened(
    verb: str, argv: Sequence[str], schema: type, problems_of: ProblemsOf = lambda *_: []
) -> Iterator[Command | int]:
    """Parse, check and compose a command line, with Hydra set up to compose further jobs.

    Yields the exit status instead if the command line asks Hydra to show something.

    Raises:
        ConfigError: with every problem found in the overrides and the composition.
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    flags = parse(argv, [*all_keys(schema), *Sources().groups()])
    # Flags that only show something go to Hydra, once the overrides are known to be right
    shows = bool(flags.cfg or flags.info or flags.help or flags.hydra_help or flags.shell_completion)
    if flags.resolve and not shows:
        raise UserError("--resolve is for what --cfg shows; a run resolves its config anyway")
    sources = sources_of(flags)
    # A file of the user with the name of a shipped one would silently have no effect
    for path in sources.hidden():
        print(f"warning: {path} is not read: a shipped file takes precedence; rename it", file=sys.stderr)
    several = flags.multirun or _asks_for_sweep(flags.overrides, sources)
    checked = overrides.check_overrides(flags.overrides, schema, sources, several)
    if shows:
        unknown = [overrides.unknown_key(key, word, schema, sources.groups(), []) for key, word in checked.unknown]
        if checked.problems or unknown:
            raise ConfigError([*checked.problems, *unknown])
        others = [word for word in argv if word not in flags.overrides]
        with files_checked():
            yield main(verb, [*others, *checked.accepted])
        return
    primary = (flags.config_name or verb).removesuffix(".yaml")
    # Jobs of a sweep differ in a few words, so what they share is merged once
    with application(verb, sources, schema) as app, merged_once() if several else contextlib.nullcontext():
        composition, cfg = compose(app, primary, checked, schema, sources, also=problems_of)
        yield Command(
            verb=verb,
            primary=primary,
            schema=schema,
            flags=flags,
            checked=checked,
            sources=sources,
            problems_of=problems_of,
            app=app,
            composition=composition,
            cfg=cfg,
        )


def _asks_for_sweep(words: Sequence[str], sources: Sources) -> bool:
    """Tell whether a selected preset turns a plain call into a sweep."""
    plain = [word.replace(" ", "") for word in words]
    if "hydra.mode=RUN" in plain:
        return False
    return "hydra.mode=MULTIRUN" in plain or any(
        (option := sources.option("sweep", word.split("=", 1)[1])) is not None and "MULTIRUN" in text_of(option.path)
        for word in words
        if word.lstrip("+").startswith("sweep=")
    )


@contextlib.contextmanager
def merged_once() -> Iterator[None]:
    """Compositions inside that select the same options take their files from a copy of what was merged before.

    Hydra applies the other overrides to that copy, as it does without this. A file that changes meanwhile has no effect.
    """
    lists: dict[Any, Any] = {}
    merged: dict[int, bytes] = {}  # by the identity of a list of defaults, which `lists` keeps
    loader: Any = config_loader_impl
    list_defaults, merge = loader.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list

    # Overrides that only set values do not change which files are merged
    @functools.wraps(list_defaults)
    def list_defaults_once(repo: Any, overrides_list: list[Any], **others: Any) -> Any:
        plain = [override for override in overrides_list if not override.is_sweep_override()]
        selected = [one for one in plain if repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)]
        folders = tuple((source.provider, source.path) for source in repo.get_sources())
        key = (folders, *(one.input_line for one in selected), *sorted(others.items()))
        if key not in lists:
            lists[key] = list_defaults(repo, overrides_list=selected, **others)
        found = copy.copy(lists[key])
        found.config_overrides = [override for override in plain if override not in selected]
        return found

    def merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        # Each composition changes its config, so it gets a copy, which a pickle makes faster than a deep copy
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(self, defaults, repo), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(merged[id(defaults)])

    # Hydra has no hook for this, so two of its functions are replaced while the block lasts
    implementation: Any = ConfigLoaderImpl
    loader.create_defaults_list = list_defaults_once
    implementation._compose_config_from_defaults_list = merge_once
    try:
        yield
    finally:
        loader.create_defaults_list = list_defaults
        implementation._compose_config_from_defaults_list = merge
