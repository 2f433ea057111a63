"""What is tried before training: samples in an evaluation and in a step, the memory of a step, and the batch size that fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn

from runner.base.errors import UserError, first_line
from runner.config.keys import with_changes
from runner.config.schema.train import Train
from runner.data.loaders import Batch
from runner.data.module import DataModule
from runner.data.sample_rng import preserved_rng
from runner.distributed.world import world
from runner.engine.errors import is_out_of_memory
from runner.engine.evaluation import NO_MEANS
from runner.engine.freezing import Freezing
from runner.engine.plan import EpochPlan
from runner.instrument.nested import tensors_in
from runner.instrument.no_trace import evaluating, no_trace
from runner.instrument.saved_tensors import bytes_for_backward
from runner.run.finetune import explaining
from runner.run.model import TAKES_BATCHES, indices_for, model_of, prepared
from runner.run.run import Run
from runner.run.step import TaskSteps, scalar
from runner.runtime.memory import Peak, peak_memory, readable, reset_peak_memory
from runner.tasks.task import Task

T = TypeVar("T", bound=Train)

_MIXABLE = "transform.mix=null, or a loss of probabilities such as loss=cross_entropy"
_ANOMALY = "detect_anomaly=true dry_run=true, which shows the operation of the forward pass"
_EVALUATES = "evaluation_step(modules, batch), or evaluate.every_epochs=null evaluate.test=false"
_SHARE = 0.8  # of the memory that is free
_BESIDE = 3  # times the weights: gradients, and two averages as Adam keeps them
_FOR_BACKWARD = 2.0  # times what the graph keeps: gradients of activations, and what operations need meanwhile
_MEASURED = 4  # samples that are measured
_LESS_A_SAMPLE = "a smaller model or smaller images, amp=true, or activation_checkpointing=true"
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def probe(
    steps: Any, task: Task, model: nn.Module, loss: nn.Module, data: DataModule, *, evaluates: bool = True
) -> list[str]:
    """Evaluate a sample, and compute the gradients of two as in training.

    Weights, buffers, gradients, modes and random generators are left as they are. `evaluates` says whether the run evaluates
    at all. Returns the names of the scalars that an evaluation gives.
    """
    scalars = list[str]()
    own = not data.pairs or isinstance(steps, TaskSteps)
    if not own:
        _evaluate(task, model, loss, data)
    elif evaluates:
        scalars = _evaluate_own(task, steps, model, loss, data)
    samples = len(data.trial.indices) if own else min(2, data.train.loader.batch_size, data.train.samples)
    with _training(model, loss):
        # A loss is dropped before the next one is computed, as in training
        losses = _own_losses(task, steps, data) if own else _losses(task, model, loss, data, samples)
        trained = [_backward(value, "task" if own else "model", samples) for value in losses]
        if trained and not any(trained):
            _refuse_without_gradient("task" if own else "loss", model)
    return scalars


def _evaluate(task: Task, model: nn.Module, loss: nn.Module, data: DataModule) -> None:
    """Evaluate the first image that an evaluation reads, which may have another size than those of training."""
    name = next(name for name in ("val", "test", "train") if name in data.examples)
    split, outputs = data.eval_split(name) or data.train_for_eval, task.outputs(data.classes)
    with preserved_rng():
        images = prepared(split.prepare, data.examples[name][0][None].to(data.device))
    size = f"cannot take images of shape {tuple(images.shape)} of '{name}': "
    with evaluating(model), explaining("model", size, "a model for images of this size, or another data.image_size"):
        logits = model(images)
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, outputs):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        allowed = f"a tensor of shape (1, {outputs}), one output per class or number"
        raise UserError("model", f"gives {got} for one image", allowed)
    with evaluating(model, loss), explaining("loss", _tried(1)):
        scalar("loss", "gives", loss(logits, task.targets(data.example[1])))


def _evaluate_own(task: Task, steps: Any, model: nn.Module, loss: nn.Module, data: DataModule) -> list[str]:
    """Evaluate a few samples of any kind; returns the names of the scalars."""
    allowed = "" if hasattr(task, "evaluation_step") else _EVALUATES
    batch, split = data.evaluated_batch(), data.val or data.test or data.train_for_eval
    if not data.pairs and (check := getattr(split.loader, "check", None)) is not None:
        check(batch.targets.cpu(), batch.indices.cpu())
    with evaluating(model, loss), explaining("task", f"cannot evaluate a batch, {_tried(len(batch.indices))}", allowed):
        found = steps.evaluated(batch.data)
    wanted = {"loss": task.monitor == "val/loss", "outputs": bool(task.metric_names())}
    if lacks := [name for name, needed in wanted.items() if needed and name not in found]:
        of = "the monitored metric val/loss" if lacks[0] == "loss" else "its metrics"
        raise UserError("task", f"its evaluation_step gives no {lacks[0]}, which {of} needs", f"{lacks[0]} in the dict")
    return [name for name in found if name not in NO_MEANS]


def _tried(samples: int) -> str:
    """The start of a message: a number in an error of torch, such as 2, may be that of the samples."""
    return f"in a trial with {samples} sample{'s' * (samples != 1)}: "


def _own_losses(task: Task, steps: Any, data: DataModule) -> Iterator[Tensor]:
    """The losses that a task computes of two samples, one for each step of an optimizer."""
    batch = data.trial
    with explaining("task", f"cannot train on a batch, {_tried(len(batch.indices))}"):
        if hasattr(task, "optimizer_steps"):
            yield from (value for _, _, value, _ in steps.alternate([batch.data]))
        else:
            yield steps(batch.data)


def _losses(task: Task, model: nn.Module, loss: nn.Module, data: DataModule, copies: int) -> Iterator[Tensor]:
    """The loss of two samples as in training, or of one if batches have one."""
    images, targets = (each.expand(copies, *each.shape[1:]) for each in data.example)
    indices, fits = indices_for(images), explaining("loss", _tried(copies))
    with explaining("transform.train", f"cannot take images of {tuple(images.shape)}: ", TAKES_BATCHES):
        images = data.train.prepare(images, indices, 0)
    if data.train.mix is not None:
        fits = explaining("transform.mix", f"gives targets that task and loss cannot take, {_tried(copies)}", _MIXABLE)
        with explaining("transform.mix", f"cannot take a batch, {_tried(copies)}", "transform.mix=null"):
            images, targets = data.train.mix(images, targets, indices, 0)
    try:
        logits = model(images)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # some models take only larger batches in training, see `try_single_sample`
    # Some models return other shapes in training, such as auxiliary outputs or a mean over the batch
    if isinstance(logits, Tensor) and (logits.ndim == 0 or len(logits) != copies):
        problem = f"gives {tuple(logits.shape)} in training for a batch of {copies}"
        raise UserError("model", problem, f"one row for each image, ({copies}, {task.outputs(data.classes)})")
    if isinstance(logits, Tensor) and not logits.requires_grad:
        _refuse_without_gradient("model", model)
    with fits:
        value = scalar("loss", "gives", loss(logits, task.targets(targets)))
    yield value


def _backward(value: Tensor, key: str, samples: int) -> bool:
    """Compute the gradients of a loss, which `key` may be to blame for; whether it has any."""
    problem = f"its gradients cannot be computed, {_tried(samples)}"
    with explaining(key, problem, "" if torch.is_anomaly_enabled() else _ANOMALY):
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
    return value.requires_grad


def _refuse_without_gradient(key: str, model: nn.Module) -> None:
    """Refuse a result without a gradient, with which training would run to its end and change nothing."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        allowed = f"a {key} without detach(), no_grad() or item() between the weights and the loss"
        raise UserError(key, "its result has no gradient, so nothing can be trained", allowed)


