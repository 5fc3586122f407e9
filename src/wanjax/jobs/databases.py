# SPDX-License-Identifier: Apache-2.0
"""SQLite and PostgreSQL for the job store: short transactions on two connections per process.

One connection writes and one reads, each used by one thread at a time. Statements name their values as `:name`.
"""

import fcntl
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote

import psutil

from wanjax.errors import WanjaxError, reason
from wanjax.stores.writing import check_folder

ENV_VARIABLE = "WANJAX_DATABASE"  # of the environment, which names a database and hides its password
POSTGRES = ("postgresql://", "postgres://")
EXAMPLE = "postgresql://USER:PASSWORD@HOST/NAME"
CONNECT_SECONDS, LOCK_SECONDS, CUT_SECONDS = 4, 4, 10
"""Timeouts of connecting, of waiting for a lock, and of a connection whose network is cut."""
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\w*|(fuse\.)?(ceph|glusterfs|sshfs|s3fs|gcsfuse|juicefs|lustre)|beegfs|gpfs|afs"
)
"""Kinds of file systems on which SQLite's locks do not hold."""
REFUSALS = ("authentication", "password", "does not exist", "pg_hba", "not permitted", "permission denied", "SSL")
"""Words in a server's answer to a connection that mean that retrying does not help."""
TRANSIENT = ("40001", "40P01", "53300", "55P03", "25P03", "57P01", "57P02", "57P03")
"""PostgreSQL's transient error codes: deadlocks, locks, too many connections, a server that starts or stops."""
LEAST_FREE = 2**20  # bytes of a disk, below which an I/O error is for want of room
FULL = ("SQLITE_FULL", "53100")  # the codes of a full disk

Values = Mapping[str, Any]


class DatabaseError(WanjaxError):
    """The database cannot be used, or rejects a statement.

    Args:
        message: What is wrong, and what to do.
        is_full: Whether the disk of the database has no room; False by default.
    """

    def __init__(self, message: str, is_full: bool = False):
        super().__init__(message)
        self.is_full = is_full

    def __reduce__(self) -> Any:
        return DatabaseError, (str(self), self.is_full)


@runtime_checkable
class Connection(Protocol):
    """A connection in a transaction."""

    def execute(self, text: str, values: Values = ..., /) -> Any:
        """Run a statement, and return a cursor of its rows.

        Args:
            text: The statement.
            values: Its values by name.
        """
        ...

    def executemany(self, text: str, rows: Sequence[Values], /) -> Any:
        """Run a statement for each of several values.

        Args:
            text: The statement.
            rows: The values of each, by name.
        """
        ...


def resolve_database(option: str | None) -> str | None:
    """Return the database named by an option or by the environment, or None.

    Args:
        option: The option's value; None where it is not given.
    """
    return option or os.environ.get(ENV_VARIABLE) or None


def open_database(url: str) -> "Database":
    """Return the database of a path of SQLite's file, or of a URL of PostgreSQL.

    Args:
        url: The path or the URL.

    Raises:
        WanjaxError: The URL names neither, or the file's folder cannot keep it.
    """
    if url.startswith(POSTGRES):
        return Postgres(url)
    if "://" in url:
        raise WanjaxError(f"a database is a file of SQLite or {EXAMPLE}, got {public_url(url)}: give one of the two")
    return Sqlite(Path(url).expanduser().absolute())


def check_exists(url: str) -> None:
    """Raise WanjaxError if a URL or path is that of an SQLite file that does not exist.

    Args:
        url: The path or the URL.
    """
    if "://" not in url and not (file := Path(url).expanduser().absolute()).exists():
        raise WanjaxError(
            f"there is no database {file}: give --database the file of a server or a batch, which is started first"
        )


def public_url(url: str) -> str:
    """Return a database's name without its password, for messages.

    Args:
        url: A path or a URL.
    """
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    login, at, where = rest.rpartition("@")  # the last one: a password that should have been quoted may have others
    return f"{scheme}://{login.partition(':')[0]}{at}{where.partition('?')[0]}"


def without_password(text: str, url: str) -> str:
    """Remove the password of a URL from a text, also the parts into which it may be split by a parser.

    Args:
        text: A text that may hold parts of the URL, such as a library's message.
        url: The URL.
    """
    login = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    query = re.findall(r"[?&](?:ssl)?password=([^&]*)", url)
    for secret in (login, *query, *re.split(r"[@:/?#\[\]]", login)):
        for form in {secret, unquote(secret)} - {""}:
            text = text.replace(form, "***")
    return text


