"""From the first tensor that differs to what is probably behind it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from runner.data.nondeterminism import Nondeterminism
from runner.verbs.audit.record import (
    ACTIVATION,
    BATCH,
    DRAWN,
    FLOW,
    GENERATOR,
    GRADIENT,
    LOSS,
    OPTIMIZER,
    START,
    WEIGHT,
    Difference,
    Entry,
)

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
    """What is probably behind a difference, and what to do about it: nothing if that is empty."""

    text: str
    remedy: str


def cause_of(
    difference: Difference,
    before: Sequence[Entry],
    model: nn.Module,
    varied: Mapping[str, tuple[Any, Any]],
    suspect: Nondeterminism | None,
) -> Cause:
    """The likely cause.

    Args:
        difference: the first one.
        before: what was computed before it on the first side.
        model: of the first side.
        varied: keys that the sides differ in, with both values.
        suspect: what gives different images or targets for the same samples, if that was found.
    """
    if suspect is not None:
        return _of_suspect(suspect)
    if expected := _expected(difference, varied):
        return expected
    if difference.a is None or difference.b is None:
        side = "a" if difference.b is None else "b"
        return Cause(
            f"only {side} computes it: the two sides do different work",
            "compare settings that build the same model and optimizer",
        )
    return _BY_PHASE[difference.entry.phase](difference.entry, before, model)


def _expected(difference: Difference, varied: Mapping[str, tuple[Any, Any]]) -> Cause | None:
    """What a key that may change bits explains."""
    training = [key for key in varied if not _among(key, _NEUTRAL) and not _among(key, _ROUNDING)]
    if training:
        return Cause(f"{_listed(training)} changes what is learned, so this is expected", "")
    rounding = [key for key in varied if _among(key, _ROUNDING)]
    if rounding and difference.entry.phase not in (BATCH, DRAWN, GENERATOR):
        return Cause(f"{_listed(rounding)} changes how numbers are rounded, so this is expected", "")
    return None


def _among(key: str, keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _listed(keys: Sequence[str]) -> str:
    return " or ".join(keys)


def _of_suspect(suspect: Nondeterminism) -> Cause:
    who = f"{suspect.name} ({suspect.key})"
    if suspect.by_worker:
        return Cause(
            f"{who} gives another result in another worker process",
            f"take nothing from get_worker_info(), but draw from {_SEEDED}, which are seeded for each sample",
        )
    of_batches = suspect.key.startswith(("transform.train.", "transform.mix"))
    return Cause(
        f"{who} gives another result each time it is called with the same sample: it draws from a generator of its own, "
        "or follows a counter or the clock",
        "draw from the draws that it is given"
        if of_batches
        else f"draw from {_SEEDED}, which are seeded for each sample",
    )


def _of_start(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    if entry.name.startswith("generator"):
        return Cause(
            "building the model leaves this generator elsewhere each time", f"draw from {_SEEDED}, which are seeded"
        )
    return Cause(
        f"the model is built with other values each time: {_owner(entry.name, model)} draws them from a generator of its own",
        f"draw from {_SEEDED}, which are seeded before the model is built",
    )


def _of_batch(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    if entry.name == "indices":
        return Cause(
            "the samples come in another order: the order follows from seed, epoch and the number of samples of the split",
            "a data set whose samples, their number and their order are the same each time it is built",
        )
    return Cause(
        f"the {entry.name} of the same samples differ, although data set and transforms repeat when they are called by themselves",
        "look for state that a transform or the data set keeps between samples, or for files that change",
    )


def _of_draws(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    return Cause(
        f"making the batch has drawn from the global generator of {entry.name} on one side only, so dropout will differ",
        "draw from the draws that a batch transform is given, or from a generator with a fixed seed",
    )


def _of_activation(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    who = _module(entry.name, model)
    return Cause(
        f"{who} gives another output, although all before it and the generators are the same: it draws from a generator "
        "of its own, or an operation in its forward does not repeat",
        f"draw from {_SEEDED}, which are seeded; or deterministic=true, which refuses operations that do not repeat",
    )


def _of_loss(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    return Cause(
        "the loss differs although all outputs are the same: the loss function does not repeat",
        "deterministic=true, or another loss",
    )


def _of_flow(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    passed = [earlier.name for earlier in before if earlier.phase == FLOW and _is_leaf(earlier.name, model)]
    who = _module(passed[-1], model) if passed else "the loss"
    return _in_backward(f"the backward of {who}, or a hook on it,")


def _of_gradient(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    return _in_backward(f"the backward of {_owner(entry.name, model)}, or a hook on {entry.name},")


def _in_backward(who: str) -> Cause:
    return Cause(
        f"all outputs, the loss and the gradients before it are the same, so {who} does not repeat",
        "deterministic=true, which takes operations that repeat or names the one that cannot; or a hook that draws nothing",
    )


def _of_weight(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    if entry.name not in dict(model.named_parameters()):
        return Cause(
            f"the buffer of {_owner(entry.name, model)} differs although all activations are the same: its update does not repeat",
            "an update that draws nothing and follows from the inputs alone",
        )
    return Cause(
        "the gradients are the same and the weights are not: the optimizer's step, or the clipping before it, does not repeat",
        "optimizer.fused=false and optimizer.foreach=false, or an optimizer that draws from what is seeded",
    )


def _of_optimizer(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    return Cause(
        "gradients and weights are the same and the optimizer's memory is not: its step does not repeat",
        "optimizer.fused=false and optimizer.foreach=false, or another optimizer",
    )


def _of_generator(entry: Entry, before: Sequence[Entry], model: nn.Module) -> Cause:
    return Cause(
        f"the step has drawn from the global generator of {entry.name} more often on one side, so later steps will differ",
        "let the number of draws follow from the batch alone",
    )


_BY_PHASE = {
    START: _of_start,
    BATCH: _of_batch,
    DRAWN: _of_draws,
    ACTIVATION: _of_activation,
    LOSS: _of_loss,
    FLOW: _of_flow,
    GRADIENT: _of_gradient,
    WEIGHT: _of_weight,
    OPTIMIZER: _of_optimizer,
    GENERATOR: _of_generator,
}


def _module(name: str, model: nn.Module) -> str:
    """A module with its type, `layers.2 (Dropout)`."""
    module = dict(model.named_modules()).get(name, model)
    return f"{name} ({type(module).__name__})"


def _is_leaf(name: str, model: nn.Module) -> bool:
    module = dict(model.named_modules()).get(name)
    return module is not None and not any(True for _ in module.children())


def _owner(tensor: str, model: nn.Module) -> str:
    """The module that a parameter or buffer belongs to."""
    name = tensor.rpartition(".")[0]
    return _module(name, model) if name else type(model).__name__
