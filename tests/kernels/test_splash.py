# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention, run by Pallas' interpreter, is compared with the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import BOUND, exact, exact_gradients, normal, operands
from tests.support.compare import error
from tests.support.words import line_with_words
from wanjax.kernels.attention import attention, choose_implementation, splash

INTERPRETED = splash.Config(interpret=True)


def test_results_and_gradients_are_near_the_formula():
    """Lengths are ragged, keys are masked, and one example has no key."""
    q, k, v = operands(2, 150, 333, 2, 2, 128, "bfloat16")
    mask = np.random.default_rng(0).random((2, 333)) < 0.6
    mask[1] = False
    g = normal(3, *q.shape)

    @jax.jit
    def run(q, k, v):
        def attend(q, k, v):
            out = attention(q, k, v, key_mask=jnp.asarray(mask), implementation="splash", config=INTERPRETED)
            return jnp.sum(out.astype(jnp.float32) * g), out

        return jax.grad(attend, (0, 1, 2), has_aux=True)(q, k, v)

    gradients, out = run(q, k, v)
    assert not np.asarray(out[1]).any()
    assert error(out, exact(q, k, v, key_mask=mask)) <= BOUND["bfloat16"]
    for gradient, expected in zip(gradients, exact_gradients(q, k, v, g, scale=128**-0.5, key_mask=mask), strict=False):
        assert error(gradient, expected) <= 5e-3


@pytest.mark.parametrize("options", [{"window": 5}, {"return_lse": True}, {"bias": jnp.zeros((1, 1, 96, 96))}])
def test_unsupported_options_are_refused(options):
    operand = jax.ShapeDtypeStruct((1, 96, 2, 64), "bfloat16")
    with pytest.raises(NotImplementedError, match=line_with_words("splash")):
        choose_implementation(operand, operand, operand, implementation="splash", config=INTERPRETED, **options)
