# SPDX-License-Identifier: Apache-2.0
"""The attention kernel for TPUs: Pallas' interpreter runs it on the CPU, and the compilers of four TPUs accept it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import WORKLOADS
from tests.support.attention import BOUND, SMALL_TILES, count_calls, exact, operands, run
from tests.support.compare import error
from tests.support.configs import TRANSFORMER
from tests.support.plan_programs import attend, attend_ring, attend_small
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, attention, choose_implementation, flash_tiles, flash_tpu
from wanjax.models.wan.transformer import Block
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import Compiled, compile_programs
from wanjax.pricing.exporting import CompilerError

FULL_TILES = flash_tpu.Config(512, 1024, 512, interpret=True)
flash = partial(run, "flash_tpu")


@pytest.mark.parametrize(
    ("queries", "keys", "dtype"),
    [
        (1, 4097, "float32"),
        (7, 1, "float32"),
        (513, 7, "float32"),
        (4097, 128, "float32"),
        (1000, 1000, "float32"),
        (128, 513, "bfloat16"),
        (1000, 4097, "bfloat16"),
    ],
)
def test_attention_is_exact_for_every_length(queries, keys, dtype):
    q, k, v = operands(1, queries, keys, 1, 1, 64, dtype)
    assert error(flash(q, k, v, config=FULL_TILES), exact(q, k, v)) <= BOUND[dtype]


@pytest.mark.parametrize(
    ("tiles", "config"),
    [
        ("block_q=1024,block_kv=4096,block_kv_compute=2048", flash_tpu.Config(1024, 4096, 2048)),
        ("block_kv=4096", flash_tpu.Config(2048, 4096, 4096)),
        ("block_kv_compute=512,block_q=128", flash_tpu.Config(128, 512, 512)),
        ("block_q=3328,block_kv=2816,block_kv_compute=256", flash_tpu.Config(3328, 2816, 256)),
        ("center_keys", flash_tpu.Config(2048, 2048, 2048, center_keys=True)),
        ("center_keys,block_q=1024", flash_tpu.Config(1024, 2048, 2048, center_keys=True)),
    ],
)
def test_a_text_names_tiles(tiles, config):
    requested = AttentionConfig.parse(f"flash_tpu:{tiles}")
    assert (requested.implementation, requested.config, requested.window) == ("flash_tpu", config, None)
    confined = AttentionConfig.parse(f"flash_tpu:window=9,{tiles}")
    assert confined == AttentionConfig("flash_tpu", requested.tiles, 9)
    assert (confined.config, confined.dense_only()) == (config, AttentionConfig("flash_tpu"))


@pytest.mark.parametrize(("queries", "block_q"), [(700, 640), (3400, 3328)])
def test_queries_need_not_fill_a_block(queries, block_q):
    q, k, v = operands(1, queries, 300, 1, 1, 64)
    config = flash_tpu.Config(block_q, 512, 256, interpret=True)
    assert error(flash(q, k, v, config=config), exact(q, k, v)) <= BOUND["float32"]


@pytest.mark.parametrize("queries", [770, 1100])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_last_block_of_few_queries_is_exact(queries, ragged):
    """The last block has fewer tiles of the matrix unit than the others."""
    q, k, v = operands(1, queries, 150, 1, 1, 64)
    config = flash_tpu.Config(768, 64, 32, interpret=True)
    options = {"window": (700, 20)} if ragged else {}
    assert error(flash(q, k, v, config=config, **options), exact(q, k, v, **options)) <= BOUND["float32"]


def in_parts(q, k, v, ends, config, *, scale, live=None):
    """Attend to parts of the keys one after another; each example attends to its first `live` keys."""
    carry: Any = None
    begin = 0
    for end in ends:
        keys = None if live is None else jnp.clip(live - begin, 0, end - begin)
        part = partial(
            flash_tpu.attention_with_carry, key_mask=None, scale=scale, config=config, is_last=end == ends[-1]
        )
        carry = part(q, k[:, begin:end], v[:, begin:end], carry, kv_length=keys)
        begin = end
    return carry


LOUD = list(product([0.0, 4000.0], [False, True]))
PARTS = [("float32", 64, SMALL_TILES), ("bfloat16", 128, FULL_TILES), ("bfloat16", 64, SMALL_TILES)]


@pytest.fixture
def offset_raises() -> Iterator[list[int]]:
    """How often the running kernel raises an offset, which only its running-max path does."""
    with count_calls("_raise_offset_to") as calls:
        yield calls


@pytest.mark.parametrize(("dtype", "size", "config"), quick(PARTS[2:], PARTS))
@pytest.mark.parametrize(
    ("loud", "counted"), quick([(4000.0, True), (0.0, False)], product([0.0, 4000.0], [False, True]))
)
def test_attention_to_keys_in_parts_is_exact(offset_raises, dtype, size, config, counted, loud):
    """Continued sums equal attention to all keys at once, also if a later part has logits out of range, or no key."""
    q, k, v = map(np.array, operands(2, 600, 200, 2, 2, size, dtype))
    if loud:
        direction = np.sign(q[:, :1, :1])
        k[:, 90:96] = loud / size * direction
        q = np.abs(q) * direction
    live = jnp.asarray([150, 70]) if counted else None
    mask = None if live is None else np.arange(200) < np.asarray(live)[:, None]
    out, lse = jax.jit(partial(in_parts, ends=(64, 128, 200), config=config, scale=0.3))(q, k, v, live=live)
    jax.effects_barrier()
    assert error(out, exact(q, k, v, key_mask=mask, scale=0.3)) <= BOUND[dtype]
    logits = 0.3 * np.einsum("BLND,BSND->BLNS", np.float64(q), np.float64(k))
    logits = logits if mask is None else np.where(mask[:, None, None], logits, -np.inf)
    top = logits.max(axis=3)
    assert error(lse, top + np.log(np.exp(logits - top[..., None]).sum(axis=3))) <= 1e-6
    assert counted or bool(offset_raises) == bool(loud)


def test_tiles_in_the_text_apply_to_self_attention_only():
    sizes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    requested = AttentionConfig.parse("flash_tpu:block_q=512")
    block = nnx.eval_shape(lambda: Block(TRANSFORMER, requested, **sizes, rngs=nnx.Rngs(0)))
    assert str(block.self_attn.attention) == "flash_tpu:block_q=512"
    assert str(block.cross_attn.attention) == "flash_tpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_128_are_exact(dtype):
    q, k, v = operands(3, 30, 150, 4, 2, 128, dtype)
    out = flash(q, k, v, config=SMALL_TILES)
    assert out.dtype == dtype
    assert error(out, exact(q, k, v)) <= BOUND[dtype]


@pytest.mark.parametrize("gain", [3, 6])
def test_the_scale_is_not_rounded(gain):
    """Folding the conversion to base 2 into a rounded q would exceed the bound."""
    q, k, v = operands(1, 64, 300, 1, 1, 128, "bfloat16")
    assert error(flash(gain * q, k, v, config=SMALL_TILES), exact(gain * q, k, v)) <= BOUND["bfloat16"]


@pytest.mark.parametrize("window", [(0, 0), (None, 40), (130, 5), (200, None)])
def test_a_window_limits_the_keys_of_each_query(window):
    """Some windows skip whole bodies of keys, and some leave rows without a key."""
    q, k, v = operands(1, 300, 200, 2, 1, 64)
    assert error(flash(q, k, v, window=window, config=SMALL_TILES), exact(q, k, v, window=window)) <= BOUND["float32"]


@pytest.mark.parametrize(("loud", "is_safe"), [(40.0, False), (4000.0, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_later_large_logit_is_exact(offset_raises, monkeypatch, loud, is_safe, dtype):
    """Logits of later keys that exceed the range of the first offset are recomputed, and are as exact."""
    monkeypatch.setattr(flash_tiles, "RUNNING_MAX_STEP_KV", 16)  # two running-max steps in a compute block
    q, k, v = map(np.array, operands(1, 40, 200, 2, 1, 64, dtype))
    direction = np.sign(q[:, :1, :1])
    k[:, 90:96] = loud / 64 * direction
    q = np.abs(q) * direction  # every query has large logits with the loud keys
    out = flash(q, k, v, scale=1.0, config=SMALL_TILES)
    jax.effects_barrier()
    assert bool(offset_raises) == is_safe  # only the running-max path raises an offset
    assert error(out, exact(q, k, v, scale=1.0)) <= BOUND[dtype]


@pytest.mark.parametrize(("dtype", "loud", "sizes"), [("bfloat16", 108, (1e18, 1e-12)), ("float32", 60, (1e18, 1e-30))])
def test_large_and_small_values_stay_exact(dtype, loud, sizes):
    """Sums of large values stay finite if a later logit is almost out of range, and small values are not lost."""
    q, k, v = map(np.array, operands(1, 40, 200, 1, 1, 64, dtype))
    direction = np.sign(q[:, :1, :1])
    q = np.abs(q) * direction
    rising = k.copy()
    rising[:, 90:96] = loud / 64 * direction
    for size, keys in zip(sizes, (rising, k), strict=True):
        values = (np.float32(v) * np.float32(size)).astype(v.dtype)
        out = flash(q, keys, values, scale=1.0, config=SMALL_TILES)
        assert error(out, exact(q, keys, values, scale=1.0)) <= BOUND[dtype]


def test_centered_keys_change_no_result():
    """Subtracting the mean from all keys changes no weight; the log-sum-exp is that of the original keys."""
    q, k, v = operands(2, 30, 100, 2, 1, 64)
    k = np.asarray(k) + 3
    mask = np.random.default_rng(3).random((2, 100)) < 0.8
    options = {"key_mask": jnp.asarray(mask, bool), "window": None, "scale": 0.3, "bias": None, "return_lse": True}
    options["config"] = replace(SMALL_TILES, center_keys=True)
    out, lse = jax.jit(lambda *qkv: flash_tpu.attention(*qkv, **options))(q, k, v)
    assert error(out, exact(q, k, v, key_mask=mask, scale=0.3)) <= BOUND["float32"]
    logits = 0.3 * np.einsum("BLND,BSD->BLNS", np.float64(q), np.float64(k[:, :, 0]))
    expected = np.log((np.exp(logits) * mask[:, None, None]).sum(axis=3))
    assert error(lse, expected) <= BOUND["float32"]


def test_gradients_are_exact():
    q, k, v = operands(1, 20, 40, 2, 1, 64)
    loss = lambda name, config: lambda *qkv: (attention(*qkv, implementation=name, config=config) ** 2).sum()  # noqa: E731
    gradients = jax.jit(jax.grad(loss("flash_tpu", SMALL_TILES), argnums=(0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss("reference", None), argnums=(0, 1, 2)))(q, k, v)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert error(gradient, np.float64(expected_gradient)) <= 3e-6


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_attention_is_exact_at_any_shape(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    body = 16 * draw(2, 4)
    config = flash_tpu.Config(128, body * draw(1, 3), body, interpret=True)
    queries, keys = draw(1, 300), draw(1, 300)
    ragged = data.draw(st.sampled_from(["window", "mask", "neither"]))
    window = (draw(0, 200), data.draw(st.none() | st.integers(0, 200))) if ragged == "window" else None
    mask = np.random.default_rng(draw(0, 9)).random((1, keys)) < 0.8 if ragged == "mask" else None
    q, k, v = operands(1, queries, keys, 1, 1, 64, seed=draw(0, 9))
    out = np.asarray(flash(q, k, v, window=window, key_mask=mask, config=config))
    expected = exact(q, k, v, window=window, key_mask=mask)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert not out[~expected.any(axis=-1)].any()


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ((96, 64, 32), "block_q=96 128 512"),
        ((700, 64, 32), "block_q=700"),
        ((128, 80, 32), "block_kv=80 block_kv_compute=32"),
        ((128, 40, 40), "block_kv_compute=40 16"),
    ],
)
def test_tiles_that_do_not_divide_are_refused(tiles, message):
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        flash_tpu.Config(*tiles)


@pytest.mark.parametrize(
    ("size", "dtype", "options", "message"),
    [
        (80, "float32", {}, "size 80 64 128"),
        (64, "float16", {}, "float16 float32 bfloat16"),
        (64, "float32", {"bias": jnp.ones((1, 1, 8, 8))}, "takes no bias"),
        (64, "float32", {"window": 3, "key_mask": jnp.ones((1, 8), bool)}, "mask window"),
        (64, "float32", {"config": None}, "runs on TPUs"),
        (64, "float32", {"config": object()}, "configured by a flash_tpu.Config"),
    ],
)
def test_unsupported_options_are_refused(size, dtype, options, message):
    q, k, v = operands(1, 8, 8, 2, 1, size, dtype)
    with pytest.raises(NotImplementedError, match=line_with_words(message)):
        attention(q, k, v, implementation="flash_tpu", **{"config": SMALL_TILES} | options)


LONG = [jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)] * 3
LARGE = flash_tpu.Config(2048, 51200, 5120)


@pytest.mark.parametrize(
    ("vmem", "call"),
    [
        (64, lambda: attention(*operands(1, 8, 8, 2, 1, 64), implementation="flash_tpu", config=LARGE)),
        (
            16,
            lambda: choose_implementation(*LONG, implementation="flash_tpu"),
        ),  # a v4, which takes another implementation
    ],
    ids=["tiles", "chip"],
)
def test_configurations_larger_than_vmem_are_refused(monkeypatch, vmem, call):
    monkeypatch.setattr(flash_tpu, "vmem_bytes", lambda: vmem << 20)
    with pytest.raises(NotImplementedError, match=line_with_words(f"MiB VMEM chip {vmem}")):
        call()


@pytest.mark.parametrize("vmem", [64 << 20, 128 << 20])
@pytest.mark.parametrize("keys", [1, 512, 32_760, 75_600, 400_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_default_tiles_fit_vmem(vmem, keys, dtype):
    config = flash_tiles.default_config(vmem, 128, keys, keys, dtype)
    assert config.vmem_bytes(128, jnp.dtype(dtype).itemsize) + flash_tpu.COMPILER_VMEM_BYTES <= vmem
    blocks = -(-keys // config.block_q)
    assert blocks * config.block_q - keys < 512 * blocks


PLAIN = {"size": 128, "dtype": "bfloat16", "kv_heads": 2, "window": None, "masked": False}
WINDOW = PLAIN | {"size": 64, "kv_heads": 1, "window": (9, 40)}
MASKED = PLAIN | {"size": 64, "dtype": "float32", "masked": True}
ONE_CALL_PER_CHIP = [("v5e-1", PLAIN), ("v5p-8", WINDOW), ("v6e-1", MASKED), ("v7x-8", PLAIN)]
MORE_CALLS = [("v5p-8", PLAIN), ("v6e-1", PLAIN), ("v6e-1", WINDOW)]
RING_CALLS = [("v6e-4", {"size": 128, "dtype": "bfloat16", "length": 2600})]  # 650 a chip: the last block has a tile
MORE_RING_CALLS = [
    ("v5p-8", RING_CALLS[0][1] | {"length": 1201}),
    ("v6e-4", RING_CALLS[0][1] | {"size": 64, "dtype": "float32"}),
]
COMPILED_TOGETHER = [(ONE_CALL_PER_CHIP[:1], RING_CALLS), (ONE_CALL_PER_CHIP[1:], []), (MORE_CALLS, MORE_RING_CALLS)]
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


@needs_libtpu
@pytest.mark.parametrize(
    ("programs", "rings"), quick(COMPILED_TOGETHER[:1], COMPILED_TOGETHER), ids=["one", "each", "others"]
)
def test_the_kernel_compiles_for_each_generation_of_tpu(programs, rings):
    calls = [(attend_small(abstract_mesh(find_slice(chip)), **settings), chip) for chip, settings in programs]
    mesh = {"dp": 1, "sp": 4, "tp": 1}
    calls += [(attend_ring(abstract_mesh(find_slice(chip), mesh), **settings), chip) for chip, settings in rings]
    for program, compiled in zip(calls, compile_programs(calls), strict=True):
        assert isinstance(compiled, Compiled), (program, compiled)
        assert "tpu_custom_call" in compiled.module, program


@pytest.mark.slow
@needs_libtpu
def test_named_workloads_compile():
    """Only workloads with the most heads are compiled: heads are an axis of the grid and do not change the kernel."""
    mesh = abstract_mesh(find_slice("v6e-1"))
    by_heads = sorted(WORKLOADS.values(), key=lambda workload: workload.heads)
    largest = {
        (workload.num_queries, workload.num_keys, workload.head_dim): workload.name for workload in by_heads
    }.values()
    results = zip(largest, compile_programs([(attend(mesh, workload=name), "v6e-1") for name in largest]), strict=True)
    refused = {name: result for name, result in results if isinstance(result, CompilerError)}
    assert not refused
