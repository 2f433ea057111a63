"""What happens to a model between its constructor and its training: a new head, initial weights, adapters, frozen parts."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.errors import UserError, blame, first_line, require
from runner.base.patterns import matching
from runner.checkpoint.find import beside
from runner.checkpoint.weights import Weights, read_weights, weights_sha256
from runner.config import stored
from runner.config.rules import ALL_BUT_HEAD, Entry, entries
from runner.config.schema.sections import ADJUSTMENTS
from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.data.sample_rng import preserved_rng
from runner.engine.freezing import Freezing, Frozen
from runner.engine.state import list_problems
from runner.instrument.nested import kind_of
from runner.instrument.no_trace import evaluating
from runner.models.heads import Head, HeadNotFound, find_head
from runner.models.initial import draw_weights, set_prior, whiten, zero_last_norms
from runner.run.hub import local
from runner.runtime.determinism import refusal

_WHITENED, _SHOWN = 5000, 40


class Modules(nn.ModuleDict):
    """A model and the modules that a task adds, which are trained together."""


class Misfit(NamedTuple):
    """A tensor of a model or of a file that does not fit the other."""

    name: str
    lack: str  # what is wrong
    given: str  # its shape in the file
    wanted: str  # its shape in the model
    in_head: bool


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights of a new run come from; empty where a checkpoint brings them."""

    schemes: Sequence[str] = ()  # what `init` names
    path: Path | None = None  # the file of `init_from`
    sha256: str = ""  # of all its tensors, see `weights_sha256`
    kind: str = "raw"  # what they are: `raw`, or an average, `ema` or `swa`
    loaded: int = 0  # number of tensors that were loaded
    misfits: Sequence[Misfit] = ()  # tensors that were not loaded
    warnings: Sequence[str] = ()  # files that were skipped while searching
    others: Mapping[str, InitialWeights] = field(default_factory=dict)  # those of modules that the task adds

    def rows(self) -> list[tuple[str, str, str]]:
        """Labels, values and reasons for people."""
        rows = [("initial", ", ".join(self.schemes), "init")] if self.schemes else []
        if self.path is not None:
            average = "" if self.kind == "raw" else f" of the average ({self.kind})"
            left = f", {len(self.misfits)} skipped because they do not fit" if self.misfits else ""
            rows.append(("weights", f"{self.loaded} tensors{average}{left}", f"init_from: {self.path}"))
            rows += [("checkpoint", text, "")] if (text := beside(self.path, "init_from")) else []
        return rows + [(name, *row[1:]) for name, each in self.others.items() for row in each.rows()]

    def table(self) -> list[list[str]]:
        """Rows of tensor, what is wrong, shape in the file and shape in the model, with a last one that counts those not shown."""
        rows = [list(each[:4]) for each in self.misfits[:_SHOWN]]
        more = len(self.misfits) - _SHOWN
        return [*rows, [f"and {more} more", "", "", ""]] if more > 0 else rows

    def record(self) -> dict[str, Any]:
        """What `init_from` loaded, for the summary; empty if it is null."""
        found: dict[str, Any] = {name: each.record() for name, each in self.others.items()}
        if self.path is None:
            return found
        path = str(self.path.resolve())
        return {"path": path, "weights_sha256": self.sha256, "kind": self.kind, "tensors": self.loaded, **found}


