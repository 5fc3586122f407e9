# SPDX-License-Identifier: Apache-2.0
"""Paths of local files, and of objects in a store. A URL such as s3://BUCKET/NAME names an object. The library fsspec
reads and writes objects.

An object appears in a store only when it is complete, and cannot be renamed. Files are therefore written locally first
and then uploaded. A single file takes one upload. A folder has a marker file, which is uploaded last and tells readers
that the folder is complete. The store's library reads credentials from the environment and from the user's files. URLs
never contain credentials.
"""

import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from wanjax.errors import DISK_FULL_ERRNOS, WanjaxError, causes, install_extra, wrap_write_errors
from wanjax.stores.temporary import temp_dir

STORE_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
"""The supported URL schemes, each with the library that fsspec needs for it."""
UPLOAD_OPTIONS = {"gs": {"consistency": "md5"}}
"""Options that make a library verify its uploads. Without them, gcsfs truncates a file that contains the library's end
marker.
"""
# matches the page of a repository or of a file on the Hugging Face hub, with the groups OWNER/NAME and FILE
HUB_ADDRESS_PATTERN = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)"
    r"(?:/(?:tree|resolve|blob)/[^/?]+(?:/([^?]+?))?)?/?(?:\?.*)?",
    re.IGNORECASE,
)
WEB_ADDRESS_PATTERN = re.compile(r"(https?|ftp)://\S+", re.IGNORECASE)
LOCAL_SCHEME = "file"  # the scheme of this machine's files
SCHEMES = ", ".join(f"{scheme}://" for scheme in (*STORE_LIBRARIES, LOCAL_SCHEME))
URL_PATTERN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://(?P<path>.*)", re.IGNORECASE | re.DOTALL)
BUCKET_PATTERN = re.compile(r"[\w.-]+", re.ASCII)
PROGRESS_BATCH = 64  # the number of files between two reports of progress
MAX_OBJECT_BYTES = 2 << 30  # the maximum size, in bytes, of an object that is read as a whole
MAX_MESSAGE_CHARS = 200  # the maximum length of a library's message
OnProgress = Callable[[list[str]], object]


class StoreError(WanjaxError):
    """The store cannot be reached, or rejects an operation."""


class MissingObjectError(StoreError):
    """The object or folder is not in the store."""


