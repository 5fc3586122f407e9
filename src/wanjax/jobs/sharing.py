# SPDX-License-Identifier: Apache-2.0
"""What the users of one database share: a folder of videos, in which a probe file shows it, and perhaps a host."""

import os
from pathlib import Path

import psutil

from wanjax.errors import written
from wanjax.jobs.store import JobStore
from wanjax.stores.own import HOST
from wanjax.stores.places import Place, StoreError


def probe_of(store: JobStore, folder: Place) -> Place:
    """Return the file by which a folder shows that it is that of a store's users."""
    return folder / f".wanjax-{store.probe()}"


def write_probe(store: JobStore, folder: Place) -> None:
    """Write the probe file of a folder; who adds jobs does."""
    probe = probe_of(store, folder)
    if isinstance(probe, Path):
        with written(probe):
            probe.touch()
    else:
        probe.create(b"")


def why_apart(store: JobStore, folder: Place) -> str:
    """Return why a worker must not take jobs: its folder is not that of those who add them; "" where it may."""
    probe = probe_of(store, folder)
    try:
        if probe.exists():
            return ""
        why = f"{folder} is not the folder of the server or the batch, which has the file {probe.name}"
    except StoreError as error:
        why = str(error)
    return f"{why}: this worker takes no job until it is; --dir or --out has to be one place for all"


def requeue_dead(store: JobStore) -> None:
    """Let the jobs of workers wait again that were processes of this host and are no more."""
    store.requeue_expired()
    for worker in store.workers():
        process = worker.facts.get("process")
        if worker.facts.get("host") != HOST or not isinstance(process, int):
            continue
        if process == os.getpid() or not psutil.pid_exists(process):
            store.lost(worker.name)
