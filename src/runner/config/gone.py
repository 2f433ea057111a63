"""Keys and values that are gone: what files of earlier versions may still have, and what to do instead.

A key that ends needs one line in `GONE`. Files are read without it, and on a command line it is a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from runner.base.errors import Problem, UserError
from runner.config.keys import flatten, key_of
from runner.config.validate import shown
from runner.config.yaml_files import plain


class Gone(NamedTuple):
    """A key that is gone, or values that a key no longer takes."""

    instead: str  # what to do, for people
    default: Any = ...  # the value that nobody is warned of
    values: Mapping[Any, Any] | None = None  # what replaces a value, or type of values, that is gone; None: the key is

    def now(self, value: Any) -> Any:
        """What replaces a value of a file: itself if it is still allowed, `...` for the default of this version."""
        if self.values is None:
            return ...
        return next((new for old, new in self.values.items() if value == old or type(value) is old), value)


_SUMMARIES = Gone("torch.utils.tensorboard.SummaryWriter in a callback", default=False)
GONE: dict[str, Gone] = {
    "activation_checkpointing": Gone(
        "true for every block, or patterns of module names", default=False, values={int: True, float: True}
    ),
    "data.dataset.cache_gb": Gone("copy the tar files to a disk and set data.root to their folder", default=None),
    "data.identity": Gone("set check, and run sha256sum on the files", default="check", values={"full": "check"}),
    **dict.fromkeys(("data.mirror", "data.dataset.mirror"), Gone("put files of a mirror into data.root", default=None)),
    "experiment": Gone("detection, which is this recipe now", values={"detection_rtdetr": "detection"}),
    "fsdp.lazy_init": Gone("leave it out, as every process builds the whole model", default=True),
    **{f"logger.{name}.max_share": Gone("leave it out", default=0.005) for name in ("mlflow", "wandb")},
    **{f"logger.tensorboard.{key}": _SUMMARIES for key in ("graph", "histograms", "hparams")},
    "lr": Gone("run find-lr, and set the number that it prints", default=None, values={"auto": ...}),
    "on_nonfinite": Gone(
        "set on_nonfinite=skip, or resume the last checkpoint", default="raise", values={"rollback": "skip"}
    ),
    "on_oom": Gone(
        "set half of data.batch_size and twice accumulate, which gives the same update; or data.batch_size=auto",
        default="raise",
    ),
    **{f"position.{name}": Gone("") for name in ("micro_batch", "pieces", "skipped_steps")},
    "search.objectives": Gone("set checkpoint.monitor and checkpoint.mode to one metric", default={}),
    "search.warm_start": Gone(
        "continue a search with more search.trials, or narrow search.space to good values", default=None
    ),
    "sweep.fail_fast": Gone("stop the sweep with Ctrl-C; the same command continues it", default=False),
    "sweep.retries": Gone("repeat the command, which resumes failed jobs", default=0),
    "train": Gone("run train max_steps=200, and compare its loss with that of a guess", default=False),
    "train_steps": Gone("run train max_steps=200", default=200),
}
"""By dotted key, which stands for all keys inside it, too; `KEY.*` for those alone. `position.NAME` is a field of a checkpoint."""


def _entry(key: str, values: Mapping[str, Any] | None = None, name: str = "") -> Gone | None:
    # Arguments of a user's class are the user's, whatever they are called; `name` is the key inside `values`
    target = f"{str(name).rpartition('.')[0]}._target_".lstrip(".")
    if values is not None and not str(values.get(target, "runner.")).startswith("runner."):
        return None
    parents = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
    # A key that had a number, a text or a switch had no keys inside it
    plain = (name for name in parents if not isinstance(getattr(GONE.get(name), "default", None), int | float | str))
    names = [key, *(name for parent in plain for name in (parent, f"{parent}.*"))]
    return next((GONE[name] for name in names if name in GONE), None)


def drop(values: Any, prefix: str = "") -> dict[str, Any]:
    """Remove and replace what is gone in the content of a file; returns what was there by dotted key."""
    was = dict[str, Any]()
    for name, value in [*values.items()] if isinstance(values, dict) else ():
        key = f"{prefix}{name}"
        now = entry.now(value) if (entry := _entry(key, values, name)) is not None else value
        inner = drop(value, f"{key}.") if now is value else flatten(value, key)
        values[name], was = now, was | inner
        if now is ... or (inner and now == {}):  # or nothing is left of a section
            del values[name]
    return was


def words_without(words: Iterable[str], config: Mapping[str, Any] | None = None) -> list[str]:
    """The overrides in a file without what is gone; `config` has what other files say, such as `_target_`, by dotted key."""
    kept, words = list[str](), [*words]
    values = dict(config or {}) | {key_of(word): word.partition("=")[2] for word in words}
    for word in words:
        key, _, value = word.partition("=")
        entry = _entry(key_of(word), values, key_of(word))
        with contextlib.suppress(UserError):  # text that cannot be read is kept
            value = value if entry is None else plain(value, key)
        if (now := value if entry is None else entry.now(value)) is not ...:
            kept.append(word if now is value else f"{key}={shown(now)}")
    return kept


def warning(where: str, was: Mapping[str, Any]) -> list[str]:
    """A warning that names what was dropped, unless all of it was the default."""
    found = [(key, value, entry) for key, value in was.items() if (entry := _entry(key)) and value != entry.default]
    named = ", ".join(f"{key}={shown(value)} (instead: {entry.instead})" for key, value, entry in found)
    return [f"{where}: settings of an earlier version have no effect: {named}"] if found else []


def explained(problem: Problem, value: Any = ...) -> Problem:
    """The problem of a key with a value; says what to do instead if it, or a key inside it, is gone."""
    for key, each in flatten(value, problem.key).items():
        if (entry := _entry(key)) is not None and (entry.values is None or entry.now(each) is not each):
            message = "no longer exists" if entry.values is None else f"can no longer be {shown(each)}"
            return dataclasses.replace(problem, key=key, message=message, allowed=entry.instead, nearest="")
    return problem
