# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear under their names when they are complete."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from wanjax.errors import WanjaxError, reason, written
from wanjax.signals import abandoned_by
from wanjax.stores.own import name_beside
from wanjax.stores.places import Place, Remote, publishing


@contextmanager
def writing(path: Place) -> Iterator[Path]:
    """Yields a file beside `path`, with the same suffix, which becomes `path` if the block succeeds, else is removed.

    For an object of a store the file is among the temporary ones, and is published. Raises WriteError in place of the
    block's OSError.
    """
    if isinstance(path, Remote):
        with publishing(path) as file:
            yield file
        return
    beside = name_beside(path)
    try:
        with abandoned_by(beside.unlink), written(path):
            yield beside
            beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file of a folder, which appears when all of it is there, for all whom the process's umask lets read it.

    Of a write that fails nothing is left. Unlike `writing` it serves threads that write one file of a cache, and does
    not look through the folder, which may hold thousands.
    """
    beside = file.with_name(f".{uuid4().hex}.part")  # by its name, as temporary files are closed to others
    try:
        beside.write_bytes(content)
        beside.replace(file)
    finally:
        with suppress(OSError):
            beside.unlink()


def check_folder(folder: Place) -> None:
    """Makes the folder if need be; raises WanjaxError if files cannot be written to it."""
    if isinstance(folder, Remote):
        folder.check_writable()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WanjaxError(f"the folder {folder} cannot be written, {reason(error)}: another one is needed") from error
