# SPDX-License-Identifier: Apache-2.0
"""SQLite and PostgreSQL for the job store: short transactions on two connections per process.

One connection writes, and the other one reads. Only one thread at a time uses a connection. SQL placeholders are
written `:name`.
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

from wanjax.errors import WanjaxError, install_extra, reason
from wanjax.jobs.addresses import MAX_PORT, is_port
from wanjax.stores.writing import check_folder

ENV_VARIABLE = "WANJAX_DATABASE"  # the environment variable keeps the password out of the command line
POSTGRES_SCHEMES = ("postgresql://", "postgres://")
SQLITE_SUFFIXES = (".sqlite", ".sqlite3", ".db")  # suffixes that a new database file may have
SQLITE_HEADER = b"SQLite format 3\0"  # the first bytes of every SQLite file that is not empty
POSTGRES_EXAMPLE = "postgresql://USER:PASSWORD@HOST/NAME"
CONNECT_TIMEOUT, LOCK_TIMEOUT, NETWORK_TIMEOUT = 4, 4, 10
"""Seconds to wait for a connection, for a lock, and for a network that does not answer."""
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\w*|(fuse\.)?(ceph|glusterfs|sshfs|s3fs|gcsfuse|juicefs|lustre)|beegfs|gpfs|afs"
)
"""File systems on which SQLite's locks do not work."""
PERMANENT_ERROR_WORDS = (
    "authentication",
    "password",
    "does not exist",
    "pg_hba",
    "not permitted",
    "permission denied",
    "SSL",
)
"""Words in a connection error that mean that a retry cannot help."""
TRANSIENT_CODES = ("40001", "40P01", "53300", "55P03", "25P03", "57P01", "57P02", "57P03")
"""PostgreSQL's codes of transient errors: deadlocks, lock timeouts, too many connections, starting or stopping."""
MIN_FREE_BYTES = 2**20  # if fewer bytes are free, an I/O error counts as a full disk
DISK_FULL_CODES = ("SQLITE_FULL", "53100")  # error codes of SQLite and of PostgreSQL

SqlValues = Mapping[str, Any]


class DatabaseError(WanjaxError):
    """The database cannot be used, or it rejected a statement.

    Args:
        message: What is wrong, and what to do.
        is_full: Whether the disk of the database is full.
    """

    def __init__(self, message: str, is_full: bool = False):
        super().__init__(message)
        self.is_full = is_full

    def __reduce__(self) -> Any:
        return DatabaseError, (str(self), self.is_full)


@runtime_checkable
class Connection(Protocol):
    """A connection in a transaction."""

    def execute(self, sql: str, values: SqlValues = ..., /) -> Any:
        """Run an SQL statement, and return a cursor over its rows.

        Args:
            sql: The statement.
            values: The values of its placeholders, by name.
        """
        ...

    def executemany(self, sql: str, rows: Sequence[SqlValues], /) -> Any:
        """Run an SQL statement once for each row of values.

        Args:
            sql: The statement.
            rows: The values of the placeholders, by name, for each run.
        """
        ...


def resolve_database(option: str | None) -> str | None:
    """Return the database that the option or the environment names, or None.

    Args:
        option: The value of `--database`; None if the option is missing.
    """
    return option or os.environ.get(ENV_VARIABLE) or None


def open_database(url: str) -> "Database":
    """Open an SQLite file or connect to PostgreSQL.

    Args:
        url: The path of the file, or the URL.

    Raises:
        WanjaxError: The URL is not one of PostgreSQL, or the file's folder cannot be used.
    """
    check_name(url)
    return Postgres(url) if url.startswith(POSTGRES_SCHEMES) else Sqlite(Path(url).expanduser().absolute())


def check_name(url: str) -> None:
    """Raise WanjaxError unless a name is a PostgreSQL URL, an SQLite database, or a new file with a suffix of SQLite.

    Without this check, a mistyped URL would become the name of a file.

    Args:
        url: The path of the file, or a URL.
    """
    if url.startswith(POSTGRES_SCHEMES):
        return
    if "://" in url:
        raise WanjaxError(
            f"the database {public_url(url)} is neither a file nor PostgreSQL: give a path, or {POSTGRES_EXAMPLE}"
        )
    file = Path(url).expanduser()
    # `os.path` raises no error for an invalid name
    if file.suffix.lower() not in SQLITE_SUFFIXES and not os.path.exists(file):
        name = "that file" if "@" in url else str(file)  # a URL without its scheme may contain a password
        raise WanjaxError(
            f"the database {name} does not exist, and a new one ends in {' or '.join(SQLITE_SUFFIXES)}: "
            f"give such a name, or {POSTGRES_EXAMPLE}"
        )
    new_name = f"a new name that ends in {' or '.join(SQLITE_SUFFIXES)}"
    if os.path.isdir(file):
        raise WanjaxError(f"the database {file} is a folder: give an SQLite file in it, or {new_name}")
    first_bytes = b""
    if os.path.isfile(file):
        with suppress(OSError), open(file, "rb") as stream:
            first_bytes = stream.read(len(SQLITE_HEADER))
    if first_bytes and first_bytes != SQLITE_HEADER:
        raise WanjaxError(f"the database {file} is not an SQLite database: give another file, or {new_name}")


