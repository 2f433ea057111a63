"""The blocks of a model: what activation checkpointing, sharding and layer-wise learning rates take as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from runner.base.patterns import matching

Block = tuple[str, nn.Module]

_LAYERS_OF_A_BLOCK = 3


def repeated_blocks(model: nn.Module) -> list[Block]:
    """The blocks that a model is built of, in order.

    These are modules of three or more layers with weights whose class occurs more than once. One that holds a container
    of several such blocks, a stage or an encoder, is searched; of others the outermost counts. Where there are none,
    the `Sequential`s inside a container are the blocks.
    """
    # Blocks are composite modules whose class occurs several times, such as the layers of a transformer
    kinds = Counter(type(module) for module in model.modules() if _is_composite(module))

    def several(module: nn.Module) -> bool:
        return _is_composite(module) and kinds[type(module)] > 1

    # A container of blocks is not a block itself, even if its class occurs several times
    def holds_blocks(module: nn.Module) -> bool:
        containers = [inner for inner in module.modules() if inner is not module and _is_container(inner)]
        return any(sum(several(child) for child in container.children()) > 1 for container in containers)

    found = _outermost(model, lambda module: several(module) and not holds_blocks(module))
    if found:
        return found
    # Networks without repeated classes, such as plain CNNs, may still be built of stages
    stages = {
        child
        for container in model.modules()
        if _is_container(container)
        for child in container.children()
        if _is_container(child) and _is_called(child) and _layers(child) > 1
    }
    found = _outermost(model, stages.__contains__)
    return found if len(found) > 1 else []


def _is_composite(module: nn.Module) -> bool:
    return not _is_container(module) and _layers(module) >= _LAYERS_OF_A_BLOCK


def _is_container(module: nn.Module) -> bool:
    """True if it only holds others: `Sequential`, `ModuleList` and the like."""
    return not _is_called(module) or type(module).forward is nn.Sequential.forward


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _layers(module: nn.Module) -> int:
    """The number of modules with direct parameters; a layer and its adapter are one."""
    return sum(bool(inner._parameters) and "lora_" not in name for name, inner in module.named_modules())


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[Block]:
    """Modules below `model` that are wanted, and in none that is; each once."""
    found: list[Block] = []
    for name, module in model.named_modules():
        if name and wanted(module) and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def named_blocks(model: nn.Module, patterns: Sequence[str], key: str, prose: str) -> list[Block]:
    """The outermost modules whose dotted names match a pattern, such as `layer?.*` or `encoder.layers.*`.

    A `ModuleList` is never called itself, so it means the modules in it. `key` and `prose` are for the error, see `matching`.

    Raises:
        UserError: if a pattern matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        for name in matching(key, pattern, names, "module", prose=prose):
            chosen.update(_called(model.get_submodule(name)))
    return _outermost(model, chosen.__contains__)


def _called(module: nn.Module) -> list[nn.Module]:
    return [module] if _is_called(module) else [inner for child in module.children() for inner in _called(child)]
