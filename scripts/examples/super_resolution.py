"""An efficient sub-pixel network (Shi et al., arXiv:1609.05158) that enlarges photographs.

After pytorch/examples super_resolution: https://github.com/pytorch/examples/tree/main/super_resolution
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchvision.transforms.v2 import functional as V
from torchvision.tv_tensors import Image as Photo


def brightness(photos: Tensor) -> Tensor:
    """Y of YCbCr, (..., 1, H, W), of RGB."""
    return (photos * photos.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(-3, keepdim=True)


class Photos(torch.utils.data.Dataset[Any]):
    """Squares from the middle of photographs: reduced, in colour, and the brightness of the original."""

    def __init__(self, folder: Path, factor: int, size: int) -> None:
        self.files = sorted(path for path in folder.iterdir() if path.suffix in (".png", ".jpg", ".jpeg"))
        self.small = size // factor
        self.size = self.small * factor

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Photo, Tensor]:
        photo = V.center_crop(Image.open(self.files[index]).convert("RGB"), [self.size])
        return Photo(V.resize(photo, [self.small])), brightness(V.to_image(photo) / 255).as_subclass(Tensor)


def photos(root: str, folders: dict[str, str], factor: int, size: int = 256) -> dict[str, Photos]:
    """Photographs of the folder of each split."""
    return {split: Photos(Path(root, folder), factor, size) for split, folder in folders.items()}


class ESPCN(nn.Sequential):
    """The brightness of enlarged photographs; orthogonal weights keep the scale of the signal."""

    def __init__(self, factor: int) -> None:
        sizes = [(1, 64, 5), (64, 64, 3), (64, 32, 3), (32, factor**2, 3)]
        layers = [nn.Conv2d(before, after, kernel, padding="same") for before, after, kernel in sizes]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, 1 if layer is layers[-1] else nn.init.calculate_gain("relu"))
        first, second, third, last = layers
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), last, nn.PixelShuffle(factor))

    def forward(self, photos: Tensor) -> Tensor:
        """Brightness (B, 1, factor H, factor W) of photographs (B, 3, H, W)."""
        return super().forward(brightness(photos))


class PSNR(MeanMetric):
    """The peak signal-to-noise ratio of each batch in dB, and their mean."""

    higher_is_better = True

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Both are from 0 to 1."""
        super().update(-10 * F.mse_loss(outputs, targets).log10())


class SuperResolution:
    """The loss of the config between brightnesses; the best checkpoint has the highest PSNR."""

    monitor, mode = "val/psnr", "max"

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The enlarged photograph: the eye sees colours less sharply than brightness, so they are interpolated."""
        sharp = modules["model"](batch[0])
        rough = F.interpolate(batch[0], sharp.shape[2:], mode="bicubic")
        return {"enlarged": ((rough + sharp - brightness(rough)).clamp(0, 1) * 255).to(torch.uint8)}
