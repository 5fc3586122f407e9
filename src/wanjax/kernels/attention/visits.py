# SPDX-License-Identifier: Apache-2.0
"""How much the kernels for TPUs visit, for their prices: in them data-dependent branches guard rare cases alone."""

from math import ceil

Operands = tuple[tuple[str, tuple[int, ...]], ...]
SPARSE_FLASH = "flash_blocks"
SPARSE_LINEAR = "sparse_linear"  # of a known length
KEYS_OPERAND = {"flash_attention": 2, "flash_gradient": 5}  # among a kernel's operands
DEVIATIONS = range(-28, 29, 7)  # of the numbers of blocks about their mean: bodies of blocks divide them unevenly


def visits(kernel: str, operands: Operands) -> list[int | None] | None:
    """Return values of the words that a kernel is given, over which its price is averaged; None for others' kernels.

    A mask leaves all keys. In a kernel that visits listed blocks each grid step visits about as many as they all list
    on average.

    Args:
        kernel: The kernel's name.
        operands: The dtype and the shape of each operand.
    """
    if kernel == SPARSE_FLASH:
        (_, (grid_steps,)), _, (_, (groups,)), (_, (entries,)), *_ = operands
        mean = entries / (
            grid_steps * ceil(groups / grid_steps)
        )  # keys are held at once, so a cell has all of a group's blocks
        return [max(0, round(mean) + deviation) for deviation in DEVIATIONS]
    if kernel == SPARSE_LINEAR:
        return [None]
    if kernel in KEYS_OPERAND:
        _, (_, keys, _) = operands[KEYS_OPERAND[kernel]]
        return [keys]
    return None
