"""Who takes part, in a line each, and which package each one needs."""

from __future__ import annotations

CONTENDERS = {
    "runner": "`python -m runner train`, as it comes: logging, live progress, a checkpoint whenever one is due",
    "bare": "the best plain loop: data in memory, one gather an epoch, fused optimizer, rate set by hand, loss summed in a "
    "tensor and read every 50 steps; crop and flip a batch at a time",
    "hand": "the loop people write: data in memory, `images[index]` for each batch, torch's scheduler, `loss.item()`; crop and "
    "flip image by image",
    "dataloader": "the loop of the tutorials: `DataLoader`, with 2 workers and transforms on PIL images where there are any",
    "accelerate": "the loop of `dataloader` prepared by Accelerate",
    "lightning": "Lightning as it comes: logging, display, a checkpoint an epoch",
}
NEEDS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
}
