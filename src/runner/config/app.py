"""A verb as a Hydra application: arguments checked, the config composed, the task called for each job."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import overrides
from runner.config.composition import Composition as Composition
from runner.config.errors import ConfigError, Problem, UserError, nearest
from runner.config.hydra_nodes import unasked
from runner.config.keys import flatten
from runner.config.output_folders import not_folders, why_occupied
from runner.config.secrets import mask_sweep
from runner.config.sources import Sources, searchpath_folder, shipped, text_of

# Hydra 1.4 deprecates the argument; 1.3 warns without it.
_VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}


def current(cfg: DictConfig) -> Composition:
    """The composition of the Hydra job that is running."""
    from hydra.core.hydra_config import HydraConfig

    hc = HydraConfig.get()
    folders = [Path(source.path) for source in hc.runtime.config_sources if source.schema == "file" and source.path]
    extra = [folder for folder in folders if folder.resolve() != shipped().resolve() and folder.is_dir()]
    sweep = hc.mode is not None and hc.mode.name == "MULTIRUN"
    explicit = not sweep and hc.run.dir != "."
    if sweep:
        mask_sweep(Path(hc.sweep.dir) / "multirun.yaml")
    return Composition(
        values=_plain(cfg),
        overrides=overrides.canonical(hc.overrides.task),
        group_choices=_choices(hc),
        sources=Sources(extra),
        primary=str(hc.job.config_name),
        job_dir=Path(hc.runtime.output_dir) if sweep else None,
        run_dir=Path(hc.run.dir) if explicit else None,
    )


def _plain(cfg: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    values = OmegaConf.to_container(own, resolve=True, throw_on_missing=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _choices(hydra_config: Any) -> dict[str, str]:
    chosen = OmegaConf.to_container(hydra_config.runtime.choices)
    assert isinstance(chosen, dict)
    return {str(group): str(name) for group, name in chosen.items() if name is not None and "hydra/" not in str(group)}


@dataclass(frozen=True)
class Request:
    """A command line taken apart: Hydra's flags and the overrides."""

    flags: argparse.Namespace
    words: list[str]
    primary: str
    multirun: bool
    only_shows: bool


def parse(argv: Sequence[str], primary: str) -> Request:
    """Take the words after a verb apart.

    Raises:
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            flags = parser.parse_intermixed_args(list(argv))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        options = [option for action in parser._actions for option in action.option_strings]
        wrong = next((word for word in argv if word.startswith("-") and word.split("=")[0] not in options), "")
        close = nearest(wrong.split("=")[0], options)
        reason = complaint.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UserError(reason + (f"; did you mean '{close}'?" if close else "")) from None
    if flags.experimental_rerun:
        raise UserError("--experimental-rerun reads a pickle, which could run anything; use ckpt_path= instead")
    if flags.config_path:
        raise UserError(
            "--config-path would replace the configs that come with the program; add yours with --config-dir"
        )
    shows = bool(flags.cfg or flags.info or flags.help or flags.hydra_help or flags.shell_completion)
    name = (flags.config_name or primary).removesuffix(".yaml")
    return Request(flags, flags.overrides, name, bool(flags.multirun), shows)


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        status: exit status of the run; of a sweep 0 unless it was broken off.
        sweep: folder of the sweep; None for a single run.
    """

    status: int
    sweep: Path | None = None


