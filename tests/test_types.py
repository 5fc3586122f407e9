# SPDX-License-Identifier: Apache-2.0
"""Annotations hold in every test: a wrong shape fails where it is passed."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import TypeCheckError

from tests.support.configs import TRANSFORMER
from wanjax.kernels.attention import attention
from wanjax.models.wan.transformer import WanTransformer


def test_attention_takes_as_many_values_as_keys():
    q = jnp.ones((1, 5, 2, 8))
    assert attention(q, q, q).shape == q.shape
    with pytest.raises(TypeCheckError, match="typechecking parameter 'v'"):
        attention(q, q, q[:, :3])


@pytest.mark.parametrize(
    ("latents", "t", "parameter"),
    [((1, 3, 4, 4, 6), (1,), None), ((3, 4, 4, 6), (1,), "latents"), ((1, 3, 4, 4, 6), (2,), "t")],
)
def test_a_transformer_takes_latents_and_a_timestep_for_each(latents, t, parameter):
    def forward(latents, t):
        model = WanTransformer(TRANSFORMER, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        context = model.context(jnp.ones((1, 7, TRANSFORMER.text_width)))
        return model(latents, t, context, model.rope((3, 2, 2)))

    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (latents, t))
    if parameter is None:
        assert jax.eval_shape(forward, *operands).shape == (1, 3, 4, 4, 16)
    else:
        with pytest.raises(TypeCheckError, match=f"typechecking parameter '{parameter}'"):
            jax.eval_shape(forward, *operands)
