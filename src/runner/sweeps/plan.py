"""The jobs of a sweep: split from the words of a command, composed, validated, and known by what changes their result."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.base.errors import ConfigError, Problem, UserError, nearest
from runner.base.secrets import mask_values, mask_words
from runner.config import keys, overrides
from runner.config.changes import changes_result
from runner.config.composition import Composition
from runner.config.keys import at, flatten, key_of, within
from runner.config.load import compose_job, problems_in, problems_without_imports
from runner.config.schema.train import Adapters

# A run may be resumed with other values of these, but they decide what a job of a sweep is.
_COUNT_TOO = ("ckpt_path", "dry_run", "data.root")
# These do not count at their default, as the ledgers of earlier versions lack them.
_ADDED = {"budget": None, "data.decode": "auto", "transform.close_epochs": 0}
_ADDED |= {f"adapters.{key}": value for key, value in vars(Adapters()).items()}


@dataclass(frozen=True)
class Planned:
    """A job before it starts."""

    number: int  # among the jobs of the command, from 0
    identity: str  # see `identity`
    composition: Composition  # the config of the job
    varied: str = ""  # the overrides that not all jobs have, for people
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for the job


@dataclass(frozen=True)
class Plan:
    """A sweep before its first job."""

    command: Composition  # what was called
    swept: Sequence[str]  # keys and groups that have several values
    base: dict[str, Any]  # the values that all jobs have in common and that change a result
    jobs: Sequence[Planned] | None = None  # all jobs; None for a search, which chooses them later


Validate = Callable[[Sequence[Composition]], list[list[Problem]]]
"""Finds the problems of compositions, with torch."""


def plan_of(command: Composition, validate: Validate | None = None) -> Plan:
    """Split, compose and validate the jobs of a command; `validate` is called once no mistake is left that is found without torch.

    Raises:
        ConfigError: with every problem of every job.
        UserError: for keys in which jobs cannot differ.
    """
    values, words = command.values, command.words
    params = dict(command.hydra["sweeper"][1].get("params") or {})
    swept, off = sorted({*overrides.swept(words), *params}), dict[str, str]()
    # All jobs of a sweep lie in one folder, which these keys name
    if same_for_all := [key for key in ("name", "output_root") if key in swept]:
        why = "names the folder of a sweep, so that its jobs cannot differ in it"
        raise UserError(same_for_all[0], why, f"one {same_for_all[0]}, and job numbers; or one command for each")
    jobs = split([*(f"{key}={value}" for key, value in params.items()), *words])
    if values["sweep"]["ablate"] is not None:
        off = toggles_off(values, command.schema)
        # Each job as it is, and once for each toggle with that toggle off
        jobs = [[*job, *word] for job in jobs for word in ([], *([each] for each in off.values()))]
        swept = sorted({*swept, *off})
    # Jobs with equal settings are one job, although their words differ
    planned = dict[str, Planned]()  # a value may be given twice
    varied = varied_words(jobs)
    for number, composition in enumerate(composed(command, jobs, validate)):
        known = identity(composition.values, composition.overrides, swept)
        planned.setdefault(known, Planned(number, known, composition, varied[number]))
    # What the jobs share is stored, so that a later command with another base is noticed
    plain = [word for word in words if key_of(word) not in swept]
    base: dict[str, Any] = {"overrides": sorted(mask_words(plain))}  # if they are not a config by themselves
    with contextlib.suppress(ConfigError):
        on = {f"ablate.{key}": at(values, key) for key in off}
        base = counted(compose_job(command, plain).values) | on
    return Plan(command, swept, json.loads(json.dumps(base, default=str)), list(planned.values()))


def split(words: Sequence[str]) -> list[list[str]]:
    """The overrides of every job: each combination of the values that they list, the last ones of each key."""
    lists = dict[str, list[str]]()
    for override in overrides.parsed(words):
        key = override.get_key_element()
        if override.is_sweep_override():
            lists[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            lists[key] = [str(override.input_line)]
    return [list(job) for job in itertools.product(*lists.values())]


def problems_of_all(jobs: Sequence[Composition]) -> list[list[Problem]]:
    """The problems of compositions, with torch; of one that resumes, other values come from the checkpoint."""
    return [problems_in(job.values, job, job.schema)[1] if job.values.get("ckpt_path") is None else [] for job in jobs]


def composed(
    command: Composition, jobs: Sequence[Sequence[str]], validate: Validate | None = None
) -> list[Composition]:
    """Compose and validate jobs, first without importing torch, and with it if no problem was found.

    Raises:
        ConfigError: with each problem once, and the first job that has it with the overrides that not all jobs have, unless
            all jobs have it.
    """
    compositions, found = list[Composition](), list[list[Problem]]()
    # Problems are collected over all jobs: a sweep fails once, before the first job, with everything
    for words in jobs:
        try:
            compositions.append(job := compose_job(command, words))
            found.append([] if job.values.get("ckpt_path") is not None else problems_without_imports(job))
        except ConfigError as error:
            found.append(list(error.problems))
    # Importing torch takes seconds, so it is done only for jobs that are right as far as is known
    if not any(found):
        found = (validate or problems_of_all)(compositions)
    jobs_with: dict[tuple[str, str], dict[int, Problem]] = {}
    for number, problems in enumerate(found):
        for problem in problems:
            jobs_with.setdefault((problem.key, problem.message), {})[number] = problem
    if not jobs_with:
        return compositions
    # A problem of every job is one of the base, and is shown once and first; the others name their job
    listed, varied = list[Problem](), varied_words(jobs)
    for having in sorted(jobs_with.values(), key=lambda having: len(having) < len(jobs)):
        number, problem = next(iter(having.items()))
        if len(having) < len(jobs):
            others = f", and {len(having) - 1} more" if len(having) > 1 else ""
            problem = dataclasses.replace(problem, origin=f"job {number + 1} of {len(jobs)}: {varied[number]}{others}")
        listed.append(problem)
    raise ConfigError(listed)


def varied_words(jobs: Sequence[Sequence[str]]) -> list[str]:
    """For each job, the overrides that not all jobs have, as one text, with secrets masked."""
    jobs = [mask_words(job) for job in jobs]
    common = set.intersection(*(set(job) for job in jobs)) if len(jobs) > 1 else set()
    return [" ".join(word.lstrip("+") for word in job if word not in common and "hydra." not in word) for job in jobs]


def counted(values: dict[str, Any], swept: Sequence[str] = ()) -> dict[str, Any]:
    """The values by dotted key that make a job what it is: those that change its result, and all of the swept keys."""
    count_too = (*_COUNT_TOO, *swept)
    leaves = [leaf for leaf in flatten(mask_values(values)).items() if leaf not in _ADDED.items()]
    return {key: value for key, value in leaves if changes_result(key) or within(key, count_too)}


def identity(values: dict[str, Any], words: Sequence[str], swept: Sequence[str]) -> str:
    """A digest that tells a job from the others of its sweep, whatever its number. The user's code does not count.

    Of the overrides, those of swept presets count, as a preset may set keys that do not.
    """
    keys = [key.replace("/", ".") for key in swept]
    presets = [word for word in mask_words(words) if key_of(word) in swept and key_of(word).split("/")[0] not in values]
    content = [counted(values, keys), sorted(word.lstrip("+") for word in presets if "." not in key_of(word))]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


TOGGLES = (
    "amp", "channels_last", "compile", "activation_checkpointing", "cudnn_benchmark", "tf32", "matmul_precision",
    "sync_batchnorm", "deterministic", "ema", "swa", "grad_clip.norm", "grad_clip.value", "grad_clip.agc", "init", "freeze",
    "data.sampler", "data.shift", "data.hflip", "transform.train", "transform.mix", "loss.label_smoothing", "model.dropout",
    "optimizer.weight_decay", "optimizer.no_decay", "optimizer.lr_mult", "optimizer.layer_decay",
)  # fmt: skip
"""Keys that are switched off where the config has them on; `sweep.ablate=[...]` names others."""
_OFF: tuple[Any, ...] = (False, None, 0, [], {})


def toggles_off(values: dict[str, Any], schema: type) -> dict[str, str]:
    """The override that switches off each toggle of the composed config that is on, by key.

    Raises:
        UserError: if `sweep.ablate` names what is not a toggle or is off already, or no toggle is on.
    """
    wanted = values["sweep"]["ablate"]
    named = wanted if isinstance(wanted, list) else []
    # What is named has to be on, or its job would be the base once more
    for key in named:
        if keys.at(values, key) is ...:
            close = nearest(key, [*TOGGLES, *keys.flatten(values)])
            raise UserError("sweep.ablate", f"names {key}, which the config does not have", "keys of the config", close)
        if keys.at(values, key) in _OFF:
            raise UserError("sweep.ablate", f"names {key}, which is off already", "keys that are on")
    on = [key for key in named or TOGGLES if keys.at(values, key) not in (..., *_OFF)]
    if not on:
        allowed = f"one of {', '.join(TOGGLES)} on, or sweep.ablate=[KEY]"
        raise UserError("sweep.ablate", "finds no toggle that is on", allowed)
    return {key: f"{key}={_off(key, values, schema)}" for key in on}


def _off(key: str, values: dict[str, Any], schema: type) -> str:
    """The text of the value that switches a key off, which its type decides."""
    annotation, value = keys.find(schema, key), keys.at(values, key)
    # The type says what off is: false, null, an empty list or zero
    kinds = [keys.bare(member) for member in keys.members(annotation)]
    if bool in kinds or value is True:
        return "false"
    if type(None) in kinds:
        return "null"
    if isinstance(value, list):
        return "[]"
    if isinstance(value, int | float):
        return "0"
    if annotation is Any:
        return "null"
    why = f"names {key}, which cannot be switched off: it is {keys.describe(annotation)}"
    raise UserError("sweep.ablate", why, "other keys")
