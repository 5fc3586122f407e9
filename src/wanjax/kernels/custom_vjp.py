# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient of their own; a kernel without one has that of its reference in plain JAX."""

from collections.abc import Callable
from typing import Any

import jax


def with_backward(forward: Callable[..., tuple[Any, Any]], backward: Callable[..., tuple], *operands: Any) -> Any:
    """Return the result of `forward(*operands)`, which returns it with the residuals of its gradient.

    The gradients of the operands are `backward(residuals, gradient of the result)`, None for an operand without one.
    """
    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run(*operands)


def with_gradient(call: Callable, specification: Callable, *operands: jax.Array) -> jax.Array:
    """Return `call(*operands)`, whose gradient is that of `specification(*operands)`."""

    def forward(*operands: jax.Array) -> tuple[jax.Array, tuple]:
        return call(*operands), operands

    return with_backward(forward, lambda operands, g: jax.vjp(specification, *operands)[1](g), *operands)
