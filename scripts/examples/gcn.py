"""A graph convolutional network that classifies the nodes of a graph, such as the papers of Cora by their citations.

After pytorch/examples gcn: https://github.com/pytorch/examples/tree/main/gcn
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets.utils import download_and_extract_archive

from runner.tasks.classification import Classification

CORA = "https://linqs-data.soe.ucsc.edu/public/lbc/cora.tgz"


def splits(features: Tensor, labels: Tensor, edges: Tensor, sizes: list[int], seed: int) -> dict[str, Any]:
    """Splits of one sample each: the whole graph, with a mask of the nodes that belong to the split."""
    links = torch.eye(len(labels)).index_put_(tuple(edges), torch.ones(()), accumulate=True)
    scale = links.sum(1).rsqrt()
    graph = {"features": features, "labels": labels, "links": scale[:, None] * links * scale}
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(len(labels), dtype=torch.bool)
    parts = zip(("test", "val", "train"), order.split([*sizes, len(order) - sum(sizes)]), strict=True)
    return {name: [graph | {"mask": mask.index_fill(0, nodes, True)}] for name, nodes in parts}


def cora(root: str, download: bool, sizes: list[int], seed: int) -> dict[str, Any]:
    """Papers with their words, and a directed edge for each citation."""
    if download:
        download_and_extract_archive(CORA, root)
    papers, words, subjects = np.split(np.loadtxt(Path(root) / "cora" / "cora.content", dtype=str), [1, -1], axis=1)
    places = {paper: place for place, paper in enumerate(papers[:, 0])}
    cited = np.loadtxt(Path(root) / "cora" / "cora.cites", dtype=str)
    edges = torch.tensor([[places[paper] for paper in column] for column in cited.T])
    labels = torch.from_numpy(np.unique(subjects, return_inverse=True)[1].flatten())
    return splits(F.normalize(torch.from_numpy(words.astype("float32")), 1), labels, edges, sizes, seed)


def drawn(nodes: int, in_features: int, num_classes: int, sizes: list[int], seed: int) -> dict[str, Any]:
    """Random nodes whose features hint at their class, and whose neighbors are of the same class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(nodes) % num_classes
    features = torch.rand(nodes, in_features, generator=generator) + F.one_hot(labels, in_features)
    starts, steps = torch.randint(nodes, (2, 4 * nodes), generator=generator)
    return splits(features, labels, torch.stack([starts, (starts + steps * num_classes) % nodes]), sizes, seed)


class GCN(nn.Module):
    """Two graph convolutions, each a linear layer and a sum over neighbors."""

    def __init__(self, in_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(in_features, hidden, False), nn.Linear(hidden, num_classes, False)])
        self.dropout = nn.Dropout(dropout)
        for weight in self.layers.parameters():
            nn.init.xavier_normal_(weight)

    def forward(self, features: Tensor, links: Tensor) -> Tensor:
        """Logits (B, nodes, num_classes)."""
        hidden = self.dropout((links @ self.layers[0](features)).relu())
        return links @ self.layers[1](hidden)


class Nodes(Classification):
    """One class per node; only those of the mask count."""

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The cross-entropy, and logits and classes for the metrics."""
        outputs = modules["model"](batch["features"], batch["links"])[batch["mask"]]
        targets = batch["labels"][batch["mask"]]
        return {"loss": F.cross_entropy(outputs, targets), "outputs": outputs, "targets": targets}

    def training_step(self, modules: Any, batch: Any) -> Tensor:
        """The cross-entropy."""
        return self.evaluation_step(modules, batch)["loss"]

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The class of every node of the graph."""
        return {"classes": modules["model"](batch["features"], batch["links"]).argmax(2)}
