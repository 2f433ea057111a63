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
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml

from runner.config.composition import Composition
from runner.config.errors import UserError, nearest
from runner.config.keys import at, key_of
from runner.config.reading import read_overrides, read_summary
from runner.config.secrets import mask_words
from runner.config.space import Range, text_of
from runner.sweeps.executors import Executor, TrialJob
from runner.sweeps.ledger import Entry, Ledger, Outcome, identity, outcome_of
from runner.sweeps.pruning import VARIABLE
from runner.sweeps.search import PRUNED_AT, WARM, Study, StudySpec
from runner.sweeps.table import BEST
from runner.tracking.files import write_atomically
from runner.tracking.formats import number as shown

_METRICS = "metrics.jsonl"
_FEWEST = 5  # trials from which importances are computed


@dataclass(frozen=True)
class SearchPlan:
    """What a search does.

    Attributes:
        settings: the section `search` of the config.
        space: the range of each key.
        goals: `max` or `min` for each objective, by name.
        monitored: whether the only objective is the best value of the monitored metric.
        words: what all trials have in common, overrides of `hydra.*` too.
        swept: keys that the trials vary.
        fail_fast: whether to begin no other trial after one failed.
        flags: of the command, as far as one job alone needs them.
        groups: names of all config groups.
    """

    settings: Mapping[str, Any]
    space: dict[str, Range]
    goals: dict[str, str]
    monitored: bool
    words: Sequence[str] = ()
    swept: Sequence[str] = ()
    fail_fast: bool = False
    flags: Sequence[str] = ()
    groups: Sequence[str] = ()

    @property
    def seeds(self) -> list[int | None]:
        """Seeds of a trial; None for that of the command."""
        return list(self.settings["seeds"]) or [None]


@dataclass
class _Trial:
    index: int  # among the trials of the search
    number: int  # in the study
    params: dict[str, Any]
    values: list[list[float]] = field(default_factory=list)  # of the seeds that have ended
    identity: str = ""  # of its job that runs


