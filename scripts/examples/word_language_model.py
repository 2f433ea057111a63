"""An LSTM or a transformer that predicts the next word of a text.

After pytorch/examples word_language_model: https://github.com/pytorch/examples/tree/main/word_language_model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric


class Columns(torch.utils.data.Dataset[dict[str, Any]]):
    """A text in columns that are read side by side: a batch of as many samples continues all of them by `length` words."""

    def __init__(self, words: list[int], columns: int, length: int | None, classes: Sequence[str]) -> None:
        rows = len(words) // columns
        self.text, self.length = torch.tensor(words[: rows * columns]).view(columns, rows), length or rows
        self.classes = classes

    def __len__(self) -> int:
        return len(self.text) * math.ceil((self.text.shape[1] - 1) / self.length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        piece, column = divmod(index, len(self.text))
        words = self.text[column, piece * self.length : (piece + 1) * self.length + 1]
        return {"words": words[:-1], "next": words[1:], "column": column, "piece": piece}


def text(root: str, files: dict[str, str], columns: int, length: int) -> dict[str, Columns]:
    """The text of each file; in evaluations a sample is a whole column."""
    numbers: dict[str, int] = {}
    read = {}
    for split, name in files.items():
        lines = Path(root, name).read_text("utf-8").splitlines()
        read[split] = [numbers.setdefault(word, len(numbers)) for line in lines for word in [*line.split(), "<eos>"]]
    words = list(numbers)
    evaluated = {split: Columns(read[split], 10, None, words) for split in read if split != "train"}
    return {"train": Columns(read["train"], columns, length, words), **evaluated}


class LSTM(nn.Module):
    """Logits of the next words (B, T, num_classes), and the state after them.

    The buffer `states` has the state of each column of the training text; it belongs to a single process.
    """

    def __init__(
        self, num_classes: int, columns: int, size: int = 200, layers: int = 2, dropout: float = 0.2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_classes, size), nn.Linear(size, num_classes)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(size, size, layers, dropout=dropout, batch_first=True)
        self.register_buffer("states", torch.zeros(2, layers, columns, size))
        if tied:
            self.head.weight = self.embedding.weight
        start(self.embedding, self.head)

    def forward(self, words: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Words are (B, T); the state is (2, layers, B, size)."""
        found, after = self.lstm(self.dropout(self.embedding(words)), None if state is None else tuple(state))
        return self.head(self.dropout(found)), torch.stack(after)


class Transformer(nn.Module):
    """Logits of the next words (B, T, num_classes); there is no state."""

    states = None

    def __init__(
        self, num_classes: int, size: int = 200, heads: int = 2, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_classes, size), nn.Linear(size, num_classes)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(size, heads, size, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        for weight in self.encoder.parameters():
            if weight.ndim > 1:
                nn.init.xavier_uniform_(weight)
        start(self.embedding, self.head)

    def forward(self, words: Tensor, state: None = None) -> tuple[Tensor, None]:
        """Words are (B, T)."""
        count, size = words.shape[1], self.embedding.embedding_dim
        rates = 10000 ** (-torch.arange(0, size, 2, device=words.device) / size)
        angles = torch.arange(count, device=words.device)[:, None] * rates
        positions = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
        found = self.dropout(self.embedding(words) * math.sqrt(size) + positions)
        mask = nn.Transformer.generate_square_subsequent_mask(count, words.device)
        return self.head(self.encoder(found, mask, is_causal=True)), None


def start(embedding: nn.Embedding, head: nn.Linear) -> None:
    """Initial weights of both ends."""
    nn.init.uniform_(embedding.weight, -0.1, 0.1)
    nn.init.uniform_(head.weight, -0.1, 0.1)
    nn.init.zeros_(head.bias)


class Perplexity(MeanMetric):
    """The exponential of the mean loss of a word."""

    higher_is_better = False

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Outputs are the losses of the words."""
        super().update(outputs)

    def compute(self) -> Tensor:
        """The number of words that the model hesitates between."""
        return super().compute().exp()


class Words:
    """Predict the next word; `predict` writes texts of `count` words that begin as the samples do."""

    def __init__(self, length: int, count: int = 100, temperature: float = 1.0) -> None:
        self.length, self.count, self.temperature = length, count, temperature

    def outputs(self, classes: Sequence[str]) -> int:
        """One for each word."""
        self.classes = classes
        return len(classes)

    def weight(self, batch: Any) -> int:
        """The loss is a mean over words; the last piece of a column is shorter."""
        return batch["next"].numel()

    def training_step(self, modules: Any, batch: Any) -> Tensor:
        """Read on where the step before ended, without its gradients."""
        model, columns = modules["model"], batch["column"]
        state = None if model.states is None else model.states[:, :, columns] * (batch["piece"] > 0)[:, None]
        logits, state = model(batch["words"], state)
        if state is not None:
            model.states[:, :, columns] = state.detach().to(model.states.dtype)
        return F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """Read whole columns, in pieces as in training."""
        state, losses = None, []
        for words, following in zip(*(batch[key].split(self.length, 1) for key in ("words", "next")), strict=True):
            logits, state = modules["model"](words, state)
            losses.append(F.cross_entropy(logits.transpose(1, 2), following, reduction="none"))
        found = torch.cat(losses, 1)
        return {"loss": found.mean(), "outputs": found, "targets": batch["next"]}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, list[str]]:
        """Words that are drawn one after another."""
        words = batch["words"][:, :1]
        for _ in range(self.count):
            logits = modules["model"](words)[0][:, -1] / self.temperature
            words = torch.cat([words, torch.multinomial(logits.softmax(1), 1)], 1)
        return {"text": [" ".join(self.classes[word] for word in row) for row in words.tolist()]}
