"""Components: `_target_` paths resolved, their arguments checked without a call, and the objects built."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from runner.base.errors import ConfigError, Problem, UserError, nearest
from runner.base.secrets import is_masked
from runner.config import keys
from runner.config.schema.sections import extras_class
from runner.config.validate import adapter, shown, typed

_CONTROL = ("_target_", "_partial_", "_args_")
# How torch says that a number in the config asks for more memory than there is, and torchvision that files are missing.
_REFUSED = re.compile(r"can't allocate memory|not enough memory|overflow|(Dataset|metadata file|^File) not found")
_IN_WORDS = {"lr": "lr|learning rate", "betas": "betas?", "eps": "eps|epsilon"}  # how torch's errors name its arguments
_DOWNLOADS = ("download", "pretrained", "pretrained_backbone", "fetch_weights")


def resolve(path: str) -> Any:
    """The object that a dotted path names; modules on the way are imported.

    Raises:
        UserError: if a part does not exist, with the nearest name; or if importing a module fails.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UserError(f"'{path}' is not a dotted path such as my_package.Net")
    found: Any = None
    for count, part in enumerate(parts, start=1):
        name = ".".join(parts[:count])
        # Each part is a module as long as it can be imported, and an attribute from then on
        if found is None or inspect.ismodule(found):
            try:
                found = importlib.import_module(name)
                continue
            except Exception as error:
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                # A module that exists may import something that does not: that is the error to show
                if absent is None or not keys.within(name, [absent]):
                    raise UserError(f"importing {name} failed: {type(error).__name__}: {error}") from error
                if count == 1:
                    hint = "it must be installed, or on PYTHONPATH, or in the folder that python -m runner starts in"
                    if close := nearest(part, (module.name for module in pkgutil.iter_modules()), 0.75):
                        hint = f"did you mean '{close}'?"
                    raise UserError(f"there is no package '{part}' ({hint})") from error
        if not hasattr(found, part):
            owner, inside = getattr(found, "__name__", repr(found)), getattr(found, "__path__", ())
            names = [*dir(found), *(module.name for module in pkgutil.iter_modules(inside))]
            close = nearest(part, [name for name in names if not name.startswith("_")])
            raise UserError(f"{owner} has no '{part}'" + (f"; did you mean '{close}'?" if close else ""))
        found = getattr(found, part)
    return found


# Arguments that the program adds where a component's signature names them.
FACTS: dict[str, tuple[str, ...]] = {
    "data.dataset": ("root", "download", "image_size", "max_pixels", "on_error", "cache_folder"),
    "model": ("in_channels", "image_size", "num_classes"),
    "loss": ("num_classes", "class_counts", "label_counts", "ignore_index"),
    "task": ("num_classes", "num_outputs", "classes"),
    "task.teacher": ("in_channels", "image_size", "num_classes"),
    "scheduler": ("total_steps", "steps_per_epoch", "mode", "clock", "lr"),
    "metrics": ("num_classes", "num_labels", "threshold", "task"),
    "callbacks": ("monitor", "mode"),
    "logger": ("warn", "watched"),
    "optimizer": ("foreach", "fused"),
}
_LIBRARIES = {  # whose models a module of this program builds by name
    "runner.models.timm_zoo": "timm",
    "runner.models.torchvision_zoo": "torchvision",
    "runner.models.smp_zoo": "segmentation-models-pytorch",
    "runner.models.torchvision_detection": "torchvision",
    "runner.models.transformers_detection": "transformers",
    "runner.models.transformers_segmentation": "transformers",
}


def called(target: str, name: Any) -> str:
    """The name of a component for people: its class, or how a library calls it, such as `resnet18 (torchvision)`."""
    module, _, named = target.rpartition(".")
    library = _LIBRARIES.get(module)
    return f"{name} ({library})" if library else str(name) if target == "runner.optim.schedules.Torch" else named


