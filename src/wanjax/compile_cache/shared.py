# SPDX-License-Identifier: Apache-2.0
"""A compile cache that all workers share: the first to miss a program compiles it, the others wait and read it.

An entry is one file or object under JAX's key, and appears when all of it is there. Whoever misses one takes its lease,
which is created only where there is none: exclusively in a folder, and in a store by a write on the condition that no
such object is there, which S3 and Google Cloud Storage promise. While its owner compiles, a thread changes the lease
every few seconds. Others look whether it changes, by clocks of their own, so that no two clocks have to agree. One that
changes no more is of a process that is gone: the next one, which has a number of its own, is created as the first was.

A lease saves work and guards nothing. Two processes that compile the same program write the same entry.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread, local
from time import monotonic
from uuid import uuid4

import jax
from jax._src import compilation_cache  # which offers no other cache than folders
from jax._src.compilation_cache_interface import CacheInterface

from wanjax.errors import WanjaxError, WanjaxWarning, reason
from wanjax.stores.paths import AnyPath, Missing, RemotePath, read
from wanjax.stores.writing import write_whole

HEARTBEAT_INTERVAL = 5.0  # seconds between two changes of a lease
LEASE_TIMEOUT = 30.0  # seconds without a change after which its owner is gone
POLL_INTERVALS = 0.1, 2.0  # seconds between two looks of a process that waits, the first and the longest


class Lease:
    """The right to compile a program, by the key of its entry, as long as this process is alive."""

    def __init__(self, folder: AnyPath, key: str):
        self.folder, self._key = folder, key
        self._id = uuid4().hex
        self._number = 0
        self._ended = Event()
        self._thread = Thread(target=self._renew, name="lease", daemon=True)

    def _file(self, number: int | None = None) -> AnyPath:
        return self.folder / f"{self._key}-lease-{self._number if number is None else number}"

    def acquire(self) -> bool:
        """Take the lease if it is free, and return whether it was. Raises WanjaxError where it cannot be written."""
        if not _create(self._file(), self._id.encode()):
            return False
        self._thread.start()
        return True

    def wait(self, pause: float, seen: tuple[bytes, float]) -> tuple[bytes, float] | None:
        """Wait a little; return the other's lease and the time of its last change, None if it was released."""
        self._ended.wait(pause)
        if (content := read(self._file())) is None:
            return None
        if content != seen[0]:
            return content, monotonic()
        if monotonic() - seen[1] > LEASE_TIMEOUT:
            self._number += 1
            return b"", monotonic()
        return seen

    def release(self) -> None:
        """Remove this lease, and earlier ones of processes that are gone."""
        self._ended.set()
        self._thread.join()
        for number in range(self._number + 1):
            with suppress(WanjaxError, OSError):
                file = self._file(number)
                file.remove() if isinstance(file, RemotePath) else file.unlink()

    def _renew(self) -> None:
        for renewal in count(1):
            if self._ended.wait(HEARTBEAT_INTERVAL):
                return
            with suppress(WanjaxError, OSError):  # the next one may be written
                _write(self._file(), f"{self._id} {renewal}".encode())


class EntryExists(Exception):
    """Raised when an entry exists while the cache is filled ahead of time, since absent devices cannot read it."""


class SharedCache(CacheInterface):
    """JAX's cache in a folder that workers share. The first failure gives a warning; programs are then compiled here.

    `ahead_of_time` tells that it is filled for devices that are described: an entry that is there raises EntryExists.
    """

    def __init__(self, folder: AnyPath, *, ahead_of_time: bool = False):
        self.folder, self._ahead_of_time = folder, ahead_of_time
        self._path = Path(str(folder))  # JAX's own name, for its log
        self._leases, self._reported = local(), False

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None for this thread to compile it."""
        try:
            entry = self._read_or_lease(key)
            if entry is not None and self._ahead_of_time:
                raise EntryExists(key)
            return entry
        except (WanjaxError, OSError) as error:
            self._warn_once(f"cannot be read ({error})")
            return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry, unless it is there."""
        try:
            _write(self.folder / f"{key}-cache", value)
        except (WanjaxError, OSError) as error:
            self._warn_once(f"cannot be written ({error})")

    @contextmanager
    def leasing(self) -> Iterator[None]:
        """Take leases of programs that this thread misses in the block, and release them at its end."""
        self._leases.held = held = []
        try:
            yield
        finally:
            self._leases.held = None
            for lease in held:
                lease.release()

    def _read_or_lease(self, key: str) -> bytes | None:
        held, file = getattr(self._leases, "held", None), self.folder / f"{key}-cache"
        if (entry := read(file)) is not None or held is None or jax.process_count() > 1:  # which compile together
            return entry
        lease, pause, seen = Lease(self.folder, key), POLL_INTERVALS[0], (b"", monotonic())
        while not lease.acquire():
            state = lease.wait(pause, seen)
            if (entry := read(file)) is not None or state is None:
                return entry
            pause, seen = min(1.5 * pause, POLL_INTERVALS[1]), state
        held.append(lease)
        return read(file)  # of one who gave the lease back between the two looks

    def _warn_once(self, problem: str) -> None:
        if not self._reported:
            self._reported = True
            message = f"the compile cache {self.folder} {problem}: programs are compiled here"
            warnings.warn(message, WanjaxWarning, stacklevel=2)


def share(folder: AnyPath, *, ahead_of_time: bool = False) -> None:
    """Use a folder, here or in a store, as JAX's cache of compiled programs from now on.

    Programs that are read from it run in this process. A folder that can only be read is enough.

    Args:
        folder: The folder.
        ahead_of_time: Whether the cache is filled for devices that are not present.

    Raises:
        WanjaxError: The folder can neither be written nor read.
    """
    if isinstance(folder, RemotePath):
        try:
            folder.check_writable()
        except Missing:  # the bucket
            raise
        except WanjaxError:
            folder.files(below=False)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WanjaxError(f"the compile cache {folder} cannot be made: {reason(error)}") from error
    shared, others = SharedCache(folder, ahead_of_time=ahead_of_time), compilation_cache.get_file_cache
    name = str(folder) if isinstance(folder, Path) else f"{folder.scheme}/{folder.path}"  # to JAX it is always a path
    _shared[name] = shared
    compilation_cache.get_file_cache = lambda path: (shared, path) if path == name else others(path)
    jax.config.update("jax_compilation_cache_dir", name)
    jax.config.update("jax_raise_persistent_cache_errors", ahead_of_time)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # whose folders' names would count in the keys
    compilation_cache.reset_cache()


def leasing() -> AbstractContextManager[None]:
    """Return a context in which this thread takes leases of the programs that it compiles, if the cache is shared."""
    shared = current()
    return shared.leasing() if shared else nullcontext()


def current() -> SharedCache | None:
    """Return the shared cache that JAX uses, None where it uses another or none."""
    return _shared.get(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


_shared: dict[str, SharedCache] = {}  # by the names that JAX has of their folders


def _write(file: AnyPath, content: bytes) -> None:
    """Write a file that appears when it is complete."""
    if isinstance(file, RemotePath):
        file.write(content)
        return
    write_whole(file, content)


def _create(file: AnyPath, content: bytes) -> bool:
    """Create a file, and return whether it is new; only one process can create it."""
    if isinstance(file, RemotePath):
        return file.create(content)
    try:
        with file.open("xb") as opened:
            opened.write(content)
    except FileExistsError:
        return False
    return True
