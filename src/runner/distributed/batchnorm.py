"""BatchNorm whose statistics in training are those of the whole batch, of which each rank has some rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.base.errors import UserError
from runner.distributed.world import world

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Total(torch.autograd.Function):
    """The sum of a tensor over all ranks. A rank's loss depends on the tensors of all, so its gradients are summed too.

    torch.distributed.nn.functional.all_reduce does the same, but its import makes a folder for temporary files.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return world().total(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return world().total(gradients[0])


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm over the rows of all ranks, with the weights and buffers of BatchNorm.

    Outside of a step of several ranks, it is BatchNorm. On GPUs it computes as torch's SyncBatchNorm, except where a rank has no
    rows: torch counts the row that such a rank computes instead.

    The attribute `rows` is None, or in a step the number of rows of this rank and of all ranks.
    """

    rows: tuple[int, int] | None = None
    # SyncBatchNorm.forward reads these. This is not a subclass of it, as DDP refuses those on CPUs
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        """Normalised (B, C, ...), of the type of the input.

        Raises:
            ValueError: the whole batch has a single value per channel.
        """
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self.rows is None or not by_batch:
            return _BatchNorm.forward(self, input)
        own, samples = self.rows
        if input.is_cuda and self.training and samples >= world().size:
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        # Sums of squares overflow or lose digits in 16 bits
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others, shape = [0, *range(2, input.ndim)], (1, -1, *(1,) * (input.ndim - 2))
        count = samples * (input.numel() // (input.shape[1] * max(1, own)))
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count} on all ranks together")
        # A rank without rows computes on a row of another, which must not count
        kept = slice(None if own else 0)
        # Two exchanges, mean before variance, as the sum of squares minus the squared mean loses digits
        mean = _Total.apply(wide[kept].sum(others)) / count
        centred = wide - mean.view(shape)
        variance = _Total.apply(centred[kept].square().sum(others)) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        made: Tensor = normalised.to(input.dtype)
        return made

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None, "statistics are tracked"
        assert self.running_var is not None, "statistics are tracked"
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if share is None else share
        for running, found in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - (share or 0.0)).add_(found, alpha=share or 0.0)


def synchronize(model: nn.Module) -> int:
    """Make every BatchNorm of a model a `GlobalBatchNorm`, in place; returns how many there are.

    Raises:
        UserError: if a layer computes more than torch's BatchNorm.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    # A custom norm may compute something else, so that changing its class would change the model
    for name, norm in norms.items():
        if type(norm) not in _KNOWN:
            problem = f"cannot be used with the layer '{name}', as {type(norm).__name__} is not torch's BatchNorm"
            raise UserError("sync_batchnorm", problem, "false, or a model with torch's own layers")
    # The class is changed in place: hooks, parameters and references to the layer stay valid
    for norm in norms.values():
        norm.__class__ = GlobalBatchNorm
        vars(norm)["process_group"] = None  # SyncBatchNorm reads it: all ranks
    return len(norms)


def set_rows(norms: Iterable[GlobalBatchNorm], rows: tuple[int, int] | None) -> None:
    """Tell layers which rows of the next batch count, see `GlobalBatchNorm`."""
    for norm in norms:
        norm.rows = rows
