# SPDX-License-Identifier: Apache-2.0
"""A compile cache that workers share. The first worker that does not find a program in the cache compiles it. The other
workers wait, and then read the program.

An entry is one file or object. Its name is JAX's key, and it appears when it is complete. A process that does not find
an entry acquires the lease of the entry. Only one process can create a lease: in a folder by exclusive creation, and in
a store by a conditional write, which S3 and Google Cloud Storage offer. While the owner compiles, a thread renews the
lease every few seconds. Other processes measure the time since a renewal by their own clocks, so clocks need not agree.
If renewals stop, the owner is dead, and another process acquires the lease with the next number in the same way.

Leases only save work. If two processes compile the same program, both write the same entry.
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
from jax._src import compilation_cache  # JAX has no public interface for caches other than folders
from jax._src.compilation_cache_interface import CacheInterface

from wanjax.errors import WanjaxError, WanjaxWarning, reason
from wanjax.stores.paths import AnyPath, MissingObjectError, RemotePath, read_if_exists
from wanjax.stores.writing import missing_first_folder, write_atomically

HEARTBEAT_INTERVAL = 5.0  # seconds between two renewals of a lease
LEASE_TIMEOUT = 30.0  # seconds without a renewal after which the owner counts as dead
POLL_INTERVALS = 0.1, 2.0  # the first and the longest pause between two polls of a waiting process, in seconds


class Lease:
    """The right of a live process to compile a program. The key of the program's entry names the lease."""

    def __init__(self, folder: AnyPath, key: str):
        self.folder, self._key = folder, key
        self._id = uuid4().hex
        self._number = 0
        self._ended = Event()
        self._thread = Thread(target=self._renew, name="lease", daemon=True)

    def _file(self, number: int | None = None) -> AnyPath:
        return self.folder / f"{self._key}-lease-{self._number if number is None else number}"

    def acquire(self) -> bool:
        """Acquire the lease if it is free, and return whether this succeeded. Raises WanjaxError if the lease cannot be
        written."""
        if not _create(self._file(), self._id.encode()):
            return False
        self._thread.start()
        return True

    def wait(self, pause: float, last_seen: tuple[bytes, float]) -> tuple[bytes, float] | None:
        """Wait for a short time. Then return the lease of the other process and the time of its last renewal. Return
        None if the lease was released."""
        self._ended.wait(pause)
        if (content := read_if_exists(self._file())) is None:
            return None
        if content != last_seen[0]:
            return content, monotonic()
        if monotonic() - last_seen[1] > LEASE_TIMEOUT:
            self._number += 1
            return b"", monotonic()
        return last_seen

    def release(self) -> None:
        """Remove this lease, and earlier leases of dead processes."""
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
            with suppress(WanjaxError, OSError):  # ignored, because a later renewal may succeed
                _write(self._file(), f"{self._id} {renewal}".encode())


class EntryExists(Exception):
    """Raised if an entry already exists while the cache is filled ahead of time. The entry cannot be read, because it
    is for devices that this machine does not have."""