class _SharedConnection:
    """A lazily opened connection that one thread uses at a time."""

    def __init__(self, connect: Callable[[], Any], errors: tuple[type[Exception], ...]):
        self._connect, self._errors = connect, errors
        self._lock, self._closed = Lock(), False
        self._connection: Any = None

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Yield the connection; after a database error it is closed and reopened on next use."""
        with self._lock:
            if self._closed:
                raise DatabaseError("the database was closed")
            if self._connection is None:
                self._connection = self._connect()
            try:
                yield self._connection
            except self._errors:
                self._drop()
                raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self._errors):
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()


@contextmanager
def _commit_or_rollback(connection: Any, begin: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Commit after the block, or roll back if it fails."""
    connection.execute(begin)
    try:
        yield
    except BaseException:
        with suppress(*errors):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class Database:
    """A database.

    `name` is its name in messages, `now` an SQL expression for its time in seconds, and `errors` the exceptions of its
    library; `is_shared` says whether other hosts can connect.

    Args:
        connect: Opens a connection.
    """

    name: str
    is_shared: bool
    now: str
    errors: tuple[type[Exception], ...]

    def __init__(self, connect: Callable[[], Any]):
        self._writer, self._reader = (_SharedConnection(connect, self.errors) for _ in range(2))

    @contextmanager
    def transaction(self, *, write: bool, durable: bool) -> Iterator[Connection]:
        """Run the block in a transaction, and yield its connection.

        Args:
            write: Whether it writes; a process runs one such transaction at a time.
            durable: Whether its changes must survive a power failure or a crash of the database.
        """
        slot = self._writer if write else self._reader
        with slot.use() as connection, self._write_transaction(connection, durable) if write else nullcontext():
            yield connection

    def _write_transaction(self, connection: Any, durable: bool) -> AbstractContextManager[None]:
        """Run the block in a transaction that writes."""
        raise NotImplementedError

    def prepare(self, connection: Connection) -> None:
        """Lock out other processes while the tables are created.

        Args:
            connection: The connection, in a transaction that goes on to make them.
        """

    def is_transient(self, error: Exception) -> bool:
        """Return whether the same transaction may succeed later.

        Args:
            error: The error of the database's library.
        """
        raise NotImplementedError

    def is_full(self, error: Exception) -> bool:
        """Return whether the database rejected a statement because its disk is full.

        Args:
            error: The error of the database's library.
        """
        return getattr(error, "sqlite_errorname", None) in FULL or getattr(error, "sqlstate", None) in FULL

    def reclaim(self) -> None:
        """Free space for a few small changes on a full disk, inside the database's own files."""

    def close(self) -> None:
        self._writer.close()
        self._reader.close()


