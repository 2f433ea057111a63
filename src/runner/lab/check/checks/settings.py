"""Checks of settings that cannot work: of the optimizer, its schedule, averaging, norms and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from runner.base.errors import UserError
from runner.lab.check.context import ADAM, BATCH_NORM, DROPOUT, CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.result import NotApplicable, Result, check, failed, graded, join_names, need, passed, warned
from runner.run.metrics import better

_L2 = ("SGD", "Adam", "RMSprop", "NAdam", "RAdam", "Adamax")  # that add weight decay to the gradient


@check("settings", any_task=True)
def optimizer_settings(context: CheckContext) -> Result:
    """A learning rate, momentum, betas, eps or weight decay that no training works with."""
    optimizer, steps = context.training.state.optimizer, context.training.total_steps
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    faults = [fault for group in groups for fault in _group_faults(group, kind, steps)]
    for severe, result in ((True, failed), (False, warned)):
        if found := {evidence: fix for wrong, bad, evidence, fix in faults if wrong and bad == severe}:
            return result(join_names(list(found)), next(iter(found.values())))
    low, high = (pick(float(group["initial_lr"]) for group in groups) for pick in (min, max))
    return passed(f"{kind} with lr {low:g}" + (f" to {high:g}" if high > low else ""))


def _group_faults(group: dict[str, Any], kind: str, steps: int) -> Iterator[tuple[bool, bool, str, str]]:
    """For each fault that a parameter group can have: whether it does, whether it is severe, evidence and fix."""
    rate, decay = float(group["initial_lr"]), float(group.get("weight_decay") or 0.0)
    momentum, eps = float(group.get("momentum") or 0.0), float(group.get("eps") or 0.0)
    dampening, taken = float(group.get("dampening") or 0.0), rate * decay
    first, second = map(float, (group.get("betas") or (0.0, 1.0))[:2])
    adam, sgd = kind.lower() in ADAM, kind == "SGD"
    largest = 100 * max(1e-3, 1 - momentum) if sgd else 0.05 if adam or kind == "RMSprop" else math.inf
    usual = "0.001 to 1 is usual" if sgd else "0.0001 to 0.01 is usual for it"
    large = f"lr={rate:g} with momentum {momentum:g}" if sgd else f"lr={rate:g} for {kind}"
    yield rate == 0, False, "lr is 0: nothing is trained", "a positive optimizer.lr"
    yield rate >= largest, rate >= (100 if sgd else 0.5), large, usual
    yield bool(group.get("maximize")), True, "maximize=true: the loss rises", "optimizer.maximize=false"
    yield momentum >= 1, True, f"momentum={momentum:g}: no step is ever forgotten", "optimizer.momentum=0.9"
    blocked = dampening >= 0.99 and momentum != 0
    yield blocked, True, f"dampening={dampening:g}: no gradient reaches the momentum", "optimizer.dampening=0"
    yield first > second, False, f"betas=[{first:g}, {second:g}]", "the other way round: [0.9, 0.999]"
    for name, average in (("momentum", momentum), ("betas[0]", min(first, second))):
        too_long = 0.99 < average < 1 and 1 - average < 2 / max(4, steps)
        evidence = f"{name}={average:g} averages more than half of the {steps:,} steps of the run"
        yield too_long, False, evidence, "0.9 is usual"
    faint = f"eps={eps:g} is more than most gradients, so steps shrink with them"
    yield adam and eps > 1e-3, False, faint, "optimizer.eps=1e-8"
    shrinks = f"weight_decay={decay:g} takes {min(1.0, taken):.1%} off every weight in each step at lr={rate:g}"
    yield taken >= 2e-3, taken >= 0.05, shrinks, "a smaller optimizer.weight_decay: 0.0001 to 0.1 is usual"
    l2 = kind in _L2 and not group.get("decoupled_weight_decay", False)
    exceeds = f"weight_decay={decay:g} of {kind} is added to the gradient, where it exceeds that of the loss"
    yield decay >= 0.1 and l2 and taken < 2e-3, False, exceeds, "0.0001 to 0.001 is usual for it, or optimizer=adamw"


@check("settings", any_task=True)
def schedule(context: CheckContext) -> Result:
    """A schedule that never reaches the learning rate, leaves it at once, or far exceeds it; a warm-up longer than the run."""
    total = context.training.total_steps
    need(total >= 10, f"the run has {total} steps")
    factors = context.factors
    top, first, last = max(factors), factors[0], factors[-1]
    active = sum(each > 0.01 * top for each in factors) / len(factors)
    peak = factors.index(top) / len(factors)
    idle = f"the rate is practically 0 in {1 - active:.0%} of the run"
    rising = last > 2 * max(factors[: max(1, len(factors) // 2)])
    evidence = f"at most {top:.3g} times the rate, first {first:.3g} and last {last:.3g}, in {total:,} steps"
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


@check("settings", any_task=True)
def averaging(context: CheckContext) -> Result:
    """A weight average that never moves away from the initial weights."""
    ema, warmup, total = context.config.ema, context.config.averaging.warmup, context.training.total_steps
    if ema is None:
        raise NotApplicable("ema is not set")
    share = math.prod(min(ema, (1 + step) / (10 + step)) if warmup else ema for step in range(min(total, 200_000)))
    evidence = f"ema={ema:g} averages {1 / (1 - ema):,.0f} of {total:,} steps; {share:.1%} of it are initial weights"
    fix = f"ema={1 - 10 / max(20, total):.4g} averages a tenth of the run, and averaging.warmup=true"
    return graded(evidence, fix, fail=share > LIMITS.initial_fail, warn=share > LIMITS.initial_warn)


@check("settings", any_task=True)
def norm_statistics(context: CheckContext) -> Result:
    """BatchNorm that cannot work: momentum 0 or 1, a large eps, or batches of one sample."""
    norms = {name: each for name, each in context.model.named_modules() if isinstance(each, BATCH_NORM)}
    need(norms, "the model has no BatchNorm")
    plan, steps = context.training.plan, context.training.total_steps
    size = plan.batch_size
    fix = "momentum=0.1; in PyTorch it is the share of the new batch, in TensorFlow that of the old ones"
    for name, norm in norms.items():
        momentum = norm.momentum
        if norm.track_running_stats and momentum is not None:
            evidence = f"momentum={momentum:g} of {name}: its statistics"
            if momentum <= 0 or (momentum * steps < 0.5 and momentum < 0.01):
                return failed(f"{evidence} keep their initial values in {steps:,} steps", fix)
            if momentum >= 0.9:
                return graded(f"{evidence} are those of the last batch", fix, fail=momentum >= 0.99, warn=True)
        if norm.eps > 0.05:
            return warned(f"eps={norm.eps:g} of {name} is as large as the variance itself", "eps=1e-5")
    rest = 0 if plan.drop_last or plan.limit is not None else plan.samples % size
    evidence = f"data.batch_size={size} for {len(norms)} BatchNorm layers"
    if rest == 1 and size >= 4:
        evidence += ", and the last batch of an epoch has one sample"
    fix = "a batch of 16 or more, GroupNorm, or data.drop_last=true"
    return graded(evidence, fix, fail=size == 1, warn=size < 4 or (rest == 1 and plan.samples > size))


@check("settings", any_task=True)
def dropout_rate(context: CheckContext) -> Result:
    """Dropout layers that drop almost everything."""
    rates = {name: float(each.p) for name, each in context.model.named_modules() if isinstance(each, DROPOUT)}
    if not any(rates.values()):
        return passed("there is none")
    name = max(rates, key=rates.__getitem__)
    evidence = f"up to {rates[name]:.0%} of the values are dropped ({name})"
    fix = "a dropout of 0.1 to 0.5; p is the share that is dropped, not the share that is kept"
    return graded(evidence, fix, fail=rates[name] >= LIMITS.dropout_fail, warn=rates[name] >= LIMITS.dropout_warn)


@check("settings", any_task=True)
def epoch_length(context: CheckContext) -> Result:
    """Settings that leave few optimizer steps, or leave most samples out of an epoch."""
    plan, total = context.training.plan, context.training.total_steps
    if plan.accumulate > plan.batches:
        evidence = f"accumulate={plan.accumulate} is more than the {plan.batches} batches of an epoch: one step"
        return warned(evidence, "a smaller accumulate or data.batch_size")
    used = sum(plan.size(batch) for batch in range(plan.batches)) if plan.limit is None else plan.samples
    if plan.drop_last and used <= 0.8 * plan.samples:
        evidence = f"data.drop_last=true leaves {plan.samples - used:,} of {plan.samples:,} samples out of each epoch"
        return warned(evidence, "data.drop_last=false, or a smaller data.batch_size")
    if plan.batch_size > plan.samples and plan.samples > 1 and total < 10:
        evidence = f"data.batch_size={plan.batch_size} is more than the {plan.samples:,} training samples: {total} steps in all"
        return warned(evidence, "a smaller data.batch_size, or more epochs")
    return passed(f"{plan.steps:,} steps an epoch, {total:,} in all")


@check("settings", any_task=True)
def metric_direction(context: CheckContext) -> Result:
    """A mode that takes the worst value of a metric for the best."""
    config, training = context.config, context.training
    given = {"checkpoint.mode": config.checkpoint.mode, "scheduler.mode": (config.scheduler or {}).get("mode")}
    given = {key: mode for key, mode in given.items() if mode in ("min", "max")}
    need(given, "no mode is set")
    name = training.monitor.metric
    need(name, "the task names no metric")
    try:
        right = better("checkpoint.mode", name, config, training.task)
    except UserError as error:
        raise NotApplicable(f"{name} does not say which of its values are better") from error
    wrong = [f"{key}={mode}" for key, mode in given.items() if mode != right]
    evidence = f"{join_names(wrong) or right} for {name}, whose {right} is best"
    return graded(evidence, f"{right}, or null", fail=bool(wrong))
