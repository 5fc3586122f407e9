# SPDX-License-Identifier: Apache-2.0
"""The namespace of a shared folder of videos. A file in the folder holds the namespace's id.

Servers and batches use different files, because they have different jobs and workers.
"""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import psutil

from wanjax.errors import WanjaxError, write_errors
from wanjax.jobs.store import JobStore
from wanjax.stores.paths import AnyPath, StoreError, read
from wanjax.stores.temporary import HOST, sibling_path

SERVE_FILE, BATCH_FILE = "serve.place", "batch.place"  # names of the files with the id


def join_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Switch a store to the namespace of a folder, and create the namespace if needed.

    Args:
        store: The store to switch.
        folder: The folder of the videos.
        name: SERVE_FILE or BATCH_FILE.

    Raises:
        WanjaxError: The folder cannot be written.
    """
    file = folder / name
    if not (id := _read_id(file)):
        _create_file(file, token_hex(8))
        id = _read_id(file)
    store.use_namespace(id, is_new=True)


def join_error(store: JobStore, folder: AnyPath, name: str) -> str:
    """Switch a worker's store to the existing namespace of a folder. Return "", or why it cannot.

    Args:
        store: The store of a worker.
        folder: The folder of a server or a batch.
        name: SERVE_FILE or BATCH_FILE.
    """
    command = f"wanjax {name.partition('.')[0]}"
    why = f"no `{command}` with the database {store.name} uses the folder {folder}"
    try:
        if (id := _read_id(folder / name)) and store.use_namespace(id, is_new=False):
            return ""
    except (OSError, StoreError) as error:
        why = str(error)
    return f"{why}, so this worker takes no job: give servers and workers the same --dir, or batches the same --out"


def check_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Raise WanjaxError if a worker's folder belongs to another namespace than its store.

    Args:
        store: The store of the worker.
        folder: The folder's path on this host.
        name: SERVE_FILE or BATCH_FILE.
    """
    if store.namespace and _read_id(folder / name) != store.namespace:
        why = f"{folder} on {HOST} is another folder than on the host that started this worker"
        raise WanjaxError(f"{why}: give a folder that all hosts share, on a network file system or in a bucket")


def _read_id(file: AnyPath) -> str:
    return (read(file) or b"").decode(errors="replace").strip()


def _create_file(file: AnyPath, id: str) -> None:
    """Create the file with the id, unless another process creates it first."""
    if not isinstance(file, Path):
        file.create(id.encode())
        return
    temporary_file = sibling_path(file.with_name(id))
    with write_errors(file):
        temporary_file.write_text(id)
        try:
            os.link(temporary_file, file)  # atomic, and fails if the file exists
        except FileExistsError:
            pass
        except OSError:  # some network file systems have no hard links
            temporary_file.replace(file)
        finally:
            with suppress(OSError):
                temporary_file.unlink()


def requeue_dead(store: JobStore) -> None:
    """Requeue the jobs of workers whose processes on this host have died.

    Args:
        store: The store.
    """
    store.requeue_expired()
    for worker in store.workers():
        process = worker.facts.get("process")
        if worker.facts.get("host") != HOST or not isinstance(process, int):
            continue
        if process == os.getpid() or not psutil.pid_exists(process):
            store.requeue_lost(worker.name)
