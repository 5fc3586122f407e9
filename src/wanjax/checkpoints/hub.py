# SPDX-License-Identifier: Apache-2.0
"""Locate a checkpoint's folder, and download the needed files of a Hugging Face repository.

huggingface-hub downloads into its cache, with hf-xet if the repository supports it. huggingface-hub resumes a file
after a lost connection. If the process ends, complete files stay in the cache, and the next run downloads incomplete
files again. `hf cache prune` removes incomplete files.
"""

import hashlib
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from wanjax.checkpoints.files import WEIGHT_NAMES
from wanjax.errors import FILE_NAME_ERRNOS, NetworkError, WanjaxError, causes
from wanjax.figures import format_bytes
from wanjax.stores.paths import HUB_ADDRESS_PATTERN, WEB_ADDRESS_PATTERN, download_advice, missing_file
from wanjax.stores.user_folders import home, user_cache, xdg_folder

INDEX = "model_index.json"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # the first letter excludes ./NAME, which is a path
HUB_FILE = re.compile(rf"(?P<repository>{HUB_ID.pattern})/(?P<file>[\w./ +-]+)", re.ASCII)
CHECKSUM = re.compile(r"[0-9a-f]{64}")  # SHA-256
RETRYABLE_STATUSES = (408, 425, 429)
# the number of files that are downloaded at a time; hf-xet uses several connections for each file
PARALLEL_DOWNLOADS = 2
# Only the default variant of the weights, in one file or in shards: neither ".fp16." nor ".bin".
COMPONENT_FILES = (
    *("*.json", "spiece.model"),
    *(f"{name}{tail}.safetensors" for name in WEIGHT_NAMES for tail in ("", "-*-of-*")),
)


def locate(source: str | Path, *, revision: str | None = None, markers: Sequence[str] = ()) -> Path:
    """Return the local folder of a checkpoint, with model_index.json and the small files `markers`.

    For a Hugging Face id, these files are downloaded, and the name of the folder is the commit's hash. The settings of
    huggingface-hub apply (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT). Raises WanjaxError if the folder does not
    exist, or the repository is unknown, gated or unreachable.
    """
    folder = Path(source).expanduser()
    if is_local(source):
        return folder
    return download(str(source), [INDEX, *markers], revision=revision, quiet=True)


def is_local(source: str | Path) -> bool:
    """Return whether a name is a local path and not a Hugging Face id; raise WanjaxError if the name is neither."""
    folder = Path(source).expanduser()
    if os.path.exists(folder):  # `exists` returns False for invalid names
        return True
    if os.path.islink(folder):
        raise WanjaxError(missing_file(folder))
    check_no_address(source)
    if not HUB_ID.fullmatch(str(source)):
        raise WanjaxError(
            f"there is no folder or file {str(source)!r}, and it is not a Hugging Face id (OWNER/NAME): "
            "`wanjax models` lists the models"
        )
    return False


def check_no_address(source: str | Path) -> None:
    """Raise WanjaxError for an address on the web. A hub address without `https://` is also one, unless it is a path on
    this machine."""
    text = str(source)
    if os.path.exists(text):
        return
    if WEB_ADDRESS_PATTERN.fullmatch(text) or HUB_ADDRESS_PATTERN.fullmatch(text):
        raise WanjaxError(f"{text} is {download_advice(text, accepts_hub=True)}")


def parse_hub_file(source: str | Path) -> re.Match[str] | None:
    """Match OWNER/NAME/FILE on the hub, with the groups `repository` and `file`.

    Returns None for a local file. Raises WanjaxError for any other name.
    """
    file = Path(source).expanduser()
    if os.path.isfile(file):  # unlike pathlib, os.path raises no error for an invalid name
        return None
    if os.path.islink(file):
        raise WanjaxError(missing_file(file))
    check_no_address(source)
    match = HUB_FILE.fullmatch(str(source))
    if match is None or os.path.exists(file) or ".." in Path(match["file"]).parts:
        raise WanjaxError(f"there is no file {file}: give an existing file, or OWNER/NAME/FILE for a file on the hub")
    return match