@dataclass(frozen=True)
class RemotePath:
    """The path of an object or a folder in a store. A folder is a prefix of object names that ends in a slash.

    The class has the methods of `pathlib.Path` that wanjax needs. Methods raise StoreError if the store cannot be
    reached, its library is missing, or a permission is denied.
    """

    scheme: str
    path: str
    """The bucket, a slash, and the object's name in the bucket."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str | Path) -> "RemotePath":
        return RemotePath(self.scheme, f"{self.path}/{Path(name).as_posix()}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.scheme, self.path.rpartition("/")[0])

    def absolute(self) -> "RemotePath":
        return self

    def is_file(self) -> bool:
        return self._object_type() == "file"

    def exists(self) -> bool:
        """Return True if there is such an object, or a folder with objects."""
        return self._object_type() is not None

    def _object_type(self) -> str | None:
        """Return "file" or "directory"; return None if neither exists.

        fsspec also reports None for an unreachable store.
        """
        try:
            return self._info()["type"]
        except MissingObjectError:
            return None

    def size(self) -> int:
        """Return an object's size in bytes; raise MissingObjectError if it does not exist."""
        return self._info()["size"]

    def _info(self) -> dict[str, Any]:
        with self._store_errors("read"):
            return self._filesystem.info(self.path)

    def files(self, *, recursive: bool = True) -> dict[str, int]:
        """Return the sizes of a folder's objects by name; with `recursive`, include the objects in its subfolders.

        Names that lead outside the folder are omitted.
        """
        with self._store_errors("read"):
            objects = self._filesystem.find(self.path, maxdepth=None if recursive else 1, detail=True)
        prefix = f"{self.path}/"
        size_by_path = {path.lstrip("/"): info["size"] for path, info in objects.items()}
        size_by_name = {path[len(prefix) :]: size for path, size in size_by_path.items() if path.startswith(prefix)}
        return {name: size for name, size in size_by_name.items() if _is_safe_name(name)}

    def read_object(self, max_bytes: int) -> bytes:
        """Return an object's bytes.

        Raises:
            MissingObjectError: The object does not exist.
            WanjaxError: The object has more than `max_bytes`.
        """
        with self._store_errors("read"):
            content = self._filesystem.cat_file(self.path, start=0, end=max_bytes + 1)
        if len(content) > max_bytes:
            raise WanjaxError(f"{self} has more than {max_bytes:,} bytes: check the name of the file")
        return content

    def read_part(self, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to `end`; raise MissingObjectError if it does not exist."""
        with self._store_errors("read"):
            return self._filesystem.cat_file(self.path, start=start, end=end)

    def write(self, content: bytes) -> None:
        """Write an object, replacing an existing one."""
        with self._store_errors("written"):
            self._filesystem.pipe_file(self.path, content)

    def create(self, content: bytes) -> bool:
        """Create an object and return True. Return False if it already exists.

        If several processes call this, only one process creates the object.
        """
        with self._store_errors("written"):
            try:
                self._filesystem.pipe_file(self.path, content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self) -> None:
        """Remove an object."""
        with self._store_errors("removed"):
            self._filesystem.rm_file(self.path)

    def remove_all(self) -> None:
        """Remove the objects of a folder."""
        for name in self.files():
            (self / name).remove()

    def upload(self, file: Path) -> None:
        """Upload a file as this object. The object appears when the upload is complete."""
        with self._store_errors("written"):
            self._filesystem.put_file(str(file), self.path)

    def upload_all(self, files: Mapping[str, Path], progress: OnProgress = lambda names: None) -> None:
        """Upload files to a folder under the names of the mapping; `progress` receives the names of uploaded files."""
        for names in _batches(files):
            with self._store_errors("written"):
                self._filesystem.put([str(files[name]) for name in names], [f"{self.path}/{name}" for name in names])
            progress(names)

    def download_all(self, names: Iterable[str], folder: Path, progress: OnProgress = lambda names: None) -> None:
        """Download objects of a folder to a local folder; each file appears when it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        with temp_dir(folder) as partial:
            for batch in _batches(names):
                with self._store_errors("read"):
                    self._filesystem.get(
                        [f"{self.path}/{name}" for name in batch], [f"{partial}/{name}" for name in batch]
                    )
                for name in batch:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (partial / name).replace(folder / name)
                progress(batch)

    def check_writable(self) -> None:
        """Raise WanjaxError unless objects can be written to this folder and removed."""
        trial = f"{self.path}/.{uuid4().hex}.trial"
        with self._store_errors("written to"):
            self._filesystem.pipe_file(trial, b"")
            self._filesystem.rm_file(trial)

    @property
    def _filesystem(self) -> Any:
        import fsspec  # imported late, because few runs need fsspec

        silence_logs(STORE_LIBRARIES[self.scheme])
        options = UPLOAD_OPTIONS.get(self.scheme, {})
        return fsspec.filesystem(self.scheme, use_listings_cache=False, **options)  # other processes write too

    @contextmanager
    def _store_errors(self, action: str) -> Iterator[None]:
        """Convert the library's errors to StoreError; `action` says what failed, as a participle such as "read"."""
        try:
            yield
        except WanjaxError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:  # of a local disk
                raise
            message = (
                f"{self} cannot be {action}, {_one_line_cause(error)}: check the bucket, and the credentials for it"
            )
            raise (MissingObjectError if isinstance(error, FileNotFoundError) else StoreError)(message) from error


AnyPath = Path | RemotePath


@cache
def silence_logs(library: str) -> None:
    """Stop a library from printing its log, unless the process has log handlers.

    The library raises the same errors anyway.
    """
    logging.getLogger(library).addHandler(logging.NullHandler())


def is_url(name: object) -> bool:
    """Return True if a name is a URL of any kind."""
    return isinstance(name, RemotePath) or (isinstance(name, str) and URL_PATTERN.match(name) is not None)


def is_http_url(text: str) -> bool:
    """Return True for a URL of HTTP or HTTPS with a host and, if it has a port, a valid port."""
    try:
        parts = urlsplit(text)
        has_valid_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and has_valid_port


def base_name(text: str) -> str:
    """Return the last part of a path or URL.

    Any other text, such as a model's id on the hub, is returned unchanged.
    """
    if URL_PATTERN.fullmatch(text):
        return text.rstrip("/").rpartition("/")[2]
    path = Path(text).expanduser()
    return path.absolute().name if path.is_absolute() or os.path.exists(path) else text


def parse_path(name: str | Path | RemotePath) -> AnyPath:
    """Parse a path, the URL of a store, or file:///PATH.

    Raises WanjaxError for another URL, or if the library of the store is not installed.
    """
    if isinstance(name, RemotePath):
        return name
    if not is_url(name):
        return Path(name).expanduser()
    match = URL_PATTERN.fullmatch(str(name))
    assert match is not None
    scheme, path = match["scheme"].lower(), match["path"]
    if scheme == LOCAL_SCHEME:
        if not path.startswith("/"):
            raise WanjaxError(f"{name} is not the URL of a local file: write file:///PATH with an absolute path")
        return Path(path)
    if scheme not in STORE_LIBRARIES:
        if WEB_ADDRESS_PATTERN.fullmatch(str(name)):
            raise WanjaxError(f"{name} is {download_advice(str(name))}, and {SCHEMES} can be read and written")
        raise WanjaxError(f"{scheme}:// is not a supported store: use {SCHEMES}")
    bucket, *parts = (path[:-1] if path.endswith("/") else path).split("/")
    if not BUCKET_PATTERN.fullmatch(bucket) or not all(
        map(_is_safe_name, parts)
    ):  # the error message leaves out the URL, because it may contain keys
        raise WanjaxError(f"a URL of {scheme}:// is malformed: write {scheme}://BUCKET/NAME, without credentials")
    if not find_spec(STORE_LIBRARIES[scheme]):
        raise WanjaxError(f"{name} needs {STORE_LIBRARIES[scheme]}, which is missing: {install_extra('cloud')}")
    return RemotePath(scheme, "/".join((bucket, *parts)))


def full_name(name: str | Path | RemotePath) -> str:
    """Return the absolute path of an existing local file or folder; return any other name unchanged."""
    path = parse_path(name)
    return str(path.absolute()) if isinstance(path, Path) and os.path.exists(path) else str(name)


def check_no_web_address(path: str | AnyPath) -> None:
    """Raise WanjaxError for a web address as the name of a file to write."""
    if WEB_ADDRESS_PATTERN.fullmatch(str(path)):
        place = f"give a file or folder of this machine, or a URL of {SCHEMES}"
        raise WanjaxError(f"{path} is a web address, where no files can be written: {place}")


def download_advice(address: str, *, accepts_hub: bool = False) -> str:
    """Return advice for a web address that is given as a file.

    Args:
        address: The address.
        accepts_hub: Whether names of the hub are accepted too, such as OWNER/NAME and OWNER/NAME/FILE.
    """
    if accepts_hub and (hub_address := HUB_ADDRESS_PATTERN.fullmatch(address)):
        return f"an address of the hub: give {'/'.join(filter(None, hub_address.groups()))}"
    return f"a web address, and only files are read: download it with `curl -LO {shlex.quote(address)}`"


def missing_file(path: str | Path, advice: str = "check its name") -> str:
    """Return a message for a missing file, with advice."""
    if WEB_ADDRESS_PATTERN.fullmatch(str(path)):
        return f"{path} is {download_advice(str(path))}"
    path = Path(path)
    if os.path.islink(path):
        return f"{path} is a link to {path.readlink().name}, which does not exist: get the file again"
    return f"there is no file {path}: {advice}"


def read_if_exists(file: AnyPath) -> bytes | None:
    """Return the bytes of a file, or None if it does not exist; raise WanjaxError for an object that is too large."""
    try:
        return file.read_object(MAX_OBJECT_BYTES) if isinstance(file, RemotePath) else file.read_bytes()
    except (FileNotFoundError, MissingObjectError):
        return None


def file_names_in(folder: AnyPath) -> set[str]:
    """Return the names of the files in a folder, with one request to a store. A missing folder has no files."""
    if isinstance(folder, RemotePath):
        return set(folder.files(recursive=False))
    return {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()


@contextmanager
def upload_after_writing(target: RemotePath) -> Iterator[Path]:
    """Yield a temporary file of the same name as `target`, and upload the file after the block.

    If the upload fails, the local file is kept, because it may be the result of hours of work. The WanjaxError then
    names the file. An OSError in the block becomes a WriteError.
    """
    with wrap_write_errors(target), temp_dir() as folder:
        yield (file := folder / target.name)
        saved = Path(tempfile.mkdtemp(prefix="wanjax-")) / target.name  # no other process removes this folder
        file.replace(saved)
    try:
        target.upload(saved)
    except WanjaxError as error:
        raise WanjaxError(f"{error}; the file is saved as {saved}") from error
    shutil.rmtree(saved.parent, ignore_errors=True)


@contextmanager
def local_copy(file: AnyPath) -> Iterator[Path]:
    """Yield a local file itself, or a temporary copy of an object."""
    if isinstance(file, Path):
        yield file
        return
    with temp_dir() as folder:
        file.parent.download_all([file.name], folder)
        copy = folder / file.name
        try:
            yield copy
        except WanjaxError as error:
            raise WanjaxError(str(error).replace(str(copy), str(file))) from error


def _is_safe_name(name: str) -> bool:
    """Return True if a name is printable and stays in its folder on every system."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*parts}


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    all_names = list(names)
    return (all_names[start : start + PROGRESS_BATCH] for start in range(0, len(all_names), PROGRESS_BATCH))


def _one_line_cause(error: Exception) -> str:
    """Return one line that says why a store's library failed: the message of the error, or of its cause."""
    if isinstance(error, FileNotFoundError) and " " not in str(error):  # an address
        return "there is no such object or bucket"
    message = next((text for cause in causes(error) if (text := str(cause).strip())), type(error).__name__)
    line = " ".join(message.partition("\n")[0].split()).rstrip(".")
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."
