"""Weights alone, from a checkpoint of the program's, a safetensors file, or a state dict that somebody saved."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoint import find, pickles
from runner.checkpoint.file import is_checkpoint
from runner.checkpoint.weights import part_with, weights_of
from runner.config.errors import UserError, first_line

_KEY = "init_from"
_INSIDE = ("state_dict", "model", "model_state_dict", "model_state")


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and where they were read.

    Attributes:
        path: the file.
        tensors: as a model's state dict has them, on the CPU.
        classes: names of the classes that the model tells apart; empty where the file does not say.
        kind: of a checkpoint's, see `weights_of`: `raw`, `ema` or `swa`; those of other files are `raw`.
        warnings: what was passed over on the way to the file.
    """

    path: Path
    tensors: dict[str, Tensor]
    classes: tuple[str, ...] = ()
    kind: str = "raw"
    warnings: list[str] = field(default_factory=list)


def read_weights(init_from: str, runs: Path) -> Weights:
    """Read the weights that `init_from` names.

    Args:
        init_from: a checkpoint (its average, where the best evaluation is one of it), a run directory (its best evaluation,
            or the last state), `last` or `best` for the newest run in `runs`, a `.safetensors` file, or what `torch.save`
            made of a state dict.
        runs: folder with the runs of one name.

    Raises:
        UserError: if nothing is there, it is damaged, or holds more than tensors and plain containers.
    """
    path = Path(init_from)
    if path.is_file() and not is_checkpoint(path):
        return Weights(path, _safetensors(path) if path.suffix == ".safetensors" else _state_dict(path))
    found = find.load(init_from, runs, prefer="best", key=_KEY, parts=part_with())
    state, kind = weights_of(found.contents)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return Weights(found.path, tensors, tuple(found.contents["classes"]), kind, found.warnings)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = dict(load_file(path))
    except (SafetensorError, OSError, MemoryError) as error:
        raise UserError(f"{_KEY}: {path} cannot be read: {error}") from error
    if not tensors:
        raise UserError(f"{_KEY}: {path} has no tensors\n    allowed: a file with the weights of a model")
    return tensors


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch saved: a state dict, or a mapping that has one under a usual name."""
    try:
        with path.open("rb") as file:
            contents = pickles.load(file, path.stat().st_size, older=True)
    except pickles.NotSaved as error:
        raise UserError(f"{_KEY}: {path} is no file of torch.save's: {error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{_KEY}: {path} is refused: it is damaged, or holds more than tensors and plain containers; nothing in it "
            "was run\n    allowed: a checkpoint of this program's, .safetensors, or torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:  # a crafted file can raise anything in the unpickler
        reason = first_line(error)
        raise UserError(f"{_KEY}: {path} cannot be read: {reason}") from error
    candidates = [contents, *(contents.get(key) for key in _INSIDE)] if isinstance(contents, Mapping) else []
    for candidate in candidates:
        if isinstance(candidate, Mapping):
            tensors = {str(name): value for name, value in candidate.items() if _is_plain(value)}
            if reason := pickles.wrong_extent(tensors, path.stat().st_size):
                raise UserError(
                    f"{_KEY}: {path} is refused: {reason}\n    allowed: tensors whose values are in the file"
                )
            if tensors:
                return tensors
    raise UserError(
        f"{_KEY}: {path} has no tensors by name\n    allowed: a state dict, or a mapping with one under {' or '.join(_INSIDE)}"
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
