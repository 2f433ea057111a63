"""What Hydra and OmegaConf say, with the key in front."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.base.errors import Problem, nearest
from runner.config.keys import ANY_KEY, closest

# What they say of a key that does not exist
_ABSENT = re.compile(r"Could not delete from config\. '(.*)' does not exist")
_UNKNOWN = re.compile(r"Key '(.*?)' (?:is )?not in (?:struct|'\w+')")

REPLACED = {"joblib": "pool", "submitit_local": "pool", "submitit_slurm": "slurm"}
"""Launchers of plugins of Hydra, and the launcher of this program that replaces each."""


def as_problem(error: BaseException, known: Sequence[str] = ()) -> Problem:
    """The problem behind an error of composing.

    Args:
        error: of Hydra or OmegaConf.
        known: the keys of the config, for a name that is none of them.
    """
    group, _, option = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    # A misspelt launcher or sweeper deserves a list of those that exist
    if group in ("hydra/launcher", "hydra/sweeper"):
        others = getattr(error, "options", None) or []
        if group == "hydra/sweeper":
            return Problem(group, f"there is no '{option}'", f"sweep=optuna for a search, or {', '.join(others)}")
        close = REPLACED.get(option) or nearest(option, others)
        return Problem(group, f"there is no '{option}'", ", ".join(others), close)
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:  # the innermost says what is wrong, the outer ones where
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] + lines
        cause = cause.__cause__
    text = " ".join(lines)
    file = re.match(r"In '(.*?)'", text)
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "config")
    key = key or (file[1] if file else "config")
    if match := _ABSENT.search(text):
        return Problem(match[1], "cannot be deleted, because it does not exist", ANY_KEY, closest(match[1], known))
    if _UNKNOWN.search(text):
        if key.startswith("hydra."):
            return Problem(key, "is not a key", "a key of Hydra (--cfg hydra prints them all)")
        return Problem(key, "is not a key", ANY_KEY, closest(key, known))
    if isinstance(error, RecursionError):
        return Problem("defaults", "a config includes itself, directly or indirectly", "defaults without a cycle")
    said = next((line for line in lines if not line.startswith("In '")), type(error).__name__)
    return Problem(key, said.rstrip("."))
