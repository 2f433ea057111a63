"""The trials of a search: asked for one after the other or side by side, run as jobs of the sweep, told to the study.

A trial is a job for each seed. What was begun is in the storage of the study, and what its jobs came to is in the ledger of
the sweep, so that the same command goes on from there after any end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml

from runner.config.composition import Composition
from runner.config.errors import FAILED, OK, PREEMPTED, UserError, nearest
from runner.config.keys import at, key_of
from runner.config.reading import read_overrides, read_summary
from runner.config.secrets import mask_words
from runner.config.space import Range, is_nested, text_of, word_of
from runner.config.truth import is_true
from runner.sweeps.command import Command
from runner.sweeps.launchers import status_of_jobs
from runner.sweeps.ledger import Entry, Ledger, Outcome, identity, outcome_of
from runner.sweeps.pool import Pool
from runner.sweeps.pruning import VARIABLE
from runner.sweeps.study import WARM, Study, StudySpec
from runner.sweeps.table import BEST
from runner.tracking.files import write_atomically
from runner.tracking.formats import number as shown

_say = functools.partial(print, flush=True)
_METRICS = "metrics.jsonl"
_FEWEST = 5  # trials from which importances are computed


@dataclass
class _Trial:
    index: int  # among the trials of the search
    number: int  # in the study
    params: dict[str, Any]
    values: list[list[float]] = field(default_factory=list)  # of the seeds that have ended
    identity: str = ""  # of its job that runs


@dataclass
class Search:
    """Runs the trials that are left; see the module.

    Attributes:
        folder: of the sweep.
        spec: of the study.
        command: what was asked for.
        space: the range of each key.
        goals: `max` or `min` for each objective, by name.
        words: what all trials have in common, overrides of `hydra.*` too.
    """

    folder: Path
    spec: StudySpec
    command: Command
    space: dict[str, Range]
    goals: dict[str, str]
    words: Sequence[str]

    def __post_init__(self) -> None:
        values = self.command.composition.values
        self._settings, self._fail_fast = values["search"], is_true(values["fail_fast"])
        self._seeds: list[int | None] = list(self._settings["seeds"]) or [None]
        self._swept = [*self.space, *(["seed"] if self._settings["seeds"] else [])]
        self._monitored = self.goals == dict([self.command.monitor(self.command.composition)])
        self._study, self._ledger = Study(self.spec), Ledger(self.folder)
        self._running: dict[int, _Trial] = {}  # by the number of the job
        self._waiting: list[_Trial] = []  # for their next job, or for that of another trial with the same values
        self._failed = False

    def run(self, pool: Pool | None) -> int:
        """Run until there are as many trials as are asked for, all of them ended; what a signal stopped is left.

        Args:
            pool: what runs the jobs; None for this process, one after the other.

        Returns:
            The exit status: 0 if all trials have ended, and none of them failed.

        Raises:
            SystemExit: if a signal stopped a job in this process.
        """
        self._warm_start()
        begun_and_new = self._begun_and_new()
        try:
            if pool is None:
                while self._start_next(begun_and_new, None):
                    pass
            else:
                for all_ended in pool.run(lambda: self._start_next(begun_and_new, pool)):
                    for ended in all_ended:
                        self._end(self._running.pop(ended.number), ended.sentence, pool.asked)
        finally:
            self._write_best()
        if pool is not None and pool.asked:
            return PREEMPTED
        if left := self._study.left(self._settings["trials"]):
            _say(f"{left} of {self._settings['trials']} trials have not ended; the same command continues")
            return status_of_jobs(self.folder) or FAILED
        return FAILED if any(trial.state.name == "FAIL" for trial in self._study.trials()) else OK

    def _begun_and_new(self) -> Iterator[_Trial]:
        """Trials that were begun before and have not ended, then new ones."""
        trials, total = self._study.trials(), self._settings["trials"]
        done = sum(trial.state.is_finished() for trial in trials)
        if done:
            more = "search.trials= asks for more" if done >= total else f"{total - done} are left"
            _say(f"{self.folder}: {done} of {max(total, len(trials))} trials have ended already; {more}")
        begun = {index: trial.number for index, trial in enumerate(trials) if not trial.state.is_finished()}
        for index in [*begun, *range(len(trials), total)]:
            yield _Trial(index, *self._study.ask(index, self.space, begun.get(index)))

    def _start_next(self, begun_and_new: Iterator[_Trial], pool: Pool | None) -> bool:
        """Start the next job; returns whether there was one."""
        if self._failed and self._fail_fast:
            return False
        busy = {trial.identity for trial in self._running.values()}
        while True:
            trial = next((each for each in self._waiting if each.identity not in busy), None)
            if trial is not None:
                self._waiting.remove(trial)
            elif (trial := next(begun_and_new, None)) is None:
                return False
            words, composition = self._job(trial)
            if trial.identity not in busy:
                break
            self._waiting.append(trial)  # another trial drew the same values: this one will find its result
        number, environment = trial.index * len(self._seeds) + len(trial.values), {}
        if self.spec.pruner != "none" and not trial.values:
            environment[VARIABLE] = json.dumps({"study": dataclasses.asdict(self.spec), "number": trial.number})
        if pool is not None:
            self._running[number] = trial
            pool.start(number, words, environment)
            return True
        os.environ.update(environment)
        try:
            self.command.task(dataclasses.replace(composition, job_dir=self.folder / str(number), run_dir=None))
        finally:
            os.environ.pop(VARIABLE, None)
        self._end(trial)
        return True

    def _job(self, trial: _Trial) -> tuple[list[str], Composition]:
        """The words and the composition of the job for a trial's next seed."""
        seed, varied = self._seeds[len(trial.values)], self._varied(trial.params)
        words = [*self.words, *varied, *([] if seed is None else [f"seed={seed}"])]
        composition = self.command.composed(words)
        trial.identity = identity(composition.values, composition.overrides, self._swept)
        if trial.identity not in self._ledger.read().jobs:
            of_seed = f", seed {seed}" if seed is not None else ""
            _say(f"trial {trial.index + 1} of {self._settings['trials']}: {' '.join(varied)}{of_seed}")
        return words, composition

    def _varied(self, params: Mapping[str, Any]) -> list[str]:
        return [word_of(key, params[key]) for key in self.space]

    # What the job of a trial came to: its next seed, or the end of the trial

    def _end(self, trial: _Trial, sentence: str = "", stopped: str = "") -> None:
        end = self._ledger.end_of(trial.identity, sentence, stopped)
        found, name = end.outcome, f"trial {trial.index + 1}"
        if end.killed or found.status not in ("finished", "pruned", "failed"):
            again = found.status == "retried"
            self._waiting += [trial] if again else []
            self._failed |= found.status == "failed"
            if end.killed or not stopped:  # the trial stays as it is
                why = found.sentence or "its job left no result"
                what = why if found.status in ("failed", "retried") else f"{found.status}: {why}"
                _say(f"{name}: {what}; {'it is resumed' if again else 'the same command continues it'}")
        elif found.status == "failed":
            self._fail(trial, found.sentence or "failed")
        elif found.status == "pruned":
            self._study.tell(trial.index, trial.number, None, pruned=True)
            at = self._study.pruned_at(trial.number)
            _say(f"{name}: pruned" + (f" after evaluation {at}" if at else ", as one with its values was"))
        elif end.entry is not None:
            if (values := self._objectives(end.entry.folder, found)) is None:
                self._fail(trial, "an objective is missing or not finite")
                self._require_objectives(end.entry.folder)
                return
            trial.values.append(values)
            if len(trial.values) < len(self._seeds):
                trial.identity = ""
                self._waiting.insert(0, trial)
                return
            means = [statistics.fmean(each) for each in zip(*trial.values, strict=True)]
            self._study.tell(trial.index, trial.number, means)
            _say(f"{name}: " + ", ".join(f"{goal} {shown(mean)}" for goal, mean in zip(self.goals, means, strict=True)))

    def _fail(self, trial: _Trial, why: str) -> None:
        self._failed = True
        self._study.tell(trial.index, trial.number, None, why=why)
        _say(f"trial {trial.index + 1}: failed: {why}")

    def _require_objectives(self, folder: Path) -> None:
        """End the search if a finished job has no number under the name of an objective, as no other one will.

        Raises:
            UserError: with the names there are.
        """
        known = [] if self._monitored else list(_at_best(folder))
        for name in self.goals:
            if known and name not in known:
                raise UserError(
                    "search.objectives", f"names {name}, which no run has", ", ".join(known), nearest(name, known)
                )

    def _objectives(self, folder: Path, found: Outcome) -> list[float] | None:
        """The values of the objectives of a finished job; None if one is missing or not finite."""
        if self._monitored:
            return None if found.value is None else [found.value]
        return objectives_at_best(folder, list(self.goals))

    # What earlier sweeps found

    def _warm_start(self) -> None:
        given = self._settings["warm_start"]
        known = {trial.user_attrs[WARM] for trial in self._study.trials(warm=True)}
        for source in [given] if isinstance(given, str) else given or []:
            added = 0
            entries = list(Ledger(Path(source)).read().jobs.values())
            for entry in entries:
                added += str(entry.folder) in known or self._add(entry)
            _say(f"warm start: {added} of {len(entries)} jobs of {source} are within the search space")

    def _add(self, entry: Entry) -> bool:
        """Add the result of an earlier run to the study, if it fits."""
        folder, found = entry.folder, outcome_of(entry)
        if found.status != "finished" or (self._monitored and found.metric not in self.goals):
            return False
        values = self._objectives(folder, found)
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            words = {key_of(word): word.partition("=")[2] for word in read_overrides(folder)}
        except (OSError, ValueError, yaml.YAMLError):
            return False
        params = {key: _value_of(key, each, config, words) for key, each in self.space.items()}
        if values is None or ... in params.values():
            return False
        return self._study.add(params, self.space, values, str(folder))

    # The end

    def _write_best(self) -> None:
        """Write the best trial as a preset, with the command that repeats it."""
        ended = [trial for trial in self._study.optuna.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        if len(self.goals) > 1 or not ended:
            return
        [(name, direction)] = self.goals.items()
        best = (max if direction == "max" else min)(ended, key=lambda trial: trial.values[0])
        numbers = [trial.number for trial in self._study.trials()]
        source = best.user_attrs.get(WARM) or f"trial {numbers.index(best.number) + 1}"
        words = [word for word in self.words if not word.startswith("hydra") and key_of(word) != "sweep"]
        words = mask_words([*words, *self._varied(best.params)])
        command = shlex.join(["python", "-m", "runner", "train", *self.command.flags_of_jobs, *words])
        head = f"# {name} {shown(best.values[0])}: {source}, the best of {len(ended)} in {self.folder}"
        content, groups = dict[str, Any](), self.command.sources.groups()
        for key, value in best.params.items():
            if key in groups:
                content.setdefault("defaults", []).append({f"override /{key}": value})
        for key, value in best.params.items():
            if key not in groups:
                *path, last = key.split(".")
                section = functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, content)
                section[last] = yaml.safe_load(value) if is_nested(value) else value
        lines = ["# @package _global_", head, f"# {command}"]
        if shares := self._importances(len(ended)):
            lines.append("# importance: " + ", ".join(f"{key} {shown(share)}" for key, share in shares.items()))
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(self.folder / BEST, ("\n".join(lines) + f"\n{text}").encode())

    def _importances(self, ended: int) -> dict[str, float]:
        """How much of the objective's variance each key explains; empty if too few trials have ended to say."""
        if len(self.space) < 2 or ended < _FEWEST:
            return {}
        with warnings.catch_warnings(), contextlib.suppress(ImportError, RuntimeError, ValueError):
            warnings.simplefilter("ignore", UserWarning)  # of trials that are all alike
            return dict(optuna.importance.get_param_importances(self._study.optuna))
        return {}


