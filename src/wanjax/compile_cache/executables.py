# SPDX-License-Identifier: Apache-2.0
"""Executables that are stored between processes, so that a second run neither traces nor lowers nor compiles.

JAX's own cache is asked with the lowered program, which takes longer to make than it takes to run a short video. Here
the key is what the program is made from: its function by name, the values and shapes that it is compiled for, the code
of this package, the versions of what traces and compiles, the processor, and the flags.

A kept executable is machine code in a pickle, and whoever can write one can run anything. So it is read only from a
folder that is the user's own and no one else's, after its digest, and where all that it names is expected in it. One
that is of no use is compiled anew.
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

MAX_TOTAL_BYTES = 2 << 30  # bytes of all that is kept; the least recently used goes first
SUFFIX = ".executable"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a flag of files that are opened
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
IRRELEVANT_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log")
"""Beginnings of the names of JAX's settings that change no program."""
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
        # of a program of a mesh that takes the host's arrays alone
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
"""What JAX names in an executable and in its trees."""


class UnusableExecutable(Exception):
    """A stored executable that cannot be used; the text says why."""


class Executables:
    """Executables in a folder, by key. The folder is made for its owner alone."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, key: str, devices: Sequence[Any]) -> Callable[..., Any] | None:
        """Return the executable of a key for these devices, or None; raise UnusableExecutable."""
        file = self._file(key)
        try:
            self._check_folder()
            body = _verified(key, _read(file))
            payload, arguments, results = pickle.loads(body)  # checked: from here on it is this user's own
            executable = serialize_executable.deserialize_and_load(
                payload, arguments, results, devices[0].client, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except UnusableExecutable:
            raise
        except Exception as error:  # of the many parts that read it
            raise UnusableExecutable(f"it cannot be read: {type(error).__name__}: {error}") from error
        with suppress(OSError):
            os.utime(file)
        return executable

    def store(self, key: str, compiled: Any) -> None:
        """Keep an executable that was compiled, not read from a cache; do nothing where that fails."""
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
            finally:  # a full disk keeps no half
                with suppress(OSError):
                    partial_path.unlink()
            self._make_room()
        except (OSError, UnusableExecutable, ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError):
            return

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _check_folder(self) -> None:
        """Raise UnusableExecutable unless the folder is one, this user's own, and closed to others."""
        status = os.lstat(self.folder)
        if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077):
            raise UnusableExecutable(f"{self.folder} is open to others")

    def _make_room(self) -> None:
        """Delete the files that were used least recently, until the others are few enough."""
        files = sorted(((x.stat(), x) for x in self.folder.iterdir()), key=lambda entry: -entry[0].st_mtime)
        total = 0
        for entry, file in files:
            total += entry.st_size
            if total > MAX_TOTAL_BYTES:
                file.unlink(missing_ok=True)


def user_executables() -> Executables | None:
    """Return the store of this user's executables; None on systems whose files have no owners."""
    return Executables(user_cache() / "executables" / processor()) if hasattr(os, "getuid") else None


def _read(file: Path) -> bytes:
    with open(os.open(file, os.O_RDONLY | _NO_LINK), "rb") as opened:
        if os.fstat(opened.fileno()).st_uid != os.getuid():
            raise UnusableExecutable(f"{file} is another user's")
        return opened.read()


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _verified(key: str, content: bytes) -> bytes:
    """Return the pickle in a file; raise UnusableExecutable unless it is whole, has this key and names only NAMED."""
    size = hashlib.sha256().digest_size
    if content[:size] != _digest(key, content[size:]):
        raise UnusableExecutable("its digest is not that of what it holds")
    payload, *_ = _NameChecker(content[size:]).load()
    _NameChecker(payload).load()
    return content[size:]


class _Placeholder:
    """Stands for all that a pickle names, while it is read for its names."""

    def __new__(cls, *_: Any, **__: Any) -> "_Placeholder":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


class _NameChecker(pickle.Unpickler):
    """Reads a pickle without importing; raises UnusableExecutable for a name that is not in NAMED."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_NAMES and not _is_tree(module, name):
            raise UnusableExecutable(f"it names {module}.{name}")
        return _Placeholder

    def persistent_load(self, pid: Any) -> None:
        """Return nothing in place of devices and machine code."""


def _is_tree(module: str, name: str) -> bool:
    """Return whether a name is that of a class that holds arrays, of this package or of Flax's."""
    if module.partition(".")[0] not in ("wanjax", "flax"):
        return False
    class_ = getattr(sys.modules.get(module), name, None)
    if not isinstance(class_, type) or (class_.__module__, class_.__qualname__) != (module, name):
        return False
    return is_dataclass(class_) or issubclass(class_, tuple | nnx.Variable | nnx.State)


class CompileEnvironment(NamedTuple):
    """All on which an executable depends beside its program."""

    code: str
    versions: tuple[str, ...]
    processor: str
    cores: tuple[int | None, int]
    flags: tuple[str | None, ...]
    settings: tuple[tuple[str, str], ...]


def key_of(program: Any) -> str:
    """Return the key of a program; raise NoFingerprint for values that have none."""
    return fingerprint((program, compile_environment()))


def compile_environment() -> CompileEnvironment:
    """Return the surroundings of this process."""
    compiler = jax.devices()[0].client.platform_version
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    settings = sorted((name, repr(value)) for name, value in jax.config.values.items())
    return CompileEnvironment(
        _code(),
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
def _code() -> str:
    """Return the digest of this package's code at the first call."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()
