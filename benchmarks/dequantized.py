# SPDX-License-Identifier: Apache-2.0
"""Measure how many quantised weights one core reads per second, relative to 8-bit floats with a scale.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.dequantized [--rows 2560]

A weight matrix has 5,120 columns, as in Wan 14B. Nothing is read from a disk.
"""

import argparse
import json
from collections.abc import Callable
from time import process_time

import ml_dtypes
import numpy as np

from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import Tensors
from wanjax.checkpoints.gguf_file import dequantise

COLUMNS, REPEATS = 5120, 9
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_0")


def least_seconds(read: Callable[[], object]) -> float:
    """Return the least processor time of several calls."""
    times = []
    for _ in range(REPEATS):
        start = process_time()
        read()
        times.append(process_time() - start)
    return min(times)


def main() -> None:
    import gguf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2560)
    rows = parser.parse_args().rows
    random = np.random.default_rng(0)
    scale = {"a.weight_scale": np.ones((rows, 1), np.float32)}
    floats = random.normal(size=(rows, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    integers = random.integers(-127, 127, (rows, COLUMNS)).astype(np.int8)
    entries = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    convrot_entry = {"a.comfy_quant": np.frombuffer(json.dumps(entries).encode(), np.uint8)}
    readers = {
        "8-bit floats": DequantizedReader(Tensors({"a.weight": floats} | scale)),
        "8-bit integers": DequantizedReader(Tensors({"a.weight": integers} | scale)),
        "ConvRot": DequantizedReader(Tensors({"a.weight": integers} | scale | convrot_entry)),
    }
    times = {name: least_seconds(lambda reader=reader: reader.read("a.weight")) for name, reader in readers.items()}
    for name in GGUF_TYPES:
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        raw = random.integers(0, 120, (rows, COLUMNS // block * nbytes), dtype=np.uint8)
        times[f"GGUF {name}"] = least_seconds(lambda raw=raw, name=name: dequantise(raw, name))
    for name, seconds in times.items():
        print(f"{name:16} {rows * COLUMNS / seconds / 1e6:6.0f} M a second, {times['8-bit floats'] / seconds:.2f} x")


if __name__ == "__main__":
    main()
