"""A checkpoint as a model of MLflow, which loads it with this module: nothing is pickled.

The model takes uint8 images of any size, (N, H, W, C). The result has a row for each image, with the columns of
`python -m runner predict`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import Schema, TensorSpec

from runner import load


class Predictor:
    """What MLflow calls; the checkpoint is a path, and packages are trusted by RUNNER_TRUST."""

    def __init__(self, checkpoint: str) -> None:
        self._trained = load(checkpoint)

    def predict(self, images: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """A row for each image."""
        return predictions(self._trained, images)


_load_pyfunc = Predictor  # the name that MLflow looks for


def predictions(trained: Any, images: Any) -> pd.DataFrame:
    """Label and probability of every class, or the values of a regression."""
    return pd.DataFrame(trained.predict(list(np.asarray(images, np.uint8)), probabilities=True))


def signature_of(trained: Any) -> ModelSignature:
    """Input and columns of a trained model, from one prediction."""
    channels, height, width = trained.preprocess.shape
    found = infer_signature(model_output=predictions(trained, np.zeros((1, height, width, channels), np.uint8)))
    found.inputs = Schema([TensorSpec(np.dtype(np.uint8), (-1, -1, -1, channels))])
    return found


def log_model(checkpoint: Path, tracking_uri: str, run_id: str, register: str | None) -> str:
    """Upload a checkpoint as a model of a run, and register it under a name; returns its address."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri)  # also sets the variable, which means something to the next run
    try:
        with mlflow.start_run(run_id=run_id):
            logged = mlflow.pyfunc.log_model(
                name="model",
                loader_module=__name__,
                data_path=str(checkpoint),
                signature=signature_of(load(checkpoint, device="cpu")),
                registered_model_name=register,
                pip_requirements=["runner", "torch", "torchvision", "pandas"],
            )
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]
    return str(logged.model_uri)
