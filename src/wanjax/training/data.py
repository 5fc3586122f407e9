# SPDX-License-Identifier: Apache-2.0
"""Data sets of clips and pictures with captions: a folder with a text file beside each, or a table.

A table is `metadata.csv` or `metadata.jsonl` in the folder, or any file of these kinds, with the columns in use
elsewhere. What cannot be used, such as a caption in an unknown encoding, is left out, and told in one sentence each.
"""

import csv
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from wanjax.errors import WanjaxError, reason
from wanjax.figures import quantity
from wanjax.media.pictures import is_picture_name, natural_sort
from wanjax.media.text_files import read_text, strip_text
from wanjax.media.video import FILMS, read_metadata
from wanjax.pipelines.settings import is_text

TABLES = ("metadata.csv", "metadata.jsonl")
FILE_COLUMNS = ("file_name", "video", "video_path", "image", "image_path", "file", "path")
CAPTION_COLUMNS = ("text", "prompt", "caption")
REPEATS, PRESERVE = "repeats", "preserve"
YES, NO = ("true", "yes", "1"), ("false", "no", "0", "")
FILM_SUFFIXES = (
    *(*FILMS, ".avi", ".mkv", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv"),
    *(".ts", ".mts", ".m2ts", ".ogv", ".3gp", ".mxf"),
)
EXAMPLE = '{"file_name": "a.mp4", "text": "a red circle"}'
CACHE_FOLDER = ".wanjax"  # the folder of what was made from the data, beside them


@dataclass(frozen=True)
class Example:
    """A clip or a picture, its caption, how often an epoch shows it, and whether it shows what the model is to keep."""

    file: Path
    caption: str
    repeats: int = 1
    preserve: bool = False


@dataclass
class Listing:
    """The examples of a data set, its folder, and a sentence on each file that was left out.

    `cut` has a sentence on each caption that is longer than the model reads, once that is known. `others` is the number
    of files that are hidden, or neither clips, pictures nor captions.
    """

    folder: Path
    examples: list[Example] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    others: int = 0


def list_data(data: str | Path) -> Listing:
    """List a data set. Of its clips those alone are opened that have no caption beside them.

    Raises WanjaxError where there is no such folder or table, or where nothing in it can be used.
    """
    data = Path(data).expanduser()
    if data.is_dir():
        tables = [data / name for name in TABLES if (data / name).is_file()]
        listing = _list_table(tables[0]) if tables else _list_folder(data)
    elif data.is_file():
        listing = _list_table(data)
    else:
        raise WanjaxError(f"there is no folder or table {data}: give a folder of clips with captions")
    if not listing.examples:
        why = f": {summarize_first(listing.left_out)}" if listing.left_out else ""
        raise WanjaxError(f"{data} holds no clip or picture with a caption{why or ', each with a .txt of its name'}")
    return listing


def summarize_first(sentences: Sequence[str]) -> str:
    """Return the first of some sentences, and the number of the others."""
    return sentences[0] + (f", and so with {len(sentences) - 1} more" if len(sentences) > 1 else "")


def _list_folder(folder: Path) -> Listing:
    """List the clips and pictures of a folder and the folders in it, each with a text file of the same name."""
    listing = Listing(folder)
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)  # noqa: E731
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != CACHE_FOLDER and path.is_file()]
    files = [path for path in natural_sort(paths) if not hidden(path)]
    media = [path for path in files if path.suffix.lower() in FILM_SUFFIXES or is_picture_name(path)]
    captions = {path.with_suffix(""): path for path in files if path.suffix.lower() == ".txt"}
    listing.others = len(paths) - len(media) - len(captions)
    stems = {path.with_suffix("") for path in media}
    others = {_normalized(stem): path for stem, path in captions.items() if stem not in stems}
    missing_captions = {_normalized(stem) for stem in stems - captions.keys()}
    for path in media:
        caption = captions.get(path.with_suffix("")) or others.get(_normalized(path.with_suffix("")))
        if caption is None and (prompt := _prompt_in_metadata(path)):
            _add_example(listing, path, prompt)
            continue
        if caption is None:
            listing.left_out.append(f"{path.name} has no caption: give {path.stem}.txt beside it")
            continue
        try:
            _add_example(listing, path, read_text(caption))
        except (OSError, ValueError) as error:
            listing.left_out.append(f"{path.name}, whose caption {caption.name} cannot be read, {reason(error)}")
    for name, caption in sorted(others.items()):
        if name not in missing_captions:
            listing.left_out.append(f"{caption.name} is a caption without a clip or a picture of its name")
    return listing


def _prompt_in_metadata(path: Path) -> str | None:
    """Return the prompt in the metadata of a video or picture that this library made; None in any other."""
    try:
        prompt = read_metadata(path).get("prompt")
    except (WanjaxError, OSError):
        return None
    return prompt if isinstance(prompt, str) and prompt.strip() else None


def _normalized(stem: Path) -> str:
    """Return a name as systems compare it that know no capitals, or write accents in another way."""
    return unicodedata.normalize("NFC", str(stem)).casefold()


