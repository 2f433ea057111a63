"""What TensorBoard shows beside scalars: histograms of weights, the graph of a model, images, hyperparameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config import stored
from runner.config.keys import flatten
from runner.config.reading import read_regular

_BINS = 64


@dataclass(frozen=True)
class Watched:
    """What a logger may look at, and must leave as it is."""

    model: nn.Module
    example: Callable[[], Tensor]  # a sample as the model takes it, (1, C, H, W)
    samples: Mapping[str, Tensor]  # the first sample of each split, (C, H, W), before `transform.eval`


def histograms(watched: Watched) -> Iterator[Any]:
    """A summary for each trained tensor, without elements that are not finite; of sharded ones, the part that is here."""
    from torch.utils.tensorboard import summary

    for name, parameter in watched.model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values = tensor.detach().float().cpu()
            if (values := values[values.isfinite()]).numel():
                yield _untyped(summary, "histogram")(name, values.numpy(), bins=_BINS)


def images(watched: Watched) -> Iterator[Any]:
    """A summary for the first sample of each split, its values scaled to 0 to 1."""

    for split, sample in watched.samples.items():
        pixels = sample.detach().float().cpu()
        low, high = pixels.min(), pixels.max()
        colours = pixels if len(pixels) in (1, 3) else pixels[:1]
        yield image(
            f"first sample/{split}", ((colours - low) / (high - low).clamp(min=1e-12)).numpy(), dataformats="CHW"
        )


def graph(watched: Watched) -> bytes:
    """The graph of the model, as TensorBoard stores it, from a forward pass of a copy on the CPU.

    Raises:
        Exception: whatever tracing raises for a model that cannot be traced.
    """
    from torch.utils.tensorboard import _pytorch_graph

    model = copy.deepcopy(watched.model).cpu().eval()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = _untyped(_pytorch_graph, "graph")(model, watched.example().cpu().float())
    return bytes(found.SerializeToString())


def hyperparameters(directory: Path, metrics: list[str]) -> tuple[Any, ...]:
    """The summaries of the page HPARAMS: the keys of the run's config, and the tags of the metrics to compare."""
    from torch.utils.tensorboard import summary

    text = read_regular(directory / "config.yaml").decode()
    config = flatten(stored.load(text, str(directory)))
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in config.items()}
    return tuple(_untyped(summary, "hparams")(plain, dict.fromkeys(metrics, 0.0)))


def _untyped(module: Any, name: str) -> Any:
    """A function of torch without annotations."""
    return getattr(module, name)
