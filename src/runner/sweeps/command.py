"""The command line that a run or sweep is launched by, and what follows from it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.config import overrides
from runner.config.app import Composition, compose
from runner.config.errors import Problem, UserError
from runner.config.keys import OF_THE_SWEEP, flatten, key_of, within
from runner.config.sources import Sources


@dataclass(frozen=True)
class Command:
    """A command line, and its first job composed.

    Attributes:
        task: see `runner.sweeps.launch.launch`.
        schema: see `launch`.
        verb: of the command line.
        primary: name of the primary config.
        argv: the words after the verb.
        flags: those of Hydra among them.
        checked: the overrides among them.
        sources: folders of configs.
        also: see `launch`.
        monitor: see `launch`.
        app: Hydra's object for the application.
        composition: the config of the first job.
        cfg: the same as Hydra composed it, with `hydra`.
        keeps_runs: see `launch`.
    """

    task: Callable[[Any], Any]
    schema: type
    verb: str
    primary: str
    argv: Sequence[str]
    flags: argparse.Namespace
    checked: overrides.CheckedOverrides
    sources: Sources
    also: Callable[[Composition, bool], list[Problem]]
    monitor: Callable[[Composition], tuple[str, str]]
    app: Any
    composition: Composition
    cfg: DictConfig
    keeps_runs: bool

    def composed(self, words: list[str]) -> Composition:
        """The composition of a job with other overrides."""
        checked, known = dataclasses.replace(self.checked, accepted=words), list(flatten(self.composition.values))
        return compose(self.app, self.primary, checked, self.schema, self.sources, self.also, known)[0]

    def chosen(self, group: str) -> str:
        """The option of a group of Hydra's own."""
        return str(self.cfg.hydra.runtime.choices.get(group))

    @property
    def in_pool(self) -> bool:
        """Whether jobs run in our own launcher."""
        return self.chosen("hydra/launcher") == "pool"

    @property
    def words(self) -> list[str]:
        """The overrides without those about the sweep as a whole."""
        return [word for word in self.checked.accepted if not within(key_of(word), OF_THE_SWEEP)]

    @property
    def place(self) -> Path | None:
        """The folder that `hydra.sweep.dir` names."""
        named = [word for word in self.checked.accepted if word.startswith("hydra.sweep.dir=")]
        return Path(named[-1].split("=", 1)[1].strip("'\"")) if named else None

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
        for word in self.checked.accepted:
            if within(key := key_of(word), OF_THE_SWEEP):
                raise UserError(key, why, "sweep=optuna too" if key.startswith("search.") else allowed)
