"""The likely cause of the first tensor that differs, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from runner.instrument.observer import module_label
from runner.lab.audit.nondeterminism import Nondeterminism
from runner.lab.audit.record import Difference, Entry, Phase

# Keys that change how numbers are rounded, so that a difference after the batch is not a fault.
_ROUNDING = (
    *("amp", "threads", "channels_last", "compile", "compiler", "tf32", "matmul_precision", "cudnn_benchmark"),
    *("optimizer.fused", "optimizer.foreach", "device", "deterministic"),
)
# Keys that must change no bit.
_NEUTRAL = (
    *("data.num_workers", "data.prefetch", "data.persistent_workers", "data.pin_memory", "data.non_blocking"),
    *("data.placement", "data.cache", "data.cache_dir", "activation_checkpointing", "log", "logger", "checkpoint"),
    *("evaluate", "callbacks", "output_root", "name", "detect_anomaly", "trust", "metrics", "max_time", "resume"),
)
_SEEDED = "draw from random, numpy.random and torch's global generator, which are seeded"
_REFUSED = "deterministic=true, which refuses non-deterministic operations"
_BEFORE = "the outputs, the loss and the gradients before it are the same, so"
# By the first phase that differs: everything before it is the same, which leaves few possible causes.
_BY_PHASE: dict[str, tuple[str, str]] = {
    Phase.START: ("the model is built with other values: {owner} draws them from its own generator", _SEEDED),
    "generator": ("building the model leaves this generator in another state each time", _SEEDED),
    "order": (
        "the samples come in another order each time the data set is built",
        "the same samples in the same order",
    ),
    Phase.BATCH: ("a transform or the data set keeps state between samples, or files change", "no such state"),
    Phase.DRAWN: (
        "making the batch drew from the generator of {name} on one side only",
        "draw from the given generator",
    ),
    Phase.ACTIVATION: (
        "{module} returns another output for the same input: it draws from its own generator, or is not deterministic",
        f"{_SEEDED}; or {_REFUSED}",
    ),
    Phase.LOSS: ("all outputs are the same, so the loss function is not deterministic", _REFUSED),
    Phase.FLOW: (f"{_BEFORE} the backward of {{last}}, or a hook on it, is not deterministic", _REFUSED),
    Phase.GRADIENT: (f"{_BEFORE} the backward of {{owner}}, or a hook on {{name}}, is not deterministic", _REFUSED),
    Phase.WEIGHT: ("the gradients are the same, so the optimizer's step, or clipping, is not deterministic", _REFUSED),
    "buffer": ("all activations are the same, so {owner} updates its buffer in another way each time", _SEEDED),
    Phase.OPTIMIZER: ("gradients and weights are the same, so the optimizer's step is not deterministic", _REFUSED),
    Phase.GENERATOR: (
        "the step drew from the generator of {name} more often on one side",
        "as many draws in each step",
    ),
}


class Cause(NamedTuple):
    """The likely cause of a difference, and what to do about it: nothing if that is empty."""

    text: str
    remedy: str


def cause_of(
    difference: Difference,
    before: Sequence[Entry],
    model: nn.Module,
    varied: Iterable[str],
    suspect: Nondeterminism | None,
) -> Cause:
    """The likely cause of the first difference.

    Args:
        difference: the first one.
        before: the entries before it on the first side.
        model: that of the first side.
        varied: keys that the sides differ in.
        suspect: the transform or data set that returns different images or targets for the same samples.
    """
    name, phase = difference.entry.name, difference.entry.phase
    # A component that was caught is the cause; everything below is inference
    if suspect is not None:
        where = "in another worker process" if suspect.by_worker else "each time it is called with the same sample"
        # Transforms of batches are given a generator, those of samples are not.
        of_batches = suspect.key.startswith(("transform.train.", "transform.mix"))
        remedy = "draw from the generator that is passed in" if of_batches else f"{_SEEDED} for each sample"
        remedy = f"use nothing from get_worker_info(); {remedy}" if suspect.by_worker else remedy
        return Cause(f"{suspect.name} ({suspect.key}) returns another result {where}", remedy)
    # Settings that change results explain a difference without a fault
    rounding = [key for key in varied if _is_among(key, _ROUNDING)]
    if training := [key for key in varied if key not in rounding and not _is_among(key, _NEUTRAL)]:
        return Cause(f"{' or '.join(training)} changes what is learned, so this is expected", "")
    if rounding and phase not in (Phase.BATCH, Phase.DRAWN, Phase.GENERATOR):
        return Cause(f"{' or '.join(rounding)} changes how numbers are rounded, so this is expected", "")
    if difference.a is None or difference.b is None:
        side = "a" if difference.b is None else "b"
        return Cause(f"only {side} computes it: the two sides do different work", "settings that build the same model")
    modules = dict(model.named_modules())
    names = {"name": name, "module": name, "owner": name.rpartition(".")[0]}
    labels = {key: module_label(each, modules.get(each, model)) for key, each in names.items()}
    # Backward passes the gradient of an output on to the module that computed it.
    passed = [each.name for each in before if each.phase == Phase.FLOW and each.name in modules]
    leaves = [each for each in passed if not [*modules[each].children()]]
    labels |= {"name": name, "last": module_label(leaves[-1], modules[leaves[-1]]) if leaves else "the loss"}
    # The phase of the first difference tells where to look
    if phase == Phase.START and name.startswith("generator"):
        phase = "generator"
    elif phase == Phase.BATCH and name == "indices":
        phase = "order"
    elif phase == Phase.WEIGHT and name not in dict(model.named_parameters()):
        phase = "buffer"
    text, remedy = _BY_PHASE[phase]
    return Cause(text.format_map(labels), remedy)


def _is_among(key: str, keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)
