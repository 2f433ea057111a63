"""Checks of settings that cannot work: of the optimizer, its schedule, clipping, averaging, norms and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_POINTS = 2000  # of a schedule
_STEPS = 3
_STUCK, _SLOW = 0.003, 0.02  # shares of their size that weights can move by over the whole run
_FAST, _FAST_SGD = 0.7, 3.0  # share of their size that weights move by in one step; first gradients of SGD are large
_ADAM = ("adam", "adamw", "nadam", "radam", "adamax", "lion", "lamb", "adan", "adopt", "adabelief")
_L2 = ("SGD", "Adam", "RMSprop", "NAdam", "RAdam", "Adamax")  # that add weight decay to the gradient
_EXTREME, _USELESS = 0.8, 0.95  # dropout


def _kind(context: CheckContext) -> str:
    return type(context.training.state.optimizer).__name__


def _factors(context: CheckContext) -> list[float]:
    """The schedule over the whole run, at evenly spread steps."""
    total, schedule = context.training.total_steps, context.training.state.schedule
    count = min(total, _POINTS)
    return [float(schedule.factor(place * total // count)) for place in range(count)]


@check
def optimizer_settings(context: CheckContext) -> Result:
    """Rates, momentum, betas, eps or weight decay that no training works with."""
    kind, steps = _kind(context), context.training.total_steps
    bad: list[tuple[str, str]] = []
    odd: list[tuple[str, str]] = []
    adam = kind.lower() in _ADAM
    for group in context.training.state.optimizer.param_groups:
        rate, decay = float(group.get("initial_lr", group["lr"])), float(group.get("weight_decay", 0.0) or 0.0)
        momentum, betas, eps = group.get("momentum"), group.get("betas"), float(group.get("eps", 0.0) or 0.0)
        if not math.isfinite(rate) or rate < 0:
            bad.append((f"lr is {rate:g}", "a positive optimizer.lr"))
        elif rate == 0:
            odd.append(("lr is 0: nothing is trained", "a positive optimizer.lr"))
        elif (adam and rate >= 0.05) or (kind == "RMSprop" and rate >= 0.05):
            (bad if rate >= 0.5 else odd).append((f"lr={rate:g} for {kind}", "0.0001 to 0.01 is usual for it"))
        elif kind == "SGD" and rate / max(1e-3, 1 - float(momentum or 0)) >= 100:
            (bad if rate >= 100 else odd).append((f"lr={rate:g} with momentum {momentum:g}", "0.001 to 1 is usual"))
        if group.get("maximize"):
            bad.append(("maximize=true: the loss rises", "optimizer.maximize=false"))
        if momentum is not None and float(momentum) >= 1:
            bad.append((f"momentum={momentum:g}: no step is ever forgotten", "optimizer.momentum=0.9"))
        elif momentum is not None and 1 - float(momentum) < 2 / max(4, steps) and float(momentum) > 0.99:
            odd.append(
                (
                    f"momentum={momentum:g} averages more steps than half of the run's {steps:,}",
                    "optimizer.momentum=0.9",
                )
            )
        if float(group.get("dampening", 0.0) or 0.0) >= 0.99 and momentum:
            bad.append((f"dampening={group['dampening']:g}: no gradient reaches the momentum", "optimizer.dampening=0"))
        if isinstance(betas, list | tuple) and len(betas) == 2:
            first, second = map(float, betas)
            if first > second:
                odd.append((f"betas=[{first:g}, {second:g}]", "the other way round: [0.9, 0.999]"))
            elif first > 0.99 and 1 - first < 2 / max(4, steps):
                odd.append(
                    (f"betas[0]={first:g} averages more steps than half of the run's {steps:,}", "betas [0.9, 0.999]")
                )
            elif second < 0.5:
                odd.append(
                    (f"betas[1]={second:g}: each step is as long as its own gradient is noisy", "betas [0.9, 0.999]")
                )
        if adam and eps > 1e-3:
            odd.append(
                (f"eps={eps:g} is more than most gradients, so steps are as small as these", "optimizer.eps=1e-8")
            )
        if decay < 0:
            bad.append((f"weight_decay={decay:g}: weights grow", "a weight decay from 0 on"))
        taken = rate * decay
        if taken >= 2e-3:
            told = f"weight_decay={decay:g} takes {min(1.0, taken):.1%} off every weight in each step at lr={rate:g}"
            (bad if taken >= 0.05 else odd).append((told, "a smaller optimizer.weight_decay: 0.0001 to 0.1 is usual"))
        elif decay >= 0.1 and kind in _L2 and not group.get("decoupled_weight_decay", False):
            told = f"weight_decay={decay:g} of {kind} is added to the gradient, where it is larger than the loss's"
            odd.append((told, "0.0001 to 0.001 is usual for it, or optimizer=adamw"))
    for found, verdict in ((bad, failed), (odd, warned)):
        if found:
            told = join_names(list(dict.fromkeys(each for each, _ in found)))
            return verdict(told, found[0][1])
    rates = [float(group["initial_lr"]) for group in context.training.state.optimizer.param_groups]
    return passed(f"{kind} with lr {min(rates):g}" + (f" to {max(rates):g}" if max(rates) > min(rates) else ""))


@check
def schedule(context: CheckContext) -> Result:
    """A schedule that never reaches the learning rate, leaves it at once, or goes far beyond: a warm-up longer than the run."""
    total = context.training.total_steps
    if total < 10:
        return skipped(f"the run has {total} steps")
    factors = _factors(context)
    top = max(factors)
    active = sum(each > 0.01 * top for each in factors) / len(factors)
    peak = factors.index(top) / len(factors)
    evidence = (
        f"{top:.3g} times the rate at most, {factors[0]:.3g} first and {factors[-1]:.3g} last, in {total:,} steps"
    )
    fix = "scheduler.warmup and scheduler.total_steps that fit the run, or scheduler=constant"
    if not all(math.isfinite(each) for each in factors) or min(factors) < 0:
        return failed(f"{evidence}: factors that are negative or not finite", fix)
    if top < 0.05:
        return failed(f"{evidence}: the rate is never reached", fix)
    if top > 20:
        return failed(f"{evidence}: the rate is exceeded", fix)
    if peak > 0.9 and factors[0] < 0.5 * top:
        return failed(f"{evidence}: the warm-up takes {peak:.0%} of the run or more", fix)
    if active < 0.1:
        return failed(f"{evidence}: the rate is practically 0 in {1 - active:.0%} of the run", fix)
    if top > 3:
        return warned(f"{evidence}: the rate is exceeded", fix)
    if active < 0.35:
        return warned(f"{evidence}: the rate is practically 0 in {1 - active:.0%} of the run", fix)
    if factors[-1] > 2 * max(factors[: max(1, len(factors) // 2)]):
        return warned(f"{evidence}: the rate rises to the end of the run", fix)
    return passed(evidence)


def _moved(context: CheckContext) -> tuple[dict[str, float], float]:
    """Share of its size that each weight moves by in a step at the full rate, and the gradients' norm before clipping."""
    training, batch = context.training, context.batch
    state = training.state
    state.train()
    loss = training.parts.loss(training.model(batch.images), context.targets(batch))
    norm = 0.0
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in training.model.parameters() if each.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    context.restore()
    before = {
        name: weight.detach().clone()
        for name, weight in training.model.named_parameters()
        if weight.requires_grad and weight.ndim >= 2 and float(weight.detach().norm()) > 0
    }
    for group in state.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    for _ in range(_STEPS):
        training.step(state, training.parts, batch, 1.0, len(batch.images), True)
    weights = dict(training.model.named_parameters())
    return {
        name: float((weights[name].detach() - old).norm() / old.norm()) / _STEPS for name, old in before.items()
    }, norm


