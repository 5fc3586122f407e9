# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention is compared with the formula in float64."""

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import WORKLOADS
from tests.support.attention import BOUND, SMALL_TILES, exact, exact_gradients, normal, operands, run
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels import target
from wanjax.kernels.attention import IMPLEMENTATIONS, attention, choose_implementation, chunked

LENGTHS = (1, 7, 128, 513, 1000, 4097)
EVERY_LENGTH = [(1, 4097), (7, 1), (128, 7), (513, 128), (1000, 513), (4097, 1000)]  # of queries, and of keys
SMALL_BLOCKS = (chunked.Config(4, 3, batched=False), chunked.Config(5, 8, batched=True))
PORTABLE_VARIANTS = [("reference", None), ("chunked", None), *(("chunked", config) for config in SMALL_BLOCKS)]
VARIANTS = [*PORTABLE_VARIANTS, ("flash_tpu", SMALL_TILES)]

PORTABLE = ("reference", "chunked")  # the implementations that run on any platform
each_implementation = pytest.mark.parametrize("name", PORTABLE)
each_variant = pytest.mark.parametrize(("name", "config"), VARIANTS)
each_portable_variant = pytest.mark.parametrize(("name", "config"), PORTABLE_VARIANTS)


def head_size(name):
    """Return a head size that an implementation supports."""
    return 64 if name == "flash_tpu" else 8


@cache
def lengths_case(queries, keys, dtype):
    q, k, v = operands(1, queries, keys, 1, 1, 16, dtype)
    return q, k, v, exact(q, k, v)


@each_implementation
@pytest.mark.parametrize(("queries", "keys"), quick([*EVERY_LENGTH, (4097, 7), (128, 128)], product(LENGTHS, LENGTHS)))
def test_attention_is_exact_for_every_length(name, queries, keys):
    q, k, v, expected = lengths_case(queries, keys, "float32")
    assert error(run(name, q, k, v), expected) <= BOUND["float32"]


@each_implementation
@pytest.mark.parametrize(("queries", "keys"), [(7, 4097), (513, 1000), (1000, 1), (1000, 1000)])
def test_attention_in_bfloat16_is_near_for_every_length(name, queries, keys):
    q, k, v, expected = lengths_case(queries, keys, "bfloat16")
    out = run(name, q, k, v)
    assert out.dtype == jnp.bfloat16
    assert error(out, expected) <= BOUND["bfloat16"]


GROUPS = [(*variant, *group) for variant in VARIANTS for group in ((1, 1), (3, 2), (1, 6))]


@pytest.mark.parametrize(
    ("name", "config", "batch", "kv_heads"),
    quick([case for case in GROUPS if case[1] in SMALL_BLOCKS or case[2] == 3], GROUPS),
)
def test_query_heads_share_key_heads(name, config, batch, kv_heads):
    q, k, v = operands(batch, 19, 23, 6, kv_heads, head_size(name))
    assert error(run(name, q, k, v, config=config), exact(q, k, v)) <= BOUND["float32"]


@each_variant
def test_masked_rows_are_zero(name, config):
    q, k, v = operands(3, 21, 97, 2, 2, head_size(name))
    mask = np.random.default_rng(5).random((3, 97)) < 0.6
    mask[0] = False
    mask[1, :12] = False  # whole blocks of keys
    out = np.asarray(run(name, q, k, v, key_mask=mask, config=config))
    assert not out[0].any()
    assert error(out, exact(q, k, v, key_mask=mask)) <= BOUND["float32"]


@each_variant
def test_masked_keys_do_not_set_the_maximum_of_very_negative_logits(name, config):
    """The running maximum ignores a block whose keys are all masked."""
    size = head_size(name)
    q = np.full((1, 2, 1, size), 50, np.float32)
    k = np.full((1, 16, 1, size), -50, np.float32)
    v = normal(0, 1, 16, 1, size)
    mask = np.arange(16)[None] < 5
    out = run(name, q, k, v, key_mask=mask, scale=1.0, config=config)
    assert error(out, exact(q, k, v, key_mask=mask, scale=1.0)) <= BOUND["float32"]


WINDOWS = [(3, 40, 17), ((0, 5), 17, 40), ((None, 2), 40, 17), ((4, None), 40, 17)]


