# SPDX-License-Identifier: Apache-2.0
"""Lists the calls of the backend's compiler."""

from collections.abc import Iterator
from contextlib import contextmanager

from wanjax.compile_cache.compilations import Compilation, watch_compiler


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """Yield a list of the programs that are compiled, or read from the cache, in the `with` block."""
    compiled: list[Compilation] = []
    with watch_compiler(compiled.append):
        yield compiled
