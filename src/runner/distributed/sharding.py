"""Weights, gradients and optimizer state divided among the ranks (FSDP), by torch's `fully_shard`.

A divided tensor is a `DTensor`: it has the shape of the whole, and each rank keeps a part of its rows. Operations that DTensors
lack work on the parts. A model that is not divided has plain tensors, which the functions here return as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.schema.train import Fsdp
from runner.distributed.world import World, world


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, settings: Fsdp
) -> Mapping[nn.Parameter, nn.Parameter]:
    """Divide the parameters of a model, in place; all ranks call this with the same weights.

    Args:
        model: on its device.
        blocks: modules whose weights are gathered and dropped together; what is outside of them is one more unit.
        device: where the model computes.
        settings: `fsdp` of the config, whose `replicas` divide the number of ranks.

    Returns:
        The parameters of the model now, by those that it had.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # With replicas, weights are divided within each group and equal across groups
    size, replicas = world().size, settings.replicas
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    # Sharding replaces parameters, and frozen parts refer to the old ones
    before = list(model.parameters())
    # Blocks come before the model, which takes what is left
    for module in (*(block for block in blocks if block is not model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard_after_forward)
    return dict(zip(before, model.parameters(), strict=True))


def is_sharded(model: nn.Module) -> bool:
    """True if `shard` has divided a model: then every forward pass is one of all ranks."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: nn.Module) -> None:
    """Drop the weights that forward passes without backward have left gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def is_divided(tensor: Any) -> bool:
    """True if a tensor is divided among the ranks."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on its device; all ranks have to call this."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def gathered(tensor: Tensor, world: World) -> Tensor:
    """All of a tensor in the memory of rank 0's CPU, and nothing on the others; all ranks have to call this."""
    if not is_divided(tensor):
        return tensor
    full = whole(tensor)
    return full.cpu() if world.first else full.new_empty(0)


def loaded(tensor: Any) -> Any:
    """A tensor that `runner.checkpoint.file.read` left in the file, read now; others as they are."""
    read = getattr(tensor, "read_now", None)
    return tensor if read is None else read()


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has or reads, divided as `like` is; nothing is exchanged."""
    tensor = loaded(tensor)
    if not is_divided(like) or is_divided(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """The divided tensor of which `part` is this rank's part; shaped and divided as `like` is."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
