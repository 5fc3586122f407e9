# SPDX-License-Identifier: Apache-2.0
"""Data sets of clips and pictures with captions: a folder with a text file beside each, or a table.

A table is `metadata.csv` or `metadata.jsonl` in the folder, or any file of these kinds, with the columns in use
elsewhere. What cannot be used is left out, and told in one sentence each.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanjax.errors import WanjaxError, reason
from wanjax.media.pictures import in_order, is_picture_name
from wanjax.media.videos import FILMS

TABLES = ("metadata.csv", "metadata.jsonl")
FILE_COLUMNS = ("file_name", "video", "video_path", "image", "image_path", "file", "path")
CAPTION_COLUMNS = ("text", "prompt", "caption")
REPEATS, PRESERVE = "repeats", "preserve"
YES, NO = ("true", "yes", "1"), ("false", "no", "0", "")
FILM_SUFFIXES = (*FILMS, ".avi", ".mkv", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv")
KEPT = ".wanjax"  # the folder of what was made from the data, beside them


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

    `others` is the number of files that are hidden, or neither clips, pictures nor captions.
    """

    folder: Path
    examples: list[Example] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: int = 0


def list_data(data: str | Path) -> Listing:
    """Lists a data set without opening its clips.

    Raises WanjaxError where there is no such folder or table, or where nothing in it can be used.
    """
    data = Path(data).expanduser()
    if data.is_dir():
        tables = [data / name for name in TABLES if (data / name).is_file()]
        listing = _of_table(tables[0]) if tables else _of_folder(data)
    elif data.is_file():
        listing = _of_table(data)
    else:
        raise WanjaxError(f"there is no folder or table {data}: a folder of clips with captions is needed")
    if not listing.examples:
        why = f": {listing.left_out[0]}" if listing.left_out else ""
        raise WanjaxError(f"{data} holds no clip or picture with a caption{why or ', each with a .txt of its name'}")
    return listing


def _of_folder(folder: Path) -> Listing:
    """Lists the clips and pictures of a folder and the folders in it, each with a text file of the same name."""
    found = Listing(folder)
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)  # noqa: E731
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != KEPT and path.is_file()]
    files = [path for path in in_order(paths) if not hidden(path)]
    media = [path for path in files if path.suffix.lower() in FILM_SUFFIXES or is_picture_name(path)]
    captions = {path for path in files if path.suffix.lower() == ".txt"}
    found.others = len(paths) - len(media) - len(captions)
    for path in media:
        caption = path.with_suffix(".txt")
        if caption in captions:
            try:
                _add(found, path, caption.read_text(encoding="utf-8-sig").strip())
            except (OSError, UnicodeDecodeError) as error:
                found.left_out.append(f"{caption.name} cannot be read: {reason(error)}")
        else:
            found.left_out.append(f"{path.name} has no caption: {caption.name} beside it would do")
    stems = {path.with_suffix("") for path in media}
    for caption in sorted(captions):
        if caption.with_suffix("") not in stems:
            found.left_out.append(f"{caption.name} is a caption without a clip or a picture of its name")
    return found


def _of_table(table: Path) -> Listing:
    """Lists the rows of a table, whose files are relative to its folder."""
    found = Listing(table.parent)
    for number, row in enumerate(_rows(table), 1):
        where = f"row {number} of {table.name}"
        file = _entry(row, FILE_COLUMNS, where, table)
        caption = _entry(row, CAPTION_COLUMNS, where, table)
        path = table.parent / str(file)
        if not file or not path.is_file():
            found.left_out.append(f"{where} names {file or 'no file'}, which is not there")
            continue
        try:
            repeats = int(row.get(REPEATS) or 1)
        except (TypeError, ValueError):
            repeats = 0
        if repeats < 1:
            raise WanjaxError(f"{where} has repeats {row[REPEATS]!r}: a whole number from 1 on is right")
        _add(found, path, str(caption or "").strip(), repeats, _preserves(row, where))
    return found


def _preserves(row: Mapping[str, Any], where: str) -> bool:
    """Tells whether a row says that its clip is one to keep; raises WanjaxError for another word than yes or no."""
    told = row.get(PRESERVE)
    word = "" if told is None else str(told).strip().lower()
    if word not in (*YES, *NO):
        raise WanjaxError(f"{where} has preserve {told!r}: true or false is right")
    return word in YES


def _add(found: Listing, path: Path, caption: str, repeats: int = 1, preserve: bool = False) -> None:
    if caption:
        found.examples.append(Example(path, caption, repeats, preserve))
    else:
        found.left_out.append(f"{path.name} has an empty caption")


def _rows(table: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a CSV or JSONL table; raises WanjaxError where one cannot be read."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            if table.suffix.lower() == ".csv":
                yield from csv.DictReader(file)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, Mapping):
                        raise WanjaxError(f"line {number} of {table} is no JSON object with a file and a caption")
                    yield row
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, WanjaxError):
            raise
        raise WanjaxError(f"{table} cannot be read as a table of clips: {reason(error)}") from error


def _entry(row: Mapping[str, Any], names: tuple[str, ...], where: str, table: Path) -> Any:
    """Returns the first of these columns that a row has; raises WanjaxError where it has none."""
    for name in names:
        if name in row:
            return row[name]
    raise WanjaxError(f"{table.name} has no column {' or '.join(names)}, as {where} shows: it has {', '.join(row)}")
