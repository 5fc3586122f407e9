# SPDX-License-Identifier: Apache-2.0
"""Read requests for many videos from a file: a prompt on each line, or a table with one request per row.

This module does not import JAX, so that a process that only adds jobs does not occupy the devices.
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

from wanjax.errors import SettingError, WanjaxError, reason, repr_short
from wanjax.media.text_files import decode_text, read_text, strip_text
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.request import STRENGTH, VideoRequest, known_fields, unique_fields
from wanjax.stores.paths import parse_path

ROW_EXAMPLE = '{"prompt": "a red circle", "seed": 1}'
JSON_LINES = (".jsonl", ".ndjson")
JSON_START = re.compile(
    r"""[\[{]\s*(?:["\[\]{}]|$)"""
)  # the start of an array or an object on the first line of a file
DELIMITERS = ",;\t"  # of CSV files; spreadsheets write semicolons in many countries
MAX_LISTED = 10  # maximum number of errors in a message, and of row ranges for one error


def read_requests(file: str, row_errors: "RowErrors | None" = None) -> list[VideoRequest]:
    """Read the requests of a file.

    A file that ends in .csv or .parquet is a table. A file that is JSON as a whole has an array of requests or a single
    request. Any other file has a request on each line: a JSON object if the first line is one or the file ends in
    .jsonl, otherwise a prompt. Paths in a request are relative to the folder of the file.

    Args:
        file: The path; "-" for standard input.
        row_errors: Receives the errors of invalid rows, so that the caller can add others and report all at once; None
            to raise them here.

    Raises:
        WanjaxError: A row is invalid, the file cannot be read, or it has no request.
    """
    name, folder = _display_name(file), Path() if file == "-" else Path(file).expanduser().parent
    try:
        rows = list(_read_rows(file))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, WanjaxError):
            raise
        if isinstance(error, IsADirectoryError):
            raise WanjaxError(f"{name} is a folder: give a file with requests") from error
        raise WanjaxError(f"cannot read the prompts in {name}: {reason(error)}") from error
    if not rows:
        raise WanjaxError(f"{name} has no prompt: write one on each line")
    errors, requests = RowErrors() if row_errors is None else row_errors, []
    for number, row in rows:
        try:
            requests.append(_parse_request(number, row, folder.absolute()))
        except WanjaxError as error:
            errors.add(number, error)
    if row_errors is None:
        errors.raise_if_any()
    return requests


def _display_name(file: str) -> str:
    return "standard input" if file == "-" else file


class RowErrors:
    """The errors of a file's rows, collected so that the user can correct all of them at once."""

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}  # row numbers by error message

    def add(self, row: int, error: WanjaxError) -> None:
        """Add the error of a row. Rows with the same error are listed together.

        Args:
            row: The row's number, from 1; 0 for the request of the command itself.
            error: The error.
        """
        self.rows.setdefault(str(error), set()).add(row)

    def raise_if_any(self) -> None:
        """Raise a WanjaxError with the errors, if there are any: several stand on lines of their own."""
        if not self.rows:
            return
        total = len(set().union(*self.rows.values()))
        ordered = sorted(self.rows.items(), key=lambda item: min(item[1]))
        messages = [f"{_format_ranges(rows)}: {why}" if any(rows) else why for why, rows in ordered]
        if len(messages) == 1:
            raise WanjaxError(messages[0])
        raise WanjaxError(_join_first([f"{total} rows are wrong:", *messages], "\n  ", MAX_LISTED + 1))


def _format_ranges(rows: Collection[int]) -> str:
    """Format the numbers of rows, such as "row 2" or "rows 2, 5, 9 to 40"."""
    ranges: list[list[int]] = []
    for row in sorted(rows):
        if ranges and row == ranges[-1][-1] + 1:
            ranges[-1][1:] = [row]
        else:
            ranges.append([row])
    return f"row{'s' * (len(rows) > 1)} {_join_first([' to '.join(map(str, bounds)) for bounds in ranges], ', ')}"


def _join_first(texts: Sequence[str], separator: str, count: int = MAX_LISTED) -> str:
    """Join the first `count` texts, and say how many more there are."""
    remainder = [f"and {len(texts) - count} more"] if len(texts) > count else []
    return separator.join([*texts[:count], *remainder])


def _read_rows(file: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each row of a file."""
    suffix = "" if file == "-" else Path(file).suffix.lower()
    if suffix == ".parquet":
        yield from enumerate(_read_parquet(Path(file).expanduser()), 1)
        return
    text = decode_text(sys.stdin.buffer.read()) if file == "-" else read_text(Path(file).expanduser())
    if suffix == ".csv":
        yield from enumerate(_read_csv(text), 1)
        return
    lines = [(number, line) for number, raw_line in enumerate(text.splitlines(), 1) if (line := strip_text(raw_line))]
    if not lines:
        return
    if suffix not in (".json", *JSON_LINES) and not JSON_START.match(lines[0][1]):
        yield from ((number, {"prompt": line}) for number, line in lines)
        return
    parsed = _parse_json(
        strip_text(text), _display_name(file), f"write [{ROW_EXAMPLE}, ...], or a prompt on each line of a .txt"
    )
    if not isinstance(parsed, WanjaxError):
        yield from enumerate(parsed if isinstance(parsed, list) else [parsed], 1)
        return
    if suffix not in JSON_LINES and not lines[0][1].endswith("}"):
        raise parsed
    yield from ((number, _parse_json(line, "the line", f"write a row as {ROW_EXAMPLE}")) for number, line in lines)


def _parse_json(text: str, name: str, advice: str) -> Any:
    """Parse JSON; for invalid JSON, return a WanjaxError that says where it is wrong and what to write instead."""
    try:
        return json.loads(text, object_pairs_hook=unique_fields)
    except SettingError as error:
        return error
    except json.JSONDecodeError as error:
        context = text[max(0, error.pos - 20) : error.pos]
        where = f"after {context!r}" if context else "at its start"
        why = f"{error.msg[0].lower()}{error.msg[1:]} {where}"
        return WanjaxError(f"{name} is invalid JSON, {why}: {advice}")
    except (ValueError, RecursionError):  # a number with thousands of digits, or very deep nesting
        return WanjaxError(f"{name} has a number that is too long, or too many nested brackets: {advice}")


def _read_csv(text: str) -> Iterator[dict[str, Any] | WanjaxError]:
    """Yield the rows of a CSV file, without their empty fields; an error for a row that is too long."""

    def count_known_columns(delimiter: str) -> int:
        header = next(csv.reader(StringIO(text), delimiter=delimiter), [])
        return len({name.strip() for name in header}.intersection(_row_fields()))

    delimiter = max(DELIMITERS, key=count_known_columns)
    table = csv.DictReader(StringIO(text), strict=True, delimiter=delimiter)
    columns = list(filter(None, map(str.strip, table.fieldnames or ())))
    for name in columns:
        if columns.count(name) > 1:
            raise WanjaxError(f"the header has the column {name!r} twice: keep one")
        if name not in (names := known_fields()):
            raise WanjaxError(f"the header has an unknown column {name!r}: {unknown_keyword(name, names)}")
    for row in table:
        if None in row:
            yield WanjaxError(f"the row has more fields than the header: quote fields that contain {delimiter!r}")
        else:
            yield {name.strip(): value for name, value in row.items() if value}


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile  # imported late, since only the extra `parquet` installs it
    except ImportError as error:
        raise WanjaxError(f"reading {file} needs pyarrow: run pip install 'wanjax[parquet]'") from error
    with ParquetFile(file) as table:
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                yield {
                    name: None if value != value else value for name, value in row.items()
                }  # NaN is an empty cell of pandas


def _row_fields() -> tuple[str, ...]:
    """Return the fields that a row may have: all but those of LoRAs, which are the same for all videos."""
    return tuple(name for name in known_fields() if name != STRENGTH.name)


def _parse_request(number: int, row: Any, folder: Path) -> VideoRequest:
    """Return the request of a row, with absolute paths or URLs of files; raise WanjaxError if it is invalid."""
    if isinstance(row, WanjaxError):
        raise row
    fields = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(fields, Mapping):
        raise WanjaxError(f"{repr_short(row)} is neither a prompt nor an object of settings")
    request = VideoRequest.parse(fields, row=number, accepted=_row_fields())

    def resolve(name: str) -> str:
        path = parse_path(name)
        return str(folder / path if isinstance(path, Path) else path)

    inputs = {k: list(map(resolve, x)) if isinstance(x, list) else resolve(x) for k, x in request.inputs.items()}
    return replace(request, inputs=inputs)


def with_seeds(requests: Iterable[VideoRequest], seeds: Iterable[int] | None) -> list[VideoRequest]:
    """Replace each request without a seed by one request per seed.

    Args:
        requests: The requests.
        seeds: The seeds; None to leave the requests unchanged.
    """
    if seeds is None:
        return list(requests)
    numbers = list(seeds)
    groups = [
        [request] if "seed" in request.settings else [request.updated({"seed": seed}) for seed in numbers]
        for request in requests
    ]
    return [request for group in groups for request in group]
