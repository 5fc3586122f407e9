# SPDX-License-Identifier: Apache-2.0
"""Compare a wanjax checkpoint with the checksums of its arrays and other files in `wanjax.json`."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wanjax.checkpoints.arrays import RECONVERT_ADVICE, OrbaxCheckpoint
from wanjax.checkpoints.converted import DIGEST_LENGTH, WEIGHTS_FOLDER
from wanjax.checkpoints.files import Spec, progress_counter
from wanjax.checkpoints.sources import MANIFEST, Source
from wanjax.errors import WanjaxError

REQUEST_FILE = "request.json"  # the file with the request of a conversion, while the folder is incomplete
DIGEST_ENTRY = "digest"  # the entry in which a manifest stores its own digest
Progress = Callable[[str, int, int], object]


def verify(source: Source, progress: Progress = lambda at, done, total: None) -> dict[str, Any]:
    """Compare a wanjax checkpoint with its manifest `wanjax.json`, and return the parsed manifest.

    Raises WanjaxError for the first file or array that is missing, damaged, changed or not in the manifest, and for a
    checkpoint without arrays.
    """
    if (manifest := source.manifest) is None:
        raise WanjaxError(
            f"{source.name} is not a wanjax checkpoint and has no checksums: convert it with `wanjax convert`"
        )
    source.storage.fetch_all(progress, force=True)
    root, networks, files = source.root, manifest["networks"], manifest["files"]
    if manifest.get(DIGEST_ENTRY) != own_digest(manifest):
        raise WanjaxError(f"{root / MANIFEST} was changed after it was written: {RECONVERT_ADVICE}")
    if unmatched := sorted({path.parent.name for path in root.glob(f"*/{WEIGHTS_FOLDER}")} ^ networks.keys()):
        raise WanjaxError(f"{root / MANIFEST} and the folders of weights differ in {unmatched[0]}: {RECONVERT_ADVICE}")
    weights = {name: OrbaxCheckpoint(source.storage.folder(name) / WEIGHTS_FOLDER) for name in networks}
    if not any(arrays.specs for arrays in weights.values()):
        raise WanjaxError(f"{root} has no arrays: {RECONVERT_ADVICE}")
    report = report_stage(progress, "verifying", sum(arrays.nbytes for arrays in weights.values()))
    for name, arrays in weights.items():
        if unexpected := sorted(set(files_in(arrays.path)) - arrays.files()):
            raise WanjaxError(f"{unexpected[0]} does not belong to an array: {RECONVERT_ADVICE}")
        expected_specs = {key: description.rpartition(" ")[0] for key, description in networks[name].items()}
        actual = {key: _describe_spec(spec) for key, spec in arrays.specs.items()}
        differences = _differing_keys(actual, expected_specs) or _differing_keys(
            array_digests(arrays, report), networks[name]
        )
        if differences:
            raise WanjaxError(f"{differences[0]} in {arrays.path} was changed after it was written: {RECONVERT_ADVICE}")
    actual = {str(path.relative_to(root)): digest(path) for path in files_beside(root)}
    if differences := _differing_keys(actual, files):
        raise WanjaxError(f"{root / differences[0]} was changed after it was written: {RECONVERT_ADVICE}")
    return dict(manifest)


def own_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of all entries of a manifest except the entry that stores the digest."""
    text = json.dumps({name: entry for name, entry in manifest.items() if name != DIGEST_ENTRY}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def array_digests(arrays: OrbaxCheckpoint, progress: Callable[[int], object]) -> dict[str, str]:
    """Read each array, and return a text with its dtype, shape and checksum, in the form that the manifest stores."""
    return {name: f"{_describe_spec(spec)} {arrays[name].digest(progress)}" for name, spec in arrays.specs.items()}


def _describe_spec(spec: Spec) -> str:
    return f"{spec.dtype.name} {list(spec.shape)}"


def _differing_keys(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in actual.keys() | expected.keys() if actual.get(key) != expected.get(key))


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def files_beside(root: Path) -> Iterator[Path]:
    """Yield the files of a wanjax checkpoint other than weights, the manifest and the request of the conversion."""
    for path in sorted(files_in(root)):
        if WEIGHTS_FOLDER not in path.relative_to(root).parts and path.name not in (MANIFEST, REQUEST_FILE):
            yield path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_LENGTH]


def report_stage(progress: Progress, stage: str, total: int) -> Callable[[int], object]:
    """Return a function that adds its argument to the bytes done in a stage, and reports the sum and the total."""
    return progress_counter(partial(progress, stage), total)
