"""Weights alone: which ones of a checkpoint, those of files from elsewhere, and their fingerprint."""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.base.errors import UserError, first_line
from runner.base.reading import open_regular
from runner.checkpoint import find
from runner.checkpoint.file import Parts, is_checkpoint
from runner.config import stored
from runner.config.schema.train import Train
from runner.config.schema.verbs import Weights as Which
from runner.distributed.sharding import whole

_KEY = "init_from"
_INSIDE = ("state_dict", "model", "model_state_dict", "model_state")


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over a state dict: for each tensor in order of name, its name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, Tensor):
            continue
        tensor = whole(value.detach()).cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_of(contents: dict[str, Any], which: Which = "auto") -> tuple[dict[str, Any], str]:
    """Weights of a checkpoint as a state dict of the model, and what they are: `raw`, `ema` or `swa`.

    `auto` takes the average if the best evaluation is one of it, and the checkpoint holds it complete. Raises `UserError` if
    the average is asked for and there is none, or only one with BatchNorm's statistics of other weights.
    """
    # Checkpoints of runs without an average have none of these
    averaged = contents["averaged"] or {"kind": "", "weights": None, "calibrated": True}
    kind, weights = averaged["kind"], averaged["weights"]
    if which == "averaged" and weights is None:
        raise UserError("weights", "is averaged, but the checkpoint holds no average", "auto or raw")
    # Without statistics for the mean weights, a model with BatchNorm would give nonsense
    if which == "averaged" and not averaged["calibrated"]:
        problem = f"is averaged, but the checkpoint was saved after {kind} took weights and before an evaluation"
        reason = f"{problem}, which computes BatchNorm's statistics for their mean"
        raise UserError("weights", reason, "raw, or a checkpoint of an evaluation such as best.safetensors")
    # The best evaluation decides what `auto` means: the weights that gave the best value
    best = contents["metrics"]["best"]
    of_average = best is not None and bool(kind) and best["metric"].startswith(f"val/{kind}_")
    if weights is not None and (which == "averaged" or (of_average and averaged["calibrated"] and which == "auto")):
        return weights, kind
    return contents["model"], "raw"


def loss_of(contents: dict[str, Any], kind: str, config: Train, loss: nn.Module) -> dict[str, Any]:
    """A state dict for a loss beside the weights of a kind; what the checkpoint lacks is as the loss has it.

    Of a loss that `config` changes, only the parameters are the checkpoint's.
    """
    saved = (contents if kind == "raw" else contents["averaged"]).get("loss")
    if not saved:
        return loss.state_dict()
    if stored.load(contents["config"], "").get("loss") != stored.load(stored.dump(config), "").get("loss"):
        saved = {name: saved[name] for name, _ in loss.named_parameters() if name in saved}
    return loss.state_dict() | saved


def part_with(which: Which = "auto") -> Parts:
    """The parts of a checkpoint that `weights_of` and `loss_of` take: all that is read of a file to use its weights."""

    def part(contents: dict[str, Any]) -> tuple[str, ...]:
        try:
            return ("metrics", *(("model", "loss") if weights_of(contents, which)[1] == "raw" else ("averaged",)))
        except UserError:  # raised again by whoever takes them
            return ()

    return part


@dataclass(frozen=True)
class Weights:
    """Tensors by name, as in a model's state dict on the CPU, and where they were read."""

    path: Path  # the file
    tensors: dict[str, Tensor]
    classes: tuple[str, ...] = ()  # that the model tells apart; empty where the file does not say
    kind: str = "raw"  # of a checkpoint's, see `weights_of`
    warnings: list[str] = field(default_factory=list)  # what was passed over on the way to the file
    config: str = "{}"  # that of a checkpoint, as YAML


def read_weights(init_from: str, runs: Path) -> Weights:
    """Read the weights that `init_from` names.

    Args:
        init_from: a checkpoint (its average, where the best evaluation is one of it), a run directory, or `last` for the
            newest run in `runs` (its best evaluation, or the last state), `best`, a `.safetensors` file, or what `torch.save`
            made of a state dict.
        runs: folder with the runs of one name.

    Raises:
        UserError: if nothing is there, it is damaged, or holds more than tensors and plain containers.
    """
    # Files of other programs have tensors only; those of this one have a config and classes too
    path = Path(init_from)
    if path.is_file() and not is_checkpoint(path):
        tensors = _tensors_of(path)
        if not tensors:
            allowed = f"a state dict, or a mapping with one under {' or '.join(_INSIDE)}"
            raise UserError(_KEY, f"{path} has no tensors by name", allowed)
        return Weights(path, tensors)
    found = find.load(init_from, runs, prefer="best", key=_KEY, parts=part_with())
    state, kind = weights_of(found.contents)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    classes, config = tuple(found.contents["classes"]), found.contents["config"]
    return Weights(found.path, tensors, classes, kind=kind, warnings=found.warnings, config=config)


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of another program: safetensors, or what torch saved, from which only data are unpickled."""
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # Only tensors and plain containers are unpickled, so that nothing in the file can run
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            size, zipped = path.stat().st_size, file.read(4) == b"PK\3\4"
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        # Training scripts put the weights beside an optimizer and more, under a few usual names
        inner = [contents, *(contents.get(key) for key in _INSIDE)] if isinstance(contents, Mapping) else []
        states = [each for each in inner if isinstance(each, Mapping)]
        named = ({str(name): value for name, value in each.items() if isinstance(value, Tensor)} for each in states)
        tensors = next(filter(None, named), {})
        # Strides can make a small file claim a huge tensor, so every tensor has to fit into the file
        for name, value in tensors.items():
            dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
            if not dense or value.device.type != "cpu" or max(value.nbytes, value.untyped_storage().nbytes()) > size:
                raise UserError(
                    _KEY, f"{path} is refused: {name[:200]!r} is not a dense tensor that fits into the file"
                )
        return {name: value.detach() for name, value in tensors.items()}
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        # torch names the class that it refused, which tells a user what the file really is
        found = re.search(r"GLOBAL ([\w.]{1,200})", str(error))
        refused = f"is damaged, or holds more than tensors and plain containers{f' ({found[1]})' if found else ''}"
        allowed = "a checkpoint of this program's, .safetensors, or torch.save(model.state_dict(), ...)"
        raise UserError(_KEY, f"{path} is refused: it {refused}; nothing in it was run", allowed) from error
    except Exception as error:  # a crafted file can raise anything in the unpickler
        reason = first_line(error).split(". ")[0]  # after it, torch advises to trust the file
        raise UserError(_KEY, f"{path} cannot be read: {reason[:200]}") from error
