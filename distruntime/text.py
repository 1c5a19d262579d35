"""Sizes and tables as text, for a terminal and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Rows = Sequence[Sequence[str]]  # the first one is the head


def size_text(nbytes: float) -> str:
    """Return "8.0 GiB"."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"


def table_text(rows: Rows) -> str:
    """Return a table with its columns aligned."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join((" " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths))).rstrip() for row in rows)


def table_html(rows: Rows) -> str:
    """Return a table as HTML; what the cells hold is text there."""
    head, *body = rows
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{cells}</table>"
