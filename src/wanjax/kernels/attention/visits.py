# SPDX-License-Identifier: Apache-2.0
"""How much the kernels for TPUs visit, for their prices: in them data-dependent branches guard rare cases alone."""

from math import ceil

Operands = tuple[tuple[str, tuple[int, ...]], ...]
BLOCKS = "flash_blocks"
LISTS = "sparse_linear"  # of a known length
PLACE_OF_KEYS = {"flash_attention": 2, "flash_gradient": 5}  # among a kernel's operands
SPREAD = range(-28, 29, 7)  # of the numbers of blocks about their mean: bodies of blocks divide them unevenly


def visits(kernel: str, operands: Operands) -> list[int | None] | None:
    """Return values of the words that a kernel is given, over which its price is averaged; None for others' kernels.

    A mask leaves all keys. In a kernel that visits listed blocks each grid step visits about as many as they all list
    on average.

    Args:
        kernel: The kernel's name.
        operands: The dtype and the shape of each operand.
    """
    if kernel == BLOCKS:
        (_, (cells,)), _, (_, (groups,)), (_, (listed,)), *_ = operands
        mean = listed / (cells * ceil(groups / cells))  # keys are held at once, so a cell has all of a group's blocks
        return [max(0, round(mean) + more) for more in SPREAD]
    if kernel == LISTS:
        return [None]
    if kernel in PLACE_OF_KEYS:
        _, (_, keys, _) = operands[PLACE_OF_KEYS[kernel]]
        return [keys]
    return None
