# SPDX-License-Identifier: Apache-2.0
"""Requests for many videos, from a file: a prompt on each line, or a table whose rows are whole requests.

JAX is not imported here: a process that only hands requests out leaves the devices to others.
"""

import csv
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from wanjax.errors import WanjaxError, reason, repr_short
from wanjax.media.text_files import decode_text, read_text, strip_text
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.request import STRENGTH, VideoRequest, known_fields
from wanjax.stores.paths import parse_path

EXAMPLE = '{"prompt": "a red circle", "seed": 1}'
JSON_LINES = (".jsonl", ".ndjson")
JSON = re.compile(r"""[\[{]\s*(?:["\[\]{}]|$)""")  # the beginning of an array or an object, on the first line
DELIMITERS = ",;\t"  # of tables; spreadsheets of many countries write semicolons
MAX_LISTED = 20  # mistakes in a message, and runs of rows with one


def read_requests(file: str, row_errors: "RowErrors | None" = None) -> list[VideoRequest]:
    """Return the requests of a file.

    A file that ends in .csv or .parquet is a table. One that is JSON as a whole is an array of requests, or a single
    one. Any other has a request on each line: a JSON object where the first line is one or the file ends in .jsonl,
    else a prompt. Files that a request names are relative to the table.

    Args:
        file: Its path; "-" for standard input.
        row_errors: Receives the rows that are none, to be refused with those that a model refuses; None refuses them
            here.

    Raises:
        WanjaxError: A setting is unknown or has a wrong value, told with the number of its row; or the file cannot be
            read, or has no request.
    """
    name, folder = _display_name(file), Path() if file == "-" else Path(file).expanduser().parent
    try:
        rows = list(_rows(file))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, WanjaxError):
            raise
        if isinstance(error, IsADirectoryError):
            raise WanjaxError(f"{name} is a folder: give the file of requests in it") from error
        raise WanjaxError(f"the prompts in {name} cannot be read, {reason(error)}") from error
    if not rows:
        raise WanjaxError(f"{name} has no prompt: write one on each line")
    errors, requests = RowErrors() if row_errors is None else row_errors, []
    for number, row in rows:
        try:
            requests.append(_request(number, row, folder.absolute()))
        except WanjaxError as error:
            errors.add(number, error)
    if row_errors is None:
        errors.raise_if_any()
    return requests


def _display_name(file: str) -> str:
    return "standard input" if file == "-" else file


class RowErrors:
    """What is wrong with the rows of a file, collected so that all of them can be corrected at once."""

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}  # by the reason

    def add(self, row: int, error: WanjaxError) -> None:
        """Note why a row is wrong; the rows of one reason are listed together.

        Args:
            row: Its number, from 1; 0 for the command's own request.
            error: What is wrong.
        """
        self.rows.setdefault(str(error), set()).add(row)

    def raise_if_any(self) -> None:
        """Raise WanjaxError if a row was wrong."""
        if not self.rows:
            return
        total = len(set().union(*self.rows.values()))
        ordered = sorted(self.rows.items(), key=lambda item: min(item[1]))
        each = [f"{_format_ranges(rows)}: {why}" if any(rows) else why for why, rows in ordered]
        raise WanjaxError(f"{total} rows are wrong: {_join_first(each, '; ')}" if len(each) > 1 else each[0])


