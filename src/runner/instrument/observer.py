"""Functions that are called around the modules of a model, and with gradients: the only forward hooks of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from runner.instrument.nested import tensors_in

Before = Callable[[str, nn.Module, list[Any]], object]
"""Takes a module's dotted name, the module, and its inputs: positional ones, then the values of keyword arguments."""
After = Callable[[str, nn.Module, list[Any], Any], object]
"""Takes the same and the output."""


class Observer:
    """Calls functions around the modules of a model until `remove` or the end of the `with` block.

    What the functions return is ignored, so they cannot change what the model computes. What they raise ends the forward
    pass. Compiled code does not call them, see `no_trace.uncompiled`; a module that activation checkpointing computes
    again in backward calls them again.

    Args:
        model: its modules are observed, a module under several names once; the model itself has the name "".
        before: called before a module runs.
        after: called when it has run.
        names: dotted names of the modules to observe; None for all.
        always: call `after` even if the module raised, with None for the output, and `before` ahead of all other hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Before | None = None,
        after: After | None = None,
        names: Iterable[str] | None = None,
        always: bool = False,
    ) -> None:
        self._handles: list[Any] = []
        for name in dict(model.named_modules()) if names is None else dict.fromkeys(names):
            module = model.get_submodule(name)
            if before is not None:
                hook = _hook(name, before)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=always, with_kwargs=True))
            if after is not None:
                hook = _hook(name, after)
                self._handles.append(module.register_forward_hook(hook, always_call=always, with_kwargs=True))

    def remove(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _hook(name: str, call: Callable[..., object]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        call(name, module, [*args, *kwargs.values()], *output)

    return hook


def observe_gradients(value: Any, call: Callable[[Tensor], object]) -> None:
    """Call a function with the gradient of each tensor in nested containers, when backward has computed it."""

    def hook(gradient: Tensor) -> None:
        call(gradient)

    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def module_label(name: str, module: nn.Module, root: str = "") -> str:
    """A module for people: `layers.2 (Dropout)`; of the model itself, `root` or its class alone."""
    kind = type(module).__name__
    return f"{name or root} ({kind})" if name or root else kind
