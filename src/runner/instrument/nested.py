"""The tensors in nested containers.

`torch.utils._pytree` is private by name, and torch has no public form of it. This file is the only one that uses it;
`tests/instrument/test_nested.py` fails if it changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, mappings and classes registered with `torch.utils._pytree`, in order."""
    if isinstance(value, Tensor):  # what nearly every module returns
        return [value]
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The same with the dotted place of each, such as `exp_avg.0`, below `name`."""
    for path, leaf in _pytree.tree_flatten_with_path(value)[0]:
        place = ".".join(filter(None, [name, *(_text(key) for key in path)]))
        if isinstance(leaf, Tensor):
            yield place, leaf
        elif isinstance(leaf, Mapping):  # a subclass that is not registered is a leaf to torch
            yield from named_tensors(dict(leaf), place)
        elif isinstance(leaf, list | tuple):
            yield from named_tensors([*leaf], place)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    return _pytree.tree_leaves(value)


def tensors_moved(value: Any, device: torch.device | str) -> Any:
    """Nested containers with every tensor on a device."""
    return mapped_items(value, Tensor, lambda tensor: tensor.to(device))


def mapped_items(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Nested containers with `function(item)` instead of each item of a kind."""
    return _pytree.tree_map_only(kind, function, value)


def parts_of_rows(value: Any, rows: int, count: int) -> list[Any]:
    """The data of a batch divided into `count` parts of consecutive samples, as `Tensor.tensor_split` divides them.

    Tensors (rows, ...) and lists of `rows` items have one item a sample; tuples and mappings hold such fields, and what is
    neither is the same in every part.
    """
    edges = [part * (rows // count) + min(part, rows % count) for part in range(count + 1)]
    return [rows_of(value, rows, slice(*pair)) for pair in itertools.pairwise(edges)]


def rows_of(value: Any, rows: int, taken: slice) -> Any:
    """Consecutive samples of the data of a batch of `rows` samples, see `parts_of_rows`."""
    if (isinstance(value, list) or (isinstance(value, Tensor) and value.ndim)) and len(value) == rows:
        return value[taken]
    if isinstance(value, Mapping):
        return {name: rows_of(item, rows, taken) for name, item in value.items()}
    if isinstance(value, list | tuple):
        kind: Any = getattr(value, "_make", type(value))
        return kind([rows_of(item, rows, taken) for item in value])
    return value


def fields_of(data: Any) -> dict[str, Tensor]:
    """The tensors in the data of a batch by name: `images` and `targets`, or the place of each."""
    named = {name or "samples": tensor for name, tensor in named_tensors(data)}
    return {"images": named["0"], "targets": named["1"]} if named.keys() == {"0", "1"} else named


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested containers, or None."""
    return next(iter(tensors_in(value)), None)


def _text(key: Any) -> str:
    return str(next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)))


def kind_of(tensor: Tensor) -> str:
    """The kind of values of a tensor, whatever their precision."""
    if tensor.is_complex():
        return "complex"
    if tensor.dtype == torch.bool:
        return "boolean"
    return "floating-point" if tensor.is_floating_point() else "integer"
