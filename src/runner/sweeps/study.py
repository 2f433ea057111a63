"""The study of a search: its storage, samplers and pruners, and the callback with which a trial asks whether it goes on.

Imports Optuna, so only what belongs to a search imports it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.base.errors import UserError, first_line, require
from runner.base.secrets import mask_text
from runner.config.space import Range

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
except ImportError as error:
    raise UserError("sweep", "is optuna, which is not installed", "pip install 'runner[optuna]'") from error

optuna.logging.set_verbosity(optuna.logging.ERROR)

JOURNAL = "search.jsonl"
VARIABLE = "RUNNER_TRIAL"
"""Variable of the environment of a job that is a trial: `mode`, and arguments of `Reports`, as JSON."""
_TAKEN = "warm_start"  # attribute of a trial that an earlier version took from another sweep
State = optuna.trial.TrialState
_NAME = "search"  # Hyperband derives the bracket of a trial from the name of its study
# Attribute of a trial: its last evaluation with a decision of the pruner, and whether it stops there
_DECIDED = "decided"
_FEWEST = 5  # trials from which importances are computed
_STALE_S = 3  # after which Optuna takes over the lock of a process that was killed


class Study:
    """A study in a storage, see `storage_of`; a ValueError if the one there is another one."""

    def __init__(self, where: str, name: str, mode: str, space: Mapping[str, Range]) -> None:
        self.where, self.name, self._storage = where, name, storage_of(where)
        self._distributions = {key: _distribution(each) for key, each in space.items()}
        self._direction: Any = f"{mode}imize"
        named: dict[str, Any] = {"study_name": name, "direction": self._direction}
        self.optuna = optuna.create_study(storage=self._storage, load_if_exists=True, **named)
        wrong = [trial for trial in self.optuna.get_trials(deepcopy=False) if trial.params.keys() != space.keys()]
        if wrong or [each.name.lower() for each in self.optuna.directions] != [self._direction]:
            raise ValueError(f"its study {name} has other keys or another direction")

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """The trials of the search by index."""
        return [trial for trial in self.optuna.get_trials(deepcopy=False) if _TAKEN not in trial.user_attrs]

    def ask(self, sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner) -> optuna.trial.FrozenTrial:
        """Begin a trial. It is drawn in memory, so that no kill leaves a trial with a part of its values in the storage."""
        copy = optuna.create_study(study_name=self.name, direction=self._direction, sampler=sampler, pruner=pruner)
        copy.add_trials(self.optuna.get_trials(deepcopy=False))
        copy.ask(self._distributions)
        drawn = copy.get_trials(deepcopy=False)[-1]
        with using(self.where):
            self.optuna.add_trial(drawn)
            if self.optuna.get_trials(deepcopy=False)[-1].number != drawn.number:
                raise OSError("another program has changed it")
        return drawn

    def tell(self, number: int, state: State, value: float | None = None) -> None:
        """End a trial of a number in the study, with its value."""
        with using(self.where):
            self.optuna.tell(number, value, state=state)

    def importances(self) -> dict[str, float]:
        """The share of the objective's variance that each key explains; empty if too few trials have ended to say."""
        states = [trial.state for trial in self.optuna.get_trials(deepcopy=False)]
        if len(self._distributions) < 2 or states.count(State.COMPLETE) < _FEWEST:
            return {}
        with warnings.catch_warnings(), contextlib.suppress(ImportError, RuntimeError, ValueError):
            warnings.simplefilter("ignore", UserWarning)  # of trials that are all alike
            return optuna.importance.get_param_importances(self.optuna)
        return {}


def study_of_sweep(folder: Path, named: str | None, say: Callable[[str], None], **others: Any) -> Study:
    """The study of a sweep: in its own file, which is renamed if it is damaged, or in the storage that the user named."""
    path = folder / JOURNAL
    with using(named or str(path)):
        if named:
            return Study(named, str(folder.absolute()), **others)
        try:
            return Study(str(path), _NAME, **others)
        except ValueError as error:
            aside = path.with_name(f"{JOURNAL}.damaged{len(list(folder.glob(f'{JOURNAL}.damaged*'))) or ''}")
            path.rename(aside)
            say(f"{path} is damaged ({error}) and was renamed to {aside.name}; finished jobs keep their results")
            return Study(str(path), _NAME, **others)


@contextlib.contextmanager
def using(where: str) -> Iterator[None]:
    """Turn what Optuna and the drivers of databases raise into a `UserError` about a storage."""
    try:
        yield
    except Exception as error:  # of any kind
        problem = f"{mask_text(where)} cannot be used: {first_line(error)}"
        kept = "finished jobs keep their results"
        allowed = f"the same command once that is fixed, or another file or sqlite:///FILE; {kept}"
        raise UserError("search.storage", problem, allowed) from error


