"""Events of TensorBoard beside scalars: histograms of weights, the graph of a model, images, hyperparameters.

Each function gives the fields of events.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.reading import read_regular
from runner.config import stored
from runner.config.keys import flatten

_BINS = 64


@dataclass(frozen=True)
class Watched:
    """Parts of a run that a logger may look at, and must leave as they are."""

    model: nn.Module
    example: (
        Callable[[], Tensor] | None
    )  # a sample as the model takes it, (1, C, H, W); None if it takes something else
    samples: Mapping[str, Tensor]  # the first sample of each split, (C, H, W), before `transform.eval`
    pictures: Callable[[], list[Tensor]] = list  # of predictions as they are now, uint8 (3, H, W)


def histograms(watched: Watched) -> Iterator[dict[str, Any]]:
    """Each trained tensor, without elements that are not finite; of sharded ones, the part that is here."""
    for name, parameter in watched.model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values = tensor.detach().float().cpu()
            if (values := values[values.isfinite()]).numel():
                yield {"summary": _summary().histogram(name, values.numpy(), bins=_BINS)}


def images(watched: Watched) -> Iterator[dict[str, Any]]:
    """The first sample of each split, its values scaled to 0 to 1."""
    for split, sample in watched.samples.items():
        pixels = sample.detach().float().cpu()
        low, high = pixels.min(), pixels.max()
        colours = pixels if len(pixels) in (1, 3) else pixels[:1]
        shown = ((colours - low) / (high - low).clamp(min=1e-12)).numpy()
        yield {"summary": _summary().image(f"first sample/{split}", shown, dataformats="CHW")}


def pictures(watched: Watched) -> Iterator[dict[str, Any]]:
    """What the model predicts of a few samples, drawn by the task."""
    for place, picture in enumerate(watched.pictures()):
        yield {"summary": _summary().image(f"prediction/{place}", picture.numpy(), dataformats="CHW")}


def graph(watched: Watched) -> Iterator[dict[str, Any]]:
    """The graph of the model, from a forward pass of a copy on the CPU.

    Raises:
        Exception: whatever tracing raises for a model that cannot be traced.
    """
    from torch.utils.tensorboard import _pytorch_graph

    trace: Any = _pytorch_graph.graph
    if (example := watched.example) is None:
        raise ValueError("the graph of a model that does not take images alone is not drawn")
    # Tracing runs the model, so a copy is used, and the generators stay as they are
    model = copy.deepcopy(watched.model).cpu().eval()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = trace(model, example().cpu().float())
    yield {"graph_def": found.SerializeToString()}


def hyperparameters(directory: Path, metrics: list[str]) -> Iterator[dict[str, Any]]:
    """The page HPARAMS: the keys of the run's config, and the tags of the metrics to compare."""
    text = read_regular(directory / "config.yaml").decode()
    config = flatten(stored.load(text, str(directory)))
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in config.items()}
    for summary in _summary().hparams(plain, dict.fromkeys(metrics, 0.0)):
        yield {"summary": summary}


def _summary() -> Any:
    """The module of torch that makes summaries; its functions have no types."""
    return importlib.import_module("torch.utils.tensorboard.summary")
