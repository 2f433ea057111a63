"""Checks of what trains: the model and what reaches its parameters, a step and where it goes, and settings that cannot work."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from runner.base.errors import UserError
from runner.lab.check.context import ADAM, BATCH_NORM, DROPOUT, CheckContext
from runner.lab.check.measured import hooked_gradients, measure_signals, measure_step
from runner.lab.check.result import LIMITS, Result, check, failed, graded, join_names, need, none_of, passed, warned
from runner.lab.check.sample import digest_of
from runner.run.finetune import Modules
from runner.run.metrics import better
from runner.tracking.formats import amount

_L2 = ("SGD", "Adam", "RMSprop", "NAdam", "RAdam", "Adamax")  # that add weight decay to the gradient


@check("model", any_task=True)
def frozen_parameters(context: CheckContext) -> Result:
    """Parameters that do not require gradients, although the config freezes nothing."""
    parameters = dict(context.model.named_parameters())
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    frozen, total = [name for name in parameters if name not in trained], len(parameters)
    what, fix = f"of {total} parameters do not require gradients", "requires_grad=True, or freeze=... if intended"
    if frozen and (context.config.freeze is not None or context.config.adapters.rank is not None):
        return passed(f"{len(frozen)} {what}: {join_names(frozen)}, as set by `freeze` or `adapters`")
    if frozen and not context.supervised:
        # Whole modules that the task adds are frozen on purpose, and so are copies of trained weights, as of a teacher
        parts, copied = {"model", *(name.split(".")[0] for name in trained)}, {*map(digest_of, trained.values())}
        frozen = [each for each in frozen if not isinstance(context.model, Modules) or each.split(".")[0] in parts]
        frozen = [each for each in frozen if digest_of(parameters[each]) not in copied]
    return none_of(frozen, what, fix, f"{len(trained)} of {total} require gradients", warn=True)


@check("model", any_task=True)
def optimizer_parameters(context: CheckContext) -> Result:
    """Trainable parameters that the optimizer does not have."""
    groups = context.training.state.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    trainable = {name: id(each) for name, each in context.training.state.named_parameters() if each.requires_grad}
    missing = [name for name, parameter in trainable.items() if parameter not in known]
    what, fix = f"of {len(trainable)} are in no parameter group", "pass all parameters on to the optimizer"
    return none_of(missing, what, fix, f"all {len(trainable)} are in its {amount(len(groups), 'group')}")


@check("model", any_task=True)
def unregistered_parameters(context: CheckContext) -> Result:
    """Tensors that require gradients but are not parameters: layers in lists or dicts, plain tensors, layers made in forward."""
    fix = "nn.ModuleList, nn.ModuleDict or nn.Parameter, created in __init__: others are neither trained nor saved"
    what, otherwise = "tensors that require gradients are not in the optimizer", "the loss depends on no such tensor"
    return none_of(measure_signals(context).loose, what, fix, otherwise)


@check("model", any_task=True)
def missing_gradients(context: CheckContext) -> Result:
    """Trainable parameters without a gradient: cut off by detach, no_grad, .data or .item, or a branch that is never used."""
    missing, model, cut_off = measure_signals(context).missing, context.model, list[str]()
    if not context.supervised:
        fix = "use them in the step of the task, freeze or remove them"
        return none_of(missing, "parameters get no gradient in a step", fix, "all get a gradient", warn=True)
    model.eval()
    with torch.no_grad():
        before = model(context.batch.images) if missing else None
        for name in missing:
            parameter = model.get_parameter(name)
            kept = parameter.clone()
            # Large random changes: a small one may hide behind a rectifier.
            parameter.add_(torch.randn_like(parameter)).mul_(3)
            if before is not None and not torch.equal(before, model(context.batch.images)):
                cut_off.append(name)
            parameter.copy_(kept)
    if cut_off:
        fix = "remove detach(), no_grad, .data, .item() or numpy() before the loss"
        return none_of(cut_off, "parameters change the outputs and get no gradient", fix, "")
    fix = "use the branch in forward, or remove it"
    return none_of(missing, "parameters do not change the outputs", fix, "all get a gradient", warn=True)


@check("model", any_task=True)
def equal_units(context: CheckContext) -> Result:
    """Units of a layer that start equal, so that they stay equal or alike: constant initial weights."""
    signals, fix = measure_signals(context), "random initial weights (nn.init.kaiming_normal_)"
    need(count := len(signals.gradients), "the loss has no gradient")
    if signals.equal:
        return none_of(signals.equal, f"of {count} weights have equal units that get equal gradients", fix, "")
    what, otherwise = f"of {count} weights have equal units", f"the units of {count} weights differ"
    return none_of(signals.similar, what, fix, otherwise, warn=True)


@check("model", any_task=True)
def bias_before_norm(context: CheckContext) -> Result:
    """A bias without effect, because a norm follows."""
    fix = "bias=False in the layer before the norm"
    biased = measure_signals(context).biased
    return none_of(biased, "have no effect", fix, "no layer before a norm has one", warn=True)


@check("model", any_task=True)
def repeated_norms(context: CheckContext) -> Result:
    """BatchNorm layers that update their running statistics several times in a step."""
    calls, fix = measure_signals(context).norm_calls, "a BatchNorm for each place, or a single call"
    need(calls, "the model has no BatchNorm with running statistics")
    often = [name for name, count in calls.items() if count > 1]
    what = "BatchNorm layers run several times in a forward pass"
    return none_of(often, what, fix, f"{len(calls)} run once", warn=True)


@check("model", any_task=True)
def gradient_scale(context: CheckContext) -> Result:
    """Gradients that vanish or explode with the depth of the model."""
    gradients = measure_signals(context).gradients
    need(len(gradients) >= 2, "fewer than two weights get a gradient")
    ordered = sorted((size if math.isfinite(size) else math.inf, name) for name, size in gradients)
    (least, low), (most, high) = ordered[0], ordered[-1]
    evidence = f"{most:.3g} of {high}, {least:.3g} of {low}, of {len(gradients)}"
    fix = "initial weights, normalization layers or shortcuts; grad_clip.norm=1.0 against exploding gradients"
    if not context.supervised:  # a batch need not reach every part of a model, such as that for large objects
        return graded(evidence, fix, fail=not 0 < most < 100 * LIMITS.gradient_large)
    if zero := [name for name, gradient in gradients if gradient == 0]:
        weights = [p for name, p in context.model.named_parameters() if not name.endswith("bias")]
        need(all(bool(p.any()) for p in weights), "a weight starts at zero, which lets no gradient through at first")
        fix = "see reachable-targets: a ReLU that is always 0, a saturated output, a product with 0"
        return failed(f"the gradient of {len(zero)} of {len(gradients)} weights is zero: {join_names(zero)}", fix)
    evidence, small, large = f"root mean square {evidence} weights", least / most, most / LIMITS.gradient_large
    fail = small < 1 / LIMITS.gradient_fail or large > 100
    return graded(evidence, fix, fail=fail, warn=small < 1 / LIMITS.gradient_warn or large > 1)


@check("step", any_task=True)
def stale_gradients(context: CheckContext) -> Result:
    """Gradients of an earlier step that are left when the next one begins: zero_grad is missing or undone."""
    if stale := measure_step(context).stale:
        fix = "let no callback, hook or optimizer keep .grad; give the optimizer all parameters"
        return none_of(stale, "gradients are not zero when the second step begins", fix, "")
    what, fix = "gradients of a loss times zero are not zero", "let no hook accumulate gradients"
    return none_of(hooked_gradients(context), what, fix, "zero after a step")


@check("step", any_task=True)
def mode_in_training(context: CheckContext) -> Result:
    """Training steps in evaluation mode, for example after an evaluation in a callback."""
    what = "modules are in evaluation mode when a step begins"
    fix = "call model.train() after whatever calls model.eval()"
    stuck = sorted(measure_step(context).in_evaluation)
    return none_of(stuck, what, fix, "in training mode after a step and an evaluation")


@check("step", any_task=True)
def evaluation_leaves_state(context: CheckContext) -> Result:
    """An evaluation that changes weights or buffers."""
    training = context.training

    def tensors() -> dict[str, Any]:
        every = dict(context.model.named_parameters()) | dict(context.model.named_buffers())
        return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in every.items()}

    before = tensors()
    training.model.eval()
    # Not `evaluate`, which restores buffers.
    with torch.no_grad(), training.precision.autocast():
        for batch in map(context.shortened, context.held_out.loader.batches(0, 0, 1)):
            context.evaluated(batch.data)
    after = tensors()
    changed = [name for name, new in after.items() if not np.array_equal(before.get(name, ()), new, equal_nan=True)]
    fix = "change buffers in forward only `if self.training`"
    return none_of(changed, f"of {len(after)} tensors change", fix, f"{len(after)} tensors are unchanged")


@check("step")
def step_direction(context: CheckContext) -> Result:
    """An optimizer whose step does not follow the gradients: uphill, at random, or put back."""
    downhill = measure_step(context).downhill
    need(downhill, "no large weight moves and has a gradient")
    together = math.fsum(downhill.values()) / math.sqrt(len(downhill))
    uphill = sum(errors < -LIMITS.downhill for errors in downhill.values())
    evidence = f"{len(downhill) - uphill} of {len(downhill)} weights do not move uphill; "
    evidence += f"all together move against their gradients by {together:.3g} standard errors"
    fix = "step against the gradients: weight -= lr * gradient; see optimizer.maximize"
    return graded(evidence, fix, fail=uphill > 0 or together < LIMITS.downhill)


@check("step")
def callbacks_effect(context: CheckContext) -> Result:
    """Callbacks that undo a step, change the weights by far more than it, or lower the learning rate."""
    step, fix = measure_step(context), "check what the callbacks do to weights and learning rates"
    need(step.own_callbacks, "there is no custom callback")
    evidence = f"{step.left:.2g} of a step is left after callbacks and evaluation, which move the weights by {step.pushed:.2g} "
    evidence += f"steps; the learning rate is {step.slowed:.2g} times that before"
    warn = step.pushed > LIMITS.changed or step.slowed < LIMITS.undone
    return graded(evidence, fix, fail=step.left < LIMITS.undone, warn=warn)


@check("step", any_task=True)
def step_size(context: CheckContext) -> Result:
    """Steps so small that no weight changes in the whole run, or larger than the weights themselves."""
    step, clip, total = measure_step(context), context.config.grad_clip, context.training.total_steps
    adam = type(context.training.state.optimizer).__name__.lower() in ADAM
    need(step.moved, "the model has no weights of two dimensions")
    if not all(map(math.isfinite, step.moved.values())):
        return failed("weights are not finite after a step", "a smaller optimizer.lr, or grad_clip.norm=1.0")
    run = statistics.fmean(context.factors) * total  # in steps at the full rate
    high, middle = max(step.moved.values()), statistics.median_high(step.moved.values())
    reach = high * run
    evidence = f"weights move by up to {high:.2g} of their size in a step at the full rate, by {reach:.2g} in all {total:,} steps"
    fix = "a larger optimizer.lr, or a longer run"
    if clip.norm is not None and clip.norm < 0.01 * step.norm:
        evidence += f"; gradients with a norm of {step.norm:.3g} are clipped to grad_clip.norm={clip.norm:g}"
        fix = f"grad_clip.norm of about {step.norm:.1g}, or null"
        if clip.norm < 1e-4 * step.norm and not adam:
            return failed(evidence, fix)
    elif clip.value is not None or clip.agc is not None:
        fix = "larger grad_clip.value and grad_clip.agc, or null"
    still = sum(each * run < LIMITS.stuck for each in step.moved.values())
    if (clip.norm, clip.value, clip.agc) != (None, None, None) and 2 * still > len(step.moved):
        return failed(f"{evidence}; {still} of {len(step.moved)} weights hardly move", fix)
    if reach < LIMITS.slow:
        return graded(evidence, fix, fail=reach < LIMITS.stuck, warn=True)
    fix = "a smaller optimizer.lr: weights should move by about 0.001 of their size in a step"
    fast = middle > (LIMITS.fast if adam else LIMITS.fast_sgd)
    return graded(evidence, fix, fail=fast and high > LIMITS.fast_fail, warn=fast)


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
    need(ema is not None, "ema is not set")
    assert ema is not None
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
    name, right = training.monitor.metric, ""
    need(name, "the task names no metric")
    with contextlib.suppress(UserError):
        right = better("checkpoint.mode", name, config, training.task, training.scalars)
    need(right, f"{name} does not say which of its values are better")
    wrong = [f"{key}={mode}" for key, mode in given.items() if mode != right]
    evidence = f"{join_names(wrong) or right} for {name}, whose {right} is best"
    return graded(evidence, f"{right}, or null", fail=bool(wrong))
