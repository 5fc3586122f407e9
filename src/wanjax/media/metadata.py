# SPDX-License-Identifier: Apache-2.0
"""Read the metadata of a video from any file that contains metadata. The metadata has all settings that shaped the
video."""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import SafetensorsFile
from wanjax.errors import WanjaxError, reason
from wanjax.figures import pluralize
from wanjax.media.video import FRAME_FILE, VIDEO_ENCODERS, read_metadata, reason_without_settings
from wanjax.stores.paths import AnyPath, local_copy, missing_file, parse_path

CONFIG = "generation_config.json"
EMBEDDINGS_FILE = "stage1_embeddings.safetensors"
LATENTS_FILE = "stage2_latents.safetensors"
STAGE_COMMANDS = {EMBEDDINGS_FILE: "wanjax encode PROMPT", LATENTS_FILE: "wanjax denoise"}
"""The command that writes each stage's file."""
DIGESTS_KEY = "digests"  # the entry of metadata that maps the path of each input to the digest of its contents
CACHE_TABLE_KEY = "cache"  # the key in `DIGESTS_KEY` of the table that a step cache used
LEGACY_NAMES = {"model_id": "model", "num_inference_steps": "steps", "num_frames": "frames"}
"""Names of settings in a generation_config.json that predates wanjax, and today's names."""


def find_metadata(path: str | AnyPath) -> dict[str, Any]:
    """Return the metadata in a video, a picture, a stage's file, generation_config.json, or a folder with one of these.

    The path may be the URL of a store. The file of the first stage contains only the settings that shape the
    conditioning. Raises WanjaxError if the file is missing or contains no metadata.
    """
    if not isinstance(file := parse_path(path), Path):
        with local_copy(file) as copy:
            return find_metadata(copy)
    if file.is_dir():
        file = next((file / name for name in (CONFIG, FRAME_FILE.format(0)) if (file / name).is_file()), file)
    if not file.exists():
        raise WanjaxError(missing_file(file))
    if not (file.is_file() or file.is_dir()):  # refused, because reading a device may never end
        raise WanjaxError(f"{file} is neither a file nor a folder: give a video, a picture or a stage's file")
    if file.is_dir():
        raise WanjaxError(_folder_without_settings(file))
    metadata: Any = None
    if file.suffix.lower() == ".safetensors":
        metadata = json_entry(SafetensorsFile(file), "settings")
    elif file.suffix.lower() == ".json":
        metadata = _read_json(file)
    else:
        metadata = read_metadata(file)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("prompt"), str):
        if file.name == CONFIG:  # a checkpoint's default settings
            raise WanjaxError(_folder_without_settings(file.parent))
        raise WanjaxError(f"{file} contains no settings of a video: {reason_without_settings(file)}")
    return _rename_legacy(metadata)


def _folder_without_settings(folder: Path) -> str:
    """Format the message that a folder contains neither a stage's files nor the frames of a video, with advice."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        return f"the folder {folder} cannot be read, {reason(error)}: change its permissions, or give a video"
    suffixes = (*VIDEO_ENCODERS, ".gif", ".webp")
    videos = [name for name in names if Path(name).suffix.lower() in suffixes]
    if not videos:
        if (folder / "transformer").is_dir():
            return f"{folder} is a checkpoint: `{shlex.join(['wanjax', 'models', str(folder)])}` describes it"
        inner_videos = (path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in suffixes)
        if (video := next(inner_videos, None)) is not None:  # for example in the folder of a server
            return f"the folder {folder} contains folders of videos: give a video, such as {video}"
        advice = "give a video, a folder of its frames, or a stage's folder"
        if any(name.endswith(".json") for name in names):  # a checkpoint's folder has such files
            advice += f"; if it is a checkpoint, `{shlex.join(['wanjax', 'models', str(folder)])}` describes it"
        return f"the folder {folder} contains no video: {advice}"
    video = os.path.join(folder, videos[0])  # "./-a.mp4" in ".", because a command would read "-a.mp4" as an option
    advice = f"give one of them, such as {video}" if len(videos) > 1 else f"give {video}"
    return f"{folder} is a folder that contains {pluralize(len(videos), 'video')}: {advice}"


def load_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in generation_config.json. Raises WanjaxError if the file is missing or not a JSON object."""
    file = folder / CONFIG
    remedy = f"run `{shlex.join(['wanjax', 'encode', 'PROMPT', '--dir', str(folder), '--force'])}`"  # writes it anew
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        problem = f"{folder} contains no {CONFIG}" if folder.exists() else f"there is no folder {folder}"
        if not any((folder / name).exists() for name in STAGE_COMMANDS):
            first_command = shlex.join(["wanjax", "encode", "PROMPT", "--dir", str(folder)])
            remedy = f"run `{first_command}` first, or give the folder of another video"
        raise WanjaxError(f"{problem}: {remedy}") from error
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{file} cannot be read, {reason(error)}: {remedy}") from error
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} is not a JSON object: {remedy}")
    return _rename_legacy(settings)


def load_stage_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that an earlier stage wrote. Raises WanjaxError for a video of several windows."""
    settings = load_settings(folder)
    if settings.get("windows", 1) != 1:
        message = f"{folder} has a video of {settings['windows']} windows, whose stages cannot run separately"
        raise WanjaxError(f"{message}: run `wanjax generate --from {folder} --dir {folder}`")
    return settings


def stage_file(folder: Path, name: str) -> Path:
    """Return the path of a stage's file in a folder. Raises WanjaxError if the file is missing."""
    if not (folder / name).is_file():
        raise WanjaxError(f"{folder} contains no {name}: run `{STAGE_COMMANDS[name]} --dir {folder}` first")
    return folder / name


def _rename_legacy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with legacy names replaced by today's."""
    return {LEGACY_NAMES.get(name) or name: value for name, value in settings.items()}


def file_digests(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests in a video's metadata by path. The result is empty if the metadata has no digests."""
    digests = metadata.get(DIGESTS_KEY)
    return dict(digests) if isinstance(digests, Mapping) else {}


def json_entry(file: SafetensorsFile, name: str) -> dict[str, Any]:
    """Parse the JSON object under a name of a file's metadata. If the name is missing, return an empty object.

    Raises WanjaxError if the entry is not a JSON object.
    """
    try:
        return dict(json.loads(file.metadata.get(name, "{}")))
    except (ValueError, TypeError) as error:
        raise WanjaxError(
            f"{name!r} in the metadata of {file.path} is not a JSON object: write the file again"
        ) from error


def _read_json(file: Path) -> Any:
    """Return the contents of a JSON file. Raises WanjaxError if the file cannot be read as JSON."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        return json.loads(text) if text.strip() else None
    except (OSError, ValueError, RecursionError) as error:
        raise WanjaxError(
            f"{file} contains no settings of a video: it is not valid JSON, {reason(error)}; get a complete copy"
        ) from error
