# SPDX-License-Identifier: Apache-2.0
"""Read the metadata of a video, all settings that shaped it, from any file that holds them."""

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
"""The command that writes each stage's file."""
DIGESTS = "digests"  # the entry of metadata that maps the path of each input to the digest of its contents
TABLE = "cache"  # the key in `DIGESTS` of the table that a step cache used
LEGACY_NAMES = {"model_id": "model", "num_inference_steps": "steps", "num_frames": "frames"}
"""Names of settings in a generation_config.json that predates wanjax, and today's names."""


def find_metadata(path: str | AnyPath) -> dict[str, Any]:
    """Return the metadata in a video, a picture, a stage's file, generation_config.json, or a folder with one of these.

    The path may be the URL of a store. The file of the first stage holds only the settings that shape the conditioning.
    Raises WanjaxError if the file is missing or holds no metadata.
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
        metadata = _read_json(file)
    elif file.is_file():
        metadata = read_metadata(file)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("prompt"), str):
        raise WanjaxError(f"{file} holds no settings of a video: {why_without_settings(file)}")
    return _rename_legacy(metadata)


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
    return _rename_legacy(settings)


def load_stage_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that an earlier stage wrote; raise WanjaxError for a video of several windows."""
    settings = load_settings(folder)
    if settings.get("windows", 1) != 1:
        message = f"{folder} has a video of {settings['windows']} windows, whose stages cannot run separately"
        raise WanjaxError(f"{message}: run `wanjax generate --from {folder} --dir {folder}`")
    return settings


def stage_file(folder: Path, name: str) -> Path:
    """Return the path of a stage's file in a folder; raise WanjaxError if it is missing."""
    if not (folder / name).is_file():
        raise WanjaxError(f"{folder} holds no {name}: run `{MADE_BY[name]} --dir {folder}` first")
    return folder / name


def _rename_legacy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with legacy names replaced by today's."""
    return {LEGACY_NAMES.get(name) or name: value for name, value in settings.items()}


def file_digests(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests in a video's metadata by path; empty if the metadata have none."""
    digests = metadata.get(DIGESTS)
    return dict(digests) if isinstance(digests, Mapping) else {}


def json_entry(file: SafetensorsFile, name: str) -> dict[str, Any]:
    """Parse the JSON object under a name of a file's metadata; empty if the name is missing.

    Raises WanjaxError if the entry is not a JSON object.
    """
    try:
        return dict(json.loads(file.metadata.get(name, "{}")))
    except (ValueError, TypeError) as error:
        raise WanjaxError(
            f"{name!r} in the metadata of {file.path} is not a JSON object: write the file again"
        ) from error


def _read_json(file: Path) -> Any:
    """Return the contents of a JSON file, or None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
