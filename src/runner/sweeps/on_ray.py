"""The jobs of a sweep as tasks of Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf import open_dict


def run_jobs(
    init: dict[str, Any],
    remote: dict[str, Any],
    given: tuple[Any, Any, Any],
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Run jobs, each in a process of its own.

    Args:
        init: arguments of `ray.init`.
        remote: arguments of `ray.remote`.
        given: Hydra's context, config and task.
        job_overrides: the overrides of each job.
        first: number of the first job.

    Returns:
        The result of each; one whose process was killed has none, and its folder tells so.
    """
    import ray

    was_there = ray.is_initialized()
    if not was_there:
        ray.init(**init)
    try:
        # A process has the state of its job, and another sweep may have other packages: none is used twice, nor again.
        task = ray.remote(**{"max_calls": 1, "max_retries": 0, **remote})(_job)
        state = Singleton.get_state()
        waiting = [task.remote(first + at, list(words), given, state) for at, words in enumerate(job_overrides)]
        return [_result(ray, reference) for reference in waiting]
    finally:
        if not was_there:
            ray.shutdown()


def _result(ray: Any, reference: Any) -> JobReturn:
    try:
        result: JobReturn = ray.get(reference)
        return result
    except ray.exceptions.RayError as error:
        print(f"a job ended without a result: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        result = JobReturn()
        result.status = JobStatus.COMPLETED
        return result


def _job(number: int, words: list[str], given: tuple[Any, Any, Any], state: Any) -> JobReturn:
    context, config, task = given
    setup_globals()
    Singleton.set_state(state)
    own = context.config_loader.load_sweep_config(config, words)
    with open_dict(own):
        own.hydra.job.id = f"{own.hydra.job.name}_{number}"
        own.hydra.job.num = number
    HydraConfig.instance().set_config(own)
    result = run_job(
        hydra_context=context,
        config=own,
        task_function=task,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    result.cfg = result.hydra_cfg = None
    return result
