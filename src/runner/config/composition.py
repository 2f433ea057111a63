"""A command of a verb: its words, the values that they and the config files give together, and where each came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import Problem, UserError
from runner.config.gone import explained
from runner.config.keys import OF_THE_SWEEP, at, key_of, within
from runner.config.schema.train import Train
from runner.config.sources import Option, Sources
from runner.config.yaml_files import inherited_by, line_of


@dataclass(frozen=True)
class Composition:
    """One command, or one job of it, before any validation; `runner.config.load.compose` fills in what Hydra says."""

    schema: type[Train]  # of the verb
    primary: str  # name of the primary config
    sources: Sources
    flags: list[str] = field(default_factory=list)  # those that each job needs too, such as --config-dir=mine
    is_sweep: bool = False  # by the flag --multirun, an override or a preset
    accepted: list[str] = field(default_factory=list)  # overrides as Hydra is given them, some with several values
    overrides: list[str] = field(default_factory=list)  # canonical ones of the first job, without those of `hydra.*`
    values: dict[str, Any] = field(default_factory=dict)  # plain containers, interpolations resolved
    group_choices: dict[str, str] = field(default_factory=dict)
    data_found: str = ""  # what the path of `data=PATH` is, and what is selected for it; empty for a named option
    hydra: dict[str, tuple[str, Any]] = field(default_factory=dict)  # name and settings of `launcher` and `sweeper`
    run_dir: Path | None = None  # folder that `hydra.run.dir` names
    job_dir: Path | None = None  # folder that a sweep gives to this job
    continues: bool = False  # what the same job of a sweep began in `job_dir`
    supervised: bool = False  # by the process of a sweep, which decides when it ends

    @property
    def resumes(self) -> bool:
        """Tell whether `resume=auto` is set, or the sweep continues this job."""
        return self.continues or self.values.get("resume") == "auto"

    @property
    def given_choices(self) -> dict[str, str]:
        """The options that the command line names."""
        given = set(map(key_of, self.overrides))
        return {group: name for group, name in self.group_choices.items() if group in given}

    @property
    def runs(self) -> Path:
        """The folder that run directories of this name are made in."""
        return Path(str(self.values["output_root"])) / str(self.values["name"])

    @property
    def words(self) -> list[str]:
        """The overrides without those about a sweep as a whole."""
        return [word for word in self.accepted if not _is_about_sweep(word)]

    @property
    def place(self) -> Path | None:
        """The folder of the sweep, if `sweep.dir` or `hydra.sweep.dir` names one."""
        named = [word for word in self.accepted if key_of(word) == "hydra.sweep.dir"]
        given = named[-1].split("=", 1)[1].strip("'\"") if named else self.values["sweep"]["dir"]
        return Path(str(given)) if given is not None else None

    def refuse_keys_of_sweeps(self, why: str, allowed: str) -> None:
        """Refuse keys about a sweep as a whole; raises `UserError` for the first one."""
        for key in (key_of(word) for word in self.accepted if _is_about_sweep(word)):
            # One that is gone from sweeps too has its own advice
            problem = explained(Problem(key, why, "sweep=optuna too" if key.startswith("search.") else allowed))
            raise UserError(problem.key, problem.message, problem.allowed)

    def origin(self, key: str) -> str:
        """The source of the value of a dotted key: `the override ...`, a file, or an empty string."""
        # The last word wins, so it is the one to name
        for word in reversed(self.overrides):
            target = key_of(word)
            # An override may set a part of the key, such as data.split.val for a problem of data.split
            part = "." in key and within(target, [key])
            if key == target or part or (within(key, [target]) and target not in self.group_choices):
                return f"the override {word.lstrip('+')}"
        # Options at the top level, such as those of experiment, set keys after all others.
        choices = [self.sources.option(*choice) for choice in reversed(self.group_choices.items())]
        for option in sorted(filter(None, choices), key=lambda option: not option.is_global):
            section = option.group.replace("/", ".")
            if not (option.is_global or within(key, [section])):
                continue
            inside = key if option.is_global else key.removeprefix(f"{section}.")
            for path in self._files_of(option):
                if line := line_of(path, inside):
                    return f"{path}:{line}"
                if key == section and path == option.path:
                    return str(path)
        # What no option sets comes from the primary config
        file = self.sources.primary(self.primary) if self.primary else None
        line = line_of(file, key) if file is not None else None
        return f"{file}:{line}" if line else ""

    def _files_of(self, option: Option) -> Iterator[Path]:
        """The file of an option, and those of its group that it inherits keys from, nearest first."""
        yield option.path
        for name in reversed(inherited_by(option.path)):
            if (other := self.sources.option(option.group, name)) is not None and other.path != option.path:
                yield from self._files_of(other)

    def with_origins(self, problems: Sequence[Problem], checkpoint: str = "") -> list[Problem]:
        """Each problem with the override or file that its value came from, if that is known.

        With the path of a checkpoint, values that the command line does not set came from there.
        """
        known = dataclasses.replace(self, group_choices=self.given_choices, primary="") if checkpoint else self
        return [
            dataclasses.replace(problem, origin=problem.origin or known.origin(problem.key) or checkpoint)
            for problem in (explained(problem, at(self.values, problem.key)) for problem in problems)
        ]


def _is_about_sweep(word: str) -> bool:
    """Tell whether an override sets a key about a sweep as a whole; `sweep=PRESET` selects a preset, and is not one."""
    return within(key := key_of(word), OF_THE_SWEEP) and key != "sweep"