@contextlib.contextmanager
def explaining(key: str, problem: str, allowed: str = "") -> Iterator[None]:
    """Turn what custom components raise into a `UserError`: `problem` followed by the first line of the error."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refusal(error) or UserError(key, f"{problem}{first_line(error)}", allowed) from error
    except Exception as error:  # a bug, which another setting does not cure
        error.add_note(f"while {key} was tried: {problem}".rstrip(": "))
        raise


def _find_head(model: nn.Module, image: Tensor) -> Head:
    """The head of a model, found with an image (1, C, H, W); the model and random generators are left as they are."""

    def logits() -> Any:
        with evaluating(model), explaining("model", f"cannot take images of shape {tuple(image.shape)}: "):
            return model(image)

    return find_head(model, logits)


def head_of(model: nn.Module, image: Tensor, key: str) -> Head:
    """The head of a model, which `key` needs; `UserError` if it cannot be told from the rest."""
    try:
        return _find_head(model, image)
    except HeadNotFound as error:
        allowed = "name patterns, or " * (key in ("freeze", "adapters.trained"))
        allowed += "a model whose attribute head, fc or classifier ends in a Linear or a 1x1 convolution"
        raise UserError(key, f"no head was found: {error}", allowed) from error


def initialize(config: Train, model: nn.Module, image: Tensor, data: DataModule) -> Sequence[str]:
    """Set initial weights as `init` says; returns the names of the schemes.

    Raises `UserError` if a scheme does not apply to the model.
    """
    schemes = [config.init] if isinstance(config.init, str) else config.init or []
    for scheme in sorted(schemes, key=ADJUSTMENTS.count):  # after what would undo them
        with blame("init", f"{scheme} does not apply", "init without it", OSError, RuntimeError):
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
    return schemes


def _some_images(data: DataModule) -> Iterator[Tensor]:
    """About `_WHITENED` training images in batches from all over the split, normalised and not augmented."""
    if not data.pairs:
        raise ValueError("samples are not pairs of image and target")
    loader = data.train_for_eval.loader
    with preserved_rng():
        for batch in loader.batches(0, 0, len(loader), max(1, loader.samples // _WHITENED)):
            yield batch.images
    loader.close()


def set_initial_weights(config: Train, model: nn.Module, data: DataModule, image: Tensor) -> InitialWeights:
    """Set weights of the model as `init` and `init_from` say, load modules of the task by name, and add `adapters`.

    Raises `UserError` if a scheme does not apply to the model, or a file does not fit.
    """
    modules = dict(model.items()) if isinstance(model, Modules) else {"model": model}
    schemes, given = initialize(config, modules["model"], image, data), config.init_from
    files = dict(given) if isinstance(given, dict) else {"model": given} if given is not None else {}
    if unknown := [name for name in files if name not in modules]:
        raise UserError("init_from", f"names '{unknown[0]}', and the task has no such module", ", ".join(modules))
    if config.task["_target_"] == "runner.tasks.distillation.Distillation" and "teacher" not in files:
        problem = "names no weights for task.teacher, which would teach at random"
        raise UserError("init_from", problem, "init_from={teacher: PATH}")
    head = None
    if "model" in files and image.numel():
        with contextlib.suppress(HeadNotFound):  # a model whose head cannot be told from the rest may be loaded, too
            head = _find_head(modules["model"], image)
    others = {
        name: start_from(config, modules[name], head if name == "model" else None, data.classes, name=name, path=path)
        for name, path in files.items()
    }
    initial = others.pop("model", InitialWeights())
    adapt(config, modules["model"], lambda: image)
    return replace(initial, schemes=schemes, others=others)


def start_from(
    config: Train, model: nn.Module, head: Head | None, classes: Sequence[str], *, name: str, path: str
) -> InitialWeights:
    """Load the weights of a file of `init_from` that fit a module; nothing else of a checkpoint is used.

    Raises `UserError` if the file cannot be read, more does not fit than `init_mismatch` allows, or a tensor holds other values.
    """
    given = read_weights(local(path, "init_from"), Path(config.output_root) / config.name)
    # A module that the task adds, such as a teacher, is to be what was trained
    own, policy = model.state_dict(), config.init_mismatch if name == "model" else "raise"
    tensors = _without_prefix(given.tensors, own, name)
    # A head of the same shape may still mean other classes, so the names are compared too
    other_classes = bool(given.classes and classes) and given.classes != tuple(classes)
    if other_classes and name == "teacher":
        problem = f"{given.path} is of a model of other classes: {', '.join(given.classes[:5])}"
        raise UserError("init_from", problem, f"a teacher of {', '.join(classes[:5])}")
    misfits = _misfits(tensors, own, head, other_classes)
    left = {each.name for each in misfits}
    fitting = {name: tensor for name, tensor in tensors.items() if name in own and name not in left}
    # `head` allows only what follows from other classes; any other misfit suggests the wrong file
    refused = [each for each in misfits if policy == "raise" or (policy == "head" and not each.in_head)]
    if refused or not fitting:
        lacks: dict[str, list[str]] = {}
        for each in refused or misfits:
            # Group the names by what is wrong, because one cause usually affects many tensors
            shapes = f" {each.given} for {each.wanted}" if each.lack == "of another shape" else ""
            lacks.setdefault(each.lack, []).append(each.name + shapes)
        told = _other_model(given, config.model) if name == "model" else ""
        problem = f"the tensors of {given.path} are not those of this {name}{told}: {list_problems(lacks)}"
        remedies = {"head": "init_mismatch=skip, or ", "raise": "init_mismatch=head or skip, or "}
        remedy = remedies.get(policy, "") if name == "model" else ""
        if any(".lora_A." in each for each in tensors):
            remedy = f"export format=safetensors ckpt_path={given.path}, which merges its adapters; {remedy}"
        raise UserError("init_from", problem, f"{remedy}weights of this {name}")
    for name, tensor in fitting.items():
        # Integers instead of floats would be converted silently, and are never what was meant. In a state dict converted to half
        # precision, counters are floats too.
        is_counter = name.endswith("num_batches_tracked") and tensor.is_floating_point()
        if kind_of(tensor) != kind_of(own[name]) and not is_counter:
            problem = f"the tensor {name} of {given.path} is {tensor.dtype}, and the model's is {own[name].dtype}"
            raise UserError("init_from", problem, f"{kind_of(own[name])} values of any precision")
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    digest = weights_sha256(given.tensors)
    return InitialWeights((), given.path, digest, given.kind, len(fitting), misfits, given.warnings)


def _other_model(given: Weights, own: dict[str, Any]) -> str:
    """Which model a checkpoint holds if it is another one, with the arguments that differ."""
    theirs = stored.load(given.config, str(given.path)).get("model")
    if not isinstance(theirs, dict) or "_target_" not in theirs:
        return ""
    both = [str(node["_target_"]).rpartition(".")[2] for node in (theirs, own)]
    keys = [key for key in own if None not in (theirs.get(key), own[key]) and theirs[key] != own[key]]
    if keys and both[0] == both[1]:
        both = [f"{both[0]}({', '.join(f'{key}={node[key]}' for key in keys)})" for node in (theirs, own)]
    return f", as the file holds {both[0]} and the config builds {both[1]}" if keys else ""


def _without_prefix(tensors: dict[str, Tensor], own: dict[str, Any], module: str) -> dict[str, Tensor]:
    """Remove prefixes that all names have and the module's do not, such as `module.` and `_orig_mod.`.

    Of a run whose task has trained further modules, the tensors of the module of this name are taken, or else of the model.
    """
    for part in (module, "model"):
        if not any(name in own for name in tensors) and any(name.startswith(f"{part}.") for name in tensors):
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    # DDP and torch.compile put a prefix before every name; it is removed only if no name fits as it is
    while tensors and not any(name in own for name in tensors):
        first = {name.partition(".")[0] for name in tensors}
        if len(first) > 1 or not all("." in name for name in tensors):
            break
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    return tensors


def _misfits(tensors: dict[str, Tensor], own: dict[str, Any], head: Head | None, other_classes: bool) -> list[Misfit]:
    found = []
    for name in dict.fromkeys([*own, *tensors]):
        given, wanted = tensors.get(name), own.get(name)
        in_head, lack = head is not None and head.covers(name), ""
        if isinstance(given, Tensor) and isinstance(wanted, Tensor):
            if given.shape != wanted.shape:
                lack = "of another shape"
            elif in_head and other_classes:
                lack = "of other classes"
        elif given is not None:
            lack = "unexpected"
        elif isinstance(wanted, Tensor) and not name.endswith(".num_batches_tracked"):  # which older files do not have
            lack = "missing"
        shape, own_shape = ("x".join(map(str, getattr(value, "shape", "-"))) or "scalar" for value in (given, wanted))
        found += [Misfit(name, lack, shape, own_shape, in_head)] if lack else []
    return found


def adapt(config: Train, model: nn.Module, image: Callable[[], Tensor]) -> None:
    """Put the adapters of `adapters` into a model, in which only they and what `adapters.trained` names are trained from now on.

    `image` gives an image as the model takes it, (1, C, H, W). Raises `UserError` if a pattern matches nothing.
    """
    settings, modules = config.adapters, dict(model.named_modules())
    if settings.rank is None:
        return
    require("adapters", "runner[lora]", "peft", "transformers")  # which peft imports
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name in (*modules, *dict(model.named_parameters())) if name]
    whole = [head_of(model, image(), "adapters.trained").path] if settings.trained is None else settings.trained
    found = (matching("adapters.trained", each, names, "module or parameter") for each in whole)
    inside = tuple(f"{name}." for name in set[str]().union(*found))
    trained = [each for name, each in model.named_parameters() if each.requires_grad and f"{name}.".startswith(inside)]
    # In evaluations, TransformerEncoderLayer reads the weights of its parts and does not call them
    fused = tuple(f"{name}." for name, each in modules.items() if isinstance(each, nn.TransformerEncoderLayer))
    able = [name for name, each in modules.items() if _fits(each) and not f"{name}.".startswith(inside + fused)]
    kind, some = "plain Linear or Conv2d layer", ", ".join(able[:5])
    found = (matching("adapters.modules", each, able, kind, prose=some) for each in settings.modules)
    target = f"({'|'.join(map(re.escape, sorted(set[str]().union(*found))))})"
    with explaining("adapters", "peft refuses them: ", "other values of adapters.modules and adapters.rank"):
        options = {"lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": target}
        inject_adapter_in_model(LoraConfig(r=settings.rank, **options), model)
    for parameter in trained:  # peft leaves nothing but the adapters
        parameter.requires_grad_(True)
    if not model.training:  # as loaded models often are, and then all of it is trained
        model.train()
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    for name, module in modules.items():  # BatchNorm keeps its statistics where it is not trained
        if getattr(module, "running_mean", None) is not None and not f"{name}.".startswith(inside):
            module.training = False


def _fits(module: nn.Module) -> bool:
    """True if an adapter of peft, which ignores dilation and padding mode, computes what a change of the layer's weights would."""
    plain = type(module) is nn.Conv2d and (module.groups, *module.dilation, module.padding_mode) == (1, 1, 1, "zeros")
    return plain or type(module) is nn.Linear  # and not a subclass, such as MultiheadAttention never calls


def merged(config: Train, model: nn.Module) -> nn.Module:
    """A copy of the model in which the adapters are added to the weights of their layers; without adapters, the model itself."""
    if config.adapters.rank is None:
        return model
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "merge") and hasattr(layer, "base_layer"):
            layer.merge()
            model.set_submodule(name, layer.base_layer)
    return model


def freeze(config: Train, model: nn.Module, image: Tensor) -> Freezing:
    """Decide what is frozen when, as `freeze` and `unfreeze_at` say; what is never trained requires no gradient from now on.

    Raises `UserError` if a pattern matches nothing with weights, or nothing is left to train.
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
        if isinstance(model, Modules):
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
