"""Evaluation of a split in inference mode, which changes nothing about training."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sharding import is_sharded, reshard
from runner.distributed.world import World, world
from runner.engine.errors import BadMetric, Interrupted, RankMismatch
from runner.engine.metrics import Additive
from runner.engine.protocols import Batch, Metric, Source
from runner.instrument.nested import mapped_items, tensors_moved
from runner.instrument.no_trace import evaluating


def evaluate(
    model: nn.Module,
    source: Source,
    evaluation: Callable[[Any], Mapping[str, Any]],
    *,
    loss: nn.Module | None = None,
    metrics: Mapping[str, Metric],
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    limit: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Evaluate a split; modes and buffers of model and loss do not change.

    The ranks of a sharded model run equally many forward passes: those with one batch less add the first once more, which
    counts for nothing. They also stop together.

    Args:
        model: the model.
        source: the split.
        evaluation: the data of a batch -> `outputs` and `targets` for the metrics, and further scalars such as `loss`, each
            the mean over the samples, or over what `weight` counts.
        loss: a module that the evaluation calls beside the model.
        metrics: fresh metrics by name, on the model's device; afterwards they contain the whole split.
        autocast: context manager for the forward pass.
        limit: batches to use; None for all.
        interrupted: called before every batch; True raises `Interrupted`.

    Returns:
        The mean of each scalar, and every metric with a scalar value, as floats.
    """
    batches = len(source) if limit is None else min(len(source), limit)
    ranks, sharded = world(), is_sharded(model)
    parts, own_batches = _Parts(metrics, ranks), len(range(ranks.rank, batches, ranks.size))
    # Gathered weights would be tensors of inference mode, so a sharded model does without it
    with evaluating(model, loss, inference=not sharded):
        batch: Batch
        every: Any = source.batches  # loaders can skip those of other ranks
        own = source.batches(0, 0, batches) if ranks.size == 1 else every(0, ranks.rank, batches, ranks.size)
        # Every rank has to take part in each forward pass of a sharded model, so one with fewer batches repeats one
        if sharded and own_batches < math.ceil(batches / ranks.size):
            own = itertools.chain(own, source.batches(0, 0, 1))
        for number, batch in enumerate(own):
            # Ranks of a sharded model stop together: a forward pass needs the weights of all of them.
            if any(ranks.gather(interrupted())) if sharded else interrupted():
                if ranks.size == 1:
                    raise Interrupted
                parts.interrupted = True  # the others have to hear of it
                break
            place = ranks.rank + number * ranks.size
            # A step that draws random numbers draws those of its batch: in each evaluation, in `eval`, and on any rank
            seed = torch.default_generator.manual_seed if batch.indices.device.type == "cpu" else torch.manual_seed
            seed(place)  # torch.manual_seed takes a stack trace while no GPU is in use
            with autocast():
                found = evaluation(batch.data)
            means = {name: value for name, value in found.items() if name not in NO_MEANS}
            # A copy, because a metric may keep it, and a CUDA graph reuses the memory of its output.
            if metrics and "outputs" not in found:
                raise BadMetric(f"the evaluation gives no outputs for {', '.join(metrics)}", "outputs and targets")
            outputs = mapped_items(
                found.get("outputs"),
                Tensor,
                lambda each: each.to(torch.float32, copy=True) if each.is_floating_point() else each,
            )
            # The repeated batch of such a rank counts for nothing
            if number < own_batches:
                parts.add(place, found.get("weight", len(batch.indices)), means, outputs, found.get("targets"))
        reshard(model)
        # Only here do the ranks exchange what they found
        return parts.values(next((weight.device for weight in model.parameters()), torch.device("cpu")))


NO_MEANS = ("outputs", "targets", "weight")  # the other values of an evaluation are means over the batch