def _list_table(table: Path) -> Listing:
    """List the rows of a table, whose files are relative to its folder."""
    listing, seen_rows = Listing(table.parent), dict[tuple[Path, str], str]()
    for number, row in enumerate(_rows(table), 1):
        where = f"row {number} of {table.name}"
        if isinstance(row, str):
            listing.left_out.append(f"{where} {row}")
            continue
        file = _entry(row, FILE_COLUMNS, where, table)
        caption = _entry(row, CAPTION_COLUMNS, where, table)
        path = table.parent / str(file)
        if not file or not os.path.isfile(path):  # which raises nothing for names that are none
            file_text = str(file or "no file").encode(errors="backslashreplace").decode()
            listing.left_out.append(f"{where} names {file_text}, which is not there")
            continue
        if (earlier_row := seen_rows.setdefault((path, str(caption)), where)) != where:
            listing.left_out.append(f"{where} is {earlier_row} again")
            continue
        _add_example(listing, path, caption, _repeats(row, where), _preserves(row, where))
    return listing


def _repeats(row: Mapping[str, Any], where: str) -> int:
    """Return how often an epoch shows a row's clip; raise WanjaxError for all but a whole number from 1 on."""
    if (repeats := row.get(REPEATS)) in (None, ""):
        return 1
    with suppress(TypeError, ValueError, OverflowError):
        if (count := int(repeats)) >= 1 and (isinstance(repeats, str) or count == repeats):
            return count
    raise WanjaxError(f"{where} has repeats {repeats!r}: write a whole number from 1 on")


def _preserves(row: Mapping[str, Any], where: str) -> bool:
    """Return whether a row says that its clip is one to keep; raise WanjaxError for another word than yes or no."""
    value = row.get(PRESERVE)
    word = "" if value is None else str(value).strip().lower()
    if word not in (*YES, *NO):
        raise WanjaxError(f"{where} has preserve {value!r}: write true or false")
    return word in YES


def _add_example(listing: Listing, path: Path, caption: Any, repeats: int = 1, preserve: bool = False) -> None:
    if not is_text("" if caption is None else caption):
        listing.left_out.append(f"{path.name} has a caption that is no text in UTF-8")
    elif text := strip_text(caption or ""):
        listing.examples.append(Example(path, text, repeats, preserve))
    else:
        listing.left_out.append(f"{path.name} has an empty caption")


def _rows(table: Path) -> Iterator[Mapping[str, Any] | str]:
    """Yield the rows of a CSV or JSONL table, and what is wrong with those that cannot be told.

    Bytes that are no UTF-8 are surrogates. Raises WanjaxError where the table cannot be read.
    """
    try:
        lines = list(StringIO(read_text(table, "surrogateescape")))
        yield from _read_csv(lines, table) if table.suffix.lower() == ".csv" else _read_jsonl(lines, table)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, WanjaxError):
            raise
        raise WanjaxError(f"{table} cannot be read as a table of clips, {reason(error)}") from error


def _read_jsonl(lines: Sequence[str], table: Path) -> Iterator[Mapping[str, Any] | str]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            if is_text(line):
                raise _not_object(number, table) from None
            yield "is no text in UTF-8"  # some encodings have bytes of JSON within their letters
            continue
        if row is not None:
            if not isinstance(row, Mapping):
                raise _not_object(number, table)
            yield row


def _not_object(number: int, table: Path) -> WanjaxError:
    return WanjaxError(f"line {number} of {table} is no JSON object: write each row on a line, as {EXAMPLE}")


def _read_csv(lines: Sequence[str], table: Path) -> Iterator[Mapping[str, Any] | str]:
    header: list[str] = []
    start_line = 0
    while start_line < len(lines):
        reader, lines_read = csv.reader(islice(lines, start_line, None), strict=True), 0
        try:
            for fields in reader:
                lines_read = reader.line_num
                if not header:
                    header = [name.strip() for name in fields]
                    if len(set(header)) < len(header):
                        raise WanjaxError(f"{table} has two columns of one name: {', '.join(header)}")
                elif fields:
                    yield _row(header, fields)
            return
        except csv.Error as error:
            if not header:
                raise WanjaxError(f"the header of {table} cannot be read: {error}") from error
            yield f"cannot be read, as of quotes within a caption that is not quoted: {error}"
            start_line += lines_read + 1  # an open quote would take all lines after it


def _row(header: Sequence[str], fields: list[str]) -> Mapping[str, Any] | str:
    """Return a row by its columns. More fields than these are the caption's, which has commas and no quotes."""
    while len(fields) > len(header) and not fields[-1]:
        fields.pop()
    if extra_fields := max(0, len(fields) - len(header)):
        file, at = (
            next((header.index(x) for x in names if x in header), -1) for names in (FILE_COLUMNS, CAPTION_COLUMNS)
        )
        others = [i for i, name in enumerate(header) if i not in (file, at) and name not in (REPEATS, PRESERVE)]
        if at < 0 or any(not i < file < at for i in others):  # a comma may be another column's
            problem = f"has {quantity(len(fields), 'field')} where the header has {len(header)}"
            return f"{problem}: a caption with commas needs quotes"
        end = at + extra_fields + 1
        caption = ",".join(fields[at:end]).strip()
        if len(caption) > 1 and caption[0] == caption[-1] == '"':  # after a space, where no quotes are seen
            caption = caption[1:-1]
        fields = [*fields[:at], caption, *fields[end:]]
    return dict(zip_longest(header, fields))


def _entry(row: Mapping[str, Any], names: tuple[str, ...], where: str, table: Path) -> Any:
    """Return the first of these columns that a row has; raise WanjaxError where it has none."""
    for name in names:
        if name in row:
            return row[name]
    raise WanjaxError(f"{table.name} has no column {' or '.join(names)}, as {where} shows: it has {', '.join(row)}")
