"""The likely cause of the first tensor that differs, and what to do.

The data set and each transform are tried alone, several times with the same sample; all else follows from where it differs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runner.config.changes import changes_result
from runner.config.keys import within
from runner.data.loaders import Loader, MemoryLoader
from runner.data.sample_rng import SampleRNG, preserved_rng, seed_generators
from runner.data.samples import SeededDataset, collate
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.mixing import Mixing
from runner.data.workers import WorkerLoader
from runner.instrument.nested import leaves_of
from runner.instrument.observer import module_label
from runner.lab.audit.record import Difference, Entry, Phase

_TRIES = 5
_Step = tuple[str, Any, Callable[[Any], Any]]  # key of the config, what it is, and what it does with the result before


class Nondeterminism(NamedTuple):
    """What gives different results for the same sample: key of the config, and type of the transform or data set."""

    key: str
    name: str


def find_nondeterminism(loader: Loader, seed: int, epoch: int, indices: Sequence[int]) -> Nondeterminism | None:
    """Find what gives different images, or targets, for the same samples of a training split; None if all repeats.

    Every part gets the same input several times, with the generators seeded alike. State that the data set or the
    transforms keep between calls is changed.
    """
    # Samples that are read one by one may differ already before batches are made
    if isinstance(loader, WorkerLoader):
        seeded = loader._loader.dataset
        assert isinstance(seeded, SeededDataset), "a worker loader reads with SeededDataset"
        for index in indices:
            if found := _first_to_differ(_of_sample(seeded, index), None, (seed, epoch, index), seeded._pairs):
                return found
        if not seeded._pairs:
            return None
        read = collate(seeded.__getitems__([(epoch, index) for index in indices]))
        images, targets = read.data[0].to(loader._device), torch.from_numpy(read.data[1]).to(loader._device)
    else:
        assert isinstance(loader, MemoryLoader), "there are two kinds of loaders"
        chosen, device = torch.tensor(list(indices), device=loader._images.device), loader._device
        images, targets = (each.index_select(0, chosen).to(device) for each in (loader._images, loader._targets))
    # What acts on batches is called again with the same images and numbers
    places, prepare, mix = torch.tensor(list(indices), device=images.device), loader._prepare, loader._mix
    transforms = prepare.transforms if isinstance(prepare, Pipeline) else []

    def transformed(stream: int, given: Tensor) -> Any:
        return transforms[stream](given, SampleRNG(seed, epoch, places, stream))

    def mixed(_: Tensor) -> Any:
        prepared = prepare(images.clone(), places, epoch) if isinstance(prepare, Pipeline) else images.clone()
        return mix(prepared, targets.clone(), places, epoch) if mix is not None else None

    numbered = enumerate(transforms)
    steps: list[_Step] = [(f"transform.train.{at}", each, functools.partial(transformed, at)) for at, each in numbered]
    steps += [("transform.mix", mix.mix, mixed)] if isinstance(mix, Mixing) else []
    return _first_to_differ(steps, images, (seed, epoch, 0))


def _of_sample(seeded: SeededDataset, index: int) -> list[_Step]:
    """Reading a sample, and each transform of its image."""
    dataset, cut = seeded.dataset, seeded._cut
    steps: list[_Step] = [("data.dataset", dataset, lambda _: dataset[index])]
    if cut is not None:
        part: Callable[..., Any] = dataset.read_part  # type: ignore[attr-defined]
        steps = [("transform.sample_train.0", cut, lambda _: part(index, cut.region, cut.size))]
    transforms = enumerate(seeded._transforms, start=cut is not None)
    return [*steps, *((f"transform.sample_train.{place}", each, each) for place, each in transforms)]


def _first_to_differ(
    steps: Sequence[_Step], value: Any, seeds: tuple[int, int, int], pairs: bool = True
) -> Nondeterminism | None:
    """The first step that does not repeat; each gets what the one before gave, and of a sample its image."""
    for key, part, call in steps:

        def run(call: Callable[[Any], Any] = call, given: Any = value) -> Any:
            with preserved_rng():
                seed_generators(*seeds)
                return call(copy.deepcopy(given))

        first = run()
        if not all(_same(first, run()) for _ in range(_TRIES)):
            return Nondeterminism(key, type(part).__name__)
        value = first[0] if pairs and isinstance(first, tuple | list) else first
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two images, targets, or containers of them are equal; what cannot be compared counts as equal."""
    leaves = ([leaf if isinstance(leaf, Tensor) else np.asarray(leaf) for leaf in leaves_of(each)] for each in (a, b))
    try:
        torch.testing.assert_close(*leaves, rtol=0.0, atol=0.0, equal_nan=True)
    except AssertionError:
        return False
    except (TypeError, ValueError):
        return True
    return True


