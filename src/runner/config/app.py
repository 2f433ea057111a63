"""A verb as a Hydra application: arguments checked, the config composed, the task called for each job."""

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
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import overrides
from runner.config.composition import Composition as Composition
from runner.config.errors import ConfigError, Problem, UserError, nearest
from runner.config.file_mistakes import problems_in_file
from runner.config.flags import parse as parse
from runner.config.hydra_messages import as_problem
from runner.config.hydra_nodes import unasked
from runner.config.keys import all_keys, flatten, key_of
from runner.config.ledger import OF_THE_SWEEP, Plan, counted, identity
from runner.config.output_folders import not_folders, why_occupied
from runner.config.secrets import mask_sweep, mask_words
from runner.config.sources import Sources, searchpath_folder, shipped, text_of
from runner.config.sweep_jobs import Announce, announced, jobs_of, validate_jobs

# Hydra 1.4 deprecates the argument; 1.3 warns without it.
_VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}


def current(cfg: DictConfig) -> Composition:
    """The composition of the Hydra job that is running."""
    from hydra.core.hydra_config import HydraConfig

    hc = HydraConfig.get()
    folders = [Path(source.path) for source in hc.runtime.config_sources if source.schema == "file" and source.path]
    extra = [folder for folder in folders if folder.resolve() != shipped().resolve() and folder.is_dir()]
    sweep = hc.mode is not None and hc.mode.name == "MULTIRUN"
    if sweep:
        mask_sweep(Path(hc.sweep.dir) / "multirun.yaml")
    return Composition(
        values=_plain(cfg),
        overrides=overrides.canonical(hc.overrides.task),
        group_choices=_choices(hc),
        sources=Sources(extra),
        primary=str(hc.job.config_name),
        job_dir=Path(hc.runtime.output_dir) if sweep else None,
        run_dir=None if sweep else run_dir_of(hc),
    )


def run_dir_of(hydra_config: Any) -> Path | None:
    """The folder that `hydra.run.dir` names; None if it was left alone."""
    return Path(hydra_config.run.dir) if hydra_config.run.dir != "." else None


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """A config without `hydra` as plain containers, interpolations resolved."""
    names = [name for name in cfg if name != "hydra"]
    values = {str(name): "???" if OmegaConf.is_missing(cfg, name) else cfg[name] for name in names}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in values.items()
    }


def _choices(hydra_config: Any) -> dict[str, str]:
    chosen = OmegaConf.to_container(hydra_config.runtime.choices)
    assert isinstance(chosen, dict)
    return {str(group): str(name) for group, name in chosen.items() if name is not None and "hydra/" not in str(group)}


