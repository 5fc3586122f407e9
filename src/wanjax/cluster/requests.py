# SPDX-License-Identifier: Apache-2.0
"""Requests for many videos, from a file: a prompt on each line, or a table whose rows are whole requests.

JAX is not imported here: a process that only hands requests out leaves the devices to others.
"""

import csv
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.errors import WanjaxError, reason, shown
from wanjax.media.inputs import INPUTS
from wanjax.media.texts import decoded, read_text, trimmed
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.settings import (
    ALLOW_EMPTY,
    Settings,
    check_prompt_text,
    is_text,
    read_size,
    schema,
)
from wanjax.stores.places import place

OWN = ("prompt", "original_prompt", "seed")  # settings in which the videos of one run may differ
SHAPE = ("size", "height", "width")
SCHEDULER = "scheduler"
EXAMPLE = '{"prompt": "a red circle", "seed": 1}'
WHOLE = re.compile(r"-?\d{1,20}\.0+")  # as a table of floats has it
JSON_LINES = (".jsonl", ".ndjson")
FIELDS = (*schema(Settings), "size", SCHEDULER, ALLOW_EMPTY.name, *INPUTS)  # of a request
DELIMITERS = ",;\t"  # of tables; spreadsheets of many countries write semicolons
MOST_LISTED = 20  # mistakes in a message, and runs of rows with one


class Request(NamedTuple):
    """A video that is asked for: its settings, pictures and clips by name. `row` is 0 where no file asks for it."""

    row: int
    given: Mapping[str, Any]

    @classmethod
    def of_json(cls, row: int, given: Mapping[str, Any]) -> "Request":
        """Returns a request that was written as JSON, which has no tuples: a size is one of height and width."""
        return cls(row, {name: tuple(x) if name == "size" and isinstance(x, list) else x for name, x in given.items()})

    def wrong(self, error: WanjaxError) -> WanjaxError:
        """Returns an error with the number of the row."""
        return WanjaxError(f"row {self.row}: {error}") if self.row else error

    @property
    def shared(self) -> dict[str, Any]:
        """Everything but what videos of one run may differ in."""
        return {name: value for name, value in self.given.items() if name not in OWN}

    def under(self, options: Mapping[str, Any]) -> "Request":
        """Returns the request with options where it says nothing itself; a size and its sides are one thing."""
        sized = any(name in self.given for name in SHAPE)
        kept = {name: value for name, value in options.items() if not (sized and name in SHAPE)}
        return self._replace(given=kept | dict(self.given))


def read_requests(file: str) -> list[Request]:
    """Returns the requests of a file, "-" for standard input.

    A file that ends in .csv or .parquet is a table. Any other has a request on each line: a JSON object where the first
    line is one or the file ends in .jsonl, else a prompt. Files that a request names are relative to the table.

    Raises WanjaxError, with the number of the row, for a setting that there is not or whose value is not right, and
    where the file cannot be read or asks for nothing.
    """
    name, folder = ("standard input", Path()) if file == "-" else (file, Path(file).expanduser().parent)
    try:
        rows = list(_rows(file))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, WanjaxError):
            raise
        raise WanjaxError(f"the prompts in {name} cannot be read: {reason(error)}") from error
    if not rows:
        raise WanjaxError(f"{name} has no prompt: one on each line is right")
    wrong, requests = WrongRows(), []
    for number, row in rows:
        try:
            requests.append(Request(number, _settings(row, folder.absolute())))
        except WanjaxError as error:
            wrong.add(number, error)
    wrong.refuse()
    return requests


class WrongRows:
    """What is wrong with the rows of a file, collected so that all of them can be corrected at once."""

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}  # by the reason

    def add(self, row: int, error: WanjaxError) -> None:
        """Note why a row is wrong; the rows of one reason are listed together."""
        self.rows.setdefault(str(error), set()).add(row)

    def refuse(self) -> None:
        """Raise WanjaxError if a row was wrong."""
        if not self.rows:
            return
        total = len(set().union(*self.rows.values()))
        each = [f"{_runs(rows)}: {why}" if any(rows) else why for why, rows in self.rows.items()]
        raise WanjaxError(f"{total} rows are wrong: {_listed(each, '; ')}" if len(each) > 1 else each[0])


def _runs(rows: Collection[int]) -> str:
    """Return the numbers of rows as "row 2" or "rows 2, 5, 9 to 40"."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and row == runs[-1][-1] + 1:
            runs[-1][1:] = [row]
        else:
            runs.append([row])
    return f"row{'s' * (len(rows) > 1)} {_listed([' to '.join(map(str, run)) for run in runs], ', ')}"


def _listed(texts: Sequence[str], between: str) -> str:
    """Return the first of some texts, and how many more there are."""
    more = [f"and {len(texts) - MOST_LISTED} more"] if len(texts) > MOST_LISTED else []
    return between.join([*texts[:MOST_LISTED], *more])


def _rows(file: str) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file with their numbers."""
    suffix = "" if file == "-" else Path(file).suffix.lower()
    if suffix == ".parquet":
        yield from enumerate(_of_parquet(Path(file).expanduser()), 1)
        return
    text = decoded(sys.stdin.buffer.read()) if file == "-" else read_text(Path(file).expanduser())
    if suffix == ".csv":
        yield from enumerate(_of_csv(text), 1)
        return
    lines = [(number, line) for number, each in enumerate(text.splitlines(), 1) if (line := trimmed(each))]
    in_json = suffix in JSON_LINES or (lines and _is_object(lines[0][1]))
    for number, line in lines:
        yield number, _json(line) if in_json else {"prompt": line}


