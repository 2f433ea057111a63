"""Activation checkpointing: what a block computes inside is dropped after the forward pass and computed again in backward.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), by `torch.utils.checkpoint` in its
non-reentrant form. Results stay the same bit for bit: dropout repeats its draws, and buffers such as the statistics of
BatchNorm change once, in the forward pass. `runner.runtime.blocks` decides which blocks.

`apply_activation_checkpointing` of `torch.distributed.algorithms._checkpoint` is not used: it is private, renames the entries of
the state dict, and computing again updates buffers a second time.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.base.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
Buffers = Mapping[str, Tensor | None]
Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

_PLAIN = "_forward_without_checkpointing"
_NAME = "_name_for_checkpointing"


_switched_on = False  # one answer for the process, set by each run


def switch(on: bool) -> None:
    """Turn the functions marked with `checkpointed` on or off, for a run and whatever it trains."""
    global _switched_on
    _switched_on = on


def is_switched_on() -> bool:
    """True if the functions marked with `checkpointed` are."""
    return _switched_on


def checkpointed(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function or method of a model to be computed again in backward, while `activation_checkpointing` is on.

        class Net(nn.Module):
            @checkpointed
            def branch(self, features): ...

    Buffers of modules among its arguments, of `self` above all, are left alone by the second computation. What the
    function takes from elsewhere must not change in between.
    """

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        # Without gradients nothing is kept for backward, so nothing could be saved
        if not _switched_on or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        return _twice(function, args, kwargs, modules, function.__qualname__)  # type: ignore[no-any-return]

    return either


def wrap(module: nn.Module, name: str) -> None:
    """Have a module computed again in backward. It keeps its place, and its state dict its names.

    Args:
        module: a module whose forward depends on nothing but its arguments, weights and buffers.
        name: its dotted name, for messages.
    """
    if not is_wrapped(module):
        # As methods these follow the module when it is copied: a copy computes with its own weights.
        plain = module.__dict__.get("forward") or types.MethodType(type(module).forward, module)
        module.__dict__ |= {_PLAIN: plain, _NAME: name, "forward": types.MethodType(_forward, module)}


def unwrap(module: nn.Module) -> None:
    """Undo `wrap`."""
    if is_wrapped(module):
        plain = module.__dict__.pop(_PLAIN)
        del module.__dict__[_NAME], module.__dict__["forward"]
        if getattr(plain, "__func__", None) is not type(module).forward:
            module.__dict__["forward"] = plain


def is_wrapped(module: nn.Module) -> bool:
    """True if `wrap` was called."""
    return _PLAIN in module.__dict__


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a wrapped module."""
    plain = getattr(self, _PLAIN)
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    return _twice(plain, args, kwargs, [self], getattr(self, _NAME))


def _twice(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], modules: list[nn.Module], name: str
) -> Any:
    """Call a function whose insides autograd drops and computes again in backward.

    Raises:
        UserError: if it changes an argument in place, after which it cannot be computed again.
    """
    if torch.compiler.is_compiling():
        # The compiler writes buffers back once, however often it computes; a context of ours would stop it.
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    # An input that is changed in place would be another one when it is computed again
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not value.is_inference()]
    versions = [value._version for value in given]
    contexts = _contexts(modules, given)
    result = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if [value._version for value in given] != versions:
        raise UserError(
            "activation_checkpointing",
            f"'{name}' changes its input in place, so it cannot be computed again",
            "inplace=false in its first layer, or patterns of other modules",
        )
    return result


def _contexts(modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> Callable[[], Contexts]:
    """Makes the contexts of the two computations: the second one sees the buffers of the first, and changes only copies.

    Random draws are repeated by torch itself, but for those of Apple's GPU.
    """
    # torch's checkpoint keeps the generators of CPU and CUDA, but not those of MPS
    mps = torch.mps.get_rng_state() if any(tensor.device.type == "mps" for tensor in inputs) else None
    inner = [module for root in modules for module in root.modules() if module._buffers]
    # Running statistics change nothing about the output of torch's own norms while they are updated, so these need not be
    # remembered from the forward pass on, which saves a copy of each in every step.
    seen = [(module, module._buffers if _is_norm(module) else _copies(module._buffers)) for module in inner]

    @contextlib.contextmanager
    def computing_again() -> Iterator[None]:
        # Updates of the second computation are thrown away, so that BatchNorm counts a batch once
        kept = [(module, dict(module._buffers)) for module, _ in seen]
        for module, buffers in seen:
            module._buffers.update(_copies(buffers))
        before = None if mps is None else torch.mps.get_rng_state()
        if mps is not None:
            torch.mps.set_rng_state(mps)
        try:
            yield
        finally:
            if before is not None:
                torch.mps.set_rng_state(before)
            for module, buffers in kept:
                module._buffers.update(buffers)

    return lambda: (contextlib.nullcontext(), computing_again())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and type(module).__module__.startswith("torch.nn.")


def _copies(buffers: Buffers) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}
