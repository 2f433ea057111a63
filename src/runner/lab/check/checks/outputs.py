"""Checks of the model's outputs: whether they are logits, which samples they depend on, and what they can reach."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.checks.loss import takes_logits
from runner.lab.check.context import BATCH_NORM, DROPOUT, CheckContext
from runner.lab.check.measured import measure_signals
from runner.lab.check.result import LIMITS, Result, check, failed, graded, join_names, need, passed, warned
from runner.lab.check.sample import is_classes

_CERTAIN = 20.0  # a logit that stands for certainty
_PUSHED = (1e-2, 1e2, 1e4)  # sizes of random weights in the last layer
_SAMPLES = 32  # of the batch, for these weights
_PASSES = 8  # with other random numbers each, for the mean of outputs in training mode


def _evaluated(context: CheckContext, images: Tensor, seed: int = 0) -> Tensor:
    """Outputs in evaluation mode, float32 (B, outputs); a dropout that is still on zeroes the same for the same seed."""
    context.model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        outputs: Tensor = context.model(images)
    return outputs.float()


@check("outputs")
def logits(context: CheckContext) -> Result:
    """Softmax, log-softmax or sigmoid before a loss that expects logits."""
    outputs, targets = _evaluated(context, context.batch.images), context.targets(context.batch)
    of_classes = outputs.ndim == 2 and outputs.shape[1] >= 2 and not targets.is_floating_point()
    need(of_classes, "the outputs are not those of classes")
    low, high = float(outputs.min()), float(outputs.max())
    probabilities = low >= 0 and bool((outputs.sum(1) - 1).abs().max() < 1e-3)
    if not (probabilities or (low > 0 and high < 1)):
        logs = high <= 1e-6 and bool((outputs.exp().sum(1) - 1).abs().max() < 1e-3)
        return passed(f"values from {low:.3g} to {high:.3g}" + (", logarithms of probabilities" if logs else ""))
    right = F.one_hot(targets, outputs.shape[1]).to(outputs)
    what = "rows that sum to 1: a softmax" if probabilities else f"values from {low:.3g} to {high:.3g}: a sigmoid"
    loss = context.training.loss
    need(takes_logits(context), f"{what}, and the loss takes nothing else")
    with torch.no_grad():
        best, certain = float(loss(right, targets)), float(loss((2 * right - 1) * _CERTAIN, targets))
    if best <= certain + 0.05:
        return passed(f"{what}, and the loss is lowest at probabilities")
    evidence = f"{what}; with every answer right the loss is {best:.3g}, with logits {certain:.3g}"
    return failed(evidence, "remove the last activation: the loss applies its own")


@check("outputs")
def sample_mixing(context: CheckContext) -> Result:
    """Outputs of a sample that depend on other samples of its batch, for example after view instead of permute."""
    images, others, own = context.batch.images[:8], 0.0, 0.0
    before = _evaluated(context, images)
    for place in (0, len(images) // 2):
        changed = images.clone()
        changed[place] = images[place].flip(-1) * -1.5 + 0.5
        apart = (_evaluated(context, changed) - before).abs().flatten(1).amax(1)
        own, apart[place] = max(own, float(apart[place])), 0
        others = max(others, float(apart.max()))
    need(max(own, others) > 1e-9, "the outputs do not depend on the images before training")
    evidence = f"changing one image changes the outputs of others by {others:.3g}, its own by {own:.3g}"
    fix = "keep the batch dimension first: permute or flatten(1) instead of view or reshape across samples"
    return graded(evidence, fix, fail=others > LIMITS.mixed * own)


@check("outputs", any_task=True)
def modes(context: CheckContext) -> Result:
    """Modules that stay in training mode in an evaluation, or in evaluation mode in training."""
    model, fix = context.model, "let train(mode) pass the mode on to all modules, and do not set it in forward"
    for training, stuck_in, call in ((False, "training", "eval"), (True, "evaluation", "train")):
        model.train(training)
        with torch.set_grad_enabled(training):  # which a gradient penalty needs
            (context.training.steps if training else context.evaluated)(context.batch.data)  # may change modes
        stuck = {name or "the model": each for name, each in model.named_modules() if each.training != training}
        if stuck:
            evidence = f"{len(stuck)} modules stay in {stuck_in} mode after {call}(): {join_names(list(stuck))}"
            if not training or "the model" in stuck or any(isinstance(each, DROPOUT) for each in stuck.values()):
                return failed(evidence, fix)
            return warned(evidence, f"{fix}; unless they are meant to be frozen")
    count = sum(isinstance(each, BATCH_NORM) or (isinstance(each, DROPOUT) and each.p > 0) for each in model.modules())
    return passed(f"both modes reach every module, of which {count} are BatchNorm or dropout")


@check("outputs")
def repeatable_evaluation(context: CheckContext) -> Result:
    """Outputs that differ when the same images are evaluated again, for example with dropout that is always on."""
    first = _evaluated(context, context.batch.images, seed=1)
    apart = float((_evaluated(context, context.batch.images, seed=2) - first).abs().max())
    size = max(float(first.abs().max()), 1e-12)
    evidence = f"two evaluations of the same images differ by {apart:.3g}, of {size:.3g}"
    fix = "F.dropout(x, p, self.training) or nn.Dropout; no randomness in evaluation mode"
    return graded(evidence, fix, fail=apart > LIMITS.repeated * size)


def _last_weight(context: CheckContext) -> Tensor:
    """The weight of the last layer, once BatchNorm has the statistics of the batch."""
    name = measure_signals(context).last_layer
    need(name, "the last layer cannot be found")
    context.disable_dropout()
    with torch.no_grad():
        context.model(context.batch.images)
    weight: Tensor = context.model.get_submodule(name).weight  # type: ignore[assignment]
    return weight


@check("outputs")
def zero_input(context: CheckContext) -> Result:
    """Images that make no difference: outputs that are the same for zero images."""
    images = context.batch.images
    need(bool((images != images[:1]).any()), "all images are equal")
    weight = _last_weight(context)
    context.disable_noise()
    with torch.no_grad():  # weights may start at zero
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        with_images, without = (context.model(each).float() for each in (images, torch.zeros_like(images)))
    apart, size = float((with_images - without).abs().max()), max(float(with_images.abs().max()), 1e-12)
    evidence = "with random weights in the last layer, outputs of images and of zeros "
    evidence += f"differ by {apart:.3g}, of {size:.3g}"
    fix = "check what reaches the model: empty images, dead units, unused inputs"
    return graded(evidence, fix, fail=not apart > LIMITS.used * size)


@check("outputs")
def output_scale(context: CheckContext) -> Result:
    """Outputs of another scale in training mode than in evaluation mode, for example with dropout that is not rescaled."""
    model, images = context.model, context.batch.images
    norms = [each for each in model.modules() if isinstance(each, BATCH_NORM) and each.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    context.training.state.train()
    # Evaluations use the statistics that training has seen
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        with torch.no_grad():
            mean = torch.stack([model(images).double() for _ in range(_PASSES)]).mean(0)
            model.eval()
            plain = model(images).double()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    need(plain.ndim == 2, "the outputs are not one vector for each image")
    size, plain, mean = float(plain.abs().max()), plain - plain.mean(0), mean - mean.mean(0)
    need(float(plain.abs().max()) > LIMITS.varied * size, "the outputs hardly depend on the images")
    factor = float((plain * mean).sum() / plain.square().sum())
    evidence = f"outputs in training mode are {factor:.2f} times those in evaluation mode on average"
    fix = "nn.Dropout or F.dropout, which divide by 1 - p in training"
    limit = LIMITS.mode_scale_norms if norms else LIMITS.mode_scale
    return graded(evidence, fix, warn=not 1 / limit <= factor <= limit)


def _output_bounds(context: CheckContext) -> tuple[float, float]:
    """Lowest and highest output for any weights of the last layer, infinite without a bound."""
    weight, reached = _last_weight(context), list[tuple[float, float]]()
    for size in _PUSHED:
        generator, outputs = torch.Generator().manual_seed(0), []
        for _ in range(2):
            with torch.no_grad():
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
            outputs.append(_evaluated(context, context.batch.images[:_SAMPLES]))
        reached.append((float(torch.stack(outputs).min()), float(torch.stack(outputs).max())))
    _, (low, high), (lowest, highest) = reached
    known = all(map(math.isfinite, (low, high, lowest, highest))) and lowest != highest
    need(known, "the last layer cannot be found, or does not change the outputs")
    bottom, top = min(each for each, _ in reached), max(each for _, each in reached)
    bottom = bottom if lowest > low - 0.5 * abs(low) - 1e-3 else -math.inf
    return bottom, top if highest < high + 0.5 * abs(high) + 1e-3 else math.inf


def _lowest_loss(context: CheckContext, targets: Tensor, low: float, high: float) -> float:
    """The lowest loss of outputs between two bounds, with one value for the right class and one for all others."""
    right = F.one_hot(targets, context.training.task.outputs(context.splits.classes)).float()
    low, high, loss = max(low, -_CERTAIN), min(high, _CERTAIN), context.training.loss
    inward = [share * (high - low) for share in (0.0, 0.25, 0.4, 0.5)]
    pairs = [(high - above, low + below) for above in inward for below in inward]
    with torch.no_grad():
        return min(float(loss(right * top + (1 - right) * bottom, targets)) for top, bottom in pairs)


@check("outputs")
def reachable_targets(context: CheckContext) -> Result:
    """Outputs that cannot reach the targets with any weights: a ReLU, sigmoid, tanh or log-softmax at the end."""
    low, high = bounds = _output_bounds(context)
    if math.isinf(low) and math.isinf(high):
        return passed("the outputs have no bounds")
    evidence = f"with any weights in the last layer, outputs are from {low:.3g} to {high:.3g}"
    fix = "no activation after the last layer, or targets scaled to its range"
    targets = context.targets(context.batch)
    if is_classes(targets):
        certain = (-_CERTAIN, _CERTAIN)
        need(takes_logits(context), f"{evidence}, and the loss takes nothing else")
        guess, best, floor = (_lowest_loss(context, targets, *pair) for pair in ((0.0, 0.0), bounds, certain))
        evidence += f"; with every answer right the loss is {best:.3g}, unbounded {floor:.3g}, of a guess {guess:.3g}"
        fail = best > floor + 0.15 * max(0.0, guess - floor)
        return graded(evidence, fix, fail=fail, warn=low > -1e-3 and math.isinf(high))
    values = context.targets(context.read("train", context.readable("train", 256))).float()
    margin = 1e-3 * float(values.std())
    outside = float(((values < low - margin) | (values > high + margin)).float().mean())
    return graded(f"{evidence}; {outside:.0%} of the targets are outside", fix, fail=outside > 0.01)