def check_exists(url: str) -> None:
    """Raise WanjaxError if a database is an SQLite file that does not exist.

    Args:
        url: The path of the file, or a URL.
    """
    if "://" not in url and not (file := Path(url).expanduser().absolute()).exists():
        raise WanjaxError(
            f"the database {file} does not exist: start the server or the batch first, and give its --database"
        )


def public_url(url: str) -> str:
    """Return a database's path or URL without the password, for messages.

    Args:
        url: A path or a URL.
    """
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    credentials, at_sign, host_and_database = rest.rpartition(
        "@"
    )  # split at the last @, because an unquoted password may contain more of them
    return f"{scheme}://{credentials.partition(':')[0]}{at_sign}{host_and_database.partition('?')[0]}"


def mask_password(text: str, url: str) -> str:
    """Replace the password of a URL by *** in a text. If a parser has split the URL, also replace the fragments of the
    password.

    Args:
        text: A text that may contain parts of the URL, such as an error message of a library.
        url: The URL.
    """
    password = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    query = re.findall(r"[?&](?:ssl)?password=([^&]*)", url)
    for secret in (password, *query, *re.split(r"[@:/?#\[\]]", password)):
        for secret_text in {secret, unquote(secret)} - {""}:
            text = text.replace(secret_text, "***")
    return text


class _SharedConnection:
    """A connection that is opened at its first use. Only one thread at a time can use it."""

    def __init__(self, connect: Callable[[], Any], errors: tuple[type[Exception], ...]):
        self._connect, self._errors = connect, errors
        self._lock, self._closed = Lock(), False
        self._connection: Any = None

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Yield the connection. After a database error, close it; the next use reopens it."""
        with self._lock:
            if self._closed:
                raise DatabaseError("the database is closed: open it again")
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
    """Begin a transaction; commit it after the block, or roll it back if the block fails."""
    connection.execute(begin)
    try:
        yield
    except BaseException:
        with suppress(*errors):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class Database:
    """Base class of the databases.

    Args:
        connect: Opens a connection.

    Attributes:
        name: The path or URL of the database in messages.
        is_shared: Whether other hosts can connect.
        now: An SQL expression for the database's time, in seconds since 1970.
        errors: The exceptions of the database's library.
    """

    name: str
    is_shared: bool
    now: str
    errors: tuple[type[Exception], ...]

    def __init__(self, connect: Callable[[], Any]):
        self._writer, self._reader = (_SharedConnection(connect, self.errors) for _ in range(2))

    @contextmanager
    def transaction(self, *, writes: bool, durable: bool) -> Iterator[Connection]:
        """Run the block in a transaction, and yield its connection.

        Args:
            writes: Whether the transaction writes. A process runs one such transaction at a time.
            durable: Whether the changes must survive a power failure or a crash of the database.
        """
        shared_connection = self._writer if writes else self._reader
        with (
            shared_connection.use() as connection,
            self._write_transaction(connection, durable) if writes else nullcontext(),
        ):
            yield connection

    def _write_transaction(self, connection: Any, durable: bool) -> AbstractContextManager[None]:
        """Run the block in a transaction that can write."""
        raise NotImplementedError

    def prepare(self, connection: Connection) -> None:
        """Lock the database, so that only one process creates the tables.

        Args:
            connection: A connection in the transaction that creates them.
        """

    def is_transient(self, error: Exception) -> bool:
        """Return whether an error is temporary, so that the same transaction may succeed later.

        Args:
            error: The error of the database's library.
        """
        raise NotImplementedError

    def is_full(self, error: Exception) -> bool:
        """Return whether the database rejected a statement because its disk is full.

        Args:
            error: The error of the database's library.
        """
        return (
            getattr(error, "sqlite_errorname", None) in DISK_FULL_CODES
            or getattr(error, "sqlstate", None) in DISK_FULL_CODES
        )

    def reclaim(self) -> None:
        """If the disk is full, free space inside the database's files, so that a few small changes fit."""

    def close(self) -> None:
        self._writer.close()
        self._reader.close()


