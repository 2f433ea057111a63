"""Checks of settings and parts that contradict each other, the data, or the other mode of the model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from runner.build.metrics import better
from runner.config.errors import UserError
from runner.config.keys import within
from runner.verbs.check.context import BATCH_NORM, CheckContext
from runner.verbs.check.result import NotApplicable, Result, graded, join_names, need, none_of, passed, warned
from runner.verbs.check.split_stats import is_classes

_FEWEST = 32  # images that say something about all of them
_BORDER = 0.15  # share of each side; the digits of MNIST have 0.14
_PASSES = 32  # with other random numbers each, for the mean of outputs in training mode


def metric_direction(context: CheckContext) -> Result:
    """A mode that takes the worst value of a metric for the best."""
    config, training = context.config, context.training
    given = {"checkpoint.mode": config.checkpoint.mode, "scheduler.mode": (config.scheduler or {}).get("mode")}
    given = {key: mode for key, mode in given.items() if mode in ("min", "max")}
    need(given, "no mode is set")
    name = training.monitor.metric
    try:
        right = better("checkpoint.mode", name, config, training.task)
    except UserError as error:
        raise NotApplicable(f"{name} does not say which of its values are better") from error
    wrong = [f"{key}={mode}" for key, mode in given.items() if mode != right]
    evidence = f"{join_names(wrong) or right} for {name}, whose {right} is best"
    return graded(evidence, f"{right}, or null", fail=bool(wrong))


def class_weights(context: CheckContext) -> Result:
    """Class weights that favor the frequent classes."""
    counts = context.training.data.class_counts
    need(counts is not None and len(counts) > 1, "the classes are not counted")
    sizes = counts.double().clamp_min(1).log()  # type: ignore[union-attr]
    for name, buffer in context.training.loss.named_buffers():
        if "weight" not in name or buffer.shape != sizes.shape or not bool((buffer > 0).all()):
            continue
        weights = buffer.double().cpu().log()
        need(min(float(each.max() - each.min()) for each in (sizes, weights)) > 0.05, "classes or weights are equal")
        agree = float(torch.corrcoef(torch.stack([sizes.cpu(), weights]))[0, 1])
        evidence = f"the correlation of {name} of the loss with the sizes of the classes is {agree:.2f}"
        return graded(evidence, "the inverse: class_weights=balanced", warn=agree > 0.5)
    raise NotApplicable("the loss has no class weights")


def frozen_start(context: CheckContext) -> Result:
    """Most parameters frozen at random initial values, without pretrained weights."""
    config, node = context.config, context.config.model
    need(config.freeze is not None, "freeze is not set")
    need(within(str(node["_target_"]), ["runner.models"]), "a custom model may load weights itself")
    if config.init_from or config.ckpt_path or node.get("weights") or node.get("pretrained"):
        return passed("the weights are pretrained")
    sizes = Counter(dict.fromkeys((True, False), 0))
    for parameter in context.model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    share = sizes[False] / max(1, sizes.total())
    evidence = f"{share:.0%} of the parameters are frozen, and no weights are loaded"
    return graded(evidence, "init_from=, pretrained weights of the model, or freeze=null", warn=share > 0.5)


def input_size(context: CheckContext) -> Result:
    """Training images of a very different size from evaluated images."""
    batch = next(context.splits.train.loader.batches(0, 0, 1))
    train, plain = (tuple(each.shape[2:]) for each in (batch.images, context.batch.images))
    factor = (train[0] * train[1] / (plain[0] * plain[1])) ** 0.5
    evidence = f"{train[0]}x{train[1]} in training, {plain[0]}x{plain[1]} in evaluations"
    return graded(evidence, "the same size in transform.train and transform.eval", warn=not 0.75 <= factor <= 1.34)


def _samples(context: CheckContext) -> tuple[Tensor, Tensor]:
    images, targets = context.sample_images.get("train", (torch.empty(0), torch.empty(0)))
    need(len(images) >= _FEWEST, f"fewer than {_FEWEST} training images of one shape were read")
    return images, targets


def constant_areas(context: CheckContext) -> Result:
    """A channel or a border that has the same values in all images."""
    images, _ = _samples(context)
    varies = (images != images[:1]).any(0)
    need(varies.any(), "all images are equal")
    if dead := [place for place, channel in enumerate(varies) if not bool(channel.any())]:
        evidence = f"channel {join_names(dead)} is the same in all {len(images)} images"
        return warned(evidence, "images without this channel")
    margins = []
    for lines in (varies.any(0).any(1), varies.any(0).any(0)):
        places = lines.nonzero().flatten()
        margins += [int(places[0]) / len(lines), 1 - (int(places[-1]) + 1) / len(lines)]
    evidence = f"the borders that are the same in all {len(images)} images are at least {min(margins):.0%} wide"
    return graded(evidence, "crop the images", warn=min(margins) >= _BORDER)


def colorless_class(context: CheckContext) -> Result:
    """A class whose images have no color while those of the others have, or the reverse."""
    images, targets = _samples(context)
    need(images.shape[1] == 3 and is_classes(targets), "the images have no three channels, or the targets no classes")
    colored = ((images.amax(1) - images.amin(1)).flatten(1).amax(1) > 0.02).float()
    classes = [label for label, count in Counter(targets.tolist()).items() if count >= 8]
    shares = {label: float(colored[targets == label].mean()) for label in classes}
    need(len(shares) > 1, "fewer than two classes have 8 images")
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    evidence = f"{shares[low]:.0%} of class {low} and {shares[high]:.0%} of class {high} have color"
    warn = shares[low] < 0.05 and shares[high] > 0.95
    return graded(evidence, "images of all classes from the same source", warn=warn)


def repeated_norms(context: CheckContext) -> Result:
    """BatchNorm layers that update their running statistics several times in a step."""
    modules = context.model.named_modules()
    norms = {name: each for name, each in modules if isinstance(each, BATCH_NORM) and each.track_running_stats}
    need(norms, "the model has no BatchNorm with running statistics")
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, *_: object) -> None:
        calls[module] += module.training

    hooks = [each.register_forward_hook(count) for each in norms.values()]
    context.training.state.train()
    with torch.no_grad():
        context.model(context.batch.images)
    for hook in hooks:
        hook.remove()
    often = [name for name, each in norms.items() if calls[each] > 1]
    fix = "a BatchNorm for each place, or a single call"
    return none_of(often, "BatchNorm layers run several times in a forward pass", fix, f"{len(norms)} run once", "warn")


def trainable_set(context: CheckContext) -> Result:
    """Parameters whose requires_grad changes during a step or an evaluation."""
    need(context.config.freeze is None, "freeze is set")

    def trainable() -> set[str]:
        return {name for name, each in context.model.named_parameters() if each.requires_grad}

    before = trainable()
    context.training.state.train()
    loss = context.loss()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    changed = before ^ trainable()
    context.model.eval()
    with torch.no_grad():
        context.model(context.batch.images)
    context.training.state.train()
    changed |= before ^ trainable()
    fix = "freeze=..., or set requires_grad once in the constructor"
    return none_of(sorted(changed), "parameters change requires_grad", fix, f"{len(before)} stay trainable")


def output_scale(context: CheckContext) -> Result:
    """Outputs of another scale in training mode than in evaluation mode, for example with dropout that is not rescaled."""
    norms = any(isinstance(each, BATCH_NORM) and each.track_running_stats for each in context.model.modules())
    need(not norms, "the statistics of BatchNorm are not those of the data before training")
    images = context.batch.images
    with torch.no_grad():
        context.model.eval()
        plain = context.model(images).double()
        context.training.state.train()
        mean = torch.stack([context.model(images).double() for _ in range(_PASSES)]).mean(0)
    plain, mean = plain - plain.mean(0), mean - mean.mean(0)
    need(float(plain.square().sum()) > 0, "the outputs do not depend on the images")
    factor = float((plain * mean).sum() / plain.square().sum())
    evidence = f"outputs in training mode are {factor:.2f} times those in evaluation mode on average"
    fix = "nn.Dropout or F.dropout, which divide by 1 - p in training"
    return graded(evidence, fix, warn=not 0.6 <= factor <= 1.67)