def _format_ranges(rows: Collection[int]) -> str:
    """Return the numbers of rows as "row 2" or "rows 2, 5, 9 to 40"."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and row == runs[-1][-1] + 1:
            runs[-1][1:] = [row]
        else:
            runs.append([row])
    return f"row{'s' * (len(rows) > 1)} {_join_first([' to '.join(map(str, run)) for run in runs], ', ')}"


def _join_first(texts: Sequence[str], separator: str) -> str:
    """Return the first of some texts, and how many more there are."""
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return separator.join([*texts[:MAX_LISTED], *more])


def _rows(file: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers."""
    suffix = "" if file == "-" else Path(file).suffix.lower()
    if suffix == ".parquet":
        yield from enumerate(_read_parquet(Path(file).expanduser()), 1)
        return
    text = decode_text(sys.stdin.buffer.read()) if file == "-" else read_text(Path(file).expanduser())
    if suffix == ".csv":
        yield from enumerate(_read_csv(text), 1)
        return
    lines = [(number, line) for number, each in enumerate(text.splitlines(), 1) if (line := strip_text(each))]
    if not lines:
        return
    if suffix not in (".json", *JSON_LINES) and not JSON.match(lines[0][1]):
        yield from ((number, {"prompt": line}) for number, line in lines)
        return
    parsed = _json(strip_text(text), _display_name(file), f"write [{EXAMPLE}, ...], or a prompt on each line of a .txt")
    if not isinstance(parsed, WanjaxError):
        yield from enumerate(parsed if isinstance(parsed, list) else [parsed], 1)
        return
    if suffix not in JSON_LINES and not lines[0][1].endswith("}"):
        raise parsed
    yield from ((number, _json(line, "the line", f"write a row as {EXAMPLE}")) for number, line in lines)


def _json(text: str, name: str, advice: str) -> Any:
    """Return the value of a text in JSON, or a WanjaxError that says where the text breaks and what to write."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        context = text[max(0, error.pos - 20) : error.pos]
        where = f"after {context!r}" if context else "at its start"
        why = f"{error.msg[0].lower()}{error.msg[1:]} {where}"
        return WanjaxError(f"{name} is not JSON, {why}: {advice}")
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return WanjaxError(f"{name} holds a number too long, or too many brackets: {advice}")


def _read_csv(text: str) -> Iterator[dict[str, Any] | WanjaxError]:
    """Yield the rows of a table; an empty field says nothing."""

    def count_known_columns(delimiter: str) -> int:
        header = next(csv.reader(StringIO(text), delimiter=delimiter), [])
        return len({name.strip() for name in header}.intersection(_fields_of_rows()))

    delimiter = max(DELIMITERS, key=count_known_columns)
    table = csv.DictReader(StringIO(text), strict=True, delimiter=delimiter)
    for name in filter(None, map(str.strip, table.fieldnames or ())):
        if name not in (names := known_fields()):
            raise WanjaxError(f"the header has the column {name!r}: {unknown_keyword(name, names)}")
    for row in table:
        if None in row:
            yield WanjaxError(f"the row has more fields than the header: quote one that holds {delimiter!r}")
        else:
            yield {name.strip(): value for name, value in row.items() if value}


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile  # imported late, as it is of the extra `cluster`
    except ImportError as error:
        raise WanjaxError(f"{file} needs pyarrow: pip install 'wanjax[cluster]' brings it") from error
    with ParquetFile(file) as table:
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                yield {name: None if value != value else value for name, value in row.items()}  # pandas' empty cell


def _fields_of_rows() -> tuple[str, ...]:
    """Return the fields of a row; LoRAs are those of all videos."""
    return tuple(name for name in known_fields() if name != STRENGTH.name)


def _request(number: int, row: Any, folder: Path) -> VideoRequest:
    """Return the request of a row, with files by their absolute paths or URLs; raise WanjaxError for a wrong one."""
    if isinstance(row, WanjaxError):
        raise row
    fields = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(fields, Mapping):
        raise WanjaxError(f"{repr_short(row)} is no prompt, and no object of settings")
    request = VideoRequest.parse(fields, row=number, accepted=_fields_of_rows())

    def file(name: str) -> str:
        path = parse_path(name)
        return str(folder / path if isinstance(path, Path) else path)

    inputs = {k: list(map(file, x)) if isinstance(x, list) else file(x) for k, x in request.inputs.items()}
    return replace(request, inputs=inputs)


def with_seeds(requests: Iterable[VideoRequest], seeds: Iterable[int] | None) -> list[VideoRequest]:
    """Return a request for each of the seeds in place of each that has no seed of its own.

    Args:
        requests: The requests.
        seeds: The seeds; None leaves the requests as they are.
    """
    if seeds is None:
        return list(requests)
    numbers = list(seeds)
    each = [
        [request] if "seed" in request.settings else [request.updated({"seed": n}) for n in numbers]
        for request in requests
    ]
    return [request for group in each for request in group]
