# SPDX-License-Identifier: Apache-2.0
"""flash_tpu with int8 logits, in Pallas' interpreter, is compared with its rule and exact attention in float64."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.int8_attention_error import CASES
from benchmarks.int8_attention_error import operands as operands_of_case
from tests.support.attention import count_calls, exact, operands, run
from tests.support.compare import error
from tests.support.plan_programs import attend_int8
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax import registry
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels import admitted
from wanjax.kernels.attention import (
    AttentionConfig,
    attention,
    choose_implementation,
    flash_int8,
    flash_int8_kernel,
    flash_tpu,
)
from wanjax.kernels.attention.flash_tiles import Int8Config, default_config
from wanjax.pipelines.model import with_attention
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import Compiled, compile_programs
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, use_partitioner

INT8 = AttentionConfig.parse("flash_tpu:qk=int8")
TILES = flash_tpu.Config(256, 512, 256, interpret=True)
SMALL = flash_tpu.Config(128, 64, 32, interpret=True)
RULE_BOUND = 1.2e-2  # of the kernel's distance from its rule: exponents of two and weights are bfloat16
EXACT_BOUND = 0.02  # where logits have a standard deviation of 1
flash = partial(run, "flash_tpu")


def rule(q, k, v, scale=None):
    """Return the attention of rounded q and k, and its log-sum-exps, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q *= q.shape[3] ** -0.5 if scale is None else scale
    mean = k.mean(axis=1, keepdims=True)
    centered = k - mean
    k_scale = np.maximum(np.abs(centered).max(axis=(1, 3), keepdims=True) / 127, 1e-30)
    rounded_k = np.round(centered / k_scale)
    group = q.shape[2] // k.shape[2]
    k_scale, rounded_k, mean = (np.repeat(x, group, axis=2) for x in (k_scale, rounded_k, mean))
    score_scale = np.abs(q).max(axis=3, keepdims=True) * k_scale / 127 * np.log2(np.e)
    score_scale = upper_bfloat16(score_scale) / np.log2(np.e)
    rounded_q = np.round(q * k_scale / score_scale)
    logits = np.einsum("BLND,BSND->BNLS", rounded_q, rounded_k) * np.moveaxis(score_scale, 2, 1)
    top = logits.max(axis=3, keepdims=True)
    weights = np.exp(logits - top)
    out = np.einsum("BNLS,BSND->BLND", weights / weights.sum(axis=3, keepdims=True), np.repeat(v, group, axis=2))
    lse = np.moveaxis((top + np.log(weights.sum(axis=3, keepdims=True)))[..., 0], 1, 2)
    return out, lse + np.einsum("BLND,BSND->BLN", q, mean)


def upper_bfloat16(x):
    """Return the smallest bfloat16 numbers that are not below positive numbers."""
    bits = np.maximum(np.float32(x), np.float32(1e-30)).view(np.int32)
    return np.float64(((bits + 0xFFFF) & -0x10000).view(np.float32))


@pytest.fixture
def offset_raises() -> Iterator[list[int]]:
    """How often the running kernel raises an offset, which only its running-max path does."""
    with count_calls("_raise_offset_to", flash_int8_kernel) as calls:
        yield calls


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "tiles"),
    [
        (200, 150, 2, 2, SMALL),  # ragged in both
        (128, 64, 2, 2, flash_tpu.Config(128, 64, 64, interpret=True)),  # one whole block
        (1, 1, 1, 1, SMALL),
        (600, 70, 4, 2, flash_tpu.Config(512, 64, 64, interpret=True)),  # a last block of few queries, shared keys
        (300, 700, 2, 1, TILES),
    ],
)
def test_the_kernel_follows_its_rule(queries, keys, heads, kv_heads, tiles):
    q, k, v = operands(2, queries, keys, heads, kv_heads, 128, "bfloat16")
    out, lse = jax.jit(partial(flash_int8.attention, scale=0.1, tiles=tiles, kv_length=keys))(q, k, v)
    expected_out, expected_lse = rule(q, k, v, scale=0.1)
    assert out.dtype == jnp.bfloat16
    assert error(out, expected_out) <= RULE_BOUND
    np.testing.assert_allclose(lse, expected_lse, atol=RULE_BOUND)


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_as_documented(name):
    """Most of the error that docs/attention.md states comes from rounding, and little from the kernel."""
    q, k, v = operands_of_case(256, 1024, **CASES[name])
    out = flash(q, k, v, config=Int8Config(TILES))
    bound = {"logits of std 1": EXACT_BOUND, "logits of std 6": 0.05}.get(name, 0.04)
    assert error(out, exact(q, k, v)) <= bound
    assert error(out, rule(q, k, v)[0]) <= 2 * RULE_BOUND


