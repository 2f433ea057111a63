"""What verbs that use a checkpoint have in common: which of its weights, and test-time augmentation."""

from __future__ import annotations

from typing import Literal

Weights = Literal["auto", "raw", "averaged"]
View = Literal["flip", "hflip", "vflip", "rotations", "shifts", "scales", "five_crop", "ten_crop"]
TtaMean = Literal["logits", "probabilities"]
