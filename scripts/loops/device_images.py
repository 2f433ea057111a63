"""ResNet-50 or ViT-Tiny on images in the device's memory: bf16, NHWC, and no wait for the device but every 50 steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50

from runner.models.vit import ViT


def epochs(model: str, device: str, samples: int, size: int, batch_size: int, compiled: bool = False) -> Iterator[None]:
    """Train `model`, 'resnet50' or 'vit_tiny', on random images of `size` pixels, a whole number of batches."""
    torch.manual_seed(0)
    images = torch.randint(256, (samples, 3, size, size), dtype=torch.uint8, device=device)
    targets = torch.randint(10, (samples,), device=device)
    mean, std = (torch.full((1, 3, 1, 1), value, device=device) for value in (127.5, 60.0))

    network: nn.Module = resnet50(num_classes=10) if model == "resnet50" else ViT(3, (size, size), 10)
    network.train().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    # In the process of `runner`, which rounds to 16 bits where autocast does; torch alone does not
    settings: Any = {"dynamic": False, "options": {"emulate_precision_casts": False}}
    forward: Any = torch.compile(network, **settings) if compiled else network
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )
    total, step = torch.zeros((), device=device), 0
    while True:
        for index in torch.randperm(samples, device=device).split(batch_size):
            inputs = images[index].contiguous(memory_format=torch.channels_last).float().sub_(mean).div_(std)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = F.cross_entropy(forward(inputs), targets[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % 50 == 0:
                assert total.isfinite()  # waits for the device
                total.zero_()
        yield
