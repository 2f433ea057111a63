"""The jobs of a verb through Hydra: one run, or a sweep, all of whose jobs are validated before the first one starts."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log
from omegaconf import DictConfig

from runner.config import overrides, slurm
from runner.config.app import Composition, application, compose, files_checked, main, sources_of, status_of
from runner.config.errors import ConfigError, Problem, UserError
from runner.config.flags import parse
from runner.config.keys import OF_THE_SWEEP, all_keys, at, key_of, within
from runner.config.merged_once import merged_once
from runner.config.output_folders import why_occupied
from runner.config.secrets import mask_words
from runner.config.sources import Sources, text_of
from runner.config.truth import is_true
from runner.sweeps import on_ray, pool_launcher, script
from runner.sweeps.ablation import ablated, toggles_off
from runner.sweeps.command import Command
from runner.sweeps.jobs import Announce, announced, jobs_of, validate_jobs
from runner.sweeps.launch_search import launch_search
from runner.sweeps.launchers import absent, status_of_jobs, sturdy
from runner.sweeps.ledger import Plan, counted, identity


def launch(
    task: Callable[[DictConfig], Any],
    schema: type,
    primary: str,
    argv: Sequence[str],
    also: Callable[[Composition, bool], list[Problem]],
    sweep_root: Callable[[Plan], Path],
    restarted: bool = False,
    announce: Announce = lambda *_: None,
    keeps_runs: bool = True,
    monitor: Callable[[Composition], tuple[str, str]] = lambda _: ("val/loss", "min"),
) -> tuple[int, Path | None]:
    """Run `task` through Hydra, once or for every job of a sweep.

    Args:
        task: called with the composed config; must be importable by name, as launchers pickle it.
        schema: dataclass that the overrides are checked against.
        primary: name of the primary config.
        argv: the words after the verb.
        also: finds further problems in a composition, with or without importing torch; asked without before a run, and when
            there are problems already, so that one report has them all; and with for each job of a sweep.
        sweep_root: claims the folder of a sweep, or finds that of the one to continue.
        restarted: whether this process continues the work of one that was started with the same words and died.
        announce: called before each job of a sweep.
        keeps_runs: whether a sweep has a ledger.
        monitor: metric and direction that a run of a composition watches; a search has to know them before its first run.

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
        print(f"warning: {path} is not read: a shipped file takes precedence; rename it", file=sys.stderr)
    several = flags.multirun or _asks_for_sweep(flags.overrides, sources)
    checked = overrides.check_overrides(flags.overrides, schema, sources, several)
    if shows:
        unknown = [overrides.unknown_key(key, word, schema, sources.groups(), []) for key, word in checked.unknown]
        if checked.problems or unknown:
            raise ConfigError([*checked.problems, *unknown])
        others = [word for word in argv if word not in flags.overrides]
        with files_checked(sources, schema):
            return main(task, primary, [*others, *checked.accepted]), None
    verb, primary = primary, (flags.config_name or primary).removesuffix(".yaml")
    with application(task, sources, schema) as app, merged_once() if several else contextlib.nullcontext():
        composition, cfg = compose(app, primary, checked, schema, sources, also)
        call = Command(
            *(task, schema, verb, primary, argv, flags, checked, sources),
            *(also, monitor, app, composition, cfg, keeps_runs),
        )
        if not (flags.multirun or _is_sweep(cfg)):
            return _launch_run(call), None
        _check_sweep(call, restarted)
        if composition.values["search"]["sampler"] is not None:
            return _launch_search(call, sweep_root)
        return _launch_grid(call, sweep_root, announce)


def _launch_run(call: Command) -> int:
    """Run one job; returns its exit status."""
    call.refuse_keys_of_sweeps("applies to a sweep, and this is a single run", "--multirun, or no such key")
    wants_script = _wants_script(call.composition)
    if problems := call.also(call.composition, wants_script):
        raise ConfigError(problems)
    if wants_script:
        print(script.job_script(call.verb, call.argv, call.composition.values))
        return 0
    cfg, app = call.cfg, call.app
    # Composing takes most of the time until a run begins, so it is not done again.
    app.compose_config = lambda **_: cfg
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    try:
        with _no_empty_folders(Path(cfg.hydra.run.dir)):
            return status_of(lambda: app.run(call.primary, call.task, call.checked.accepted))
    finally:
        _requeue(call.composition)


def _check_sweep(call: Command, restarted: bool) -> None:
    """Refuse what is wrong with a sweep as a whole."""
    values = call.composition.values
    if wrong := [problem for problem in call.also(call.composition, False) if within(problem.key, OF_THE_SWEEP)]:
        raise ConfigError(wrong)  # no job has these keys
    if problem := absent(call.chosen("hydra/launcher")):
        raise ConfigError([problem])
    if call.in_pool and (wrong := pool_launcher.problems_of(call.cfg.hydra.launcher, values, call.verb)):
        raise ConfigError(wrong)
    if not call.keeps_runs:
        call.refuse_keys_of_sweeps("is about jobs that train, and this verb keeps no ledger", "no such key")
    continues = restarted or call.composition.resumes
    if call.place and (problem := why_occupied(call.place, call.words, continues)):
        raise ConfigError([problem])
    if values["search"]["space"] and values["search"]["sampler"] is None:
        raise UserError("search", "has keys to vary, and this sweep is not a search", "sweep=optuna too")