def _json(line: str) -> Any:
    """Returns the value of a line of JSON; a WanjaxError that says where it breaks, for one that is none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        before = line[max(0, error.pos - 20) : error.pos]
        where = f"after {before!r}" if before else "at its start"
        why = f"{error.msg[0].lower()}{error.msg[1:]} {where}"
        return WanjaxError(f"the line is not JSON, {why}: write a row as {EXAMPLE}")
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return WanjaxError(f"the line holds a number too long, or too many brackets: write a row as {EXAMPLE}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _of_csv(text: str) -> Iterator[dict[str, Any] | WanjaxError]:
    """Yields the rows of a table; an empty field says nothing."""

    def known_fields(delimiter: str) -> int:
        header = next(csv.reader(StringIO(text), delimiter=delimiter), [])
        return len({name.strip() for name in header}.intersection(FIELDS))

    delimiter = max(DELIMITERS, key=known_fields)
    for row in csv.DictReader(StringIO(text), strict=True, delimiter=delimiter):
        if None in row:
            yield WanjaxError(f"the row has more fields than the header: quote one that holds {delimiter!r}")
        else:
            yield {name.strip(): value for name, value in row.items() if value}


def _of_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile  # imported late, as it is of the extra `cluster`
    except ImportError as error:
        raise WanjaxError(f"{file} needs pyarrow: pip install 'wanjax[cluster]' brings it") from error
    with ParquetFile(file) as table:
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                yield {name: None if value != value else value for name, value in row.items()}  # pandas' empty cell


def _settings(row: Any, folder: Path) -> dict[str, Any]:
    """Returns the settings and files of a row, each value of its setting's type."""
    if isinstance(row, WanjaxError):
        raise row
    fields = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(fields, Mapping):
        raise WanjaxError(f"{shown(row)} is no prompt, and no object of settings")
    fields = {name: value for name, value in fields.items() if value is not None}
    allow_empty = fields.pop(ALLOW_EMPTY.name, None)
    settings = {name: _read(name, value, folder) for name, value in fields.items()}
    check_prompt_text(settings.setdefault("prompt", "") if allow_empty else settings.get("prompt"), allow_empty)
    return settings


def _read(name: str, value: Any, folder: Path) -> Any:
    """Returns a value as a setting's own, as far as it is a text or a number; texts and numbers mean the same."""
    known = schema(Settings)
    if isinstance(value, str) and "\0" in value:
        raise WanjaxError(f"{name} is given as {shown(value)} where a text without the character \\0 is right")
    if name in INPUTS:
        return _files(name, value, folder)
    if name in ("size", SCHEDULER):
        if not is_text(value):
            right = "832x480" if name == "size" else "euler"
            raise WanjaxError(f"{name} is given as {shown(value)} where a text such as {right} is right")
        return read_size(value) if name == "size" else value
    if name not in known:
        raise unknown_keyword(name, FIELDS)
    if known[name].kind is int:
        value = _whole(value)
    read = known[name].parse(value)
    return read if isinstance(read, bool | int | float | str) else value


def _whole(value: Any) -> Any:
    """Returns 4 for 4.0, which a column of whole numbers with an empty cell holds; anything else as it is."""
    try:
        number = float(value) if isinstance(value, str) and WHOLE.fullmatch(value) else value
        return int(number) if isinstance(number, float) and number.is_integer() else value
    except OverflowError:
        return value


def _files(name: str, value: Any, folder: Path) -> Any:
    """Returns the absolute path, or the URL, of a picture or clip, or those of several."""
    if INPUTS[name].kind == "images":
        return [_file(name, one, folder) for one in (value if isinstance(value, list) else [value])]
    return _file(name, value, folder)


def _file(name: str, value: Any, folder: Path) -> str:
    if not is_text(value) or not value:
        raise WanjaxError(f"{name} is given as {shown(value)} where the name of a file is right")
    found = place(value)
    return str(folder / found if isinstance(found, Path) else found)


def with_seeds(requests: Iterable[Request], seeds: Iterable[int] | None) -> list[Request]:
    """Returns a request for each of the seeds in place of each that has no seed of its own."""
    if seeds is None:
        return list(requests)
    numbers = list(seeds)
    each = [[one] if "seed" in one.given else [one.under({"seed": seed}) for seed in numbers] for one in requests]
    return [request for some in each for request in some]
