# SPDX-License-Identifier: Apache-2.0
"""JAX's cache of compiled programs between runs."""

import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from wanjax.compile_cache.shared import current_shared_cache, leasing, share_cache
from wanjax.errors import WanjaxError, WanjaxWarning, reason
from wanjax.kernels.target import instructions
from wanjax.stores.paths import parse_path
from wanjax.stores.user_folders import user_cache

SHARED_CACHE_VARIABLE, TRUST_CACHE_VARIABLE = "WANJAX_COMPILE_CACHE", "WANJAX_TRUST_COMPILE_CACHE"
"""Environment variables: the first names the folder of a shared compile cache, and the second is 1 if that cache is
trusted."""
CACHE_ALL_PROGRAMS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


class _ConfigContext:
    """JAX settings that apply while at least one thread is in this context. The last thread that leaves restores the
    previous settings."""

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


_caches_all_programs = _ConfigContext(CACHE_ALL_PROGRAMS)
without_cache = _ConfigContext({"jax_enable_compilation_cache": False}, compilation_cache.reset_cache)
"""A context in which programs are compiled without JAX's cache."""


@contextmanager
def compile_cache() -> Iterator[None]:
    """Within the block, cache every compiled program, even if it compiles quickly. If the cache is shared, this thread
    acquires a lease for each program that it compiles.
    """
    with _caches_all_programs(), leasing():
        yield


def set_cache_folder() -> None:
    """Set the folder of JAX's compile cache to the shared folder or to the user's cache folder. Do nothing if a folder
    is already set.

    JAX's key covers the traced program with its kernels, the versions of JAX and the compiler, the compiler's options
    and flags, the devices and the shardings. The key may leave out the processor for which a CPU program was compiled,
    so each kind of processor has its own folder. If the folder cannot be created, a warning says that nothing is
    cached. Raises WanjaxError as `use_shared` does.
    """
    use_shared()
    if compile_cache_folder() is None:
        folder = user_cache() / "xla" / processor()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"nothing is cached, because {folder} cannot be created ({reason(error)}): "
            warnings.warn(f"{message}set XDG_CACHE_HOME to another folder", WanjaxWarning, stacklevel=3)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def use_shared(name: str | None = None, *, trusted: bool = False, platform: str | None = None) -> None:
    """Use a folder, local or in a store, as JAX's compile cache, which workers can share.

    Args:
        name: The folder. By default, the environment variable names it, unless another cache is already set.
        trusted: Whether everybody who can write to the folder is trusted. The environment variable can also say this.
        platform: The platform for which programs are compiled; by default the platform of JAX's devices.

    Raises:
        WanjaxError: The folder is missing or not trusted.
    """
    if name is None and compile_cache_folder() is None:
        name = os.environ.get(SHARED_CACHE_VARIABLE)
    if not name:
        return
    if not trusted and os.environ.get(TRUST_CACHE_VARIABLE) != "1":
        raise WanjaxError(
            f"the compile cache {name} holds programs that this command would run: if you trust everyone who can "
            f"write there, give --trust-compile-cache, or set {TRUST_CACHE_VARIABLE}=1 in the environment"
        )
    platform_name = platform or jax.default_backend()
    folder = parse_path(name).absolute() / (processor() if platform_name == "cpu" else platform_name)
    if compile_cache_folder() != str(folder):
        share_cache(folder, ahead_of_time=platform is not None)


def compile_cache_folder() -> str | None:
    """Return the folder of JAX's compile cache, or None if none is set."""
    if (shared := current_shared_cache()) is not None:
        return str(shared.folder)
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def processor() -> str:
    """Return the machine's architecture, followed by a digest of its processor's instruction sets."""
    features = " ".join(sorted(instructions())) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
