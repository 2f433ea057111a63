"""Intermediate features of a model, by the names of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from runner.config.errors import UserError, nearest

_MOST_LISTED = 60


def extractor(model: nn.Module, names: Sequence[str], key: str = "features") -> nn.Module:
    """A module that gives intermediate features: images (B, C, H, W) -> dict of name -> tensor, in the order of `names`.

    A name is that of a module, such as `stages.2`, whose output is given, or that of an operation in a forward method, such
    as `stages.2.0.add` or `mean`, as torchvision's feature extraction calls them (`layer_names` lists both). A model that
    `torch.fx` cannot trace, as its forward looks at values or sizes, has names of modules alone; of a module that it calls
    several times, the last output is given.

    The module shares the weights of `model`, both are put into evaluation mode, and what comes after the last of the
    features is not computed where the model can be traced. The tensors are copies: a later operation that works in place
    does not show in them.

    Args:
        model: the model.
        names: which features.
        key: what the names are told as in messages.

    Raises:
        UserError: if there is no name, or the model has none of one; while computing, if a name stands for something
            that is no tensor or did not run.
    """
    model.eval()
    if not names:
        raise UserError(f"{key}: names no layer\n    allowed: {_listed(_modules(model))}")
    nodes = _nodes(model)
    if nodes is None:
        available = _modules(model)
        _refuse_unknown(names, available, key)
        return _Hooked(model, names, key)
    _refuse_unknown(names, _with_modules(nodes), key)
    return _Traced(model, {name: _node_of(name, nodes) for name in names}, key)


def layer_names(model: nn.Module) -> list[str]:
    """Every name that `extractor` knows, in the order in which the model computes; its modes are left as they are."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        nodes = _nodes(model)
    finally:
        for module, mode in modes:
            module.training = mode
    return _modules(model) if nodes is None else _with_modules(nodes)


