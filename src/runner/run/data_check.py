"""Are these the data, and the source files of custom components, that a checkpoint was trained on?"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

from runner.base.errors import UserError
from runner.config.frozen import to_plain
from runner.config.schema.train import Train
from runner.config.targets import targets_in
from runner.data.dataset_fingerprint import class_changes, data_changes
from runner.data.module import DataModule

_KNOWN = {"runner", "torch", "torchvision", "torchmetrics"}
_INSTALLED = ("site-packages", "dist-packages")


def source_digests(config: Train) -> dict[str, str]:
    """SHA-256 of the source file of every imported module of the packages that custom components of the config come from.

    Installed packages are not read: their versions are recorded. The components must have been built.
    """
    # Code of the user changes between runs without a version number; installed packages have one
    packages = {target.partition(".")[0] for _, target in targets_in(to_plain(config))} - _KNOWN
    found = {}
    for name in sorted(name for name in sys.modules if name.partition(".")[0] in packages):
        file = getattr(sys.modules[name], "__file__", None)
        if not file or not file.endswith(".py"):
            continue
        path = Path(file)
        if any(part in _INSTALLED for part in path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")):
            continue
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:  # it was imported from there, and is gone
            continue
    return found


def compare_data(
    checkpoint: dict[str, Any], splits: DataModule, identity: dict[str, Any], sources: dict[str, str], ignore: bool
) -> list[str]:
    """Compare data, their fingerprint and `source_digests` with the contents of a checkpoint; returns warnings.

    Raises:
        UserError: if the data are others, unless `ignore` says to continue with them at the end of an epoch.
    """
    before, inside_epoch = checkpoint["metrics"]["data"], checkpoint["position"]["batch"] > 0
    stored: dict[str, str] = checkpoint["metrics"]["sources"]
    warnings = []
    # An edit of the source need not change any result, so it is a warning only
    if changed := [name for name in sources if stored.get(name, sources[name]) != sources[name]]:
        since = "has changed since the checkpoint was written: the resumed run may differ"
        warnings.append(f"the source of {', '.join(changed)} {since}")
    others = class_changes(checkpoint["classes"], list(splits.classes)) + data_changes(
        before, identity, splits.fingerprint
    )
    if not others:
        # An earlier run that did not hash the samples left nothing to compare with
        if any("bytes" in facts and "bytes" not in before.get(name, {}) for name, facts in identity.items()):
            warnings.append("data.identity=full: the checkpoint has no digest of every sample to compare with")
        return warnings
    problem = f"these are not what the checkpoint was trained on: {'; '.join(others)}"
    if inside_epoch and before.get("train", {}).get("samples") != splits.train.samples:
        # Inside an epoch, the position counts batches of an order that depends on the number of samples.
        raise UserError("data", problem, "the same data, or a checkpoint from the end of an epoch")
    if not ignore:
        raise UserError("data", problem, "the same data, or data.identity=ignore to use these")
    return [*warnings, f"data: {problem} (data.identity=ignore)"]