def test_a_mean_shared_by_all_keys_changes_nothing():
    """A mean in all keys changes nothing but the rounding of the keys to bfloat16."""
    q, k, v = operands(1, 100, 200, 1, 1, 128, "bfloat16")
    shifted = (k.astype(jnp.float32) + 16 * jnp.sign(k[:, :1]).astype(jnp.float32)).astype(jnp.bfloat16)
    assert error(flash(q, shifted, v, config=Int8Config(TILES)), exact(q, shifted, v)) <= EXACT_BOUND


@pytest.mark.parametrize(("loud", "is_safe"), [(0.0, False), (40.0, False), (4000.0, True)])
@pytest.mark.parametrize("tiles", [SMALL, TILES], ids=["blocks", "one block"])
def test_a_later_large_logit_is_exact(offset_raises, loud, is_safe, tiles):
    """If weights of a block exceed the range of the first offset, the running-max path recomputes the block."""
    q, k, v = operands(1, 300, 400, 2, 2, 128, "bfloat16")
    direction = jnp.sign(q[:, :1, :1])
    q = jnp.abs(q) * direction  # every query has large logits with the loud keys
    if loud:
        k = k.at[:, 300:306].set(jnp.bfloat16(loud / 128) * direction)
    out = flash(q, k, v, scale=1.0 if is_safe else 0.1, config=Int8Config(tiles))
    jax.effects_barrier()
    assert bool(offset_raises) == is_safe
    assert error(out, rule(q, k, v, scale=1.0 if is_safe else 0.1)[0]) <= 2 * RULE_BOUND


@pytest.mark.parametrize(("scale", "is_safe"), [(0.1, False), (0.3, True)])
def test_first_logits_far_below_the_others_are_exact(offset_raises, scale, is_safe):
    """The offset is negative. Beyond 32 powers of two, the running-max path keeps the error of the exponents small."""
    q, k, v = operands(1, 130, 600, 1, 1, 128, "bfloat16")
    q = jnp.abs(q)
    k = k.at[:, :300].set(-jnp.abs(k[:, :300]))
    out, lse = jax.jit(partial(flash_int8.attention, scale=scale, tiles=TILES, kv_length=600))(q, k, v)
    jax.effects_barrier()
    expected_out, expected_lse = rule(q, k, v, scale=scale)
    assert bool(offset_raises) == is_safe
    assert error(out, expected_out) <= (1 if is_safe else 3) * RULE_BOUND
    np.testing.assert_allclose(lse, expected_lse, atol=0.1)


def test_zero_queries_average_the_values():
    q, k, v = operands(1, 40, 50, 1, 1, 128, "bfloat16")
    out = flash(jnp.zeros_like(q), jnp.ones_like(k), v, config=Int8Config(SMALL))
    assert error(out, np.broadcast_to(np.float64(v).mean(axis=1, keepdims=True), q.shape)) <= 3e-3


def test_padding_keys_change_nothing():
    """Padding keys do not change the mean or the scale of the keys."""
    q, k, v = operands(1, 100, 200, 2, 2, 128, "bfloat16")
    k = k.at[:, 150:].set(100)
    out = attention(q, k, v, kv_length=150, implementation="flash_tpu", config=Int8Config(SMALL))
    without_padding = attention(q, k[:, :150], v[:, :150], implementation="flash_tpu", config=Int8Config(SMALL))
    np.testing.assert_array_equal(out, without_padding)


