# SPDX-License-Identifier: Apache-2.0
"""The T5 encoder: sizes, axes, position buckets, masks, and its initial weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.configs import UMT5
from wanjax.kernels import compiler_options
from wanjax.layers.placement import axes_of
from wanjax.models.t5 import UMT5_XXL, T5Config, T5Encoder, distance_buckets

T5 = dataclasses.replace(UMT5, shared_bias=True)


@functools.cache
def build(config: T5Config, dtype=jnp.float32, param_dtype=jnp.float32) -> T5Encoder:
    return nnx.jit(lambda: T5Encoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))()


encode = nnx.jit(lambda model, *random_prompt: model(*random_prompt))


def abstract_weights(config: T5Config) -> list[tuple[tuple, nnx.Variable]]:
    return nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: build(config, param_dtype=jnp.bfloat16))))


def random_prompt(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and a mask; row i has its last i + 1 positions masked."""
    tokens = np.random.default_rng(length).integers(0, UMT5.vocab_size, (batch, length), np.int32)
    return tokens, np.arange(length)[None, :] < length - 1 - np.arange(batch)[:, None]


def test_umt5_xxl_has_as_many_parameters_as_the_published_encoder():
    assert sum(weight.get_value().size for _, weight in abstract_weights(UMT5_XXL)) == 5_680_910_336


@pytest.mark.parametrize("config", [UMT5, T5])
def test_every_weight_names_each_of_its_axes(config):
    for path, weight in abstract_weights(config):
        axes, shape = axes_of(weight), weight.get_value().shape
        assert len(axes) == len(shape), path
        assert (axes[0] == "layers") == (path[0] == "blocks"), path


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
def test_buckets_follow_their_definition_in_exact_arithmetic(buckets, max_distance):
    half, exact = buckets // 2, buckets // 4
    distances = np.arange(-300, 301)
    buckets_of_distances = distance_buckets(distances, buckets, max_distance)
    for distance, bucket in zip(distances.tolist(), buckets_of_distances.tolist(), strict=True):
        # the k-th geometric bucket begins where (distance / exact) ** steps reaches (max_distance / exact) ** k
        size, steps = abs(distance), half - exact
        reached = [k for k in range(steps) if size**steps * exact**k >= max_distance**k * exact**steps]
        assert bucket == half * (distance > 0) + (size if size < exact else exact + max(reached)), distance


@pytest.mark.parametrize("config", [UMT5, T5])
def test_masked_tokens_have_no_effect(config):
    model = build(config)
    tokens, mask = random_prompt(2, 12)
    features = np.asarray(encode(model, tokens, mask))
    changed = np.asarray(encode(model, np.where(mask, tokens, np.int32(7)), mask))
    longer = np.asarray(encode(model, *(np.pad(x, ((0, 0), (0, 5))) for x in (tokens, mask))))[:, :12]
    unmasked = np.asarray(encode(model, tokens, np.ones_like(mask)))
    for row in range(2):
        np.testing.assert_array_equal(features[row, mask[row]], changed[row, mask[row]])
        np.testing.assert_allclose(features[row, mask[row]], longer[row, mask[row]], rtol=1e-4, atol=1e-5)
    assert not np.allclose(features[0], unmasked[0])


def test_an_integer_mask_works_as_a_boolean_mask():
    model = build(UMT5)
    tokens, mask = random_prompt(2, 12)
    np.testing.assert_array_equal(encode(model, tokens, mask), encode(model, tokens, mask.astype(np.int32)))


def test_a_position_bias_belongs_to_one_layer_or_is_shared():
    tokens, _ = random_prompt(1, 10)
    per_layer, shared = build(UMT5), nnx.clone(build(T5))
    assert per_layer.blocks.position_bias.table.get_value().shape == (2, 8, 3)
    assert shared.position_bias.table.get_value().shape == (8, 3)
    features_before = encode(shared, tokens)
    shared.position_bias.table.set_value(shared.position_bias.table.get_value() * 40.0)
    assert not np.allclose(features_before, encode(shared, tokens), atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_weights_work_with_either_compute_dtype(dtype):
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build(UMT5, dtype=dtype, param_dtype=jnp.bfloat16)))
    weights = jax.tree.map(lambda x, y: np.asarray(x).astype(y.dtype), nnx.state(build(UMT5)), abstract)
    assert any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(weights))
    features = jax.jit(lambda weights, *random_prompt: nnx.merge(graphdef, weights)(*random_prompt))(
        weights, *random_prompt(2, 8)
    )
    assert features.dtype == dtype
    assert np.isfinite(np.asarray(features, np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_weights_are_cast_one_block_at_a_time(dtype):
    config = dataclasses.replace(UMT5, width=256, mlp_dim=1024, layers=16)
    graphdef, weights = nnx.split(nnx.eval_shape(lambda: build(config, dtype=dtype, param_dtype=jnp.bfloat16)))
    encode = jax.jit(
        lambda weights, tokens: nnx.merge(graphdef, weights)(tokens), compiler_options=compiler_options.scan_options()
    )
    memory = encode.lower(weights, jax.ShapeDtypeStruct((1, 8), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * memory.argument_size_in_bytes


def test_initial_weights_give_logits_and_features_of_unit_size():
    config = dataclasses.replace(UMT5, width=256, heads=8, head_dim=32, mlp_dim=512)
    model = build(config)
    x = np.random.default_rng(1).normal(size=(1, 32, 256))
    attn = nnx.state(model.blocks.attn)
    q, k = (x @ np.asarray(attn[name]["kernel"].get_value())[0] for name in "qk")
    logits = np.einsum("blnd,bsnd->bnls", *(y.reshape(1, 32, 8, 32) for y in (q, k)))
    assert 0.8 < np.std(logits) < 1.25
    assert 0.8 < np.std(encode(model, random_prompt(1, 32)[0])) < 1.25


@pytest.mark.parametrize("config", [UMT5, T5])
def test_every_weight_has_a_gradient(config):
    graphdef, weights = nnx.split(build(config))
    output_weights = np.random.default_rng(2).normal(size=(2, 12, config.width)).astype(np.float32)

    def loss(weights, tokens, mask):
        return jnp.sum(nnx.merge(graphdef, weights)(tokens, mask) * output_weights)

    for path, gradient in nnx.to_flat_state(jax.jit(jax.grad(loss))(weights, *random_prompt(2, 12))):
        values = np.asarray(gradient.get_value())
        assert np.isfinite(values).all(), path
        assert np.abs(values).max() > 0, path
