"""Vision transformer for small images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.checks import at_least_1, share
from runner.models.drop_path import DropPath, linear_rates


class Attention(nn.Module):
    """Multi-head self-attention over the tokens of each image.

    `heads` divides `dim`, the width of a token; `dropout` applies to attention weights and to outputs.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, dim) that have attended to all tokens (B, N, dim) of their image."""
        batch, count, dim = tokens.shape
        split = self.qkv(tokens).reshape(batch, count, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        projected = self.project(mixed.transpose(1, 2).reshape(batch, count, dim))
        dropped: Tensor = F.dropout(projected, self.dropout, self.training)
        return dropped


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron, each added to its input.

    Arguments are those of `ViT`; a sample's branch is skipped with probability `drop_path`, drawn for each of the two.
    """

    def __init__(self, dim: int, heads: int, mlp_ratio: float, dropout: float, drop_path: float = 0.0) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, dim) of tokens (B, N, dim)."""
        tokens = tokens + self.drop_path(self.attention(self.norm1(tokens)))
        seen: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return seen


class ViT(nn.Module):
    """Vision transformer with learned positions, averaged tokens instead of a class token, and a linear head.

    After Dosovitskiy et al. (arXiv:2010.11929); averaging the tokens follows Beyer et al. (arXiv:2205.01580).

    Args:
        image_size: (height, width) of the images, in pixels; `patch_size` divides both.
        patch_size: side of a square patch, in pixels; one patch is one token.
        dim: width of a token.
        depth: number of transformer blocks.
        heads: number of attention heads; divides `dim`.
        mlp_ratio: width of each perceptron's hidden layer, as a multiple of `dim`.
        dropout: probability of zeroing an activation in training.
        drop_path: probability of skipping a sample's branch in training, in the last block; it rises linearly from the first.

    Raises:
        ValueError: an argument is out of range, or does not divide what it must divide.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        *,
        patch_size: int = 4,
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        height, width = image_size
        at_least_1(
            in_channels=in_channels, num_classes=num_classes, patch_size=patch_size, dim=dim, depth=depth, heads=heads
        )
        share(dropout=dropout, drop_path=drop_path)
        if int(dim * mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio must leave at least one hidden unit, got {mlp_ratio} for dim={dim}")
        if dim % heads:
            raise ValueError(f"heads must divide dim: {dim} is not a multiple of {heads}")
        if height < patch_size or width < patch_size or height % patch_size or width % patch_size:
            raise ValueError(f"patch_size must divide the image: {height}x{width} is not a multiple of {patch_size}")

        tokens = (height // patch_size) * (width // patch_size)
        self.embed = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.zeros(1, tokens, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(dim, heads, mlp_ratio, dropout, rate) for rate in linear_rates(drop_path, depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.embed.weight, std=self.embed.weight[0].numel() ** -0.5)  # by the fan-in
        assert self.embed.bias is not None
        nn.init.zeros_(self.embed.bias)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W), both floating point."""
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = self.blocks(self.dropout(tokens + self.positions))
        logits: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return logits