class Sqlite(Database):
    """A file of SQLite in WAL mode, for the processes of one host.

    Writers take turns with a lock on a separate file, since SQLite's own waiting, by sleeping, can starve some of them.

    Args:
        file: The file, on a disk of this host.
    """

    is_shared = False
    now = "(julianday('now') - 2440587.5) * 86400.0"
    errors = (sqlite3.Error,)

    def __init__(self, file: Path):
        _check_disk(file.parent)
        check_folder(file.parent)
        self.file, self.name = file, str(file)
        try:
            self._lock_file = os.open(f"{file}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DatabaseError(f"{file}-turn cannot be written: {reason(error)}") from error
        super().__init__(self._connect)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.file, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    @contextmanager
    def _write_transaction(self, connection: Any, durable: bool) -> Iterator[None]:
        with self._write_lock():
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with _commit_or_rollback(connection, "BEGIN IMMEDIATE", self.errors):
                yield

    @contextmanager
    def _write_lock(self) -> Iterator[None]:
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def reclaim(self) -> None:
        with self._writer.use() as connection, self._write_lock():
            connection.execute("PRAGMA wal_checkpoint(RESTART)")  # the log is written from its beginning again

    def is_transient(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorname", "") in ("SQLITE_BUSY", "SQLITE_LOCKED")

    def is_full(self, error: Exception) -> bool:
        """Tell also of a full disk that SQLite calls an I/O error, as for the files beside its own."""
        failed = getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR")
        return super().is_full(error) or (failed and shutil.disk_usage(self.file.parent).free < LEAST_FREE)

    def close(self) -> None:
        super().close()
        os.close(self._lock_file)


class Postgres(Database):
    """A PostgreSQL, for the processes of many hosts.

    Args:
        url: Its URL.
    """

    is_shared = True
    now = "extract(epoch FROM clock_timestamp())::float8"

    def __init__(self, url: str):
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict
        except ImportError as error:
            raise WanjaxError("PostgreSQL needs psycopg: run pip install 'wanjax[postgres]'") from error
        self.url, self.name = url, public_url(url)
        self.errors = (psycopg.Error,)
        try:
            parameters = conninfo_to_dict(url)
        except psycopg.Error:
            raise DatabaseError(f"the URL of a database does not read as {EXAMPLE}: quote a character such as @ in its "
                                "password as %40") from None  # the library's message has parts of the URL  # fmt: skip
        server_settings = {  # at the server's end too: a client that the network cuts off keeps no lock
            "lock_timeout": LOCK_SECONDS * 1000,
            "idle_in_transaction_session_timeout": CUT_SECONDS * 1000,
            "tcp_user_timeout": CUT_SECONDS * 1000,
            "tcp_keepalives_idle": CUT_SECONDS // 2,
            "tcp_keepalives_interval": 2,
        }
        texts = [parameters.pop("options", None), *(f"-c {name}={value}" for name, value in server_settings.items())]
        options = " ".join(str(text) for text in texts if text)
        network = {
            "tcp_user_timeout": CUT_SECONDS * 1000,
            "keepalives_idle": CUT_SECONDS // 2,
            "keepalives_interval": 2,
        }
        connect_options: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "application_name": "wanjax",
            **network,
            **parameters,
        }
        self._connect: Callable[[], Any] = lambda: _NamedParameterConnection(
            psycopg.connect(autocommit=True, options=options, **connect_options)
        )
        super().__init__(self._connect_checked)

    def _connect_checked(self) -> Any:
        try:
            return self._connect()
        except self.errors as error:
            text = str(error)
            if any(word in text for word in REFUSALS):
                answer = text.rpartition("FATAL:")[2].strip().partition("\n")[0]
                problem = f"{self.name} refuses the login ({without_password(answer, self.url)})"
                raise DatabaseError(
                    f"{problem}: correct the user, the password or the name in --database or {ENV_VARIABLE}"
                ) from None
            raise

    def _write_transaction(self, connection: Any, durable: bool) -> AbstractContextManager[None]:
        begin = "BEGIN" if durable else "BEGIN; SET LOCAL synchronous_commit = off"
        return _commit_or_rollback(connection, begin, self.errors)

    def prepare(self, connection: Connection) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(7241)")

    def is_transient(self, error: Exception) -> bool:
        code = getattr(error, "sqlstate", None)
        if code is None:  # no answer of the server's: the connection is lost, or was not made
            import psycopg

            return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return code in TRANSIENT or code.startswith("08")


class _NamedParameterConnection:
    """A psycopg connection that accepts `:name` placeholders, as SQLite does."""

    def __init__(self, connection: Any):
        self._connection = connection

    def execute(self, text: str, values: Values | None = None) -> Any:
        if values is None:
            return self._connection.execute(text)
        return self._connection.execute(_to_psycopg(text), values)

    def executemany(self, text: str, rows: Sequence[Values]) -> None:
        self._connection.cursor().executemany(_to_psycopg(text), rows)

    def close(self) -> None:
        self._connection.close()


@lru_cache(maxsize=256)
def _to_psycopg(text: str) -> str:
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", text.replace("%", "%%"))


def _check_disk(folder: Path) -> None:
    """Raise WanjaxError if the folder of the SQLite file is on a network file system."""
    parts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    nearest = max(parts, key=lambda part: len(part.mountpoint), default=None)
    if nearest is not None and NETWORK_FILE_SYSTEMS.fullmatch(nearest.fstype):
        problem = f"{folder} is on a network file system, {nearest.fstype}, where SQLite is not safe"
        raise WanjaxError(f"{problem}: --database FILE on a disk of this machine, or PostgreSQL's URL")