def launch(
    task: Callable[[DictConfig], Any],
    schema: type,
    primary: str,
    argv: Sequence[str],
    also: Callable[[Composition], list[Problem]],
    sweep_root: Callable[[Plan], Path],
    restarted: bool = False,
    announce: Announce = lambda *_: None,
) -> tuple[int, Path | None]:
    """Run `task` through Hydra, once or for every job of a sweep.

    Args:
        task: called with the composed config; must be importable by name, as launchers pickle it.
        schema: dataclass that the overrides are checked against.
        primary: name of the primary config.
        argv: the words after the verb.
        also: finds further problems in a composition; asked for a sweep, and when there are problems already, so that one
            report has them all.
        sweep_root: claims the folder of a sweep, or finds that of the one to continue.
        restarted: whether this process continues the work of one that was started with the same words and died.
        announce: called before each job of a sweep.

    Returns:
        The exit status of the run, or of a sweep, which is 0 unless it was broken off; and the folder of a sweep.

    Raises:
        ConfigError: with every problem found in the overrides and the composition.
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    flags = parse(argv, [*all_keys(schema), *Sources().groups()])
    shows = bool(flags.cfg or flags.info or flags.help or flags.hydra_help or flags.shell_completion)
    if flags.resolve and not shows:
        raise UserError("--resolve is for what --cfg shows; a run resolves its config anyway")
    sources = sources_of(flags)
    for path in sources.hidden():
        print(f"warning: {path} is never read: a shipped file of that name comes first; rename it", file=sys.stderr)
    several = flags.multirun or _asks_for_sweep(flags.overrides, sources)
    checked = overrides.check_overrides(flags.overrides, schema, sources, several)
    if shows:
        unknown = [overrides.unknown_key(key, word, schema, sources.groups(), []) for key, word in checked.unknown]
        if checked.problems or unknown:
            raise ConfigError([*checked.problems, *unknown])
        others = [word for word in argv if word not in flags.overrides]
        with _files_checked(sources, schema):
            return _main(task, primary, [*others, *checked.accepted]), None
    primary = (flags.config_name or primary).removesuffix(".yaml")
    with application(task, sources, schema) as app:
        composition, cfg = compose(app, primary, checked, schema, sources, also)
        sweeps = _is_sweep(cfg)
        if not (sweeps or flags.multirun):
            _refuse_keys_of_sweeps(checked.accepted)
            # Composing takes most of the time until a run begins, so it is not done again.
            app.compose_config = lambda **_: cfg
            configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
            with _no_empty_folders(Path(cfg.hydra.run.dir)):
                return _status(lambda: app.run(primary, task, checked.accepted)), None
        if wrong := [problem for problem in also(composition) if problem.key in OF_THE_SWEEP]:
            raise ConfigError(wrong)  # no job has these keys
        words = [word for word in checked.accepted if key_of(word) not in OF_THE_SWEEP]
        params = dict(cfg.hydra.sweeper.get("params") or {})
        swept = sorted({*overrides.swept(words), *params})
        jobs: list[list[str]] = []
        identities: dict[str, list[str]] | None = None
        if cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic":
            jobs, identities = jobs_of(words, params), {}

            def problems_of(words: list[str]) -> list[Problem]:
                this = dataclasses.replace(checked, accepted=words)
                job, _ = compose(app, primary, this, schema, sources, also, list(flatten(composition.values)))
                identities[identity(job.values, job.overrides, swept)] = job.overrides
                return [] if job.values.get("ckpt_path") is not None else also(job)

            validate_jobs(jobs, problems_of)
        elif common := _of_every_job(cfg, words, also(composition)):
            raise ConfigError(common)

        def base() -> dict[str, Any]:
            """What the command sets for all jobs; its words if they are no config by themselves."""
            plain = dataclasses.replace(checked, accepted=[word for word in words if key_of(word) not in swept])
            with contextlib.suppress(ConfigError):
                return counted(compose(app, primary, plain, schema, sources, also)[0].values)
            return {"overrides": sorted(mask_words(plain.accepted))}

        given = [word.split("=", 1)[1].strip("'\"") for word in words if word.startswith("hydra.sweep.dir=")]
        if given and (problem := why_occupied(Path(given[-1]), words, restarted or composition.resumes)):
            raise ConfigError([problem])
        alone = [
            f"--{name.replace('_', '-')}={flag}"
            for name in ("config_dir", "config_name")
            if (flag := getattr(flags, name))
        ]
        place = Path(given[-1]) if given else None
        folder = sweep_root(Plan(composition.values, swept, identities, base, alone, place))
        words += [] if given else [f"hydra.sweep.dir='{folder}'"]
        words += [] if sweeps else ["hydra.mode=MULTIRUN"]
        with announced(announce, jobs):
            return _status(lambda: app.multirun(primary, task, words)), folder


@contextlib.contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """Remove a folder that Hydra makes before a job starts, and its parents, where they are new and nothing was written."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()


def complete(task: Callable[[DictConfig], Any], primary: str, argv: Sequence[str]) -> int:
    """Let Hydra answer a query of tab completion; what options have in common is no option."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        status = _main(task, primary, list(argv))
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


def _asks_for_sweep(words: Sequence[str], sources: Sources) -> bool:
    """Whether a selected preset turns a plain call into a sweep."""
    return any(
        (option := sources.option("sweep", word.split("=", 1)[1])) is not None and "MULTIRUN" in text_of(option.path)
        for word in words
        if word.lstrip("+").startswith("sweep=")
    ) or any(word.replace(" ", "") == "hydra.mode=MULTIRUN" for word in words)


@contextlib.contextmanager
def application(task: Callable[[DictConfig], Any], sources: Sources, schema: type) -> Iterator[Any]:
    """Hydra's object for an application that searches the shipped configs and those of the user."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    name = task.__module__.rpartition(".")[2]
    with hydra.initialize_config_dir(config_dir=str(shipped()), job_name=name, **_VERSION_BASE):
        # As `--config-dir` does; an override of `hydra.searchpath` would not find a primary config.
        loader: Any = GlobalHydra.instance().config_loader()
        path = loader.get_search_path()
        last = path.get_path().pop()  # has to stay the last
        for folder in sources.extra:
            path.append("command-line", f"file://{folder}")
        path.append(last.provider, last.path)
        loader.repository.initialize_sources(path)
        with _files_checked(sources, schema):
            yield GlobalHydra.instance().hydra


