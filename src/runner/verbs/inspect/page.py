"""One HTML page that holds everything: tables and pictures, no other file needed, no script in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from runner.tracking.formats import is_number

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 28px 0 6px; }
table { border-collapse: collapse; font-size: 12.5px; }
td, th { padding: 2px 10px 2px 0; text-align: left; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; max-height: 480px; overflow-y: auto; }
th { position: sticky; top: 0; background: #fff; }
img { max-width: 100%; } p { margin: 6px 0; } p.warn { color: #a33; }
"""


@dataclass(frozen=True)
class Table:
    """A table with its title; `notes` are lines above it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def page(title: str, lines: Sequence[str], parts: Sequence[Table | tuple[Path, str]]) -> str:
    """The page as text."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for part in parts:
        body.append(_table(part) if isinstance(part, Table) else _picture(*part))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _table(table: Table) -> str:
    numeric = [bool(table.rows) and all(_plain(row[i]) for row in table.rows) for i in range(len(table.columns))]
    marks = [' class="n"' if right else "" for right in numeric]
    head = "".join(f"<th{mark}>{escape(name)}</th>" for mark, name in zip(marks, table.columns, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>"
        for row in table.rows
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    inside = f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(rows) + "</table></div>"
    return f"<h2>{escape(table.title)}</h2>{notes}{inside}"


def _plain(cell: str) -> bool:
    return not cell or is_number(cell.replace(",", "").rstrip("%kMGT"))


def _picture(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    text = escape(title, quote=True)
    return f'<h2>{escape(path.stem)}</h2><p>{text}</p><img alt="{text}" src="data:image/png;base64,{data}">'
