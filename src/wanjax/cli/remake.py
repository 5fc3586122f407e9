# SPDX-License-Identifier: Apache-2.0
"""`generate --from`: a video made again from its record."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wanjax import registry
from wanjax.cli.defaults import files_recorded
from wanjax.cli.options import is_typed
from wanjax.cli.parsed import PipelineOptions
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.metadata import TABLE, file_digests
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.video_metadata import digest_of, paths_of
from wanjax.stores.paths import AnyPath

DIGEST = re.compile(r"sha256 [0-9a-f]+$")  # of what was given as an array


def complete_from_record(
    request: VideoRequest, options: PipelineOptions, record: Mapping[str, Any]
) -> tuple[VideoRequest, PipelineOptions, Mapping[str, Any] | None]:
    """Return a request and options with those parts of a record for which there is no option.

    Returns:
        The request, the options, and the record, None where another model makes the video.

    Raises:
        WanjaxError: A file that the video was made from is gone or another one, and none is given.
    """
    request = with_original_prompt(request, record)
    check_files(record, parameters_from_record(files_recorded()))
    if options.model != record["model"]:  # its own solver is the record's
        return request if is_typed("scheduler") else replace(request, scheduler=None), options, None
    loading_options: dict[str, Any] = {
        k: record[k] for k in ("revision", "param_dtype") if isinstance(record.get(k), str)
    }
    if options.tile and isinstance(record.get("tiling"), Mapping):
        loading_options["tiling"] = _tiling(record["tiling"])
    return request, options._replace(**loading_options), record


def parameters_from_record(names: Iterable[str]) -> list[str]:
    """Return those of some parameters of the command that runs whose values come from a record."""
    values = click.get_current_context().params
    return [name for name in names if values.get(name) and not is_typed(name)]


def with_original_prompt(request: VideoRequest, record: Mapping[str, Any]) -> VideoRequest:
    """Return a request with what was asked for, where its prompt is that of a record which tells it."""
    original = record.get("original_prompt")
    if request.settings.get("prompt") == record.get("prompt") and isinstance(original, str) and original:
        return request.updated({"original_prompt": original})
    return request


def differences(record: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return a sentence on what may change a video's last digits: another version or other devices."""
    version, devices = (record.get(name, "unknown") for name in ("version", "devices"))
    if (version, devices) == (current["version"], current["devices"]):
        return None
    return f"the video was made by wanjax {version} on {devices}: here it may differ in its last digits"


def check_files(record: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise WanjaxError where an entry of a record names a file or folder that is gone, or not the one it was.

    A record may be a stranger's: what it names is read only where the contents have the digest that it tells.
    """
    digests = file_digests(record)
    for name in names:
        if name == "model" and (model := str(record.get(name))) in registry.presets() and model not in digests:
            continue
        paths = paths_of(record, [name])
        for path in [*paths, *_companions(paths, digests)] if name == "model" else paths:
            current = isinstance(path, Path) and (path.is_absolute() or os.path.exists(path))
            if not current and name in ("model", "lora") and not _is_name_alone(path):  # on the hub, or in a store
                continue
            if why := _changed(path, digests.get(str(path))):
                raise WanjaxError(
                    f"the {name.replace('_', ' ')} of the video was {why}: {files_recorded()[name]} gives one"
                )


def _changed(path: AnyPath, recorded_digest: Any) -> str | None:
    """Return a file or folder and why it is not the one of the digest that is told; None where it is."""
    if not isinstance(path, Path):
        return f"{path}, which is no file here"
    if not os.path.exists(path):
        is_array = DIGEST.search(str(path))
        if not is_array and _is_name_alone(path):
            return f"{path}, a file or folder of the server that made it, of which the record has the name alone"
        return f"an array, {path}, of which no more is kept" if is_array else f"{path}, which is gone"
    if recorded_digest is None:
        return f"{path}, of whose contents the record has no digest"
    return f"{path}, whose contents are others now" if recorded_digest != digest_of(path) else None


def _is_name_alone(path: AnyPath) -> bool:
    """Tell whether a record has no more than a file's name, as that of a server's video; on the hub names have more."""
    return isinstance(path, Path) and len(path.parts) == 1 and not path.is_absolute()


def _companions(paths: Iterable[AnyPath], digests: Mapping[str, Any]) -> list[Path]:
    """Return the files that belong to those of a model and of which there are digests."""
    files = [path for path in paths if isinstance(path, Path)]
    others = [path.with_name(name) for path in files for name in registry.companion_files(path.name)]
    return [path for path in others if str(path) in digests]


def check_loaded(record: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise WanjaxError where a LoRA on the hub, or the table of a step cache, is another one than a record tells.

    `current` is the record of the video as it would be made now.
    """
    recorded, digests = file_digests(record), file_digests(current)
    entries = [("lora", str(path)) for path in paths_of(record, ["lora"])] + [(TABLE, TABLE)]
    for option, name in entries:
        if not is_typed(option) and name in recorded and name in digests and recorded[name] != digests[name]:
            subject = "the table of its cache" if option == TABLE else name
            raise WanjaxError(f"the video was made with {subject}, which is another one now: --{option} gives one")


def _tiling(recorded: Mapping[str, Any]) -> Tiling:
    """Return the tiles of a record; raise WanjaxError unless it gives their size and stride."""
    pairs: dict[str, Any] = dict(recorded)
    for name, x in recorded.items():
        if isinstance(x, list) and len(x) == 2:  # a pair, in JSON
            pairs[name] = tuple(x)
    values = [value for x in pairs.values() for value in (x if isinstance(x, tuple) else (x,))]
    if recorded.keys() != {*Tiling._fields} or not all(type(x) is int and x > 0 for x in values):
        raise WanjaxError(f"the record gives the tiling as {dict(recorded)}: write a size and a stride")
    return Tiling(**pairs)
