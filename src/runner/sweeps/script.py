"""The script of a job of SLURM: of one run or of a sweep, to be looked at, kept or given to `sbatch`."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config.keys import key_of
from runner.config.truth import is_true

_WARNED_S = 120  # between a warning and the end of a job
_OF_THE_EXECUTOR = ("_target_", "submitit_folder", "max_num_timeout")


def job_script(verb: str, argv: Sequence[str], values: Mapping[str, Any]) -> str:
    """The script that runs a command as a job, which is requeued after a warning; resources are up to `sbatch`.

    Args:
        verb: what runs.
        argv: the words after it.
        values: the composed config.
    """
    words = [word for word in argv if key_of(word) != "slurm.script"]
    given = values["slurm"]["signal"] or []
    wanted = [given] if isinstance(given, str) else given
    warning = next((name for name in ("USR1", "USR2", "TERM") if name in wanted), None)
    options = [f"--job-name={shlex.quote(str(values['name']))}", "--open-mode=append"]
    options += [f"--signal={warning}@{_WARNED_S}"] if warning else []
    options += ["--requeue"] if is_true(values["slurm"]["requeue"]) else []
    command = shlex.join(["srun", sys.executable, "-m", "runner", verb, *words])
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", command])


def array_script(cfg: DictConfig, folder: Path, jobs: int) -> str:
    """The script that submitit submits for the jobs of a sweep.

    Args:
        cfg: the composed config with `hydra`, whose launcher is submitit's for SLURM.
        folder: of the sweep.
        jobs: how many.
    """
    slurm: Any = importlib.import_module("submitit.slurm.slurm")
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.sweep.dir = str(folder)
        settings: Any = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
    names = slurm.SlurmExecutor._equivalence_dict()
    own = {
        names.get(key, key): value
        for key, value in settings.items()
        if value is not None and key not in _OF_THE_EXECUTOR
    }
    if "mem" in own:
        own["mem"] = slurm._convert_mem(own["mem"])
    place = Path(settings["submitit_folder"]).absolute()
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(place)])
    text: str = slurm._make_sbatch_string(command=command, folder=place, map_count=jobs if jobs > 1 else None, **own)
    return text.rstrip()
