"""Digests of the source files of custom components, so that a resumed run notices a change."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from runner.config.frozen import to_plain
from runner.config.schema.train import Train
from runner.config.targets import targets_in

_KNOWN = {"runner", "torch", "torchvision", "torchmetrics"}
_INSTALLED = ("site-packages", "dist-packages")


def source_digests(config: Train) -> dict[str, str]:
    """SHA-256 of the source file of every imported module of the packages that custom components of the config come from.

    Installed packages are not read: their versions are recorded.

    Args:
        config: the config, whose components have been built.
    """
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


def changed_sources(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """A warning if modules have another source than when a checkpoint was written; None stands for an older version."""
    changed = [name for name in now if before is not None and before.get(name, now[name]) != now[name]]
    if not changed:
        return []
    return [
        f"the source of {', '.join(changed)} has changed since the checkpoint was written: the run may not go on as it would have"
    ]