class Component:
    """A mapping with `_target_` taken apart: target, its parameters, positional and named arguments, and extras."""

    def __init__(self, key: str, node: Mapping[str, Any], target: Any = None) -> None:
        """Resolve the target, unless something with its signature is given.

        Raises:
            UserError: if there is no such object.
        """
        self.target = resolve(str(node["_target_"])) if target is None else target
        # Some builtins and extensions have no signature, and take what they are given
        self.parameters: Mapping[str, inspect.Parameter] = {}
        self.takes_any = True  # arguments of any name: there is no signature, or it ends in `**kwargs`
        with contextlib.suppress(ValueError, TypeError):
            self.parameters = inspect.signature(self.target).parameters
            self.takes_any = any(each.kind is each.VAR_KEYWORD for each in self.parameters.values())
        # Keys that this program reads itself are not passed on
        extras = extras_class(key)
        self.known_extras = [name for name in keys.hints(extras) if not self.takes(name)] if extras else []
        self.extras = {name: node[name] for name in self.known_extras if name in node}
        self.positional: Any = node.get("_args_", [])
        self.arguments = {
            name: value for name, value in node.items() if not name.startswith("_") and name not in self.extras
        }

    def takes(self, name: str) -> bool:
        """Tell whether the signature has an argument of this name."""
        return name in self.parameters


def targets_in(value: Any) -> Iterator[tuple[str, str]]:
    """Every (dotted key, `_target_`) at any depth of a mapping or list."""
    nodes = ((key, node) for key, node in keys.walk(value) if isinstance(node, dict) and "_target_" in node)
    return ((key, str(node["_target_"])) for key, node in nodes)


def bind(key: str, node: Mapping[str, Any], facts: Iterable[str] = (), positional: int = 0) -> list[Problem]:
    """Check a component's arguments against the signature of its target, without calling it.

    Args:
        key: dotted key of the component, for the messages.
        node: `_target_` and the arguments; nested components are checked, too.
        facts: names of arguments that the program adds where the signature has them.
        positional: how many leading arguments the program passes by position.
    """
    problems, path = list[Problem](), str(node["_target_"])
    for name, value in node.items():
        items = enumerate(value) if isinstance(value, list) else ()
        for inside, inner in [(f"{key}.{name}", value), *((f"{key}.{name}.{at}", item) for at, item in items)]:
            if isinstance(inner, dict) and "_target_" in inner:
                problems += bind(inside, inner, FACTS.get(inside, ()))
    try:
        component = Component(key, node)
    except UserError as error:
        return [*problems, Problem(f"{key}._target_", str(error))]
    if not callable(component.target):
        return [*problems, Problem(f"{key}._target_", f"{path} is not callable", "a class or a function")]
    # Keys that this program reads itself have types, too
    if component.known_extras and (kind := extras_class(key)):
        extras = typed(kind, component.extras)[1]
        problems += [dataclasses.replace(problem, key=f"{key}.{problem.key}") for problem in extras]
    others = [name for name in node if name.startswith("_") and name not in _CONTROL]
    problems += [Problem(f"{key}.{name}", "is not supported", ", ".join(_CONTROL)) for name in others]
    if not isinstance(component.positional, list):
        return [*problems, Problem(f"{key}._args_", f"cannot be {shown(component.positional)}", "a list")]
    # What the program passes by position is not for a config to give.
    parameters = list(component.parameters.values())[positional + len(component.positional) :]
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    target, annotations = component.target, dict[str, Any]()
    # Annotations of foreign code may name anything, and then nothing can be checked
    with contextlib.suppress(Exception):
        annotations = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in component.arguments.items():
        if value is None and (name in facts or (name in named and named[name].default is None)):
            continue  # from the data, or the default, which `width: int = None` does not annotate
        if name in named:
            problems += _wrong_type(f"{key}.{name}", annotations.get(name), value)
        elif not component.takes_any:
            # What the program gives to a logger is not a setting.
            listed = [each for each in named if not (key.startswith("logger.") and each in facts)]
            listed += sorted(component.known_extras)
            meant = keys.key_meant(f"{key}.{name}").rpartition(".")[2]
            close, allowed = meant if meant in listed else nearest(name, listed), ", ".join(listed) or "no arguments"
            problems.append(Problem(f"{key}.{name}", f"is not an argument of {path}", allowed, close, kind="argument"))
    # A partial component gets the rest of its arguments later.
    if not node.get("_partial_"):
        given = {*component.arguments, *facts}
        missing = [name for name, each in named.items() if each.default is each.empty and name not in given]
        problems += [Problem(f"{key}.{name}", f"is missing: {path} needs it") for name in missing]
    return problems


