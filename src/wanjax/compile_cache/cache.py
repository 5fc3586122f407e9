# SPDX-License-Identifier: Apache-2.0
"""JAX's cache of compiled programs between runs."""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from wanjax.compile_cache.shared import current, leasing, share
from wanjax.errors import WanjaxError
from wanjax.kernels.target import instructions
from wanjax.stores.paths import parse_path
from wanjax.stores.user_folders import user_cache

SHARED, TRUSTED = "WANJAX_COMPILE_CACHE", "WANJAX_TRUST_COMPILE_CACHE"
"""Environment variables: the folder of a shared compile cache, and 1 if that cache is trusted."""
KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class _ConfigContext:
    """JAX settings that apply while any thread is in this context; the last thread to leave restores the old ones."""

    def __init__(self, settings: Mapping[str, Any], on_change: Callable[[], Any] = lambda: None):
        self.settings, self.on_change = settings, on_change
        self.lock, self.num_threads, self.saved_settings = Lock(), 0, {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.num_threads == 0:
                self.saved_settings = {name: getattr(jax.config, name) for name in self.settings}
                self._set(self.settings)
            self.num_threads += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_threads -= 1
                if self.num_threads == 0:
                    self._set(self.saved_settings)

    def _set(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        self.on_change()


_keep_all = _ConfigContext(KEEP_ALL)
without_cache = _ConfigContext({"jax_enable_compilation_cache": False}, compilation_cache.reset_cache)
"""A context in which programs are compiled without JAX's cache."""


@contextmanager
def compile_cache() -> Iterator[None]:
    """Within the block, cache every compiled program, even one that compiles quickly.

    If the cache is shared, this thread acquires leases.
    """
    with _keep_all(), leasing():
        yield


def set_cache_folder() -> None:
    """Set JAX's compile cache to the shared folder or the user's cache folder, unless another one is set.

    JAX's key covers the traced program with its kernels, the versions of JAX and the compiler, the compiler's options
    and flags, the devices and the shardings. It may not cover the processor that a CPU program was compiled for, so
    each kind of processor has its own folder. Raises WanjaxError as `use_shared` does.
    """
    use_shared()
    if compile_cache_folder() is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla" / processor()))


def use_shared(name: str | None = None, *, trusted: bool = False, platform: str | None = None) -> None:
    """Use a folder, local or in a store, as JAX's compile cache, which workers can share.

    Args:
        name: The folder; by default that of the environment variable, unless another cache is set.
        trusted: True if everybody who can write to the folder is trusted; the environment can say so too.
        platform: The platform of absent devices that programs are compiled for; by default that of JAX's devices.

    Raises:
        WanjaxError: The folder is missing or not trusted.
    """
    if name is None and compile_cache_folder() is None:
        name = os.environ.get(SHARED)
    if not name:
        return
    if not trusted and os.environ.get(TRUSTED) != "1":
        raise WanjaxError(
            f"the compile cache {name} holds programs that run when they are read: --trust-compile-cache, or "
            f"{TRUSTED}=1 in the environment, says that all who can write there are trusted"
        )
    platform_name = platform or jax.default_backend()
    folder = parse_path(name).absolute() / (processor() if platform_name == "cpu" else platform_name)
    if compile_cache_folder() != str(folder):
        share(folder, ahead_of_time=platform is not None)


def compile_cache_folder() -> str | None:
    """Return the folder of JAX's compile cache, or None if none is set."""
    if (shared := current()) is not None:
        return str(shared.folder)
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def processor() -> str:
    """Return the machine's architecture with a digest of its processor's instruction sets."""
    features = " ".join(sorted(instructions())) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
