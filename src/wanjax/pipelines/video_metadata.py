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
from wanjax.media.inputs import INPUTS
from wanjax.media.metadata import DIGESTS
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner
from wanjax.stores.paths import URL, AnyPath, RemotePath, full_name

VERSION = version("wanjax")


def source_names() -> tuple[str, ...]:
    """Return the entries of metadata that may name files and folders."""
    return (*INPUTS, "noise", "lora", "decoder", "model")


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
    """Build a video's metadata: settings, scheduler, devices, version, and the optional values that were given.

    `sources` are images, clips and noise by name; `loaded` are options of `wanjax.load`, with digests of the loaded
    files. `digests` are those of inputs without a local path.
    """
    metadata = settings.to_json() | {"scheduler": name_of(scheduler)} | dict(loaded)
    metadata |= {name: described(source) for name, source in sources.items() if source is not None}
    if not partitioner.single_device:
        metadata |= {"mesh": str(partitioner), "rules": partitioner.rules_name}
    if tiling is not None:
        metadata |= {"tiling": tiling._asdict()}
    if batch_guidance:
        metadata |= {"batch_guidance": True}
    if file_digests := {**loaded.get(DIGESTS, {}), **(digests or {}), **digests_of(paths_of(metadata, sources))}:
        metadata |= {DIGESTS: file_digests}
    return metadata | {"devices": devices_of(partitioner), "version": VERSION}


def paths_of(metadata: Mapping[str, Any], names: Iterable[str] | None = None) -> list[AnyPath]:
    """Return the paths that entries of metadata may name, whether they exist or not."""
    entries = [(name, metadata[name]) for name in (source_names() if names is None else names) if metadata.get(name)]
    each = [(name, one) for name, value in entries for one in (value if isinstance(value, list) else [value])]
    texts = [Lora.parse(text).file if name == "lora" else text for name, text in each if isinstance(text, str)]
    return [
        RemotePath(*match.groups()) if (match := URL.fullmatch(text)) else Path(text).expanduser() for text in texts
    ]


def digests_of(places: Iterable[AnyPath]) -> dict[str, str]:
    """Return the digests of files and folders by path, without those that are missing or unreadable."""
    digests = {str(path): digest_of(path) for path in places if isinstance(path, Path)}
    return {path: digest for path, digest in digests.items() if digest is not None}


def digest_of(path: Path) -> str | None:
    """Return the digest of a file or folder for metadata; for a LoRA it includes the config next to it."""
    digest, beside = content_digest(path), path.with_name(PEFT_CONFIG)
    if digest is None or not beside.is_file():
        return digest
    return hashlib.sha256(f"{digest} {content_digest(beside)}".encode()).hexdigest()


def devices_of(partitioner: Partitioner) -> str:
    """Return the number and the kind of the devices of a mesh, such as "8 x TPU v5e"."""
    return f"{partitioner.mesh.size} x {partitioner.device.device_kind}"


def nameable(source: Any, read: Any) -> Any:
    """Return the path or paths of a source, if it was given so, or else the value that was read from it."""
    listed = isinstance(source, list | tuple) and all(isinstance(one, str | Path) for one in source)
    return source if listed or isinstance(source, str | Path) else read


def described(source: Any) -> Any:
    """Return an image, clip or noise as JSON: a file by its full path or URL, an array by shape and digest."""
    if isinstance(source, str | Path | RemotePath):
        return full_name(source)
    if isinstance(source, list | tuple):
        return [described(one) for one in source]
    if isinstance(source, Mapping):
        return {name: described(one) for name, one in source.items()}
    array = np.asarray(source)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype} {list(array.shape)}, sha256 {digest}"