@contextlib.contextmanager
def _training(model: nn.Module, loss: nn.Module) -> Iterator[None]:
    """Training mode with gradients; afterwards model, loss and random generators are as before."""
    # Some models keep their last outputs as attributes, and a tensor with a graph cannot be copied for an average.
    kept = [(module, dict(vars(module))) for module in (*model.modules(), *loss.modules())]
    try:
        with no_trace(model, loss), torch.enable_grad():
            model.train()
            yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


def unsaved_attributes(task: Task, changed: list[str]) -> list[str]:
    """A warning about attributes that a step of the task changes and no checkpoint has."""
    if not changed or hasattr(task, "state_dict"):
        return []
    which = (
        f"steps of {type(task).__name__} change its attributes {', '.join(changed)}, which a checkpoint does not have"
    )
    return [f"{which}: keep them in buffers of a module, or define state_dict and load_state_dict"]


def forward_copies(steps: Any, model: nn.Module, data: DataModule, samples: int) -> Any:
    """Send copies of the first training samples through the model as training does; what is returned holds the graph."""
    batch = data.example_batch(samples)
    return model_of(model)(batch.images) if data.pairs else steps(batch.data)


def try_single_sample(
    config: Train,
    steps: Any,
    model: nn.Module,
    loss: nn.Module,
    data: DataModule,
    *,
    freezing: Freezing,
    epoch: EpochPlan,
) -> None:
    """Train on one sample, if the ranks that share a batch may get no more: BatchNorm has no variance to compute."""
    ranks = 1 if config.sync_batchnorm else world().size
    # The last batch is the smallest, so it decides
    if epoch.size(epoch.batches - 1) // ranks > 1:
        return
    which = "every batch" if epoch.batch_size // ranks <= 1 else "the last batch of an epoch"
    which += " has 1 sample" if ranks == 1 else f" leaves 1 sample or none to one of {ranks} processes"
    allowed = "data.drop_last=true, or another data.batch_size" + ", or sync_batchnorm=true" * (ranks > 1)
    failed = explaining("data.batch_size", f"{which}, and training on one fails: ", allowed)
    with failed, _training(model, loss), freezing.as_at(None):  # training everything asks for the most
        steps(data.example_batch(1).data)


