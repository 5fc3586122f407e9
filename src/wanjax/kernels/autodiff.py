# SPDX-License-Identifier: Apache-2.0
"""Gradients: what a backward pass keeps or computes again, and functions with a gradient of their own.

A kernel without a gradient of its own has that of its reference in plain JAX.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Results = TypeVar("Results")  # an array, or a tree of arrays

_NAME = "saved"

remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_NAME))
"""Computes a function again in its backward pass, except what `save_for_backward` marks."""


def save_for_backward(x: Results) -> Results:
    """Mark results that a backward pass reads: those that cost the most for their size."""
    return checkpoint_name(x, _NAME)


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
