# SPDX-License-Identifier: Apache-2.0
"""`generate --from`: a video made again from its record."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanjax.cli.options import is_typed
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.records import read_record

FILES = {
    "image": "--image",
    "last_image": "--last-image",
    "video": "--video",
    "mask": "--mask",
    "references": "--reference",
    "noise": "--noise",
}
"""Entries of a record that say what a video was made from, and the options that give another."""
DIGEST = re.compile(r"sha256 [0-9a-f]+$")  # of what was given as an array
HERE = ("version", "devices")


def record_of(file: str) -> dict[str, Any]:
    """Returns the record of a video that is to be made again; raises WanjaxError where it does not name its model."""
    record = read_record(file)
    if not isinstance(record.get("model"), str):
        raise WanjaxError(f"{file} names no model: the generation_config.json beside a stage's file does")
    return record


def completed(given: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `generate`, with those parts of a record for which there is no option.

    Raises WanjaxError where something that the video was made from is gone, and no other is given.
    """
    for name, option in FILES.items():
        if record.get(name) and _plain(given.get(name)) == record[name]:
            _check_there(option, record[name])
    if given["model"] != record["model"]:
        return dict(given) if is_typed("scheduler") else {**given, "scheduler": None}  # the record's is the model's own
    found: dict[str, Any] = {k: record[k] for k in ("revision", "param_dtype") if isinstance(record.get(k), str)}
    if given.get("tile") and isinstance(record.get("tiling"), Mapping):
        found["tiling"] = _tiling(record["tiling"])
    return {**given, **found, "remade": record}


def differences(record: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Returns a sentence on what may change a video's last digits: another version or other devices."""
    if all(record.get(name) == here.get(name) for name in HERE):
        return None
    version, devices = (record.get(name, "unknown") for name in HERE)
    return f"the video was made by wanjax {version} on {devices}: here it may differ in its last digits"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_there(option: str, recorded: Any) -> None:
    """Raises WanjaxError where a file of a record is gone, or only the digest of an array is kept."""
    for source in recorded if isinstance(recorded, list) else [recorded]:
        if DIGEST.search(str(source)) and not Path(source).exists():
            why = f"an array, {source}, of which no more is kept"
        elif not Path(source).expanduser().exists():
            why = f"{source}, which is gone"
        else:
            continue
        raise WanjaxError(f"the video was made with {option} from {why}: {option} FILE gives another")


def _tiling(recorded: Mapping[str, Any]) -> Tiling:
    """Returns the tiles of a record; raises WanjaxError unless it gives their size and stride."""
    if recorded.keys() != {*Tiling._fields} or not all(type(x) is int and x > 0 for x in recorded.values()):
        raise WanjaxError(f"the record gives the tiling as {dict(recorded)} where a size and a stride are right")
    return Tiling(**recorded)