@each_portable_variant
@pytest.mark.parametrize(
    ("window", "queries", "keys"), quick(WINDOWS, [*WINDOWS, (0, 29, 29), ((2, 0), 29, 29), (9, 9, 9)])
)
def test_a_window_limits_the_keys_of_each_query(name, config, window, queries, keys):
    q, k, v = operands(1, queries, keys, 2, 1, 8)
    out = run(name, q, k, v, window=window, config=config)
    assert error(out, exact(q, k, v, window=window)) <= BOUND["float32"]


@each_portable_variant
@pytest.mark.parametrize("shape", [(1, 4, 13, 11), (2, 1, 13, 1), (2, 4, 1, 11)])
def test_a_bias_is_added_to_the_logits(name, config, shape):
    q, k, v = operands(2, 13, 11, 4, 2, 8)
    bias = 3 * normal(9, *shape)
    out = run(name, q, k, v, bias=bias, scale=0.5, config=config)
    assert error(out, exact(q, k, v, bias=bias, scale=0.5)) <= BOUND["float32"]


@each_variant
def test_logits_of_ten_thousand_do_not_overflow(name, config):
    """Multiples of a half make the logits exact: ±1e4 where q and k are equal or opposite."""
    signs = np.random.default_rng(1).choice([-12.5, 12.5], size=(1, 40, 2, 64))
    q, k, v = signs.astype(np.float32), signs.astype(np.float32), normal(2, 1, 40, 2, 64)
    k[:, ::3] *= -1
    logits = np.einsum("BLND,BSND->BNLS", q, k)
    assert (logits.min(), logits.max()) == (-1e4, 1e4)
    assert error(run(name, q, k, v, scale=1.0, config=config), exact(q, k, v, scale=1.0)) <= BOUND["float32"]


@each_portable_variant
def test_gradients_are_exact(name, config):
    q, k, v = operands(2, 14, 12, 2, 2, 8)
    bias, g = normal(4, 1, 2, 14, 12), normal(5, *q.shape)
    mask = np.random.default_rng(6).random((2, 12)) < 0.7
    mask[1] = False
    options = {"key_mask": jnp.asarray(mask, bool), "window": (4, 2), "scale": 0.4}

    @jax.jit
    def gradients(q, k, v, bias):
        def loss(q, k, v, bias):
            return (g * attention(q, k, v, bias=bias, implementation=name, config=config, **options)).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)

    *expected, d_logits = exact_gradients(q, k, v, g, bias=bias, **options)
    for gradient, expected_gradient in zip(
        gradients(q, k, v, bias), [*expected, d_logits.sum(axis=0, keepdims=True)], strict=True
    ):
        assert error(gradient, expected_gradient) <= BOUND["float32"]


@each_portable_variant
def test_gradients_through_the_log_sum_exp_are_exact(name, config):
    """Softmaxes over parts of the keys are merged by their log-sum-exps, so these need gradients too."""
    q, k, v = operands(2, 14, 12, 2, 2, 8)
    g, h = normal(4, *q.shape), normal(5, *q.shape[:3])
    lse_cotangent: Any = h
    options = {"key_mask": None, "window": (4, 5), "scale": 0.4}

    def loss(q, k, v):
        out, lse = IMPLEMENTATIONS[name].attention(q, k, v, **options, bias=None, config=config, return_lse=True)
        return (g * out).sum() + (h * lse).sum()

    expected = exact_gradients(q, k, v, g, of_lse=lse_cotangent, **options)[:3]
    for gradient, expected_gradient in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v), expected, strict=True):
        assert error(gradient, expected_gradient) <= BOUND["float32"]


@each_variant
def test_the_log_sum_exp_is_returned(name, config):
    """The log-sum-exp merges softmaxes over parts of the keys; it is -inf for a row without keys."""
    q, k, v = operands(2, 13, 11, 4, 2, head_size(name))
    mask = np.ones((2, 11), bool)
    mask[1] = False
    options = {"window": None, "scale": 0.5, "bias": None, "config": config, "return_lse": True}
    out, lse = map(np.asarray, jax.jit(partial(IMPLEMENTATIONS[name].attention, **options))(q, k, v, key_mask=mask))
    logits = 0.5 * np.einsum("BLND,BSND->BLNS", q, np.repeat(k, 2, axis=2))
    np.testing.assert_allclose(lse[0], np.log(np.exp(logits[0]).sum(axis=-1)), rtol=1e-6)
    assert (lse[1] == -np.inf).all()
    assert error(out, exact(q, k, v, key_mask=mask, scale=0.5)) <= BOUND["float32"]


