"""ResNet-18 for small images: a 3x3 stem without the max-pool, as in the CIFAR experiments."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.checks import at_least_1, share
from runner.models.drop_path import DropPath, linear_rates
from runner.models.initial import draw_small_head


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., "Deep Residual Learning", arXiv:1512.03385, figure 5 left).

    Args:
        stride: stride of the first convolution, and of the shortcut's 1x1 convolution.
        drop_path: probability of skipping a sample's residual branch in training.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.drop_path = DropPath(drop_path)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, outputs, ceil(H / stride), ceil(W / stride)) of features (B, inputs, H, W)."""
        residual = F.relu(self.bn1(self.conv1(features)))
        residual = self.drop_path(self.bn2(self.conv2(residual)))
        return F.relu(residual + self.shortcut(features))


class ResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem of stride 1, for images of about 32 pixels; 11.2 million parameters at width 64.

    Args:
        width: channels of the stem and of the first stage; they double in each of the three later ones.
        dropout: probability of zeroing a feature before the head in training.
        drop_path: probability of skipping a sample's residual branch in training, in the last of the eight blocks; it rises
            linearly from the first one.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, in_channels: int, num_classes: int, width: int = 64, dropout: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        at_least_1(in_channels=in_channels, num_classes=num_classes, width=width)
        share(dropout=dropout, drop_path=drop_path)
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        rates = iter(linear_rates(drop_path, 8))
        channels = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(inputs, outputs, stride, next(rates)), BasicBlock(outputs, outputs, 1, next(rates))
                )
                for inputs, outputs, stride in zip(channels, channels[1:], (1, 2, 2, 2), strict=False)
            )
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        draw_small_head(self.head)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W), both floating point."""
        features = self.stages(self.stem(images))
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))
        return logits
