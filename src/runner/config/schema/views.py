"""Test-time augmentation, which several verbs take."""

from __future__ import annotations

from typing import Literal

View = Literal["flip", "hflip", "vflip", "rotations", "shifts", "scales", "five_crop", "ten_crop"]
TtaMean = Literal["logits", "probabilities"]
