"""Components: `_target_` paths resolved, their arguments bound without a call, and the objects built.

Paths on the command line and in the user's config folder are trusted. A path in a file (a checkpoint) is not: the object
that it resolves to must be on the allow-list or come from a package that the user trusts. Nothing else is even imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from runner.config.allowed_targets import COMPONENT_ROOMS, DATA_SETS, PART_HOMES, homes_of, within, without_fetching
from runner.config.errors import ConfigError, Problem, UserError, nearest
from runner.config.extras import extras_in, names_of, without_extras
from runner.config.keys import describe, members
from runner.config.renamed import new_key, new_target
from runner.config.schema.sections import EXTRAS
from runner.config.secrets import is_masked
from runner.config.validate import shown, typed

_CONTROL = ("_target_", "_partial_", "_args_")
# How torch says that a number in the config asks for more memory than there is.
_TOO_LARGE = re.compile(r"can't allocate memory|not enough memory|overflow")
_SCALARS = (bool, int, float, str, type(None))


def resolve(path: str) -> Any:
    """The object that a dotted path names; modules on the way are imported.

    Raises:
        UserError: if a part does not exist, with the nearest name; or if importing a module fails.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UserError(f"'{path}' is not a dotted path such as my_package.Net")
    found: Any = None
    consumed = 0
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise UserError(f"importing {name} failed: {error}") from error
            if count == 1:
                hint = "installed, or on PYTHONPATH, or in the folder that python -m runner starts in"
                raise UserError(f"there is no package '{parts[0]}' (it must be {hint})") from error
            break
        except Exception as error:
            raise UserError(f"importing {name} failed: {type(error).__name__}: {error}") from error
        consumed = count
    for part in parts[consumed:]:
        if not hasattr(found, part):
            owner = getattr(found, "__name__", repr(found))
            close = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            raise UserError(f"{owner} has no '{part}'" + (f"; did you mean '{close}'?" if close else ""))
        found = getattr(found, part)
    return found


def refusal(path: str, trust: Iterable[str], section: str = "") -> str:
    """Why a path that was read from a file may not be built, or an empty string if it may.

    Args:
        path: dotted path.
        trust: packages that the user trusts.
        section: where it stands, such as `loss`; parts of another kind may not be built there. Empty for any.
    """
    trusted = tuple(trust)
    packages = ("runner", "torch", "torchvision", "torchmetrics", *trusted)
    if not within(path, packages):
        return "comes from a file and its package is not trusted"
    try:
        found = resolve(path)
    except UserError as error:
        return str(error)
    home = str(getattr(found, "__module__", None) or "")
    if path.rpartition(".")[2].startswith("_"):
        return "comes from a file and names something private"
    if "." in str(getattr(found, "__qualname__", "")):
        return "comes from a file and names a part of a class"
    if within(home, trusted):
        return ""
    actual = f"{home}.{getattr(found, '__qualname__', '?')}"
    if within(home, COMPONENT_ROOMS) and not (inspect.isclass(found) or inspect.isfunction(found)):
        return "is neither a class nor a function"
    known = within(home, ("torch", "torchvision", "torchmetrics")) and _builds_a_part(found)
    if known or within(home, COMPONENT_ROOMS):
        if not section or within(home, homes_of(section)):
            return ""
        return f"comes from a file and resolves to {actual}, which is not built in the section {section}"
    return f"comes from a file and resolves to {actual}, which is not on the list of things a file may build"


def remedy(path: str, trust: Iterable[str], section: str) -> str:
    """What would allow a path that `refusal` refuses."""
    trusted = tuple(trust)
    package = path.split(".")[0]
    if within(path, ("runner", "torch", "torchvision", "torchmetrics")) and not within(path, trusted):
        homes = ", ".join(homes_of(section))
        return f"parts of {homes}, or {section}=... on the command line" if homes else "nothing: no part is built here"
    if within(path, trusted):
        try:
            home = str(getattr(resolve(path), "__module__", None) or "")
        except UserError:
            return "a path that can be imported here"
        if within(home, trusted):
            return "a public class or function at the top of its module"
        package = home.split(".")[0] or package
    return f"trust=[{package}] if you trust it (on the command line, in conf/local, or in RUNNER_TRUST)"


