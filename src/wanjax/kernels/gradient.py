# SPDX-License-Identifier: Apache-2.0
"""The gradient of a kernel that has none of its own: that of the plain JAX which specifies it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradient(call: Callable, specification: Callable, *operands: jax.Array) -> jax.Array:
    """Returns `call(*operands)`, whose gradient is that of `specification(*operands)`."""
    return call(*operands)


def _forward(call: Callable, specification: Callable, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return call(*operands), operands


def _backward(call: Callable, specification: Callable, operands: tuple[jax.Array, ...], g: jax.Array) -> Any:
    return jax.vjp(specification, *operands)[1](g)


with_gradient.defvjp(_forward, _backward)
