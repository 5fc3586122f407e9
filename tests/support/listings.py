# SPDX-License-Identifier: Apache-2.0
"""Published files as public listings describe them: a hash of their names and shapes, and their sizes in bytes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.published import TensorShapes, header

LISTED = json.loads((Path(__file__).parents[1] / "data/published.json").read_text(encoding="utf-8"))
FILES: dict[str, dict[str, Any]] = {entry["file"]: entry for entry in LISTED["files"]}


def names_hash(keys: TensorShapes) -> str:
    """Return DiffSynth-Studio's hash of a file's names and shapes.

    It is the MD5 of two entries for each tensor, sorted and joined by commas: the name, and the name with its shape, as
    in `a.weight:3_4`.
    """
    entries = [*keys, *(f"{name}:{'_'.join(map(str, shape))}" for name, shape in keys.items())]
    return hashlib.md5(",".join(sorted(entries)).encode()).hexdigest()


def file_size(keys: TensorShapes, dtype: str, *, metadata: Mapping[str, str] | None) -> int:
    """Return the bytes of a file that the safetensors library writes with these tensors: by name, in one dtype."""
    first, rest = header(dict(sorted(keys.items())), dict.fromkeys(keys, dtype), metadata)
    return len(first) + rest
