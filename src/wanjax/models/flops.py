# SPDX-License-Identifier: Apache-2.0
"""Operation counts that the families share; a multiplication and an addition are two operations."""

from typing import Any


def linear_flops(rows: int, width_in: int, width_out: int) -> int:
    return 2 * rows * width_in * width_out


def attention_flops(queries: int, keys: int, width: int) -> int:
    """Operations of q kᵀ and of the weights times v, over all heads."""
    return 4 * queries * keys * width


def self_attention_flops(config: Any, tokens: int) -> int:
    """The products of a transformer's self-attention, or joint attention, in the blocks of one forward."""
    return config.layers * attention_flops(tokens, tokens, config.width)
