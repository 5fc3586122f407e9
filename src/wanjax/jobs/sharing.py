# SPDX-License-Identifier: Apache-2.0
"""Connect a shared folder of videos to a namespace of the job store. A file in the folder contains the id of the
namespace. Servers and batches use different files, because they have different jobs and workers.
"""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import psutil

from wanjax.errors import WanjaxError, wrap_write_errors
from wanjax.jobs.store import JobStore
from wanjax.stores.paths import AnyPath, StoreError, read_if_exists
from wanjax.stores.temporary import HOST_NAME, sibling_path

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


def try_join_namespace(store: JobStore, folder: AnyPath, name: str) -> str:
    """Switch a worker's store to the existing namespace of a folder. Return "", or the reason why this is impossible.

    Args:
        store: The store of a worker.
        folder: The folder of a server or a batch.
        name: SERVE_FILE or BATCH_FILE.
    """
    command = f"wanjax {name.partition('.')[0]}"
    problem = f"no `{command}` with the database {store.name} uses the folder {folder}"
    try:
        if (id := _read_id(folder / name)) and store.use_namespace(id, is_new=False):
            return ""
    except (OSError, StoreError) as error:
        problem = str(error)
    return f"{problem}, so this worker takes no job: give servers and workers the same --dir, or batches the same --out"


def check_namespace(store: JobStore, folder: AnyPath, name: str) -> None:
    """Raise WanjaxError if the namespace of a worker's folder is not the namespace of its store.

    Args:
        store: The store of the worker.
        folder: The folder's path on this host.
        name: SERVE_FILE or BATCH_FILE.
    """
    if store.namespace and _read_id(folder / name) != store.namespace:
        problem = f"{folder} on {HOST_NAME} is another folder than on the host that started this worker"
        raise WanjaxError(f"{problem}: give a folder that all hosts share, on a network file system or in a bucket")


def _read_id(file: AnyPath) -> str:
    return (read_if_exists(file) or b"").decode(errors="replace").strip()


def _create_file(file: AnyPath, id: str) -> None:
    """Create the file with the id, unless another process has created it first."""
    if not isinstance(file, Path):
        file.create(id.encode())
        return
    temporary_file = sibling_path(file.with_name(id))
    with wrap_write_errors(file):
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
        process = worker.info.get("process")
        if worker.info.get("host") != HOST_NAME or not isinstance(process, int):
            continue
        if process == os.getpid() or not psutil.pid_exists(process):
            store.requeue_lost(worker.name)
