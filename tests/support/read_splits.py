"""A data set read as a run reads it, by sections of a config that has nothing else."""

from __future__ import annotations

from typing import Any

import torch

from runner.config.load import problems_in
from runner.config.schema import VERBS
from runner.config.schema.sections import Data, Evaluate, Transform
from runner.config.schema.train import Train
from runner.data.build import read_data
from runner.data.module import DataModule


def data_config(data: Data, transform: Transform | None = None, *, batch_size: int = 32, **keys: Any) -> Train:
    """A config of these sections; `batch_size` is that of evaluations, `keys` are at its top level."""
    nodes: dict[str, Any] = {name: {} for name in ("model", "optimizer", "scheduler", "loss", "task")}
    sections = {"transform": transform or Transform(), "evaluate": Evaluate(batch_size=batch_size)}
    return Train(data=data, **sections, **nodes, **keys)


def read_splits(
    data: Data, transform: Transform | None = None, *, make_cache: bool = True, **settings: Any
) -> DataModule:
    """The splits of `data_config`, on the CPU; `settings` are its other arguments."""
    config = data_config(data, transform, **({"seed": 3} | settings))
    return read_data(config, torch.device("cpu"), make_cache=make_cache, dtype=torch.float32)


def read_words(compose: Any, *words: str, make_cache: bool = False) -> DataModule:
    """The data of `train` with these words, on the CPU."""
    composition = compose(*words)
    config, found = problems_in(composition.values, composition, VERBS["train"])
    assert not found
    return read_data(config, torch.device("cpu"), make_cache=make_cache, dtype=torch.float32)
