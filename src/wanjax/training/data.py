# SPDX-License-Identifier: Apache-2.0
"""List data sets of clips and pictures with captions: a folder with a text file for each clip or picture, or a table.

A table is `metadata.csv` or `metadata.jsonl` in the folder, or any CSV or JSONL file. Its columns have the names that
common trainers use. Unusable entries, such as a caption in an unknown encoding, are skipped. For each skipped entry,
the result has a sentence with the reason.
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
from wanjax.figures import pluralize
from wanjax.media.inputs import CLIP_SUFFIXES
from wanjax.media.pictures import is_picture_name, natural_sort
from wanjax.media.text_files import read_text, strip_text
from wanjax.media.training_data import check_data
from wanjax.media.video import read_metadata
from wanjax.pipelines.settings import is_text

TABLES = ("metadata.csv", "metadata.jsonl")
FILE_COLUMNS = ("file_name", "video", "video_path", "image", "image_path", "file", "path")
CAPTION_COLUMNS = ("text", "prompt", "caption")
REPEATS_COLUMN, PRESERVE_COLUMN = "repeats", "preserve"
YES, NO = ("true", "yes", "1"), ("false", "no", "0", "")
VIDEO_FILE_SUFFIXES = (
    *(*CLIP_SUFFIXES, ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".mts", ".m2ts", ".ogv", ".3gp", ".mxf"),
)
EXAMPLE = '{"file_name": "a.mp4", "text": "a red circle"}'
CACHE_FOLDER = ".wanjax"  # the folder for cached latents, in the folder of the data


@dataclass(frozen=True)
class Example:
    """A clip or picture with its caption.

    Args:
        file: The clip or picture.
        caption: Its caption.
        repeats: How often the clip is in an epoch.
        preserve: Whether the clip is for prior preservation. For such a clip, the trained model should make the same
            prediction as the untrained model.
    """

    file: Path
    caption: str
    repeats: int = 1
    preserve: bool = False


@dataclass
class DataListing:
    """The examples of a data set, and reports about files that are not used.

    Args:
        folder: The folder of the data.
        examples: The usable examples.
        skipped: A sentence about each clip, caption or row that cannot be used.
        truncated: A sentence about each caption whose tokens exceed the model's context.
        num_ignored: The number of files that are hidden, or that are neither clip nor picture nor caption.
    """

    folder: Path
    examples: list[Example] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    num_ignored: int = 0


def check_outside(data: Path, out: Path) -> None:
    """Raise WanjaxError if a training run would write its sample videos into the folder of its clips.

    Args:
        data: The folder or table of the data.
        out: The folder of the results.
    """
    if data.is_dir() and not _tables_in(data) and out.resolve().is_relative_to(data.resolve()):
        raise WanjaxError(
            f"the results cannot be in the folder of the clips, or their sample videos would become clips, got {out}: "
            f"give a folder outside of {data}"
        )


def list_data(data: str | Path) -> DataListing:
    """List a data set. Clips with a caption file are not opened.

    Raises WanjaxError if the folder or table is missing, or has no usable example.
    """
    data = Path(data).expanduser()
    check_data(data)
    tables = _tables_in(data) if data.is_dir() else [data]
    listing = _list_table(tables[0]) if tables else _list_folder(data)
    if not listing.examples:
        reason = f" ({summarize_first(listing.skipped)})" if listing.skipped else ""
        advice = (
            "each row needs a file and a caption"
            if tables
            else "put a .txt file with a caption beside each clip and picture, with the same name"
        )
        raise WanjaxError(f"{data} has no clip or picture with a caption{reason}: {advice}")
    return listing


def _tables_in(folder: Path) -> list[Path]:
    """Return the tables in a folder of data. `list_data` reads the first table. If there is none, it lists the clips
    and pictures in the folder."""
    return [folder / name for name in TABLES if (folder / name).is_file()]


def summarize_first(sentences: Sequence[str]) -> str:
    """Return the first sentence, and the number of further sentences."""
    return sentences[0] + (f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else "")


def _list_folder(folder: Path) -> DataListing:
    """List the clips and pictures of a folder and its subfolders, each with a text file of the same name."""
    listing = DataListing(folder)
    is_hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)  # noqa: E731
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != CACHE_FOLDER and path.is_file()]
    files = [path for path in natural_sort(paths) if not is_hidden(path)]
    media = [path for path in files if path.suffix.lower() in VIDEO_FILE_SUFFIXES or is_picture_name(path)]
    captions = {path.with_suffix(""): path for path in files if path.suffix.lower() == ".txt"}
    listing.num_ignored = len(paths) - len(media) - len(captions)
    stems = {path.with_suffix("") for path in media}
    unmatched_captions = {_normalized(stem): path for stem, path in captions.items() if stem not in stems}
    missing_captions = {_normalized(stem) for stem in stems - captions.keys()}
    for path in media:
        caption = captions.get(path.with_suffix("")) or unmatched_captions.get(_normalized(path.with_suffix("")))
        if caption is None and (prompt := _prompt_in_metadata(path)):
            _add_example(listing, path, prompt)
            continue
        if caption is None:
            listing.skipped.append(f"{path.relative_to(folder)} has no caption: give {path.stem}.txt beside it")
            continue
        try:
            _add_example(listing, path, read_text(caption))
        except (OSError, ValueError) as error:
            listing.skipped.append(
                f"{path.relative_to(folder)}: its caption {caption.name} cannot be read: {reason(error)}"
            )
    for name, caption in sorted(unmatched_captions.items()):
        if name not in missing_captions:
            listing.skipped.append(f"{caption.relative_to(folder)} has no clip or picture of the same name")
    return listing


def _prompt_in_metadata(path: Path) -> str | None:
    """Return the prompt in the metadata of a video or picture that wanjax wrote, or None."""
    try:
        prompt = read_metadata(path).get("prompt")
    except (WanjaxError, OSError):
        return None
    return prompt if isinstance(prompt, str) and prompt.strip() else None


def _normalized(stem: Path) -> str:
    """Normalize a file name. File systems may ignore case, and encode accents in different ways."""
    return unicodedata.normalize("NFC", str(stem)).casefold()


def _list_table(table: Path) -> DataListing:
    """List the rows of a table. File names in the table are relative to the table's folder."""
    listing, first_rows = DataListing(table.parent), dict[tuple[Path, str], str]()
    for row_number, row in enumerate(_read_rows(table), 1):
        row_name = f"row {row_number} of {table.name}"
        if isinstance(row, str):
            listing.skipped.append(f"{row_name} {row}")
            continue
        file = _first_column(row, FILE_COLUMNS, row_name, table)
        caption = _first_column(row, CAPTION_COLUMNS, row_name, table)
        path = table.parent / str(file)
        if not file or not os.path.isfile(path):  # unlike `Path.exists`, this raises no error for invalid names
            file_text = str(file or "no file").encode(errors="backslashreplace").decode()
            listing.skipped.append(f"{row_name} names {file_text}, which does not exist")
            continue
        if (earlier_row := first_rows.setdefault((path, str(caption)), row_name)) != row_name:
            listing.skipped.append(f"{row_name} repeats {earlier_row}")
            continue
        _add_example(listing, path, caption, _repeats(row, row_name), _preserves(row, row_name))
    return listing


