"""BatchNorm over the rows of this rank and of others, compared with BatchNorm of the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from runner.distributed.batchnorm import set_rows, synchronize
from runner.distributed.world import World, rows

SHAPES = [(7, 3), (6, 3, 5), (5, 3, 2, 4), (1, 3, 4, 4), (2, 3, 2, 2)]  # the last ones have fewer rows than ranks


def compared(ranks: World) -> dict[str, Any]:
    """The largest error of each case, and the buffers."""
    return {f"{case}": _compared(*case, ranks) for case in itertools.product(SHAPES, (0.1, None))}


def _compared(shape: tuple[int, ...], momentum: float | None, ranks: World) -> tuple[float, list[Any]]:
    torch.manual_seed(0)
    kind: Any = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    plain, shared = (kind(3, momentum=momentum).double() for _ in range(2))
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    shared.load_state_dict(plain.state_dict())
    synchronize(nn.Sequential(shared))
    images, factors = torch.randn(2, *shape, dtype=torch.float64)
    own = rows(len(images), ranks.rank, ranks.size)
    count = own.stop - own.start
    whole, part = (part.clone().requires_grad_() for part in (images, images[own] if count else images[:1]))
    outputs = plain(whole)
    (outputs * factors).sum().backward()
    set_rows([shared], (count, len(images)))
    seen = shared(part)
    (seen[:count] * factors[own]).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    pairs = [(seen[:count], outputs[own]), (part.grad[:count], whole.grad[own])]
    for name in ("weight", "bias"):
        pairs.append((ranks.total(getattr(shared, name).grad), getattr(plain, name).grad))
    pairs.append((shared.eval()(images), plain.eval()(images)))
    pairs += zip(shared.buffers(), plain.buffers(), strict=True)
    errors = [float((found - expected).abs().max()) for found, expected in pairs if found.numel()]
    return max(errors), [buffer.tolist() for buffer in shared.buffers()]
