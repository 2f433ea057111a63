"""Overrides that make short runs of the examples without a network."""

from __future__ import annotations

from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_TEXTS = "{train: howto/own_step.md, val: howto/own_model.md, test: howto/python.md}"

RUNS = {
    "character_language_model": [
        "model.width=16",
        "model.heads=2",
        "model.layers=1",
        "data.dataset.length=32",
        "data.batch_size=8",
        "limit.train_batches=6",
        "limit.eval_batches=2",
        "epochs=2",
    ],
    "dcgan": [
        "data=synthetic",
        "data.image_size=32",
        "data.dataset.samples=64",
        "data.batch_size=16",
        "model.width=8",
        "task.discriminator.width=8",
        "epochs=3",
    ],
    "fast_neural_style": [
        "data=synthetic",
        "data.image_size=32",
        "data.dataset.samples=24",
        "model.width=4",
        "task.weights=null",
        f"task.style={_DOCS}/assets/report.png",
    ],
    "super_resolution": [
        f"data.root={_DOCS}",
        "data.dataset.folders={train: reference/verbs, val: assets}",
        "data.dataset.size=48",
        "data.batch_size=1",
        "epochs=4",
    ],
    "time_sequence_prediction": [
        "data.dataset.length=20",
        "data.dataset.count=12",
        "data.batch_size=3",
        "model.hidden=8",
        "optimizer.max_iter=3",
        "task.future=20",
        "epochs=3",
    ],
    "word_language_model": [
        f"data.root={_DOCS}",
        f"data.dataset.files={_TEXTS}",
        "data.batch_size=8",
        "model.size=16",
        "epochs=2",
    ],
}
