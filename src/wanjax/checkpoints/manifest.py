# SPDX-License-Identifier: Apache-2.0
"""Checks a wanjax checkpoint against `wanjax.json`: the checksums of its arrays and of its other files."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wanjax.checkpoints.arrays import Arrays
from wanjax.checkpoints.converted import MANIFEST, SHARE, WEIGHTS
from wanjax.checkpoints.files import Spec, adding
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError

REQUEST = "request.json"  # the conversion that was asked for, in a folder that is not complete
OWN = "digest"  # the entry of a manifest with its own digest
Progress = Callable[[str, int, int], object]


def verify(source: Source, progress: Progress = lambda at, done, total: None) -> dict[str, Any]:
    """Compare a wanjax checkpoint with its `wanjax.json`, and return that.

    All that is in the folder is named there, and all that is named is in the folder. Raises WanjaxError that names the
    first file or array that is missing, damaged, changed or not named, and where there are no arrays.
    """
    if (manifest := source.manifest) is None:
        raise WanjaxError(f"{source.name} is no wanjax checkpoint, whose checksums could be compared")
    source.storage.gather(progress, anew=True)
    root, networks, files = source.root, manifest["networks"], manifest["files"]
    if manifest.get(OWN) != own_digest(manifest):
        raise WanjaxError(f"{root / MANIFEST} is not what was written: convert it again")
    if unlike := sorted({path.parent.name for path in root.glob(f"*/{WEIGHTS}")} ^ networks.keys()):
        raise WanjaxError(f"{root / MANIFEST} and the folders of weights differ by {unlike[0]}: convert it again")
    weights = {name: Arrays(source.storage.folder(name) / WEIGHTS) for name in networks}
    if not any(arrays.specs for arrays in weights.values()):
        raise WanjaxError(f"{root} has no arrays that could be compared: convert it again")
    count = counting(progress, "verifying", sum(arrays.nbytes for arrays in weights.values()))
    for name, arrays in weights.items():
        if strays := sorted(set(files_in(arrays.path)) - arrays.files()):
            raise WanjaxError(f"{strays[0]} is of no array that was written: convert it again")
        promised = {key: words.rpartition(" ")[0] for key, words in networks[name].items()}
        stored_words = {key: _words(spec) for key, spec in arrays.specs.items()}
        differing = _differing(stored_words, promised) or _differing(array_digests(arrays, count), networks[name])
        if differing:
            raise WanjaxError(f"{differing[0]} in {arrays.path} is not what was written: convert it again")
    stored_words = {str(path.relative_to(root)): digest(path) for path in files_beside(root)}
    if differing := _differing(stored_words, files):
        raise WanjaxError(f"{root / differing[0]} is not what was written: convert it again")
    return dict(manifest)


def own_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without the entry that holds it."""
    text = json.dumps({name: entry for name, entry in manifest.items() if name != OWN}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def array_digests(arrays: Arrays, progress: Callable[[int], object]) -> dict[str, str]:
    """Read each array; return its dtype, shape and checksum, as in the manifest."""
    return {name: f"{_words(spec)} {arrays[name].digest(progress)}" for name, spec in arrays.specs.items()}


def _words(spec: Spec) -> str:
    return f"{spec.dtype.name} {list(spec.shape)}"


def _differing(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in actual.keys() | wanted.keys() if actual.get(key) != wanted.get(key))


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def files_beside(root: Path) -> Iterator[Path]:
    """Yield the files of a wanjax checkpoint that are not weights."""
    for path in sorted(files_in(root)):
        if WEIGHTS not in path.relative_to(root).parts and path.name not in (MANIFEST, REQUEST):
            yield path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHARE]


def counting(progress: Progress, at: str, total: int) -> Callable[[int], object]:
    """Return a function that adds up the bytes it receives, and report their sum."""
    return adding(partial(progress, at), total)
