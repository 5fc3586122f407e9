# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests on eight devices, which the CPU simulates in a new process."""

import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

SHARDED_RULES = ["fsdp", "tp"]  # the rules that shard weights
MESHES = [(1, 1, 8), (2, 1, 4), (2, 2, 2), (1, 4, 2), (1, 8, 1)]  # sizes of dp, sp and tp
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


def on_meshes(*quick: tuple[tuple[int, int, int], str]) -> list[Any]:
    """Return every mesh with every set of rules, as parameters of a test; all but the `quick` pairs are slow."""
    pairs = [(axes, rules) for axes in MESHES for rules in SHARDED_RULES]
    assert set(quick) <= set(pairs)
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


def nbytes_on_each(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array on each of its devices."""
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def most_bytes_on_a_device() -> int:
    """Return the bytes on the device that has most of them now."""
    bytes_on: Counter = Counter()
    for array in jax.live_arrays():
        bytes_on.update(dict.fromkeys(array.sharding.device_set, nbytes_on_each(array)))
    return max(bytes_on.values(), default=0)


def free_port() -> int:
    """Return a port on which processes can meet."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def on_eight_devices(code: str, *arguments: str | Path) -> str:
    """Run Python code with arguments, warnings being errors; return its output."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {EIGHT_DEVICES}", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
