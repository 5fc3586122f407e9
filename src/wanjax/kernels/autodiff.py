# SPDX-License-Identifier: Apache-2.0
"""Rematerialization, and functions with a custom gradient.

A kernel without its own gradient uses the gradient of its reference in plain JAX.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Results = TypeVar("Results")  # an array, or a tree of arrays

_CHECKPOINT_NAME = "saved"

remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_CHECKPOINT_NAME))
"""Compute a function again in its backward pass, except for the results that `save_for_backward` marks."""


_is_forward_only: ContextVar[bool] = ContextVar("is_forward_only", default=False)


@contextmanager
def forward_only() -> Iterator[None]:
    """Within the `with` block, networks compute no gradients, so they may use operations without a gradient."""
    token = _is_forward_only.set(True)
    try:
        yield
    finally:
        _is_forward_only.reset(token)


def is_forward_only() -> bool:
    """Return whether networks compute no gradients here."""
    return _is_forward_only.get()


def save_for_backward(x: Results) -> Results:
    """Mark results to save for the backward pass. Use this for results that take long to compute, relative to their
    size."""
    return checkpoint_name(x, _CHECKPOINT_NAME)


def with_backward(forward: Callable[..., tuple[Any, Any]], backward: Callable[..., tuple], *operands: Any) -> Any:
    """Return the result of `forward(*operands)` with a custom gradient.

    `forward` returns its result and the residuals. `backward(residuals, g)` takes the gradient g of the result, and
    returns a gradient for each operand, or None for an operand without a gradient.
    """
    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run(*operands)


def with_gradient(kernel_call: Callable, reference: Callable, *operands: jax.Array | None) -> jax.Array:
    """Return the result of `kernel_call(*operands)`, with the gradient of `reference(*operands)`."""

    def forward(*operands: jax.Array | None) -> tuple[jax.Array, tuple]:
        return kernel_call(*operands), operands

    return with_backward(forward, lambda operands, g: jax.vjp(reference, *operands)[1](g), *operands)
