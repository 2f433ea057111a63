"""Checks of settings that cannot work: of the optimizer, its schedule, clipping, averaging, norms and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner.verbs.check.context import BATCH_NORM, DROPOUT, CheckContext
from runner.verbs.check.result import Result, failed, graded, join_names, passed, skipped, warned

_POINTS = 2000  # of a schedule
_STEPS = 3
_STUCK, _SLOW = 0.003, 0.02  # shares of their size that weights can move by in the whole run
_FAST, _FAST_SGD = 0.7, 3.0  # share of their size that weights move by in one step; first gradients of SGD are large
_ADAM = ("adam", "adamw", "nadam", "radam", "adamax", "lion", "lamb", "adan", "adopt", "adabelief")
_L2 = ("SGD", "Adam", "RMSprop", "NAdam", "RAdam", "Adamax")  # that add weight decay to the gradient
_EXTREME, _USELESS = 0.8, 0.95  # dropout
_MOMENTUM = "momentum=0.1; in PyTorch it is the share of the new batch, in TensorFlow that of the old ones"


def _kind(context: CheckContext) -> str:
    return type(context.training.state.optimizer).__name__


def _factors(context: CheckContext) -> list[float]:
    """The factors of the schedule at evenly spread steps of the run."""
    total, schedule = context.training.total_steps, context.training.state.schedule
    count = min(total, _POINTS)
    return [float(schedule.factor(place * total // count)) for place in range(count)]


def optimizer_settings(context: CheckContext) -> Result:
    """A learning rate, momentum, betas, eps or weight decay that no training works with."""
    kind, steps = _kind(context), context.training.total_steps
    groups = context.training.state.optimizer.param_groups
    bad: list[tuple[str, str]] = []
    odd: list[tuple[str, str]] = []
    for group in groups:
        _judge_group(group, kind, steps, bad, odd)
    for found, result in ((bad, failed), (odd, warned)):
        if found:
            return result(join_names(list(dict.fromkeys(each for each, _ in found))), found[0][1])
    rates = [float(group["initial_lr"]) for group in groups]
    return passed(f"{kind} with lr {min(rates):g}" + (f" to {max(rates):g}" if max(rates) > min(rates) else ""))


def _judge_group(
    group: dict[str, Any], kind: str, steps: int, bad: list[tuple[str, str]], odd: list[tuple[str, str]]
) -> None:
    """Add what is wrong with a parameter group, and its fix, to `bad`, or to `odd` if it is only unusual."""
    rate, decay = float(group.get("initial_lr", group["lr"])), float(group.get("weight_decay", 0.0) or 0.0)
    momentum, betas, eps = group.get("momentum"), group.get("betas"), float(group.get("eps", 0.0) or 0.0)
    adam, dampening = kind.lower() in _ADAM, float(group.get("dampening", 0.0) or 0.0)

    def too_long(decay_rate: float) -> bool:
        return decay_rate > 0.99 and 1 - decay_rate < 2 / max(4, steps)

    average = f"averages more than half of the {steps:,} steps of the run"
    if not math.isfinite(rate) or rate < 0:
        bad.append((f"lr is {rate:g}", "a positive optimizer.lr"))
    elif rate == 0:
        odd.append(("lr is 0: nothing is trained", "a positive optimizer.lr"))
    elif (adam or kind == "RMSprop") and rate >= 0.05:
        (bad if rate >= 0.5 else odd).append((f"lr={rate:g} for {kind}", "0.0001 to 0.01 is usual for it"))
    elif kind == "SGD" and rate / max(1e-3, 1 - float(momentum or 0)) >= 100:
        (bad if rate >= 100 else odd).append((f"lr={rate:g} with momentum {momentum:g}", "0.001 to 1 is usual"))
    if group.get("maximize"):
        bad.append(("maximize=true: the loss rises", "optimizer.maximize=false"))
    if momentum is not None and float(momentum) >= 1:
        bad.append((f"momentum={momentum:g}: no step is ever forgotten", "optimizer.momentum=0.9"))
    elif momentum is not None and too_long(float(momentum)):
        odd.append((f"momentum={momentum:g} {average}", "optimizer.momentum=0.9"))
    if dampening >= 0.99 and momentum:
        bad.append((f"dampening={dampening:g}: no gradient reaches the momentum", "optimizer.dampening=0"))
    if isinstance(betas, list | tuple) and len(betas) == 2:
        first, second = map(float, betas)
        if first > second:
            odd.append((f"betas=[{first:g}, {second:g}]", "the other way round: [0.9, 0.999]"))
        elif too_long(first):
            odd.append((f"betas[0]={first:g} {average}", "betas [0.9, 0.999]"))
        elif second < 0.5:
            odd.append((f"betas[1]={second:g}: the size of a step is as noisy as its gradient", "betas [0.9, 0.999]"))
    if adam and eps > 1e-3:
        odd.append((f"eps={eps:g} is more than most gradients, so steps shrink with them", "optimizer.eps=1e-8"))
    if decay < 0:
        bad.append((f"weight_decay={decay:g}: weights grow", "a weight decay of 0 or more"))
    if (taken := rate * decay) >= 2e-3:
        evidence = f"weight_decay={decay:g} takes {min(1.0, taken):.1%} off every weight in each step at lr={rate:g}"
        (bad if taken >= 0.05 else odd).append((evidence, "a smaller optimizer.weight_decay: 0.0001 to 0.1 is usual"))
    elif decay >= 0.1 and kind in _L2 and not group.get("decoupled_weight_decay", False):
        evidence = f"weight_decay={decay:g} of {kind} is added to the gradient, where it exceeds that of the loss"
        odd.append((evidence, "0.0001 to 0.001 is usual for it, or optimizer=adamw"))


def schedule(context: CheckContext) -> Result:
    """A schedule that never reaches the learning rate, leaves it at once, or far exceeds it; a warm-up longer than the run."""
    total = context.training.total_steps
    if total < 10:
        return skipped(f"the run has {total} steps")
    factors = _factors(context)
    top = max(factors)
    active = sum(each > 0.01 * top for each in factors) / len(factors)
    peak = factors.index(top) / len(factors)
    first, last = factors[0], factors[-1]
    evidence = f"at most {top:.3g} times the rate, first {first:.3g} and last {last:.3g}, in {total:,} steps"
    idle = f"the rate is practically 0 in {1 - active:.0%} of the run"
    rising = last > 2 * max(factors[: max(1, len(factors) // 2)])
    for result, wrong, problem in (
        (failed, not all(map(math.isfinite, factors)) or min(factors) < 0, "factors that are negative or not finite"),
        (failed, top < 0.05, "the rate is never reached"),
        (failed, top > 20, "the rate is exceeded"),
        (failed, peak > 0.9 and first < 0.5 * top, f"the warm-up takes {peak:.0%} of the run or more"),
        (failed, active < 0.1, idle),
        (warned, top > 3, "the rate is exceeded"),
        (warned, active < 0.35, idle),
        (warned, rising, "the rate rises to the end of the run"),
    ):
        if wrong:
            fix = "scheduler.warmup and scheduler.total_steps that fit the run, or scheduler=constant"
            return result(f"{evidence}: {problem}", fix)
    return passed(evidence)


def _moves(context: CheckContext) -> tuple[dict[str, float], float]:
    """Share of its size that each weight moves by in a step at the full rate, and the norm of the gradients before clipping."""
    training, batch, state = context.training, context.batch, context.training.state
    state.train()
    loss = context.loss()
    norm = 0.0
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in training.model.parameters() if each.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    context.restore()
    weights = {name: p for name, p in training.model.named_parameters() if p.requires_grad and p.ndim >= 2}
    before = {name: each.detach().clone() for name, each in weights.items() if float(each.detach().norm()) > 0}
    for group in state.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    for _ in range(_STEPS):
        training.step(state, training.parts, batch, 1.0, len(batch.images), True)
    after = dict(training.model.named_parameters())
    moved = {name: float((after[name].detach() - old).norm() / old.norm()) for name, old in before.items()}
    return {name: each / _STEPS for name, each in moved.items()}, norm


def step_size(context: CheckContext) -> Result:
    """Steps so small that no weight changes in the whole run, or larger than the weights themselves."""
    moves, norm = _moves(context)
    if not moves:
        return skipped("the model has no weights of two dimensions")
    if not all(math.isfinite(each) for each in moves.values()):
        return failed("weights are not finite after three steps", "a smaller optimizer.lr, or grad_clip.norm=1.0")
    config, total = context.config, context.training.total_steps
    factors, adam = _factors(context), _kind(context).lower() in _ADAM
    mean = sum(factors) / len(factors)
    high, middle = max(moves.values()), sorted(moves.values())[len(moves) // 2]
    reach = high * mean * total
    evidence = f"weights move by up to {high:.2g} of their size in a step at the full rate, by {reach:.2g} in all {total:,} steps"
    grad_clip, fix = config.grad_clip, "a larger optimizer.lr, or a longer run"
    if grad_clip.norm is not None and grad_clip.norm < 0.01 * norm:
        evidence += f"; gradients with a norm of {norm:.3g} are clipped to grad_clip.norm={grad_clip.norm:g}"
        fix = f"grad_clip.norm of about {norm:.1g}, or null"
        if grad_clip.norm < 1e-4 * norm and not adam:
            return failed(evidence, fix)
    elif grad_clip.value is not None or grad_clip.agc is not None:
        fix = "larger grad_clip.value and grad_clip.agc, or null"
    still = [name for name, each in moves.items() if each * mean * total < _STUCK]
    if (grad_clip.norm, grad_clip.value, grad_clip.agc) != (None, None, None) and 2 * len(still) > len(moves):
        return failed(f"{evidence}; {len(still)} of {len(moves)} weights hardly move", fix)
    if reach < _SLOW:
        return graded(evidence, fix, fail=reach < _STUCK, warn=True)
    fix = "a smaller optimizer.lr: weights should move by about 0.001 of their size in a step"
    fast = middle > (_FAST if adam else _FAST_SGD)
    return graded(evidence, fix, fail=fast and middle > 10, warn=fast)


def averaging(context: CheckContext) -> Result:
    """A weight average that never moves, covers more than the run, or does not average."""
    config, total = context.config, context.training.total_steps
    if config.ema is None:
        return skipped("ema is not set")
    kept = 0.0
    for step in range(min(total, 200_000)):
        kept += math.log(min(config.ema, (1 + step) / (10 + step)) if config.averaging.warmup else config.ema)
    share, horizon = math.exp(kept), 1 / (1 - config.ema)
    evidence = f"ema={config.ema:g} averages {horizon:,.0f} of {total:,} steps; {share:.1%} of it are initial weights"
    fix = f"ema={1 - 10 / max(20, total):.4g} averages a tenth of the run"
    if share > 0.01:
        return graded(evidence, f"averaging.warmup=true, or {fix}", fail=share > 0.1, warn=True)
    if horizon > total and total >= 10:
        return warned(f"{evidence}: the decay is never reached, because averaging warms up for the whole run", fix)
    return warned(f"{evidence}: it hardly differs from the weights", fix) if config.ema < 0.5 else passed(evidence)


def norm_statistics(context: CheckContext) -> Result:
    """BatchNorm that cannot work: momentum 0 or 1, a large eps, or batches of one sample."""
    named = context.model.named_modules()
    norms = {name: module for name, module in named if isinstance(module, BATCH_NORM)}
    if not norms:
        return skipped("the model has no BatchNorm")
    plan, steps = context.training.plan, context.training.total_steps
    size = plan.batch_size
    for name, norm in norms.items():
        momentum = norm.momentum
        if norm.track_running_stats and momentum is not None:
            if momentum <= 0 or (momentum * steps < 0.5 and momentum < 0.01):
                evidence = f"momentum={momentum:g} of {name}: its statistics keep their initial values"
                return failed(f"{evidence} in {steps:,} steps", _MOMENTUM)
            if momentum >= 0.9:
                evidence = f"momentum={momentum:g} of {name}: its statistics are those of the last batch"
                return graded(evidence, _MOMENTUM, fail=momentum >= 0.99, warn=True)
        if norm.eps > 0.05:
            return warned(f"eps={norm.eps:g} of {name} is as large as the variance itself", "eps=1e-5")
    evidence = f"data.batch_size={size} for {len(norms)} BatchNorm layers"
    if size == 1:
        return failed(evidence, "a larger batch, or GroupNorm")
    if size < 4:
        return warned(evidence, "a batch of 16 or more, or GroupNorm")
    if not plan.drop_last and plan.limit is None and plan.samples % size == 1 and plan.samples > size:
        evidence = f"the last batch of an epoch has one sample, for {len(norms)} BatchNorm layers"
        return warned(evidence, "data.drop_last=true, or another data.batch_size")
    return passed(f"{len(norms)} layers, batches of {size}")


class _DropoutCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the share of values that each dropout call of any kind drops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rates: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in ("bernoulli_", "bernoulli") and len(args) > 1 and isinstance(args[1], float):
            self.rates.append(1 - args[1])
        elif name == "native_dropout" and isinstance(args[1], float):
            self.rates.append(1 - (1 - args[1]))
        return func(*args, **(kwargs or {}))


def dropout_rate(context: CheckContext) -> Result:
    """Dropout, as a layer or a function, that drops almost everything."""
    context.training.state.train()
    calls = _DropoutCalls()
    with calls, torch.no_grad():
        context.model(context.batch.images)
    layers = [(name, module) for name, module in context.model.named_modules() if isinstance(module, DROPOUT)]
    rates = {name: float(module.p) for name, module in layers if module.p > 0}
    rates |= {f"number {place} in forward": rate for place, rate in enumerate(calls.rates)}
    if not rates:
        return passed("there is none")
    name = max(rates, key=lambda each: rates[each])
    evidence = f"up to {rates[name]:.0%} of the values are dropped ({name})"
    fix = "a dropout of 0.1 to 0.5; p is the share that is dropped, not the share that is kept"
    return graded(evidence, fix, fail=rates[name] >= _USELESS, warn=rates[name] >= _EXTREME)


def epoch_length(context: CheckContext) -> Result:
    """Settings that leave few optimizer steps, or leave most samples out of an epoch."""
    plan, total = context.training.plan, context.training.total_steps
    if plan.accumulate > plan.batches:
        evidence = f"accumulate={plan.accumulate} is more than the {plan.batches} batches of an epoch: one step"
        return warned(evidence, "a smaller accumulate or data.batch_size")
    used = sum(plan.size(batch) for batch in range(plan.batches)) if plan.limit is None else plan.samples
    if plan.drop_last and used < 0.75 * plan.samples:
        evidence = f"data.drop_last=true leaves {plan.samples - used:,} of {plan.samples:,} samples out of each epoch"
        return warned(evidence, "data.drop_last=false, or a smaller data.batch_size")
    if plan.batch_size > plan.samples and plan.samples > 1 and total < 10:
        evidence = f"data.batch_size={plan.batch_size} is more than the {plan.samples:,} training samples: {total} steps in all"
        return warned(evidence, "a smaller data.batch_size, or more epochs")
    return passed(f"{plan.steps:,} steps an epoch, {total:,} in all")
