"""The optimizer over the parameters of a model."""

from __future__ import annotations

import torch
from torch import nn

from runner.config.errors import UserError
from runner.config.schema.sections import OptimizerExtras
from runner.config.schema.train import Train
from runner.config.targets import build, extras_of
from runner.optim.kernels import KINDS, Kernels, choose_kernels, start_momentum


def build_optimizer(config: Train, model: nn.Module) -> tuple[torch.optim.Optimizer, Kernels]:
    """Build the optimizer over the trainable parameters; each group remembers its `initial_lr` for the schedule.

    Args:
        config: the config.
        model: what is trained.

    Raises:
        UserError: if there is nothing to train, or the optimizer refuses its arguments.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("model: has no trainable parameter\n    allowed: a model with weights that require gradients")
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    kernels = choose_kernels(config.optimizer, parameters, sparse)
    extras: OptimizerExtras = extras_of("optimizer", config.optimizer)
    facts = dict.fromkeys(config.optimizer.keys() & set(KINDS)) | kernels.arguments
    try:
        optimizer: torch.optim.Optimizer = build("optimizer", config.optimizer, parameters, facts=facts)
    except RuntimeError as error:  # how torch refuses arguments that do not go together
        raise UserError(f"optimizer: {config.optimizer['_target_']} refuses its arguments: {error}") from error
    if extras.scale_lr is not None:
        scale_rates(optimizer, config.data.batch_size * config.accumulate / extras.scale_lr)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    start_momentum(optimizer)
    return optimizer, kernels


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, as in Goyal et al., 2017 (the linear scaling rule)."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
