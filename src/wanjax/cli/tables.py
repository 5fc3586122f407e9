# SPDX-License-Identifier: Apache-2.0
"""Format tables as text that stays readable on a narrow terminal."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

NO_BREAK_SPACE = "\xa0"  # a space at which lines are not folded
WIDE_CHARACTERS = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff60\uffe0-\uffe6"
"""Characters that take two columns. A line may be folded between two of these characters."""
TEXT_PIECES = re.compile(
    rf"[ \t\n\r\f\v]+|[^ \t\n\r\f\v{WIDE_CHARACTERS}]+|[{WIDE_CHARACTERS}][，。、！？：；）」』》]*"
)
"""Matches spaces, words, and wide characters with the punctuation that must follow them on the line."""
WIDE_TERMINAL = 80  # if a terminal has at least this many columns, two spaces separate the columns of a table


class Table(NamedTuple):
    """The lines of a table."""

    headings: list[str]
    rows: list[str]


def stdout_width() -> int | None:
    """Return the width of the terminal, or the value of COLUMNS. Return None if stdout is a pipe: lines are then not
    folded."""
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
    """Lay out a table in columns. On a terminal that is too narrow, put the cells of a row below each other.

    Headings and the first column are folded between words. Other cells are not folded.

    Args:
        headings: The heading of each column.
        rows: The texts of each row, one for each heading.
        width: The number of columns of the terminal. None means no folding.
        notes: A text to print below each row.
    """
    if not headings:
        return Table([], [])
    columns = list(zip(headings, *rows, strict=True))
    full_widths = [max(map(len, column)) for column in columns]
    min_widths = [
        max(_longest_word(heading), *map(len if index else _longest_word, cells))
        for index, (heading, *cells) in enumerate(columns)
    ]
    gap = " " if width is not None and width < WIDE_TERMINAL else "  "
    spare_width = sum(full_widths) if width is None else width - len(gap) * (len(columns) - 1)
    spare_width -= sum(min_widths)
    note_lines = [["    " + line for line in fold_text(note, width and width - 4)] for note in notes] or [
        [] for _ in rows
    ]
    if width is not None and spare_width < 0:
        return Table(
            [],
            [
                x
                for row, note in zip(rows, note_lines, strict=True)
                for x in (*_stacked_row(headings, row, width), *note)
            ],
        )
    widths = []
    for full, minimum in zip(full_widths, min_widths, strict=True):
        widths.append(minimum + min(spare_width, full - minimum))
        spare_width -= widths[-1] - minimum
    lines = [x for row, note in zip(rows, note_lines, strict=True) for x in (*_row_lines(row, widths, gap), *note)]
    return Table(_row_lines(headings, widths, gap, align_bottom=True), lines)


def _row_lines(cells: Sequence[str], widths: Sequence[int], gap: str, *, align_bottom: bool = False) -> list[str]:
    """Format the lines of a row. Each cell is folded to its width, and aligned to the top or, with `align_bottom`, to
    the bottom."""
    folded_cells = [fold_text(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, folded_cells))
    blank = [[""] * (height - len(cell_lines)) for cell_lines in folded_cells]
    padded_cells = [
        blank_lines + cell_lines if align_bottom else cell_lines + blank_lines
        for blank_lines, cell_lines in zip(blank, folded_cells, strict=True)
    ]
    lines = []
    for first, *other_cells in zip(*padded_cells, strict=True):
        number_cells = (cell.rjust(width) for cell, width in zip(other_cells, widths[1:], strict=True))
        lines.append(gap.join([first.ljust(widths[0]), *number_cells]).rstrip())
    return lines


def _stacked_row(headings: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    """Yield the lines of a row for a narrow terminal: the first cell, then each other cell after its heading."""
    yield from fold_text(row[0], width)
    pairs = [f"{heading} {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell]
    pairs_text = ", ".join(pair.replace(" ", NO_BREAK_SPACE) for pair in pairs)
    yield from ("  " + line.replace(NO_BREAK_SPACE, " ") for line in fold_text(pairs_text, width - 2))


def fold_text(text: str, width: int | None) -> list[str]:
    """Fold a text between words or between wide characters. A word that is too long is not split."""
    if not text or width is None:
        return [text]
    from rich.cells import cell_len  # imported late for a quick --help

    lines, gap = [""], ""
    for piece in TEXT_PIECES.findall(text):
        if piece.isspace() and piece != NO_BREAK_SPACE:
            gap = " " * len(piece)
        elif lines[-1] and cell_len(lines[-1] + gap + piece) > width:
            lines.append(piece)
            gap = ""
        else:
            lines[-1] += (gap if lines[-1] else "") + piece
            gap = ""
    return lines


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
