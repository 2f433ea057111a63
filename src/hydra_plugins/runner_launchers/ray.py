"""`hydra/launcher=ray`: the jobs of a sweep as tasks of Ray's core; Hydra's plugin needs older packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class RayLauncher(Launcher):
    """Runs each job as a task of Ray: on a cluster, or on a cluster of this machine that ends with the sweep.

    Args:
        init: arguments of `ray.init`, such as `address` or `num_cpus`.
        remote: arguments of `ray.remote` for each job, such as `num_cpus` and `num_gpus`.
    """

    def __init__(self, init: DictConfig, remote: DictConfig) -> None:
        self.init: Any = OmegaConf.to_container(init, resolve=True)
        self.remote: Any = OmegaConf.to_container(remote, resolve=True)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what the jobs need."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a job for each list of overrides, and return their results in this order."""
        from runner.sweeps.on_ray import run_jobs

        given = (self.hydra_context, self.config, self.task_function)
        return run_jobs(self.init, self.remote, given, job_overrides, initial_job_idx)


# Hydra runs this file in a way that a dataclass does not bear.
NODE = {
    "_target_": "hydra_plugins.runner_launchers.ray.RayLauncher",
    "init": {"address": None, "num_cpus": None, "num_gpus": None, "include_dashboard": False, "log_to_driver": True},
    "remote": {"num_cpus": 1, "num_gpus": 0},
}
ConfigStore.instance().store(group="hydra/launcher", name="ray", node=NODE, provider="runner")