def locate_file(source: str | Path, *, companions: Sequence[str] = (), revision: str | None = None) -> Path:
    """Return the path of a local file, or download OWNER/NAME/FILE from the hub.

    `companions` are paths of other files of the repository, relative to the file's folder, which are also downloaded if
    they exist. Raises WanjaxError if the file is missing, or the repository is unknown, gated or unreachable.
    """
    file = Path(source).expanduser()
    if (match := parse_hub_file(source)) is None:
        return file
    try:
        folder_name = PurePosixPath(match["file"]).parent
        others = [posixpath.normpath(folder_name / name) for name in companions]
        patterns = [match["file"], *(name for name in others if not name.startswith("../"))]
        folder = download(match["repository"], patterns, revision=revision)
    except WanjaxError as error:
        raise WanjaxError(f"there is no file {file}; {error}") from error
    if not (folder / match["file"]).is_file():
        raise WanjaxError(f"there is no file {file}, and {match['repository']} on the hub contains no {match['file']}")
    return folder / match["file"]


def download(repository: str, patterns: Iterable[str], *, revision: str | None = None, quiet: bool = False) -> Path:
    """Download a repository's files that match the patterns; return its folder in the client's cache.

    The client shows progress bars on a terminal, unless `quiet`. Raises WanjaxError if the repository is unknown, gated
    or unreachable, if a file differs from its checksum on the hub, or if the cache has a broken link and the hub is
    unreachable.
    """
    try:
        pattern_list = list(patterns)
        folder = _snapshot(repository, pattern_list, revision, quiet)
        for path in sorted(folder.rglob("*")):  # offline, the client returns an incomplete folder
            name = path.relative_to(folder).as_posix()
            if not path.exists() and any(fnmatchcase(name, pattern) for pattern in pattern_list):
                advice = f"get it again with a connection to {repository} on the hub"
                raise WanjaxError(missing_file(path, advice))
        return folder
    except WanjaxError:
        raise
    except Exception as error:  # the classes of transport errors differ between versions of the client
        from huggingface_hub import constants

        cause = None if constants.HF_HUB_OFFLINE else error  # offline mode is not a network failure
        error_type = WanjaxError if constants.HF_HUB_OFFLINE or _is_permanent(error) else NetworkError
        raise error_type(_explain(error, repository, revision)) from cause


class HubFile(NamedTuple):
    """A file of a repository: its name, its bytes, and whether it is not yet downloaded."""

    name: str
    size: int
    needs_download: bool


def hub_files(repository: str, patterns: Iterable[str], *, revision: str | None = None) -> list[HubFile]:
    """List a repository's files that match the patterns; empty if the hub is unreachable."""
    with suppress(Exception):  # the download will report the error
        return _list_files(repository, list(patterns), revision)
    return []


def file_names_in_folder(folder: str, files: Iterable[HubFile]) -> list[str]:
    """Return the names of the files in a folder of the repository."""
    paths = [PurePosixPath(file.name) for file in files]
    return [path.name for path in paths if path.parent == PurePosixPath(folder)]


def download_bytes(files: Iterable[HubFile]) -> int:
    """Return the number of bytes of the files that are not yet downloaded."""
    return sum(file.size for file in files if file.needs_download)


def check_room(repository: str, files: Iterable[HubFile]) -> None:
    """Raise WanjaxError if the disk of the client's cache has no room for the files to download."""
    _set_client_cache()
    from huggingface_hub import constants

    needed_bytes = download_bytes(files)
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if needed_bytes > (free_bytes := shutil.disk_usage(disk).free):
        raise WanjaxError(
            f"{repository} needs {format_bytes(needed_bytes)} more, and {cache} has {format_bytes(free_bytes)} "
            "free: make room, or "
            "set HF_HOME to a folder on a larger disk"
        )


def checked_file_bytes(source: str, *, revision: str | None = None) -> int:
    """Return the number of bytes to download for OWNER/NAME/FILE on the hub; 0 for other names.

    Raises WanjaxError if the disk has no room for the file.
    """
    match = HUB_FILE.fullmatch(source)
    if match is None:
        return 0
    files = hub_files(match["repository"], [match["file"]], revision=revision)
    check_room(match["repository"], files)
    return download_bytes(files)


