# SPDX-License-Identifier: Apache-2.0
"""The namespace of a shared folder of videos: its id is in a file in the folder.

Servers and batches have different files, since their jobs and workers differ.
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

SERVE, BATCH = "serve.place", "batch.place"  # names of the files


def join_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Switch a store to the namespace of a folder, and create the namespace if needed.

    Args:
        store: The store to switch.
        folder: The folder of the videos.
        name: SERVE or BATCH.

    Raises:
        WanjaxError: The folder cannot be written.
    """
    file = folder / name
    if not (id := _id_of(file)):
        _create(file, token_hex(8))
        id = _id_of(file)
    store.use_namespace(id, is_new=True)


def join_error(store: JobStore, folder: AnyPath, name: str) -> str:
    """Switch a worker's store to the existing namespace of a folder; return "" or the reason why it cannot.

    Args:
        store: The store of a worker.
        folder: The folder of a server or a batch.
        name: SERVE or BATCH.
    """
    command = f"wanjax {name.partition('.')[0]}"
    why = f"{folder} is the folder of no `{command}` with the database {store.name}"
    try:
        if (id := _id_of(folder / name)) and store.use_namespace(id, is_new=False):
            return ""
    except (OSError, StoreError) as error:
        why = str(error)
    return f"{why}: this worker takes no job until it is; --dir of servers or --out of batches is one place for all"


def check_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Raise WanjaxError if a worker's folder has another namespace than its store.

    Args:
        store: The store of the worker.
        folder: The folder, as this host has it.
        name: SERVE or BATCH.
    """
    if store.namespace and _id_of(folder / name) != store.namespace:
        why = f"{folder} is another folder on {HOST} than where its worker was started"
        raise WanjaxError(f"{why}: give one that all hosts share, as on a network file system or in a store")


def _id_of(file: AnyPath) -> str:
    return (read(file) or b"").decode(errors="replace").strip()


def _create(file: AnyPath, id: str) -> None:
    """Create the namespace file, unless another process was first."""
    if not isinstance(file, Path):
        file.create(id.encode())
        return
    beside = sibling_path(file.with_name(id))
    with write_errors(file):
        beside.write_text(id)
        try:
            os.link(beside, file)  # atomic, and fails if the file exists
        except FileExistsError:
            pass
        except OSError:  # some network file systems have no links
            beside.replace(file)
        finally:
            with suppress(OSError):
                beside.unlink()


def requeue_dead(store: JobStore) -> None:
    """Requeue the jobs of workers that were processes of this host and have died.

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
