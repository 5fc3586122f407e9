# SPDX-License-Identifier: Apache-2.0
"""Calls of programs in tests."""

from collections.abc import Callable
from typing import Any

from wanjax.programs import EXECUTE, Program, Site
from wanjax.sharding import Partitioner, one_device


def caller(partitioner: Partitioner | None = None) -> Callable[..., Any]:
    """Returns a function that executes a program, on one device or on a mesh."""

    def call(program: Program, static: Any, *arguments: Any) -> Any:
        return EXECUTE.call(program, Site(partitioner or one_device()), static, *arguments)

    return call
