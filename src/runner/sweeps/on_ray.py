"""`hydra/launcher=ray`: the jobs of a sweep as tasks of Ray's core; Hydra's plugin for Ray needs older packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from runner.sweeps.jobs import completed


@dataclass
class RayConfig:
    """The keys of `hydra.launcher`; `conf/hydra/launcher/ray.yaml` explains them."""

    _target_: str = "hydra_plugins.runner_ray.RayLauncher"
    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    init: dict[str, Any] = field(default_factory=dict)
    remote: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/launcher", name="_ray", node=RayConfig, provider="runner")


def register() -> None:
    """Let Hydra know of the launcher, which it takes from its own folder of plugins alone."""
    sys.modules[RayLauncher.__module__] = sys.modules[__name__]
    Plugins.instance().register(RayLauncher)


class RayLauncher(Launcher):
    """Runs each job as a task of Ray, in a separate process; see `RayConfig`."""

    __module__ = "hydra_plugins.runner_ray"

    def __init__(self, address: str | None, num_cpus: float, num_gpus: float, init: Any, remote: Any) -> None:
        super().__init__()
        self._init = {"include_dashboard": False, **({"address": address} if address else {}), **init}
        # A process has the state of its job, so none is used twice; the ledger decides what runs again.
        self._remote = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_calls": 1, "max_retries": 0, **remote}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives."""
        self._given = (hydra_context, config, task_function)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs, and wait for them; one whose process was killed returns nothing, and its folder tells so."""
        import ray

        ray.init(**self._init)
        try:
            task, state = ray.remote(**self._remote)(_job), Singleton.get_state()
            numbered = enumerate(job_overrides, initial_job_idx)
            waiting = [task.remote(number, list(words), self._given, state) for number, words in numbered]
            return [_result(ray, reference) for reference in waiting]
        finally:
            ray.shutdown()


def _result(ray: Any, reference: Any) -> JobReturn:
    try:
        result: JobReturn = ray.get(reference)
        return result
    except ray.exceptions.RayError as error:
        print(f"a job ended without a result: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return completed()


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
