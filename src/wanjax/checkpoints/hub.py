# SPDX-License-Identifier: Apache-2.0
"""Finds a checkpoint's folder: one that is at hand, or a Hugging Face repository's, downloaded as far as needed."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from wanjax.checkpoint import WEIGHT_NAMES
from wanjax.download import Progress, snapshot
from wanjax.errors import WanjaxError

INDEX = "model_index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
HUB_FILE = re.compile(rf"(?P<repository>{HUB_ID.pattern})/(?P<file>[\w./ +-]+)", re.ASCII)
MARKERS = (INDEX, "config.json", "high_noise_model/config.json")  # by which one layout is told from another
# Of the weights only the plain variant, whole or in shards: no ".fp16." twin, no ".bin" beside the safetensors.
COMPONENT_FILES = ("*.json", *(f"{name}{tail}.safetensors" for name in WEIGHT_NAMES for tail in ("", "-*-of-*")))


def resolve(
    source: str | Path,
    components: Sequence[str] | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of the checkpoint `source`, a folder or a Hugging Face id such as `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`.

    Of a repository only the named components (all those of its model_index.json, if none are named) are downloaded, to
    the cache of huggingface-hub, whose settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT) hold.
    `progress(done, total)` is told the bytes; where there is none, the client shows bars of its own on a terminal.
    Raises WanjaxError if the folder is no checkpoint, or the repository is unknown, gated or out of reach.
    """
    folder = locate(source, revision=revision)
    if not (folder / INDEX).is_file():
        raise WanjaxError(f"{source} holds no {INDEX}: a whole checkpoint, by diffusers or Wan's authors, is needed")
    if Path(source).expanduser().exists():
        return folder
    if components is None:
        components = _components(folder / INDEX)
    wanted = [f"{component}/{name}" for component in components for name in COMPONENT_FILES]
    # the folder's name is the commit that was found
    return download(str(source), [INDEX, *wanted], revision=folder.name, progress=progress)


def locate(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder `source`, or that of a repository with what tells its layout; raises WanjaxError as `resolve` does."""
    folder = Path(source).expanduser()
    if folder.exists():
        return folder
    if not HUB_ID.fullmatch(str(source)):
        raise WanjaxError(f"there is no folder {folder}, and it is not a Hugging Face id, which is OWNER/NAME")
    return download(str(source), MARKERS, revision=revision, progress=lambda *_: None)  # they are small


def locate_file(source: str | Path, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The file `source`, or the one of a repository that is called OWNER/NAME/FILE, downloaded if it has to be.

    Raises WanjaxError where there is no such file, or the repository is unknown, gated or out of reach.
    """
    file = Path(source).expanduser()
    if file.is_file():
        return file
    named = HUB_FILE.fullmatch(str(source))
    if named is None or file.exists() or ".." in Path(named["file"]).parts:
        raise WanjaxError(f"there is no file {file}, and it is not one of the hub, which is OWNER/NAME/FILE")
    try:
        folder = download(named["repository"], [named["file"]], revision=revision, progress=progress)
    except WanjaxError as error:
        raise WanjaxError(f"there is no file {file}; {error}") from error
    if not (folder / named["file"]).is_file():
        raise WanjaxError(f"there is no file {file}, and {named['repository']} on the hub holds no {named['file']}")
    return folder / named["file"]


def _components(index: Path) -> list[str]:
    """The components that model_index.json lists: the entries that name a library and a class."""
    try:
        entries = json.loads(index.read_bytes())
        return [name for name, value in entries.items() if isinstance(value, list) and value[:1] != [None]]
    except (ValueError, AttributeError) as error:
        raise WanjaxError(f"{index} cannot be read: it is not a JSON object") from error


def download(
    repository: str, patterns: Iterable[str], *, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """The folder in the hub's cache that holds at least the repository's files of these patterns.

    `progress` is told as `resolve` tells it. Raises WanjaxError where the repository is unknown, gated or out of reach.
    """
    try:
        return snapshot(repository, list(patterns), revision=revision, progress=progress)
    except Exception as error:  # what the transport raises comes from another library, which one depends on the version
        raise WanjaxError(_explanation(error, repository, revision)) from error


def _explanation(error: Exception, repository: str, revision: str | None) -> str:
    """What the caller can do about the client's error, in one sentence."""
    from huggingface_hub import constants, errors

    page, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    status = _status(error)
    what = str(error.__cause__ or error).strip().partition("\n")[0]
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {page}, then log in with `hf auth login`"
    if status == 401 or isinstance(
        error, errors.RepositoryNotFoundError
    ):  # the hub answers 401 for what does not exist too
        return f"there is no folder {repository} and {page} is not public: check the spelling or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}: {page} shows those that it has"
    if status == 429:
        return f"{constants.ENDPOINT} has had too many requests from here: wait some minutes, or `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return f"{cache} lacks files of {repository}: unset HF_HUB_OFFLINE to download them"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{constants.ENDPOINT} cannot be reached ({what}) and {cache} lacks files of {repository}: try again later"
        )
    return f"{page} could not be downloaded ({what or type(error).__name__}): run again to go on from there"


def _status(error: BaseException | None) -> int | None:
    """The status of the answer that an error is about, or that the error before it was about."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return response.status_code
        error = error.__cause__
    return None