class SharedCache(CacheInterface):
    """JAX's cache in a folder that workers share. The first failure causes a warning. After that, this process compiles
    its programs itself.

    With `ahead_of_time`, the cache is filled for devices that this machine does not have, and `get` raises EntryExists
    for an existing entry.
    """

    def __init__(self, folder: AnyPath, *, ahead_of_time: bool = False):
        self.folder, self._ahead_of_time = folder, ahead_of_time
        self._path = Path(str(folder))  # the attribute that JAX's log uses
        self._leases, self._reported = local(), False

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None if this thread must compile the program."""
        try:
            entry = self._read_or_lease(key)
            if entry is not None and self._ahead_of_time:
                raise EntryExists(key)
            return entry
        except (WanjaxError, OSError) as error:
            self._warn_once(f"cannot be read ({error})")
            return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry."""
        try:
            _write(self.folder / f"{key}-cache", value)
        except (WanjaxError, OSError) as error:
            self._warn_once(f"cannot be written ({error})")

    @contextmanager
    def leasing(self) -> Iterator[None]:
        """Within the block, acquire a lease for each program that this thread misses. Release the leases at the end."""
        self._leases.held_leases = held_leases = []
        try:
            yield
        finally:
            self._leases.held_leases = None
            for lease in held_leases:
                lease.release()

    def _read_or_lease(self, key: str) -> bytes | None:
        held_leases, file = getattr(self._leases, "held_leases", None), self.folder / f"{key}-cache"
        # the processes of a run compile a program together, so no process may wait for a lease
        if (entry := read_if_exists(file)) is not None or held_leases is None or jax.process_count() > 1:
            return entry
        lease, pause, last_seen = Lease(self.folder, key), POLL_INTERVALS[0], (b"", monotonic())
        while not lease.acquire():
            lease_state = lease.wait(pause, last_seen)
            if (entry := read_if_exists(file)) is not None or lease_state is None:
                return entry
            pause, last_seen = min(1.5 * pause, POLL_INTERVALS[1]), lease_state
        held_leases.append(lease)
        return read_if_exists(file)  # another process may have written the entry before this process acquired the lease

    def _warn_once(self, problem: str) -> None:
        if not self._reported:
            self._reported = True
            message = f"the compile cache {self.folder} {problem}: programs are compiled here"
            warnings.warn(message, WanjaxWarning, stacklevel=2)


def share_cache(folder: AnyPath, *, ahead_of_time: bool = False) -> None:
    """Use a folder, local or in a store, as JAX's compile cache from now on.

    Programs that are read from it run in this process. A read-only folder works too.

    Args:
        folder: The folder.
        ahead_of_time: Whether the cache is filled for devices that are not present.

    Raises:
        WanjaxError: The folder can neither be written nor read.
    """
    if isinstance(folder, RemotePath):
        try:
            folder.check_writable()
        except MissingObjectError:  # the bucket
            raise
        except WanjaxError:
            folder.files(recursive=False)
    else:
        if (top := missing_first_folder(folder)) is not None:
            raise WanjaxError(f"there is no folder {top}, the first one of the compile cache {folder}: check the path")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WanjaxError(f"the compile cache {folder} cannot be created: {reason(error)}") from error
    shared, get_file_cache = SharedCache(folder, ahead_of_time=ahead_of_time), compilation_cache.get_file_cache
    name = str(folder) if isinstance(folder, Path) else f"{folder.scheme}/{folder.path}"  # JAX expects a path
    _shared_caches[name] = shared
    compilation_cache.get_file_cache = lambda path: (shared, path) if path == name else get_file_cache(path)
    jax.config.update("jax_compilation_cache_dir", name)
    jax.config.update("jax_raise_persistent_cache_errors", ahead_of_time)
    # JAX would include the names of these folders in keys
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()


def leasing() -> AbstractContextManager[None]:
    """Within the block, if the cache is shared, this thread acquires a lease for each program that it compiles."""
    shared = current_shared_cache()
    return shared.leasing() if shared else nullcontext()


def current_shared_cache() -> SharedCache | None:
    """Return the shared cache that JAX uses. Return None if JAX uses a different cache or none."""
    return _shared_caches.get(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


_shared_caches: dict[str, SharedCache] = {}  # identified by the name of the folder in JAX's configuration


def _write(file: AnyPath, content: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is complete."""
    if isinstance(file, RemotePath):
        file.write(content)
        return
    write_atomically(file, content)


def _create(file: AnyPath, content: bytes) -> bool:
    """Create a file and return True, or return False if the file exists. If several processes create the same file,
    only one of them gets True."""
    if isinstance(file, RemotePath):
        return file.create(content)
    try:
        with file.open("xb") as opened:
            opened.write(content)
    except FileExistsError:
        return False
    return True
