# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient of their own, and that of a kernel without one: of the plain JAX which specifies it."""

from collections.abc import Callable
from typing import Any

import jax


def with_backward(forward: Callable[..., tuple[Any, Any]], backward: Callable[..., tuple], *operands: Any) -> Any:
    """Returns the first of the two that `forward(*operands)` gives: the result, and what its gradient needs.

    The gradients of the operands are `backward(second, gradient of the result)`, None for one that has none.
    """
    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run(*operands)


def with_gradient(call: Callable, specification: Callable, *operands: jax.Array) -> jax.Array:
    """Returns `call(*operands)`, whose gradient is that of `specification(*operands)`."""

    def forward(*operands: jax.Array) -> tuple[jax.Array, tuple]:
        return call(*operands), operands

    return with_backward(forward, lambda operands, g: jax.vjp(specification, *operands)[1](g), *operands)
