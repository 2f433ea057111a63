"""timm's loader and schedule in the usual loop: workers stay and only decode, batches of bytes are normalised whole."""

from __future__ import annotations

import torch
from timm.data import create_loader
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter
from torch import nn
from torchvision import transforms

from peers.clock import Clock
from peers.dataloader_loop import WORKERS, augmentations_of, pictures_of
from peers.work import Work


def train(work: Work, clock: Clock) -> nn.Module:
    """Train with the pieces of timm that its own training script is made of."""
    model = work.model()
    criterion = nn.CrossEntropyLoss()
    optimizer = work.sgd(model)
    scheduler = CosineLRScheduler(optimizer, t_initial=work.total_steps, t_in_epochs=False)
    dataset = pictures_of(work, lambda image: image)
    loader = create_loader(
        dataset,
        input_size=tuple(work.train.images.shape[1:]),  # type: ignore[arg-type]
        batch_size=work.case.batch_size,
        is_training=True,
        mean=(work.case.mean,),
        std=(work.case.std,),
        num_workers=WORKERS,
        device=torch.device("cpu"),
        use_multi_epochs_loader=True,
    )
    # timm's own transforms are for other crops than this work has; bytes are what its loader wants.
    dataset.transform = transforms.Compose([*augmentations_of(work), transforms.PILToTensor()])
    dataset.transforms.transform = dataset.transform
    step = 0
    for _ in range(work.job.epochs):
        model.train()
        losses = AverageMeter()
        for images, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), targets)
            loss.backward()
            optimizer.step()
            step += 1
            scheduler.step_update(num_updates=step)
            losses.update(loss.item(), len(images))
        clock.epoch_ended()
    return model
