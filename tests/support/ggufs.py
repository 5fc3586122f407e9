# SPDX-License-Identifier: Apache-2.0
"""GGUF files for tests, by the format's own package."""

from pathlib import Path
from typing import Any

import gguf


def write_gguf(path: Path, tensors: dict[str, Any], fields: dict[str, Any] | None = None, arch: str = "wan") -> Path:
    """Write a file of arrays, or of (bytes, type), by the package's own writer."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in (fields or {}).items():
        writer.add_array(name, value) if isinstance(value, list) else writer.add_string(name, value)
    for name, x in tensors.items():
        if isinstance(x, tuple):
            writer.add_tensor(name, x[0], raw_dtype=x[1])
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
