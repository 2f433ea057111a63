"""A model with weights in several places."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Three layers and a shortcut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(self.norm(inputs)).relu())
        return inputs + hidden


class Tied(nn.Module):
    """Blocks of which some have a weight of another block or of a layer outside, and one is called twice.

    Args:
        within: tie weights of one block, too.
    """

    def __init__(self, num_classes: int, image_size: tuple[int, int], in_channels: int, dim: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(image_size[0] * image_size[1] * in_channels, dim)
        self.outside = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(5))
        one, two, three, four, _ = self.blocks
        one.first.weight = two.second.weight  # of two blocks
        three.first.weight = self.outside.weight  # of a block and a layer
        four.first.weight = four.second.weight  # of one block
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (B, classes)."""
        hidden = self.outside(self.stem(images.flatten(1)))
        for block in (*self.blocks, self.blocks[-1]):
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits
