"""Intermediate features of a model, by the names of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, nn

from runner.base.errors import UserError, nearest
from runner.base.files import replacing, writing
from runner.instrument.observer import Observer

_MOST_LISTED = 60


class Extractor:
    """Intermediate features of a model: images (B, C, H, W) -> dict of name -> tensor, in the order of `names`.

    A name is that of a module, such as `stages.2`, whose output is returned; of a module that is called several times, the
    last one. The model is put into evaluation mode. The tensors are copies: a later operation that works in place does not
    change them.

    Raises:
        UserError: if there is no name, or the model has no such module; while computing, if the output of one is not a
            tensor, or it did not run.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        model.eval()
        if not names:
            raise UserError("features", "names no layer", _listed(model))
        self._names, self._tried = tuple(dict.fromkeys(names)), False
        self._found: dict[str, Tensor] = {}
        self._run = listener(model, names, lambda name, tensor: self._found.update({name: tensor.clone()}))

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Features of images (B, C, H, W)."""
        self._found.clear()
        self._run(images)
        for name in self._names:
            if name not in self._found:
                raise UserError("features", f"'{name}' does not run when the model is evaluated", "other layers")
        return {name: self._found.pop(name) for name in self._names}

    def rows(self, images: Tensor) -> dict[str, Tensor]:
        """Features with a row for each image (B, C, H, W): name -> (B, ...).

        Raises:
            UserError: if the first axis of a feature is not the batch, as with windows, or tokens first.
        """
        # The first batch is tried in another size too, since an axis may be as long as the batch by accident.
        others = [] if self._tried else [images[:1] if len(images) > 1 else images.repeat(2, 1, 1, 1)]
        self._tried = True
        for batch in (*others, images):
            found = self(batch)
            for name, tensor in found.items():
                if tensor.ndim == 0 or len(tensor) != len(batch):
                    count = f"{len(batch)} image{'s' * (len(batch) != 1)}"
                    problem = f"'{name}' gives {tuple(tensor.shape)} for {count}, which is not one row per image"
                    raise UserError("features", problem, "layers whose outputs have the batch as their first axis")
        return found


def listener(
    model: nn.Module, names: Sequence[str], report: Callable[..., object], key: str = "features", run: Any = None
) -> Callable[[Any], Any]:
    """A function that computes what `model` does, or `run`; each tensor is reported with its name once it is computed.

    The tensors are the ones that are computed with, no copies, so that gradients can be asked of them.

    Raises:
        UserError: as for `Extractor`.
    """
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UserError(key, f"the model has no layer '{name}'", _listed(model), nearest(name, modules))

    def take(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output  # attention also returns its weights
        if not isinstance(tensor, Tensor):
            raise UserError(key, f"'{name}' is a {type(output).__name__}, not a tensor", "other layers")
        report(name, tensor)

    def forward(images: Any) -> Any:
        with Observer(model, after=take, names=names):
            return (run or model)(images)

    return forward


def _listed(model: nn.Module) -> str:
    # Of a large model the outer layers are more useful than the first sixty.
    names = sorted((name for name, _ in model.named_modules() if name), key=lambda name: name.count("."))
    more = f" and {len(names) - _MOST_LISTED} more inside them" * (len(names) > _MOST_LISTED)
    return ", ".join(names[:_MOST_LISTED]) + more


def write_features(batches: Iterator[Mapping[str, Tensor]], path: Path) -> dict[str, tuple[int, ...]]:
    """Write batches of named tensors as one array each, (samples, ...): float32, or int64 for whole numbers.

    They are gathered in memory. The file appears whole or not at all.

    Args:
        batches: tensors by name, the same names and row shapes in each.
        path: ends in `.npz` or `.safetensors`.

    Returns:
        The shapes by name.

    Raises:
        UserError: if it cannot be written, or a batch has rows of another shape than those before.
    """
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, tensor in batch.items():
            rows = found.setdefault(name, [])
            rows.append(
                tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64, copy=True)
            )
            if rows[-1].shape[1:] != rows[0].shape[1:]:
                shapes = f"{tuple(rows[-1].shape[1:])} in one batch and of {tuple(rows[0].shape[1:])} in another"
                raise UserError("features", f"{name} has rows of {shapes}", "layers whose outputs have one shape")
    arrays: dict[str, Any] = {name: torch.cat(rows).numpy() for name, rows in found.items()}
    with replacing(path, named=True) as file, writing(path):
        if path.suffix == ".npz":
            np.savez(file, **arrays)
        else:
            file.write(save(arrays))
    return {name: array.shape for name, array in arrays.items()}
