# SPDX-License-Identifier: Apache-2.0
"""Typical values of the scalar operands of TPU kernels, for `plan`. A scalar operand decides which branches of a kernel
run. With typical values, the branches for rare cases do not run, and their cost is not counted."""

from math import ceil

Operands = tuple[tuple[str, tuple[int, ...]], ...]
SPARSE_FLASH_KERNEL = "flash_blocks"
SPARSE_LINEAR_KERNEL = "sparse_linear"  # the lists of this kernel have a static length
KERNELS_WITHOUT_SCALARS = (SPARSE_LINEAR_KERNEL, "flash_attention_int8")  # no scalar decides about their branches
KEYS_OPERAND = {"flash_attention": 2, "flash_gradient": 5}  # index of k among a kernel's operands
# Deviations of list lengths from their mean, to average over the remainders of unrolled loops
LIST_LENGTH_DEVIATIONS = range(-28, 29, 7)


def typical_branch_scalars(kernel: str, operands: Operands) -> list[int | None] | None:
    """Return typical values of the scalar that decides which branches of a kernel run; None for an unknown kernel.

    The price of the kernel is the average over these values. The values assume that a mask keeps all keys, and that all
    lists of blocks have about the average length.

    Args:
        kernel: The kernel's name.
        operands: The dtype and the shape of each operand.
    """
    if kernel == SPARSE_FLASH_KERNEL:
        (_, (grid_steps,)), _, (_, (groups,)), (_, (entries,)), *_ = operands
        mean = entries / (grid_steps * ceil(groups / grid_steps))  # a grid step has all keys
        return [max(0, round(mean) + deviation) for deviation in LIST_LENGTH_DEVIATIONS]
    if kernel in KERNELS_WITHOUT_SCALARS:
        return [None]
    if kernel in KEYS_OPERAND:
        _, (_, num_keys, _) = operands[KEYS_OPERAND[kernel]]
        return [num_keys]
    return None
