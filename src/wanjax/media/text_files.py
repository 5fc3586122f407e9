# SPDX-License-Identifier: Apache-2.0
"""Reads texts that users wrote, with whichever editor: in UTF-8, or in UTF-16 where a mark says so."""

import re
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from wanjax.errors import reason

CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
LONGEST = 40  # characters of a prompt in a name


def read_text(file: Path, errors: str = "strict") -> str:
    """Return the text in a file; raise OSError, and ValueError where it is none."""
    return decoded(file.read_bytes(), errors)


def decoded(data: bytes, errors: str = "strict") -> str:
    """Return the text in bytes, without a mark, its lines ended by one character; raise ValueError where it is none.

    `errors` is that of `bytes.decode`.
    """
    marked = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        text = data.decode("utf-16") if marked else data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{reason(error)}: save it as text in UTF-8") from error
    if control := CONTROLS.search(text):  # as in UTF-16 without a mark, UTF-32, and the older encodings of Japanese
        raise ValueError(f"it has the character {control[0]!r}, which is in no text: save it as text in UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def trimmed(text: str) -> str:
    """Return a text without space and marks around it; nothing of one in which nothing can be seen."""
    return text.strip().strip("\ufeff").strip() if any(map(is_seen, text)) else ""


def is_seen(character: str) -> bool:
    """Return whether a character leaves a trace on paper."""
    return character.isprintable() and not character.isspace()


def slug(prompt: str) -> str:
    """Return the beginning of a prompt as a part of a file's name: its letters and digits, joined by dashes."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", prompt).casefold())
    text = "-".join(words)
    if len(text) > LONGEST:
        whole = text[: LONGEST + 1].rpartition("-")[0]
        text = whole or text[:LONGEST]
    return text or "video"
