# SPDX-License-Identifier: Apache-2.0
"""Tables of text that keep their columns on a narrow terminal."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

NO_BREAK = "\xa0"  # a space at which no line is folded
WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff60\uffe0-\uffe6"
"""Characters of two columns, between which a line may end."""
PIECES = re.compile(rf"[ \t\n\r\f\v]+|[^ \t\n\r\f\v{WIDE}]+|[{WIDE}][，。、！？：；）」』》]*")
"""Spaces, words, and wide characters with the marks that begin no line."""
ROOMY = 80  # columns from which two spaces stand between those of a table


class Table(NamedTuple):
    """The lines of a table."""

    headings: list[str]
    rows: list[str]


def stdout_width() -> int | None:
    """Return the columns of the terminal that stdout is, or those that COLUMNS tells; None in a pipe, which has any."""
    is_known = os.environ.get("COLUMNS") or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_known else None


def print_table(console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, no wider than the terminal."""
    is_known = os.environ.get("COLUMNS") or console.is_terminal
    lines = table(headings, rows, console.width if is_known else None)
    for line in lines.headings:
        console.print(line, style="bold")
    for line in lines.rows:
        console.print(line)


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, notes: Sequence[str] = ()
) -> Table:
    """Return a table whose columns stand beside each other, or below each other where they have no room.

    Headings and the first column fold between words, figures never do.

    Args:
        headings: The heading of each column.
        rows: The texts of each row, one for each heading.
        width: The columns of the terminal; None is any number.
        notes: A text that stands below each row.
    """
    if not headings:
        return Table([], [])
    columns = list(zip(headings, *rows, strict=True))
    wide = [max(map(len, column)) for column in columns]
    least = [max(_longest(heading), *map(len if i else _longest, cells)) for i, (heading, *cells) in enumerate(columns)]
    gap = " " if width is not None and width < ROOMY else "  "
    spare = sum(wide) if width is None else width - len(gap) * (len(columns) - 1)
    spare -= sum(least)
    below = [["    " + line for line in folded(note, width and width - 4)] for note in notes] or [[] for _ in rows]
    if width is not None and spare < 0:
        return Table(
            [], [x for row, note in zip(rows, below, strict=True) for x in (*_block(headings, row, width), *note)]
        )
    widths = []
    for most, few in zip(wide, least, strict=True):
        widths.append(few + min(spare, most - few))
        spare -= widths[-1] - few
    lines = [x for row, note in zip(rows, below, strict=True) for x in (*_beside(row, widths, gap), *note)]
    return Table(_beside(headings, widths, gap, bottom=True), lines)


def _beside(cells: Sequence[str], widths: Sequence[int], gap: str, *, bottom: bool = False) -> list[str]:
    """Return the lines of a row, each cell folded to its width; shorter ones stand at the top or at the `bottom`."""
    parts = [folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, parts))
    blank = [[""] * (height - len(part)) for part in parts]
    filled = [more + part if bottom else part + more for more, part in zip(blank, parts, strict=True)]
    lines = []
    for first, *others in zip(*filled, strict=True):
        figures = (x.rjust(width) for x, width in zip(others, widths[1:], strict=True))
        lines.append(gap.join([first.ljust(widths[0]), *figures]).rstrip())
    return lines


def _block(headings: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    """Yield the lines of a row that has no room: its first cell, then the others behind their headings."""
    yield from folded(row[0], width)
    pairs = [f"{heading} {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell]
    whole = ", ".join(pair.replace(" ", NO_BREAK) for pair in pairs)
    yield from ("  " + line.replace(NO_BREAK, " ") for line in folded(whole, width - 2))


def folded(text: str, width: int | None) -> list[str]:
    """Return the lines of a text that is folded between words, or wide characters; a longer word stays whole."""
    if not text or width is None:
        return [text]
    from rich.cells import cell_len  # imported late for a quick --help

    lines, gap = [""], ""
    for piece in PIECES.findall(text):
        if piece.isspace() and piece != NO_BREAK:
            gap = " " * len(piece)
        elif lines[-1] and cell_len(lines[-1] + gap + piece) > width:
            lines.append(piece)
            gap = ""
        else:
            lines[-1] += (gap if lines[-1] else "") + piece
            gap = ""
    return lines


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)
