"""Tables on a terminal, which demos and commands print."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned_table"]


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table for a terminal: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])
