# SPDX-License-Identifier: Apache-2.0
"""Finds a checkpoint's folder: a local one, or that of a Hugging Face repository, whose needed files are downloaded.

Downloads are made by huggingface-hub into its cache, through hf-xet where the repository has it. The client resumes a
file after a lost connection. After the end of the process it keeps the files that are complete, and sends those again
that were not; `hf cache prune` removes what is left of them.
"""

import hashlib
import os
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
from wanjax.figures import in_bytes
from wanjax.stores.paths import missing_file
from wanjax.stores.user_folders import home, user_cache

INDEX = "model_index.json"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # not ./NAME, which is a path
HUB_FILE = re.compile(rf"(?P<repository>{HUB_ID.pattern})/(?P<file>[\w./ +-]+)", re.ASCII)
CHECKSUM = re.compile(r"[0-9a-f]{64}")  # SHA-256
PASSING = (408, 425, 429)  # statuses that another time is without
AT_ONCE = 2  # files that are downloaded at a time, and lost if the process ends; hf-xet splits each among connections
# The weights' plain variant only, whole or in shards: no ".fp16." twin, no ".bin" beside the safetensors.
COMPONENT_FILES = (
    *("*.json", "spiece.model"),
    *(f"{name}{tail}.safetensors" for name in WEIGHT_NAMES for tail in ("", "-*-of-*")),
)


def locate(source: str | Path, *, revision: str | None = None, markers: Sequence[str] = ()) -> Path:
    """Return the folder `source`, or that of a Hugging Face id, with model_index.json and the small files `markers`.

    The folder of an id is named by its commit. The settings of huggingface-hub apply (HF_HOME, HF_HUB_OFFLINE,
    HF_TOKEN, HF_ENDPOINT). Raises WanjaxError if there is no such folder, or the repository is unknown, gated or out of
    reach.
    """
    folder = Path(source).expanduser()
    if is_here(source):
        return folder
    return download(str(source), [INDEX, *markers], revision=revision, quiet=True)


def is_here(source: str | Path) -> bool:
    """Tell a folder or file from a Hugging Face id; raise WanjaxError for a name that is neither."""
    folder = Path(source).expanduser()
    if os.path.exists(folder):  # which raises nothing for names that are none
        return True
    if os.path.islink(folder):
        raise WanjaxError(missing_file(folder))
    if not HUB_ID.fullmatch(str(source)):
        raise WanjaxError(f"there is no folder or file {folder}, and it is not a Hugging Face id, which is OWNER/NAME")
    return False


def name_on_hub(source: str | Path) -> re.Match[str] | None:
    """Return the repository and the file of OWNER/NAME/FILE on the hub, by these names; None for a file that is here.

    Raises WanjaxError for a name that is neither.
    """
    file = Path(source).expanduser()
    if os.path.isfile(file):  # which raises nothing for names that are none
        return None
    if os.path.islink(file):
        raise WanjaxError(missing_file(file))
    match = HUB_FILE.fullmatch(str(source))
    if match is None or os.path.exists(file) or ".." in Path(match["file"]).parts:
        raise WanjaxError(f"there is no file {file}, and it is not one of the hub, which is OWNER/NAME/FILE")
    return match


def locate_file(source: str | Path, *, companions: Sequence[str] = (), revision: str | None = None) -> Path:
    """Return the file `source`, local or OWNER/NAME/FILE on the hub, from where it is downloaded if need be.

    `companions` are files that come with it from the same folder, as far as the repository has them.
    Raises WanjaxError if there is no such file, or the repository is unknown, gated or out of reach.
    """
    file = Path(source).expanduser()
    if (match := name_on_hub(source)) is None:
        return file
    try:
        wanted = [match["file"], *(Path(match["file"]).with_name(name).as_posix() for name in companions)]
        folder = download(match["repository"], wanted, revision=revision)
    except WanjaxError as error:
        raise WanjaxError(f"there is no file {file}; {error}") from error
    if not (folder / match["file"]).is_file():
        raise WanjaxError(f"there is no file {file}, and {match['repository']} on the hub holds no {match['file']}")
    return folder / match["file"]


def download(repository: str, patterns: Iterable[str], *, revision: str | None = None, quiet: bool = False) -> Path:
    """Return the folder in the client's cache that holds at least the repository's files of these patterns.

    The client shows its own bars on a terminal, unless it is to be `quiet`. Raises WanjaxError if the repository is
    unknown, gated or out of reach, a file differs from its checksum on the hub, or the cache links to a file that is
    gone and the hub is out of reach.
    """
    try:
        wanted = list(patterns)
        folder = _snapshot(repository, wanted, revision, quiet)
        for path in sorted(folder.rglob("*")):  # without the hub, the client takes what there is
            name = path.relative_to(folder).as_posix()
            if not path.exists() and any(fnmatchcase(name, pattern) for pattern in wanted):
                advice = f"get it again with a connection to {repository} on the hub"
                raise WanjaxError(missing_file(path, advice))
        return folder
    except WanjaxError:
        raise
    except Exception as error:  # the classes of transport errors differ between versions of the client
        from huggingface_hub import constants

        cause = None if constants.HF_HUB_OFFLINE else error  # no network is meant there, so it does not fail
        kind = WanjaxError if constants.HF_HUB_OFFLINE or _is_mistake(error) else NetworkError
        raise kind(_explanation(error, repository, revision)) from cause


class HubFile(NamedTuple):
    """A file of a repository: its name there, its bytes, and whether it is still to be downloaded."""

    name: str
    size: int
    to_download: bool


