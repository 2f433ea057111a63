"""The tensors that a step computed, in order, and the differences of two such records."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Phase(StrEnum):
    """The parts of a record, in the order of a step."""

    START = "start"
    BATCH = "batch"
    DRAWN = "generator before forward"
    ACTIVATION = "activation"
    LOSS = "loss"
    FLOW = "gradient of activation"
    GRADIENT = "gradient"
    WEIGHT = "weight"
    OPTIMIZER = "optimizer state"
    GENERATOR = "generator"


class Entry(NamedTuple):
    """A tensor, or something else with a fingerprint, that a step computed."""

    batch: int  # number of the batch in its step, from 0
    phase: str  # a `Phase`, or a part of a checkpoint
    name: str  # of a module, a parameter or a part of the batch
    kind: str  # shape and dtype for people; empty for what is not a tensor
    digest: str  # fingerprint
    tensor: Tensor | None  # a copy on the CPU; None if there was no memory to keep it, or it is not a tensor


class Recorder:
    """Records what a step computes.

    Args:
        budget: bytes of tensors to keep; of those beyond only a fingerprint is kept.
    """

    def __init__(self, budget: float = math.inf) -> None:
        self.entries: list[Entry] = []
        self.batch = 0
        self._left = budget

    def add(self, phase: str, name: str, value: Any) -> None:
        """Record a tensor, or anything else by its text."""
        kind, tensor = "", None
        # The bytes decide whether two values are equal, and the tensor tells later by how much they differ
        if isinstance(value, Tensor):
            tensor = value.detach()
            tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
            kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            tensor = tensor.to("cpu", copy=True).contiguous()
            plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            if plain.is_floating_point():
                plain = plain.masked_fill(plain.isnan(), math.nan)  # any NaN is the same one
            data = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            data = repr(value).encode()
            if isinstance(value, int | float):
                tensor = torch.tensor(float(value), dtype=torch.float64)
        # A tensor beyond the budget is compared by its fingerprint, but nobody learns how far apart the sides are.
        if tensor is not None and tensor.nbytes > self._left:
            tensor = None
        self._left -= tensor.nbytes if tensor is not None else 0
        self.entries.append(
            Entry(self.batch, phase, name, kind, digest=hashlib.sha256(data).hexdigest(), tensor=tensor)
        )


class Difference(NamedTuple):
    """Two entries of the same place that are not the same; one is None if a side has no such entry."""

    a: Entry | None
    b: Entry | None

    @property
    def entry(self) -> Entry:
        """The entry that there is."""
        found = self.a or self.b
        assert found is not None, "a difference is between two entries, or of one that the other side lacks"
        return found


def differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Where two records differ, in the order of the first; what only the second has comes last."""
    others = dict(_placed(b))
    found = []
    for place, entry in _placed(a):
        other = others.pop(place, None)
        if other is None or not same(entry, other):
            found.append(Difference(entry, other))
    return found + [Difference(None, entry) for entry in others.values()]


def _placed(entries: Sequence[Entry]) -> Iterator[tuple[tuple[Any, ...], Entry]]:
    """Entries by their place; a module that is called twice in a step has two."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for entry in entries:
        place = entry.batch, entry.phase, entry.name
        seen[place] += 1
        yield (*place, seen[place]), entry


def same(a: Entry, b: Entry) -> bool:
    """True if two entries agree in every bit, NaN being the same as NaN."""
    return (a.kind, a.digest) == (b.kind, b.digest)


def amount_of(difference: Difference) -> dict[str, Any] | None:
    """By how much two tensors differ; None if they cannot be subtracted, or were not kept.

    Returns:
        `elements` of each; `differing`, how many are not the same; `largest` absolute difference, and `relative`, the
        largest share of the larger of the two, each None if one of them is not finite; `place`, index of the first element
        that differs; `values` of both there.
    """
    a, b = (None if side is None else side.tensor for side in difference)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return None
    # Complex numbers are compared as pairs
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    # 0.0 equals -0.0, but their bits differ.
    unequal = ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())
    if not bool(unequal.any()):
        return None
    x, y = a[unequal].double(), b[unequal].double()
    apart, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    finite = bool(apart.isfinite().all())
    return {
        "elements": unequal.numel(),
        "differing": int(unequal.sum()),
        "largest": float(apart.max()) if finite else None,
        "relative": float(torch.where(scale > 0, apart / scale, 0.0).max()) if finite else None,
        "place": unequal.nonzero()[0].tolist(),
        "values": [float(x[0]), float(y[0])],
    }


def difference_record(difference: Difference) -> dict[str, Any]:
    """A difference for programs: what, where, `a` and `b` as shape and dtype, and the amount."""
    entry = difference.entry
    kinds = {side: found.kind if found else None for side, found in difference._asdict().items()}
    where = {"phase": entry.phase, "name": entry.name, "batch": entry.batch}
    return {**where, **kinds, "amount": amount_of(difference)}
