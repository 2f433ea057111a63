"""Nested states as JSON: tensors by name, every other value exactly as it is in Python."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

TENSOR = "$tensor"
_DEEPEST = 64  # containers inside each other; states of optimizers have about five
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# safetensors knows no other dtypes; tensors of these are stored as bytes.
NATIVE = {
    name: _DTYPES[dtype]
    for name, dtype in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
        "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64",
        "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    }.items()
}  # fmt: skip
BY_DTYPE = {dtype: name for name, dtype in NATIVE.items()}
_TO_TEXT: dict[type, Callable[[Any], str]] = {
    float: repr,  # NaN and the infinities, which JSON does not have
    complex: repr,
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
    torch.device: str,
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$Size": torch.Size,
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda items: Counter(dict(items)),
    "$float": float,
    "$complex": complex,
    "$bytes": bytes.fromhex,
    "$bytearray": bytearray.fromhex,
    "$dtype": lambda name: _DTYPES[name],
    "$device": torch.device,
}


class Unsupported(Exception):
    """A value that a checkpoint cannot hold."""


def identity(tensor: torch.Tensor) -> Hashable:
    """A key that tensors share which are the same memory, such as tied weights."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return id(tensor)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*start, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Tensors:
    """Tensors by the name under which a file stores them; tied ones are stored once, under their first name."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._names: dict[Hashable, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str | list[str]:
        """Store a tensor; gives its name, with the dtype where the file stores bytes instead.

        Raises `Unsupported` if it is sparse, quantized or without values.
        """
        # Such tensors have no plain bytes to write
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise Unsupported(f"{name} is a tensor that is sparse, quantized or without values")
        key, native = identity(tensor), tensor.dtype in BY_DTYPE
        # Tensors that share memory are written once, and shared again after reading
        if key not in self._names:
            while name in self.by_name or name == "__metadata__":
                name += "'"  # another tensor has this name already
            self._names[key] = name
            self.by_name[name] = tensor if native else tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)
        known = self._names[key]
        return known if native else [known, _TO_TEXT[torch.dtype](tensor.dtype)]


def encode(value: Any, place: str, tensors: Tensors, depth: int = 0) -> Any:
    """A nested state as JSON can hold it; its tensors are added to `tensors`, named after their place.

    A tensor becomes `{"$tensor": name}`; what JSON lacks becomes `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}` and
    so on. Raises `Unsupported` if it holds anything but tensors, numbers, texts and plain containers, or is nested too
    deeply.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return {TENSOR: tensors.add(place, value)}
    # What JSON can hold exactly stays readable in the file; everything else gets a tag
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in _TO_TEXT:
        return {f"${kind.__name__}": _TO_TEXT[kind](value)}
    # A reader has the same limit, so that no file overflows its stack
    if depth == _DEEPEST:
        raise Unsupported(f"{place[:200]} has over {_DEEPEST} levels of nesting")
    if kind in (dict, OrderedDict, Counter):
        items = [(key, encode(item, f"{place}/{key}", tensors, depth + 1)) for key, item in value.items()]
        # A key such as "$tensor" would be taken for a tag, so such mappings are written as pairs
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {f"${kind.__name__}": [[encode(key, f"{place}/key", tensors, depth + 1), item] for key, item in items]}
    if kind in (list, tuple, set, torch.Size):
        elements = [encode(item, f"{place}/{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return elements if kind is list else {f"${kind.__name__}": elements}
    raise Unsupported(f"{place} is a {kind.__name__}")


def decode(value: Any, tensor: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """The nested state that `encode` was given; `tensor` gives the tensor of a name.

    Raises `Exception` of many kinds, if `value`, which comes from a file, is not of `encode`.
    """
    if not isinstance(value, list | dict):
        return value
    # Hostile nesting is refused before Python's recursion limit is reached
    if depth > 2 * _DEEPEST:  # a tagged container is two levels
        raise ValueError(f"it has over {_DEEPEST} levels of nesting")
    if isinstance(value, list):
        return [decode(item, tensor, depth + 1) for item in value]
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensor, depth + 1) for key, item in value.items()}
    # Tags stand alone: a second key is a sign of a file that this program did not write
    if len(value) != 1:
        raise ValueError("a kind of value has a second key")
    if tag != TENSOR:
        return _FROM_JSON[tag](decode(value[tag], tensor, depth + 1))
    if isinstance(value[tag], str):
        return tensor(value[tag])
    name, dtype = value[tag]
    return tensor(name).view(_DTYPES[dtype]).squeeze(-1)
