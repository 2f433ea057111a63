"""Metrics that cannot take the outputs of the task are refused before a run begins."""

from __future__ import annotations

KEY = "+metrics.accuracy"


def test_a_metric_for_another_number_of_classes_is_refused_before_training(rejected, workdir):
    metric = [f"{KEY}._target_=torchmetrics.classification.MulticlassAccuracy", f"{KEY}.num_classes=7"]
    result = rejected("train", "logger=none", "max_steps=1", *metric)
    assert "metrics.accuracy: cannot take outputs of shape" in result.err
    assert not list((workdir / "outputs").glob("*/*"))
