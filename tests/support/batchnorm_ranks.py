"""BatchNorm over the rows of this rank and of others, compared with BatchNorm of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.batchnorm import set_rows, synchronize
from runner.distributed.world import World, rows

SHAPES = [
    (7, 3),
    (6, 3, 5),
    (5, 3, 2, 4),
    (1, 3, 4, 4),
    (2, 3, 2, 2),
]  # the last ones have fewer rows than there are ranks


def errors(ranks: World) -> dict[str, Any]:
    """The largest errors of each case, and the buffers."""
    return {f"{shape} {momentum}": _compare(shape, momentum, ranks) for shape in SHAPES for momentum in (0.1, None)}


def _compare(shape: tuple[int, ...], momentum: float | None, ranks: World) -> dict[str, Any]:
    kind: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    torch.manual_seed(0)
    plain, shared = (nn.Sequential(kind(3, momentum=momentum)).double() for _ in range(2))
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    shared.load_state_dict(plain.state_dict())
    synchronize(shared)
    images, target = torch.randn(2, *shape, dtype=torch.float64)
    own = rows(len(images), ranks.rank, ranks.size)
    count = own.stop - own.start
    expected = images.clone().requires_grad_()
    outputs = plain(expected)
    (outputs * target).sum().backward()

    given = (images[own] if count else images[:1]).clone().requires_grad_()
    set_rows(list(shared), (count, len(images)))  # type: ignore[arg-type]
    seen = shared(given)
    (seen[:count] * target[own]).sum().backward()
    set_rows(list(shared), None)  # type: ignore[arg-type]
    errors = {"outputs": _error(seen[:count], outputs[own]), "inputs": 0.0}
    if count:
        assert given.grad is not None
        assert expected.grad is not None
        errors["inputs"] = _error(given.grad, expected.grad[own])
    for (name, parameter), reference in zip(shared.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        errors[name] = _error(ranks.total(parameter.grad), reference.grad)
    for (name, buffer), reference in zip(shared.named_buffers(), plain.buffers(), strict=True):
        errors[name] = _error(buffer, reference)
    buffers = {name: buffer.tolist() for name, buffer in shared.named_buffers()}
    shared.eval()
    set_rows(list(shared), (count, len(images)))  # type: ignore[arg-type]
    errors["evaluation"] = _error(shared(images), plain.eval()(images))
    after = {name: buffer.tolist() for name, buffer in shared.named_buffers()}
    return {"errors": errors, "buffers": buffers, "after evaluation": after}


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if found.numel() else 0.0
