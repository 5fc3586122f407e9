# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled programs between runs."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class _While:
    """Settings of JAX's that hold while any thread is in a context of this; those before hold again after the last."""

    def __init__(self, settings: Mapping[str, Any], changed: Callable[[], Any] = lambda: None):
        self.settings, self.changed = settings, changed
        self.lock, self.open, self.before = Lock(), 0, {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.open == 0:
                self.before = {name: getattr(jax.config, name) for name in self.settings}
                self._set(self.settings)
            self.open += 1
        try:
            yield
        finally:
            with self.lock:
                self.open -= 1
                if self.open == 0:
                    self._set(self.before)

    def _set(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        self.changed()


compile_cache = _While(KEEP_ALL)
"""A context in which JAX's cache keeps every program that XLA compiles, even one that compiled quickly."""
without_cache = _While({"jax_enable_compilation_cache": False}, compilation_cache.reset_cache)
"""A context in which programs are compiled without JAX's cache."""


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
    known = " ".join(sorted(instructions())) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


@cache
def instructions() -> frozenset[str]:
    """Returns the names of this processor's instruction sets, as Linux writes them; none where the system is another.

    Programs for CPUs are compiled for the processor that compiles them.
    """
    with suppress(OSError):
        if found := re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return frozenset(found[1].split())
    return frozenset()
