"""The likely cause of the first tensor that differs, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from runner.data.nondeterminism import Nondeterminism
from runner.instrument.observer import module_label
from runner.verbs.audit.record import Difference, Entry, Phase

# Keys that change how numbers are rounded, so that a difference after the batch is no fault.
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
    varied: Mapping[str, tuple[Any, Any]],
    suspect: Nondeterminism | None,
) -> Cause:
    """The likely cause of the first difference.

    Args:
        difference: the first one.
        before: what was computed before it on the first side.
        model: of the first side.
        varied: keys that the sides differ in, with both values.
        suspect: what returns different images or targets for the same samples, if that was found.
    """
    entry = difference.entry
    if suspect is not None:
        return _of_suspect(suspect)
    if expected := _expected(entry.phase, varied):
        return expected
    if difference.a is None or difference.b is None:
        side = "a" if difference.b is None else "b"
        return Cause(
            f"only {side} computes it: the two sides do different work",
            "compare settings that build the same model and optimizer",
        )
    phase = _special_case(entry, model) or entry.phase
    modules = dict(model.named_modules())
    backward = [each.name for each in before if each.phase == Phase.FLOW and each.name in modules]
    leaves = [name for name in backward if not any(True for _ in modules[name].children())]
    facts = {
        "name": entry.name,
        "module": _label(entry.name, modules, model),
        "owner": _label(entry.name.rpartition(".")[0], modules, model),
        "last": _label(leaves[-1], modules, model) if leaves else "the loss",
        "seeded": _SEEDED,
    }
    text, remedy = _BY_PHASE[phase]
    return Cause(text.format_map(facts), remedy.format_map(facts))


def _expected(phase: str, varied: Mapping[str, tuple[Any, Any]]) -> Cause | None:
    """What a key that may change bits explains."""
    training = [key for key in varied if not _among(key, _NEUTRAL) and not _among(key, _ROUNDING)]
    if training:
        return Cause(f"{' or '.join(training)} changes what is learned, so this is expected", "")
    rounding = [key for key in varied if _among(key, _ROUNDING)]
    if rounding and phase not in (Phase.BATCH, Phase.DRAWN, Phase.GENERATOR):
        return Cause(f"{' or '.join(rounding)} changes how numbers are rounded, so this is expected", "")
    return None


def _among(key: str, keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _of_suspect(suspect: Nondeterminism) -> Cause:
    who = f"{suspect.name} ({suspect.key})"
    from_seeded = f"draw from {_SEEDED}, which are seeded for each sample"
    if suspect.by_worker:
        return Cause(
            f"{who} returns another result in another worker process",
            f"use nothing from get_worker_info(); {from_seeded}",
        )
    of_batches = suspect.key.startswith(("transform.train.", "transform.mix"))
    return Cause(
        f"{who} returns another result each time it is called with the same sample: it draws from its own generator, or "
        "depends on a counter or the clock",
        "draw from the generator that is passed in" if of_batches else from_seeded,
    )


def _special_case(entry: Entry, model: nn.Module) -> str:
    """Which of the causes of a phase that has several."""
    if entry.phase == Phase.START and entry.name.startswith("generator"):
        return "start generator"
    if entry.phase == Phase.BATCH and entry.name == "indices":
        return "order"
    if entry.phase == Phase.WEIGHT and entry.name not in dict(model.named_parameters()):
        return "buffer"
    return ""


def _label(name: str, modules: Mapping[str, nn.Module], model: nn.Module) -> str:
    return module_label(name, modules.get(name, model))


_REPEATING_BACKWARD = (
    "deterministic=true, which uses operations that repeat or names the one that cannot; or a hook that draws nothing"
)
_BY_PHASE = {
    Phase.START: (
        "the model is built with other values each time: {owner} draws them from its own generator",
        "draw from {seeded}, which are seeded before the model is built",
    ),
    "start generator": (
        "building the model leaves this generator in another state each time",
        "draw from {seeded}, which are seeded",
    ),
    Phase.BATCH: (
        "the {name} of the same samples differ, although data set and transforms repeat when they are called alone",
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
        "its own generator, or an operation in its forward does not repeat",
        "draw from {seeded}, which are seeded; or deterministic=true, which refuses operations that do not repeat",
    ),
    Phase.LOSS: (
        "the loss differs although all outputs are the same: the loss function does not repeat",
        "deterministic=true, or another loss",
    ),
    Phase.FLOW: (
        "all outputs, the loss and the gradients before it are the same, so the backward of {last}, or a hook on it, does "
        "not repeat",
        _REPEATING_BACKWARD,
    ),
    Phase.GRADIENT: (
        "all outputs, the loss and the gradients before it are the same, so the backward of {owner}, or a hook on {name}, "
        "does not repeat",
        _REPEATING_BACKWARD,
    ),
    Phase.WEIGHT: (
        "the gradients are the same and the weights are not: the optimizer's step, or the clipping before it, does not repeat",
        "optimizer.fused=false and optimizer.foreach=false, or an optimizer that draws from seeded generators",
    ),
    "buffer": (
        "the buffer of {owner} differs although all activations are the same: its update does not repeat",
        "an update that draws nothing and depends on the inputs alone",
    ),
    Phase.OPTIMIZER: (
        "gradients and weights are the same and the optimizer's state is not: its step does not repeat",
        "optimizer.fused=false and optimizer.foreach=false, or another optimizer",
    ),
    Phase.GENERATOR: (
        "the step drew from the global generator of {name} more often on one side, so later steps will differ",
        "make the number of draws depend on the batch alone",
    ),
}
