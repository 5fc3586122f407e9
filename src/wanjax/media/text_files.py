# SPDX-License-Identifier: Apache-2.0
"""Read text files that users wrote with any editor: UTF-8, or UTF-16 with a byte order mark."""

import re
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from wanjax.errors import reason

CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
BINARY_START = re.compile(
    rb"""
    \x89PNG | \xff\xd8\xff | GIF8 | RIFF | \x1a\x45\xdf\xa3 | ....ftyp | ....moov | PK\x03\x04 | \x1f\x8b
    """,
    re.DOTALL | re.VERBOSE,
)  # matches PNG, JPEG, GIF, WebP and AVI, WebM, MP4 and MOV, zip, gzip
MAX_SLUG = 40  # characters


def read_text(file: Path, errors: str = "strict") -> str:
    """Return the text in a file. Raise OSError if the file cannot be read, and ValueError if it is not a text file."""
    return decode_text(file.read_bytes(), errors)


def decode_text(data: bytes, errors: str = "strict") -> str:
    """Decode text without its byte order mark, with \\n at the end of each line; raise ValueError if it is not text.

    `errors` is as in `bytes.decode`.
    """
    if BINARY_START.match(data):
        raise ValueError("it is a picture, a video or an archive, not text: give another file")
    is_utf16 = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        text = data.decode("utf-16") if is_utf16 else data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{reason(error)}: save it as text in UTF-8") from error
    # The file is UTF-16 without a mark, UTF-32, or in an older Japanese encoding
    if control := CONTROL_CHARACTERS.search(text):
        raise ValueError(f"it has the character {control[0]!r}, which is not text: save it as text in UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def strip_text(text: str) -> str:
    """Strip whitespace and byte order marks; return an empty string if no character is visible."""
    return text.strip().strip("\ufeff").strip() if any(map(is_visible, text)) else ""


def is_visible(character: str) -> bool:
    """Return whether a character is visible in print."""
    return character.isprintable() and not character.isspace()


def slug(prompt: str) -> str:
    """Return the start of a prompt for a file name: the letters and digits, joined by dashes."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", prompt).casefold())
    text = "-".join(words)
    if len(text) > MAX_SLUG:
        whole_words = text[: MAX_SLUG + 1].rpartition("-")[0]
        text = whole_words or text[:MAX_SLUG]
    return text or "video"
