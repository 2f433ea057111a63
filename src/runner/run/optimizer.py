"""What training changes: the optimizer over the parameters of a model, the schedule of its learning rate, the averages."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError
from runner.config.schema.sections import OptimizerExtras, components_of
from runner.config.schema.train import Train
from runner.config.targets import build, extras_of, names_argument
from runner.engine.freezing import Freezing
from runner.engine.plan import Position
from runner.engine.protocols import Schedule
from runner.engine.state import Optimizers, RunningMean, Schedules, TrainState
from runner.engine.weight_average import AveragedModel
from runner.optim.groups import parameter_groups
from runner.optim.kernels import KINDS, Kernels, choose_kernels, start_momentum
from runner.optim.schedules import Annealed, Clock
from runner.run.interfaces import calls_of, require_methods
from runner.run.metrics import Monitor
from runner.run.model import modules_of, optimizers_of
from runner.run.run import Hardware, RunLength
from runner.runtime.blocks import repeated_blocks
from runner.tasks.task import Task


def build_state(
    config: Train,
    task: Task,
    model: nn.Module,
    loss: nn.Module,
    freezing: Freezing,
    *,
    hardware: Hardware,
    length: RunLength,
    monitor: Monitor,
) -> tuple[TrainState, Kernels]:
    """Everything that training changes, around a model whose weights are where they will be trained.

    For errors see `build_optimizer`.
    """
    # A loss with tensors is trained and saved like the model
    optimizer, kernels = build_optimizer(config, model, loss, _owned(config, task, model, loss))
    state = TrainState(
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(config, length, monitor),
        scaler=hardware.precision.scaler,
        meter=RunningMean(hardware.device, config.on_nonfinite == "skip", hardware.precision.weights),
        position=Position(turns=[list(turn) for turn in length.timeline.turns]),
        averaged=build_averaged(config, model, loss, optimizer, length),
        loss=loss,
        task=task,
    )
    state.freezing = freezing
    return state, kernels


def build_averaged(
    config: Train, model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, length: RunLength
) -> AveragedModel | None:
    """The average that `ema` or `swa` asks for, of model and loss; None for neither."""
    # Frozen weights do not change, so their average is what they are
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [each for each in (*model.parameters(), *loss.parameters()) if id(each) in trained]
    average = functools.partial(
        AveragedModel, model=model, parameters=parameters, can_skip=config.on_nonfinite == "skip", loss=loss
    )
    if config.ema is not None:
        return average("ema", decay=config.ema, warmup=config.averaging.warmup)
    if config.swa is None:
        return None
    # A resumed run may have epochs of another length, and SWA takes weights once an epoch
    timeline, start = length.timeline, length.swa_start(config.swa)
    turn, epoch = timeline.turns[-1] if timeline.turns else (0, 0)
    if start < turn:
        # The next weights are taken a whole number of epochs after the start, the last ones before the turn.
        part = (timeline.scaled(start) / timeline.steps - epoch) % 1
        start = turn + round(part * timeline.steps) - timeline.steps
    return average("swa", start=start, every=timeline.steps)


def build_optimizer(
    config: Train, model: nn.Module, loss: nn.Module, owned: Mapping[str, Sequence[nn.Parameter]] | None = None
) -> tuple[torch.optim.Optimizer, Kernels]:
    """Build the optimizer over the trainable parameters; each group remembers its `initial_lr` for the schedule.

    With `owned`, the parameters by the name of their optimizer, there are several optimizers. Raises `UserError` if there is
    nothing to train, or an optimizer refuses its arguments.
    """
    if not (parameters := [parameter for parameter in model.parameters() if parameter.requires_grad]):
        raise UserError("model", "has no trainable parameter")
    # A loss with weights of its own, such as class centres, is trained as well; first, as Muon takes the last matrix as the head
    parameters[:0] = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    if owned is None:
        return _built("optimizer", config, parameters, model, loss)
    built = {}
    for name, own in owned.items():
        its = set(own)
        if not (trained := [each for each in parameters if each in its]):
            raise UserError("freeze", f"leaves nothing to train to optimizer.{name}", "null, or parts of its modules")
        built[name] = _built(f"optimizer.{name}", config, trained, model, loss)
    first, *others = (kernels for _, kernels in built.values())
    common = first if all(each == first for each in others) else Kernels({}, "", "")
    return Optimizers({name: optimizer for name, (optimizer, _) in built.items()}), common


def _owned(config: Train, task: Any, model: nn.Module, loss: nn.Module) -> dict[str, list[nn.Parameter]] | None:
    """The trainable parameters by the name of their optimizer, as the task divides them; None for a single optimizer.

    Raises `UserError` if the task and the section `optimizer` name different ones, or a parameter has none or two.
    """
    names = [key.partition(".")[2] for key in components_of("optimizer", config.optimizer)]
    if not hasattr(task, "optimizer_steps") and names == [""]:
        return None
    divided = optimizers_of(task, modules_of(model, loss))
    if not hasattr(task, "optimizer_steps") or sorted(divided) != sorted(names):
        problem = f"are {', '.join(names)}" if names != [""] else "is one"
        words = (f"'+optimizer.{name}={{_target_: torch.optim.Adam, lr: 0.001}}'" for name in divided)
        allowed = " ".join(("'~optimizer'", *words)) if divided else "optimizers(modules) and optimizer_steps"
        raise UserError("optimizer", f"{problem}, and those of the task are {', '.join(divided) or 'none'}", allowed)
    owned = {name: list(_parameters(divided[name])) for name in names}
    named = dict([*model.named_parameters(), *loss.named_parameters("loss")])
    count = Counter(each for own in owned.values() for each in own)
    if wrong := [name for name, each in named.items() if each.requires_grad and count[each] != 1]:
        problem = f"its optimizers give {wrong[0]} to {count[named[wrong[0]]]} of {', '.join(names)}"
        raise UserError("task", problem, "each parameter that is not frozen to one of them")
    return owned


def _parameters(owned: Any) -> dict[nn.Parameter, None]:
    """The parameters of a module, or of a list of modules and parameters, each once."""
    parts = [owned] if isinstance(owned, nn.Module) else owned
    return dict.fromkeys(
        each for part in parts for each in (part.parameters() if isinstance(part, nn.Module) else [part])
    )


def _built(
    key: str, config: Train, parameters: list[nn.Parameter], model: nn.Module, loss: nn.Module
) -> tuple[torch.optim.Optimizer, Kernels]:
    """The optimizer at a dotted key, over these parameters of model and loss."""
    node = components_of("optimizer", config.optimizer)[key]
    # Fused kernels refuse sparse gradients
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    kernels = choose_kernels(node, parameters, sparse, key)
    extras: OptimizerExtras = extras_of(key, node)
    facts = dict.fromkeys(node.keys() & set(KINDS)) | kernels.arguments
    groups = divide(key, node, extras, model, loss)
    if groups and key != "optimizer":
        own = set(parameters)
        groups = [group | {"params": [each for each in group["params"] if each in own]} for group in groups]
        groups = [group for group in groups if group["params"]]
    try:
        # Facts are arguments that the optimizer takes only if it names them
        optimizer = build(key, node, groups or parameters, facts=facts)
    except RuntimeError as error:  # how torch refuses arguments that do not go together
        raise UserError(key, f"{node['_target_']} refuses its arguments: {error}") from error
    # Any class may be named in the config, so what it built is checked
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{key}._target_", f"{node['_target_']} gives a {type(optimizer).__name__}", "an Optimizer")
    # Without lr_mult in its groups, the loop below would give every group the same rate
    if groups and not all("lr_mult" in group for group in optimizer.param_groups):
        problem = f"{node['_target_']} drops keys of its parameter groups, so no group can have its own rate"
        allowed = f"null for {key}.no_decay, {key}.lr_mult and {key}.layer_decay, or another optimizer"
        raise UserError(key, problem, allowed)
    # Rates are scaled here once, and the schedule multiplies the result
    base = extras.lr_base_batch_size  # for the linear scaling rule of Goyal et al., 2017
    scale = 1.0 if base is None else config.data.samples_a_batch * config.accumulate / base
    for group in optimizer.param_groups:
        group["lr"] *= scale * group.get("lr_mult", 1.0)
        group["initial_lr"] = group["lr"]
    start_momentum(optimizer)
    return optimizer, kernels


def build_schedule(config: Train, length: RunLength, monitor: Monitor) -> Schedule:
    """Build the schedule, or one for each of several optimizers.

    Raises `UserError` if one refuses its arguments, is not a schedule, or is that of no optimizer.
    """
    nodes = components_of("scheduler", config.scheduler)
    optimizers = components_of("optimizer", config.optimizer)
    if "optimizer" in optimizers and "scheduler" in nodes:
        return _schedule("scheduler", config, config.optimizer, length, monitor)
    # One schedule for all is built for each, as some take the rate of their optimizer
    keys = {
        key: "scheduler" if "scheduler" in nodes else key.replace("optimizer", "scheduler", 1) for key in optimizers
    }
    if nodes.keys() != set(keys.values()):
        problem = f"names {', '.join(nodes)}, and there are {', '.join(optimizers)}"
        raise UserError("scheduler", problem, f"one schedule for all, or {', '.join(keys.values())}")
    named = {key.partition(".")[2]: (keys[key], node) for key, node in optimizers.items()}
    return Schedules({name: _schedule(key, config, node, length, monitor) for name, (key, node) in named.items()})


def _schedule(key: str, config: Train, optimizer: dict[str, Any], length: RunLength, monitor: Monitor) -> Schedule:
    """The schedule at a dotted key; one with a clock keeps its place if a resumed run has more or fewer steps per epoch.

    Where SWA begins, it goes over to SWA's rate.
    """
    node = components_of("scheduler", config.scheduler)[key]
    if not monitor.metric and names_argument(node, "mode"):
        raise UserError(key, "follows the metric of checkpoint.monitor, which is null, and the task names none")
    clock, timeline, total_steps = Clock(), length.timeline, length.total_steps
    # The clock counts scaled epochs, so that a schedule keeps its place if an epoch has another length now
    if timeline.turns and names_argument(node, "clock"):
        follows = length.limits.epochs_decide(timeline) and node.get("total_steps") is None
        run = timeline.scaled if follows else clock.run
        clock = Clock(run, timeline.scaled if node.get("steps_per_epoch") is None else clock.epochs)
        total_steps = round(clock.run(total_steps))
    facts = {"total_steps": total_steps, "steps_per_epoch": timeline.steps, "mode": monitor.mode, "clock": clock}
    schedule: Schedule = build(key, node, facts=facts | {"lr": float(optimizer.get("lr") or 1.0)})
    # A class of the user may lack a method that is called only at the end of the first epoch
    require_methods(key, node["_target_"], schedule, calls_of(Schedule))
    if config.swa is None or config.averaging.lr_factor is None:
        return schedule
    start, steps = length.swa_start(config.swa), config.averaging.anneal_epochs * timeline.steps
    return Annealed(schedule, start, steps, config.averaging.lr_factor, timeline.scaled)


def divide(
    key: str, node: Mapping[str, Any], extras: OptimizerExtras, model: nn.Module, loss: nn.Module
) -> list[dict[str, Any]]:
    """The parameter groups that the keys of an optimizer ask for; none if all parameters are treated alike."""
    if not extras.no_decay and not extras.lr_mult and extras.layer_decay is None:
        return []
    if extras.no_decay and not names_argument(node, "weight_decay"):
        raise UserError(f"{key}.no_decay", f"{node['_target_']} has no weight_decay to exempt weights from")
    blocks = [name for name, _ in repeated_blocks(model)] if extras.layer_decay is not None else []
    return parameter_groups(
        model, extras.no_decay, extras.lr_mult, layer_decay=extras.layer_decay, blocks=blocks, loss=loss, key=key
    )


def table_of_groups(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """A row for each parameter group: name, tensors, parameters, peak learning rate, weight decay; none if there are no names."""
    return [
        [
            group["name"] + (f" ({group['algorithm']})" if "algorithm" in group else ""),
            f"{len(group['params']):,}",
            f"{sum(parameter.numel() for parameter in group['params']):,}",
            f"{group['initial_lr']:.4g}",
            f"{group['weight_decay']:g}" if "weight_decay" in group else "-",
        ]
        for group in optimizer.param_groups
        if "name" in group
    ]
