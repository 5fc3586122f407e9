# SPDX-License-Identifier: Apache-2.0
"""Reads the record of a video, which says everything that shaped it, from any file that keeps one."""

import json
from pathlib import Path
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.media.stage_files import CONFIG, present_names, settings_of
from wanjax.media.videos import FRAME, read_metadata


def read_record(path: str | Path) -> dict[str, Any]:
    """Returns the record in a video, a picture, a stage's file, generation_config.json, or a folder with one of these.

    Settings have their present names. The file of the first stage has those alone that shaped it. Raises WanjaxError
    where there is no such file, or it holds no record.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = next((file / name for name in (CONFIG, FRAME.format(0)) if (file / name).is_file()), file)
    if not file.exists():
        raise WanjaxError(f"there is no file {file}")
    found: Any = None
    if file.suffix.lower() == ".safetensors":
        found = settings_of(file)
    elif file.suffix.lower() == ".json":
        found = _json(file)
    elif file.is_file():
        found = read_metadata(file)
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise WanjaxError(f"{file} holds no settings of a video: wanjax did not write it, or something rewrote it")
    return present_names(found)


def _json(file: Path) -> Any:
    """Returns the contents of a JSON file; None where it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
