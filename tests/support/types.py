# SPDX-License-Identifier: Apache-2.0
"""The check of annotations in tests, and a context without it."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for pyright


@contextmanager
def unchecked() -> Iterator[None]:
    """Disables checks of annotations, so that wrong operands reach the library's own messages."""
    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", disabled)
