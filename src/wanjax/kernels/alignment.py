# SPDX-License-Identifier: Apache-2.0
"""Rounding of sizes to full tiles of a TPU's registers and memory."""

from typing import Any

LANES = 128


def ceil_div(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def round_up(a: Any, b: int) -> Any:
    return b * ceil_div(a, b)