def objectives_at_best(folder: Path, names: Sequence[str]) -> list[float] | None:
    """The values of several objectives at the best evaluation of a run; None if one is missing or not finite.

    A name is that of a metric of the validation split, such as `val/loss`, or of a number in `summary.json`, such as `wall_s`.
    """
    found = _at_best(folder)
    values = [found.get(name) for name in names]
    fine = [float(each) for each in values if isinstance(each, int | float) and math.isfinite(each)]
    return fine if len(fine) == len(values) else None


def _at_best(folder: Path) -> dict[str, Any]:
    """What objectives can name: numbers by name, None for one that is not finite."""
    summary = read_summary(folder) or {}
    step = (summary.get("best") or {}).get("global_step")
    found = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / _METRICS).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("split") == "val" and record.get("global_step") == step:
                found |= {
                    f"val/{name}": value
                    for name, value in record.items()
                    if name not in ("split", "global_step", "epoch")
                }
    return found


def _value_of(key: str, values: Range, config: Any, words: Mapping[str, str]) -> Any:
    """The value that an earlier run had for a key; `...` if it cannot be told, or is none of the range."""
    value = words.get(key, at(config, key))  # the option of a group is only in the overrides
    if values.kind == "choice":
        text = value if key in words else text_of(value)
        return next((each for each in values.choices if f"{key}={text}" == word_of(key, each)), ...)
    try:
        return int(value) if values.kind == "int" else float(value)
    except (TypeError, ValueError):
        return ...