# A ring is quick; heads are split as in tests/kernels/test_sharded_attention.py.
@pytest.mark.parametrize(
    "mesh", [(1, 4, 1), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 1, 4), (2, 2, 1)))]
)
def test_int8_attention_runs_on_several_devices(mesh):
    """The results of a ring's steps are merged by their log-sum-exps, because their keys have different means."""
    q, k, v = operands(2, 256, 256, 4, 4, 128, "bfloat16")
    devices = jax.devices()[: int(np.prod(mesh))]
    with use_partitioner(Partitioner(make_mesh(*mesh, devices=devices), SHARDING_RULES["fsdp"])):
        out = flash(q, k, v, config=Int8Config(SMALL))
    assert error(out, exact(q, k, v)) <= EXACT_BOUND


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("flash_tpu:qk=int8", Int8Config()),
        ("flash_tpu:block_q=1024,qk=int8", Int8Config(flash_tpu.Config(1024, 2048, 2048))),
    ],
)
def test_int8_attention_is_named_by_text(text, config):
    attn = AttentionConfig.parse(text)
    assert (attn.config, attn.qk, str(attn)) == (config, "int8", text)
    assert AttentionConfig.parse(str(attn)) == attn
    assert not attn.supports_ring
    assert attn.is_dense
    assert attn.dense_only() == AttentionConfig("flash_tpu")  # cross-attention is exact


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flash_tpu:qk=int4", "qk=int4 qk=int8"),
        ("flash_tpu:qk=", "qk= qk=int8"),
        ("chunked:qk=int8", "chunked no qk flash_tpu"),
        ("auto:qk=int8", "auto no qk flash_tpu"),
        ("flash_tpu:qk=int8,window=9", "qk=int8 window=9"),
        ("flash_tpu:qk=int8,block_kv=48", "block_kv_compute=48 32 qk=int8"),
    ],
)
def test_unsupported_int8_texts_are_refused(text, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        AttentionConfig.parse(text)


@pytest.mark.parametrize(
    ("size", "dtype", "options", "words"),
    [
        (64, "bfloat16", {}, "qk=int8 128 64 flash_tpu"),
        (128, "float32", {}, "qk=int8 bfloat16 float32 flash_tpu"),
        (128, "bfloat16", {"key_mask": jnp.ones((1, 8), bool)}, "qk=int8 mask flash_tpu"),
        (128, "bfloat16", {"window": 3}, "qk=int8 window flash_tpu"),
        (128, "bfloat16", {"bias": jnp.ones((1, 1, 8, 8))}, "takes no bias"),
    ],
)
def test_inputs_outside_the_error_bound_are_refused(size, dtype, options, words):
    q, k, v = operands(1, 8, 8, 2, 2, size, dtype)
    with pytest.raises(UnsupportedError, match=line_with_words(words)):
        attention(q, k, v, implementation="flash_tpu", config=Int8Config(SMALL), **options)


def test_a_gradient_of_int8_attention_is_refused():
    q, k, v = operands(1, 8, 8, 1, 1, 128, "bfloat16")
    loss = lambda q: attention(q, k, v, implementation="flash_tpu", config=Int8Config(SMALL)).sum()  # noqa: E731
    with pytest.raises(UnsupportedError, match=line_with_words("qk=int8 no gradient")):
        jax.grad(loss)(q)


def test_different_numbers_of_keys_in_a_batch_are_refused():
    q, k, v = operands(2, 8, 8, 1, 1, 128, "bfloat16")
    options = {"key_mask": None, "window": None, "scale": 0.3, "bias": None, "config": Int8Config(SMALL)}
    with pytest.raises(UnsupportedError, match=line_with_words("qk=int8 number each example")):
        flash_tpu.attention(q, k, v, **options, kv_length=jnp.asarray([5, 8], jnp.int32))


@pytest.mark.parametrize("name", ["hunyuanvideo1.5-480p-t2v", "cogvideox-2b"])
def test_models_that_do_not_support_int8_attention_refuse_it(name):
    model = registry.presets()[name].model
    assert model is not None
    with pytest.raises(UnsupportedError, match=line_with_words(f"{name} qk=int8")):
        with_attention(model, INT8, name)


def test_int8_attention_is_refused_on_chips_that_fail_or_gain_nothing(monkeypatch):
    shapes = [jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)] * 3
    for module in (flash_tpu, flash_int8):
        monkeypatch.setattr(module, "vmem_bytes", lambda: 128 << 20)
    for is_fast, words in ((False, "no faster"), (True, "flash_tpu_int8 failed")):
        monkeypatch.setattr(flash_int8, "has_fast_int8", lambda is_fast=is_fast: is_fast)
        monkeypatch.setattr(admitted, "_rejected", {"flash_tpu_int8": "differs"})
        with pytest.raises(UnsupportedError, match=line_with_words(words)):
            choose_implementation(*shapes, implementation=INT8)
    monkeypatch.setattr(admitted, "_rejected", {})
    assert choose_implementation(*shapes, implementation=INT8).name == "flash_tpu"


@pytest.mark.parametrize("keys", [1, 512, 1056, 32_760, 75_600, 400_000])
def test_default_tiles_suit_int8(keys):
    Int8Config(default_config(128 << 20, 128, keys, keys, "bfloat16", unit_kv=32))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("length", quick([700], [700, 2600]))
def test_int8_attention_compiles_for_a_tpu(length):
    [compiled] = compile_programs([(attend_int8(abstract_mesh(find_slice("v6e-1")), length=length), "v6e-1")])
    assert isinstance(compiled, Compiled), compiled
    assert "flash_attention_int8" in compiled.module
