# SPDX-License-Identifier: Apache-2.0
"""LoRAs of the projection of sparse-linear attention, whose weights are read directly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.compare import error
from tests.support.configs import TRANSFORMER
from tests.support.small_wan import network
from wanjax.converters.wan.diffusers import transformer_weight_rules
from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
from wanjax.layers.rope import rope_3d
from wanjax.models.wan.transformer import SelfAttention, WanTransformer
from wanjax.training.adapters import LoraConfig, LoraLinear, adapt, export_factors, is_factor, remove_adapters

CONFIG = replace(TRANSFORMER, sparse_linear=SparseLinearAttentionConfig())
PROJECTION = "blocks.self_attn.proj_l"
SPARSE = AttentionConfig.parse("sla:top=0.5,block_q=16,block_kv=8")


def test_the_projection_is_adapted_if_it_is_the_only_target():
    transformer, rules = network(lambda **kw: WanTransformer(CONFIG, **kw), None), transformer_weight_rules(CONFIG)
    adapted, targets = adapt(transformer, rules, LoraConfig(2, targets=("proj_l",)), 0)
    assert targets == {PROJECTION: "blocks.{i}.attn1.proj_l"}
    assert {name: x.shape for name, x in export_factors(adapted, rules, targets).items()} == {
        "blocks.0.attn1.proj_l.lora_A.weight": (2, 24),
        "blocks.0.attn1.proj_l.lora_B.weight": (24, 2),
    }


def test_the_projection_is_trained_fully_if_it_is_no_target():
    """The change of all its weights is trained separately, and the file has this change."""
    transformer, rules = network(lambda **kw: WanTransformer(CONFIG, **kw), None), transformer_weight_rules(CONFIG)
    initial_kernel = np.asarray(transformer.blocks.self_attn.proj_l.kernel[...])
    adapted, targets = adapt(transformer, rules, LoraConfig(2), 0)
    projection = adapted.blocks.self_attn.proj_l
    np.testing.assert_array_equal(projection.kernel, initial_kernel)
    trained_paths = {
        path[-2:] for path, x in nnx.to_flat_state(nnx.state(adapted)) if is_factor(path, x) and "proj_l" in path
    }
    assert trained_paths == {("diff", "kernel"), ("diff", "bias")}
    change = np.random.default_rng(0).normal(size=initial_kernel.shape).astype(np.float32)
    projection.diff.kernel[...] = jnp.asarray(change)
    np.testing.assert_allclose(projection.kernel, initial_kernel + change, atol=1e-6)
    np.testing.assert_array_equal(remove_adapters(adapted).blocks.self_attn.proj_l.kernel[...], initial_kernel)
    tensors = export_factors(adapted, rules, targets)
    np.testing.assert_array_equal(tensors["blocks.0.attn1.proj_l.diff"], change[0].T)
    assert tensors["blocks.0.attn1.proj_l.diff_b"].shape == (24,)


def test_a_lora_of_the_projection_is_trained_and_merged():
    """The factors have gradients, and the layer with factors equals the layer with their product added."""
    layer = network(lambda **kw: SelfAttention(CONFIG, SPARSE, **kw), None)
    initial_kernel, projection = np.asarray(layer.proj_l.kernel[...]), layer.proj_l
    layer.proj_l = adapted = LoraLinear(projection, LoraConfig(2, alpha=3.0), nnx.Rngs(0))
    adapted.lora_up.kernel[...] = jnp.full_like(adapted.lora_up.kernel[...], 0.1)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 40, CONFIG.width)), jnp.float32)
    rope = rope_3d((2, 4, 5), CONFIG.rope_channels)
    forward = jax.jit(lambda layer: layer(x, rope)[0])
    adapted_output, gradient = forward(layer), jax.jit(jax.grad(lambda layer: forward(layer).std()))(layer)
    for factor in (gradient.proj_l.lora_up, gradient.proj_l.lora_down):
        assert np.abs(factor.kernel[...]).max() > 0
    down, up = (np.asarray(factor.kernel[...]) for factor in (adapted.lora_down, adapted.lora_up))
    layer.proj_l = projection
    assert error(adapted_output, forward(layer)) > 1e-3
    projection.kernel[...] = jnp.asarray(initial_kernel + 1.5 * down @ up)
    assert error(adapted_output, forward(layer)) <= 1e-6
