"""Multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from runner.models.checks import at_least_1, share
from runner.models.initial import draw_small_head


class MLP(nn.Module):
    """Multi-layer perceptron on flattened pixels: Linear, ReLU and dropout per hidden layer, then a linear head.

    Args:
        image_size: (height, width) of the images, in pixels.
        hidden: width of each hidden layer; None means [128], an empty list a linear classifier.
        dropout: probability of zeroing a hidden unit while training.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [128] if hidden is None else list(hidden)
        height, width = image_size
        at_least_1(in_channels=in_channels, image_size=min(height, width), num_classes=num_classes)
        at_least_1(**{f"hidden[{index}]": units for index, units in enumerate(widths)})
        share(dropout=dropout)

        sizes = [in_channels * height * width, *widths]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], num_classes)
        for module in self.layers:
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
        draw_small_head(self.head)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W), both floating point."""
        logits: Tensor = self.head(self.layers(images.flatten(1)))
        return logits