def hub_files(repository: str, patterns: Iterable[str], *, revision: str | None = None) -> list[HubFile]:
    """Return the repository's files of these patterns; none where it cannot be asked, because there is no network."""
    with suppress(Exception):  # the download will tell why
        return _listed(repository, list(patterns), revision)
    return []


def names_in(folder: str, files: Iterable[HubFile]) -> list[str]:
    """Return the names of the files in a folder of the repository."""
    paths = [PurePosixPath(file.name) for file in files]
    return [path.name for path in paths if path.parent == PurePosixPath(folder)]


def check_room(repository: str, files: Iterable[HubFile]) -> int:
    """Return the bytes that are still to be downloaded.

    Raises WanjaxError where the disk of the client's cache has less free room.
    """
    _give_client_a_cache()
    from huggingface_hub import constants

    needed = sum(file.size for file in files if file.to_download)
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if needed > (free := shutil.disk_usage(disk).free):
        raise WanjaxError(
            f"{repository} needs {in_bytes(needed)} more where {cache} has {in_bytes(free)} free: make room, or "
            "set HF_HOME to a folder on a larger disk"
        )
    return needed


def check_file(source: str, *, revision: str | None = None) -> int:
    """Return the bytes of OWNER/NAME/FILE on the hub if it is still to be downloaded, else 0, as `check_room` does."""
    match = HUB_FILE.fullmatch(source)
    if match is None:
        return 0
    return check_room(match["repository"], hub_files(match["repository"], [match["file"]], revision=revision))


def _snapshot(repository: str, patterns: list[str], revision: str | None, quiet: bool) -> Path:
    missing = [file for file in _listed(repository, patterns, revision) if file.to_download]
    from huggingface_hub import snapshot_download  # here: local checkpoints need no client
    from huggingface_hub.utils import are_progress_bars_disabled

    needed = check_room(repository, missing)
    hidden = quiet or (not (sys.stderr is not None and sys.stderr.isatty()) and "ipykernel" not in sys.modules)
    if needed and hidden and not quiet and not are_progress_bars_disabled():
        print(f"downloading {in_bytes(needed)} of {repository}", file=sys.stderr)  # a pipe has a line, and no bars
    client = partial(snapshot_download, repository, revision=revision, allow_patterns=patterns, max_workers=AT_ONCE)
    folder = Path(client(tqdm_class=_no_bars() if hidden else None))
    with ThreadPoolExecutor(AT_ONCE) as workers:
        list(workers.map(_check, [folder / file.name for file in missing]))
    return folder


def _listed(repository: str, patterns: list[str], revision: str | None) -> list[HubFile]:
    """Return the repository's files of these patterns; none if the client is offline. Raises the client's errors."""
    _give_client_a_cache()
    from huggingface_hub import errors, snapshot_download

    with suppress(errors.DryRunError):  # the download says which files the cache lacks
        files = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, dry_run=True, tqdm_class=_no_bars()
        )
        return [HubFile(file.filename, file.file_size or 0, file.will_download) for file in files]
    return []


def _give_client_a_cache() -> None:
    """Set the client's cache for a user without a home, since the client uses a folder named "~" then."""
    if home() is None and not any(os.environ.get(name) for name in ("HF_HOME", "XDG_CACHE_HOME")):
        os.environ["HF_HOME"] = str(user_cache() / "huggingface")


def _no_bars() -> Any:
    """Return a class of bars for the client that shows nothing, and starts no thread."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        monitor_interval = 0

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Bar


def cached_checksum(path: Path) -> str | None:
    """Return the SHA-256 of a large file from its link into the client's cache; None for other files."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if CHECKSUM.fullmatch(name) else None


def is_damaged(path: Path) -> bool:
    """Return whether a file differs from its checksum in the client's cache; False without one."""
    checksum = cached_checksum(path)
    return checksum is not None and _checksum(path) != checksum


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path) -> None:
    """Raise OSError, with both checksums, if a file differs from its own, after removing it from the cache."""
    listed = cached_checksum(path)
    if listed is None or (arrived := _checksum(path)) == listed:
        return
    path.resolve().unlink()
    path.unlink()
    raise OSError(f"{path.name} arrived with the SHA-256 {arrived} where the hub lists {listed}")


def _explanation(error: Exception, repository: str, revision: str | None) -> str:
    """Return one sentence with the cause and advice."""
    from huggingface_hub import constants, errors

    page, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    status = _status(error)
    problem = str(error.__cause__ or error).strip().partition("\n")[0]
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {page}, then log in with `hf auth login`"
    if status == 401 or isinstance(error, errors.RepositoryNotFoundError):  # 401 also means: there is none
        return f"there is no folder {repository} and {page} is not public: check the spelling or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}: {page} shows those that it has"
    if status == 429:
        return f"{constants.ENDPOINT} has had too many requests from here: wait some minutes, or `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return f"{cache} lacks files of {repository}: unset HF_HUB_OFFLINE to download them"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{constants.ENDPOINT} cannot be reached ({problem}) and {cache} lacks files of {repository}: try again "
            "later with a network, or check the spelling if a folder is meant"
        )
    return f"{page} could not be downloaded ({problem or type(error).__name__}): run again, complete files are kept"


def _is_mistake(error: Exception) -> bool:
    """Tell whether the hub has answered that there is no such thing, or the disk refuses it; else no answer arrived."""
    from huggingface_hub import errors

    if (status := _status(error)) is not None:
        return 400 <= status < 500 and status not in PASSING
    unknown = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    return isinstance(error, unknown) or any(
        cause.errno in FILE_NAME_ERRNOS for cause in causes(error) if isinstance(cause, OSError)
    )


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error, or one of its causes, carries."""
    answers = (getattr(cause, "response", None) for cause in causes(error))
    return next((answer.status_code for answer in answers if answer is not None), None)
