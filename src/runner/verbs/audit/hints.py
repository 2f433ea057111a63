"""The likely cause of the first tensor that differs, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from runner.data.nondeterminism import Nondeterminism
from runner.instrument.observer import module_label
from runner.verbs.audit.record import Difference, Entry, Phase

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
_SEEDED = "random, numpy.random and torch's global generator"


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
        before: what was computed before it on the first side.
        model: of the first side.
        varied: keys that the sides differ in.
        suspect: what returns different images or targets for the same samples, if that was found.
    """
    name, phase = difference.entry.name, difference.entry.phase
    if suspect is not None:
        return _of_suspect(suspect)
    rounding = [key for key in varied if _is_among(key, _ROUNDING)]
    training = [key for key in varied if key not in rounding and not _is_among(key, _NEUTRAL)]
    if training:
        return Cause(f"{' or '.join(training)} changes what is learned, so this is expected", "")
    if rounding and phase not in (Phase.BATCH, Phase.DRAWN, Phase.GENERATOR):
        return Cause(f"{' or '.join(rounding)} changes how numbers are rounded, so this is expected", "")
    if difference.a is None or difference.b is None:
        side = "a" if difference.b is None else "b"
        return Cause(
            f"only {side} computes it: the two sides do different work",
            "compare settings that build the same model and optimizer",
        )
    modules = dict(model.named_modules())

    def label(name: str) -> str:
        return module_label(name, modules.get(name, model))

    passed = [each.name for each in before if each.phase == Phase.FLOW and each.name in modules]
    leaves = [each for each in passed if not any(True for _ in modules[each].children())]
    facts = {
        "name": name,
        "module": label(name),
        "owner": label(name.rpartition(".")[0]),
        "last": label(leaves[-1]) if leaves else "the loss",
        "seeded": _SEEDED,
    }
    if phase == Phase.START and name.startswith("generator"):
        phase = "start generator"
    elif phase == Phase.BATCH and name == "indices":
        phase = "order"
    elif phase == Phase.WEIGHT and name not in dict(model.named_parameters()):
        phase = "buffer"
    text, remedy = _BY_PHASE[phase]
    return Cause(text.format_map(facts), remedy.format_map(facts))


def _is_among(key: str, keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _of_suspect(suspect: Nondeterminism) -> Cause:
    who = f"{suspect.name} ({suspect.key}) returns another result"
    from_seeded = f"draw from {_SEEDED}, which are seeded for each sample"
    if suspect.by_worker:
        return Cause(f"{who} in another worker process", f"use nothing from get_worker_info(); {from_seeded}")
    of_batches = suspect.key.startswith(("transform.train.", "transform.mix"))
    return Cause(
        f"{who} each time it is called with the same sample: it draws from its own generator, or depends on a counter or "
        "the clock",
        "draw from the generator that is passed in" if of_batches else from_seeded,
    )


_REPEATING_BACKWARD = (
    "deterministic=true, which uses deterministic operations or names the one that is not; or a hook that draws nothing"
)
_BY_PHASE: dict[str, tuple[str, str]] = {
    Phase.START: (
        "the model is built with other values each time: {owner} draws them from its own generator",
        "draw from {seeded}, which are seeded before the model is built",
    ),
    "start generator": (
        "building the model leaves this generator in another state each time",
        "draw from {seeded}, which are seeded",
    ),
    Phase.BATCH: (
        "the {name} of the same samples differ, although data set and transforms are reproducible when called alone",
        "look for state that a transform or the data set keeps between samples, or for files that change",
    ),
    "order": (
        "the samples come in another order: the order follows from seed, epoch and the number of samples of the split",
        "a data set whose samples, their number and their order are the same each time it is built",
    ),
    Phase.DRAWN: (
        "making the batch drew from the global generator of {name} on one side only, so dropout will differ",
        "draw from the generator that a batch transform is passed, or from one with a fixed seed",
    ),
    Phase.ACTIVATION: (
        "{module} returns another output, although everything before it and the generators are the same: it draws from "
        "its own generator, or an operation in its forward is not deterministic",
        "draw from {seeded}, which are seeded; or deterministic=true, which refuses non-deterministic operations",
    ),
    Phase.LOSS: (
        "the loss differs although all outputs are the same: the loss function is not deterministic",
        "deterministic=true, or another loss",
    ),
    Phase.FLOW: (
        "all outputs, the loss and the gradients before it are the same, so the backward of {last}, or a hook on it, is "
        "not deterministic",
        _REPEATING_BACKWARD,
    ),
    Phase.GRADIENT: (
        "all outputs, the loss and the gradients before it are the same, so the backward of {owner}, or a hook on {name}, "
        "is not deterministic",
        _REPEATING_BACKWARD,
    ),
    Phase.WEIGHT: (
        "the gradients are the same and the weights are not: the optimizer's step, or the clipping before it, is not deterministic",
        "optimizer.fused=false and optimizer.foreach=false, or an optimizer that draws from seeded generators",
    ),
    "buffer": (
        "the buffer of {owner} differs although all activations are the same: its update is not deterministic",
        "an update that draws nothing and depends on the inputs alone",
    ),
    Phase.OPTIMIZER: (
        "gradients and weights are the same and the optimizer's state is not: its step is not deterministic",
        "optimizer.fused=false and optimizer.foreach=false, or another optimizer",
    ),
    Phase.GENERATOR: (
        "the step drew from the global generator of {name} more often on one side, so later steps will differ",
        "make the number of draws depend on the batch alone",
    ),
}
