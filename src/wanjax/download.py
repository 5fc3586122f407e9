# SPDX-License-Identifier: Apache-2.0
"""Downloads from the hub into the cache of its client, of which nothing has to be sent twice.

The client takes a file up where a connection broke off, but begins anew with what it was at when its process ended,
and does not look at what has arrived. With shards of 10 GB that matters. So large files are brought here: appended to
what there is, beside the place where the client looks for them, and compared with the checksum that the hub gives.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

Progress = Callable[[int, int], Any]
LARGE = 10_000_000  # bytes
AT_ONCE = 4  # files
SUFFIX = ".wanjax.incomplete"
CHECKSUM = re.compile(r"[0-9a-f]{64}")  # the etag of a large file is its SHA-256


def snapshot(
    repository: str, patterns: Sequence[str], *, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """The folder in the client's cache that holds at least the repository's files of these patterns.

    `progress(done, total)` is told bytes; where it is None, the client shows bars of its own on a terminal. Raises
    what the client raises, and OSError where a file is not what the hub says that it is.
    """
    from huggingface_hub import constants, snapshot_download  # here: who has a checkpoint at hand needs no client

    def client(**options: Any) -> Any:
        bars = {} if progress is None else {"tqdm_class": _silent_bar()}
        return snapshot_download(repository, revision=revision, allow_patterns=list(patterns), **bars, **options)

    missing = _missing(client)
    total = sum(file.file_size or 0 for file in missing)
    large = [file for file in missing if LARGE <= (file.file_size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE]
    bar = None if progress is None else _counting_bar(total, progress)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="wanjax-download") as workers:
        for bringing in [workers.submit(_bring, repository, file, bar) for file in large]:
            bringing.result()
    folder = Path(client())
    if progress and total:
        progress(total, total)
    return folder


def _missing(client: Callable[..., Any]) -> list[Any]:
    """What the client would download; nothing where it cannot know, which it will tell when it is asked for files."""
    from huggingface_hub import errors

    try:
        return [file for file in client(dry_run=True) if file.will_download]
    except errors.DryRunError:
        return []


def _bring(repository: str, file: Any, bar: Any) -> None:
    """Downloads one file to where the client looks for it, from where an earlier attempt stopped."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = hf_hub_url(repository, file.filename, revision=file.commit_hash)
    etag = get_hf_file_metadata(url, retry_on_errors=True).etag
    cache = _cache_of(Path(file.local_path), file.filename)
    if not etag or not re.fullmatch(r"[\w.-]+", etag):
        return
    blob = cache / "blobs" / etag
    partial = blob.with_name(etag + SUFFIX)
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock = cache.parent / ".locks" / cache.name / f"{etag}.lock"  # the client's own
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # another process was here
            return
        if partial.exists() and partial.stat().st_size > file.file_size:
            partial.unlink()
        with partial.open("ab") as target:
            start, headers = target.tell(), build_hf_headers()
            http_get(url, target, resume_size=start, headers=headers, expected_size=file.file_size, tqdm_class=bar)
            target.flush()
            os.fsync(target.fileno())
        if CHECKSUM.fullmatch(etag) and _checksum(partial) != etag:
            partial.unlink()
            raise OSError(f"{file.filename} arrived with another checksum than the hub gives")
        partial.replace(blob)


def _cache_of(path: Path, name: str) -> Path:
    """The repository's folder in the cache, of a file's place in it: `snapshots/COMMIT/` and its name."""
    return path.parents[len(Path(name).parts) + 1]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _counting_bar(total: int, progress: Progress) -> Any:
    """A class of bars that count their bytes together and tell them."""
    lock, done = Lock(), 0

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any):
            self.update(initial)

        def update(self, count: int = 1) -> None:
            nonlocal done
            with lock:
                done += count
                progress(min(done, total), total)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Bar


def _silent_bar() -> Any:
    """A class of bars that write nothing."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread that watches bars

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **(options | {"file": io.StringIO()}))

    return Bar
