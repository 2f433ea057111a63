"""Checks of an optimizer step of the run: what it starts with, where it goes, and what callbacks and evaluations make of it."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.measured import Step, held_out_loader, hooked_gradients, measure_step
from runner.lab.check.result import Result, check, failed, graded, need, none_of


def _step(context: CheckContext) -> Step:
    return context.cached(measure_step)


@check("step", any_task=True)
def stale_gradients(context: CheckContext) -> Result:
    """Gradients of an earlier step that are left when the next one begins: zero_grad is missing or undone."""
    fix = "let no callback, hook or optimizer keep .grad; give the optimizer all parameters"
    if stale := _step(context).stale:
        return none_of(stale, "gradients are not zero when the second step begins", fix, "")
    what = "gradients of a loss times zero are not zero"
    return none_of(context.cached(hooked_gradients), what, "let no hook accumulate gradients", "zero after a step")


@check("step", any_task=True)
def mode_in_training(context: CheckContext) -> Result:
    """Training steps in evaluation mode, for example after an evaluation in a callback."""
    what, fix = (
        "modules are in evaluation mode when a step begins",
        "call model.train() after whatever calls model.eval()",
    )
    return none_of(sorted(_step(context).in_evaluation), what, fix, "in training mode after a step and an evaluation")


@check("step", any_task=True)
def evaluation_leaves_state(context: CheckContext) -> Result:
    """An evaluation that changes weights or buffers."""
    training = context.training

    def tensors() -> dict[str, Tensor]:
        every = dict(context.model.named_parameters()) | dict(context.model.named_buffers())
        return {name: tensor.detach().clone().float() for name, tensor in every.items()}

    before = tensors()
    training.model.eval()
    # Not `evaluate`, which restores buffers.
    with torch.no_grad(), training.precision.autocast():
        for batch in map(context.shortened, held_out_loader(context).batches(0, 0, 1)):
            context.evaluated(batch.data)
    after = tensors()
    changed = [
        name
        for name, new in after.items()
        if name not in before
        or before[name].shape != new.shape
        or not torch.allclose(before[name], new, 0.0, 0.0, equal_nan=True)
    ]
    fix = "change buffers in forward only `if self.training`"
    return none_of(changed, f"of {len(after)} tensors change", fix, f"{len(after)} tensors are unchanged")


@check("step")
def step_direction(context: CheckContext) -> Result:
    """An optimizer whose step does not follow the gradients: uphill, at random, or put back."""
    downhill = _step(context).downhill
    need(downhill, "no large weight moves and has a gradient")
    together = math.fsum(downhill.values()) / math.sqrt(len(downhill))
    uphill = [name for name, errors in downhill.items() if errors < -LIMITS.downhill]
    evidence = (
        f"{len(downhill) - len(uphill)} of {len(downhill)} weights do not move uphill; all together move against "
    )
    evidence += f"their gradients by {together:.3g} standard errors"
    fix = "step against the gradients: weight -= lr * gradient; see optimizer.maximize"
    return graded(evidence, fix, fail=bool(uphill) or together < LIMITS.downhill)


@check("step")
def callbacks_effect(context: CheckContext) -> Result:
    """Callbacks that undo a step, change the weights by far more than it, or lower the learning rate."""
    step, fix = _step(context), "check what the callbacks do to weights and learning rates"
    need(step.own_callbacks, "there is no custom callback")
    evidence = f"{step.left:.2g} of a step is left after callbacks and evaluation, which move the weights by {step.pushed:.2g} "
    evidence += f"steps; the learning rate is {step.slowed:.2g} times that before"
    if step.left < LIMITS.undone:
        return failed(evidence, fix)
    return graded(evidence, fix, warn=step.pushed > LIMITS.changed or step.slowed < LIMITS.undone)


@check("step", any_task=True)
def step_size(context: CheckContext) -> Result:
    """Steps so small that no weight changes in the whole run, or larger than the weights themselves."""
    step, clip, total = _step(context), context.config.grad_clip, context.training.total_steps
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
        if clip.norm < 1e-4 * step.norm and not context.adam:
            return failed(evidence, fix)
    elif clip.value is not None or clip.agc is not None:
        fix = "larger grad_clip.value and grad_clip.agc, or null"
    still = sum(each * run < LIMITS.stuck for each in step.moved.values())
    if (clip.norm, clip.value, clip.agc) != (None, None, None) and 2 * still > len(step.moved):
        return failed(f"{evidence}; {still} of {len(step.moved)} weights hardly move", fix)
    if reach < LIMITS.slow:
        return graded(evidence, fix, fail=reach < LIMITS.stuck, warn=True)
    fix = "a smaller optimizer.lr: weights should move by about 0.001 of their size in a step"
    fast = middle > (LIMITS.fast if context.adam else LIMITS.fast_sgd)
    return graded(evidence, fix, fail=fast and high > LIMITS.fast_fail, warn=fast)
