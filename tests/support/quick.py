# SPDX-License-Identifier: Apache-2.0
"""Parameters of a test of which a few hold its promise on every run, and all of them under `-m slow` too."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(some: Iterable[Any], of: Iterable[Any]) -> list[Any]:
    """Return all of the parameters; those that are not among `some` are slow. A tuple is several arguments."""
    chosen, every = list(some), list(of)
    assert all(value in every for value in chosen), chosen

    def parameter(value: Any) -> Any:
        arguments = value if isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in chosen else pytest.mark.slow)

    return [parameter(value) for value in every]
