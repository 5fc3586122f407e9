# SPDX-License-Identifier: Apache-2.0
"""Typical values of the numbers that steer TPU kernels, for their prices: other branches guard rare cases only."""

from math import ceil

Operands = tuple[tuple[str, tuple[int, ...]], ...]
SPARSE_FLASH = "flash_blocks"
SPARSE_LINEAR = "sparse_linear"  # its lists have a static length
KEYS_OPERAND = {"flash_attention": 2, "flash_gradient": 5}  # index of k among a kernel's operands
DEVIATIONS = range(-28, 29, 7)  # of list lengths from their mean, to average over remainders of unrolled loops


def visits(kernel: str, operands: Operands) -> list[int | None] | None:
    """Return values of the scalars that steer a kernel, over which its price is averaged; None for an unknown kernel.

    They assume that a mask keeps all keys, and that lists of blocks are about as long as the average one.

    Args:
        kernel: The kernel's name.
        operands: The dtype and the shape of each operand.
    """
    if kernel == SPARSE_FLASH:
        (_, (grid_steps,)), _, (_, (groups,)), (_, (entries,)), *_ = operands
        mean = entries / (grid_steps * ceil(groups / grid_steps))  # a grid step holds all keys
        return [max(0, round(mean) + deviation) for deviation in DEVIATIONS]
    if kernel == SPARSE_LINEAR:
        return [None]
    if kernel in KEYS_OPERAND:
        _, (_, keys, _) = operands[KEYS_OPERAND[kernel]]
        return [keys]
    return None
