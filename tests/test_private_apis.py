"""Private APIs of other libraries are listed in docs/explanation/private_apis.md, all of them and no others."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "private_apis.md"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(path: Path) -> set[str]:
    """Dotted names of other packages with a private part that a file imports or reads from what it imports."""
    tree = ast.parse(path.read_text())
    imported, found = dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            for alias in node.names:
                top = alias.name.split(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
    found |= set(imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            text = ast.unparse(node)
            top, _, rest = text.partition(".")
            if top in imported and re.fullmatch(r"[\w.]+", rest):
                found.add(f"{imported[top]}.{rest}")
    ours = {"runner", "__future__", *sys.stdlib_module_names}
    return {name for name in found if is_private(name) and name.split(".")[0] not in ours and "__" not in name}


def test_every_private_api_is_listed_and_used() -> None:
    used = set().union(*(private_names(path) for path in (ROOT / "src" / "runner").rglob("*.py")))
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert used == listed


def test_the_tests_that_notice_a_change_are_there() -> None:
    text = PAGE.read_text()
    for name in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
