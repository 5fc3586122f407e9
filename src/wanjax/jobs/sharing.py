# SPDX-License-Identifier: Apache-2.0
"""The place that the users of jobs share: a folder, here or in a store, with a file that has the place's id.

Servers have another file than batches: their jobs differ, and so do the workers that make them.
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

SERVE, BATCH = "serve.place", "batch.place"  # names of the file


def join_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Have a store use the jobs of a folder, which becomes a place if it is none.

    Args:
        store: The store, which uses the jobs of the folder afterwards.
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
    """Have a store use the jobs of a folder of others; return why it cannot, "" where it does.

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
    """Raise WanjaxError where a worker's folder is not the place whose jobs it is to make.

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
    """Write the file of a place, unless another process was first."""
    if not isinstance(file, Path):
        file.create(id.encode())
        return
    beside = sibling_path(file.with_name(id))
    with write_errors(file):
        beside.write_text(id)
        try:
            os.link(beside, file)  # as a whole, and not in place of another
        except FileExistsError:
            pass
        except OSError:  # no links there, as on some network file systems
            beside.replace(file)
        finally:
            with suppress(OSError):
                beside.unlink()


def requeue_dead(store: JobStore) -> None:
    """Let the jobs of workers wait again that were processes of this host and are no more.

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
