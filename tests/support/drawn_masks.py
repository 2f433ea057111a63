"""Images of shapes with masks of three classes, drawn into folders, and a small model for them."""

from __future__ import annotations

from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

CLASSES = ("background", "disc", "square")
MODEL = '''
import torch
from torch import nn


class Tiny(nn.Module):
    """Logits of each pixel; no layer mixes samples."""

    def __init__(self, num_classes, width=16, aux=False, pooled=False):
        super().__init__()
        conv = lambda inputs, outputs: nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())
        self.fine, self.coarse = conv(3, width), nn.Sequential(nn.MaxPool2d(4), conv(width, width), conv(width, width))
        self.pooled = pooled
        self.head, self.aux = nn.Conv2d(2 * width, num_classes, 1), nn.Conv2d(width, num_classes, 1) if aux else None

    def forward(self, images):
        fine = self.fine(images)
        coarse = nn.functional.interpolate(self.coarse(fine), size=fine.shape[-2:], mode="nearest")
        logits = self.head(torch.cat([fine, coarse], 1))
        if self.pooled:
            return logits.mean((2, 3))
        return logits if self.aux is None else {"out": logits, "aux": self.aux(fine)}
'''


TINY = (
    "experiment=segmentation", "data.root=shapes", "data.image_size=24", "model=small_cnn", "~model.width",
    "~model.dropout", "model._target_=drawn_nets.Tiny", "data.batch_size=8", "epochs=2",
    "data.num_workers=0", "scheduler=constant", "evaluate.batch_size=7",
)  # fmt: skip


def draw(root: Path, train: int = 20, val: int = 10, size: int = 24, void: bool = False) -> Path:
    """Draw a data set for `data=segmentation_folder`; with `void`, some pixels of every second mask have the value 255."""
    random = Random(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image, mask = Image.new("RGB", (size, size), "#335"), Image.new("L", (size, size))
            for shape, colour in ((1, "#d42"), (2, "#2c6")):
                edge = random.randrange(size // 4, size // 2)
                x, y = random.randrange(size - edge), random.randrange(size - edge)
                for picture, fill in ((image, colour), (mask, shape)):
                    pen = ImageDraw.Draw(picture)
                    (pen.ellipse if shape == 1 else pen.rectangle)((x, y, x + edge, y + edge), fill=fill)
            if void and number % 2:
                ImageDraw.Draw(mask).rectangle((0, 0, size, random.randrange(size)), fill=255)
            image.save(root / split / "images" / f"{number:03}.png")
            mask.save(root / split / "masks" / f"{number:03}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    return root
