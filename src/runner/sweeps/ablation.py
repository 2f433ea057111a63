"""The jobs of `sweep=ablate`: the whole config, and then each toggle that is on switched off by itself."""

from __future__ import annotations

from typing import Any

from runner.base.errors import UserError, nearest
from runner.config import keys

TOGGLES = (
    "amp", "channels_last", "compile", "activation_checkpointing", "cudnn_benchmark", "tf32", "matmul_precision",
    "sync_batchnorm", "deterministic", "ema", "swa", "grad_clip.norm", "grad_clip.value", "grad_clip.agc", "init", "freeze",
    "data.sampler", "data.shift", "data.hflip", "transform.train", "transform.mix", "loss.label_smoothing", "model.dropout",
    "optimizer.weight_decay", "optimizer.no_decay", "optimizer.lr_mult", "optimizer.layer_decay",
)  # fmt: skip
"""Keys that are switched off where the config has them on; `sweep.ablate=[...]` names others."""
_OFF: tuple[Any, ...] = (False, None, 0, [], {})


def toggles_off(values: dict[str, Any], schema: type) -> dict[str, str]:
    """The override that switches off each toggle that is on, by key.

    Args:
        values: the composed config.
        schema: of the verb.

    Raises:
        UserError: if `sweep.ablate` names what is not a toggle or is off already, or no toggle is on.
    """
    wanted = values["sweep"]["ablate"]
    named = wanted if isinstance(wanted, list) else []
    # What is named has to be on, or its job would be the base once more
    for key in named:
        if keys.at(values, key) is ...:
            close = nearest(key, [*TOGGLES, *keys.flatten(values)])
            raise UserError("sweep.ablate", f"names {key}, which the config does not have", "keys of the config", close)
        if keys.at(values, key) in _OFF:
            raise UserError("sweep.ablate", f"names {key}, which is off already", "keys that are on")
    on = [key for key in named or TOGGLES if keys.at(values, key) not in (..., *_OFF)]
    if not on:
        allowed = f"one of {', '.join(TOGGLES)} on, or sweep.ablate=[KEY]"
        raise UserError("sweep.ablate", "finds no toggle that is on", allowed)
    return {key: f"{key}={_off(key, values, schema)}" for key in on}


def _off(key: str, values: dict[str, Any], schema: type) -> str:
    """The text of the value that switches a key off, which its type decides."""
    annotation, value = keys.find(schema, key), keys.at(values, key)
    # The type says what off is: false, null, an empty list or zero
    kinds = [keys.bare(member) for member in keys.members(annotation)]
    if bool in kinds or value is True:
        return "false"
    if type(None) in kinds:
        return "null"
    if isinstance(value, list):
        return "[]"
    if isinstance(value, int | float):
        return "0"
    if annotation is Any:
        return "null"
    why = f"names {key}, which cannot be switched off: it is {keys.describe(annotation)}"
    raise UserError("sweep.ablate", why, "other keys")


def ablated(jobs: list[list[str]], off: dict[str, str]) -> list[list[str]]:
    """Each job as it is, and once for each toggle with that toggle off."""
    return [[*job, *word] for job in jobs for word in ([], *([each] for each in off.values()))]
