# SPDX-License-Identifier: Apache-2.0
"""Compute the gradient of attention from its result and its log-sum-exps (Dao et al., FlashAttention, 2022, algorithm
4).

The backward pass computes the weights of a block again, from the block's scores and the log-sum-exps. The gradient of
the softmax needs one more sum for each query, delta = Σ result · gradient. So the forward pass saves only operands and
results. If the results are saved too, a rematerialized transformer block need not compute attention again.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from wanjax.kernels.autodiff import save_for_backward, with_backward

Result = tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]
Backward = Callable[..., tuple[Array, Array, Array]]  # from (q, k, v, g, lse, delta, masks) to (dq, dk, dv)


def from_result(
    forward: Callable[..., Result],
    backward: Backward,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    masks: Any,
) -> Result:
    """Return `forward(q, k, v, masks)` with the custom gradient `backward(q, k, v, g, lse, delta, masks)`.

    `forward` returns the result and its log-sum-exps `lse`. `g` is the gradient of the result. `delta` [B L N] is
    subtracted from the gradient of each weight of a query. `masks` is a tree of arrays without a gradient.
    """

    def fwd(q: Array, k: Array, v: Array, masks: Any) -> tuple[Result, tuple]:
        out, lse = save_for_backward(forward(q, k, v, masks))
        return (out, lse), (q, k, v, masks, out, lse)

    def bwd(residuals: tuple, gradients: Result) -> tuple:
        q, k, v, masks, out, lse = residuals
        g, dlse = gradients
        delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
        return *backward(q, k, v, g, lse, delta, masks), None

    return with_backward(fwd, bwd, q, k, v, masks)
