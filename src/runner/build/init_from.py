"""Initial weights: drawn, or loaded from a file as far as they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.build.finetune import find_head, initialize
from runner.checkpoint.weights import Weights, read_weights, weights_sha256
from runner.config.errors import UserError
from runner.config.schema.train import Train
from runner.data.build import DataModule
from runner.models.heads import Head

_SHOWN = 40
Lack = Literal["missing", "unexpected", "of another shape", "of other classes"]


@dataclass(frozen=True)
class Misfit:
    """A tensor of a model or of a file that has no counterpart in the other.

    Attributes:
        name: its name.
        lack: what is wrong.
        given: its shape in the file; None where it is not there.
        wanted: its shape in the model; None where it is not there.
        in_head: whether it belongs to the head.
    """

    name: str
    lack: Lack
    given: tuple[int, ...] | None
    wanted: tuple[int, ...] | None
    in_head: bool


@dataclass(frozen=True)
class Started:
    """What `init_from` loaded.

    Attributes:
        path: the file.
        sha256: of all its tensors, see `weights_sha256`.
        loaded: number of tensors that were loaded.
        kind: what they are: `raw`, or an average, `ema` or `swa`.
        misfits: tensors that were not loaded.
        warnings: files that were skipped while searching.
    """

    path: Path
    sha256: str
    loaded: int
    kind: str = "raw"
    misfits: list[Misfit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, str, str]:
        """Label, value and reason for people."""
        left = f", {len(self.misfits)} that do not fit left as they are" if self.misfits else ""
        average = "" if self.kind == "raw" else f" of the average ({self.kind})"
        return "weights", f"{self.loaded} tensors{average}{left}", f"init_from: {self.path}"

    def table(self) -> list[list[str]]:
        """Rows of tensor, what is wrong, shape in the file and shape in the model, with a last one that counts those not shown."""
        rows = [[each.name, each.lack, _shown(each.given), _shown(each.wanted)] for each in self.misfits[:_SHOWN]]
        more = len(self.misfits) - _SHOWN
        return [*rows, [f"and {more} more", "", "", ""]] if more > 0 else rows

    def record(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "path": str(self.path.resolve()),
            "weights_sha256": self.sha256,
            "kind": self.kind,
            "tensors": self.loaded,
        }


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights of a new run come from; empty where a checkpoint brings them.

    Attributes:
        schemes: what `init` names.
        started: what `init_from` loaded.
    """

    schemes: Sequence[str] = ()
    started: Started | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Labels, values and reasons for people."""
        rows = [("initial", ", ".join(self.schemes), "init")] if self.schemes else []
        return [*rows, self.started.row()] if self.started else rows


def set_initial_weights(config: Train, model: nn.Module, data: DataModule, image: Tensor) -> InitialWeights:
    """Set weights as `init` says, then load those of `init_from`.

    Raises:
        UserError: if a scheme does not apply to the model, or the file does not fit it.
    """
    schemes = initialize(config, model, image, data.class_counts)
    if config.init_from is None:
        return InitialWeights(schemes)
    return InitialWeights(schemes, start_from(config, model, find_head(model, image), data.classes))


def _shown(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def start_from(config: Train, model: nn.Module, head: Head | None, classes: Sequence[str]) -> Started:
    """Load the weights of `init_from` that fit; nothing else of a checkpoint is used.

    Raises:
        UserError: if the file cannot be read, more does not fit than `init_mismatch` allows, or a tensor holds another kind
            of values than the model's.
    """
    assert config.init_from is not None
    given = read_weights(config.init_from, Path(config.output_root) / config.name)
    own = model.state_dict()
    tensors = _without_prefix(given.tensors, own)
    misfits = _misfits(tensors, own, head, _other_classes(given, classes))
    left = {each.name for each in misfits}
    fitting = {name: tensor for name, tensor in tensors.items() if name in own and name not in left}
    refused = [each for each in misfits if not _allowed(config.init_mismatch, each)]
    if refused or not fitting:
        raise _mismatch(config.init_mismatch, given.path, refused or misfits)
    for name, tensor in fitting.items():
        _check_kind(name, tensor, own[name], given.path)
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return Started(
        path=given.path,
        sha256=weights_sha256(given.tensors),
        loaded=len(fitting),
        kind=given.kind,
        misfits=misfits,
        warnings=given.warnings,
    )


def _check_kind(name: str, given: Tensor, wanted: Tensor, path: Path) -> None:
    # In a state dict converted to half precision, counters are floats too.
    is_counter = name.endswith("num_batches_tracked") and given.is_floating_point()
    if _kind(given) != _kind(wanted) and not is_counter:
        problem = f"the tensor {name} of {path} is {given.dtype}, and the model's is {wanted.dtype}"
        raise UserError("init_from", problem, f"{_kind(wanted)} values of any precision")


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    if tensor.dtype == torch.bool:
        return "boolean"
    return "floating-point" if tensor.is_floating_point() else "integer"


def _without_prefix(tensors: dict[str, Tensor], own: dict[str, Any]) -> dict[str, Tensor]:
    """Remove prefixes that all names have and the model's do not, such as `module.` and `_orig_mod.`."""
    while tensors and not any(name in own for name in tensors):
        first = {name.partition(".")[0] for name in tensors}
        if len(first) > 1 or not all("." in name for name in tensors):
            break
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    return tensors


def _other_classes(given: Weights, classes: Sequence[str]) -> bool:
    return bool(given.classes and classes) and given.classes != tuple(classes)


def _misfits(tensors: dict[str, Tensor], own: dict[str, Any], head: Head | None, other_classes: bool) -> list[Misfit]:
    found = []
    for name in dict.fromkeys([*own, *tensors]):
        given, wanted = tensors.get(name), own.get(name)
        in_head = head is not None and head.covers(name)
        lack: Lack
        if isinstance(given, Tensor) and isinstance(wanted, Tensor):
            if given.shape != wanted.shape:
                lack = "of another shape"
            elif in_head and other_classes:
                lack = "of other classes"
            else:
                continue
        elif given is None and (not isinstance(wanted, Tensor) or name.endswith(".num_batches_tracked")):
            continue  # a counter that older files do not have
        else:
            lack = "missing" if given is None else "unexpected"
        found.append(Misfit(name, lack, _shape(given), _shape(wanted), in_head))
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _allowed(mismatch: str, misfit: Misfit) -> bool:
    return mismatch == "skip" or (mismatch == "head" and misfit.in_head)


def _mismatch(policy: str, path: Path, misfits: Sequence[Misfit]) -> UserError:
    kinds: dict[str, list[str]] = {}
    for each in misfits:
        shapes = f" {_shown(each.given)} for {_shown(each.wanted)}" if each.lack == "of another shape" else ""
        kinds.setdefault(each.lack, []).append(each.name + shapes)
    listed = "; ".join(
        f"{len(names)} {lack} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for lack, names in kinds.items()
    )
    others = {"head": "init_mismatch=skip, or ", "raise": "init_mismatch=head or skip, or "}
    problem = f"the tensors of {path} are not those of this model: {listed}"
    return UserError("init_from", problem, f"{others.get(policy, '')}weights of this model")