@check
def step_size(context: CheckContext) -> Result:
    """Steps so small that no weight gets anywhere in the whole run, or larger than the weights themselves."""
    moved, norm = _moved(context)
    if not moved:
        return skipped("the model has no weights of two dimensions")
    if not all(math.isfinite(each) for each in moved.values()):
        return failed("weights are not finite after three steps", "a smaller optimizer.lr, or grad_clip.norm=1.0")
    config, total = context.config, context.training.total_steps
    factors = _factors(context)
    mean = sum(factors) / len(factors)
    high = max(moved.values())
    middle = sorted(moved.values())[len(moved) // 2]
    reach = high * mean * total
    evidence = f"weights move by up to {high:.2g} of their size in a step at the full rate, by {reach:.2g} in all {total:,} steps"
    grad_clip, fix = config.grad_clip, "a larger optimizer.lr, or a longer run"
    if grad_clip.norm is not None and grad_clip.norm < 0.01 * norm:
        evidence += f"; gradients of a norm of {norm:.3g} are clipped to grad_clip.norm={grad_clip.norm:g}"
        fix = f"grad_clip.norm of about {norm:.1g}, or null"
        if grad_clip.norm < 1e-4 * norm and _kind(context).lower() not in _ADAM:
            return failed(evidence, fix)
    elif grad_clip.value is not None or grad_clip.agc is not None:
        fix = "larger grad_clip.value and grad_clip.agc, or null"
    still = [name for name, each in moved.items() if each * mean * total < _STUCK]
    if (grad_clip.norm, grad_clip.value, grad_clip.agc) != (None, None, None) and 2 * len(still) > len(moved):
        return failed(f"{evidence}; {len(still)} of {len(moved)} weights hardly move at all", fix)
    if reach < _STUCK:
        return failed(evidence, fix)
    if reach < _SLOW:
        return warned(evidence, fix)
    if middle > (_FAST if _kind(context).lower() in _ADAM else _FAST_SGD):
        verdict = failed if middle > 10 else warned
        return verdict(evidence, "a smaller optimizer.lr: weights should move by about 0.001 of their size in a step")
    return passed(evidence)


@check
def averaging(context: CheckContext) -> Result:
    """An average of the weights that never moves, covers more than the run, or does not average."""
    config, total = context.config, context.training.total_steps
    if config.ema is None:
        return skipped("ema is not set")
    kept = 0.0
    for step in range(min(total, 200_000)):
        rate = min(config.ema, (1 + step) / (10 + step)) if config.averaging.warmup else config.ema
        kept += math.log(rate)
    share, horizon = math.exp(kept), 1 / (1 - config.ema)
    evidence = (
        f"ema={config.ema:g} averages {horizon:,.0f} steps of {total:,}; {share:.1%} of the average are initial weights"
    )
    fix = f"ema={1 - 10 / max(20, total):.4g} averages a tenth of the run"
    if share > 0.1:
        return failed(evidence, f"averaging.warmup=true, or {fix}")
    if share > 0.01:
        return warned(evidence, f"averaging.warmup=true, or {fix}")
    if horizon > total and total >= 10:
        return warned(f"{evidence}: the decay is never reached, the warm-up of the average decides", fix)
    return warned(f"{evidence}: it hardly differs from the weights", fix) if config.ema < 0.5 else passed(evidence)


@check
def norm_statistics(context: CheckContext) -> Result:
    """BatchNorm that cannot work: momentum 0 or 1, a large eps, or batches of one sample."""
    norms = {
        name: module
        for name, module in context.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    if not norms:
        return skipped("the model has no BatchNorm")
    plan, steps = context.training.plan, context.training.total_steps
    size = plan.batch_size
    for name, norm in norms.items():
        momentum = norm.momentum
        if norm.track_running_stats and momentum is not None:
            if momentum <= 0 or (momentum * steps < 0.5 and momentum < 0.01):
                told = f"momentum={momentum:g} of {name}: its statistics stay what they are at the start, in {steps:,} steps"
                return failed(
                    told, "momentum=0.1; PyTorch's is the share of the new batch, TensorFlow's that of the old"
                )
            if momentum >= 0.9:
                told = f"momentum={momentum:g} of {name}: its statistics are those of the last batch"
                fix = "momentum=0.1; PyTorch's is the share of the new batch, TensorFlow's that of the old"
                return failed(told, fix) if momentum >= 0.99 else warned(told, fix)
        if norm.eps > 0.05:
            return warned(f"eps={norm.eps:g} of {name} is of the size of the variance itself", "eps=1e-5")
    if size == 1:
        return failed(f"data.batch_size=1 for {len(norms)} BatchNorm layers", "a larger batch, or GroupNorm")
    if size < 4:
        return warned(
            f"data.batch_size={size} for {len(norms)} BatchNorm layers", "a batch of 16 or more, or GroupNorm"
        )
    if not plan.drop_last and plan.limit is None and plan.samples % size == 1 and plan.samples > size:
        told = f"the last batch of an epoch has one sample, for {len(norms)} BatchNorm layers"
        return warned(told, "data.drop_last=true, or another data.batch_size")
    return passed(f"{len(norms)} layers, batches of {size}")


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the chance that dropout of any kind keeps a value with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in ("bernoulli_", "bernoulli") and len(args) > 1 and isinstance(args[1], float):
            self.kept.append(args[1])
        elif name == "native_dropout" and isinstance(args[1], float):
            self.kept.append(1 - args[1])
        return func(*args, **(kwargs or {}))


@check
def dropout_rate(context: CheckContext) -> Result:
    """Dropout, of a layer or as a function, that leaves almost nothing."""
    found = {
        name: float(module.p)
        for name, module in context.model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    }
    context.training.state.train()
    draws = _Draws()
    with draws, torch.no_grad():
        context.model(context.batch.images)
    rates = {**found, **{f"number {place} in forward": 1 - kept for place, kept in enumerate(draws.kept)}}
    if not rates:
        return passed("there is none")
    name = max(rates, key=lambda each: rates[each])
    evidence = f"up to {rates[name]:.0%} of the values are dropped ({name})"
    fix = "a dropout of 0.1 to 0.5; p is the share that is dropped, not the share that is kept"
    if rates[name] >= _USELESS:
        return failed(evidence, fix)
    return warned(evidence, fix) if rates[name] >= _EXTREME else passed(evidence)


@check
def epoch_length(context: CheckContext) -> Result:
    """Settings that leave few optimizer steps, or most samples out of an epoch."""
    plan, total = context.training.plan, context.training.total_steps
    if plan.accumulate > plan.batches:
        told = f"accumulate={plan.accumulate} is more than the {plan.batches} batches of an epoch, which is one step"
        return warned(told, "a smaller accumulate or data.batch_size")
    used = sum(plan.size(batch) for batch in range(plan.batches)) if plan.limit is None else plan.samples
    if plan.drop_last and used < 0.75 * plan.samples:
        told = f"data.drop_last=true leaves {plan.samples - used:,} of {plan.samples:,} samples out of each epoch"
        return warned(told, "data.drop_last=false, or a smaller data.batch_size")
    if plan.batch_size > plan.samples and plan.samples > 1 and total < 10:
        told = f"data.batch_size={plan.batch_size} is more than the {plan.samples:,} training samples: {total} steps in all"
        return warned(told, "a smaller data.batch_size, or more epochs")
    return passed(f"{plan.steps:,} steps an epoch, {total:,} in all")
