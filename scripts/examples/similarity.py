"""Learn an embedding in which images of a class are close together, by triplets of each batch.

After pytorch/vision references/similarity: https://github.com/pytorch/vision/tree/main/references/similarity
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric


class Similarity:
    """The loss of all triplets of anchor, image of the same class, and image of another class that is not farther by a margin.

    Each micro-batch has the triplets of its own images.
    """

    monitor, mode = "val/accuracy", "max"

    def __init__(self, size: int = 128, margin: float = 0.2) -> None:
        self.size, self.margin = size, margin

    def outputs(self, classes: Any) -> int:
        """The length of embeddings."""
        return self.size

    def training_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The mean over the triplets whose loss is not 0, and their share."""
        points = self.predict_step(modules, batch)["embedding"]
        distances = torch.cdist(points, points)
        same = batch[1][:, None] == batch[1]
        triplets = (same & ~torch.eye(len(same), dtype=torch.bool, device=same.device))[:, :, None] & ~same[:, None]
        losses = (distances[:, :, None] - distances[:, None] + self.margin).relu() * triplets
        count = losses.count_nonzero()
        return {"loss": losses.sum() / count.clamp(min=1), "hard_triplets": count / triplets.sum().clamp(min=1)}

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """Embeddings and classes."""
        return {"outputs": self.predict_step(modules, batch)["embedding"], "targets": batch[1]}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """Embeddings (B, size) of length 1."""
        return {"embedding": F.normalize(modules["model"](batch[0]))}

    def metric_names(self) -> list[str]:
        """Both are of the threshold that divides most pairs of images rightly."""
        return ["accuracy", "threshold"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Over all pairs of the split."""
        return {name: Pairs(name).to(device) for name in self.metric_names()}


def pk(dataset: Any, batch_size: int, generator: torch.Generator, classes: int) -> Tensor:
    """Batches of so many classes, drawn at random, with as many images each."""
    members = [torch.nonzero(dataset.targets == each).flatten() for each in dataset.targets.unique()]
    chosen = []
    for _ in range(len(dataset) // batch_size):
        for each in torch.randperm(len(members), generator=generator)[:classes]:
            places = torch.randperm(len(members[each]), generator=generator)[: batch_size // classes]
            chosen.append(members[each][places])
    return torch.cat(chosen)


class Pairs(Metric):
    """Share of pairs that the best threshold on their distance divides into same and other class; or the threshold."""

    embeddings: Any
    labels: Any

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.add_state("embeddings", [], "cat")
        self.add_state("labels", [], "cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Keep a batch."""
        self.embeddings.append(embeddings)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """Float32 ()."""
        embeddings, labels = torch.cat(self.embeddings), torch.cat(self.labels)
        thresholds = torch.arange(0, 1.51, 0.01, device=labels.device)
        counts = torch.zeros(2, 152, dtype=torch.int64, device=labels.device)  # of other and of same class by distance
        for number, point in enumerate(embeddings):
            places = torch.bucketize((embeddings[number + 1 :] - point).norm(dim=1), thresholds)
            counts.view(-1).add_(torch.bincount((labels[number + 1 :] == labels[number]) * 152 + places, minlength=304))
        right = counts[1].cumsum(0) + counts[0].sum() - counts[0].cumsum(0)
        best = right[:-1].argmax()
        return thresholds[best] if self.which == "threshold" else right[best] / counts.sum()
