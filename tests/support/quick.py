# SPDX-License-Identifier: Apache-2.0
"""Parameters of a test: a few that run always, and the rest with `-m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(fast: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Return all parameters, and mark those that are not in `fast` as slow. A tuple is several arguments."""
    fast, every = list(fast), list(every)
    assert all(value in every for value in fast), fast

    def parameter(value: Any) -> Any:
        arguments = value if isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in fast else pytest.mark.slow)

    return [parameter(value) for value in every]
