# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs: compiled programs, and prices."""

import hashlib
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

import jax


def enable_compile_cache() -> None:
    """Keeps what XLA compiles in the user's cache folder, unless a folder was chosen already.

    JAX's key is made of the program after tracing, kernels included, of the versions of JAX and the compiler, of the
    compiler's options and flags, and of the devices and how the program lies on them: changed code or settings that
    matter make another key. What it may leave out is the processor that a program for the CPU was compiled for, so
    that each kind of processor has a folder of its own.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla" / _processor()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_cache_folder() -> str:
    """Where compiled programs are kept."""
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def user_cache() -> Path:
    """The folder of what can be made again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "wanjax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def _processor() -> str:
    """The machine's architecture, and a word that stands for the instructions that its processor knows."""
    known = platform.processor()
    with suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        known = " ".join(sorted(found[1].split())) if found else known
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