@each_portable_variant
@pytest.mark.parametrize("size", quick([64], [64, 128]))
def test_a_bfloat16_result_is_rounded_once(name, config, size):
    """Batches of grouped heads, a mask and a window: the output is rounded once, from float32."""
    q, k, v = operands(3, 33, 29, 4, 2, size, "bfloat16")
    mask = np.random.default_rng(7).random((3, 29)) < 0.7
    mask[2] = False
    out = run(name, q, k, v, key_mask=mask, window=(9, 12), config=config)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out, np.float32)[2].any()
    assert error(out, exact(q, k, v, key_mask=mask, window=(9, 12))) <= BOUND["bfloat16"]


@each_portable_variant
def test_bfloat16_gradients_are_near(name, config):
    q, k, v = operands(2, 14, 12, 2, 2, 8, "bfloat16")
    g = normal(5, *q.shape)
    loss = lambda q, k, v: (  # noqa: E731
        g * attention(q, k, v, scale=0.4, implementation=name, config=config).astype(jnp.float32)
    ).sum()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for gradient, expected in zip(gradients, exact_gradients(q, k, v, g, scale=0.4)[:3], strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert error(gradient, expected) <= BOUND["bfloat16"]


@each_implementation
def test_bfloat16_logits_of_ten_thousand_do_not_overflow(name):
    """The output of a row with a single largest logit is exactly that key's value."""
    signs = np.random.default_rng(1).choice([-25.0, 25.0], size=(1, 40, 2, 16))
    q, v = signs.astype(jnp.bfloat16), normal(2, 1, 40, 2, 16, dtype="bfloat16")
    assert error(run(name, q, q, v, scale=1.0), exact(q, q, v, scale=1.0)) <= BOUND["bfloat16"]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_chunked_attention_is_exact_at_any_shape(data):
    """Blocks of any size over sequences of any length agree with the formula."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    batch, queries, keys, group, kv_heads = draw(1, 2), draw(1, 40), draw(1, 40), draw(1, 2), draw(1, 2)
    config = chunked.Config(draw(1, 45), draw(1, 45), batched=data.draw(st.booleans()))
    window = data.draw(st.none() | st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)))
    q, k, v = operands(batch, queries, keys, group * kv_heads, kv_heads, 4, seed=draw(0, 9))
    mask = np.random.default_rng(draw(0, 9)).random((batch, keys)) < 0.8
    out = np.asarray(run("chunked", q, k, v, window=window, key_mask=mask, config=config))
    expected = exact(q, k, v, window=window, key_mask=mask)
    np.testing.assert_allclose(out, expected, atol=3e-6)  # an absolute bound, because some outputs are all zero
    assert not out[~expected.any(axis=-1)].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", ["wan_1_3b_256x256x17_self", "wan_1_3b_480x832x17_self"])
def test_chunked_attention_never_holds_all_scores(workload, dtype):
    workload = WORKLOADS[workload]
    operands = workload.operands(jnp.dtype(dtype))
    compiled: Any = jax.jit(partial(attention, implementation="chunked")).lower(*operands).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < workload.scores  # a quarter of the scores in float32


def test_chunked_gradients_never_hold_all_scores():
    workload = WORKLOADS["wan_1_3b_480x832x17_self"]
    loss = jax.grad(lambda *qkv: attention(*qkv, implementation="chunked").sum(), argnums=(0, 1, 2))
    compiled: Any = jax.jit(loss).lower(*workload.operands()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < workload.scores


def test_chunked_attention_is_the_default_on_a_cpu():
    q, k, v = operands(1, 8, 8, 2, 2, 4)
    picked = choose_implementation(q, k, v)
    assert picked.name == "chunked"
    assert "memory" in picked.reason
    assert choose_implementation(q, k, v, implementation="reference") == ("reference", "it was named")
    np.testing.assert_array_equal(run(None, q, k, v), run("chunked", q, k, v))


def invalid_call(**changes):
    q, k, v = operands(2, 5, 7, 4, 2, 8)
    return {"q": q, "k": k, "v": v} | changes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (invalid_call(q=jnp.ones((2, 5, 8))), "[B L N D]"),
        (invalid_call(v=jnp.ones((2, 6, 2, 8))), "[2, 6, 2, 8] [B L N D]"),
        (invalid_call(q=jnp.ones((1, 5, 4, 8))), "[B L N D]"),
        (invalid_call(k=jnp.ones((2, 0, 2, 8)), v=jnp.ones((2, 0, 2, 8))), "at least 1"),
        (invalid_call(q=jnp.ones((2, 5, 3, 8))), "3 heads 2"),
        (invalid_call(q=jnp.ones((2, 5, 4, 8), jnp.bfloat16)), "bfloat16 float32 float32"),
        (invalid_call(**dict.fromkeys("qkv", jnp.ones((1, 2, 1, 4), jnp.int32))), "float32 bfloat16 float16 for all"),
        (invalid_call(key_mask=jnp.ones((2, 7))), "bool[2, 7]"),
        (invalid_call(key_mask=jnp.ones((1, 7), bool)), "bool[2, 7]"),
        (invalid_call(bias=jnp.ones((1, 4, 5, 6))), "broadcasts to [2, 4, 5, 7]"),
        (invalid_call(bias=jnp.ones((1, 4, 5, 7), jnp.bfloat16)), "float32"),
        (invalid_call(window=(1, -1)), "window (1, -1)"),
        # an implementation that is named never falls back to another
        (invalid_call(implementation="reference", config=SMALL_BLOCKS[0]), "reference no configuration belongs"),
        (invalid_call(implementation="chunked", config=object()), "chunked configured"),
        (invalid_call(config=object()), "chunked configured"),
        (invalid_call(implementation="fastest"), "attention 'fastest' auto reference chunked"),
        (lambda: chunked.Config(0, 4, batched=False), "0 queries"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_mismatch_of_operands_is_refused(call, message):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(message)):
        call() if callable(call) else attention(**call)


def test_named_workloads_have_the_shapes_of_their_models():
    assert WORKLOADS["wan_14b_720p_self"][1:] == (75_600, 75_600, 40, 128)
    assert WORKLOADS["wan_1_3b_256x256x17_self"].num_queries == 1280
    assert WORKLOADS["wan_1_3b_480x832x17_cross"][1:] == (7800, 512, 12, 128)
    assert WORKLOADS["wan_14b_720p_self_on_4"][1:] == (75_600, 75_600, 10, 128)
    assert WORKLOADS["wan_14b_720p_cross_on_4"][1:] == (18_900, 512, 40, 128)
    assert WORKLOADS["wan_1_3b_480p_self_on_8"][1:] == (32_760, 32_760, 2, 128)
    assert WORKLOADS["cogvideox_768x1360_self_on_8"][1:] == (11 * 48 * 85 + 226, 11 * 48 * 85 + 226, 6, 64)
    assert WORKLOADS["hunyuanvideo_720p_self"][1:] == (31 * 45 * 80 + 1985, 31 * 45 * 80 + 1985, 16, 128)


def test_a_cpu_with_bfloat16_products_rounds_only_bfloat16_inputs(monkeypatch):
    """For bfloat16 inputs, the softmax weights are rounded to bfloat16 too. Float32 results do not change."""
    configs = [None, chunked.Config(8, 8, batched=False)]
    small_operands = operands(2, 14, 12, 2, 2, 8, "bfloat16")
    g = normal(5, *small_operands[0].shape)

    def loss(config, q, k, v):
        return (g * attention(q, k, v, scale=0.4, implementation="chunked", config=config).astype(jnp.float32)).sum()

    float32_operands, bfloat16_operands = (operands(3, 33, 29, 4, 2, 64, dtype) for dtype in ("float32", "bfloat16"))
    options = {"key_mask": np.random.default_rng(7).random((3, 29)) < 0.7, "window": (9, 12)}
    results_before = [np.asarray(run("chunked", *float32_operands, config=config, **options)) for config in configs]
    monkeypatch.setattr(target, "instructions", lambda: frozenset({"amx_bf16"}))
    for config, reference in zip(configs, results_before, strict=True):
        np.testing.assert_array_equal(run("chunked", *float32_operands, config=config, **options), reference)
        out = run("chunked", *bfloat16_operands, config=config, **options)
        assert out.dtype == jnp.bfloat16
        assert error(out, exact(*bfloat16_operands, **options)) <= BOUND["bfloat16"]
        gradients = jax.jit(jax.grad(partial(loss, config), argnums=(0, 1, 2)))(*small_operands)
        for gradient, expected in zip(gradients, exact_gradients(*small_operands, g, scale=0.4)[:3], strict=True):
            assert error(gradient, expected) <= BOUND["bfloat16"]
