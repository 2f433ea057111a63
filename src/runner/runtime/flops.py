"""How many floating-point operations a training sample costs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one batch; a multiplication and an addition count as two.

    Only matrix products, convolutions and attention are counted, as everywhere: they are nearly all of the work, and
    what a device's peak refers to. Operations that torch has no formula for count as none.

    Attributes:
        samples: samples of the batch.
        forward: of model and loss.
        backward: of the gradients, not counting `recomputed`.
        recomputed: of forward passes that activation checkpointing makes again in backward. They bring training no
            further, so utilisation leaves them out.
        by_module: forward, by dotted name of the module, its children included; the empty name is the model itself.
    """

    samples: int
    forward: int
    backward: int
    recomputed: int
    by_module: dict[str, int]

    @property
    def of_sample(self) -> float:
        """Operations that training on one sample needs, forward and backward."""
        return (self.forward + self.backward) / self.samples


def count_flops(
    model: nn.Module,
    images: Tensor,
    loss: Callable[[Tensor], Tensor],
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Flops:
    """Count the operations of a forward and a backward pass, with `torch.utils.flop_counter`.

    Both are carried out, uncompiled, in the modes that the modules are in. Weights, gradients, buffers and random
    generators are left as they were.

    Args:
        model: the model; of DistributedDataParallel, the module inside it.
        images: (B, C, H, W), as the model is given them.
        loss: logits -> scalar.
        autocast: gives the context that forward and loss run in.
    """
    from torch.utils.flop_counter import FlopCounterMode  # a tenth of a second that most runs need not spend

    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    again = _Recomputed()
    with as_it_was(model, images.device), _uncompiled(model), torch.enable_grad():
        with FlopCounterMode(display=False) as forward, autocast():
            value = loss(model(images))
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with FlopCounterMode(display=False) as backward, again.watching(model, backward):
            if trainable and value.requires_grad:
                torch.autograd.grad(value, trainable, allow_unused=True)
    root = type(model).__name__
    by_module = {
        name[len(root) + 1 :]: sum(counts.values())
        for name, counts in forward.get_flop_counts().items()
        if name == root or name.startswith(root + ".")
    }
    return Flops(
        samples=len(images),
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops() - again.flops,
        recomputed=again.flops,
        by_module=by_module,
    )


class _Recomputed:
    """Sums what modules run forward while gradients are computed."""

    def __init__(self) -> None:
        self.flops = 0
        self._depth = 0
        self._before = 0

    @contextlib.contextmanager
    def watching(self, model: nn.Module, counter: Any) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._depth == 0:
                self._before = counter.get_total_flops()
            self._depth += 1

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                self.flops += counter.get_total_flops() - self._before

        hooks = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            # Recomputing stops by an exception as soon as it has all it needs.
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, modes and random generators afterwards; gradients are up to the caller."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    # By name, as some models assign new tensors to their buffers; the old ones may have been written to as well.
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if _is_written_to(buffer)]
    python, numpy = random.getstate(), np.random.get_state()
    apple = torch.mps.get_rng_state() if device.type == "mps" else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
            for module, own in buffers:
                module._buffers.clear()
                module._buffers.update(own)
            for module, mode in modes:
                module.training = mode
            random.setstate(python)
            np.random.set_state(numpy)
            if apple is not None:
                torch.mps.set_rng_state(apple)


def _is_written_to(buffer: Tensor) -> bool:
    """Whether it can be changed in place: an expanded tensor, whose elements share memory, cannot."""
    pairs = zip(buffer.stride(), buffer.shape, strict=True) if buffer.layout is torch.strided else ()
    return all(stride for stride, size in pairs if size > 1)


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """A context without compiled code, whose operations cannot be counted."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager
