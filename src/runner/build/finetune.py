"""What happens to a model between its constructor and its training: a new head, initial weights, frozen parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from runner.config.errors import UserError, first_line
from runner.config.freezing import ALL_BUT_HEAD, Entry, entries
from runner.config.patterns import matching
from runner.config.schema.train import Train
from runner.engine.freezing import Freezing, Frozen
from runner.engine.plan import Timeline
from runner.instrument.no_trace import evaluating
from runner.models import heads
from runner.models.heads import Head, HeadNotFound, replace_head
from runner.models.initial import draw_weights, set_prior, zero_last_norms
from runner.runtime.determinism import refusal


def try_forward(model: nn.Module, images: Tensor) -> Tensor:
    """The output of a model in evaluation mode for images (B, C, H, W); the model and random generators are left as they are.

    Raises:
        UserError: if it cannot take them.
    """
    with evaluating(model):
        try:
            outputs: Tensor = model(images)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            problem = f"cannot take images of shape {tuple(images.shape)}: {first_line(error)}"
            raise refusal(error) or UserError("model", problem) from error
    return outputs


def give_head(model: nn.Module, setting: str | list[int], outputs: int, image: Tensor) -> None:
    """Replace the head of a model: `linear`, hidden layers of the widths given, or `none`.

    Raises:
        UserError: if it has no head that could be replaced.
    """
    head = head_of(model, image, "model.head")
    hidden = None if setting == "none" else [] if isinstance(setting, str) else setting
    replace_head(model, head, hidden, outputs)
    ran: list[nn.Module] = []
    handle = model.get_submodule(head.path).register_forward_hook(lambda module, *_: ran.append(module))
    try_forward(model, image)
    handle.remove()
    if not ran:
        problem = f"{type(model).__name__} does not use the layer that replaces {head.path}"
        raise UserError("model.head", problem, "null, or a model that calls its last layer by its name")


def find_head(model: nn.Module, image: Tensor) -> Head | None:
    """The head of a model, or None if it cannot be told from the rest."""
    try:
        return heads.find_head(model, lambda: try_forward(model, image))
    except HeadNotFound:
        return None


def head_of(model: nn.Module, image: Tensor, key: str) -> Head:
    """The head of a model, as `key` needs it.

    Raises:
        UserError: if it cannot be told from the rest.
    """
    try:
        return heads.find_head(model, lambda: try_forward(model, image))
    except HeadNotFound as error:
        allowed = "a model that ends in a Linear or a 1x1 convolution, called once"
        raise UserError(key, f"no head was found: {error}", allowed) from error


def initialize(config: Train, model: nn.Module, image: Tensor, class_counts: Tensor | None) -> Sequence[str]:
    """Set initial weights as `init` says; returns the names of the schemes.

    Raises:
        UserError: if a scheme does not apply to the model.
    """
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    for scheme in sorted(schemes, key=("zero_gamma", "prior_bias").count):  # after what would undo them
        try:
            if scheme == "zero_gamma":
                zero_last_norms(model, lambda: try_forward(model, image))
            elif scheme == "prior_bias":
                _set_prior(model, image, class_counts)
            else:
                draw_weights(model, scheme)
        except ValueError as error:
            raise UserError("init", f"{scheme} does not apply: {error}", "init without it") from error
    return schemes


def _set_prior(model: nn.Module, image: Tensor, class_counts: Tensor | None) -> None:
    if class_counts is None:
        raise ValueError("the classes of the training samples are not known")
    head = head_of(model, image, "init")
    if head.last is None:
        raise ValueError("model.head=none leaves no head")
    set_prior(model.get_submodule(head.last), class_counts)


def freeze(config: Train, model: nn.Module, image: Tensor) -> Freezing:
    """Decide what is frozen when, as `freeze` and `unfreeze_at` say; what is never trained requires no gradient from now on.

    Raises:
        UserError: if a pattern matches nothing with weights, or nothing is left to train.
    """
    parts = [_frozen(model, image, entry) for entry in entries(config.freeze, config.unfreeze_at)]
    waiting = {parameter for part in parts for parameter in part.parameters}
    if parts and all(parameter in waiting for parameter in model.parameters() if parameter.requires_grad):
        raise UserError("freeze", "leaves nothing to train in the first step", "all-but-head, or fewer patterns")
    for part in parts:
        if part.permanent:
            for parameter in part.parameters:
                parameter.requires_grad_(False)
    return Freezing(model, parts)


def never_unfrozen(freezing: Freezing, total_steps: int, timeline: Timeline) -> list[str]:
    """Warnings about frozen parts that the run ends before training."""
    late = [part for part in freezing.parts if not part.permanent and _ends(part, timeline) >= total_steps]
    return [f"freeze: {part.name} is never trained: the run ends after {total_steps:,} steps" for part in late]


def _ends(part: Frozen, timeline: Timeline) -> float:
    return part.steps if part.steps is not None else timeline.step(part.epochs or 0)


def _frozen(model: nn.Module, image: Tensor, entry: Entry) -> Frozen:
    """The weights and modules that a pattern matches, with everything inside matched modules."""
    if entry.pattern == ALL_BUT_HEAD:
        names = set(_all_but(model, head_of(model, image, "freeze").path))
    else:
        names = _matching(model, entry.pattern)
    modules = [module for name, module in model.named_modules() if name in names]
    inside = dict.fromkeys(inner for module in modules for inner in module.modules())
    parameters = dict.fromkeys(parameter for module in inside for parameter in module._parameters.values())
    parameters |= dict.fromkeys(parameter for name, parameter in model.named_parameters() if name in names)
    trained = tuple(parameter for parameter in parameters if parameter is not None and parameter.requires_grad)
    if not trained:
        raise UserError("freeze", f"'{entry.pattern}' has no trainable weights", "names of layers with weights")
    whole = [module for module in model.modules() if own_weights(module) and own_weights(module) <= set(trained)]
    return Frozen(entry.pattern, trained, tuple(dict.fromkeys([*inside, *whole])), entry.steps, entry.epochs)


def own_weights(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of a module itself, without those of modules in it."""
    return {parameter for parameter in module._parameters.values() if parameter is not None}


def _all_but(model: nn.Module, head: str) -> Iterator[str]:
    """Names of the modules and parameters around a head that have weights; a dropout beside the head goes on."""
    around = {head.rpartition(".")[0]}
    while around and "" not in around:
        around |= {name.rpartition(".")[0] for name in around}
    for name in around:
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        yield from (prefix + own for own in module._parameters)
        for child, inner in module.named_children():
            path = prefix + child
            if path != head and path not in around and any(True for _ in inner.parameters()):
                yield path


def _matching(model: nn.Module, pattern: str) -> set[str]:
    """Dotted names of modules and parameters that match a pattern."""
    names = [*(name for name, _ in model.named_modules() if name), *(name for name, _ in model.named_parameters())]
    return matching("freeze", pattern, names, "module or parameter", [ALL_BUT_HEAD])
