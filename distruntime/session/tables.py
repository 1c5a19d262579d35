"""Tables as text, for a terminal and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..wire.units import printable

# A curve consists of these, from the least to the most.
_BARS = "▁▂▃▄▅▆▇█"
# The first row is the head.
Rows = Sequence[Sequence[str]]


def table_text(rows: Rows) -> str:
    """Return a table with its columns aligned.

    Cells have texts of others, such as names of operators, and none of them steers a terminal.
    """
    rows = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        (" " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths))).rstrip() for row in rows
    )


def curve(values: Sequence[float], width: int) -> str:
    """Return values over time as at most `width` bars, from the least value to the most."""
    if not values:
        return ""
    width = min(width, len(values))
    least, most = min(values), max(values)
    bars = []
    for k in range(width):
        # A peak must not vanish between two others.
        part = values[k * len(values) // width : (k + 1) * len(values) // width]
        share = (max(part) - least) / (most - least) if most > least else 0.0
        bars.append(_BARS[round(share * (len(_BARS) - 1))])
    return "".join(bars)


def table_html(rows: Rows) -> str:
    """Return a table as HTML; what the cells hold is text there."""
    head, *body = rows
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{cells}</table>"