class Search:
    """Runs the trials that are left; see the module.

    Args:
        folder: of the sweep.
        spec: of the study.
        plan: what to do.
        compose: the composition of a job with these overrides.
        say: called with a line for people.
    """

    def __init__(
        self,
        folder: Path,
        spec: StudySpec,
        plan: SearchPlan,
        compose: Callable[[list[str]], Composition],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._spec, self._plan, self._compose, self._say = folder, spec, plan, compose, say
        self._study = Study(spec)
        self._ledger = Ledger(folder)
        self._failed = False
        self.unended = False  # whether a job said nothing of its end, which the ledger does not show either

    def run(self, executor: Executor) -> None:
        """Run until there are as many trials as are asked for, all of them ended; what a signal stopped is left.

        Raises:
            SystemExit: if a signal asked a job to stop.
        """
        self._warm_start()
        waiting, running = self._left(), dict[int, _Trial]()
        blocked: list[_Trial] = []
        try:
            while True:
                while executor.free > 0:
                    busy = {trial.identity for trial in running.values()}
                    trial = next((each for each in blocked if each.identity not in busy), None)
                    if trial is not None:
                        blocked.remove(trial)
                    elif (trial := next(waiting, None)) is None:
                        break
                    job = self._job(trial)
                    if trial.identity in busy:
                        blocked.append(trial)  # another trial drew the same values: this one will find its result
                        continue
                    running[job.number] = trial
                    executor.begin(job)
                if not running and (executor.free > 0 or executor.stopped):
                    break  # otherwise the last jobs have ended, and their processes have not yet left their slots
                for ended, killed in executor.ended():
                    self._end(running.pop(ended), blocked, killed)
        finally:
            self._write_best()

    def _left(self) -> Iterator[_Trial]:
        """Trials that were begun and have not ended, then new ones."""
        trials, total = self._study.trials(), self._plan.settings["trials"]
        done = sum(trial.state.is_finished() for trial in trials)
        if done:
            more = "search.trials= asks for more" if done >= total else f"{total - done} are left"
            self._say(f"{self._folder}: {done} of {max(total, len(trials))} trials have ended already; {more}")
        for index, trial in enumerate(trials):
            if not trial.state.is_finished():
                yield self._asked(index, trial.number)
        for index in range(len(trials), total):
            if self._failed and self._plan.fail_fast:
                return
            yield self._asked(index, None)

    def _asked(self, index: int, number: int | None) -> _Trial:
        return _Trial(index, *self._study.ask(index, self._plan.space, number))

    def _words(self, params: Mapping[str, Any]) -> list[str]:
        values = {key: params[key] for key in self._plan.space}
        return [f"{key}={value if _is_nested(value) else text_of(value)}" for key, value in values.items()]

    def _job(self, trial: _Trial) -> TrialJob:
        """The job of a trial's next seed."""
        plan, at_seed = self._plan, len(trial.values)
        seed, varied = plan.seeds[at_seed], self._words(trial.params)
        words = [*plan.words, *varied, *([] if seed is None else [f"seed={seed}"])]
        composition = self._compose(words)
        trial.identity = identity(composition.values, composition.overrides, plan.swept)
        place = trial.index * len(plan.seeds) + at_seed
        environment = {}
        if self._spec.pruner != "none" and at_seed == 0:
            environment[VARIABLE] = json.dumps({"study": self._spec.to_plain(), "number": trial.number})
        if trial.identity not in self._ledger.read().jobs:
            of_seeds = f", seed {seed}" if seed is not None else ""
            self._say(f"trial {trial.index + 1} of {plan.settings['trials']}: {' '.join(varied)}{of_seeds}")
        return TrialJob(place, words, _with_folder(composition, self._folder / str(place)), environment)

    def _end(self, trial: _Trial, blocked: list[_Trial], killed: str) -> None:
        """Take what the job of a trial came to: its next seed, or the end of the trial."""
        entry = self._ledger.read().jobs.get(trial.identity)
        if killed and entry is not None:
            again = self._ledger.end(trial.identity, Outcome("failed", sentence=killed))
            self._say(
                f"trial {trial.index + 1}: {killed}; {'it is resumed' if again else 'the same command continues it'}"
            )
            blocked += [trial] if again else []
            self._failed |= not again
            return
        found = outcome_of(entry) if entry is not None else Outcome("unknown")
        if found.status == "pruned":
            self._study.tell(trial.index, trial.number, None, pruned=True)
            at = self._study.pruned_at(trial.number)
            self._say(
                f"trial {trial.index + 1}: pruned"
                + (f" after evaluation {at}" if at else ", as one with its values was")
            )
        elif found.status == "failed":
            self._fail(trial, found.sentence or "failed")
        elif found.status == "finished" and entry is not None:
            if (values := self._objectives(entry.folder, found)) is None:
                self._fail(trial, "an objective is missing or not finite")
                self._require_objectives(entry.folder)
                return
            trial.values.append(values)
            if len(trial.values) < len(self._plan.seeds):
                trial.identity = ""
                blocked.insert(0, trial)
                return
            means = [statistics.fmean(each) for each in zip(*trial.values, strict=True)]
            self._study.tell(trial.index, trial.number, means)
            told = [f"{name} {shown(value)}" for name, value in zip(self._plan.goals, means, strict=True)]
            self._say(f"trial {trial.index + 1}: {', '.join(told)}")
        else:  # it did not start, or was killed: the trial stays as it is, and the same command continues it
            self.unended = True

    def _fail(self, trial: _Trial, why: str) -> None:
        self._failed = True
        self._study.tell(trial.index, trial.number, None, why=why)
        self._say(f"trial {trial.index + 1}: failed: {why}")

    def _require_objectives(self, folder: Path) -> None:
        """End the search if a finished job has no number under the name of an objective, as no other one will.

        Raises:
            UserError: with the names there are.
        """
        known = [] if self._plan.monitored else list(_at_best(folder))
        for name in self._plan.goals:
            if known and name not in known:
                raise UserError(
                    "search.objectives", f"names {name}, which no run has", ", ".join(known), nearest(name, known)
                )

    def _objectives(self, folder: Path, found: Outcome) -> list[float] | None:
        """The values of the objectives of a finished job; None if one is missing or not finite."""
        if self._plan.monitored:
            return None if found.value is None else [found.value]
        return objectives_at_best(folder, list(self._plan.goals))

    # What earlier sweeps found

    def _warm_start(self) -> None:
        given = self._plan.settings["warm_start"]
        known = {trial.user_attrs[WARM] for trial in self._study.trials(warm=True)}
        for source in [given] if isinstance(given, str) else given or []:
            added = 0
            entries = list(Ledger(Path(source)).read().jobs.values())
            for entry in entries:
                added += str(entry.folder) in known or self._add(entry)
            self._say(f"warm start: {added} of {len(entries)} jobs of {source} are within the search space")

    def _add(self, entry: Entry) -> bool:
        """Add the result of an earlier run to the study, if it fits."""
        folder, found = entry.folder, outcome_of(entry)
        if found.status != "finished" or (self._plan.monitored and found.metric not in self._plan.goals):
            return False
        values = self._objectives(folder, found)
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            words = {key_of(word): word.partition("=")[2] for word in read_overrides(folder)}
        except (OSError, ValueError, yaml.YAMLError):
            return False
        params = {key: _value_of(key, each, config, words) for key, each in self._plan.space.items()}
        if values is None or None in params.values():
            return False
        return self._study.add(params, self._plan.space, values, str(folder))

    # The end

    def _write_best(self) -> None:
        """Write the best trial as a preset, with the command that repeats it."""
        ended = [trial for trial in self._study.optuna.get_trials(deepcopy=False) if trial.values]
        ended = [trial for trial in ended if trial.user_attrs.get(PRUNED_AT) is None]
        if len(self._plan.goals) > 1 or not ended:
            return
        [(name, direction)] = self._plan.goals.items()
        best = (max if direction == "max" else min)(ended, key=lambda trial: trial.values[0])
        place = (
            [trial.number for trial in self._study.trials()].index(best.number) if WARM not in best.user_attrs else -1
        )
        source = f"trial {place + 1}" if place >= 0 else best.user_attrs[WARM]
        words = [word for word in self._plan.words if not word.startswith("hydra") and key_of(word) != "sweep"]
        words = mask_words([*words, *self._words(best.params)])
        command = shlex.join(["python", "-m", "runner", "train", *self._plan.flags, *words])
        head = f"# {name} {shown(best.values[0])}: {source}, the best of {len(ended)} in {self._folder}"
        chosen = [{f"override /{key}": value} for key, value in best.params.items() if key in self._plan.groups]
        content: dict[str, Any] = {"defaults": chosen} if chosen else {}
        for key, value in best.params.items():
            if key not in self._plan.groups:
                *path, last = key.split(".")
                section = functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, content)
                section[last] = yaml.safe_load(value) if _is_nested(value) else value
        lines = ["# @package _global_", head, f"# {command}"]
        if shares := self._importances():
            lines.append("# importance: " + ", ".join(f"{key} {shown(share)}" for key, share in shares.items()))
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(self._folder / BEST, ("\n".join(lines) + f"\n{text}").encode())

    def _importances(self) -> dict[str, float]:
        """How much of the objective's variance each key explains; empty if there are too few trials to say."""
        ended = [trial for trial in self._study.optuna.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        if len(self._plan.goals) > 1 or len(self._plan.space) < 2 or len(ended) < _FEWEST:
            return {}
        try:
            found: dict[str, float] = optuna.importance.get_param_importances(self._study.optuna)
        except (ImportError, RuntimeError, ValueError):
            return {}
        return found


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


def _with_folder(composition: Composition, folder: Path) -> Composition:
    return dataclasses.replace(composition, job_dir=folder, run_dir=None)


def _is_nested(value: Any) -> bool:
    return isinstance(value, str) and value[:1] in ("[", "{")


def _value_of(key: str, values: Range, config: Any, words: Mapping[str, str]) -> Any:
    """The value that an earlier run had for a key; None if it cannot be told, or is none of the range."""
    value = words.get(key, at(config, key))  # the option of a group is only in the overrides
    if values.kind == "choice":
        text = value if key in words else text_of(value)
        return next((each for each in values.choices if text == (each if _is_nested(each) else text_of(each))), None)
    try:
        return int(value) if values.kind == "int" else float(value)
    except (TypeError, ValueError):
        return None
