# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept between runs."""

import os
import sys
from pathlib import Path

import jax


def enable_compile_cache() -> None:
    """Keeps what XLA compiles in the user's cache folder, unless a folder was chosen already.

    JAX's key covers the program, the compiler, its flags and the devices, so a changed model or setting never meets a
    stale executable.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(_user_cache() / "wanjax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _user_cache() -> Path:
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"])
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