def listener(
    model: nn.Module, names: Sequence[str], tell: Callable[[str, Tensor], object], key: str = "features"
) -> Callable[[Tensor], Any]:
    """A function that computes what `model` does and tells of intermediate tensors as soon as they are computed.

    The tensors are the ones that are computed with, no copies, so that gradients can be asked of them.

    Args:
        model: the model; it runs in the modes that it is in when this is called.
        names: as for `extractor`.
        tell: called with each name and its tensor.
        key: what the names are told as in messages.

    Raises:
        UserError: if the model has none of a name; while computing, if one stands for something that is no tensor.
    """
    traced = _trace(model)
    if traced is None:
        _refuse_unknown(names, _modules(model), key)
        return _listening(model, names, tell, key)
    graph, of_node = traced
    nodes = list(of_node.values())
    _refuse_unknown(names, _with_modules(nodes), key)
    wanted: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        wanted.setdefault(_node_of(name, nodes), []).append(name)

    class Telling(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            for name in wanted.get(of_node.get(n, ""), ()):
                tell(name, _tensor(value, name, key))
            return value

    telling = Telling(graph)
    telling.extra_traceback = False  # which would put the operation in place of the message of an error
    return telling.run


def _listening(
    model: nn.Module, names: Sequence[str], tell: Callable[[str, Tensor], object], key: str
) -> Callable[[Tensor], Any]:
    """A whole model whose modules are listened to while it runs."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def told(module: nn.Module, args: Any, output: Any) -> None:
            tell(name, _tensor(output, name, key))

        return told

    def forward(images: Tensor) -> Any:
        hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in dict.fromkeys(names)]
        try:
            return model(images)
        finally:
            for handle in hooks:
                handle.remove()

    return forward


def _trace(model: nn.Module) -> tuple[fx.GraphModule, dict[fx.Node, str]] | None:
    """The graph of a model in the modes that it is in, with the name of each operation; None if it cannot be traced."""
    import torchvision.ops
    from torchvision.models.feature_extraction import NodePathTracer

    tracer = NodePathTracer(autowrap_modules=(math, torchvision.ops))
    try:
        graph = tracer.trace(model)
    except Exception:  # forward is given something that stands for a tensor, and may object to it in any way
        return None
    return fx.GraphModule(model, graph), dict(tracer.node_to_qualname)


class PerImage:
    """Intermediate features with a row for each image.

    Args:
        layers: gives features of images, see `extractor`.
        key: what the names are told as in messages.
    """

    def __init__(self, layers: nn.Module, key: str = "features") -> None:
        self._layers, self._key = layers, key
        self._tried = False

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Features of images (B, C, H, W): name -> (B, ...).

        Raises:
            UserError: if those of a layer are not by image along their first axis, such as windows, or tokens first. The
                first batch is tried in another size too, since an axis may be as long as the batch by accident.
        """
        if not self._tried:
            other = images[:1] if len(images) > 1 else images.repeat(2, 1, 1, 1)
            self._checked(self._layers(other), len(other))
            self._tried = True
        return self._checked(self._layers(images), len(images))

    def _checked(self, found: dict[str, Tensor], images: int) -> dict[str, Tensor]:
        for name, tensor in found.items():
            if tensor.ndim == 0 or len(tensor) != images:
                raise UserError(
                    f"{self._key}: '{name}' gives {tuple(tensor.shape)} for {images} image{'s' * (images != 1)}, which is "
                    "not a row an image\n    allowed: layers whose outputs have the batch as their first axis"
                )
        return found


class _Traced(nn.Module):
    """The graph of a model up to the features.

    Args:
        model: in evaluation mode.
        nodes: name -> operation that it stands for; several names may mean the same one.
        key: see `extractor`.
    """

    def __init__(self, model: nn.Module, nodes: dict[str, str], key: str) -> None:
        from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

        super().__init__()
        # The graph in training mode is made as well, and never used.
        train_nodes, _ = get_graph_node_names(model, suppress_diff_warning=True)
        # Each operation once, and by its whole name: of two names for the same one, torchvision takes another for the second.
        graph = create_feature_extractor(
            model,
            train_return_nodes={train_nodes[-1]: "unused"},
            eval_return_nodes={node: node for node in nodes.values()},
            suppress_diff_warning=True,
        )
        model.eval()
        self.graph = _copying(graph.eval())
        self._nodes, self._key = nodes, key
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Features of images (B, C, H, W)."""
        found = self.graph(images)
        return {name: _tensor(found[node], name, self._key) for name, node in self._nodes.items()}


def _copying(graph_module: Any) -> Any:
    """The module with each of its results copied as soon as it is computed."""
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    copies = {}
    for name, node in output.args[0].items():
        with graph.inserting_after(node):
            copies[name] = graph.call_function(_copy, (node,))
    output.args = (copies,)
    graph_module.recompile()
    return graph_module


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class _Hooked(nn.Module):
    """A whole model whose modules are listened to while it runs."""

    def __init__(self, model: nn.Module, names: Sequence[str], key: str) -> None:
        super().__init__()
        self.model = model
        self._names, self._key = tuple(dict.fromkeys(names)), key
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Features of images (B, C, H, W)."""
        found: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            found[name] = tensor.clone()

        _listening(self.model, self._names, keep, self._key)(images)
        for name in self._names:
            if name not in found:
                raise UserError(
                    f"{self._key}: '{name}' does not run when the model is evaluated\n    allowed: other layers"
                )
        return {name: found[name] for name in self._names}


def _tensor(value: Any, name: str, key: str) -> Tensor:
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):  # as attention gives its weights beside
        return value[0]
    if not isinstance(value, Tensor):
        raise UserError(f"{key}: '{name}' is a {type(value).__name__}, not a tensor\n    allowed: other layers")
    return value


def _nodes(model: nn.Module) -> list[str] | None:
    """Names of the operations of a model in evaluation mode, in order; None if it cannot be traced."""
    from torchvision.models.feature_extraction import get_graph_node_names

    try:
        _, nodes = get_graph_node_names(model, suppress_diff_warning=True)
    except Exception:  # forward was given something that stands for a tensor, and may object to it in any way
        return None
    finally:
        model.eval()
    return list(nodes)


def _node_of(name: str, nodes: Sequence[str]) -> str:
    """The operation of that name, or the last one inside the module of that name."""
    if name in nodes:
        return name
    return [node for node in nodes if node.startswith(f"{name}.")][-1]


def _modules(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _with_modules(nodes: Iterable[str]) -> list[str]:
    """Names of operations, each of the modules that they lie in before its first one."""
    found: dict[str, None] = {}
    for node in nodes:
        parts = node.split(".")
        found.update((".".join(parts[:count]), None) for count in range(1, len(parts) + 1))
    return list(found)


def _refuse_unknown(names: Sequence[str], available: Sequence[str], key: str) -> None:
    for name in names:
        if name not in available:
            close = nearest(name, available)
            hint = f"; did you mean '{close}'?" if close else ""
            raise UserError(f"{key}: the model has no layer '{name}'{hint}\n    allowed: {_listed(available)}")


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    # Of a large model the outer layers say more than the first sixty.
    depth = max(d for d in range(1, 10) if d == 1 or sum(name.count(".") < d for name in names) <= _MOST_LISTED)
    outer = [name for name in names if name.count(".") < depth][:_MOST_LISTED]
    return f"{', '.join(outer)} and {len(names) - len(outer)} more inside them"