def launch(
    task: Callable[[DictConfig], Any],
    schema: type,
    primary: str,
    argv: Sequence[str],
    also: Callable[[Composition], list[Problem]],
    sweep_root: Callable[[dict[str, Any]], Path],
) -> Outcome:
    """Run `task` through Hydra, once or for every job of a sweep.

    Args:
        task: called with the composed config; must be importable by name, as launchers pickle it.
        schema: dataclass that the overrides are checked against.
        primary: name of the primary config.
        argv: the words after the verb.
        also: finds further problems in a composition; asked for a sweep, and when there are problems already, so that one
            report has them all.
        sweep_root: claims the folder of a sweep, given the composed values.

    Raises:
        ConfigError: with every problem found in the overrides and the composition.
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    request = parse(argv, primary)
    if request.flags.resolve and not request.only_shows:
        raise UserError("--resolve is for what --cfg shows; a run resolves its config anyway")
    sources = Sources(_folders(request))
    for path in sources.hidden():
        print(f"warning: {path} is never read: a shipped file of that name comes first; rename it", file=sys.stderr)
    sweeps = request.multirun or _asks_for_sweep(request, sources)
    known = overrides.check_overrides(request.words, schema, sources, sweeps)
    flag_words = [word for word in argv if word not in request.words]
    if request.only_shows:
        unknown = [overrides.unknown_key(key, word, schema, sources.groups(), []) for key, word in known.unknown]
        if known.problems or unknown:
            raise ConfigError([*known.problems, *unknown])
        return Outcome(_call_hydra(task, primary, [*flag_words, *known.accepted]))
    if not (sweeps or known.problems or known.unknown or not_folders(known.accepted)):
        status = _run_one(task, request, known.accepted)
        if status is not None:
            return Outcome(status)
    composition, multirun = _compose(request, known, schema, sources, also)
    if not (multirun or request.multirun):
        return Outcome(_call_hydra(task, primary, [*flag_words, *known.accepted]))
    if not request.multirun:  # Hydra 1.4 sweeps for a preset only with the flag
        flag_words.append("--multirun")
    given = [word.split("=", 1)[1].strip("'\"") for word in known.accepted if word.startswith("hydra.sweep.dir=")]
    resumes = composition.resumes
    if given and (problem := why_occupied(Path(given[-1]), known.accepted, resumes)):
        raise ConfigError([problem])
    folder = Path(given[-1]) if given else sweep_root(composition.values)
    extra = [] if given else [f"hydra.sweep.dir='{folder}'"]
    return Outcome(_call_hydra(task, primary, [*flag_words, *known.accepted, *extra]), folder)


def complete(task: Callable[[DictConfig], Any], primary: str, argv: Sequence[str]) -> int:
    """Let Hydra answer a query of tab completion; what options have in common is no option."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        status = _call_hydra(task, primary, list(argv))
    text = answer.getvalue()
    if any(word.startswith("query=") for word in argv):
        text = re.sub(r"(?<!\S)\w+=_\w+(\s|$)", "", text)
    sys.stdout.write(text)
    return status


def _folders(request: Request) -> list[Path]:
    folders = [Path(request.flags.config_dir)] if request.flags.config_dir else []
    for word in request.words:
        if word.lstrip("+").startswith("hydra.searchpath="):
            entries = yaml.safe_load(word.split("=", 1)[1])
            folders += [path for entry in entries or [] if (path := searchpath_folder(str(entry)))]
    return folders


def _asks_for_sweep(request: Request, sources: Sources) -> bool:
    """Whether a selected preset turns a plain call into a sweep."""
    return any(
        (option := sources.option("sweep", word.split("=", 1)[1])) is not None and "MULTIRUN" in text_of(option.path)
        for word in request.words
        if word.lstrip("+").startswith("sweep=")
    ) or any(word.replace(" ", "") == "hydra.mode=MULTIRUN" for word in request.words)


def _compose(
    request: Request,
    known: overrides.CheckedOverrides,
    schema: type,
    sources: Sources,
    also: Callable[[Composition], list[Problem]],
) -> tuple[Composition, bool]:
    """Compose once to find every problem before anything starts; also tells whether a preset asks for a sweep."""
    problems = [*known.problems, *not_folders(known.accepted)]
    if sources.primary(request.primary) is None:
        names = [path.stem for folder in sources.folders for path in folder.glob("*.yaml")]
        close = nearest(request.primary, names)
        raise ConfigError(
            [Problem("--config-name", f"there is no config '{request.primary}'", ", ".join(names), close)]
        )
    words = overrides.first_of_sweeps(known.accepted)
    words = [word for word in words if not word.startswith("hydra.searchpath=")]
    try:
        with hydra.initialize_config_dir(config_dir=str(shipped()), **_VERSION_BASE):
            _search_also(sources.extra)
            cfg = hydra.compose(request.primary, words, return_hydra_config=True)
        values = _plain(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        problems += [overrides.unknown_key(key, word, schema, sources.groups(), []) for key, word in known.unknown]
        raise ConfigError([*problems, _as_problem(error)]) from error
    if cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic":
        problems += overrides.intervals(known.accepted)
    names = list(flatten(values))
    problems += [overrides.unknown_key(key, word, schema, sources.groups(), names) for key, word in known.unknown]
    problems += unasked(cfg, known.accepted)
    composition = Composition(
        values=values,
        overrides=overrides.canonical(w for w in words if not w.startswith("hydra")),
        group_choices=_choices(cfg.hydra),
        sources=sources,
        primary=request.primary,
    )
    if problems:
        raise ConfigError([*problems, *also(composition)])
    if (_is_sweep(cfg) or request.multirun) and (common := _of_every_job(cfg, known.accepted, also(composition))):
        raise ConfigError(common)
    return composition, _is_sweep(cfg)


def _of_every_job(cfg: DictConfig, words: Sequence[str], problems: Sequence[Problem]) -> list[Problem]:
    """Those problems of the first job that all jobs of a sweep have: how the data are split, where no job has other data."""
    swept = {*overrides.swept(words), *(cfg.hydra.sweeper.get("params") or {})} - {"data.split.fold", "data.split.seed"}
    if any(key.split(".")[0] in ("data", "experiment", "debug") for key in swept):
        return []
    return [problem for problem in problems if problem.key.startswith("data.split")]


def _search_also(folders: Sequence[Path]) -> None:
    """Search `folders` as `--config-dir` does; an override of `hydra.searchpath` would not find a primary config."""
    loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    schema = path.get_path().pop()  # has to stay the last
    for folder in folders:
        path.append("command-line", f"file://{folder}")
    path.append(schema.provider, schema.path)
    loader.repository.initialize_sources(path)


def _as_problem(error: Exception) -> Problem:
    """A message of Hydra's or OmegaConf's in the form of all others."""
    group, _, option = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group in ("hydra/launcher", "hydra/sweeper"):
        others = getattr(error, "options", None) or []
        message = f"there is no '{option}': its plugin is not installed, or the name is wrong"
        allowed = ", ".join(others) + "; pip install 'runner[joblib]', 'runner[submitit]' or 'runner[optuna]' adds one"
        return Problem(group, message, allowed, nearest(option, others))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "config")
    return Problem(key, lines[0].rstrip(".") if lines else type(error).__name__)


