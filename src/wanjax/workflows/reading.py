# SPDX-License-Identifier: Apache-2.0
"""Find the workflow in a file: JSON, or a video or picture that ComfyUI has written."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from wanjax.errors import WanjaxError, reason
from wanjax.figures import format_bytes
from wanjax.media.ffmpeg import container_tags, probe
from wanjax.media.inputs import CLIP_SUFFIXES
from wanjax.media.pictures import PICTURE_FORMATS
from wanjax.media.video import DECODE_ERRORS
from wanjax.workflows import PICTURE_SUFFIXES
from wanjax.workflows.evaluate import MediaSize
from wanjax.workflows.families import NODE_TYPES
from wanjax.workflows.graph import Graph, is_workflow, parse_graph

MAX_BYTES = 16 * 2**20  # the maximum bytes of a workflow's JSON; usual workflows have at most some hundred thousand
API_FORM, EDITOR_FORM = "prompt", "workflow"  # the names that ComfyUI gives to the two forms in a file's metadata
ROTATED_ORIENTATIONS = range(5, 9)  # orientations in EXIF that swap the sides of a picture
EXIF_PREFIX = re.compile(rf"({API_FORM}|{EDITOR_FORM}):\s*", re.IGNORECASE)  # the start of an entry in EXIF


class UnreadJsonError(WanjaxError):
    """JSON that is damaged, too large, or nested too deep. It may not be a workflow."""


def find_workflow(file: Path) -> Graph | None:
    """Return the graph of the workflow in a file, or None if the file has none.

    A file that ComfyUI made contains both forms. The graph then has the nodes of the API's form, which were executed,
    and the URLs of the editor's form.

    Args:
        file: A JSON file, a video or a picture.

    Raises:
        WanjaxError: The workflow is damaged or too large.
    """
    if not file.is_file():
        return None
    documents = {name: value for name, text in _texts(file).items() if is_workflow(value := _parse(file, text))}
    if not documents:
        return None
    try:
        graphs = {name: parse_graph(value, NODE_TYPES) for name, value in documents.items()}
    except WanjaxError as error:
        raise WanjaxError(f"{file}: {error}") from error
    graph = graphs.get(API_FORM) or graphs[EDITOR_FORM]
    addresses = {**graph.addresses, **(graphs[EDITOR_FORM].addresses if EDITOR_FORM in graphs else {})}
    return replace(graph, addresses=addresses)


def _texts(file: Path) -> dict[str, str]:
    """Return the JSON texts in a file's metadata, or the text of a JSON file, by the form of the workflow."""
    suffix = file.suffix.lower()
    if suffix == ".json":
        if (size := file.stat().st_size) > MAX_BYTES:
            raise _too_large(file, size)
        with suppress(OSError, UnicodeDecodeError):
            return {EDITOR_FORM: file.read_text(encoding="utf-8-sig")}
        return {}
    if suffix in CLIP_SUFFIXES:
        with suppress(OSError):
            return _from_tags(container_tags(file))
    if suffix in PICTURE_SUFFIXES:
        with suppress(*DECODE_ERRORS), Image.open(file, formats=("PNG", "WEBP")) as image:
            tags = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
            return _from_tags(tags | _from_exif(image.getexif()))
    return {}


def _from_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a workflow in a file's metadata. Some nodes write these entries as JSON in the comment."""
    texts = {name: tags[name] for name in (API_FORM, EDITOR_FORM) if name in tags}
    if not texts and len(tags.get("comment", "")) <= MAX_BYTES:
        with suppress(ValueError, RecursionError):
            entries = json.loads(tags.get("comment", ""))
            if isinstance(entries, Mapping):
                values = {name: entries[name] for name in (API_FORM, EDITOR_FORM) if name in entries}
                return {k: value if isinstance(value, str) else json.dumps(value) for k, value in values.items()}
    return texts


def _from_exif(exif: Mapping[int, Any]) -> dict[str, str]:
    """Return the entries of a workflow in the EXIF of a WebP picture. Each entry begins with its name."""
    entries = [(EXIF_PREFIX.match(value), value) for value in exif.values() if isinstance(value, str)]
    return {match[1].lower(): value[match.end() :].rstrip("\0") for match, value in entries if match}


def _parse(file: Path, text: str) -> Any:
    if len(text) > MAX_BYTES:
        raise _too_large(file, len(text))
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadJsonError(f"the workflow in {file} is damaged, it is nested too deep: save it again") from error
    except ValueError as error:
        if file.suffix.lower() != ".json" or not text.strip():  # the comment of a picture or a video may be any text
            return None
        raise UnreadJsonError(f"{file} is not valid JSON, {reason(error)}: get a complete copy") from error


def _too_large(file: Path, size: int) -> UnreadJsonError:
    return UnreadJsonError(
        f"{file} has {format_bytes(size)} of JSON, more than the {format_bytes(MAX_BYTES, base=1024)} that a workflow "
        "may have: save only the part that makes the video"
    )


def measure(file: Path) -> MediaSize | None:
    """Return the size of a picture or clip, or None if it cannot be read.

    Args:
        file: The file.
    """
    with suppress(*DECODE_ERRORS), Image.open(file, formats=PICTURE_FORMATS) as image:
        is_rotated = image.getexif().get(ExifTags.Base.Orientation) in ROTATED_ORIENTATIONS
        width, height = reversed(image.size) if is_rotated else image.size
        return MediaSize(width, height, getattr(image, "n_frames", 1), 1.0)
    with suppress(OSError):
        stream = probe(file)
        fps = stream.min_fps or 1.0
        if stream.pixels:
            return MediaSize(stream.width, stream.height, max(1, round((stream.duration or 0) * fps)), fps)
    return None
