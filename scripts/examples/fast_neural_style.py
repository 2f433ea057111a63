"""A network that draws photographs in the style of a picture (Johnson et al., arXiv:1603.08155).

After pytorch/examples fast_neural_style: https://github.com/pytorch/examples/tree/main/fast_neural_style
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.v2.functional import normalize, pil_to_tensor


def block(before: int, after: int, kernel: int, stride: int = 1, *rest: nn.Module) -> nn.Sequential:
    """A convolution that reflects the borders, and instance normalisation."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, padding_mode="reflect")
    return nn.Sequential(convolution, nn.InstanceNorm2d(after, affine=True), *rest)


class Residual(nn.Sequential):
    """Two blocks whose result is added."""

    def __init__(self, channels: int) -> None:
        super().__init__(block(channels, channels, 3, 1, nn.ReLU()), block(channels, channels, 3))

    def forward(self, images: Tensor) -> Tensor:
        """As many channels as the images have."""
        return images + super().forward(images)


class Painter(nn.Sequential):
    """Stylised images (B, 3, H, W) of photographs, both from 0 to 1; inside, white is 255."""

    def __init__(self, width: int = 32) -> None:
        up = nn.Upsample(scale_factor=2)
        super().__init__(
            block(3, width, 9, 1, nn.ReLU()),
            block(width, 2 * width, 3, 2, nn.ReLU()),
            block(2 * width, 4 * width, 3, 2, nn.ReLU()),
            *(Residual(4 * width) for _ in range(5)),
            up,
            block(4 * width, 2 * width, 3, 1, nn.ReLU()),
            up,
            block(2 * width, width, 3, 1, nn.ReLU()),
            nn.Conv2d(width, 3, 9, 1, 4, padding_mode="reflect"),
        )

    def forward(self, photos: Tensor) -> Tensor:
        """The last layer is linear, so pixels may leave the range."""
        return super().forward(photos * 255) / 255


class Features(nn.Module):
    """Four layers of a trained VGG-16, and what they say of the style."""

    def __init__(self, vgg: nn.Sequential, style: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(vgg[start:end] for start, end in ((0, 4), (4, 9), (9, 16), (16, 23)))
        for number, found in enumerate(self(style[None])):
            self.register_buffer(f"style_{number}", gram(found).detach())

    def forward(self, images: Tensor) -> list[Tensor]:
        """The outputs of relu1_2, relu2_2, relu3_3 and relu4_3."""
        images = normalize(images, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        return [images := part(images) for part in self.parts]


def gram(features: Tensor) -> Tensor:
    """How often each two channels are active together, (B, C, C)."""
    flat = features.flatten(2)
    return flat @ flat.mT / features[0].numel()


class Style:
    """Features keep the content of a photograph, and their correlations are those of the style."""

    def __init__(
        self, style: str, weights: str | None = None, content_weight: float = 1e5, style_weight: float = 1e10
    ) -> None:
        vgg = models.vgg16(weights=weights or None).features[:23]
        self.features = Features(vgg, pil_to_tensor(pil_loader(style)) / 255)
        self.content_weight, self.style_weight = content_weight, style_weight

    def modules(self, model: nn.Module, loss: nn.Module) -> dict[str, nn.Module]:
        """The network that judges; `freeze` of the config keeps its weights."""
        return {"features": self.features}

    def training_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """Content and style."""
        judge, photos = modules["features"], batch[0]
        found = judge(modules["model"](photos))
        content = self.content_weight * F.mse_loss(found[1], judge(photos)[1])
        gaps = [gram(each) - judge.get_buffer(f"style_{number}") for number, each in enumerate(found)]
        style = self.style_weight * sum(gap.square().mean() for gap in gaps)
        return {"loss": content + style, "content": content, "style": style}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The stylised photographs."""
        return {"stylised": (modules["model"](batch[0]).clamp(0, 1) * 255).to(torch.uint8)}
