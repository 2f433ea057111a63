"""Parameter groups: weight decay and learning rate of each part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from runner.base.patterns import matching

_NOT_MATRICES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag)
_MATRICES = (nn.Linear, nn.Bilinear, _ConvNd)
# Substrings of the names of biases, positions, tokens and embeddings.
_TABLES = ("bias", "pos", "token", "embed")


def parameter_groups(
    model: nn.Module,
    no_decay: Literal["auto"] | Sequence[str] | None = None,
    lr_mult: Mapping[str, float] | None = None,
    *,
    layer_decay: float | None = None,
    blocks: Sequence[str] = (),
    loss: nn.Module | None = None,
    key: str = "optimizer",
) -> list[dict[str, Any]]:
    """Divide the trainable parameters of a model into groups for an optimizer.

    The group with the model's last matrix comes after all others with matrices: optimizers that treat the head separately,
    such as Muon, find it at the end, as they do without groups.

    Args:
        model: the model.
        no_decay: `auto` for biases, norms, embeddings and other vectors; or patterns of names.
        lr_mult: factor of the rate by pattern; if several patterns match, the last one wins.
        layer_decay: factor of the rate from each layer to the one before it; the last layer, the head, has 1.
        blocks: names of the model's blocks, see `depths`.
        loss: a loss with parameters, named `loss.NAME`; their layer is the last one.
        key: of the optimizer in the config.

    Returns:
        Parameter groups with a `name` for messages, such as `layer 2, no decay`, and `lr_mult`, a factor that is not yet
        applied to the rate.

    Raises:
        UserError: if a pattern matches no parameter.
    """
    # Parameters of the loss come first, so that the head stays the last matrix.
    named = dict([*(loss.named_parameters("loss") if loss is not None else ()), *model.named_parameters()])
    # Biases, norms and embeddings are usually exempt from decay
    if no_decay == "auto":
        spared = tables(model) | {f"loss.{name}" for name in (tables(loss) if loss is not None else ())}
    else:
        spared = {name for _, name in _matches(f"{key}.no_decay", no_decay or (), named)}
    factors = lr_mult or {}
    chosen = {name: pattern for pattern, name in _matches(f"{key}.lr_mult", factors, named)}
    # Layers near the input learn more slowly, as their features are the most general
    deep = depths(model, blocks) if layer_decay is not None else {}
    last = max(deep.values(), default=0)
    groups: dict[str, dict[str, Any]] = {}
    last_matrix: dict[str, int] = {}
    for index, (name, parameter) in enumerate(named.items()):
        if not parameter.requires_grad:
            continue
        # Parameters with the same label share a group, because kernels work on a group at a time.
        parts, factor = [], 1.0
        if layer_decay is not None:
            layer = deep.get(name, last)
            parts.append(f"layer {layer}")
            factor *= layer_decay ** (last - layer)
        if name in chosen:
            parts.append(chosen[name])
            factor *= factors[chosen[name]]
        if name in spared:
            parts.append("no decay")
        label = ", ".join(parts) or "all others"
        decay = {"weight_decay": 0.0} if name in spared else {}
        group = groups.setdefault(label, {"params": [], "name": label, "lr_mult": factor, **decay})
        group["params"].append(parameter)
        if parameter.ndim == 2:
            last_matrix[label] = index
    # Muon finds the head by its position: the last matrix of the last group
    return sorted(groups.values(), key=lambda group: last_matrix.get(group["name"], -1))


def tables(model: nn.Module) -> set[str]:
    """Names of the parameters that usually do not decay.

    These are the parameters of norms and embeddings; those named after biases, positions, tokens or embeddings; and all
    others with at most one dimension larger than 1, such as a scale per channel, except weights of linear layers and
    convolutions.
    """
    found = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if isinstance(module, _MATRICES) and own == "weight":
                continue
            is_vector = sum(size > 1 for size in parameter.shape) <= 1
            if is_vector or isinstance(module, _NOT_MATRICES) or any(part in own for part in _TABLES):
                found.add(name)
    return found


def depths(model: nn.Module, blocks: Sequence[str] = ()) -> dict[str, int]:
    """The layer of every parameter by name, counted from 0, in the order in which the model registers its modules.

    With blocks (Bao et al., arXiv:2106.08254), given as dotted names of modules in order: layer 0 is what precedes the first
    one, then each block is a layer, what lies between two belongs to the later one, and what follows the last one, the head,
    is the last layer. Without blocks, each weight of a linear layer, a convolution or an embedding begins a layer.
    """
    found: dict[str, int] = {}
    if len(blocks) < 2:
        # Without blocks, every matrix begins a new layer
        layer = -1
        for name, parameter in model.named_parameters():
            layer += parameter.ndim > 1
            found[name] = max(layer, 0)
        return found
    passed = 0
    for name, _ in model.named_parameters():
        inside = next((layer for layer, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), 0)
        # What comes after the blocks, such as the head, belongs to the layer after the last one
        passed = max(passed, inside)
        found[name] = inside or passed + (passed > 0)
    return found


def _matches(key: str, patterns: Iterable[str], named: Mapping[str, object]) -> list[tuple[str, str]]:
    """Every matching (pattern, parameter name); a pattern matches parameters, or modules that contain them.

    Raises:
        UserError: if a pattern matches nothing.
    """
    pieces = [name.split(".") for name in named]
    # A pattern may name a module, so all prefixes of parameter names are known names
    known = [".".join(parts[:end]) for parts in pieces for end in range(1, len(parts) + 1)]
    found = []
    for pattern in patterns:
        parts = tuple(f"{part}." for part in matching(key, pattern, known, "module or parameter"))
        found += [(pattern, name) for name in named if f"{name}.".startswith(parts)]
    return found
