"""The hook of the documentation, and the pages."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]
# These list everything by themselves: a key or an option must also be on another page.
_LISTS = {"keys.md", "features.md"}


@cache
def hook() -> ModuleType:
    """The module scripts/docs_hook.py."""
    spec = importlib.util.spec_from_file_location("docs_hook", REPOSITORY / "scripts" / "docs_hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def rendered(page: Path) -> str:
    """The text of a page; without what is generated if it lists everything."""
    text = page.read_text(encoding="utf-8")
    return hook()._MARK.sub("", text) if page.name in _LISTS else text
