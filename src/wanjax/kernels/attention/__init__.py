# SPDX-License-Identifier: Apache-2.0
"""Attention: one function with several implementations."""

from wanjax.kernels.attention.api import (
    IMPLEMENTATIONS,
    RADIAL,
    Choice,
    attention,
    attention_to_kept,
    choose,
    is_radial,
    joint_attention,
    named,
    passes_keys,
)
from wanjax.kernels.attention.joint import Pair
from wanjax.kernels.attention.radial import Radial

__all__ = [
    "IMPLEMENTATIONS",
    "RADIAL",
    "Choice",
    "Pair",
    "Radial",
    "attention",
    "attention_to_kept",
    "choose",
    "is_radial",
    "joint_attention",
    "named",
    "passes_keys",
]
