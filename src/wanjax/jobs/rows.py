# SPDX-License-Identifier: Apache-2.0
"""Read the requests of a batch from a file: a prompt on each line, or a table with one request per row.

This module does not import JAX, because a process that only adds jobs must not occupy the devices.
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

from wanjax.errors import SettingError, WanjaxError, install_extra, json_values, reason, repr_short
from wanjax.media.text_files import decode_text, read_text, strip_text
from wanjax.pipelines.other_names import RENAMED, unknown_keyword
from wanjax.pipelines.request import LORA_STRENGTH, ROW, VideoRequest, field_names, row_text, unique_fields
from wanjax.stores.paths import parse_path

LINE, ITEM, CSV_ROW = "line", "item", "row below the header"  # nouns for rows in messages; `ROW` for .parquet
ROW_EXAMPLE = '{"prompt": "a red circle", "seed": 1}'
EMPTY_FILE_MESSAGES = {
    LINE: "has no prompt: write one on each line",
    ITEM: f"is an empty array: add requests such as {ROW_EXAMPLE}",
    CSV_ROW: "has no rows below the header: write a row for each video",
    ROW: "has no rows: write a row for each video",
}
"""The error and the advice for a file without requests, by the noun for its rows."""
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
JSON_START = re.compile(
    r"""[\[{]\s*(?:["\[\]{}]|$)"""
)  # matches the start of an array or an object on the first line of a file
PROMPT_SETTINGS = ("prompt", "original_prompt")  # settings that may differ between the requests of a list
DELIMITERS = ",;\t"  # separators in CSV files; in many countries spreadsheets write semicolons
SPREADSHEET_SUFFIXES = (".xlsx", ".xls", ".ods", ".tsv")  # suffixes of tables that are not read
MAX_HEADER_CHARS = 2000  # the number of characters of the first line in which a header is searched
PROMPT_COLUMNS = ("caption", "text")  # names of the prompt's column in tables of other programs
MAX_LISTED = 10  # the maximum number of errors in a message, and of row ranges for one error


class RowError(WanjaxError):
    """The errors of the rows or of the header of a file, which name fields and not options."""


def read_requests(file: str, row_errors: "RowErrors | None" = None) -> list[VideoRequest]:
    """Read the requests of a file.

    A file that ends in .csv or .parquet is a table. If the whole file is JSON, it has an array of requests or a single
    request. Any other file has a request on each line. The lines are JSON objects if the first line is a JSON object or
    the file ends in .jsonl. Otherwise the lines are prompts. Paths in a request are relative to the folder of the file.

    Args:
        file: The path; "-" for standard input.
        row_errors: Receives the errors of invalid rows, so that the caller can add more errors and report all of them
            at once. None means that this function raises them.

    Raises:
        WanjaxError: A row is invalid, the file cannot be read, or it has no request.
    """
    name, folder = _display_name(file), Path() if file == "-" else Path(file).expanduser().parent
    try:
        row_noun, numbered_rows = _read_rows(file)
        rows = list(numbered_rows)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, WanjaxError):
            raise
        if isinstance(error, IsADirectoryError):
            raise WanjaxError(f"{name} is a folder: give a file with requests") from error
        raise WanjaxError(f"the prompts in {name} cannot be read: {reason(error)}") from error
    if not rows:
        raise WanjaxError(f"{name} {EMPTY_FILE_MESSAGES[row_noun]}")
    errors, requests = RowErrors() if row_errors is None else row_errors, []
    for number, row in rows:
        try:
            requests.append(_parse_request(number, row_noun, row, folder.absolute()))
        except WanjaxError as error:
            errors.add(number, error, row_noun)
    if row_errors is None:
        errors.raise_if_any()
    return requests


def _display_name(file: str) -> str:
    return "standard input" if file == "-" else file


class RowErrors:
    """The errors in the rows of a file. The errors are collected so that the user can correct all of them at once."""

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}  # the numbers of rows, by error message
        self.row_noun = ROW

    def add(self, row: int, error: WanjaxError, row_noun: str) -> None:
        """Add the error of a row. Rows with the same error are listed together.

        Args:
            row: The row's number, from 1; 0 for the request of the command itself.
            error: The error.
            row_noun: The noun for the row, as in `VideoRequest.row_noun`.
        """
        self.row_noun = row_noun
        self.rows.setdefault(str(error), set()).add(row)

    def raise_if_any(self) -> None:
        """If there are errors, raise a WanjaxError with all of them. Several errors are written on separate lines."""
        if not self.rows:
            return
        total = len(set().union(*self.rows.values()))
        ordered = sorted(self.rows.items(), key=lambda item: min(item[1]))
        messages = [
            f"{_format_ranges(rows, self.row_noun)}: {problem}" if any(rows) else problem for problem, rows in ordered
        ]
        if len(messages) == 1:
            raise RowError(messages[0])
        noun = self.row_noun.partition(" ")[0]
        raise RowError(_join_limited([f"{total} {noun}s are wrong:", *messages], "\n  ", MAX_LISTED + 1))


def _format_ranges(rows: Collection[int], row_noun: str) -> str:
    """Format the numbers of rows, such as "line 2" or "rows 2, 5, 9 to 40 below the header"."""
    ranges: list[list[int]] = []
    for row in sorted(rows):
        if ranges and row == ranges[-1][-1] + 1:
            ranges[-1][1:] = [row]
        else:
            ranges.append([row])
    return row_text(row_noun, _join_limited([" to ".join(map(str, bounds)) for bounds in ranges], ", "), len(rows))


def _join_limited(texts: Sequence[str], separator: str, count: int = MAX_LISTED) -> str:
    """Join the first `count` texts, and say how many more there are."""
    remainder = [f"and {len(texts) - count} more"] if len(texts) > count else []
    return separator.join([*texts[:count], *remainder])


def _read_rows(file: str) -> tuple[str, Iterable[tuple[int, Any]]]:
    """Return the noun for the rows of a file, and the number and the content of each row."""
    suffix = "" if file == "-" else Path(file).suffix.lower()
    if suffix == ".parquet":
        return ROW, enumerate(_read_parquet(Path(file).expanduser()), 1)
    if suffix in SPREADSHEET_SUFFIXES:
        raise WanjaxError(
            f"{file} is a table of a kind that wanjax cannot read: save it as {Path(file).with_suffix('.csv').name}"
        )
    text = decode_text(sys.stdin.buffer.read()) if file == "-" else read_text(Path(file).expanduser())
    if suffix == ".csv":
        return CSV_ROW, enumerate(_read_csv(text), 1)
    lines = [(number, line) for number, raw_line in enumerate(text.splitlines(), 1) if (line := strip_text(raw_line))]
    if not lines:
        return LINE, ()
    if suffix not in (".json", *JSON_LINES_SUFFIXES) and not JSON_START.match(lines[0][1]):
        if _is_header(lines[0][1]):
            csv_name = "a .csv file" if file == "-" else Path(file).with_suffix(".csv").name
            raise WanjaxError(
                f"the first line of {_display_name(file)} is the header of a table, {repr_short(lines[0][1])}: "
                f"save the table as {csv_name}"
            )
        return LINE, ((number, {"prompt": line}) for number, line in lines)
    parsed = _parse_json(
        strip_text(text), _display_name(file), f"write [{ROW_EXAMPLE}, ...], or a prompt on each line of a .txt"
    )
    if not isinstance(parsed, WanjaxError):
        if len(lines) == 1 and not isinstance(parsed, list):
            return LINE, [(lines[0][0], parsed)]
        return ITEM, enumerate(parsed if isinstance(parsed, list) else [parsed], 1)
    if suffix not in JSON_LINES_SUFFIXES and not lines[0][1].endswith("}"):
        raise parsed
    return LINE, ((number, _parse_json(line, "the line", f"write a row as {ROW_EXAMPLE}")) for number, line in lines)


def _parse_json(text: str, name: str, advice: str) -> Any:
    """Parse JSON. For invalid JSON, return a WanjaxError that says where the error is and what to write instead."""
    try:
        return json.loads(text, object_pairs_hook=unique_fields)
    except SettingError as error:
        return error
    except json.JSONDecodeError as error:
        context = text[max(0, error.pos - 20) : error.pos]
        position_text = f"after {context!r}" if context else "at its start"
        problem = f"{error.msg[0].lower()}{error.msg[1:]} {position_text}"
        return WanjaxError(f"{name} is invalid JSON, {problem}: {advice}")
    except (ValueError, RecursionError):  # a number with thousands of digits, or very deep nesting
        return WanjaxError(f"{name} has a number that is too long, or too many nested brackets: {advice}")


def _read_csv(text: str) -> Iterator[dict[str, Any] | WanjaxError]:
    """Yield the rows of a CSV file without their empty fields, and an error for a row that is too long or not CSV."""

    delimiter = max(DELIMITERS, key=lambda delimiter: len(_known_columns(text, delimiter)))
    table = csv.DictReader(StringIO(text), strict=True, delimiter=delimiter)
    columns = list(filter(None, map(_column, table.fieldnames or ())))
    for name in columns:
        if len(columns) == 1 and len(parts := re.split(r"\s*[|:]\s*", name)) > 1 and _column(parts[0]) in _row_fields():
            raise WanjaxError(f"the header is {repr_short(name)}: separate its columns by commas, semicolons or tabs")
    _check_columns(columns)
    try:
        for row in table:
            if None in row:
                yield WanjaxError(f"the row has more fields than the header: quote fields that contain {delimiter!r}")
            else:
                yield {_column(name): value for name, value in row.items() if value}
    except csv.Error as error:
        yield WanjaxError(f"the row is not CSV ({error}): close the quotes of its fields, and double those inside")


def _check_columns(columns: Sequence[str]) -> None:
    """Raise WanjaxError unless each column of a table names a field of a request, and no field has two columns."""
    for name in columns:
        if columns.count(name) > 1:
            raise WanjaxError(f"the header has the column {name!r} twice: keep one")
        if name.lower() in PROMPT_COLUMNS:
            raise RowError(f"{name!r} is not a column here: use prompt")
        if name not in (names := field_names()):
            problem = str(unknown_keyword(name, names, kind="column"))
            is_header = any(column in names for column in columns)
            raise RowError(problem if is_header else f"{problem}; the first row names the columns")


def _known_columns(text: str, delimiter: str) -> set[str]:
    """Return the columns on the first line of a table that name fields, also by the names of other libraries."""
    header = {_column(name) for name in next(csv.reader(StringIO(text), delimiter=delimiter), [])}
    return {name for name in header if name in _row_fields() or name in (*RENAMED, *PROMPT_COLUMNS)}


def _is_header(line: str) -> bool:
    """Whether a line is the header of a table, and not a prompt with commas."""
    for delimiter in DELIMITERS:
        columns = _known_columns(line[:MAX_HEADER_CHARS], delimiter)
        has_prompt = not columns.isdisjoint(("prompt", *PROMPT_COLUMNS))
        if len(columns) > 1 and (has_prompt or len(columns) == line.count(delimiter) + 1):
            return True
    return False


def _column(heading: str) -> str:
    """Return the field that a column's heading names, such as "Negative prompt" or "--negative-prompt"."""
    name = heading.strip()
    field_name = re.sub(r"[\s-]+", "_", name.lower().lstrip("-"))
    return field_name if field_name in field_names() else name


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException  # imported late, because only the extra `parquet` installs this library
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise WanjaxError(f"reading {file} needs pyarrow: {install_extra('parquet')}") from error
    try:
        with ParquetFile(file) as table:
            columns = list(map(_column, table.schema_arrow.names))
            _check_columns(columns)
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    cells = zip(columns, row.values(), strict=True)
                    yield {name: None if value != value else value for name, value in cells}  # NaN: pandas' empty cell
    except (OSError, ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the file system
            raise
        raise WanjaxError(
            f"{file} is not readable as Parquet: write it again, or give a .csv or .jsonl file"
        ) from error


def _row_fields() -> tuple[str, ...]:
    """Return the fields that a row may have: all fields of a request except LoRAs, which must be the same for all
    videos."""
    return tuple(name for name in field_names() if name != LORA_STRENGTH.name)


def _parse_request(number: int, row_noun: str, row: Any, folder: Path) -> VideoRequest:
    """Return the request of a row. Names of files become absolute paths or URLs. Raises WanjaxError if the row is
    invalid."""
    if isinstance(row, WanjaxError):
        raise row
    fields = {"prompt": row} if isinstance(row, str) else row
    with json_values():
        if not isinstance(fields, Mapping):
            raise WanjaxError(f"{repr_short(row)} is neither a prompt nor an object of settings: write {ROW_EXAMPLE}")
        request = VideoRequest.parse(fields, row=number, row_noun=row_noun, accepted_names=_row_fields())

    def resolve(name: str) -> str:
        path = parse_path(name)
        return str(folder / path if isinstance(path, Path) else path)

    inputs = {k: list(map(resolve, x)) if isinstance(x, list) else resolve(x) for k, x in request.inputs.items()}
    return replace(request, inputs=inputs)


def shared_by_all(request: VideoRequest) -> VideoRequest:
    """Return the part of a command's request that all rows of its file share.

    Args:
        request: The request.
    """
    return replace(
        request, settings={name: value for name, value in request.settings.items() if name not in PROMPT_SETTINGS}
    )


def with_shared(request: VideoRequest, shared: VideoRequest) -> VideoRequest:
    """Complete the request of a row by the settings that all rows share. Leave out settings without an effect on this
    request.

    Args:
        request: The request of the row.
        shared: The request of the command, from `shared_by_all`.
    """
    complete_request = request.with_defaults(shared)
    unused_names = {
        name for name in shared.settings if name not in request.settings and not complete_request.has_effect(name)
    }
    return replace(
        complete_request,
        settings={name: value for name, value in complete_request.settings.items() if name not in unused_names},
    )


def with_seeds(requests: Iterable[VideoRequest], seeds: Iterable[int] | None) -> list[VideoRequest]:
    """Replace each request without a seed by one request per seed.

    Args:
        requests: The requests.
        seeds: The seeds. None leaves the requests unchanged.
    """
    if seeds is None:
        return list(requests)
    numbers = list(seeds)
    groups = [
        [request] if "seed" in request.settings else [request.updated({"seed": seed}) for seed in numbers]
        for request in requests
    ]
    return [request for group in groups for request in group]
