# SPDX-License-Identifier: Apache-2.0
"""Disks that are full."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Fail writes beyond this size of a file, as on a full disk, in this process and its children."""
    import resource  # late, as Windows has none

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
