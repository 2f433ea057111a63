"""Signatures of components, read from the source of their modules: importing most of these takes the seconds of torch."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import dataclasses
import functools
import typing
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

# What annotations are evaluated with. Looking for Tensor would read the largest file of torch.
_NAMES = {**vars(builtins), **vars(collections.abc), **vars(typing), **vars(dataclasses)}
_NAMES |= {"Tensor": type("Tensor", (), {}), "__name__": "typing"}


@functools.cache
def read_signature(path: str) -> Any:
    """A class or function with the signature of what a dotted path names; None if its source does not say for certain."""
    try:
        node, module = _found(path)
        reduced = _class(node, module) if isinstance(node, ast.ClassDef) else _function(node)
        return _evaluated(reduced, module)
    except Exception:  # a source may hold anything, and importing it tells then
        return None


@functools.cache
def _source(module: str) -> tuple[ast.Module, str]:
    """The syntax tree of a module, and the package that its relative imports start from. Nothing is imported."""
    spec = _spec(module)
    return ast.parse(Path(spec.origin).read_bytes()), spec.name if spec.submodule_search_locations else spec.parent


def _spec(module: str) -> Any:
    """The specification of a module, without an import of its packages."""
    parts = module.split(".")
    spec: Any = find_spec(parts[0])
    for count in range(2, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), spec.submodule_search_locations)
    return spec


def source_files(path: str) -> dict[str, Path]:
    """The Python files behind a dotted path by module: where it is named, and where it is defined. Nothing is imported."""
    # Reading the source instead of importing it keeps checks fast, and works without the packages
    module, _, name = path.rpartition(".")
    try:
        origin = _spec(module).origin
    except (AttributeError, ImportError, ValueError):  # an attribute of a class, or nothing
        return source_files(module) if "." in module else {}
    if not str(origin).endswith(".py"):
        return {}
    files = {module: Path(origin)}
    tree, package = _source(module)
    # A name may come from another file, where its class is defined
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    files |= source_files(
                        f"{resolve_name('.' * node.level + (node.module or ''), package)}.{alias.name}"
                    )
    return files


def _found(path: str) -> tuple[Any, str]:
    """The only statement of a module that binds a name, and the module; imports are followed.

    Raises:
        ValueError: if there is none, or more than one.
    """
    module, _, name = path.rpartition(".")
    tree, package = _source(module)
    [node] = [each for each in tree.body if name in _bound(each)]
    if not isinstance(node, ast.ImportFrom):
        return node, module
    [alias] = [each for each in node.names if name == (each.asname or each.name)]
    return _found(f"{resolve_name('.' * node.level + (node.module or ''), package)}.{alias.name}")


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    inner: list[Any] = list(ast.walk(node))
    names = {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    makers = [each for each in inner if getattr(each, "attr", "") in ("__init__", "__new__", "__signature__")]
    names |= {getattr(each.value, "id", "") for each in makers}  # `Net.__init__ = ...` makes another `Net`
    return names | {str(getattr(each, "asname", None) or getattr(each, "name", "")) for each in inner}


def _class(node: ast.ClassDef, module: str) -> ast.ClassDef:
    """A class reduced to what its signature follows from: `__init__`, the fields of a dataclass, or the base classes."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    decorators: list[Any] = [getattr(each, "func", each) for each in node.decorator_list]
    # If anything is unusual about the class, its source does not tell the signature
    if node.keywords or "__new__" in methods or [each.id for each in decorators] not in ([], ["dataclass"]):
        raise ValueError("another signature than that of __init__")
    if "__init__" in methods and not decorators:
        return ast.ClassDef(node.name, [], [], [_function(methods["__init__"])], [])
    body: list[ast.stmt] = [ast.Pass()]
    for field in node.body if decorators else []:
        if isinstance(field, ast.AnnAssign):
            given = field.value.keywords if isinstance(field.value, ast.Call) else []
            for each in given:
                if str(each.arg).startswith("default"):
                    each.arg, each.value = "default", _reduced(each.value)
            value = field.value if field.value is None or given else _reduced(field.value)
            body.append(ast.AnnAssign(field.target, field.annotation, value, 1))
    return ast.ClassDef(node.name, node.bases, [], body, node.decorator_list)


def _function(node: Any) -> ast.FunctionDef:
    """A function reduced to its arguments, without the values of its defaults."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        raise ValueError("its signature follows from more than its arguments")
    node.args.defaults = [_reduced(each) for each in node.args.defaults]
    node.args.kw_defaults = [each and _reduced(each) for each in node.args.kw_defaults]
    return ast.FunctionDef(node.name, node.args, [ast.Pass()], [])


def _reduced(default: Any) -> ast.Constant:
    """None for a default that is None, and something else for any other."""
    return ast.Constant(None if getattr(default, "value", ...) is None else ...)


def _evaluated(node: Any, module: str) -> Any:
    """The value of a reduced statement or an expression."""
    bases = {base.id: read_signature(f"{module}.{base.id}") for base in getattr(node, "bases", [])}
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - _NAMES.keys() - bases.keys()
    scope = _NAMES | bases | {name: _annotation(f"{module}.{name}") for name in names}
    if isinstance(node, ast.expr):
        return eval(compile(ast.Expression(node), module, "eval"), scope)
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), module, "exec", dont_inherit=True), scope)
    return scope[node.name]


@functools.cache
def _annotation(path: str) -> Any:
    """The type that a name in an annotation stands for: a class of that name, the value of an alias, or else anything."""
    try:
        node, module = _found(path)
        return type(node.name, (), {}) if isinstance(node, ast.ClassDef) else _evaluated(node.value, module)
    except Exception:
        return Any
