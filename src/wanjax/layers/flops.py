# SPDX-License-Identifier: Apache-2.0
"""Count the operations of layers. A multiplication and an addition are two operations."""


def linear_flops(rows: int, width_in: int, width_out: int) -> int:
    return 2 * rows * width_in * width_out


def attention_flops(num_queries: int, num_keys: int, width: int) -> int:
    """Count the operations of the two products of attention, q kᵀ and the weights times v, over all heads."""
    return 4 * num_queries * num_keys * width
