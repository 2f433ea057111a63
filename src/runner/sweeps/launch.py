"""The jobs of a verb through Hydra: one run, or a sweep, all of whose jobs are validated before the first one starts."""

from __future__ import annotations

import contextlib
import dataclasses
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
from runner.config.keys import OF_THE_SWEEP, all_keys, at, flatten, key_of, within
from runner.config.merged_once import merged_once
from runner.config.output_folders import why_occupied
from runner.config.secrets import mask_words
from runner.config.sources import Sources, text_of
from runner.config.truth import is_true
from runner.sweeps import on_ray, pool_launcher, script
from runner.sweeps.ablation import ablated, toggles_off
from runner.sweeps.jobs import Announce, Command, announced, jobs_of, validate_jobs
from runner.sweeps.launch_search import launch_search
from runner.sweeps.launchers import absent, status_of_jobs, sturdy
from runner.sweeps.ledger import Plan, counted, identity


def launch(
    task: Callable[[DictConfig], Any],
    schema: type,
    primary: str,
    argv: Sequence[str],
    also: Callable[[Composition], list[Problem]],
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
        also: finds further problems in a composition; asked for a sweep, and when there are problems already, so that one
            report has them all.
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
        print(f"warning: {path} is never read: a shipped file of that name comes first; rename it", file=sys.stderr)
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
        sweeps = _is_sweep(cfg)
        if not (sweeps or flags.multirun):
            _refuse_keys_of_sweeps(
                checked.accepted, "is about a sweep, and this is one run", "--multirun too, or no such key"
            )
            if _wants_script(composition):
                if problems := also(composition):
                    raise ConfigError(problems)
                print(script.job_script(verb, argv, composition.values))
                return 0, None
            # Composing takes most of the time until a run begins, so it is not done again.
            app.compose_config = lambda **_: cfg
            configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
            try:
                with _no_empty_folders(Path(cfg.hydra.run.dir)):
                    return status_of(lambda: app.run(primary, task, checked.accepted)), None
            finally:
                _requeue(composition)
        if wrong := [problem for problem in also(composition) if within(problem.key, OF_THE_SWEEP)]:
            raise ConfigError(wrong)  # no job has these keys
        launcher = str(cfg.hydra.runtime.choices.get("hydra/launcher"))
        if problem := absent(launcher):
            raise ConfigError([problem])
        in_pool = launcher == "pool"
        if in_pool and (wrong := pool_launcher.problems_of(cfg.hydra.launcher, composition.values, verb)):
            raise ConfigError(wrong)
        if not keeps_runs:
            _refuse_keys_of_sweeps(
                checked.accepted, "is about jobs that train, and this verb keeps no ledger", "no such key"
            )
        words = [word for word in checked.accepted if not within(key_of(word), OF_THE_SWEEP)]
        given = [word.split("=", 1)[1].strip("'\"") for word in words if word.startswith("hydra.sweep.dir=")]
        if given and (problem := why_occupied(Path(given[-1]), words, restarted or composition.resumes)):
            raise ConfigError([problem])
        alone = [
            f"--{name.replace('_', '-')}={flag}"
            for name in ("config_dir", "config_name")
            if (flag := getattr(flags, name))
        ]
        place = Path(given[-1]) if given else None

        def composed(words: list[str]) -> Composition:
            this = dataclasses.replace(checked, accepted=words)
            return compose(app, primary, this, schema, sources, also, list(flatten(composition.values)))[0]

        if composition.values["search"]["sampler"] is not None:
            if _wants_script(composition):
                print(script.job_script(verb, argv, composition.values))
                return 0, None
            command = Command(
                composition,
                hydra=cfg.hydra,
                words=words,
                schema=schema,
                primary=primary,
                sources=sources,
                job=task,
                compose=composed,
                also=also,
                monitor=monitor,
                flags=alone,
                given=place,
            )
            folder, run = launch_search(command, sweep_root)
            try:
                return status_of(run), folder
            finally:
                _requeue(composition)
        if composition.values["search"]["space"]:
            raise UserError("search", "has keys to vary, and this sweep is no search", "sweep=optuna too")
        params = dict(cfg.hydra.sweeper.get("params") or {})
        swept = sorted({*overrides.swept(words), *params})
        if same_for_all := [key for key in ("name", "output_root") if key in swept]:
            why = "names the folder of a sweep, so that its jobs cannot differ in it"
            raise UserError(same_for_all[0], why, f"one {same_for_all[0]}, and job numbers; or one command for each")
        jobs: list[list[str]] = []
        off: dict[str, str] = {}
        identities: dict[str, list[str]] | None = None
        if cfg.hydra.runtime.choices.get("hydra/sweeper") == "basic":
            jobs, identities = jobs_of(words, params), {}
            if composition.values["ablate"] is not None:
                off = toggles_off(composition.values, schema)
                jobs, swept = ablated(jobs, off), sorted({*swept, *off})

            def problems_of(words: list[str]) -> list[Problem]:
                job = composed(words)
                identities[identity(job.values, job.overrides, swept)] = job.overrides
                return [] if job.values.get("ckpt_path") is not None else also(job)

            validate_jobs(jobs, problems_of)
        elif common := _of_every_job(cfg, words, also(composition)):
            raise ConfigError(common)

        def base() -> dict[str, Any]:
            """What the command sets for all jobs; its words if they are no config by themselves."""
            plain = dataclasses.replace(checked, accepted=[word for word in words if key_of(word) not in swept])
            on = {f"ablate.{key}": at(composition.values, key) for key in off}
            with contextlib.suppress(ConfigError):
                return counted(compose(app, primary, plain, schema, sources, also)[0].values) | on
            return {"overrides": sorted(mask_words(plain.accepted))}

        if _wants_script(composition):
            print(_script_of_sweep(cfg, composition, verb, argv, place, len(jobs)))
            return 0, None
        detach = in_pool and cfg.hydra.launcher.detach
        folder = sweep_root(Plan(composition.values, swept, identities, base, alone, place, detach))
        words += [] if given else [f"hydra.sweep.dir='{folder}'"]
        words += [] if sweeps else ["hydra.mode=MULTIRUN"]
        pool_launcher.register()
        on_ray.register()
        try:
            with announced(announce, jobs, fixed=bool(off)), sturdy(launcher, folder):
                status = status_of(lambda: app.multirun(primary, task, words))
            return status or status_of_jobs(folder), folder
        finally:
            _requeue(composition)


def _wants_script(composition: Composition) -> bool:
    return is_true((composition.values.get("slurm") or {}).get("script"))


def _script_of_sweep(
    cfg: DictConfig, composition: Composition, verb: str, argv: Sequence[str], place: Path | None, jobs: int
) -> str:
    """The script of the array that submitit would submit, or that of a job which runs the whole sweep."""
    values = composition.values
    if cfg.hydra.runtime.choices.get("hydra/launcher") != "submitit_slurm":
        return script.job_script(verb, argv, values)
    named = place or values.get("sweep_dir")
    folder = Path(named) if named else Path(str(values["output_root"]), str(values["name"]), "sweeps", "DATE_TIME")
    return script.array_script(cfg, folder, jobs)


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


def _refuse_keys_of_sweeps(words: Sequence[str], why: str, allowed: str) -> None:
    for word in words:
        if within(key_of(word), OF_THE_SWEEP):
            raise UserError(key_of(word), why, "sweep=optuna too" if key_of(word).startswith("search.") else allowed)


def _of_every_job(cfg: DictConfig, words: Sequence[str], problems: Sequence[Problem]) -> list[Problem]:
    """Those problems of the first job that all jobs of a sweep have: how the data are split, where no job has other data."""
    swept = {*overrides.swept(words), *(cfg.hydra.sweeper.get("params") or {})} - {"data.split.fold", "data.split.seed"}
    if any(key.split(".")[0] in ("data", "experiment", "debug") for key in swept):
        return []
    return [problem for problem in problems if problem.key.startswith("data.split")]


def _is_sweep(cfg: DictConfig) -> bool:
    return str(cfg.hydra.mode or "").endswith("MULTIRUN")
