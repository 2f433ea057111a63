"""What happens to a model between its constructor and its training: a new head, initial weights, frozen parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from runner.base.errors import UserError, first_line
from runner.base.patterns import matching
from runner.config.rules import ALL_BUT_HEAD, Entry, entries
from runner.config.schema.sections import ADJUSTMENTS
from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.data.sample_rng import preserved_rng
from runner.engine.freezing import Freezing, Frozen
from runner.instrument.no_trace import evaluating
from runner.models import heads
from runner.models.heads import Head, HeadNotFound, replace_head
from runner.models.initial import draw_weights, set_prior, whiten, zero_last_norms
from runner.runtime.determinism import refusal

_WHITENED = 5000


def try_forward(model: nn.Module, images: Tensor) -> Tensor:
    """The output of a model in evaluation mode for images (B, C, H, W); the model and random generators are left as they are."""
    with evaluating(model), explaining("model", f"cannot take images of shape {tuple(images.shape)}: "):
        outputs: Tensor = model(images)
    return outputs


@contextlib.contextmanager
def explaining(key: str, problem: str, allowed: str = "") -> Iterator[None]:
    """Turn what custom components raise into a `UserError`: `problem` followed by the first line of the error."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refusal(error) or UserError(key, f"{problem}{first_line(error)}", allowed) from error
    except Exception as error:  # a bug, which another setting does not cure
        error.add_note(f"while {key} was tried on one sample")
        raise


def give_head(model: nn.Module, setting: str | list[int], outputs: int, image: Tensor) -> None:
    """Replace the head of a model: `linear`, hidden layers of the widths given, or `none`; raises as `head_of`."""
    hidden = None if setting == "none" else [] if isinstance(setting, str) else setting
    replace_head(model, head_of(model, image, "model.head"), hidden, outputs)


def find_head(model: nn.Module, image: Tensor) -> Head | None:
    """The head of a model, or None if it cannot be told from the rest."""
    try:
        return heads.find_head(model, lambda: try_forward(model, image))
    except HeadNotFound:
        return None


def head_of(model: nn.Module, image: Tensor, key: str) -> Head:
    """The head of a model, which `key` needs; `UserError` if it cannot be told from the rest."""
    try:
        return heads.find_head(model, lambda: try_forward(model, image))
    except HeadNotFound as error:
        allowed = "a model whose attribute head, fc or classifier ends in a Linear or a 1x1 convolution"
        raise UserError(key, f"no head was found: {error}", allowed) from error


def initialize(config: Train, model: nn.Module, image: Tensor, data: DataModule) -> Sequence[str]:
    """Set initial weights as `init` says; returns the names of the schemes.

    Raises:
        UserError: if a scheme does not apply to the model.
    """
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    for scheme in sorted(schemes, key=ADJUSTMENTS.count):  # after what would undo them
        try:
            if scheme == "zero_gamma":
                zero_last_norms(model)
            elif scheme == "prior_bias":
                if data.class_counts is None:
                    raise ValueError("the classes of the training samples are not known")
                if (layer := head_of(model, image, "init").last) is None:
                    raise ValueError("model.head=none leaves no head")
                set_prior(model.get_submodule(layer), data.class_counts)
            elif scheme == "whiten":
                whiten(model, _some_images(data))
            else:
                draw_weights(model, scheme)
        except ValueError as error:
            raise UserError("init", f"{scheme} does not apply: {error}", "init without it") from error
    return schemes


def _some_images(data: DataModule) -> Iterator[Tensor]:
    """About `_WHITENED` training images in batches from all over the split, normalised and not augmented."""
    if not data.pairs:
        raise ValueError("samples are not pairs of image and target")
    loader = data.train_for_eval.loader
    batches = math.ceil(loader.samples / loader.batch_size)
    with preserved_rng():
        for batch in loader.batches(0, 0, batches, max(1, loader.samples // _WHITENED)):
            yield batch.images
    loader.close()


def freeze(config: Train, model: nn.Module, image: Tensor) -> Freezing:
    """Decide what is frozen when, as `freeze` and `unfreeze_at` say; what is never trained requires no gradient from now on.

    Raises:
        UserError: if a pattern matches nothing with weights, or nothing is left to train.
    """
    parts = [_frozen(model, image, entry) for entry in entries(config.freeze, config.unfreeze_at)]
    waiting = {parameter for part in parts for parameter in part.parameters}
    # Everything frozen in the first step would fail in backward, with an error of torch that names nothing
    if parts and all(parameter in waiting for parameter in model.parameters() if parameter.requires_grad):
        raise UserError("freeze", "leaves nothing to train in the first step", "all-but-head, or fewer patterns")
    # What is frozen only for a while still requires a gradient, so that the optimizer has it from the start
    for part in parts:
        if part.permanent:
            for parameter in part.parameters:
                parameter.requires_grad_(False)
    return Freezing(model, parts)


def _frozen(model: nn.Module, image: Tensor, entry: Entry) -> Frozen:
    """The weights and modules that a pattern matches, with everything inside matched modules."""
    own = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    if entry.pattern == ALL_BUT_HEAD:
        if isinstance(model, nn.ModuleDict):
            allowed = "name patterns, such as [model.features]"
            raise UserError("freeze", "is all-but-head, and the task adds modules to the model", allowed)
        head = head_of(model, image, "freeze")
        # Not what is around the head, and only modules with weights: a dropout beside the head goes on.
        apart = [name for name in own if not head.covers(name) and not head.path.startswith(f"{name}.")]
        weightless = {name for name, module in model.named_modules() if not any(True for _ in module.parameters())}
        names = set(apart) - weightless
    else:
        # A pattern may name modules, or single parameters
        names = matching("freeze", entry.pattern, own, "module or parameter", others=[ALL_BUT_HEAD])
    modules = [module for name, module in model.named_modules() if name in names]
    inside = dict.fromkeys(inner for module in modules for inner in module.modules())
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    parameters |= dict.fromkeys(parameter for name, parameter in model.named_parameters() if name in names)
    # Weights that are not trained anyway need no freezing
    trained = tuple(parameter for parameter in parameters if parameter.requires_grad)
    if not trained:
        raise UserError("freeze", f"'{entry.pattern}' has no trainable weights", "names of layers with weights")
    # A module goes to evaluation mode only if all its weights are frozen, so that BatchNorm keeps its statistics
    weights = [(module, set(module.parameters(recurse=False))) for module in model.modules()]
    whole = [module for module, own_weights in weights if own_weights and own_weights <= set(trained)]
    return Frozen(entry.pattern, trained, tuple(dict.fromkeys([*inside, *whole])), entry.steps, entry.epochs)
