"""The best loop that plain PyTorch allows by hand, with every trick that changes no result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.cases import LOG_EVERY
from peers.work import Work

Batches = Iterator[tuple[Tensor, Tensor]]


def epochs(work: Work, model: nn.Module) -> Iterator[None]:
    """Train an epoch at a time.

    Images are normalised (and padded, where they are shifted) once, before training. Without augmentation an epoch is
    gathered at once and its batches are views; with it a batch is gathered by one index, a draw for each sample. The
    optimizer is fused, the rate is set by hand, and the loss is summed in a tensor that is read when it is logged.
    """
    optimizer = work.sgd(model, fused=True)
    group, rates = optimizer.param_groups[0], work.rates()
    images = work.normalised(padded(work.train.images, work.shift))
    targets, size, width = work.train.targets, work.case.batch_size, work.train.images.shape[-1]
    total, step, log = torch.zeros((), device=images.device), 0, []
    for _ in range(work.job.epochs):
        order = torch.randperm(len(images), device=images.device)
        if work.shift:
            batches = augmented(images, targets, order.split(size), width, work.case.flip)
        else:
            batches = zip(images[order].split(size), targets[order].split(size), strict=True)
        for inputs, classes in batches:
            group["lr"] = rates[step]
            loss = F.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                log.append(total.item() / LOG_EVERY)
                total.zero_()
        yield


def padded(images: Tensor, pixels: int) -> Tensor:
    """Images with a black border."""
    return F.pad(images, (pixels, pixels, pixels, pixels))


def augmented(images: Tensor, targets: Tensor, parts: tuple[Tensor, ...], width: int, flip: float) -> Batches:
    """Batches of crops of side `width`, some of them mirrored, from padded images (N, C, H, W) that are square."""
    places = images.shape[-1] - width + 1
    # (N, y, x, C, side, side): all crops as views, of which a batch picks one for each sample.
    crops = images.unfold(2, width, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    for part in parts:
        down, right = torch.randint(places, (2, len(part)), device=images.device).unbind()
        chosen = crops[part, down, right]
        mirrored = (torch.rand(len(part), device=images.device) < flip)[:, None, None, None]
        yield torch.where(mirrored, chosen.flip(-1), chosen), targets[part]
