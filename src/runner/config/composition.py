"""The values that a command line and the config files give together, before validation, and where each came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.config.gone import explained
from runner.config.keys import at, key_of, within
from runner.config.sources import Option, Sources
from runner.config.yaml_files import inherited_by, line_of


@dataclass(frozen=True)
class Composition:
    """The config of a job before any validation."""

    values: dict[str, Any]  # plain containers, interpolations resolved
    overrides: list[str]  # canonical ones of the command line, without those of `hydra.*`
    group_choices: dict[str, str]
    sources: Sources
    primary: str  # name of the primary config
    job_dir: Path | None = None  # folder that a sweep gives to this job
    run_dir: Path | None = None  # folder that `hydra.run.dir` names; both for a job that a cluster starts
    continues: bool = False  # what the same job of a sweep began in `job_dir`
    supervised: bool = False  # by the process of a sweep, which decides when it ends

    def in_folder(self, folder: Path) -> Composition:
        """The composition for a job of a sweep, which gets a folder."""
        return dataclasses.replace(self, job_dir=folder, run_dir=None)

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
        known = self
        if checkpoint:
            known = dataclasses.replace(self, group_choices=self.given_choices, primary="")
        return [
            dataclasses.replace(problem, origin=problem.origin or known.origin(problem.key) or checkpoint)
            for problem in (explained(problem, at(self.values, problem.key)) for problem in problems)
        ]
