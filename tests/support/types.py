# SPDX-License-Identifier: Apache-2.0
"""Check annotations in tests, and turn the checks off for a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for pyright
with_shapes = jaxtyping.jaxtyped


def _has_shapes(annotation: Any) -> bool:
    """Return whether an annotation has shapes, or may have them because it is a string."""
    if isinstance(annotation, str) or getattr(annotation, "__module__", "").startswith("jaxtyping"):
        return True
    return any(map(_has_shapes, get_args(annotation)))


def by_annotation(*, typechecker: Callable) -> Callable[[Any], Any]:
    """Replace jaxtyping's decorator, which checks each call twice, for functions without shapes."""

    def decorate(function: Any) -> Any:
        annotations = getattr(function, "__annotations__", None)
        if isinstance(function, type) or annotations is None or any(map(_has_shapes, annotations.values())):
            return with_shapes(function, typechecker=typechecker)
        if not annotations:
            return function
        with_types = typechecker(function)

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return (function if jaxtyping.config.jaxtyping_disable else with_types)(*arguments, **named)

        return call

    return decorate


def install() -> None:
    """Check the annotations of the library's modules that are imported from now on."""
    jaxtyping.jaxtyped = by_annotation
    jaxtyping.install_import_hook("wanjax", "tests.support.types.checked")


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks of annotations, so that wrong operands reach the library's own messages."""
    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", disabled)
