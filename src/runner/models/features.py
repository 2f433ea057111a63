"""Intermediate features of a model, by the names of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from runner.config.errors import UserError, nearest
from runner.instrument.observer import Observer

_MOST_LISTED = 60


class Extractor:
    """Intermediate features of a model: images (B, C, H, W) -> dict of name -> tensor, in the order of `names`.

    A name is that of a module, such as `stages.2`, whose output is returned, or that of an operation in a forward method,
    such as `stages.2.0.add` or `mean`, as `torchvision.models.feature_extraction` calls them. A
    model that `torch.fx` cannot trace, as its forward depends on values or sizes, has names of modules alone; of a module
    that it calls several times, the last output is returned.

    The model is put into evaluation mode. What comes after the last of the features is not computed where the model can be
    traced. The tensors are copies: a later operation that works in place does not change them.

    Args:
        model: the model, whose weights are shared.
        names: which features.
        key: the key of the config that names them, for messages.

    Raises:
        UserError: if there is no name, or the model has none of one; while computing, if a name stands for something
            that is not a tensor or did not run.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], key: str = "features") -> None:
        model.eval()
        if not names:
            raise UserError(key, "names no layer", _join(_modules(model)))
        self._names, self._key = tuple(dict.fromkeys(names)), key
        self._found: dict[str, Tensor] = {}
        self._run = listener(model, names, lambda name, tensor: self._found.update({name: tensor.clone()}), key, False)
        self._tried = False

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Features of images (B, C, H, W)."""
        self._found.clear()
        self._run(images)
        for name in self._names:
            if name not in self._found:
                raise UserError(self._key, f"'{name}' does not run when the model is evaluated", "other layers")
        return {name: self._found.pop(name) for name in self._names}

    def rows(self, images: Tensor) -> dict[str, Tensor]:
        """Features with a row for each image (B, C, H, W): name -> (B, ...).

        Raises:
            UserError: if the first axis of a feature is not the batch, as with windows, or tokens first. The first batch
                is tried in another size too, since an axis may be as long as the batch by accident.
        """
        if not self._tried:
            self._check(images[:1] if len(images) > 1 else images.repeat(2, 1, 1, 1))
            self._tried = True
        return self._check(images)

    def _check(self, images: Tensor) -> dict[str, Tensor]:
        found = self(images)
        for name, tensor in found.items():
            if tensor.ndim == 0 or len(tensor) != len(images):
                count = f"{len(images)} image{'s' * (len(images) != 1)}"
                raise UserError(
                    self._key,
                    f"'{name}' gives {tuple(tensor.shape)} for {count}, which is not one row per image",
                    "layers whose outputs have the batch as their first axis",
                )
        return found


def listener(
    model: nn.Module,
    names: Sequence[str],
    tell: Callable[[str, Tensor], object],
    key: str = "features",
    whole: bool = True,
) -> Callable[[Tensor], Any]:
    """A function that computes what `model` does and reports intermediate tensors as soon as they are computed.

    The tensors are the ones that are computed with, no copies, so that gradients can be asked of them.

    Args:
        model: the model; it runs in the modes that it is in when this is called.
        names: as for `Extractor`.
        tell: called with each name and its tensor.
        key: the key of the config that names them, for messages.
        whole: whether to compute what follows the last of the features too; without it the result is of no use.

    Raises:
        UserError: if the model has none of a name; while computing, if one stands for something that is not a tensor.
    """
    import torchvision.ops

    # As torchvision traces, its own layers are single operations; the names inside them are there when they are not.
    layers = [each for each in vars(torchvision.ops).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    for leaves in (layers, []):
        traced = _trace(model, leaves)
        available = _modules(model) if traced is None else _with_modules(traced[1].values())
        if set(names) <= set(available):
            break
    for name in names:
        if name not in available:
            raise UserError(key, f"the model has no layer '{name}'", _join(available), nearest(name, available))

    if traced is None:

        def forward(images: Tensor) -> Any:
            with Observer(model, after=lambda name, _, __, output: tell(name, _tensor(output, name, key)), names=names):
                return model(images)

        return forward
    graph, name_of_node = traced
    module = fx.GraphModule(model, graph)
    wanted: dict[fx.Node, list[str]] = {}
    for name in dict.fromkeys(names):
        # The operation of that name, or the last one inside the module of that name.
        inside = [node for node, other in name_of_node.items() if other == name]
        inside = inside or [node for node, other in name_of_node.items() if other.startswith(f"{name}.")]
        wanted.setdefault(inside[-1], []).append(name)
    if not whole:
        output = next(node for node in graph.nodes if node.op == "output")
        output.args = (tuple(wanted),)
        graph.eliminate_dead_code()

    class Reporter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            for name in wanted.get(n, ()):
                tell(name, _tensor(value, name, key))
            return value

    reporter = Reporter(module)
    reporter.extra_traceback = False  # it would put the operation before the message of an error
    return reporter.run


def _trace(model: nn.Module, leaves: list[type[nn.Module]]) -> tuple[fx.Graph, dict[fx.Node, str]] | None:
    """The graph of a model in the modes that it is in, with the name of each operation; None if it cannot be traced.

    As `create_feature_extractor` traces, which cannot copy what later operations change in place, nor run in training.
    """
    import torchvision.ops
    from torchvision.models.feature_extraction import NodePathTracer

    tracer = NodePathTracer(autowrap_modules=(math, torchvision.ops), leaf_modules=leaves)
    try:
        graph = tracer.trace(model)
    except Exception:  # forward receives a stand-in for a tensor, and may object to it in any way
        return None
    return graph, dict(tracer.node_to_qualname)


def _tensor(value: Any, name: str, key: str) -> Tensor:
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):  # attention also returns its weights
        return value[0]
    if not isinstance(value, Tensor):
        raise UserError(key, f"'{name}' is a {type(value).__name__}, not a tensor", "other layers")
    return value


def _modules(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _with_modules(nodes: Iterable[str]) -> list[str]:
    """Names of operations, each of the modules that they lie in before its first one."""
    found: dict[str, None] = {}
    for node in nodes:
        parts = node.split(".")
        found.update((".".join(parts[:count]), None) for count in range(1, len(parts) + 1))
    return list(found)


def _join(names: Sequence[str]) -> str:
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    # Of a large model the outer layers are more useful than the first sixty.
    depth = max(d for d in range(1, 10) if d == 1 or sum(name.count(".") < d for name in names) <= _MOST_LISTED)
    outer = [name for name in names if name.count(".") < depth][:_MOST_LISTED]
    return f"{', '.join(outer)} and {len(names) - len(outer)} more inside them"