def storage_of(where: str) -> Any:
    """The storage of a file or URL, once Optuna has read it; a ValueError if it is damaged, others if it cannot be used."""
    is_url, file = "://" in where, Path(where.partition(":///")[2].partition("?")[0] or where)
    # A file in a missing folder, or a pipe, would fail late or block
    if not is_url or where.startswith("sqlite"):
        if not file.parent.is_dir():
            raise OSError(f"there is no folder {file.parent}")
        if os.path.lexists(file) and not file.is_file():
            raise ValueError("it is not a regular file")
    if is_url:
        optuna.get_all_study_summaries(storage := optuna.storages.get_storage(where))
        return storage
    # The lock of a process that was killed is taken over after a while
    lock = JournalFileOpenLock(str(file), grace_period=_STALE_S)
    backend = JournalFileBackend(str(file), lock_obj=lock)
    lock.acquire()
    try:
        # The next line would become a part of one that a crash left incomplete.
        if (content := file.read_bytes()) and not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    finally:
        lock.release()
    try:
        return JournalStorage(backend)
    except Exception as error:  # of any kind
        raise ValueError("a line is not Optuna's") from error


def sampler_of(name: str, seed: str, parallel: bool) -> optuna.samplers.BaseSampler:
    """The sampler of one trial: what it draws depends on the seed and the trials before, and not on the process."""
    number = zlib.crc32(seed.encode())
    if name == "random":
        return optuna.samplers.RandomSampler(seed=number)
    if name == "tpe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=number, constant_liar=parallel)
    require("search.sampler", "cmaes", "cmaes")
    return optuna.samplers.CmaEsSampler(seed=number, warn_independent_sampling=False)


def pruner_of(pruner: str, warmup: int, reduction: int) -> optuna.pruners.BasePruner:
    """The pruner of a search."""
    stages: dict[str, Any] = {"min_resource": max(1, warmup), "reduction_factor": reduction}
    if pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=warmup)
    if pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(**stages)
    return optuna.pruners.HyperbandPruner(**stages) if pruner == "hyperband" else optuna.pruners.NopPruner()


class Reports:
    """The evaluations of one trial in the storage of its study, in the process of its job."""

    def __init__(self, storage: str, study: str, number: int, pruner: Mapping[str, Any]) -> None:
        self._where = storage
        with using(storage):
            self._storage = storage_of(storage)
            settings: dict[str, Any] = {"sampler": optuna.samplers.RandomSampler(), "pruner": pruner_of(**pruner)}
            opened = optuna.load_study(study_name=study, storage=self._storage, **settings)
            number_of = self._storage.get_trial_id_from_study_id_trial_number
            self._trial = optuna.Trial(opened, number_of(self._storage.get_study_id_from_name(study), number))

    @property
    def stopped_at(self) -> int | None:
        """The evaluation after which the pruner stopped the trial."""
        with using(self._where):
            evaluation, stops = self._trial.user_attrs.get(_DECIDED, (-1, False))
        return int(evaluation) if stops else None

    def stops(self, evaluation: int, value: float) -> bool:
        """Report an evaluation; whether it is the last one. A run that is resumed gets the decision that was made before."""
        with using(self._where):
            last, stops = self._trial.user_attrs.get(_DECIDED, (-1, False))
            if evaluation > last:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of a value that was reported, and not decided on
                    self._trial.report(value, evaluation)
                last, stops = evaluation, bool(self._trial.should_prune())  # numpy gives its own
                self._trial.set_user_attr(_DECIDED, [last, stops])
        return bool(stops) and evaluation == last


class Pruning:
    """A callback of the training loop of a trial: it reports each evaluation to the study, and stops where the pruner says so.

    `decide` asks rank 0 a question, and gives its answer on every rank.
    """

    def __init__(self, decide: Callable[[Callable[[], Any]], Any]) -> None:
        self._decide, self._settings = decide, json.loads(os.environ[VARIABLE])

    @functools.cached_property
    def _reports(self) -> Reports:
        """Opened on rank 0 alone, which is asked."""
        return Reports(**self._settings["reports"])

    def on_start(self, loop: Any) -> None:
        """Stop again if the resumed run had been stopped, but was killed before its end."""
        if (mode := loop.monitor[1]) != self._settings["mode"]:
            raise UserError("checkpoint.mode", f"of {loop.monitor[0]} is {mode}, which the search did not know", mode)
        at = self._decide(lambda: self._reports.stopped_at)
        if at is not None and at <= _evaluation(loop):
            loop.prune(f"pruned after evaluation {at}")

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        value, at = metrics[loop.monitor[0]], _evaluation(loop)
        if loop.finished or not math.isfinite(value):
            return  # the end comes anyway
        if self._decide(lambda: self._reports.stops(at, value)):
            loop.prune(f"pruned after evaluation {at}")


def _evaluation(loop: Any) -> int:
    """The number of the evaluation at the position, from 1: the same in every trial, and after resuming."""
    position, limits = loop.state.position, loop.limits
    done: int = position.epoch + (position.batch > 0)
    every: int = limits.evaluate_every_epochs or 1
    if limits.evaluate_every_steps is not None:
        done, every = position.global_step, limits.evaluate_every_steps
    return -(-done // every)


def _distribution(values: Range) -> optuna.distributions.BaseDistribution:
    if values.kind == "choice":
        return optuna.distributions.CategoricalDistribution(values.choices)
    kind: Any = getattr(optuna.distributions, f"{values.kind.capitalize()}Distribution")
    found: optuna.distributions.BaseDistribution = kind(values.low, values.high, values.log, values.step)
    return found