def _launch_search(call: Command, sweep_root: Callable[[Plan], Path]) -> tuple[int, Path | None]:
    """Run the trials of a search that are left; returns the exit status and the folder."""
    if _wants_script(call.composition):
        print(script.job_script(call.verb, call.argv, call.composition.values))
        return 0, None
    folder, run = launch_search(call, sweep_root)
    try:
        return status_of(run), folder
    finally:
        _requeue(call.composition)


def _launch_grid(call: Command, sweep_root: Callable[[Plan], Path], announce: Announce) -> tuple[int, Path | None]:
    """Run the jobs of a sweeper of Hydra, those that the ledger says are left; returns the exit status and the folder."""
    composition, cfg, words = call.composition, call.cfg, call.words
    params = dict(cfg.hydra.sweeper.get("params") or {})
    swept = sorted({*overrides.swept(words), *params})
    if same_for_all := [key for key in ("name", "output_root") if key in swept]:
        why = "names the folder of a sweep, so that its jobs cannot differ in it"
        raise UserError(same_for_all[0], why, f"one {same_for_all[0]}, and job numbers; or one command for each")
    jobs: list[list[str]] = []
    off: dict[str, str] = {}
    identities: dict[str, list[str]] | None = None
    if call.chosen("hydra/sweeper") == "basic":
        jobs, identities = jobs_of(words, params), {}
        if composition.values["ablate"] is not None:
            off = toggles_off(composition.values, call.schema)
            jobs, swept = ablated(jobs, off), sorted({*swept, *off})

        composed = functools.cache(lambda *words: call.composed(list(words)))

        def problems_of(words: list[str], imports: bool) -> list[Problem]:
            job = composed(*words)
            identities[identity(job.values, job.overrides, swept)] = job.overrides
            return [] if job.values.get("ckpt_path") is not None else call.also(job, imports)

        validate_jobs(jobs, problems_of)
    elif common := _of_every_job(cfg, words, call.also(composition, True)):
        raise ConfigError(common)

    def base() -> dict[str, Any]:
        """What the command sets for all jobs; its words if they are not a config by themselves."""
        plain = [word for word in words if key_of(word) not in swept]
        on = {f"ablate.{key}": at(composition.values, key) for key in off}
        with contextlib.suppress(ConfigError):
            return counted(call.composed(plain).values) | on
        return {"overrides": sorted(mask_words(plain))}

    if _wants_script(composition):
        print(_script_of_sweep(call, len(jobs)))
        return 0, None
    detach = call.in_pool and cfg.hydra.launcher.detach
    folder = sweep_root(Plan(composition.values, swept, identities, base, call.flags_of_jobs, call.place, detach))
    of_hydra = [] if call.place else [f"hydra.sweep.dir='{folder}'"]
    of_hydra += [] if _is_sweep(cfg) else ["hydra.mode=MULTIRUN"]
    pool_launcher.register()
    on_ray.register()
    try:
        with announced(announce, jobs, fixed=bool(off)), sturdy(call.chosen("hydra/launcher"), folder):
            status = status_of(lambda: call.app.multirun(call.primary, call.task, [*words, *of_hydra]))
        return status or status_of_jobs(folder), folder
    finally:
        _requeue(composition)


def _wants_script(composition: Composition) -> bool:
    return is_true((composition.values.get("slurm") or {}).get("script"))


def _script_of_sweep(call: Command, jobs: int) -> str:
    """The script of the array that submitit would submit, or that of a job which runs the whole sweep."""
    values = call.composition.values
    if call.chosen("hydra/launcher") != "submitit_slurm":
        return script.job_script(call.verb, call.argv, values)
    named = call.place or values.get("sweep_dir")
    folder = Path(named) if named else Path(str(values["output_root"]), str(values["name"]), "sweeps", "DATE_TIME")
    return script.array_script(call.cfg, folder, jobs)


def _requeue(composition: Composition) -> None:
    """Put the job of SLURM that this process is back into the queue if it was warned; nothing that failed prevents that."""
    if slurm.warned(composition.values):
        slurm.requeue()


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


def _asks_for_sweep(words: Sequence[str], sources: Sources) -> bool:
    """Whether a selected preset turns a plain call into a sweep."""
    return any(
        (option := sources.option("sweep", word.split("=", 1)[1])) is not None and "MULTIRUN" in text_of(option.path)
        for word in words
        if word.lstrip("+").startswith("sweep=")
    ) or any(word.replace(" ", "") == "hydra.mode=MULTIRUN" for word in words)


def _of_every_job(cfg: DictConfig, words: Sequence[str], problems: Sequence[Problem]) -> list[Problem]:
    """Those problems of the first job that all jobs of a sweep have: how the data are split, where no job has other data."""
    swept = {*overrides.swept(words), *(cfg.hydra.sweeper.get("params") or {})} - {"data.split.fold", "data.split.seed"}
    if any(key.split(".")[0] in ("data", "experiment", "debug") for key in swept):
        return []
    return [problem for problem in problems if problem.key.startswith("data.split")]


def _is_sweep(cfg: DictConfig) -> bool:
    return str(cfg.hydra.mode or "").endswith("MULTIRUN")
