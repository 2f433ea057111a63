"""Classify videos by short clips.

After pytorch/vision references/video_classification:
https://github.com/pytorch/vision/tree/main/references/video_classification
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchvision.datasets.folder import pil_loader
from torchvision.models import get_model
from torchvision.transforms.v2.functional import pil_to_tensor
from torchvision.tv_tensors import Video

from runner.tasks.classification import Classification


class Clips(torch.utils.data.Dataset[Any]):
    """Videos as folders of frames, `<folder>/<class>/<video>/*.jpg`.

    In training, an item is a clip (T, C, H, W) at a random place of a video, which has several in an epoch. Otherwise it is a
    video: its clips at even distances, (K, T, C, H, W).
    """

    def __init__(self, folder: Path, clips: int, frames: int, training: bool) -> None:
        self.clips, self.frames, self.training = clips, frames, training
        self.classes = sorted(each.name for each in folder.iterdir())
        videos = [(video, label) for label, name in enumerate(self.classes) for video in (folder / name).iterdir()]
        files = [(sorted(video.iterdir()), label) for video, label in sorted(videos)]
        self.videos = [each for each in files if len(each[0]) >= frames]  # others have no whole clip

    def __len__(self) -> int:
        return len(self.videos) * (self.clips if self.training else 1)

    def __getitem__(self, index: int) -> tuple[Video, int]:
        files, label = self.videos[index % len(self.videos)]
        last = len(files) - self.frames
        starts = torch.randint(last + 1, (1,)) if self.training else torch.linspace(0, last, self.clips).long()
        clips = [
            torch.stack([pil_to_tensor(pil_loader(file)) for file in files[at : at + self.frames]]) for at in starts
        ]
        return Video(clips[0] if self.training else torch.stack(clips)), label


def videos(root: str, clips: int = 5, frames: int = 16) -> dict[str, Clips]:
    """The splits in the folders `train` and `val` of `root`."""
    return {split: Clips(Path(root, split), clips, frames, split == "train") for split in ("train", "val")}


def network(name: str, num_classes: int, weights: str | None = None) -> nn.Module:
    """A model of torchvision for clips (B, 3, T, H, W); weights are of models with 400 classes."""
    model: nn.Module = get_model(name, num_classes=num_classes, weights=weights)
    return model


class Videos(Classification):
    """One class per video; the probabilities of its clips are averaged."""

    def training_step(self, modules: Any, batch: Any) -> Tensor:
        """The loss of clips (B, T, C, H, W)."""
        loss: Tensor = modules["loss"](modules["model"](batch[0].transpose(1, 2)), batch[1])
        return loss

    def logits(self, modules: Any, batch: Any) -> Tensor:
        """Logits of the clips of all videos (B * K, classes)."""
        logits: Tensor = modules["model"](batch[0].flatten(0, 1).transpose(1, 2))
        return logits

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The loss over the clips of videos (B, K, T, C, H, W), and their probabilities (B, K, classes)."""
        logits = self.logits(modules, batch)
        loss = modules["loss"](logits, batch[1].repeat_interleave(batch[0].shape[1]))
        return {"loss": loss, "outputs": logits.softmax(1).view(*batch[0].shape[:2], -1), "targets": batch[1]}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The class of each video, and its probability."""
        probabilities = self.logits(modules, batch).softmax(1).view(*batch[0].shape[:2], -1)
        probability, label = probabilities.mean(1).max(1)
        return {"label": label, "probability": probability}

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of videos."""
        return outputs.mean(1), targets

    def metric_names(self) -> list[str]:
        """Of videos, and of their clips."""
        return ["accuracy", "top5", "clip_accuracy", "clip_top5"]

    def metrics(self, device: torch.device) -> dict[str, Any]:
        """Shares of videos or clips whose class is among the most probable ones."""
        kinds = [(top, clips) for clips in (False, True) for top in (1, 5)]
        return {name: Share(*kind).to(device) for name, kind in zip(self.metric_names(), kinds, strict=True)}


class Share(MeanMetric):
    """Share of the videos, or of the clips, whose class is among the `top` most probable ones."""

    def __init__(self, top: int, clips: bool) -> None:
        super().__init__()
        self.top, self.clips = top, clips

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Add a batch."""
        found = outputs if self.clips else outputs.mean(1, keepdim=True)
        best = found.topk(min(self.top, found.shape[2])).indices
        super().update((best == targets[:, None, None]).any(2))
