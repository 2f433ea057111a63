"""The study behind `sweep=optuna`: its storage, sampler and pruner, and what a trial of it has come to.

Imports Optuna, so it is imported only where a search or one of its jobs runs. What is drawn depends on the seed, the number
of the trial, and the trials that have ended before it, not on the process: the same command continues with the same values.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.errors import UserError
from runner.config.space import Range

if sys.platform != "win32":
    import fcntl

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage
except ImportError as error:
    raise UserError("sweep", "is optuna, which is not installed", "pip install 'runner[optuna]'") from error

optuna.logging.set_verbosity(optuna.logging.ERROR)

JOURNAL = "search.jsonl"
WARM, PRUNED_AT, ERROR = "warm_start", "pruned_at", "error"
"""What is noted with a trial: the run that it was taken from, the evaluation that it was stopped at, why it failed."""


@dataclass(frozen=True)
class StudySpec:
    """What a process needs to open a study.

    Attributes:
        storage: file of a journal, or URL.
        name: of the study in its storage.
        directions: `max` or `min` for each objective.
        seed: of the sampler.
        sampler: see the key `search.sampler`.
        pruner: see the key `search.pruner`.
        warmup: evaluations of a trial before it may be stopped.
        reduction: halving and hyperband continue one of so many trials at each stage.
        evaluations: of a whole run, if known.
        parallel: whether several trials run at the same time.
    """

    storage: str
    name: str
    directions: Sequence[str]
    seed: int = 0
    sampler: str = "tpe"
    pruner: str = "none"
    warmup: int = 0
    reduction: int = 3
    evaluations: int | None = None
    parallel: bool = False


class _Lock:
    """A lock that a killed process gives up; those of Optuna stay for 30 seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._file = -1

    def acquire(self) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        with contextlib.suppress(OSError):  # a file system without locks
            if sys.platform != "win32":
                fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._file)


class Study:
    """A study in its storage, several processes may have it open."""

    def __init__(self, spec: StudySpec) -> None:
        self.spec = spec
        self.storage = _storage(spec.storage)
        wanted = [optuna.study.StudyDirection[f"{direction}imize".upper()] for direction in spec.directions]
        self.optuna = optuna.create_study(
            storage=self.storage, study_name=spec.name, directions=wanted, load_if_exists=True, pruner=_pruner(spec)
        )
        if self.optuna.directions != wanted:
            raise UserError("search.storage", f"has a study {spec.name} of other objectives", "another storage")

    def trials(self, warm: bool = False) -> list[optuna.trial.FrozenTrial]:
        """The trials of the search in order, or those that came from earlier runs."""
        return [trial for trial in self.optuna.get_trials(deepcopy=False) if (WARM in trial.user_attrs) == warm]

    def left(self, total: int) -> int:
        """How many trials of a search of so many have not ended."""
        trials = self.trials()
        return sum(not trial.state.is_finished() for trial in trials) + max(0, total - len(trials))

    def ask(self, index: int, space: dict[str, Range], number: int | None = None) -> tuple[int, dict[str, Any]]:
        """Begin a trial, or go on with one whose values were not all drawn yet.

        Args:
            index: of the trial among those of the search, from 0.
            space: what is drawn.
            number: of the trial to go on with, in the study.

        Returns:
            The number of the trial in the study, and its values by key.
        """
        self._seed(index)
        trial = self.optuna.ask() if number is None else self.trial(number)
        _ = trial.relative_params  # drawn together, by the sampler of this moment
        for position, (key, values) in enumerate(space.items()):
            # So that a part of the values, drawn before a kill, leaves the others as they are.
            self._seed(index, position)
            if values.kind == "choice":
                trial.suggest_categorical(key, values.choices)
            else:
                suggest: Any = trial.suggest_int if values.kind == "int" else trial.suggest_float
                suggest(key, values.low, values.high, step=values.step, log=values.log)
        return trial.number, trial.params

    def trial(self, number: int) -> optuna.trial.Trial:
        """A running trial by its number in the study."""
        study = self.storage.get_study_id_from_name(self.spec.name)
        return optuna.trial.Trial(self.optuna, self.storage.get_trial_id_from_study_id_trial_number(study, number))

    def tell(
        self, index: int, number: int, values: Sequence[float] | None, pruned: bool = False, why: str = ""
    ) -> None:
        """End a trial: with the values of its objectives, as pruned, or without values as failed."""
        self._seed(index)
        if why:
            self.trial(number).set_user_attr(ERROR, why)
        states = optuna.trial.TrialState
        state = states.PRUNED if pruned else states.FAIL if values is None else states.COMPLETE
        self.optuna.tell(number, None if state is not states.COMPLETE else list(values or ()), state=state)

    def add(self, params: dict[str, Any], space: dict[str, Range], values: Sequence[float], source: str) -> bool:
        """Add the result of an earlier run, unless its values are outside of the search space."""
        distributions = {key: _distribution(each) for key, each in space.items()}
        try:
            trial = optuna.trial.create_trial(
                params=params, distributions=distributions, values=list(values), user_attrs={WARM: source}
            )
        except ValueError:
            return False
        self.optuna.add_trial(trial)
        return True

    def prunes(self, number: int, evaluation: int, value: float) -> bool:
        """Report an evaluation of a trial, and decide whether the trial stops there.

        The decision is on the disk before anything that it is based on is changed, so that a run that is killed here and
        resumed decides the same.
        """
        trial, known = self.trial(number), self._frozen(number)
        decided = known.user_attrs.get(PRUNED_AT)
        if evaluation not in known.intermediate_values:
            trial.report(value, evaluation)
        elif evaluation != known.last_step:
            return False  # decided before the run was resumed
        with self._attributes_held() as held:
            pruned = bool(trial.should_prune()) or decided is not None
        if pruned and decided is None:
            trial.set_user_attr(PRUNED_AT, evaluation)
        for trial_id, key, content in held:
            self.storage.set_trial_system_attr(trial_id, key, content)
        return pruned

    def pruned_at(self, number: int) -> int | None:
        """The evaluation that a trial was stopped at, from 1; None for a trial that goes on."""
        found: int | None = self._frozen(number).user_attrs.get(PRUNED_AT)
        return found

    def stops_again(self, number: int, evaluation: int) -> int | None:
        """The same for a run that was resumed after an evaluation; None if it was stopped at a later one."""
        at = self.pruned_at(number)
        if at is None or at > evaluation:
            return None
        self.prunes(number, at, 0.0)  # which completes what a kill left incomplete
        return at

    @contextlib.contextmanager
    def _attributes_held(self) -> Iterator[list[tuple[int, str, Any]]]:
        """Collect what a pruner notes with a trial, instead of writing it."""
        held: list[tuple[int, str, Any]] = []
        self.storage.set_trial_system_attr = lambda *given: held.append(given)
        try:
            yield held
        finally:
            del self.storage.set_trial_system_attr  # that of its class is back

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self.optuna.get_trials(deepcopy=False)[number]

    def _seed(self, index: int, position: int = 0) -> None:
        self.optuna.sampler = _sampler(self.spec, zlib.crc32(f"{self.spec.seed} {index} {position}".encode()))


