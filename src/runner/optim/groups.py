"""Parameter groups: which weights decay, and how fast each part of a model learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from runner.config.patterns import matching

_NOT_MATRICES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag)
_MATRICES = (nn.Linear, nn.Bilinear, _ConvNd)
# Parts of the names of parameters that say where a patch is, or that stand for a token of its own.
_TABLES = ("bias", "pos", "token", "embed")


@dataclass
class Group:
    """Parameters that are treated alike.

    Attributes:
        name: for people, such as `layer 2, no decay`.
        factor: what the optimizer's rate is multiplied by.
        decays: whether weight decay acts on them.
        parameters: by dotted name.
    """

    name: str
    factor: float
    decays: bool
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """What an optimizer is given: a parameter group with its `name`, and `lr_mult`, which its rate is still to get."""
        decay = {} if self.decays else {"weight_decay": 0.0}
        return {"params": list(self.parameters.values()), "name": self.name, "lr_mult": self.factor} | decay


def parameter_groups(
    model: nn.Module,
    no_decay: Literal["auto"] | Sequence[str] | None = None,
    lr_mult: Mapping[str, float] | None = None,
    layer_decay: float | None = None,
    blocks: Sequence[str] = (),
) -> list[Group]:
    """Divide the trainable parameters of a model; each is in exactly one group.

    The group with the model's last matrix comes after all others with matrices: optimizers that treat the head apart,
    such as Muon, find it at the end, as they do without groups.

    Args:
        model: what is trained.
        no_decay: `auto` for biases, norms, embeddings and other tables of vectors; or patterns of names.
        lr_mult: factor of the rate by pattern; of several that match a parameter the last one holds.
        layer_decay: factor of the rate from each layer to the one before it; the last layer, the head, has 1.
        blocks: names of the blocks that the model is built of, which are its layers; see `depths`.

    Raises:
        UserError: if a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    if no_decay == "auto":
        spared = tables(model)
    else:
        spared = {name for _, name in _matches("optimizer.no_decay", no_decay or (), named)}
    chosen = {name: pattern for pattern, name in _matches("optimizer.lr_mult", lr_mult or (), named)}
    deep = depths(model, blocks) if layer_decay is not None else {}
    last = max(deep.values(), default=0)
    groups: dict[str, Group] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        words, factor = [], 1.0
        if layer_decay is not None:
            words.append(f"layer {deep[name]}")
            factor *= layer_decay ** (last - deep[name])
        if name in chosen and lr_mult is not None:
            words.append(chosen[name])
            factor *= lr_mult[chosen[name]]
        if name in spared:
            words.append("no decay")
        label = ", ".join(words) or "all others"
        groups.setdefault(label, Group(label, factor, name not in spared)).parameters[name] = parameter
    order = {name: index for index, name in enumerate(named)}

    def last_matrix(group: Group) -> int:
        return max((order[name] for name, parameter in group.parameters.items() if parameter.ndim == 2), default=-1)

    return sorted(groups.values(), key=last_matrix)


def tables(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay is usually kept from: biases, norms, embeddings, positions, tokens.

    These are the parameters of norms and embeddings; those named after biases, positions, tokens or embeddings; and
    all others with one dimension larger than 1 at most, such as a scale for each channel, that are not the weight of a
    linear layer or a convolution.
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

    With blocks (Bao et al., arXiv:2106.08254): layer 0 is what comes before the first one, then each block is a layer,
    what lies between two belongs to the later one, and what follows the last one, the head, is the last layer. Without
    them, each weight of a linear layer, a convolution or an embedding begins a layer.

    Args:
        model: the model.
        blocks: dotted names of modules, in order.
    """
    found: dict[str, int] = {}
    if len(blocks) < 2:
        layer = -1
        for name, parameter in model.named_parameters():
            layer += parameter.ndim > 1
            found[name] = max(layer, 0)
        return found
    passed = 0
    inside = {name: index for index, block in enumerate(blocks, 1) for name in _below(block, model)}
    names = [name for name, _ in model.named_parameters()]
    ends = {
        index: max(place for place, name in enumerate(names) if inside.get(name) == index)
        for index in set(inside.values())
    }
    for place, name in enumerate(names):
        passed = max((index for index, end in ends.items() if end < place), default=0)
        found[name] = inside.get(name, passed + (passed > 0))
    return found


def _below(block: str, model: nn.Module) -> Iterable[str]:
    return (name for name, _ in model.named_parameters() if name.startswith(f"{block}."))


def _matches(key: str, patterns: Iterable[str], named: Mapping[str, object]) -> list[tuple[str, str]]:
    """Every (pattern, name of a parameter) that go together: a pattern names parameters, or modules that hold them.

    Raises:
        UserError: if one matches nothing.
    """
    pieces = [name.split(".") for name in named]
    known = [".".join(parts[:end]) for parts in pieces for end in range(1, len(parts) + 1)]
    found = []
    for pattern in patterns:
        parts = matching(key, pattern, known, "module or parameter")
        found += [
            (pattern, name) for name in named if name in parts or any(name.startswith(f"{part}.") for part in parts)
        ]
    return found
