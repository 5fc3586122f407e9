# SPDX-License-Identifier: Apache-2.0
"""Executables on disk. With them, a second run need not trace, lower or compile.

The key of JAX's own cache needs the lowered program, and lowering takes longer than the run of a short video. The key
of this cache covers everything that determines the compiled program: the function's name, its static values and shapes,
the code of this package, the versions of JAX and of the compiler, the processor, and the flags.

A stored executable is machine code in a pickle, so anybody who can write the file can run any code. An executable is
therefore read only if its folder belongs to the user and is closed to others, its digest matches, and its pickle
contains only expected names. A program without a usable executable is compiled again.
"""

import hashlib
import io
import os
import pickle
import platform
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable

from wanjax.compile_cache.cache import processor
from wanjax.compile_cache.fingerprint import fingerprint
from wanjax.stores.user_folders import user_cache

MAX_TOTAL_BYTES = 2 << 30  # of all executables together; the least recently used executables are deleted first
SUFFIX = ".executable"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # do not follow links when opening files
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
IRRELEVANT_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log")
"""Prefixes of JAX settings that do not affect programs."""
ALLOWED_NAMES = frozenset(
    {
        ("jax", "P"),
        ("jax._src.core", "ManualAxisType"),
        ("jax._src.core", "MemorySpace"),
        ("jax._src.core", "ShapedArray"),
        ("jax._src.interpreters.pxla", "AllArgsInfo"),
        ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"),
        ("jax._src.layout", "AutoLayoutSingleton"),
        ("jax._src.layout", "Layout"),
        ("jax._src.linear_util", "DebugInfo"),
        ("jax._src.mesh", "AbstractDevice"),
        ("jax._src.mesh", "AbstractMesh"),
        ("jax._src.mesh", "AxisType"),
        ("jax._src.mesh", "Mesh"),
        ("jax._src.named_sharding", "_unpickle_named_sharding"),
        # needed for a program on a mesh if all its arguments are host arrays
        ("jax._src.sharding_impls", "_unpickle_gspmd_sharding"),
        ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
        ("jax._src.stages", "ArgInfo"),
        ("jax._src.tree_util", "default_registry"),
        ("jax._src.tree_util", "tracing_registry"),
        ("jaxlib._hlo", "OpSharding"),
        ("jaxlib._jax", "DeviceList"),
        ("jaxlib._jax.pytree", "PyTreeDef"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
    }
)
"""Modules and names that JAX's pickles of executables and their pytrees contain."""


class UnusableExecutable(Exception):
    """A stored executable cannot be used. The message gives the reason."""


class Executables:
    """Executables in a folder, by key. Only the folder's owner has access to it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, key: str, devices: Sequence[Any]) -> Callable[..., Any] | None:
        """Load the executable of a key for these devices. Return None if there is no file. Raises UnusableExecutable if
        the file cannot be used."""
        file = self._file(key)
        try:
            self._check_folder()
            body = _verify(key, _read(file))
            payload, arguments, results = pickle.loads(body)  # safe: the file is verified, and this user wrote it
            executable = serialize_executable.deserialize_and_load(
                payload, arguments, results, devices[0].client, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except UnusableExecutable:
            raise
        except Exception as error:  # JAX raises errors of many kinds
            raise UnusableExecutable(f"it cannot be read: {type(error).__name__}: {error}") from error
        with suppress(OSError):
            os.utime(file)
        return executable

    def store(self, key: str, compiled: Any) -> None:
        """Store an executable that was compiled, not read from a cache. Do nothing if this fails."""
        try:
            body = pickle.dumps(serialize_executable.serialize(compiled))
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            self._check_folder()
            partial_path = self.folder / f".{os.getpid()}.{key}"
            try:
                with open(os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINK, 0o600), "wb") as file:
                    file.write(_digest(key, body) + body)
                partial_path.replace(self._file(key))
            finally:  # a full disk must not leave a partial file
                with suppress(OSError):
                    partial_path.unlink()
            self._delete_old_files()
        except (OSError, UnusableExecutable, ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError):
            return

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _check_folder(self) -> None:
        """Raise UnusableExecutable unless the folder belongs to this user and other users have no access to it."""
        status = os.lstat(self.folder)
        if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077):
            raise UnusableExecutable(f"{self.folder} is open to others")

    def _delete_old_files(self) -> None:
        """Delete the least recently used files until the total is within MAX_TOTAL_BYTES."""
        files = sorted(((x.stat(), x) for x in self.folder.iterdir()), key=lambda entry: -entry[0].st_mtime)
        total = 0
        for entry, file in files:
            total += entry.st_size
            if total > MAX_TOTAL_BYTES:
                file.unlink(missing_ok=True)


def user_executables() -> Executables | None:
    """Return the store of this user's executables, or None on systems without owners of files."""
    return Executables(user_cache() / "executables" / processor()) if hasattr(os, "getuid") else None


def _read(file: Path) -> bytes:
    with open(os.open(file, os.O_RDONLY | _NO_LINK), "rb") as opened:
        if os.fstat(opened.fileno()).st_uid != os.getuid():
            raise UnusableExecutable(f"{file} is another user's")
        return opened.read()


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _verify(key: str, content: bytes) -> bytes:
    """Return the pickle in a file. Raises UnusableExecutable for a wrong digest or a name outside of ALLOWED_NAMES."""
    size = hashlib.sha256().digest_size
    if content[:size] != _digest(key, content[size:]):
        raise UnusableExecutable("its digest does not match its content")
    payload, *_ = _NameChecker(content[size:]).load()
    _NameChecker(payload).load()
    return content[size:]


class _Placeholder:
    """Replaces every object in a pickle while the names in the pickle are checked."""

    def __new__(cls, *_: Any, **__: Any) -> "_Placeholder":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


class _NameChecker(pickle.Unpickler):
    """Reads a pickle without importing anything. Raises UnusableExecutable for a name outside of ALLOWED_NAMES."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_NAMES and not _is_pytree_class(module, name):
            raise UnusableExecutable(f"it contains the name {module}.{name}")
        return _Placeholder

    def persistent_load(self, pid: Any) -> None:
        """Skip devices and machine code."""


def _is_pytree_class(module: str, name: str) -> bool:
    """Return True for a class of this package or of Flax that holds arrays."""
    if module.partition(".")[0] not in ("wanjax", "flax"):
        return False
    class_ = getattr(sys.modules.get(module), name, None)
    if not isinstance(class_, type) or (class_.__module__, class_.__qualname__) != (module, name):
        return False
    return is_dataclass(class_) or issubclass(class_, tuple | nnx.Variable | nnx.State)


class CompileEnvironment(NamedTuple):
    """The environment that determines an executable, together with its program."""

    code: str
    versions: tuple[str, ...]
    processor: str
    cores: tuple[int | None, int]
    flags: tuple[str | None, ...]
    settings: tuple[tuple[str, str], ...]


def key_of(program: Any) -> str:
    """Return the key of a program. Raises NoFingerprint if a value has no fingerprint."""
    return fingerprint((program, compile_environment()))


def compile_environment() -> CompileEnvironment:
    """Describe the environment in which this process compiles."""
    compiler = jax.devices()[0].client.platform_version
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    settings = sorted((name, repr(value)) for name, value in jax.config.values.items())
    return CompileEnvironment(
        _code_digest(),
        (*_versions(), compiler),
        processor(),
        (os.cpu_count(), cores),
        tuple(os.environ.get(name) for name in FLAGS),
        tuple((name, value) for name, value in settings if not name.startswith(IRRELEVANT_SETTINGS)),
    )


@cache
def _versions() -> tuple[str, ...]:
    return jax.__version__, version("jaxlib"), flax.__version__, np.__version__, platform.python_version()


@cache
def _code_digest() -> str:
    """Return a digest of this package's code. The code is read at the first call."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()
