"""What Hydra itself would build for a run (callbacks, launcher, sweeper, loggers): only the command line may choose it."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from runner.config.errors import Problem
from runner.config.keys import is_of_hydra, key_of, walk, within
from runner.config.validate import shown

_BUILT = ("callbacks", "launcher", "sweeper")
_LOGGING = ("job_logging", "hydra_logging")
_OURS = ("hydra._internal.core_plugins.", "runner.launch.")  # what is installed, and not a file in a folder
_WITH_EFFECT = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.launcher", "hydra.sweeper.params", "hydra.searchpath"),
    "hydra.sweeper",
)
_HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter")
_FACTORIES = ("colorlog.ColoredFormatter",)
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_OF_THE_RUN = "${hydra.runtime.output_dir}/"


def without_effect(words: Sequence[str]) -> list[Problem]:
    """Problems of overrides of `hydra.*` that do nothing, as this program starts its jobs itself."""
    problems = []
    for word in words:
        key = key_of(word).replace("/", ".")
        if is_of_hydra(word) and not within(key, _WITH_EFFECT) and key != "hydra":
            allowed = ", ".join(_WITH_EFFECT[:-1])
            problems.append(Problem(key, "has no effect", f"without it; of Hydra's keys, these have one: {allowed}"))
    return problems


def unasked(cfg: DictConfig, words: Sequence[str]) -> list[Problem]:
    """Problems of nodes below `hydra` that would build something that the command line does not name.

    Hydra builds them before this program can check anything, from any folder of configs.

    Args:
        cfg: the composed config with `hydra`.
        words: overrides of the command line.
    """
    given = [key_of(word).replace("/", ".") for word in words]
    problems = []
    for section in (*_BUILT, *_LOGGING):
        node = OmegaConf.to_container(cfg.hydra[section], resolve=False) if section in cfg.hydra else None
        for key, value in walk(node, f"hydra.{section}"):
            if not (isinstance(value, dict | list) or within(key, given)) and _builds(section, key, str(value)):
                message = "comes from a folder of configs, and only the command line can make Hydra build things"
                allowed = f"'{key}={shown(str(value))}' on the command line, or without it"
                problems.append(Problem(key, f"'{value}' {message}", allowed))
    return problems


def _builds(section: str, key: str, value: str) -> bool:
    """Whether a leaf makes Hydra or `logging` import, call or write something of its choice."""
    last = key.rpartition(".")[2]
    if section in _BUILT:
        return last == "_target_" and (section == "callbacks" or not value.startswith(_OURS))
    if value.startswith(("ext://", "cfg://")):
        return value not in _STREAMS
    if last == "filename":
        return not value.startswith(_OF_THE_RUN) or ".." in value
    return (last == "()" and value not in _FACTORIES) or (last == "class" and value not in _HANDLERS)
