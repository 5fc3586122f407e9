# SPDX-License-Identifier: Apache-2.0
"""The metadata of a video: all inputs and options that determine it, as JSON."""

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from wanjax.checkpoints.files import content_digest
from wanjax.checkpoints.lora_source import PEFT_CONFIG, Lora
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.metadata import DIGESTS_KEY
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner
from wanjax.stores.paths import URL_PATTERN, AnyPath, RemotePath, full_name

VERSION = version("wanjax")


def file_entry_names() -> tuple[str, ...]:
    """Return the names of metadata entries that may hold files and folders."""
    return (*INPUT_SPECS, "noise", "lora", "decoder", "model")


def make_metadata(
    settings: Settings,
    sources: Mapping[str, Any],
    *,
    loaded: Mapping[str, Any],
    scheduler: Scheduler,
    partitioner: Partitioner,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
    digests: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build a video's metadata: settings, scheduler, devices, version, and all optional values that are not None.

    Args:
        settings: The settings of the video.
        sources: Images, clips and noise by name.
        loaded: The options of `wanjax.load`, with digests of the loaded files.
        scheduler: The solver.
        partitioner: The mesh.
        tiling: The tiling, if any.
        batch_guidance: Whether both prompts of a step run as one batch.
        digests: The digests of inputs without a local path.
    """
    metadata = settings.to_json() | {"scheduler": name_of(scheduler)} | dict(loaded)
    metadata |= {name: source_to_json(source) for name, source in sources.items() if source is not None}
    if not partitioner.is_single_device:
        metadata |= {"mesh": str(partitioner), "rules": partitioner.rules_name}
    if tiling is not None:
        metadata |= {"tiling": tiling._asdict()}
    if batch_guidance:
        metadata |= {"batch_guidance": True}
    if file_digests := {
        **loaded.get(DIGESTS_KEY, {}),
        **(digests or {}),
        **digests_by_path(paths_of(metadata, sources)),
    }:
        metadata |= {DIGESTS_KEY: file_digests}
    return metadata | {"devices": devices_of(partitioner), "version": VERSION}


def paths_of(metadata: Mapping[str, Any], names: Iterable[str] | None = None) -> list[AnyPath]:
    """List the paths in metadata entries, including paths that do not exist."""
    entries = [
        (name, metadata[name]) for name in (file_entry_names() if names is None else names) if metadata.get(name)
    ]
    items = [(name, item) for name, value in entries for item in (value if isinstance(value, list) else [value])]
    texts = [Lora.parse(text).file if name == "lora" else text for name, text in items if isinstance(text, str)]
    return [
        RemotePath(*match.groups()) if (match := URL_PATTERN.fullmatch(text)) else Path(text).expanduser()
        for text in texts
    ]


def digests_by_path(paths: Iterable[AnyPath]) -> dict[str, str]:
    """Compute the digests of files and folders by path; skip paths that are missing or unreadable."""
    digests = {str(path): digest_of(path) for path in paths if isinstance(path, Path)}
    return {path: digest for path, digest in digests.items() if digest is not None}


def digest_of(path: Path) -> str | None:
    """Compute the digest of a file or folder for metadata; for a LoRA it includes the config in the same folder."""
    digest, lora_config = content_digest(path), path.with_name(PEFT_CONFIG)
    if digest is None or not lora_config.is_file():
        return digest
    return hashlib.sha256(f"{digest} {content_digest(lora_config)}".encode()).hexdigest()


def devices_of(partitioner: Partitioner) -> str:
    """Describe the number and the kind of a mesh's devices, such as "8 x TPU v5e"."""
    return f"{partitioner.mesh.size} x {partitioner.device.device_kind}"


def paths_or_array(source: Any, array: Any) -> Any:
    """Return a source unchanged if it consists of paths; otherwise return the array that was read from it."""
    is_path_list = isinstance(source, list | tuple) and all(isinstance(item, str | Path) for item in source)
    return source if is_path_list or isinstance(source, str | Path) else array


def source_to_json(source: Any) -> Any:
    """Describe an image, clip or noise as JSON: a file by its full path or URL, an array by shape and digest."""
    if isinstance(source, str | Path | RemotePath):
        return full_name(source)
    if isinstance(source, list | tuple):
        return [source_to_json(item) for item in source]
    if isinstance(source, Mapping):
        return {name: source_to_json(item) for name, item in source.items()}
    array = np.asarray(source)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype} {list(array.shape)}, sha256 {digest}"
