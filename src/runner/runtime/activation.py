"""Activation checkpointing: what a block computes inside is dropped after the forward pass and computed again in backward.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), by `torch.utils.checkpoint` in its
non-reentrant form. Results stay the same bit for bit: dropout repeats its draws, and buffers such as the statistics of
BatchNorm change once, in the forward pass.

torch's `checkpoint_wrapper` is not used: it is private, renames modules, and the second computation updates buffers again.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointError, checkpoint

from runner.base.errors import UserError, first_line
from runner.instrument.nested import tensors_in
from runner.instrument.no_trace import no_trace
from runner.runtime.blocks import named_blocks, repeated_blocks

P = ParamSpec("P")
R = TypeVar("R")
Autocast = Callable[[], contextlib.AbstractContextManager[object]]
Send = Callable[[int], Any]
Row = tuple[str, str, str]  # label, value and reason for people
Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

_KEY = "activation_checkpointing"
_PLAIN = "_forward_without_checkpointing"
_NAME = "_name_for_checkpointing"

_switched_on = False  # one answer for the process, set by each run
_marked_functions_ran = False  # since `switch`


def switch(on: bool) -> None:
    """Turn the functions marked with `checkpointed` on or off, for a run and whatever it trains."""
    global _switched_on, _marked_functions_ran
    _switched_on, _marked_functions_ran = on, False


def checkpoint_activations(
    model: nn.Module, setting: bool | str | list[str], send: Send, autocast: Autocast, warnings: list[str]
) -> list[Row]:
    """Recompute blocks of a model in backward, as `activation_checkpointing` says, and try it on two copies of a sample.

    Weights, buffers, modes and random generators stay as they are.

    Args:
        model: the model, on its device, not yet compiled.
        setting: false; true for every block; or patterns of module names.
        send: sends so many copies of a sample through the model; what it returns holds the graph.
        autocast: gives the context that forward passes run in.
        warnings: gets a sentence if the setting has no effect.

    Returns:
        A row for people that says what was done; none for false.

    Raises:
        UserError: if a pattern matches nothing, or what it matches cannot be computed again.
    """
    switch(setting is not False)  # a run before this one in the same process may have left it on
    if setting is False:
        return []
    if setting is True:
        blocks = repeated_blocks(model)
    else:
        blocks = named_blocks(model, [setting] if isinstance(setting, str) else setting, _KEY, "true")
    for name, module in blocks:
        # It keeps its place, and its state dict its names. As methods these follow it when it is copied: a copy computes with
        # its own weights.
        module.__dict__ |= {_PLAIN: module.forward, _NAME: name, "forward": types.MethodType(_forward, module)}
    _try_backward(model, send, autocast)

    shown = str(setting).lower() if isinstance(setting, bool) else str(setting)
    what = "recomputed in marked functions"
    if blocks:
        counts = Counter(type(module).__name__ for _, module in blocks)
        kinds = ", ".join(counts if len(counts) == 1 else (f"{count} {kind}" for kind, count in counts.items()))
        what = f"recomputed in {len(blocks)} block{'s' * (len(blocks) != 1)}, {kinds}"
    elif not _marked_functions_ran:
        what = "nothing recomputed"
        advice = "patterns name modules, and runner.runtime.activation.checkpointed marks functions"
        warnings.append(f"{_KEY}={shown} has no effect: {type(model).__name__} has no repeated blocks; {advice}")
    return [("activations", what, f"{_KEY}={shown}")]


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
        global _marked_functions_ran
        # Without gradients nothing is kept for backward, so nothing could be saved
        if not _switched_on or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            _marked_functions_ran = True
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        return _twice(function, args, kwargs, modules, function.__qualname__)  # type: ignore[no-any-return]

    return either


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module that is computed again."""
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
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not value.is_inference()]
    versions = [value._version for value in inputs]
    contexts = _contexts(modules, inputs)
    result = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if [value._version for value in inputs] != versions:
        raise UserError(
            _KEY,
            f"'{name}' changes its input in place, so it cannot be computed again",
            "inplace=false in its first layer, or patterns of other modules",
        )
    return result


def _contexts(modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> Callable[[], Contexts]:
    """Makes the contexts of the two computations: the second one sees the buffers of the first, and changes only copies.

    Random draws are repeated by torch itself, but for those of Apple's GPU.
    """
    mps = torch.mps.get_rng_state() if any(tensor.device.type == "mps" for tensor in inputs) else None
    inner = [module for root in modules for module in root.modules() if module._buffers]
    # Running statistics change nothing about the output of torch's own norms while they are updated, so these need not be
    # remembered from the forward pass on, which saves a copy of each in every step.
    norms = {each for each in inner if isinstance(each, _NormBase) and type(each).__module__.startswith("torch.nn.")}
    seen = [(module, module._buffers if module in norms else _copies(module._buffers)) for module in inner]

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


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _try_backward(model: nn.Module, send: Send, autocast: Autocast) -> None:
    """Run forward and backward once, so that a block that cannot be computed again is found before the first step."""
    # Only what is trained has to be reached: backward computes the checkpointed blocks again
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with no_trace(model), torch.enable_grad():
        model.train()
        with autocast():
            outputs = send(2)
        total = sum(tensor.float().sum() for tensor in tensors_in(outputs) if tensor.requires_grad)
        if not isinstance(total, Tensor):
            return
        try:
            torch.autograd.grad(total, trained, allow_unused=True)
        except (CheckpointError, RuntimeError) as error:
            raise UserError(
                _KEY,
                f"what is checkpointed cannot be computed again: {first_line(error)}",
                "patterns that match only functions of their input, or false",
            ) from error
