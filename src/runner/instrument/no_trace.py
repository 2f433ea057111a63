"""Run a model on the side and leave no trace of it: buffers, modes, gradients and random generators are put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def no_trace(model: nn.Module, *others: object) -> Iterator[None]:
    """Put back buffers, modes, gradients, `requires_grad` and all random generators.

    Gradients are None meanwhile, so `backward` in the block accumulates into fresh ones. Hooks are the business of
    `Observer`, which removes its own. Weights are not copied: the block must not step.

    Args:
        model: what runs.
        *others: further modules that run, such as a loss; objects of other kinds are ignored.
    """
    roots = [module for module in (model, *others) if isinstance(module, nn.Module)]
    modes = [(module, module.training) for root in roots for module in root.modules()]
    parameters = [(each, each.grad, each.requires_grad) for root in roots for each in root.parameters()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        with preserved_rng(), preserved_buffers(*roots):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient, trained in parameters:
            parameter.grad = gradient
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


@contextlib.contextmanager
def evaluating(model: nn.Module, *others: object, inference: bool = True) -> Iterator[None]:
    """Evaluation mode and inference mode, see `no_trace`; without `inference` only no gradients."""
    # Buffers are put back outside inference mode, whose tensors cannot be trained with.
    with no_trace(model, *others):
        for module in (each for each in (model, *others) if isinstance(each, nn.Module)):
            module.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            yield


class SavedBuffers:
    """The buffers of modules as they are now: their values, and which tensors they are.

    Some models assign new tensors to their buffers, or register buffers while they run. Copying the old values into the
    old tensors would not undo that.

    Args:
        *modules: modules; objects of other kinds are ignored.
    """

    def __init__(self, *modules: object) -> None:
        inner = dict.fromkeys(each for module in modules if isinstance(module, nn.Module) for each in module.modules())
        self._buffers = [(module, dict(module._buffers)) for module in inner]
        found = (buffer for _, buffers in self._buffers for buffer in buffers.values() if buffer is not None)
        self._writable = [buffer.detach() for buffer in found if _is_writable(buffer)]
        self._values = [buffer.clone() for buffer in self._writable]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            if self._writable:
                torch._foreach_copy_(self._writable, self._values)
        for module, buffers in self._buffers:
            if buffers or module._buffers:
                module._buffers.clear()
                module._buffers.update(buffers)


_KEPT = (Tensor, torch.Generator, dict, list, tuple, set, deque)


class SavedAttributes:
    """The attributes of an object as they are now, with what their tensors, generators, lists, sets and mappings contain.

    Other objects are kept as they are, such as modules, whose buffers `SavedBuffers` puts back.
    """

    def __init__(self, owner: object) -> None:
        self._own: dict[str, Any] = getattr(owner, "__dict__", {})
        self._contents, found = dict[int, tuple[str, Any, Any]](), [("", self._own)]
        while found:
            name, value = found.pop(0)
            if isinstance(value, _KEPT) and id(value) not in self._contents:
                self._contents[id(value)] = name, value, (kept := _contents(value))
                found += [(name or key, each) for key, each in kept.items()] if isinstance(kept, dict) else []

    def restore(self) -> list[str]:
        """Put them back; returns the names of those that had changed."""
        changed = dict[str, None]()
        for name, value, kept in self._contents.values():
            now = _contents(value)
            if isinstance(kept, dict):
                moved = [key for key in {**kept, **now} if not _same(now.get(key, ...), kept.get(key, ...))]
            else:
                moved = [] if torch.equal(now, kept) else [name]
            if not moved:
                continue
            changed |= dict.fromkeys([name] if name else moved)
            if isinstance(value, Tensor):
                value.detach().copy_(kept)
            elif isinstance(value, torch.Generator):
                value.set_state(kept)
            else:
                value.clear()
                add = value.extend if isinstance(value, list | deque) else value.update
                add(kept if isinstance(value, dict) else kept.values())
        return list(changed)


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def _same(now: Any, before: Any) -> bool:
    plain = isinstance(now, int | float | str | bytes) and type(now) is type(before)
    return now is before or bool(plain and now == before)


def _is_writable(buffer: Tensor) -> bool:
    """True if it can be changed in place: an expanded tensor, whose elements share memory, cannot."""
    if buffer.is_contiguous():
        return True
    pairs = zip(buffer.stride(), buffer.shape, strict=True) if buffer.layout is torch.strided else ()
    return all(stride for stride, size in pairs if size > 1)


def preserved_buffers(*modules: object) -> contextlib.AbstractContextManager[None]:
    """Put back the buffers of modules, see `SavedBuffers`."""
    return _restored(SavedBuffers(*modules))


class SavedRNG:
    """The global random generators of Python, NumPy and torch, on the CPU and on every device in use, as they are now.

    One of several processes that train together uses a single GPU, so only that one is asked.
    """

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        own = [torch.cuda.current_device()] if in_use and several else range(torch.cuda.device_count() * in_use)
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in own}
        self._apple = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        if self._apple is not None:
            torch.mps.set_rng_state(self._apple)


def preserved_rng() -> contextlib.AbstractContextManager[None]:
    """Put back the global random generators, see `SavedRNG`."""
    return _restored(SavedRNG())


@contextlib.contextmanager
def _restored(saved: SavedBuffers | SavedRNG) -> Iterator[None]:
    try:
        yield
    finally:
        saved.restore()


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """A context in which compiled models run as Python: compiled code calls no hooks inside and cannot be counted."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes a second
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager
