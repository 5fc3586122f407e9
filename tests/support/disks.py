# SPDX-License-Identifier: Apache-2.0
"""Disks without room."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let no file of this process, or of those that it starts, be larger: the write fails as on a full disk."""
    import resource  # late, as Windows has none

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
