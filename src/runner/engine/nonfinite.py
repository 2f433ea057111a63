"""Steps whose gradients are not finite are skipped on the device, before any weight changes; the host learns of it later."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from runner.distributed.sharding import is_divided, local
from runner.distributed.world import world
from runner.engine.state import Optimizers

Policy = Literal["raise", "skip"]


class NonFiniteGuard:
    """Keeps an optimizer from taking a step with gradients that are not finite.

    A flag on the device is up if a step must not be taken. Fused kernels obey it, so nothing waits. For any other optimizer the
    host reads it at every step.

    Under `raise` the flag stays up once it is up: the weights remain those before the first such step until somebody looks.
    Under `skip` it falls again, and buffers such as BatchNorm's statistics go back to what they were before the step. Where the
    loss is scaled, its scaler skips steps whose gradients overflow, which belongs to scaling; the guard then watches the loss.

    A flag on one rank is a flag on all: where they have parts of the gradients, and where each watches its own loss.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, scaled: bool) -> None:
        self.policy, self.scaled = policy, scaled
        self._optimizers = [*optimizer.named.values()] if isinstance(optimizer, Optimizers) else [optimizer]
        self._by_kernel = not scaled and all(map(_obeys_flag, self._optimizers))
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._parameters = list(kinds.values())  # a kernel takes gradients of one kind
        self._has_kernel = all(_has_kernel(*kind) for kind in kinds)
        self._divided = any(is_divided(parameter) for kind in self._parameters for parameter in kind)
        self._found = torch.zeros((), device=self._parameters[0][0].device)  # the flag, above 0 if it is up
        self._one, self._count = torch.ones_like(self._found), torch.zeros_like(self._found)
        self._flags: list[Tensor] = []  # on the device, one of each step, where it falls again
        self.steps = 0  # since `found` was asked
        # By name, as some models assign new tensors to their buffers
        modules = model.modules() if policy == "skip" else ()
        self._buffers = [(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._now()]

    @property
    def waits(self) -> bool:
        """True if every step waits for the device."""
        if self.scaled:  # torch's GradScaler asks, unless the optimizer's kernel does
            return not all(getattr(each, "_step_supports_amp_scaling", False) for each in self._optimizers)
        return not self._by_kernel

    @property
    def skipped(self) -> Tensor | None:
        """A flag on the device, above 0 if the current step is skipped and training goes on; None where none ever is."""
        return self._found if self.policy == "skip" else None

    def start(self) -> None:
        """Forget what was found, and keep the buffers as they are."""
        self._found.zero_()
        self._count.zero_()
        self.steps, self._flags = 0, []
        for kept, buffer in zip(self._kept, self._now(), strict=True):
            kept.copy_(buffer)

    def watch_loss(self, loss: Tensor) -> None:
        """Note whether a scaled loss is finite; several losses may make up a step."""
        if self.scaled:
            self._raise_flag(loss.detach().isfinite())

    def allows_step(self) -> bool:
        """True if the optimizer is to be called."""
        # GradScaler looks at the gradients itself, so only what the ranks found has to be joined
        if self.scaled:
            world().highest(self._found)  # gradients are averaged by now, and losses are those of each rank's rows
            return True
        self._look()
        if not self._by_kernel:
            return not bool(self._found)
        for each in self._optimizers:
            each.found_inf = self._found  # type: ignore[attr-defined]
        return True

    def stepped(self) -> None:
        """Note the outcome of a step."""
        if self.policy == "raise":
            self._count.add_(self._found)
        else:
            # A skipped step must leave no trace: BatchNorm has already seen its batch
            self._flags.append(self._found.clone())
            for kept, buffer in zip(self._kept, self._now(), strict=True):
                buffer.copy_(torch.where(self._found > 0, kept, buffer))
                kept.copy_(buffer)
            self._found.zero_()
        self.steps += 1

    def found(self) -> list[int]:
        """The steps since the last call that were not finite, counted from 0; of `raise` the first one. Waits for the device."""
        if self.policy == "raise":
            bad = int(self._count)  # all steps since the first one
            found = [self.steps - bad] if bad else []
        else:
            # One reading for all of them: `nonzero` would be a second one
            flags = torch.stack(self._flags).tolist() if self._flags else []
            found = [index for index, flag in enumerate(flags) if flag]
        self.steps, self._flags = 0, []
        return found

    def _now(self) -> list[Tensor]:
        """The buffers as they are."""
        return [getattr(module, name) for module, name in self._buffers]

    def _raise_flag(self, finite: Tensor) -> None:
        self._found.copy_(torch.where(finite, self._found, self._one))

    def _look(self) -> None:
        """Raise the flag if a gradient is not finite."""
        for parameters in self._parameters:
            gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            gradients = [grad if grad.layout is torch.strided else grad.coalesce().values() for grad in gradients]
            # GradScaler's kernel checks all gradients in one call; a device without it checks them one by one
            if gradients and self._has_kernel:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
            elif gradients:
                self._raise_flag(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
        # A rank sees only its part of each gradient, and all ranks have to skip together
        if self._divided:
            world().highest(self._found)


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if GradScaler's kernel works there: it multiplies by 1, which changes no bit, and checks many at once."""
    try:
        trial, gradient = torch.zeros((), device=device), torch.ones((), device=device, dtype=dtype)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], trial, torch.ones_like(trial))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True


def _obeys_flag(optimizer: torch.optim.Optimizer) -> bool:
    """True if every update is made by a kernel that does nothing when `found_inf` says so, or by a class that sees to it."""
    # On the CPU nothing has to be waited for, and a class would copy weights for nothing
    if getattr(optimizer, "obeys_flag", False):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return not any(weight.device.type == "cpu" or is_divided(weight) for weight in weights)
    known = type(optimizer).__module__.startswith("torch.optim") and "step" not in vars(optimizer)
    return known and all(group.get("fused") for group in optimizer.param_groups)
