"""A small causal transformer that writes like the help texts of Python, which ship with it."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Texts(torch.utils.data.Dataset[Tensor]):
    """Pieces of the text, as bytes: `length` and the one after them."""

    def __init__(self, length: int) -> None:
        lines = dict.fromkeys("".join(topics.values()).splitlines(keepends=True))  # each line once: topics share some
        self.text, self.length = torch.tensor(list("".join(lines).encode())), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1]


class Transformer(nn.Module):
    """Logits (B, T, 256) of the next bytes."""

    def __init__(self, longest: int, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Text (B, T) of at most `longest` bytes."""
        places = torch.arange(text.shape[1], device=text.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), text.device)
        return self.head(self.encoder(self.embedding(text) + self.positions(places), mask, is_causal=True))


class Writing:
    """Predict the next byte; `predict` continues the first `prompt` bytes of a sample to its length."""

    def __init__(self, prompt: int = 16) -> None:
        self.prompt = prompt

    def training_step(self, modules: Any, text: Tensor) -> Tensor:
        """Cross-entropy of each byte."""
        return F.cross_entropy(modules["model"](text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def evaluation_step(self, modules: Any, text: Tensor) -> dict[str, Tensor]:
        """The same."""
        return {"loss": self.training_step(modules, text)}

    def predict_step(self, modules: Any, text: Tensor) -> dict[str, list[str]]:
        """Bytes that are drawn one after another."""
        found = text[:, : self.prompt]
        while found.shape[1] < text.shape[1]:
            logits = modules["model"](found)[:, -1]
            found = torch.cat([found, torch.multinomial(logits.softmax(1), 1)], 1)
        return {"text": [bytes(row).decode(errors="replace") for row in found.tolist()]}
