# SPDX-License-Identifier: Apache-2.0
"""Places of files: on this machine, or in a store, named by a URL such as s3://BUCKET/NAME and reached by fsspec.

An object of a store appears when all of it is there, and nothing is renamed. So what is written is made here first,
then published: a file by one upload, and a folder with the file last by which readers know that it is whole. Keys are
those that the store's library finds, in the environment and in the user's files; no URL holds any.
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
from uuid import uuid4

from wanjax.errors import FULL, WanjaxError, causes, written
from wanjax.stores.own import own_folder

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
"""The stores, by the scheme of their URLs, and the library by which fsspec reaches each."""
CHECKED = {"gs": {"consistency": "md5"}}
"""Options by which a library compares an object with what was to be sent: gcsfs ends a file at a mark of its own."""
ADDRESS = re.compile(r"(https?|ftp)://\S+", re.IGNORECASE)
HERE = "file"  # the scheme of this machine's files
URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://(?P<path>.*)", re.IGNORECASE | re.DOTALL)
BUCKET = re.compile(r"[\w.-]+", re.ASCII)
AT_ONCE = 64  # files between two reports of progress
LARGEST = 2 << 30  # bytes of an object that is read as a whole
LONGEST = 200  # characters of a library's message
Told = Callable[[list[str]], object]


class StoreError(WanjaxError):
    """A store that cannot be reached, or does not do what is asked of it."""


class Missing(StoreError):
    """Something that is not in a store."""


@dataclass(frozen=True)
class Remote:
    """An object's name in a store, or a folder's: the part of the objects' names before a slash.

    It has as much of `pathlib.Path` as is asked of a place. Methods raise StoreError where the store, its library or
    keys that may do what is asked are missing.
    """

    scheme: str
    path: str
    """The bucket, a slash, and the name in it."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str | Path) -> "Remote":
        return Remote(self.scheme, f"{self.path}/{Path(name).as_posix()}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> "Remote":
        return Remote(self.scheme, self.path.rpartition("/")[0])

    def absolute(self) -> "Remote":
        return self

    def is_file(self) -> bool:
        return self._kind() == "file"

    def exists(self) -> bool:
        """Tells whether there is such an object, or one in such a folder."""
        return self._kind() is not None

    def _kind(self) -> str | None:
        """Returns "file" or "directory", None where there is neither, as fsspec tells of stores out of reach too."""
        try:
            return self._info()["type"]
        except Missing:
            return None

    def size(self) -> int:
        """Returns an object's bytes; raises Missing where there is none."""
        return self._info()["size"]

    def _info(self) -> dict[str, Any]:
        with self._reached("read"):
            return self._files.info(self.path)

    def files(self, *, below: bool = True) -> dict[str, int]:
        """Returns the bytes of the objects in a folder by their names in it; not those in folders `below` it, if False.

        Names that would lead out of a folder are left out.
        """
        with self._reached("read"):
            found = self._files.find(self.path, maxdepth=None if below else 1, detail=True)
        start = f"{self.path}/"
        sizes = {name.lstrip("/"): each["size"] for name, each in found.items()}
        names = {name[len(start) :]: size for name, size in sizes.items() if name.startswith(start)}
        return {name: size for name, size in names.items() if _is_plain(name)}

    def read(self, most: int) -> bytes:
        """Returns an object's bytes; raises Missing where there is none, WanjaxError for one of more than `most`."""
        with self._reached("read"):
            content = self._files.cat_file(self.path, start=0, end=most + 1)
        if len(content) > most:
            raise WanjaxError(f"{self} has more than {most:,} bytes, and is not what was to be read")
        return content

    def read_part(self, start: int, end: int) -> bytes:
        """Returns the bytes of an object from `start` to `end`; raises Missing where there is none."""
        with self._reached("read"):
            return self._files.cat_file(self.path, start=start, end=end)

    def write(self, content: bytes) -> None:
        """Writes an object, in place of one of this name."""
        with self._reached("written"):
            self._files.pipe_file(self.path, content)

    def create(self, content: bytes) -> bool:
        """Writes an object unless there is one of this name, which no other can do at the same time; tells whether."""
        with self._reached("written"):
            try:
                self._files.pipe_file(self.path, content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self) -> None:
        """Removes an object."""
        with self._reached("removed"):
            self._files.rm_file(self.path)

    def remove_all(self) -> None:
        """Removes the objects of a folder."""
        for name in self.files():
            (self / name).remove()

    def upload(self, file: Path) -> None:
        """Writes a file as the object of this name, which appears when all of it is there."""
        with self._reached("written"):
            self._files.put_file(str(file), self.path)

    def upload_all(self, files: Mapping[str, Path], told: Told = lambda names: None) -> None:
        """Writes files as objects of a folder, by their names in it; `told` receives the names of what is there."""
        for names in _groups(files):
            with self._reached("written"):
                self._files.put([str(files[name]) for name in names], [f"{self.path}/{name}" for name in names])
            told(names)

    def download_all(self, names: Iterable[str], folder: Path, told: Told = lambda names: None) -> None:
        """Writes objects of a folder to a folder here, by their names; each file appears when all of it is there."""
        folder.mkdir(parents=True, exist_ok=True)
        with own_folder(folder) as own:
            for some in _groups(names):
                with self._reached("read"):
                    self._files.get([f"{self.path}/{each}" for each in some], [f"{own}/{each}" for each in some])
                for each in some:
                    (folder / each).parent.mkdir(parents=True, exist_ok=True)
                    (own / each).replace(folder / each)
                told(some)

    def check_writable(self) -> None:
        """Raises WanjaxError unless an object can be written to this folder, and be removed."""
        trial = f"{self.path}/.{uuid4().hex}.trial"
        with self._reached("written to"):
            self._files.pipe_file(trial, b"")
            self._files.rm_file(trial)

    @property
    def _files(self) -> Any:
        import fsspec  # imported late: few runs have to do with a store

        quiet(LIBRARIES[self.scheme])
        options = CHECKED.get(self.scheme, {})
        return fsspec.filesystem(self.scheme, use_listings_cache=False, **options)  # others write there too

    @contextmanager
    def _reached(self, done: str) -> Iterator[None]:
        """Raises what a store's library raises, of many kinds, as StoreError; `done` tells what cannot be done."""
        try:
            yield
        except WanjaxError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:  # here
                raise
            told = f"{self} cannot be {done}, {_told(error)}: a bucket that answers, with keys for it, is needed"
            raise (Missing if isinstance(error, FileNotFoundError) else StoreError)(told) from error


Place = Path | Remote


@cache
def quiet(library: str) -> None:
    """Keeps a library from printing what it logs, which it also raises, unless the process has handlers of its own."""
    logging.getLogger(library).addHandler(logging.NullHandler())


def is_url(name: object) -> bool:
    """Tells whether a name is a URL, of a store or of anything else."""
    return isinstance(name, Remote) or (isinstance(name, str) and URL.match(name) is not None)


def name_alone(text: str) -> str:
    """Return the name of a file or folder without where it is: of one of this machine or of a store.

    Any other text, as the id of a model on the hub, is returned as it is.
    """
    if URL.fullmatch(text):
        return text.rstrip("/").rpartition("/")[2]
    path = Path(text).expanduser()
    return path.absolute().name if path.is_absolute() or os.path.exists(path) else text


def place(name: str | Path | Remote) -> Place:
    """Returns the place of a name: a path as it is, a URL of a store, or file:///PATH.

    Raises WanjaxError for another URL, and where the library of a store is not installed.
    """
    if isinstance(name, Remote):
        return name
    if not is_url(name):
        return Path(name).expanduser()
    found = URL.fullmatch(str(name))
    assert found is not None
    scheme, path = found["scheme"].lower(), found["path"]
    if scheme == HERE:
        if not path.startswith("/"):
            raise WanjaxError(f"{name} is no file of this machine: file:///PATH, with the whole path, is one")
        return Path(path)
    if scheme not in LIBRARIES:
        known = ", ".join(f"{each}://" for each in (*LIBRARIES, HERE))
        if ADDRESS.fullmatch(str(name)):
            raise WanjaxError(f"{name} is {to_download(str(name))}, and {known} are stores")
        raise WanjaxError(f"{scheme}:// is no store that is known: {known} are")
    bucket, *parts = (path[:-1] if path.endswith("/") else path).split("/")
    if not BUCKET.fullmatch(bucket) or not all(map(_is_plain, parts)):  # no keys in it, which would be shown
        raise WanjaxError(f"a URL in {scheme}:// is no name in a store: {scheme}://BUCKET/NAME is one, without keys")
    if not find_spec(LIBRARIES[scheme]):
        raise WanjaxError(f"{name} needs {LIBRARIES[scheme]}, which is missing: pip install 'wanjax[cloud]' brings it")
    return Remote(scheme, "/".join((bucket, *parts)))


def full_name(name: str | Path | Remote) -> str:
    """Return the full path of a file or folder that is here; any other name as it is."""
    path = place(name)
    return str(path.absolute()) if isinstance(path, Path) and os.path.exists(path) else str(name)


def to_download(address: str) -> str:
    """Return what an address is where a file is needed, and how to get that."""
    return f"an address, and only files are read: `curl -LO {shlex.quote(address)}` gets one"


def no_file(path: str | Path) -> str:
    """Return the sentence that a file is missing, that it is a link to one, or an address."""
    if ADDRESS.fullmatch(str(path)):
        return f"{path} is {to_download(str(path))}"
    path = Path(path)
    link = f" but a link to {path.readlink().name}, which is gone: get it again" if os.path.islink(path) else ""
    return f"there is no file {path}{link}"


def read(file: Place) -> bytes | None:
    """Returns the bytes of a file, None where there is none; raises WanjaxError for an object of more than LARGEST."""
    try:
        return file.read(LARGEST) if isinstance(file, Remote) else file.read_bytes()
    except (FileNotFoundError, Missing):
        return None


def names_in(folder: Place) -> set[str]:
    """Returns the names of the files in a folder, none where there is no such folder; a store is asked once."""
    if isinstance(folder, Remote):
        return set(folder.files(below=False))
    return {each.name for each in folder.iterdir() if each.is_file()} if folder.is_dir() else set()


@contextmanager
def publishing(target: Remote) -> Iterator[Path]:
    """Yields a file here, of the same name, that is published when the block has written it.

    Where that fails the file stays, and WanjaxError tells where, since it may have taken hours to make. Raises
    WriteError in place of the block's OSError too.
    """
    with written(target), own_folder() as folder:
        yield (file := folder / target.name)
        kept = Path(tempfile.mkdtemp(prefix="wanjax-")) / target.name  # which no other process clears away
        file.replace(kept)
    try:
        target.upload(kept)
    except WanjaxError as error:
        raise WanjaxError(f"{error}; what was to be written is kept in {kept}") from error
    shutil.rmtree(kept.parent, ignore_errors=True)


@contextmanager
def local_copy(file: Place) -> Iterator[Path]:
    """Yields a file itself, or a copy of an object that is here as long as the block runs."""
    if isinstance(file, Path):
        yield file
        return
    with own_folder() as folder:
        file.parent.download_all([file.name], folder)
        copy = folder / file.name
        try:
            yield copy
        except WanjaxError as error:
            raise WanjaxError(str(error).replace(str(copy), str(file))) from error


def _is_plain(name: str) -> bool:
    """Tells whether a name stays in its folder, on every system, and can be printed."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*parts}


def _groups(names: Iterable[str]) -> Iterator[list[str]]:
    listed = list(names)
    return (listed[start : start + AT_ONCE] for start in range(0, len(listed), AT_ONCE))


def _told(error: Exception) -> str:
    """Returns why a store's library failed, in one line: its own words, or those of what it was raised from."""
    if isinstance(error, FileNotFoundError) and " " not in str(error):  # an address
        return "there is no such object or bucket"
    found = next((text for each in causes(error) if (text := str(each).strip())), type(error).__name__)
    line = " ".join(found.partition("\n")[0].split()).rstrip(".")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
