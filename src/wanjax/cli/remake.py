# SPDX-License-Identifier: Apache-2.0
"""`generate --from`: make a video again from its metadata."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wanjax import registry
from wanjax.checkpoints.files import SUFFIXES
from wanjax.cli.defaults import options_of_file_entries
from wanjax.cli.options import on_command_line
from wanjax.cli.parsed import PipelineOptions
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.metadata import CACHE_TABLE_KEY, file_digests
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.video_metadata import digest_of, paths_of
from wanjax.stores.paths import AnyPath

ARRAY_DIGEST = re.compile(r"sha256 [0-9a-f]+$")  # matches the entry of an input that was an array


def complete_from_metadata(
    request: VideoRequest, options: PipelineOptions, metadata: Mapping[str, Any]
) -> tuple[VideoRequest, PipelineOptions, Mapping[str, Any] | None]:
    """Add the entries of metadata without an option to a request and the options.

    Returns:
        The request, the options, and the metadata. The metadata is None if a different model makes the video.

    Raises:
        WanjaxError: A file from which the video was made is missing or has changed, and no option replaces it.
    """
    request = with_original_prompt(request, metadata)
    check_files(metadata, parameters_from_metadata(options_of_file_entries()))
    if options.model != metadata["model"]:  # the solver in the metadata belongs to the model
        options = options if on_command_line("precision") else options._replace(precision=None)
        return request if on_command_line("scheduler") else replace(request, scheduler=None), options, None
    loading_options: dict[str, Any] = {
        k: metadata[k] for k in ("revision", "param_dtype") if isinstance(metadata.get(k), str)
    }
    if options.tile and isinstance(metadata.get("tiling"), Mapping):
        loading_options["tiling"] = _tiling(metadata["tiling"])
    return request, options._replace(**loading_options), metadata


def parameters_from_metadata(names: Iterable[str]) -> list[str]:
    """Select the parameters of the running command whose values come from metadata."""
    values = click.get_current_context().params
    return [name for name in names if values.get(name) and not on_command_line(name)]


def with_original_prompt(request: VideoRequest, metadata: Mapping[str, Any]) -> VideoRequest:
    """Add the original prompt to a request whose prompt is the extended prompt of the metadata."""
    original = metadata.get("original_prompt")
    if request.settings.get("prompt") == metadata.get("prompt") and isinstance(original, str) and original:
        return request.updated({"original_prompt": original})
    return request


def version_note(metadata: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return a note that a different version or different devices may change the last digits of a video's values.
    Return None if version and devices are the same."""
    version, devices = (metadata.get(name, "unknown") for name in ("version", "devices"))
    if (version, devices) == (current["version"], current["devices"]):
        return None
    return f"the video was made by wanjax {version} on {devices}: here it may differ in its last digits"


def check_files(metadata: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise WanjaxError if a file or folder in the metadata is missing or has changed.

    Metadata may come from another user. A file is therefore used only if its digest equals the digest in the metadata.
    """
    digests = file_digests(metadata)
    for name in names:
        if name == "model" and (model := str(metadata.get(name))) in registry.presets() and model not in digests:
            continue
        paths = paths_of(metadata, [name])
        for path in [*paths, *_companions(metadata, digests)] if name == "model" else paths:
            is_local = isinstance(path, Path) and (path.is_absolute() or os.path.exists(path))
            # A file on the hub or in a store
            if not is_local and name in ("model", "lora") and not _is_bare_name(path):
                continue
            if change := _describe_change(path, digests.get(str(path))):
                raise WanjaxError(
                    f"the {name.replace('_', ' ')} of the video was {change}: give {options_of_file_entries()[name]}"
                )


def _describe_change(path: AnyPath, recorded_digest: Any) -> str | None:
    """Return the reason why a file or folder cannot be used: it is missing, or its digest differs. Return None if it is
    unchanged."""
    if not isinstance(path, Path):
        return f"{path}, which is not a file of this machine"
    if not os.path.exists(path):
        is_array = ARRAY_DIGEST.search(str(path))
        if not is_array and _is_bare_name(path):
            return f"{path}, a file of the server that made it, and the metadata has only its name"
        return f"an array, {path}, which was not saved" if is_array else f"{path}, which does not exist any more"
    if recorded_digest is None:
        return f"{path}, whose digest is missing in the metadata"
    return f"{path}, whose contents have changed" if recorded_digest != digest_of(path) else None


def _is_bare_name(path: AnyPath) -> bool:
    """Whether a path is only the name of a file, as in the metadata of a video that a server made."""
    return isinstance(path, Path) and len(path.parts) == 1 and not path.is_absolute()


def _companions(metadata: Mapping[str, Any], digests: Mapping[str, Any]) -> list[Path]:
    """List the files that belong to the model's file, such as the files of the other expert and of the text encoder.

    The metadata has their digests, but no entry with their paths.
    """
    folders = {
        os.path.normpath((file.parent / other).parent)
        for file in paths_of(metadata, ["model"])
        if isinstance(file, Path)
        for other in (file.name, *registry.companion_files(str(file)))
    }
    entries = set(map(str, paths_of(metadata)))
    paths = [Path(name) for name in digests if name not in entries]
    return [path for path in paths if path.suffix in SUFFIXES and os.path.normpath(path.parent) in folders]


def check_loaded(metadata: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise WanjaxError if a LoRA on the hub or the table of a step cache has changed since the video was made.
    `current` is the metadata that the video would have if it were made now.
    """
    recorded_digests, current_digests = file_digests(metadata), file_digests(current)
    entries = [("lora", str(path)) for path in paths_of(metadata, ["lora"])] + [(CACHE_TABLE_KEY, CACHE_TABLE_KEY)]
    for option, name in entries:
        if (
            not on_command_line(option)
            and name in recorded_digests
            and name in current_digests
            and recorded_digests[name] != current_digests[name]
        ):
            subject = "the table of its cache" if option == CACHE_TABLE_KEY else name
            raise WanjaxError(f"the video was made with {subject}, which has changed: give another --{option}")


def _tiling(entry: Mapping[str, Any]) -> Tiling:
    """Parse the tiling in the metadata. Raises WanjaxError unless it has a size and a stride."""
    pairs: dict[str, Any] = dict(entry)
    for name, value in entry.items():
        if isinstance(value, list) and len(value) == 2:  # JSON has a list for the pair
            pairs[name] = tuple(value)
    values = [item for value in pairs.values() for item in (value if isinstance(value, tuple) else (value,))]
    if entry.keys() != {*Tiling._fields} or not all(type(value) is int and value > 0 for value in values):
        raise WanjaxError(f"the metadata gives the tiling as {dict(entry)}: write a size and a stride")
    return Tiling(**pairs)