def try_adapters(config: Train, steps: Any, model: nn.Module, loss: nn.Module, data: DataModule) -> None:
    """Refuse adapters of layers whose weights the model reads instead of calling them, as torchvision's Swin does."""
    if config.adapters.rank is None:
        return
    layers, called = {name: each for name, each in model.named_modules() if hasattr(each, "lora_A")}, set[nn.Module]()
    with contextlib.ExitStack() as hooks:
        for each in layers.values():
            hooks.callback(each.register_forward_hook(lambda layer, *_: called.add(layer)).remove)
        with _training(model, loss), explaining("adapters", "the adapted model cannot be trained: "):
            forward_copies(steps, model, data, 2)
    if unused := [name for name, each in layers.items() if each not in called]:
        problem = f"adapters of {', '.join(unused[:3])} have no effect, as the model does not call these layers"
        raise UserError("adapters.modules", problem, "patterns of other layers")


def auto_batch_size(config: T, build: Callable[[T], Run]) -> tuple[T, list[tuple[str, str, str]]]:
    """The config with the batch size that fits, so that a resumed run does not search again, and a row that says why.

    Without `data.batch_size=auto` the config is as it was, and there is no row. The size is the largest power of two that is no
    more than the training samples. The memory of a sample is estimated from what the graph of a few keeps for backward. On a GPU,
    the batch is then tried. A `UserError` says that not even one sample fits.
    """
    if config.data.batch_size != "auto":
        return config, []
    # Any size does for building, but BatchNorm takes no single sample: the memory of a sample is measured afterwards
    run = build(with_changes(config, {"data.batch_size": 2, "data.drop_last": True}))
    with contextlib.closing(run.data), run.state.freezing.as_at(None):  # training everything takes the most
        samples = run.data.train.samples
        with explaining_memory("data.batch_size", _MEASURED, _LESS_A_SAMPLE):
            batch = run.data.example_batch(_MEASURED)
            kept = bytes_for_backward(run.model, lambda: _loss(run, batch))
        kept += sum(tensor.nbytes for tensor in tensors_in(batch.data))
        each = max(1, int(_FOR_BACKWARD * kept / _MEASURED))
        # Workspaces and fragmentation grow with the model, so a part of the free memory is left alone
        weights = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
        room = int(_SHARE * free_memory(run.device)) - _BESIDE * weights
        if room < each:
            problem = f"a sample takes about {readable(each)}, and {readable(room)} are free for it on {run.device}"
            raise UserError("data.batch_size", problem, _LESS_A_SAMPLE)
        # A power of two, not above the training samples: more would have no effect
        size = 1 << (min(samples, room // each).bit_length() - 1)
        # The estimate is linear, and memory is not: on a GPU the size is tried, and halved until it fits
        while run.device.type == "cuda" and size > 1 and not _fits(run, size):
            size //= 2
    limit = f"{samples:,} training samples" if 2 * size > samples else f"{readable(room)} free"
    row = "batch", f"{size:,} samples", f"auto: about {readable(each)} a sample, {limit}"
    return with_changes(config, {"data.batch_size": size}), [row]


def _fits(run: Run, size: int) -> bool:
    """Whether forward and backward of a batch go well."""
    try:
        _loss(run, run.data.example_batch(size)).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        run.state.optimizer.zero_grad()
    torch.cuda.empty_cache()
    return True


def _loss(run: Run, batch: Batch) -> Tensor:
    """The loss of a batch with its graph, uncompiled: a variant of each size would count against torch's limit."""
    with run.precision.autocast():
        return run.step.objective(batch.data)


def try_step(run: Run, size: int) -> Peak:
    """Make an optimizer step with batches of copies of the first training samples, and give the peak of its memory.

    Everything is trained, which takes the most memory; the run is of no use afterwards.
    """
    reset_peak_memory(run.device)
    last = run.plan.accumulate - 1
    with run.state.freezing.as_at(None):
        batch = run.data.example_batch(size)
        for number in range(last + 1):
            run.step(batch, 1 / (last + 1), size, update=number == last)
    return peak_memory(run.device)


def free_memory(device: torch.device) -> int:
    """Bytes free on a device; on the CPU those of the machine, or of the control group that the process is in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or no limit, which says `max`
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free


@contextlib.contextmanager
def explaining_memory(key: str, size: int, fix: str) -> Iterator[None]:
    """Turn an out-of-memory error in batches of `size` samples, as set by `key`, into a `UserError` that says what helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(key, f"there is not enough memory for batches of {size}: {first_line(error)}", fix) from error


def memory_for_training(config: Train) -> contextlib.AbstractContextManager[None]:
    """See `explaining_memory`: for training, with smaller batches that give the same update."""
    size = config.data.samples_a_batch
    # Equal parts, so that an epoch has as many updates as before
    parts = next((number for number in range(2, size + 1) if size % number == 0), 1)
    smaller = f"data.batch_size={size // parts} accumulate={parts * config.accumulate}"
    fix = f"{smaller}, which gives the same update except for BatchNorm; or " if parts > 1 else ""
    return explaining_memory("data.batch_size", size, f"{fix}amp=true, activation_checkpointing=true")
