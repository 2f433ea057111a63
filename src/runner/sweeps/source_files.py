"""The files that a `_target_` is defined in: their content decides whether a job of a sweep is the same as before."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any


def source_files(path: str) -> dict[str, Path]:
    """The Python files behind a dotted path by module: where it is named, and where it is defined. Nothing is imported."""
    module, _, name = path.rpartition(".")
    try:
        spec = _spec(module)
        origin = spec.origin
    except (AttributeError, ImportError, ValueError):  # an attribute of a class, or nothing
        return source_files(module) if "." in module else {}
    if not str(origin).endswith(".py"):
        return {}
    files = {module: Path(origin)}
    package = spec.name if spec.submodule_search_locations else spec.parent
    # A name may come from another file, where its class is defined
    for node in ast.parse(files[module].read_bytes()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in (each for each in node.names if name == (each.asname or each.name)):
                source = resolve_name("." * node.level + (node.module or ""), package)
                files |= source_files(f"{source}.{alias.name}")
    return files


def _spec(module: str) -> Any:
    """The specification of a module, without an import of its packages."""
    parts = module.split(".")
    spec: Any = find_spec(parts[0])
    for count in range(2, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), spec.submodule_search_locations)
    return spec