class _NotOne(BaseException):
    """What was composed is no single run, or has a mistake; no `Exception`, as Hydra would show a traceback of it."""


def _run_one(task: Callable[[DictConfig], Any], request: Request, words: list[str]) -> int | None:
    """Run a single job; returns its exit status, or None if nothing was begun, and why is still to be found out.

    What `hydra.main` makes composes everything twice, once to find out whether it is a sweep, and composing is most of the
    time until a run begins.
    """
    from hydra._internal.utils import run_and_report
    from hydra.core.utils import configure_log

    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    name = task.__module__.rpartition(".")[2]
    with hydra.initialize_config_dir(config_dir=str(shipped()), job_name=name, **_VERSION_BASE):
        folder = request.flags.config_dir
        _search_also([Path(folder).resolve()] if folder else [])
        application: Any = GlobalHydra.instance().hydra
        compose = application.compose_config

        def checked(**given: Any) -> DictConfig:
            """Compose, and look at it before folders are made, callbacks run and loggers are built."""
            try:
                cfg: DictConfig = compose(**given | {"with_log_configuration": False})
                _plain(cfg)
            except Exception as error:
                raise _NotOne from error
            if _is_sweep(cfg) or unasked(cfg, words):
                raise _NotOne
            if given["with_log_configuration"]:
                configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
            return cfg

        application.compose_config = checked
        config = request.flags.config_name or request.primary
        try:
            run_and_report(lambda: application.run(config_name=config, task_function=task, overrides=words))
        except _NotOne:
            return None
        except SystemExit as stop:
            return _status(stop)
    return 0


def _is_sweep(cfg: DictConfig) -> bool:
    return str(cfg.hydra.mode or "").endswith("MULTIRUN")


def _status(stop: SystemExit) -> int:
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _call_hydra(task: Callable[[DictConfig], Any], primary: str, argv: list[str]) -> int:
    """Hand over to Hydra as if it had been started by itself; returns the exit status."""
    Plugins.instance()  # the first time, this loads the launcher's module again
    launcher: Any = importlib.import_module("hydra._internal.core_plugins.basic_launcher")
    run_job = launcher.run_job

    def run_job_and_drop_configs(**given: Any) -> Any:
        # Hydra's launcher keeps the results of all jobs until the sweep ends, with two configs of 0.5 MiB in each.
        result = run_job(**given)
        result.cfg = result.hydra_cfg = None
        return result

    saved = sys.argv
    sys.argv = [saved[0], *argv]
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    launcher.run_job = run_job_and_drop_configs
    try:
        hydra.main(config_path=str(shipped()), config_name=primary, **_VERSION_BASE)(task)()
    except SystemExit as stop:
        return _status(stop)
    finally:
        sys.argv = saved
        launcher.run_job = run_job
    return 0
