"""Are these the data and the sources that a checkpoint was trained on, and what is left when data can be read no longer?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from runner.build.sources import changed_sources
from runner.config.errors import UserError
from runner.data.build import DataModule
from runner.data.consistency import not_finite
from runner.data.dataset_fingerprint import class_changes, data_changes


def compare_data(
    checkpoint: dict[str, Any], splits: DataModule, identity: dict[str, Any], sources: dict[str, str], ignore: bool
) -> list[str]:
    """Compare the data with those that a checkpoint was trained on, and the source files of custom components.

    Args:
        checkpoint: its contents.
        splits: the data.
        identity: their fingerprint, from `splits.fingerprint`.
        sources: digests of the source files, see `runner.build.sources`.
        ignore: whether to continue with other data.

    Returns:
        Warnings.

    Raises:
        UserError: if they are others, unless that is ignored at the end of an epoch.
    """
    before, inside_epoch = checkpoint["metrics"].get("data"), checkpoint["position"]["batch"] > 0
    warnings = changed_sources(checkpoint["metrics"].get("sources"), sources)
    if before is None:
        return [*warnings, "the checkpoint does not say which data it was trained on: they were not compared"]
    others = class_changes(checkpoint["classes"], list(splits.classes)) + data_changes(
        before, identity, splits.fingerprint
    )
    if not others:
        unknown = any("bytes" in facts and "bytes" not in before.get(name, {}) for name, facts in identity.items())
        return [
            *warnings,
            *["data.identity=full: the checkpoint has no digest of every sample to compare with"] * unknown,
        ]
    problem = f"these are not what the checkpoint was trained on: {'; '.join(others)}"
    if inside_epoch and before.get("train", {}).get("samples") != splits.train.samples:
        # Inside an epoch, the position counts batches of an order that depends on the number of samples.
        raise UserError("data", problem, "the same data, or a checkpoint from the end of an epoch")
    if not ignore:
        raise UserError("data", problem, "the same data, or data.identity=ignore to use these")
    return [*warnings, f"data: {problem} (data.identity=ignore)"]


def warn_of_nonfinite(loss: float, splits: DataModule, name: str, tell: Callable[[str], None]) -> None:
    """Warn of the first sample of a split that is not finite, if the loss over the split is not; once for each split."""
    split = splits.eval_split(name)
    if math.isfinite(loss) or split is None or name in splits.searched_for_nonfinite:
        return
    splits.searched_for_nonfinite.add(name)
    batches = math.ceil(split.samples / split.loader.batch_size)
    if found := not_finite(split.loader.batches(0, 0, batches), name):
        tell(f"the loss on '{name}' is {loss}: {found}")
