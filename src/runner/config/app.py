"""A verb as a Hydra application: the folders that it searches, and the config composed and checked."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.base.errors import ConfigError, Problem, nearest
from runner.config import overrides
from runner.config.composition import Composition as Composition
from runner.config.flags import parse as parse
from runner.config.hydra_messages import as_problem
from runner.config.keys import flatten, is_of_hydra, key_of
from runner.config.output_folders import in_sweep, not_folders
from runner.config.sources import Sources, searchpath_folder, shipped
from runner.config.space import with_space
from runner.config.yaml_files import mistakes_in, refusing

# Hydra 1.4 deprecates the argument; 1.3 warns without it.
_VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """A config without `hydra` as plain containers, interpolations resolved."""
    names = [name for name in cfg if name != "hydra"]
    values = {str(name): "???" if OmegaConf.is_missing(cfg, name) else cfg[name] for name in names}
    plain: dict[str, Any] = {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in values.items()
    }
    if isinstance(plain.get("search"), dict):
        plain["search"] = with_space(plain["search"])
    return plain


def _choices(hydra_config: Any) -> dict[str, str]:
    chosen = OmegaConf.to_container(hydra_config.runtime.choices)
    assert isinstance(chosen, dict)
    return {str(group): str(name) for group, name in chosen.items() if name is not None and "hydra/" not in str(group)}


def complete(verb: str, argv: Sequence[str]) -> int:
    """Let Hydra answer a query of tab completion; what options have in common is not an option."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        status = main(verb, list(argv))
    text = answer.getvalue()
    if any(word.startswith("query=") for word in argv):
        text = re.sub(r"(?<!\S)\w+=_\w+(\s|$)", "", text)
    sys.stdout.write(text)
    return status


def sources_of(flags: argparse.Namespace) -> Sources:
    """The folders of configs that a command line names."""
    folders = [Path(flags.config_dir)] if flags.config_dir else []
    for word in flags.overrides:
        if word.lstrip("+").startswith("hydra.searchpath="):
            entries = yaml.safe_load(word.split("=", 1)[1])
            folders += [path for entry in entries or [] if (path := searchpath_folder(str(entry)))]
    return Sources(folders)


@contextlib.contextmanager
def application(verb: str, sources: Sources, schema: type) -> Iterator[Any]:
    """Hydra's object for an application that searches the shipped configs and those of the user."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    with hydra.initialize_config_dir(config_dir=str(shipped()), job_name=verb.replace("-", "_"), **_VERSION_BASE):
        # As `--config-dir` does; an override of `hydra.searchpath` would not find a primary config.
        loader: Any = GlobalHydra.instance().config_loader()
        path = loader.get_search_path()
        last = path.get_path().pop()  # has to stay the last
        for folder in sources.extra:
            path.append("command-line", f"file://{folder}")
        path.append(last.provider, last.path)
        loader.repository.initialize_sources(path)
        with files_checked():
            yield GlobalHydra.instance().hydra


@contextlib.contextmanager
def files_checked() -> Iterator[None]:
    """Each config file is checked before Hydra reads it, and mistakes of YAML have a line."""
    Plugins.instance()  # registers the sources of configs
    source: Any = SourcesRegistry.instance().resolve("file")
    load_config = source.load_config

    def check_and_load(self: Any, config_path: str) -> Any:
        path = Path(self.path, self._normalize_file_name(config_path))
        if problems := mistakes_in(path):
            raise ConfigError(problems)
        with refusing(path):
            return load_config(self, config_path)

    source.load_config = check_and_load
    try:
        yield
    finally:
        source.load_config = load_config


def compose(
    app: Any,
    primary: str,
    checked: overrides.CheckedOverrides,
    schema: type,
    sources: Sources,
    *,
    also: Callable[[Composition], list[Problem]],
    known: Sequence[str] = (),
) -> tuple[Composition, DictConfig]:
    """Compose the first job, before folders are made, callbacks run and loggers are built.

    `known` are keys that an error of Hydra about another key may suggest.

    Raises:
        ConfigError: with every problem found.
    """
    # Problems are collected, so that one start shows all of them
    problems = [*checked.problems, *not_folders(checked.accepted)]
    if sources.primary(primary) is None:
        names = sorted(path.stem for folder in sources.folders for path in folder.glob("*.yaml"))
        message, close = f"there is no config '{primary}'", nearest(primary, names)
        raise ConfigError([Problem("--config-name", message, ", ".join(names), close)])
    # A sweep is checked by its first job before a folder is made.
    words = overrides.first_of_sweeps(checked.accepted)
    names, failure = list[str](), list[Problem]()
    try:
        # The composition of Hydra itself: what it refuses becomes a problem in the words of this program
        deleted = [word[1:] for word in words if word.startswith("~") and "." in word and "=" not in word]
        # A checkpoint may have these keys, or may have had them
        added = [f"++{key}={{}}" for key in deleted] if "ckpt_path" in map(key_of, words) else []
        cfg: DictConfig = app.compose_config(primary, [*added, *words], RunMode.RUN)
        names = [key for key in flatten(OmegaConf.to_container(cfg, resolve=False)) if not key.startswith("hydra.")]
        composition = Composition(
            values={},
            overrides=overrides.canonical(word for word in words if not is_of_hydra(word)),
            group_choices=_choices(cfg.hydra),
            sources=sources,
            primary=primary,
            run_dir=Path(cfg.hydra.run.dir) if cfg.hydra.run.dir != "." else None,
        )
        composition = _with_values(composition, cfg, names)
        # A run inside a sweep's folder that resumes is a job of it
        if composition.run_dir is not None and in_sweep(composition.run_dir) and composition.resumes:
            composition = dataclasses.replace(composition, job_dir=composition.run_dir)
        if cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic":
            problems += overrides.intervals(checked.accepted)
    except ConfigError as error:
        failure = list(error.problems)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        failure = [as_problem(error, known)]
    # Unknown keys wait until here: the nearest key may be one of a component that this config selects.
    problems += [overrides.unknown_key(key, word, schema, sources.groups(), names) for key, word in checked.unknown]
    if failure:
        raise ConfigError([*problems, *failure])
    # Words without effect are probably mistakes, so they are refused too
    problems += [*overrides.without_effect(checked.accepted)]
    if problems:
        raise ConfigError([*problems, *also(composition)])
    return composition, cfg


def _with_values(composition: Composition, cfg: DictConfig, names: list[str]) -> Composition:
    """The composition with the values of its config.

    Raises:
        ConfigError: for an interpolation that cannot be resolved.
    """
    try:
        return dataclasses.replace(composition, values=_plain(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(composition.with_origins([as_problem(error, names)])) from error


def main(verb: str, argv: list[str]) -> int:
    """Let Hydra show what its flags ask for, as if it had been started by itself; returns the exit status.

    Raises:
        ConfigError: if Hydra refuses it.
    """

    def task(cfg: DictConfig) -> None:
        """Nothing, as the flags that lead here show something and run nothing."""

    # Hydra names its job after the last part
    task.__module__ = f"runner.verbs.{verb.replace('-', '_')}"
    # Hydra reads the command from sys.argv, and is given this verb's
    saved, shown = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [saved[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors then, and does not print them itself
    try:
        hydra.main(config_path=str(shipped()), config_name=verb, **_VERSION_BASE)(task)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([as_problem(error)]) from error
    finally:
        sys.argv = saved
        os.environ["HYDRA_FULL_ERROR"] = shown or "0"
    return 0
