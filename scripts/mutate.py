"""Change single lines of src and count how many of the changes the tests notice.

    python scripts/mutate.py --count 40 --seed 0
    python scripts/mutate.py --common ../other_checkout     # only lines that another checkout has as well

Each change runs the tests of its room (`tests/<room>`) until the first failure. The file is put back afterwards. A change
that survives is printed: either a test is missing, or the change makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("checkpoint", "config", "data", "engine", "models", "optim", "runtime", "tracking")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutated(node: ast.expr) -> ast.expr | None:
    """The expression with one thing changed; None if it has nothing to change."""
    match node:
        case ast.Compare(left, [operator], comparators) if type(operator) in SWAPS:
            return ast.Compare(left, [SWAPS[type(operator)]()], comparators)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPS:
            return ast.BinOp(left, SWAPS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(SWAPS[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
    return None


def changes(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, line, changed line) of everything that can be changed within one line of a file."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno and (new := mutated(node)) is not None:
            line = lines[node.lineno - 1]
            # Python 3.11 has no places inside f-strings; a type is not behaviour.
            if line.isascii() and 'f"' not in line and "Literal" not in line:
                new_line = f"{line[: node.col_offset]}({ast.unparse(new)}){line[node.end_col_offset :]}"
                yield node.lineno, line, new_line


def main() -> int:
    """Make the changes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--common", type=Path, help="another checkout")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    found = [
        (path, *change) for room in ROOMS for path in sorted((root / "src/runner" / room).rglob("*.py"))
        for change in changes(path)
    ]  # fmt: skip
    if options.common:
        files = [path for room in ROOMS for path in (options.common / "src/runner" / room).rglob("*.py")]
        known = Counter(line for path in files for line in path.read_text().splitlines())
        own = Counter(line for path in {path for path, *_ in found} for line in path.read_text().splitlines())
        found = [change for change in found if known[change[2]] == own[change[2]] == 1]
    found.sort(key=lambda change: change[3])  # the same order in both checkouts, wherever a line is
    caught = 0
    for number, (path, place, line, new) in enumerate(random.Random(options.seed).sample(found, options.count), 1):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        lines[place - 1] = new + "\n"
        room = path.relative_to(root / "src/runner").parts[0]
        try:
            path.write_text("".join(lines))
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-n",
                "0",
                "-m",
                "not slow and not extended",
                f"tests/{room}",
            ]
            noticed = subprocess.run(command, cwd=root, capture_output=True, check=False).returncode != 0
        finally:
            path.write_text(text)
        caught += noticed
        verdict = "caught  " if noticed else "survived"
        print(f"{number:3} {verdict} {path.relative_to(root)}:{place}: {new.strip()}", flush=True)
        if not noticed:
            print(f"{'':12} before: {line.strip()}", flush=True)
    print(f"{caught} of {options.count} changes caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
