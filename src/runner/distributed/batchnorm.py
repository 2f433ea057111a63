"""BatchNorm whose statistics in training are those of the whole batch, of which each rank has some rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.errors import UserError
from runner.distributed.world import world

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class GlobalBatchNorm(nn.SyncBatchNorm):
    """BatchNorm over the rows of all ranks, with the weights and buffers of BatchNorm.

    torch's own layer needs a GPU, and counts the row that a rank without rows computes in their place. It is used where
    both do not matter. Outside of a step of several ranks, the layer is BatchNorm.

    The attribute `rows` is None, or in a step the number of rows of this rank and of all ranks.
    """

    rows: tuple[int, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalised (B, C, ...), of the type of the input.

        Raises:
            ValueError: the whole batch has a single value per channel.
        """
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self.rows is None or not by_batch:
            return _BatchNorm.forward(self, input)
        if input.is_cuda and self.rows[1] >= world().size:
            return super().forward(input)
        return self._over_all(input, *self.rows)

    @torch.compiler.disable
    def _over_all(self, input: Tensor, own: int, samples: int) -> Tensor:
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others, shape = [0, *range(2, input.ndim)], (1, -1, *(1,) * (input.ndim - 2))
        count = samples * (input.numel() // (input.shape[1] * max(1, own)))
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count} on all ranks together")
        kept = slice(None if own else 0)
        mean = all_reduce(wide[kept].sum(others)) / count
        centred = wide - mean.view(shape)
        variance = all_reduce(centred[kept].square().sum(others)) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None, "statistics are tracked"
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
    for name, norm in norms.items():
        if type(norm) not in _KNOWN:
            problem = f"cannot be used with the layer '{name}', as {type(norm).__name__} is not torch's BatchNorm"
            raise UserError("sync_batchnorm", problem, "false, or a model with torch's own layers")
    for norm in norms.values():
        norm.__class__, norm.process_group = GlobalBatchNorm, None  # type: ignore[assignment]
    return len(norms)


def set_rows(norms: Iterable[GlobalBatchNorm], rows: tuple[int, int] | None) -> None:
    """Tell layers which rows of the next batch count, see `GlobalBatchNorm`."""
    for norm in norms:
        norm.rows = rows