def _builds_a_part(found: Any) -> bool:
    """Whether a torch or torchvision object builds modules, optimizers, schedules, data sets, transforms or metrics."""
    import torch

    home = str(found.__module__)
    if inspect.isclass(found):
        if within(home, ("torchvision.datasets",)):
            return found.__name__ in DATA_SETS
        if not within(home, PART_HOMES):
            return False
        kinds = (
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
            torch.utils.data.Dataset,
        )
        # The older transforms are plain classes with a __call__; a class's own comes before that of `type`.
        can_be_called = any("__call__" in vars(base) for base in found.__mro__)
        return issubclass(found, kinds) or (within(home, ("torchvision.transforms",)) and can_be_called)
    if inspect.isfunction(found) and within(home, ("torchvision.models",)):
        import torchvision

        try:
            return bool(torchvision.models.get_model_builder(found.__name__) is found)
        except ValueError:
            return False
    return False


def targets_in(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Every (dotted key, `_target_`) at any depth of a mapping or list."""
    found: list[tuple[str, str]] = []
    if isinstance(value, dict):
        if "_target_" in value:
            found.append((prefix, str(value["_target_"])))
        for key, item in value.items():
            found += targets_in(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += targets_in(item, f"{prefix}.{index}")
    return found


def bind(key: str, node: Mapping[str, Any], facts: Iterable[str] = (), positional: int = 0) -> list[Problem]:
    """Check a component's arguments against the signature of its target, without calling it.

    Args:
        key: dotted key of the component, for the messages.
        node: `_target_` and the arguments.
        facts: names of arguments that the program adds where the signature has them.
        positional: how many leading arguments the program passes by position.

    Returns:
        Problems: target not found or not callable, unknown, missing and wrongly typed arguments; of nested
        components too.
    """
    problems: list[Problem] = []
    for name, value in node.items():
        for position, inner in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(inner, dict) and "_target_" in inner:
                at = f"{key}.{name}" + (f".{position}" if isinstance(value, list) else "")
                problems += bind(at, inner)
    path = str(node["_target_"])
    if (new := new_target(path)) != path:
        return [*problems, Problem(f"{key}._target_", f"{path} was renamed to {new}", new)]
    try:
        target = resolve(path)
    except UserError as error:
        return [*problems, Problem(f"{key}._target_", str(error))]
    if not callable(target):
        return [*problems, Problem(f"{key}._target_", f"{node['_target_']} is not callable", "a class or a function")]
    for name in node:
        if name.startswith("_") and name not in _CONTROL:
            problems.append(Problem(f"{key}.{name}", "is not supported", ", ".join(_CONTROL)))
    signature = signature_of(target)
    beside = names_of(key, signature)
    node = without_extras(key, node, signature)
    if not isinstance(node.get("_args_", []), list):
        return [*problems, Problem(f"{key}._args_", f"cannot be {shown(node['_args_'])}", "a list")]
    if signature is None:
        return problems
    parameters = list(signature.parameters.values())[positional + len(node.get("_args_", ())) :]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    annotations = _annotations(target)
    for name, value in node.items():
        if name.startswith("_"):
            continue
        if value is None and name in facts:
            continue
        if name in named:
            problems += _wrong_type(f"{key}.{name}", annotations.get(name), value)
        elif not takes_any and new_key(f"{key}.{name}") is None:  # a renamed key has been reported
            listed = ", ".join([*named, *sorted(beside)]) or "no arguments"
            message = f"is not an argument of {node['_target_']}"
            problems.append(Problem(f"{key}.{name}", message, listed, nearest(name, [*named, *beside])))
    given = {*node, *facts}
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and not node.get("_partial_"):
            problems.append(Problem(f"{key}.{name}", f"is missing: {node['_target_']} needs it"))
    return problems


def optimizers_taking(argument: str) -> list[str]:
    """Names of torch's optimizers that have an argument."""
    import torch.optim

    return sorted(
        name
        for name, member in vars(torch.optim).items()
        if inspect.isclass(member)
        and issubclass(member, torch.optim.Optimizer)
        and argument in inspect.signature(member).parameters
    )


def signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a component's target; None for built-in callables that have none."""
    try:
        return inspect.signature(target)
    except (ValueError, TypeError):
        return None


def _annotations(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # annotations of foreign code may name anything, and then say nothing that can be checked
        return {}


def _is_simple(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Literal or annotation in _SCALARS:
        return True
    if origin in (list, tuple):
        return all(inner is Ellipsis or _is_simple(inner) for inner in get_args(annotation))
    if origin in (Union, types.UnionType):
        return all(_is_simple(inner) for inner in get_args(annotation))
    return False


@functools.cache
def _checker(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _wrong_type(key: str, annotation: Any, value: Any) -> list[Problem]:
    """A problem if a plain value fits none of the plain alternatives of an annotation."""
    if annotation is None or (isinstance(value, dict) and "_target_" in value):
        return []
    simple = [member for member in members(annotation) if _is_simple(member)]
    if not simple or any(member is Any for member in members(annotation)):
        return []
    if isinstance(value, bool) and not any(member is bool or get_origin(member) is Literal for member in simple):
        return [Problem(key, f"cannot be {shown(value)}", describe(Union[tuple(simple)]))]  # noqa: UP007
    for member in simple:
        try:
            _checker(member).validate_python(value)
            return []
        except ValidationError:
            continue
    return [Problem(key, f"cannot be {shown(value)}", describe(Union[tuple(simple)]))]  # noqa: UP007


def check_extras(key: str, node: Mapping[str, Any]) -> list[Problem]:
    """Problems of the keys of a component that the program reads itself."""
    return _extras(key, node)[1]


def extras_of(key: str, node: Mapping[str, Any]) -> Any:
    """The keys of a validated component that the program reads itself: an object of its class in `EXTRAS`, defaults filled in."""
    found, problems = _extras(key, node)
    assert not problems, problems
    return found


def _extras(key: str, node: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    try:
        signature = signature_of(resolve(str(node["_target_"])))
    except UserError:  # which `bind` reports
        return None, []
    found, problems = typed(EXTRAS[key], extras_in(key, node, signature))
    return found, [dataclasses.replace(problem, key=f"{key}.{problem.key}") for problem in problems]


def names_argument(node: Mapping[str, Any], name: str) -> bool:
    """Whether the signature of a component's target has an argument of this name."""
    signature = signature_of(resolve(str(node["_target_"])))
    return signature is not None and name in signature.parameters


def preferred_data(node: Mapping[str, Any], grey: bool) -> dict[str, Any]:
    """How a component wants the images, by names of keys of `data`: what its `preferred_data` gives for its arguments.

    Only a target that has such a function says so, see `runner.models.torchvision_zoo.classifier`. Grey images get the
    averages of the statistics over the colours.
    """
    target = resolve(str(node["_target_"]))
    wanted = getattr(target, "preferred_data", None)
    if wanted is None:
        return {}
    plain = without_extras("model", node, signature_of(target))
    found: dict[str, Any] = wanted(**{name: value for name, value in plain.items() if not name.startswith("_")})
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
    target = resolve(str(node["_target_"]))
    signature = signature_of(target)
    node = without_extras(key, node, signature)
    node = node if fetch else without_fetching(target, node)
    names = set(signature.parameters) if signature is not None else set()
    kwargs = {name: _built(f"{key}.{name}", value, fetch) for name, value in node.items() if not name.startswith("_")}
    for name, value in (facts or {}).items():
        if name in names and kwargs.get(name) is None:
            kwargs[name] = value
        elif name not in names and kwargs.get(name, ...) is None:
            del kwargs[name]  # listed by the option that another target was put into
    positional = [*args, *(_built(f"{key}._args_", value, fetch) for value in node.get("_args_", ()))]
    if node.get("_partial_"):
        return functools.partial(target, *positional, **kwargs)
    try:
        return target(*positional, **kwargs)
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and not _TOO_LARGE.search(str(error)):
            raise
        reason = (str(error).strip() or "there is not enough memory for it").splitlines()[0]
        raise UserError(f"{key}: {node['_target_']} refuses its arguments: {reason}") from error


def _built(key: str, value: Any, fetch: bool) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return build(key, value, fetch=fetch)
        return {name: _built(f"{key}.{name}", item, fetch) for name, item in value.items()}
    if isinstance(value, list):
        return [_built(f"{key}.{index}", item, fetch) for index, item in enumerate(value)]
    if is_masked(value):
        message = "is a secret, and files do not hold those"
        raise ConfigError(
            [Problem(key, message, f"the secret on the command line ({key}=...) or in your config folder")]
        )
    return value