def check_storage(where: str | None) -> None:
    """Refuse an SQLite file in a folder that does not exist, of which Optuna says something else.

    Raises:
        UserError: if it is one.
    """
    scheme, _, file = (where or "").partition(":///")
    if scheme == "sqlite" and not (folder := Path(file).parent).is_dir():
        raise UserError("search.storage", f"cannot be {where}: there is no folder {folder}", f"mkdir -p {folder}")


def _storage(where: str) -> Any:
    """The storage of a file or URL."""
    if "://" in where:
        try:
            return optuna.storages.get_storage(where)
        except Exception as error:  # of the database's driver
            reason = str(error).partition("\n")[0]
            raise UserError("search.storage", f"cannot be opened: {reason}", "a file, or sqlite:///FILE") from error
    path = Path(where)
    lock: Any = _Lock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    try:
        _complete(path)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _complete(path: Path) -> None:
    """Remove a last line that a crash left incomplete, which would make the next one unreadable."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _sampler(spec: StudySpec, seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if spec.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        if spec.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=spec.parallel)
        try:
            return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        except ImportError:
            raise UserError("search.sampler", "is cmaes, which is not installed", "pip install cmaes") from None


def _pruner(spec: StudySpec) -> optuna.pruners.BasePruner:
    first = max(1, spec.warmup)
    if spec.pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=spec.warmup)
    if spec.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=spec.reduction)
    if spec.pruner == "hyperband":
        most = "auto" if spec.evaluations is None else max(first, spec.evaluations)
        return optuna.pruners.HyperbandPruner(min_resource=first, max_resource=most, reduction_factor=spec.reduction)
    return optuna.pruners.NopPruner()


def _distribution(values: Range) -> optuna.distributions.BaseDistribution:
    if values.kind == "choice":
        return optuna.distributions.CategoricalDistribution(values.choices)
    kinds: Any = optuna.distributions
    kind = kinds.IntDistribution if values.kind == "int" else kinds.FloatDistribution
    found: optuna.distributions.BaseDistribution = kind(values.low, values.high, values.log, values.step)
    return found
