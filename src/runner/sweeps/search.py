"""A search: what is checked before its first trial, and its jobs, whose values Optuna chooses.

A trial is a job for each seed, one after the other. The storage of the study has the values of the trials that began, and the
ledger of the sweep the results of their jobs, so that the same command continues after any end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from runner.base.errors import FAILED, OK, ConfigError, Problem, UserError
from runner.base.files import write_atomically
from runner.base.reading import read_summary
from runner.base.secrets import mask_words
from runner.config import overrides
from runner.config.composition import Composition
from runner.config.keys import OF_THE_SWEEP, is_of_hydra, key_of, within
from runner.config.load import compose_job, resolve_config
from runner.config.schema.train import Train
from runner.config.space import Range, ranges_of, word_of
from runner.launch.jobs import Launcher
from runner.sweeps.ledger import Outcome, outcome
from runner.sweeps.plan import Plan, Planned, Validate, composed, counted, identity
from runner.sweeps.run import Jobs, Sweep
from runner.sweeps.study import VARIABLE, State, pruner_of, sampler_of, storage_of, study_of_sweep, using
from runner.sweeps.table import BEST
from runner.tracking.formats import number as shown

_SAME = ("sampler", "pruner", "warmup", "reduction", "seeds", "space")
"""Settings that make a study what it is; the others may change when it continues."""
_NO_RANGE = ("hydra", "name", "output_root", "ckpt_path", "resume", *OF_THE_SWEEP)
_AT_A_TIME = 8  # trials, where the launcher has no limit


@dataclass
class _Trial:
    index: int  # among the trials of the search
    number: int  # in the study
    params: dict[str, Any]
    values: list[float] = field(default_factory=list)  # of the monitored metric, of the seeds that have ended


class Search(Jobs):
    """The jobs of a search; `launcher` makes what will start them.

    Raises:
        ConfigError: with every problem of the search space, and of the values at its ends.
        UserError: for settings that do not fit together.
    """

    def __init__(self, command: Composition, launcher: Callable[[], Launcher], validate: Validate) -> None:
        from runner.run.metrics import expected_monitor  # imports torch

        self._command, self._settings = command, command.values["search"]
        settings, self._space = self._settings, _checked_space(command)
        # Keys of the space come from the search, so the command's values for them are removed
        self._words = [word for word in command.words if key_of(word).replace("/", ".") not in self._space]
        if several := overrides.swept(self._words):
            allowed = f"search.{several[0]}={{choice: [...]}}, or search.seeds=[0,1,2] for several seeds of each trial"
            raise UserError(several[0], "has several values, and a search chooses values itself", allowed)
        # Ends of ranges are the extremes: if these are valid, draws in between are too
        _check_ends(command, self._words, self._space, validate)
        self._metric, self._mode = expected_monitor(resolve_config(command, Train))
        swept = [*self._space, *(["seed"] if settings["seeds"] else [])]
        base = counted(compose_job(command, self._words).values) | {f"search.{key}": settings[key] for key in _SAME}
        self.plan = Plan(command, swept, json.loads(json.dumps(base, default=str)))
        # A storage that cannot be opened is found before the first trial
        if (named := settings["storage"]) is not None:
            with using(named):
                storage_of(named)
        jobs, slots = settings["jobs"], launcher().slots
        # More trials at a time than slots would only wait
        self._most = min(jobs or slots or _AT_A_TIME, slots or math.inf)
        if (jobs or 0) > self._most or (slots is None and jobs is None):
            why = f"hydra/launcher={command.hydra['launcher'][0]} has {slots or 'any number of'} slots"
            print(f"search.jobs is {jobs or 'null'} and {why}: {self._most} trials at a time", flush=True)
        self._seeds = len(settings["seeds"]) or 1
        self._pruner = {key: settings[key] for key in ("pruner", "warmup", "reduction")}
        self._running = dict[int, _Trial]()  # by the number of the job

    def run(self, sweep: Sweep, launcher: Launcher) -> None:
        """Run until there are as many trials as are asked for, all of them ended; sets the exit status of the sweep."""
        self._sweep, named = sweep, self._settings["storage"]
        self._study = study_of_sweep(sweep.folder, named, sweep.say, mode=self._mode, space=self._space)
        trials = list(enumerate(self._study.trials()))
        total = max(len(trials), self._settings["trials"])
        # Trials that an earlier process began are completed before new ones are drawn
        begun = [(index, trial) for index, trial in trials if not trial.state.is_finished()]
        if done := len(trials) - len(begun):
            more = "search.trials= asks for more" if done == total else f"{total - done} are left"
            sweep.say(f"{sweep.folder}: {done} of {total} trials have ended already; {more}")
        self._waiting = [_Trial(index, trial.number, trial.params) for index, trial in begun]  # for their next job
        self.count = total * self._seeds
        try:
            sweep.run(self, launcher)
        # Also after a signal: the best so far is what the user wants to see
        finally:
            self._write_best()
        states = [trial.state for trial in self._study.trials()]
        if left := total - sum(state.is_finished() for state in states):
            sweep.say(f"{left} of {total} trials have not ended; the same command continues")
        if sweep.status == OK and (left or State.FAIL in states):
            sweep.status = FAILED

    def next(self) -> Planned | None:
        """See `Jobs.next`: the next job of a trial that has begun, or the first one of a new trial."""
        values, settings = self._command.values, self._settings
        # A sampler learns from results, so only as many trials as can run begin
        if len(self._running) >= self._most:
            return None
        if not self._waiting:
            if (index := len(self._study.trials())) >= settings["trials"]:
                return None
            # The sampler is seeded by the number of the trial, so that an interrupted search draws the same values
            sampler = sampler_of(settings["sampler"], f"{values['seed']} {index}", self._most > 1)
            drawn = self._study.ask(sampler, pruner_of(**self._pruner))
            self._waiting.append(_Trial(index, drawn.number, drawn.params))
        trial = self._waiting.pop(0)
        ended, environment = len(trial.values), dict[str, str]()
        # A trial has one job for each seed, one after the other
        words = [
            *(word_of(key, trial.params[key]) for key in self._space),
            *(f"seed={seed}" for seed in settings["seeds"][ended : ended + 1]),
        ]
        # Only the first seed is pruned: the others are run because it was good
        if settings["pruner"] != "none" and not ended:
            reports = {"storage": self._study.where, "study": self._study.name, "number": trial.number}
            environment[VARIABLE] = json.dumps({"mode": self._mode, "reports": reports | {"pruner": self._pruner}})
        # Drawn values are checked as if they had been typed
        checked = overrides.check_overrides(words, self._command.schema, self._command.sources, False)
        composition = compose_job(self._command, [*self._words, *checked.accepted])
        known = identity(composition.values | self._sweep.ledger.was, composition.overrides, self.plan.swept)
        planned = Planned(trial.index * self._seeds + ended, known, composition, " ".join(words), environment)
        self._running[planned.number] = trial
        return planned

    def ended(self, planned: Planned, found: Outcome, folder: Path) -> None:
        """See `Jobs.ended`: the trial ends, or continues with its next seed; it stays as it is if its process was killed."""
        trial = self._running.pop(planned.number)
        if found.status == "pruned":
            self._end(trial, State.PRUNED, str((read_summary(folder) or {}).get("pruned")))
        # A job that was killed has no summary that says failed: its trial stays open and continues
        elif found.status == "failed" and outcome(folder).status == "failed":
            self._end(trial, State.FAIL)
        elif found.status == "finished" and found.value is not None:
            trial.values.append(found.value)
            # The next seed of a trial comes before new trials
            if len(trial.values) < self._seeds:
                self._waiting.insert(0, trial)
            else:
                mean = statistics.fmean(trial.values)
                self._end(trial, State.COMPLETE, f"{self._metric} {shown(mean)}" if self._seeds > 1 else "", mean)
        elif found.status == "finished":
            self._end(trial, State.FAIL, f"failed: {self._metric} was not computed")

    def _end(self, trial: _Trial, state: State, text: str = "", value: float | None = None) -> None:
        self._study.tell(trial.number, state, value)
        if text:
            self._sweep.say(f"trial {trial.index + 1}: {text}")

    def _write_best(self) -> None:
        """Write the best trial as a preset, with the command that repeats it."""
        ended = [each for each in enumerate(self._study.trials(), 1) if each[1].state == State.COMPLETE]
        if not ended:
            return
        groups = self._command.sources.groups()
        number, best = (max if self._mode == "max" else min)(ended, key=lambda each: each[1].value or 0.0)
        # The preset repeats the result: the command's words, then the values that were found
        words = [word for word in self._words if not is_of_hydra(word) and key_of(word) != "sweep"]
        words = mask_words([*words, *(word_of(key, best.params[key]) for key in self._space)])
        command = shlex.join(["python", "-m", "runner", "train", *self._command.flags, *words])
        which = f"trial {number}, the best of {len(ended)} in {self._sweep.folder}"
        lines = [f"{self._metric} {shown(best.value or 0.0)}: {which}", command]
        if shares := self._study.importances():
            lines.append("importance: " + ", ".join(f"{key} {shown(share)}" for key, share in shares.items()))
        # Options of a group need an entry in the defaults list, other keys a value
        options = [{f"override /{key}": value} for key, value in best.params.items() if key in groups]
        words = [word_of(key, value) for key, value in best.params.items() if key not in groups]
        keys: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
        content = ({"defaults": options} if options else {}) | keys
        head = "".join(f"# {line}\n" for line in ["@package _global_", *lines])
        text = head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(self._sweep.folder / BEST, text.encode())


def _checked_space(command: Composition) -> dict[str, Range]:
    """The search space, whose keys may exist or not; a `ConfigError` has every problem."""
    values = command.values["search"]
    if not values["space"]:
        raise UserError("search", "names no key to vary", "keys such as 'search.optimizer.lr={log: [1e-4, 1e-1]}'")
    space, problems = ranges_of(values["space"])
    for key, each in space.items():
        # Some keys decide where and how a search itself runs, and a number cannot be drawn from names of options
        if within(key, _NO_RANGE):
            problems.append(Problem(f"search.{key}", "cannot vary in a search", "a key that trials may differ in"))
        elif each.kind != "choice" and (options := command.sources.options(key)):
            names = ", ".join(option.name for option in options)
            problems.append(Problem(f"search.{key}", "is a group of options", f"{{choice: [{names}]}}"))
    if problems:
        raise ConfigError(command.with_origins(problems))
    return space


def _check_ends(command: Composition, words: Sequence[str], space: Mapping[str, Range], validate: Validate) -> None:
    """Validate the values at the ends of each range, and each choice, with the first values of the others, as `composed` does."""
    # Combinations are too many to check, so each end is tried with the first values of the others
    ends = [(key, word_of(key, end)) for key, each in space.items() for end in each.ends]
    checked = overrides.check_overrides([word for _, word in ends], command.schema, command.sources, False)
    try:
        if checked.problems:
            raise ConfigError(list({(each.key, each.message): each for each in checked.explained()}.values()))
        accepted = [(key, word) for (key, _), word in zip(ends, checked.accepted, strict=True)]
        first = dict(reversed(accepted))
        others = [first, *(first | {key: word} for key, word in accepted if word != first[key])]
        composed(command, [[*words, *each.values()] for each in others], validate)
    except ConfigError as error:
        # The problem is one of the space, so its key is the one that the user wrote
        own = {key: {"key": f"search.{key}", "origin": ""} for key in space}
        problems = [dataclasses.replace(each, **own.get(each.key, {})) for each in error.problems]
        raise ConfigError(command.with_origins(problems)) from None
