# SPDX-License-Identifier: Apache-2.0
"""The calls of the backend's compiler, counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from wanjax.compile_cache.compilations import Compilation, watch_compiler


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """Yield a list of the programs that are compiled, or read from the cache, in the `with` block."""
    result: list[Compilation] = []
    with watch_compiler(result.append):
        yield result
