# SPDX-License-Identifier: Apache-2.0
"""Attention: one function with several implementations."""

from wanjax.kernels.attention.api import (
    IMPLEMENTATIONS,
    Choice,
    attention,
    attention_to_kept,
    choose,
    is_radial,
    named,
)

__all__ = ["IMPLEMENTATIONS", "Choice", "attention", "attention_to_kept", "choose", "is_radial", "named"]