def plain_kind(annotation: Any) -> Any:
    """What an argument takes, if that is nothing but what YAML has: numbers, texts, true, false, null, and lists; else None."""
    kind = _without_tensors(annotation)
    return kind if kind is not None and all(map(_is_plain, keys.members(kind))) else None


def _is_plain(annotation: Any) -> bool:
    """Tell whether values of an annotation come from YAML as they are."""
    origin = get_origin(annotation)
    if origin in (list, tuple, Union, types.UnionType):
        return all(inner is Ellipsis or _is_plain(inner) for inner in get_args(annotation))
    return origin is Literal or annotation in (bool, int, float, str, types.NoneType)


def _without_tensors(annotation: Any) -> Any:
    """An annotation without tensors where numbers are possible, too: a config has none."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return Union[tuple(each for each in inner if getattr(each, "__name__", "") != "Tensor") or inner]  # noqa: UP007
    return tuple[tuple(map(_without_tensors, inner))] if origin is tuple else annotation  # type: ignore[misc]


def _wrong_type(key: str, annotation: Any, value: Any) -> list[Problem]:
    """A problem if a plain value fits none of the plain alternatives of an annotation."""
    if value == "???":  # which is reported with the others that are missing
        return []
    # Only plain types can be compared with what a config contains
    alternatives = keys.members(_without_tensors(annotation))
    plain = [member for member in alternatives if member is not None and _is_plain(member)]
    kinds = {get_origin(member) for member in alternatives}
    of_items = (isinstance(value, dict) and dict in kinds) or (isinstance(value, list) and Sequence in kinds)
    if not plain or of_items or Any in alternatives or any(targets_in({"": value})):
        return []
    either: Any = Union[tuple(plain)]  # noqa: UP007
    # Python would take true and false for 1 and 0.
    if not isinstance(value, bool) or any(member is bool or get_origin(member) is Literal for member in plain):
        with contextlib.suppress(ValidationError):
            adapter(either).validate_python(value)
            return []
    return [Problem(key, f"cannot be {shown(value)}", keys.describe(either))]


def extras_of(key: str, node: Mapping[str, Any]) -> Any:
    """The keys of a validated component that the program reads itself: an object of `extras_class`, defaults filled in."""
    kind = extras_class(key)
    assert kind is not None, key
    found, problems = typed(kind, Component(key, node).extras)
    assert not problems, problems
    return found


def names_argument(node: Mapping[str, Any], name: str) -> inspect.Parameter | None:
    """The argument of this name in the signature of a component's target; None if there is none."""
    return Component("", node).parameters.get(name)


def preferred_data(node: Mapping[str, Any], grey: bool) -> dict[str, Any]:
    """The images that a component wants, by names of keys of `data`: what its `preferred_data` gives for its arguments.

    Only a target that has such a function says so, see `runner.models.torchvision_zoo.classifier`. Grey images get the
    averages of the statistics over the colours.
    """
    component = Component("model", node)
    if (wanted := getattr(component.target, "preferred_data", None)) is None:
        return {}
    found: dict[str, Any] = wanted(**component.arguments)
    if grey and "normalize" in found:
        found["normalize"] = {name: [sum(each) / len(each)] for name, each in found["normalize"].items()}
    return found