def _repeats(row: Mapping[str, Any], row_name: str) -> int:
    """Read how often a row's clip is in an epoch. Raises WanjaxError unless it is a whole number of 1 or more."""
    if (repeats := row.get(REPEATS_COLUMN)) in (None, ""):
        return 1
    with suppress(TypeError, ValueError, OverflowError):
        if (count := int(repeats)) >= 1 and (isinstance(repeats, str) or count == repeats):
            return count
    raise WanjaxError(f"{row_name} has repeats {repeats!r}: write a whole number, 1 or more")


def _preserves(row: Mapping[str, Any], row_name: str) -> bool:
    """Read whether a row's clip is for prior preservation. Raises WanjaxError unless the value is true or false."""
    value = row.get(PRESERVE_COLUMN)
    word = "" if value is None else str(value).strip().lower()
    if word not in (*YES, *NO):
        raise WanjaxError(f"{row_name} has preserve {value!r}: write true or false")
    return word in YES


def _add_example(listing: DataListing, path: Path, caption: Any, repeats: int = 1, preserve: bool = False) -> None:
    if not is_text("" if caption is None else caption):
        listing.skipped.append(f"{path.name} has a caption that is not UTF-8 text")
    elif text := strip_text(caption or ""):
        listing.examples.append(Example(path, text, repeats, preserve))
    else:
        listing.skipped.append(f"{path.name} has an empty caption")


def _read_rows(table: Path) -> Iterator[Mapping[str, Any] | str]:
    """Yield the rows of a CSV or JSONL table. For an invalid row, yield a string that describes the problem.

    Bytes that are not UTF-8 become surrogates. Raises WanjaxError if the table cannot be read.
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
                raise _not_json_object_error(number, table) from None
            yield "is not UTF-8 text"  # in some encodings, a byte of a letter may look like JSON syntax
            continue
        if row is not None:
            if not isinstance(row, Mapping):
                raise _not_json_object_error(number, table)
            yield row


def _not_json_object_error(number: int, table: Path) -> WanjaxError:
    return WanjaxError(f"line {number} of {table} is not a JSON object: write each row on a line, as {EXAMPLE}")


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
                        raise WanjaxError(f"{table} has two columns with the same name: {', '.join(header)}")
                elif fields:
                    yield _parse_row(header, fields)
            return
        except csv.Error as error:
            if not header:
                raise WanjaxError(f"the header of {table} cannot be read: {error}") from error
            yield f"cannot be read, perhaps because of quotes in an unquoted caption: {error}"
            start_line += lines_read + 1  # skip the unclosed quote; otherwise all later lines would be its text


def _parse_row(header: Sequence[str], fields: list[str]) -> Mapping[str, Any] | str:
    """Parse a row into its columns. If it has too many fields, the caption has commas without quotes."""
    while len(fields) > len(header) and not fields[-1]:
        fields.pop()
    if extra_fields := max(0, len(fields) - len(header)):
        file_column, caption_column = (
            next((header.index(name) for name in names if name in header), -1)
            for names in (FILE_COLUMNS, CAPTION_COLUMNS)
        )
        other_columns = [
            column
            for column, name in enumerate(header)
            if column not in (file_column, caption_column) and name not in (REPEATS_COLUMN, PRESERVE_COLUMN)
        ]
        if caption_column < 0 or any(
            not column < file_column < caption_column for column in other_columns
        ):  # the extra comma may be in another column
            problem = f"has {pluralize(len(fields), 'field')} where the header has {len(header)}"
            return f"{problem}: a caption with commas needs quotes"
        caption_end = caption_column + extra_fields + 1
        caption = ",".join(fields[caption_column:caption_end]).strip()
        if len(caption) > 1 and caption[0] == caption[-1] == '"':  # the module csv does not see a quote after a space
            caption = caption[1:-1]
        fields = [*fields[:caption_column], caption, *fields[caption_end:]]
    return dict(zip_longest(header, fields))


def _first_column(row: Mapping[str, Any], names: tuple[str, ...], row_name: str, table: Path) -> Any:
    """Return the value of the first of these columns that a row has. Raises WanjaxError if the row has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise WanjaxError(f"{row_name} has no column {' or '.join(names)}: it has {', '.join(row)}")
