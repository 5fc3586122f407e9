# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors: one file, or a checkpoint's folder with its shards and their index."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the tensors to one file."""
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, path, dict(metadata or {}))
