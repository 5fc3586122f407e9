# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled programs between runs."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import jax
from jax.experimental.compilation_cache import compilation_cache

KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class _Depth:
    """The contexts of `compile_cache` that are open in all threads, and JAX's own thresholds before the first."""

    def __init__(self) -> None:
        self.lock, self.open, self.before = Lock(), 0, {}


_depth = _Depth()


@contextmanager
def compile_cache() -> Iterator[None]:
    """Keeps every program that XLA compiles in this context in the cache, even one that compiled quickly.

    Restores JAX's own thresholds when the last such context of the process ends.
    """
    with _depth.lock:
        if _depth.open == 0:
            _depth.before = {name: getattr(jax.config, name) for name in KEEP_ALL}
            for name, value in KEEP_ALL.items():
                jax.config.update(name, value)
        _depth.open += 1
    try:
        yield
    finally:
        with _depth.lock:
            _depth.open -= 1
            if _depth.open == 0:
                for name, value in _depth.before.items():
                    jax.config.update(name, value)


@contextmanager
def without_cache() -> Iterator[None]:
    """Compiles in this context without JAX's own cache."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    _enable(False)
    try:
        yield
    finally:
        _enable(before)


def _enable(cache: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", cache)
    compilation_cache.reset_cache()  # else JAX goes on as it did at the first program


def set_cache_folder() -> None:
    """Sets JAX's compile cache to the user's cache folder, unless the user has chosen another.

    JAX's key covers the traced program with its kernels, the versions of JAX and the compiler, the compiler's options
    and flags, the devices and the shardings. Any change that matters therefore gives another key. The key may omit the
    processor for which a CPU program was compiled, so each kind of processor has its own folder.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla" / processor()))


def compile_cache_folder() -> str:
    """Returns the folder of compiled programs."""
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def user_cache() -> Path:
    """Returns this library's folder in the user's cache, for files that can be made again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "wanjax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def processor() -> str:
    """Returns the machine's architecture, and a digest of its processor's instruction sets."""
    known = platform.processor()
    with suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        known = " ".join(sorted(found[1].split())) if found else known
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
