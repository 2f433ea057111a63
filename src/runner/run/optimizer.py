"""What training changes: the optimizer over the parameters of a model, the schedule of its learning rate, the averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError
from runner.config.schema.sections import OptimizerExtras
from runner.config.schema.train import Train
from runner.config.targets import build, extras_of, names_argument
from runner.engine.freezing import Freezing
from runner.engine.position import Position
from runner.engine.protocols import Schedule
from runner.engine.state import RunningMean, TrainState
from runner.optim.groups import parameter_groups
from runner.optim.kernels import KINDS, Kernels, choose_kernels, start_momentum
from runner.optim.schedules import Annealed, Clock
from runner.run.hardware import Hardware
from runner.run.length import RunLength
from runner.run.metrics import Monitor
from runner.run.weight_average import build_averaged, swa_start
from runner.runtime.blocks import repeated_blocks


def build_state(
    config: Train,
    model: nn.Module,
    loss: nn.Module,
    freezing: Freezing,
    *,
    hardware: Hardware,
    length: RunLength,
    monitor: Monitor,
) -> tuple[TrainState, Kernels]:
    """Everything that training changes, around a model whose weights are where they will be trained.

    Raises:
        UserError: see `build_optimizer`.
    """
    # A loss with tensors is trained and saved like the model
    optimizer, kernels = build_optimizer(config, model, loss)
    dtype, policy = hardware.precision.weights, config.on_nonfinite
    state = TrainState(
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(config, length, monitor),
        scaler=hardware.precision.scaler,
        meter=RunningMean(hardware.device, finite_only=policy == "skip", dtype=dtype),
        position=Position(turns=[list(turn) for turn in length.timeline.turns]),
        averaged=build_averaged(config, model, loss, optimizer, length),
        loss=loss,
    )
    state.freezing = freezing
    return state, kernels


def build_optimizer(
    config: Train, model: nn.Module, loss: nn.Module | None = None
) -> tuple[torch.optim.Optimizer, Kernels]:
    """Build the optimizer over the trainable parameters; each group remembers its `initial_lr` for the schedule.

    Raises:
        UserError: if there is nothing to train, or the optimizer refuses its arguments.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("model", "has no trainable parameter", "a model with weights that require gradients")
    # A loss with weights of its own, such as class centres, is trained as well
    if loss is not None:  # first, as Muon takes the last matrix as the head
        parameters[:0] = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    # Fused kernels refuse sparse gradients
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    kernels = choose_kernels(config.optimizer, parameters, sparse)
    extras: OptimizerExtras = extras_of("optimizer", config.optimizer)
    facts = dict.fromkeys(config.optimizer.keys() & set(KINDS)) | kernels.arguments
    groups = divide(config, extras, model, loss)
    try:
        # Facts are arguments that the optimizer takes only if it names them
        optimizer = build("optimizer", config.optimizer, groups or parameters, facts=facts)
    except RuntimeError as error:  # how torch refuses arguments that do not go together
        raise UserError("optimizer", f"{config.optimizer['_target_']} refuses its arguments: {error}") from error
    # Any class may be named in the config, so what it built is checked
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"{config.optimizer['_target_']} gives a {type(optimizer).__name__}"
        raise UserError("optimizer._target_", problem, "a torch.optim.Optimizer")
    # Without lr_mult in its groups, the loop below would give every group the same rate
    if groups and not all("lr_mult" in group for group in optimizer.param_groups):
        problem = (
            f"{config.optimizer['_target_']} drops keys of its parameter groups, so no group can have its own rate"
        )
        allowed = "null for optimizer.no_decay, optimizer.lr_mult and optimizer.layer_decay, or another optimizer"
        raise UserError("optimizer", problem, allowed)
    # Rates are scaled here once, and the schedule multiplies the result
    scale, base = 1.0, extras.lr_base_batch_size
    if base is not None:  # the linear scaling rule of Goyal et al., 2017
        scale = config.data.samples_a_batch * config.accumulate / base
    for group in optimizer.param_groups:
        group["lr"] *= scale * group.get("lr_mult", 1.0)
        group["initial_lr"] = group["lr"]
    start_momentum(optimizer)
    return optimizer, kernels


def build_schedule(config: Train, length: RunLength, monitor: Monitor) -> Schedule:
    """Build the schedule; one with a clock keeps its place if a resumed run has more or fewer steps per epoch.

    Where SWA begins, it goes over to SWA's rate.

    Raises:
        UserError: if it refuses its arguments, or is not a schedule.
    """
    node, clock, timeline, total_steps = config.scheduler, Clock(), length.timeline, length.total_steps
    # The clock counts scaled epochs, so that a schedule keeps its place if an epoch has another length now
    if timeline.turns and names_argument(node, "clock"):
        follows = length.limits.epochs_decide(timeline) and node.get("total_steps") is None
        run = timeline.scaled if follows else clock.run
        clock = Clock(run, timeline.scaled if node.get("steps_per_epoch") is None else clock.epochs)
        total_steps = round(clock.run(total_steps))
    facts = {"total_steps": total_steps, "steps_per_epoch": timeline.steps, "mode": monitor.mode, "clock": clock}
    schedule: Schedule = build("scheduler", node, facts=facts | {"lr": float(config.optimizer.get("lr") or 1.0)})
    # A class of the user may lack a method that is called only at the end of the first epoch
    wanted = [name for name in vars(Schedule) if not name.startswith("_")]
    if missing := [name for name in wanted if not callable(getattr(schedule, name, None))]:
        problem = f"{node['_target_']} gives a {type(schedule).__name__} without {', '.join(missing)}"
        allowed = f"a subclass of runner.optim.schedules.Schedule with shape(step), or a class with {', '.join(wanted)}"
        raise UserError("scheduler._target_", problem, allowed)
    if config.swa is None or config.averaging.lr_factor is None:
        return schedule
    start, steps = swa_start(config.swa, length), config.averaging.anneal_epochs * timeline.steps
    return Annealed(schedule, start, steps, config.averaging.lr_factor, timeline.scaled)


def divide(config: Train, extras: OptimizerExtras, model: nn.Module, loss: nn.Module | None) -> list[dict[str, Any]]:
    """The parameter groups that the keys of `optimizer` ask for; none if all parameters are treated alike."""
    if not extras.no_decay and not extras.lr_mult and extras.layer_decay is None:
        return []
    if extras.no_decay and not names_argument(config.optimizer, "weight_decay"):
        problem = f"{config.optimizer['_target_']} has no weight_decay to exempt weights from"
        raise UserError("optimizer.no_decay", problem, "null, or an optimizer with the argument weight_decay")
    blocks = [name for name, _ in repeated_blocks(model)] if extras.layer_decay is not None else []
    return parameter_groups(
        model, extras.no_decay, extras.lr_mult, layer_decay=extras.layer_decay, blocks=blocks, loss=loss
    )


def table_of_groups(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """A row for each parameter group: name, tensors, parameters, peak learning rate, weight decay; none if there are no names."""
    return [
        [
            f"{group['name']}" + (f" ({group['algorithm']})" if "algorithm" in group else ""),
            f"{len(group['params']):,}",
            f"{sum(parameter.numel() for parameter in group['params']):,}",
            f"{group['initial_lr']:.4g}",
            f"{group['weight_decay']:g}" if "weight_decay" in group else "-",
        ]
        for group in optimizer.param_groups
        if "name" in group
    ]