@contextlib.contextmanager
def _files_checked(sources: Sources, schema: type) -> Iterator[None]:
    """Each config file is checked before Hydra reads it, as its messages name no line, or nothing is said at all."""
    Plugins.instance()  # registers the sources of configs
    source: Any = SourcesRegistry.instance().resolve("file")
    load_config = source.load_config

    def check_and_load(self: Any, config_path: str) -> Any:
        path = Path(self.path, self._normalize_file_name(config_path))
        if problems := problems_in_file(path, Path(self.path), schema, sources):
            raise ConfigError(problems)
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
    also: Callable[[Composition], list[Problem]],
    known: Sequence[str] = (),
) -> tuple[Composition, DictConfig]:
    """Compose the first job, before folders are made, callbacks run and loggers are built.

    `known` are keys that an error of Hydra about another key may suggest.

    Raises:
        ConfigError: with every problem found.
    """
    problems = [*checked.problems, *not_folders(checked.accepted)]
    if sources.primary(primary) is None:
        names = [path.stem for folder in sources.folders for path in folder.glob("*.yaml")]
        message, close = f"there is no config '{primary}'", nearest(primary, names)
        raise ConfigError([Problem("--config-name", message, ", ".join(names), close)])
    words = overrides.first_of_sweeps(checked.accepted)
    names, failure = list[str](), list[Problem]()
    try:
        cfg: DictConfig = app.compose_config(primary, words, RunMode.RUN)
        names = [key for key in flatten(OmegaConf.to_container(cfg, resolve=False)) if not key.startswith("hydra.")]
        composition = Composition(
            values={},
            overrides=overrides.canonical(word for word in words if not word.startswith("hydra")),
            group_choices=_choices(cfg.hydra),
            sources=sources,
            primary=primary,
        )
        composition = _with_values(composition, cfg, names)
        if cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic":
            problems += overrides.intervals(checked.accepted)
    except ConfigError as error:
        failure = list(error.problems)
    except (HydraException, OmegaConfBaseException) as error:
        failure = [as_problem(error, known)]
    problems += [overrides.unknown_key(key, word, schema, sources.groups(), names) for key, word in checked.unknown]
    if failure:
        raise ConfigError([*problems, *failure])
    problems += unasked(cfg, checked.accepted)
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


def _refuse_keys_of_sweeps(words: Sequence[str]) -> None:
    for word in words:
        if key_of(word) in OF_THE_SWEEP:
            raise UserError(key_of(word), "is about a sweep, and this is one run", "--multirun too, or no such key")


def _of_every_job(cfg: DictConfig, words: Sequence[str], problems: Sequence[Problem]) -> list[Problem]:
    """Those problems of the first job that all jobs of a sweep have: how the data are split, where no job has other data."""
    swept = {*overrides.swept(words), *(cfg.hydra.sweeper.get("params") or {})} - {"data.split.fold", "data.split.seed"}
    if any(key.split(".")[0] in ("data", "experiment", "debug") for key in swept):
        return []
    return [problem for problem in problems if problem.key.startswith("data.split")]


def _is_sweep(cfg: DictConfig) -> bool:
    return str(cfg.hydra.mode or "").endswith("MULTIRUN")


def _status(run: Callable[[], Any]) -> int:
    """The exit status of what Hydra runs.

    Raises:
        ConfigError: if Hydra refuses it.
    """
    try:
        run()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([as_problem(error)]) from error
    return 0


def _main(task: Callable[[DictConfig], Any], primary: str, argv: list[str]) -> int:
    """Hand over to Hydra as if it had been started by itself; returns the exit status."""
    saved, shown = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [saved[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors then, and does not print them itself
    try:
        return _status(hydra.main(config_path=str(shipped()), config_name=primary, **_VERSION_BASE)(task))
    finally:
        sys.argv = saved
        os.environ["HYDRA_FULL_ERROR"] = shown or "0"