def build(
    key: str, node: Mapping[str, Any], *args: Any, facts: Mapping[str, Any] | None = None, fetch: bool = True
) -> Any:
    """Build a component: call its target with the arguments of the config, nested components built first.

    Args:
        key: dotted key of the component, for the messages.
        node: `_target_` and the arguments.
        *args: leading arguments that the program passes by position.
        facts: arguments that the program adds where the signature names them and the config leaves them out or null.
        fetch: False builds it, and what is nested in it, without downloads and trained weights.

    Raises:
        UserError: if the target refuses its arguments.
    """
    # What was checked are the plain mappings of a config; anything that merely behaves like one was made later.
    if type(node) is not dict:
        raise UserError(f"{key}: is a {type(node).__name__}, not a mapping read from a config")
    component = Component(key, node)
    # Weights of a checkpoint follow, so none are downloaded
    if not fetch:
        _fetch_nothing(component)
    kwargs = {name: _built(f"{key}.{name}", value, fetch) for name, value in component.arguments.items()}
    # Facts fill what the config leaves open, and only if the target asks for them
    for name, value in (facts or {}).items():
        if kwargs.get(name) is None and component.takes(name):
            kwargs[name] = value
    # Other nulls are left over from the option that another target was put into, unless **kwargs takes them: it takes no facts
    known = {*FACTS.get(key, ()), *(facts or ())}
    taken = [name for name in kwargs if component.takes(name) or (component.takes_any and name not in known)]
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name in taken}
    positional = [*args, *(_built(f"{key}._args_", value, fetch) for value in component.positional)]
    if node.get("_partial_"):
        return functools.partial(component.target, *positional, **kwargs)
    try:
        return component.target(*positional, **kwargs)
    except Exception as error:
        # Constructors refuse values with these; a RuntimeError may as well be a bug in the user's code, which keeps its traceback.
        refuses = isinstance(error, ValueError | TypeError | ArithmeticError | MemoryError | OSError)
        if not (refuses or (isinstance(error, RuntimeError) and _REFUSED.search(str(error)))):
            error.add_note(f"while {key} was built")
            raise
        reason = (str(error).strip() or "there is not enough memory for it").splitlines()[0]
        argument = f"{key}.{_refused(reason, component.arguments)}".rstrip(".")
        raise UserError(argument, f"{node['_target_']} refuses its arguments: {reason}") from error


def _refused(reason: str, arguments: Mapping[str, Any]) -> str:
    """The argument that an error names first; an empty string if it names none."""
    places = list[tuple[int, int, str]]()
    for name, value in keys.flatten(dict(arguments)).items():
        words = _IN_WORDS.get(name, re.escape(name.rpartition(".")[2]).replace("_", "[_ ]"))
        found = re.search(rf"(?<!\w)({words})(?!\w)", reason, re.IGNORECASE)
        if found and value is not None and not name.endswith("_target_"):
            places.append((found.start(), -len(name), name))
    return min(places)[2] if places else ""


def _built(key: str, value: Any, fetch: bool) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return build(key, value, fetch=fetch)
        return {name: _built(f"{key}.{name}", item, fetch) for name, item in value.items()}
    if isinstance(value, list):
        return [_built(f"{key}.{index}", item, fetch) for index, item in enumerate(value)]
    if is_masked(value):
        allowed = f"the secret on the command line ({key}=...) or in your config folder"
        raise ConfigError([Problem(key, "is a secret, and secrets are never stored in files", allowed)])
    return value


def _fetch_nothing(component: Component) -> None:
    """Drop the arguments that make a component download something or load trained weights."""
    target, given = component.target, component.arguments
    given |= {name: False for name in _DOWNLOADS if given.get(name)}
    if component.takes("fetch_weights"):
        given["fetch_weights"] = False
    if inspect.isfunction(target) and keys.within(target.__module__, ["torchvision.models"]):
        # These builders take arguments by position too, the weights first, and load some where none are named.
        given |= dict(zip(component.parameters, component.positional, strict=False))
        component.positional = []
        given = {name: value for name, value in given.items() if name not in _DOWNLOADS}
        if target.__name__ == "get_model":  # calls a builder by its name; building refuses a name that there is not
            with contextlib.suppress(ValueError):
                target = resolve("torchvision.models.get_model_builder")(str(given.get("name")))
        builder = Component("", {"_target_": ""}, target)
        component.arguments = given | {name: None for name in ("weights", "weights_backbone") if builder.takes(name)}
