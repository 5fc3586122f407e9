# SPDX-License-Identifier: Apache-2.0
"""GGUF files for tests, by the format's own package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, quants


def write_gguf(path: Path, tensors: dict[str, Any], fields: dict[str, Any] | None = None, arch: str = "wan") -> Path:
    """Write a file of arrays, or of pairs (bytes, type), with the writer of the package `gguf`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    add = {list: writer.add_array, bytes: writer.add_array, str: writer.add_string, int: writer.add_uint32}
    for name, value in (fields or {}).items():
        add.get(type(value), writer.add_float32)(name, value)
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


def as_llama_cpp(
    arch: MODEL_ARCH, layers: int, tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name and round tensors of transformers as llama.cpp does, by the package's own table of names.

    Returns the tensors for `write_gguf`, and the dequantized values by the names of transformers.
    """
    names, stored, dequantized = gguf.get_tensor_name_map(arch, layers), {}, dict[str, np.ndarray]()
    for key, x in tensors.items():
        name = f"{names.get_name(key.rpartition('.')[0])}.{key.rpartition('.')[2]}"
        if x.ndim == 1 or "relative" in key or x.shape[-1] % 32:
            stored[name] = dequantized[key] = x
        else:
            raw = quants.quantize(x, GGMLQuantizationType.Q8_0)
            stored[name] = (raw, GGMLQuantizationType.Q8_0)
            dequantized[key] = quants.dequantize(raw, GGMLQuantizationType.Q8_0)
    return stored, dequantized
