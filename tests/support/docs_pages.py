"""The hook of the documentation, and the pages."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIAL = DOCS / "tutorial" / "first_hour.md"
"""Its commands build on each other: tests/test_docs_site.py runs them in order."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# These list everything by themselves: a key or an option must also be on another page.
_LISTS = {"keys.md", "features.md"}


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """The lines of a shell that a page shows, in order, each with the output that it shows below."""
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            yield from ((line, "") for line in body.replace("\\\n", " ").splitlines())
        elif language == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                yield line, output.strip()


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
