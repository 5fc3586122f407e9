# SPDX-License-Identifier: Apache-2.0
"""Metadata of a video, everything that shaped it, from any file that holds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import SafetensorsFile
from wanjax.errors import WanjaxError, reason
from wanjax.media.video import FRAME, read_metadata, why_without_settings
from wanjax.stores.paths import AnyPath, local_copy, missing_file, parse_path

CONFIG = "generation_config.json"
EMBEDDINGS = "stage1_embeddings.safetensors"
LATENTS = "stage2_latents.safetensors"
MADE_BY = {EMBEDDINGS: "wanjax encode PROMPT", LATENTS: "wanjax denoise"}
"""The files of the first two stages, and the commands that make them."""
DIGESTS = "digests"  # the entry of metadata with the digest of each file and folder that it names, by its path
TABLE = "cache"  # the name in it of the table that a step cache used
OF_SCRIPTS = {"model_id": "model", "num_inference_steps": "steps", "num_frames": "frames"}
"""Names of settings in a generation_config.json that the scripts before wanjax wrote."""


def find_metadata(path: str | AnyPath) -> dict[str, Any]:
    """Return the metadata in a video, a picture, a stage's file, generation_config.json, or a folder with one of these.

    A file may be in a store.

    The file of the first stage has those settings alone that shaped it. Raises WanjaxError where there is no such file,
    or it holds no record.
    """
    if not isinstance(file := parse_path(path), Path):
        with local_copy(file) as copy:
            return find_metadata(copy)
    if file.is_dir():
        file = next((file / name for name in (CONFIG, FRAME.format(0)) if (file / name).is_file()), file)
    if not file.exists():
        raise WanjaxError(missing_file(file))
    metadata: Any = None
    if file.suffix.lower() == ".safetensors":
        metadata = json_entry(SafetensorsFile(file), "settings")
    elif file.suffix.lower() == ".json":
        metadata = _json(file)
    elif file.is_file():
        metadata = read_metadata(file)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("prompt"), str):
        raise WanjaxError(f"{file} holds no settings of a video: {why_without_settings(file)}")
    return _by_our_names(metadata)


def load_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in generation_config.json; raise WanjaxError if the file is missing or no JSON object."""
    file = folder / CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WanjaxError(f"{folder} holds no {CONFIG}, which `wanjax encode` writes: run it first") from error
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{file} cannot be read, {reason(error)}: run `wanjax encode` again") from error
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} is not a JSON object: run `wanjax encode` again")
    return _by_our_names(settings)


def load_stage_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that a stage before left; raise WanjaxError for a video of windows, which has no stages."""
    left = load_settings(folder)
    if left.get("windows", 1) != 1:
        message = f"{folder} has a video of {left['windows']} windows, each of which goes through all stages"
        raise WanjaxError(f"{message}: `wanjax generate --from {folder} --dir {folder}` makes it")
    return left


def stage_file(folder: Path, name: str) -> Path:
    """Return the path of a stage's file in a folder; raise WanjaxError where it is missing."""
    if not (folder / name).is_file():
        raise WanjaxError(f"{folder} holds no {name}: run `{MADE_BY[name]} --dir {folder}` first")
    return folder / name


def _by_our_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings by their names here."""
    return {OF_SCRIPTS.get(name) or name: value for name, value in settings.items()}


def file_digests(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests in a video's metadata by path; empty if the entry is not a table."""
    digests = metadata.get(DIGESTS)
    return dict(digests) if isinstance(digests, Mapping) else {}


def json_entry(file: SafetensorsFile, name: str) -> dict[str, Any]:
    """Return the JSON object under a name of a file's metadata, empty if there is none.

    Raises WanjaxError where something else is there.
    """
    try:
        return dict(json.loads(file.metadata.get(name, "{}")))
    except (ValueError, TypeError) as error:
        raise WanjaxError(f"{file.path} has {name!r} in its metadata that is no JSON object: write it again") from error


def _json(file: Path) -> Any:
    """Return the contents of a JSON file; None where it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