class _Parts:
    """The contributions of the batches of an evaluation to its means and metrics.

    One process adds them up as they come. Several ranks keep those of each batch, exchange them once at the end, and add them
    up in the order of the batches: every rank gets the numbers of a single process, to the last bit. Of a metric whose states
    are sums, extremes or lists the states are exchanged, of any other the outputs and targets.
    """

    def __init__(self, metrics: Mapping[str, Metric], ranks: World) -> None:
        self._metrics, self._ranks = metrics, ranks
        self._totals: dict[str, Tensor] | None = None
        self._samples: Any = 0
        self._kept: list[tuple[int, Any, dict[str, Tensor], dict[str, Any], Any]] = []
        self._merges = {name: merges(metric) for name, metric in metrics.items()} if ranks.size > 1 else {}
        self.interrupted = False

    def add(self, number: int, size: Any, means: Mapping[str, Tensor], outputs: Any, targets: Any) -> None:
        """Add batch `number` of `size` samples, or what else its means are over."""
        # Sums over many batches lose digits in float32; MPS has no float64
        wide = {
            name: (mean.double() if mean.device.type != "mps" else mean.float()) * size for name, mean in means.items()
        }
        if self._ranks.size == 1:
            self._add(wide, size)
            for metric in self._metrics.values():
                metric.update(outputs, targets)
            return
        # Several ranks: keep the parts, which are merged in the order of the batches later
        states = {}
        for name, ways in self._merges.items():
            if ways is not None:
                part: Any = self._metrics[name]
                part.reset()
                part.update(outputs, targets)
                found = {state: getattr(part, state) for state in ways}
                # The next `reset` empties lists in place.
                states[name] = {key: list(value) if isinstance(value, list) else value for key, value in found.items()}
        # A metric that cannot be merged needs the outputs of all ranks
        whole = (outputs, targets) if None in self._merges.values() else None
        self._kept.append((number, size, wide, states, whole))

    def _add(self, sums: Mapping[str, Tensor], samples: Any) -> None:
        totals = sums if self._totals is None else self._totals
        if sums.keys() != totals.keys():
            some, others = (", ".join(each) or "no scalar" for each in (totals, sums))
            raise BadMetric(
                f"the evaluation gives {some} for one batch and {others} for another", "the same for every batch"
            )
        self._samples += samples
        first = self._totals is None
        self._totals = {name: value if first else totals[name] + value for name, value in sums.items()}

    def values(self, device: torch.device) -> dict[str, float]:
        """The means, and the metrics with a scalar value."""
        if self._ranks.size > 1:
            self._exchange(device)
        if not self._samples:
            raise BadMetric("there is no sample, or the weight of every batch is 0", "targets that count")
        values = {name: _number(name, metric.compute()) for name, metric in self._metrics.items()}
        scalars = {name: value for name, value in values.items() if value is not None}
        return {name: float(total) / float(self._samples) for name, total in (self._totals or {}).items()} | scalars

    def _exchange(self, device: torch.device) -> None:
        found = self._ranks.gather((self.interrupted, list(self._metrics), tensors_moved(self._kept, "cpu")))
        # All ranks raise, or those that go on would wait for the ones that stopped
        if any(interrupted for interrupted, _, _ in found):
            raise Interrupted
        # A metric that exists on some ranks only cannot be merged: its numbers would be of a part of the data
        names = [metrics for _, metrics, _ in found]
        if wrong := [rank for rank, own in enumerate(names) if own != names[0]]:
            raise RankMismatch(f"rank {wrong[0]} has the metrics {names[wrong[0]]}, and rank 0 has {names[0]}")
        # Sums of floats depend on their order, so it is that of a single process.
        everything = sorted((part for _, _, parts in found for part in parts), key=lambda part: part[0])
        everything = tensors_moved(everything, device)
        for _, size, sums, _, _ in everything:
            self._add(sums, size)
        for name, ways in self._merges.items() if everything else ():
            metric: Any = self._metrics[name]
            metric.distributed_available_fn = lambda: False  # or it would exchange its states once more
            if ways is None:  # nothing was added to it yet
                for *_, (outputs, targets) in everything:
                    metric.update(outputs, targets)
                continue
            metric.reset()
            for state, merged in ways.items():
                setattr(metric, state, functools.reduce(merged, (part[3][name][state] for part in everything)))
            # torchmetrics warns of a metric that was never updated; this one was, in parts
            metric._update_count = len(everything)


def _number(name: str, value: Any) -> float | None:
    """The value of a metric as a number; None for a tensor of several. Raises `BadMetric` for what is not a number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError):
        problem = f"metrics.{name}: compute() gives a {type(value).__name__}"
        raise BadMetric(problem, "a number, or a tensor") from None


def merges(metric: Metric) -> dict[str, Callable[[Any, Any], Any]] | None:
    """The function that joins each state of a metric with that of later batches; None if one is not known."""
    if isinstance(metric, Additive):
        return dict.fromkeys(metric.states, operator.add)
    if not hasattr(metric, "_reductions"):
        return None
    from torchmetrics.utilities import data

    known: Any = {data.dim_zero_sum: operator.add, data.dim_zero_max: torch.max, data.dim_zero_min: torch.min}
    found = {}
    for name, reduction in metric._reductions.items():
        is_list = isinstance(getattr(metric, "_defaults", {}).get(name), list)
        if not is_list and reduction not in known:
            return None
        found[name] = operator.add if is_list else known[reduction]
    return found