def _snapshot(repository: str, patterns: list[str], revision: str | None, quiet: bool) -> Path:
    missing = [file for file in _list_files(repository, patterns, revision) if file.needs_download]
    from huggingface_hub import snapshot_download  # imported late: local checkpoints need no client
    from huggingface_hub.utils import are_progress_bars_disabled

    needed_bytes = download_bytes(missing)
    check_room(repository, missing)
    hides_progress = quiet or (not (sys.stderr is not None and sys.stderr.isatty()) and "ipykernel" not in sys.modules)
    if needed_bytes and hides_progress and not quiet and not are_progress_bars_disabled():
        print(
            f"downloading {format_bytes(needed_bytes)} of {repository}", file=sys.stderr
        )  # one line instead of a progress bar
    client = partial(
        snapshot_download, repository, revision=revision, allow_patterns=patterns, max_workers=PARALLEL_DOWNLOADS
    )
    folder = Path(client(tqdm_class=_silent_bar() if hides_progress else None))
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as workers:
        list(workers.map(_check_download, [folder / file.name for file in missing]))
    return folder


def _list_files(repository: str, patterns: list[str], revision: str | None) -> list[HubFile]:
    """List a repository's files that match the patterns; empty if the client is offline. Raises the client's errors."""
    _set_client_cache()
    from huggingface_hub import errors, snapshot_download

    with suppress(errors.DryRunError):  # the download will report the missing files
        files = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, dry_run=True, tqdm_class=_silent_bar()
        )
        return [HubFile(file.filename, file.file_size or 0, file.will_download) for file in files]
    return []


def _set_client_cache() -> None:
    """Set the client's cache for a user without a home directory, and for a relative XDG_CACHE_HOME.

    Without this, the client would use a folder named "~", or a folder in the working directory.
    """
    if os.environ.get("HF_HOME") or xdg_folder("XDG_CACHE_HOME"):
        return
    if (user_home := home()) is None:
        os.environ["HF_HOME"] = str(user_cache() / "huggingface")
    elif os.environ.get("XDG_CACHE_HOME"):  # a relative path
        os.environ["HF_HOME"] = str(user_home / ".cache" / "huggingface")


def _silent_bar() -> Any:
    """Return a class of progress bars that show nothing and start no thread."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        monitor_interval = 0

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Bar


def cached_checksum(path: Path) -> str | None:
    """Return the SHA-256 of a large file, which its link in the client's cache contains.

    Returns None for any other file.
    """
    name = path.readlink().name if path.is_symlink() else ""
    return name if CHECKSUM.fullmatch(name) else None


def is_damaged(path: Path) -> bool:
    """Return whether a file differs from its checksum in the client's cache; False if the cache has no checksum."""
    checksum = cached_checksum(path)
    return checksum is not None and _checksum(path) != checksum


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_download(path: Path) -> None:
    """If a file differs from its checksum, remove the file from the cache and raise OSError."""
    expected = cached_checksum(path)
    if expected is None or (actual := _checksum(path)) == expected:
        return
    path.resolve().unlink()
    path.unlink()
    raise OSError(f"{path.name} has the SHA-256 {actual}, but the hub lists {expected}")


def _explain(error: Exception, repository: str, revision: str | None) -> str:
    """Describe a download error in one sentence, with its cause and advice."""
    from huggingface_hub import constants, errors

    page, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    status = _http_status(error)
    problem = str(error.__cause__ or error).strip().partition("\n")[0]
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {page}, then log in with `hf auth login`"
    if status == 401 or isinstance(
        error, errors.RepositoryNotFoundError
    ):  # the hub also answers 401 for repositories that do not exist
        return f"there is no folder {repository} and {page} is not public: check the spelling or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}: see its revisions at {page}"
    if status == 429:
        return f"{constants.ENDPOINT} got too many requests from this address: wait some minutes, or `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return f"{cache} lacks files of {repository}: unset HF_HUB_OFFLINE to download them"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{constants.ENDPOINT} cannot be reached ({problem}) and {cache} lacks files of {repository}: try again "
            "later with a network, or check the spelling if a folder is meant"
        )
    return f"{page} could not be downloaded ({problem or type(error).__name__}): run again, which keeps complete files"


def _is_permanent(error: Exception) -> bool:
    """Return whether another try is useless, because the hub refused the request or the disk failed."""
    from huggingface_hub import errors

    if (status := _http_status(error)) is not None:
        return 400 <= status < 500 and status not in RETRYABLE_STATUSES
    permanent_errors = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    return isinstance(error, permanent_errors) or any(
        cause.errno in FILE_NAME_ERRNOS for cause in causes(error) if isinstance(cause, OSError)
    )


def _http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error or of one of its causes, or None."""
    responses = (getattr(cause, "response", None) for cause in causes(error))
    return next((response.status_code for response in responses if response is not None), None)
