"""What Hydra and OmegaConf say, with the key in front."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.base.errors import Problem, nearest
from runner.config.keys import ANY_KEY, closest

_DETAIL = re.compile(
    r"full_key:|object_type=|reference_type=|Config search path|provider=|In '.*while composing config:$"
)
_PLACE = re.compile(r"In '(.*?)': ?")
_UNKNOWN = re.compile(r"Key '(.*?)' (?:is )?not in (?:struct|'\w+')")
_ABSENT = re.compile(r"Could not delete from config\. '(.*)' does not exist")

REPLACED = {"joblib": "pool", "submitit_local": "pool", "submitit_slurm": "slurm"}
"""Launchers of plugins of Hydra, and the launcher of this program that replaces each."""


def as_problem(error: BaseException, known: Sequence[str] = ()) -> Problem:
    """The problem behind an error of composing.

    Args:
        error: of Hydra or OmegaConf.
        known: the keys of the config, for a name that is none of them.
    """
    group, _, option = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group.startswith("hydra/"):
        others = getattr(error, "options", None) or []
        close = REPLACED.get(option) or nearest(option, others)
        return Problem(group, f"there is no '{option}'", ", ".join(others), close)
    inner = error
    while inner.__cause__ is not None:  # the innermost says what is wrong, the outer ones in which file
        inner = inner.__cause__
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(line for line in lines if not _DETAIL.match(line))
    if absent := _ABSENT.search(text):
        return Problem(absent[1], "cannot be deleted, because it does not exist", ANY_KEY, closest(absent[1], known))
    if _UNKNOWN.search(text):
        if named.startswith("hydra."):
            return Problem(named, "is not a key", "a key of Hydra (--cfg hydra prints them all)")
        return Problem(named, "is not a key", ANY_KEY, closest(named, known))
    file = _PLACE.search(f"{error} {inner}")
    return Problem(named or (file[1] if file else "config"), _PLACE.sub("", text).rstrip(".") or type(inner).__name__)