# Keys that change how numbers are rounded, so that a difference after the batch is not a fault.
_ROUNDING = (
    *("amp", "threads", "channels_last", "compile", "compiler", "tf32", "matmul_precision", "cudnn_benchmark"),
    *("optimizer.fused", "optimizer.foreach", "device", "deterministic"),
)
_NOT_RUN = ("evaluate", "callbacks", "metrics", "checkpoint")  # sections of a run that an audit does not run
_SEEDED = "draw from random, numpy.random and torch's global generator, which are seeded"
_REFUSED = "deterministic=true, which refuses non-deterministic operations"
_DREW = ("one side drew more often from a generator ({name})", "draw from the given generator, as often in each step")
_UPDATED = (
    "the gradients are the same, so what updates {name} is not deterministic: the optimizer's step, clipping, after_step of the "
    "task, or the module of a buffer",
    _REFUSED,
)
_BACKWARD = (
    "the outputs, the loss and the gradients before it are the same, so the backward of {last}, or a hook on {name},"
)
# By the first phase that differs: everything before it is the same, which leaves few possible causes.
_BY_PHASE: dict[str, tuple[str, str]] = {
    Phase.START: ("the model is built with other values: {owner} draws them from its own generator", _SEEDED),
    Phase.BATCH: (
        "a transform, the data set or data.batch_sampler keeps state, depends on the worker process, or files change",
        "keep no state, and do not use get_worker_info()",
    ),
    Phase.DRAWN: _DREW,
    Phase.ACTIVATION: (
        "{module} returns another output for the same input: it draws from its own generator, or is not deterministic",
        f"{_SEEDED}; or {_REFUSED}",
    ),
    Phase.LOSS: ("all outputs are the same, so the loss function is not deterministic", _REFUSED),
    Phase.FLOW: (f"{_BACKWARD} is not deterministic", _REFUSED),
    Phase.GRADIENT: (f"{_BACKWARD} is not deterministic", _REFUSED),
    Phase.WEIGHT: _UPDATED,
    Phase.OPTIMIZER: _UPDATED,
    Phase.GENERATOR: _DREW,
}


def cause_of(
    difference: Difference,
    before: Sequence[Entry],
    model: nn.Module,
    varied: Iterable[str],
    suspect: Nondeterminism | None,
) -> dict[str, str]:
    """The likely cause of the first difference as `text`, and what to do about it as `remedy`, empty for nothing.

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
        # Transforms of batches are given a generator, those of samples are not.
        of_batches = suspect.key.startswith(("transform.train.", "transform.mix"))
        remedy = "draw from the generator that is passed in" if of_batches else f"{_SEEDED} for each sample"
        problem = "returns another result each time it is called with the same sample"
        return {"text": f"{suspect.name} ({suspect.key}) {problem}", "remedy": remedy}
    # Settings that change results explain a difference without a fault
    rounding = [key for key in varied if within(key, _ROUNDING)]
    others = [key for key in varied if changes_result(key) and not within(key, (*_ROUNDING, *_NOT_RUN))]
    if others:
        return {"text": f"{' or '.join(others)} changes what is learned, so this is expected", "remedy": ""}
    if rounding and phase not in (Phase.BATCH, Phase.DRAWN, Phase.GENERATOR):
        return {"text": f"{' or '.join(rounding)} changes how numbers are rounded, so this is expected", "remedy": ""}
    if difference.a is None or difference.b is None:
        side = "a" if difference.b is None else "b"
        return {
            "text": f"only {side} computes it: the two sides do different work",
            "remedy": "settings that build the same model",
        }
    modules, owner = dict(model.named_modules()), name.rpartition(".")[0]
    # Backward passes the gradient of an output on to the module that computed it, so the last that got one is at fault.
    passed = [each.name for each in before if each.phase == Phase.FLOW and each.name in modules]
    leaves = [owner] if phase == Phase.GRADIENT else [each for each in passed if not [*modules[each].children()]]
    labels = {each: module_label(each, modules.get(each, model)) for each in (name, owner, *leaves)}
    last = labels[leaves[-1]] if leaves else "the loss"
    drew = name.startswith("generator ") and phase != Phase.START
    text, remedy = _DREW if drew else _BY_PHASE[phase]
    return {"text": text.format(name=name, module=labels[name], owner=labels[owner], last=last), "remedy": remedy}
