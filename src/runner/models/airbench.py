"""A small network that learns small images in a few epochs."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from runner.models.checks import at_least_1


class Airbench(nn.Module):
    """Whitening convolution and groups of two convolutions, three in airbench94 (Jordan, arXiv:2404.00498, listing 4).

    The first convolution, 2x2, has two outputs for each number of a patch; `init=whiten` sets its weights, and
    `freeze=[whiten.weight]` keeps them. A group is convolution, max-pool, norm, GELU, convolution, norm, GELU. Its norms have
    no scale, and new convolutions pass their inputs on (`nn.init.dirac_`). The outputs are divided by the number of features.
    1.97 million parameters for three channels and ten classes.

    Args:
        widths: channels of each group; each group halves height and width.
        momentum: share of the newest batch in BatchNorm's running statistics.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, in_channels: int, num_classes: int, widths: tuple[int, ...] = (64, 256, 256), momentum: float = 0.4
    ) -> None:
        super().__init__()
        at_least_1(in_channels=in_channels, num_classes=num_classes, groups=len(widths), width=min(widths, default=1))
        self.whiten = nn.Conv2d(in_channels, 8 * in_channels, kernel_size=2)
        channels = [8 * in_channels, *widths]
        groups = [_group(*pair, momentum) for pair in pairwise(channels)]
        self.stages = nn.Sequential(nn.GELU(), *groups)
        self.features, self.head = widths[-1], nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, in_channels, H, W), both floating point; of three groups, of at least 17 pixels."""
        features: Tensor = self.stages(self.whiten(images)).amax(dim=(2, 3))
        logits: Tensor = self.head(features) / self.features
        return logits


def _group(inputs: int, outputs: int, momentum: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, pools in ((inputs, True), (outputs, False)):
        layer, norm = nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs, 1e-12, momentum)
        nn.init.dirac_(layer.weight.data[:channels])
        norm.weight.requires_grad_(False)
        layers += [layer, *([nn.MaxPool2d(2)] if pools else []), norm, nn.GELU()]
    return nn.Sequential(*layers)