class Sqlite(Database):
    """An SQLite file in WAL mode, for the processes of one host.

    Writers wait for a lock on a separate file, because SQLite waits by sleeping and polling, which can starve a writer.

    Args:
        file: The path of the file, on a local disk.
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
            problem = f"the lock file {file}-turn cannot be written, {reason(error)}"
            raise DatabaseError(f"{problem}: give --database a file that this user can write") from error
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
            connection.execute("PRAGMA wal_checkpoint(RESTART)")  # the next writer overwrites the log from its start

    def is_transient(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorname", "") in ("SQLITE_BUSY", "SQLITE_LOCKED")

    def is_full(self, error: Exception) -> bool:
        """Return whether the disk is full. For its log and its index files, SQLite reports a full disk as an I/O
        error."""
        is_io_error = getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR")
        return super().is_full(error) or (is_io_error and shutil.disk_usage(self.file.parent).free < MIN_FREE_BYTES)

    def close(self) -> None:
        super().close()
        os.close(self._lock_file)


class Postgres(Database):
    """A PostgreSQL database, for the processes of many hosts.

    Args:
        url: The URL of the database.
    """

    is_shared = True
    now = "extract(epoch FROM clock_timestamp())::float8"

    def __init__(self, url: str):
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict
        except ImportError as error:
            raise WanjaxError(f"PostgreSQL needs psycopg: {install_extra('postgres')}") from error
        self.url, self.name = url, public_url(url)
        self.errors = (psycopg.Error,)
        try:
            parameters = conninfo_to_dict(url)
        except psycopg.Error:
            message = f"the URL of the database is not of the form {POSTGRES_EXAMPLE}"
            advice = "percent-encode special characters in the password, such as @ as %40"
            raise DatabaseError(f"{message}: {advice}") from None  # the message of psycopg may contain parts of the URL
        for port in filter(None, str(parameters.get("port") or "").split(",")):  # one for each host
            if not is_port(port):
                raise DatabaseError(f"the database {self.name} has the port {port!r}: give a port from 1 to {MAX_PORT}")
        server_settings = {  # the server also releases the locks of a client that lost its network
            "lock_timeout": LOCK_TIMEOUT * 1000,
            "idle_in_transaction_session_timeout": NETWORK_TIMEOUT * 1000,
            "tcp_user_timeout": NETWORK_TIMEOUT * 1000,
            "tcp_keepalives_idle": NETWORK_TIMEOUT // 2,
            "tcp_keepalives_interval": 2,
        }
        option_texts = [
            parameters.pop("options", None),
            *(f"-c {name}={value}" for name, value in server_settings.items()),
        ]
        options = " ".join(str(text) for text in option_texts if text)
        keepalive_options = {
            "tcp_user_timeout": NETWORK_TIMEOUT * 1000,
            "keepalives_idle": NETWORK_TIMEOUT // 2,
            "keepalives_interval": 2,
        }
        connect_options: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT,
            "application_name": "wanjax",
            **keepalive_options,
            **parameters,
        }
        self._connect: Callable[[], Any] = lambda: _NamedParameterConnection(
            psycopg.connect(autocommit=True, options=options, **connect_options)
        )
        super().__init__(self._connect_or_explain)

    def _connect_or_explain(self) -> Any:
        """Connect, and say what to correct if the database rejects the login."""
        try:
            return self._connect()
        except self.errors as error:
            error_text = str(error)
            if any(word in error_text for word in PERMANENT_ERROR_WORDS):
                server_message = error_text.rpartition("FATAL:")[2].strip().partition("\n")[0]
                problem = f"{self.name} rejects the login ({mask_password(server_message, self.url)})"
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
        if code is None:  # the server did not answer: the connection failed
            import psycopg

            return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return code in TRANSIENT_CODES or code.startswith("08")


class _NamedParameterConnection:
    """A psycopg connection that accepts `:name` placeholders, like SQLite."""

    def __init__(self, connection: Any):
        self._connection = connection

    def execute(self, sql: str, values: SqlValues | None = None) -> Any:
        if values is None:
            return self._connection.execute(sql)
        return self._connection.execute(_to_psycopg(sql), values)

    def executemany(self, sql: str, rows: Sequence[SqlValues]) -> None:
        self._connection.cursor().executemany(_to_psycopg(sql), rows)

    def close(self) -> None:
        self._connection.close()


@lru_cache(maxsize=256)
def _to_psycopg(sql: str) -> str:
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql.replace("%", "%%"))


def _check_disk(folder: Path) -> None:
    """Raise WanjaxError if the folder of the SQLite file is on a network file system."""
    mounts = [
        partition for partition in psutil.disk_partitions(all=True) if folder.is_relative_to(partition.mountpoint)
    ]
    mount = max(mounts, key=lambda partition: len(partition.mountpoint), default=None)
    if mount is not None and NETWORK_FILE_SYSTEMS.fullmatch(mount.fstype):
        problem = f"{folder} is on the network file system {mount.fstype}, where SQLite's locks do not work"
        raise WanjaxError(f"{problem}: give --database a file on a local disk, or a PostgreSQL URL")
