# SPDX-License-Identifier: Apache-2.0
"""The mask of radial attention follows the published rule, and every implementation applies the mask."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention import BOUND, count_calls, operands
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, attention, chunked, flash_tpu, reference
from wanjax.kernels.attention.radial import MASK_BLOCK, NO_BLOCK, Radial, band_half_width, kernel_lists, published_mask
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, use_partitioner

SMALL, SHORT = (14, 140), (12, 100)  # frames, and tokens of each
BLOCK_SIZES = ((128, 128), (256, 128), (128, 256), (512, 128))


def mask_token_by_token(frames, tokens, decay, sink):
    """Compute the mask of the published rule token by token: mark scores for each pair of frames, then count blocks."""
    total = frames * tokens
    blocks = -(-total // MASK_BLOCK)
    kept_blocks = np.zeros((blocks, blocks), bool)
    for i in range(frames):
        for j in range(frames):
            marks = np.zeros((blocks * MASK_BLOCK, blocks * MASK_BLOCK), bool)
            far = abs(i - j)
            length = 2 ** tokens.bit_length() / 2 ** far.bit_length()
            width = tokens if far <= 1 else max(length * decay, 128)
            in_band = length >= 128 or far % int(128 / length) == 0
            for row in range(tokens):
                near = abs(row - np.arange(tokens)) <= width
                marks[i * tokens + row, j * tokens : (j + 1) * tokens] = (sink and j == 0) | (in_band & near)
            for r in range(i * tokens // MASK_BLOCK, ((i + 1) * tokens - 1) // MASK_BLOCK + 1):
                for c in range(j * tokens // MASK_BLOCK, ((j + 1) * tokens - 1) // MASK_BLOCK + 1):
                    block = marks[r * MASK_BLOCK : (r + 1) * MASK_BLOCK, c * MASK_BLOCK : (c + 1) * MASK_BLOCK]
                    shares = block.sum(axis=0) / min(MASK_BLOCK, total - r * MASK_BLOCK)
                    if (shares > 0).any():
                        kept_blocks[r, c] |= bool((shares > 1 / 3).sum() / (shares > 0).sum() > 0.6)
    return kept_blocks


@given(
    frames=st.integers(1, 6),
    tokens=st.integers(1, 150),
    decay=st.sampled_from([0.05, 0.2, 0.95, 1.0, 3.0]),
    sink=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_mask_follows_the_published_rule(frames, tokens, decay, sink):
    assert (published_mask(frames, tokens, decay, sink) == mask_token_by_token(frames, tokens, decay, sink)).all()


def test_small_frames_attend_to_far_frames_at_some_distances():
    """Bands of 256 tokens, halved with the distance: below 128 tokens only some distances remain."""
    assert [far for far in range(32) if band_half_width(far, 200, 1.0) is not None] == [0, 1, 2, 4, 8, 16]
    assert [band_half_width(far, 3600, 0.2) for far in (0, 1, 2, 3, 4, 20)] == [3600, 3600, 204, 204, 128, 128]


DENSITIES = [(3600, 0.2, 0.26), (3600, 1.0, 0.40), (1560, 0.2, 0.34)]


@pytest.mark.parametrize(("tokens", "decay", "density"), quick(DENSITIES[1:], DENSITIES))
def test_the_mask_of_a_real_video_is_sparse(tokens, decay, density):
    mask = published_mask(21, tokens, decay, True)
    assert abs(mask.mean() - density) <= 0.005
    assert mask.any(axis=1).all()  # no query is without keys
    assert mask[:, : tokens // MASK_BLOCK].all(), "the first frame is seen by all"


@given(
    frames=st.integers(1, 8),
    tokens=st.integers(40, 400),
    text=st.integers(0, 300),
    block_q=st.sampled_from([128, 256, 512]),
    block_kv=st.sampled_from([128, 256]),
)
@settings(max_examples=30, deadline=None)
def test_larger_blocks_keep_every_token_pair_of_smaller_blocks(frames, tokens, text, block_q, block_kv):
    fine, coarse = (Radial(frames, tokens, 0.3, True, *block) for block in ((128, 128), (block_q, block_kv)))
    video, total = frames * tokens, frames * tokens + text
    coarse_mask = coarse.token_mask(total, total)
    assert (coarse_mask | ~fine.token_mask(total, total)).all()
    assert coarse_mask[video:].all()
    assert coarse_mask[:, video:].all()
    block_mask = coarse.block_mask(total, total)
    sizes = (
        np.diff(np.append(np.arange(0, total, block_q), total)),
        np.diff(np.append(np.arange(0, total, block_kv), total)),
    )
    assert (
        coarse.density(total)
        == pytest.approx(coarse_mask.mean())
        == pytest.approx(sizes[0] @ block_mask @ sizes[1] / total**2)
    )


def test_padding_after_the_video_attends_to_nothing():
    mask = Radial(*SMALL, 0.2)
    assert (mask.block_mask(1960, 1960) == mask.block_mask(2000, 1960)).all()
    assert not mask.block_mask(2600, 1960)[8:].any()


@pytest.mark.parametrize(("held_keys", "query_blocks"), [(256, 1), (512, 4), (4096, 3)])
def test_the_kernel_visits_exactly_the_blocks_of_the_mask(held_keys, query_blocks):
    mask, keys = Radial(*SMALL, 0.2, True, 128, 128), SMALL[0] * SMALL[1]
    first, count, tail, start = kernel_lists(mask, keys, keys, held_keys, query_blocks)
    steps = -(-keys // held_keys)
    listed = np.zeros((len(tail), 16), bool)
    listed[:, -1] = tail == 1
    for cell, (begin, number) in enumerate(zip(first, count, strict=True)):
        lists = start[begin : begin + number * query_blocks].reshape(number, query_blocks)
        assert not number or (lists < NO_BLOCK).sum(axis=0).max() == number
        for step, query_block in zip(*np.nonzero(lists < NO_BLOCK), strict=True):
            listed[
                cell // steps * query_blocks + query_block, (cell % steps * held_keys + lists[step, query_block]) // 128
            ] = True
    assert (listed[:16] == mask.block_mask(keys, keys)).all()
    assert not listed[16:].any()


def exact_output(q, k, v, mask, keys=None):
    """Return the formula in float64 under the mask."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x[:, :keys], q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    mask_of_tokens = mask.token_mask(q.shape[1], k.shape[1])
    logits = np.where(mask_of_tokens, np.einsum("BLND,BSND->BNLS", q, k, optimize=True) * q.shape[3] ** -0.5, -1e300)
    weights = np.where(mask_of_tokens, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("BNLS,BSND->BLND", weights, v, optimize=True)


def run(name, q, k, v, mask, **options):
    return jax.jit(partial(attention, implementation=name, window=mask, **options))(q, k, v)


TILES = flash_tpu.Config(512, 512, 256, interpret=True)  # a tile has up to four blocks of queries
NAMES = ("reference", "chunked", "flash_tpu")
CASES = [(name, block_size, dtype) for name in NAMES for block_size in BLOCK_SIZES for dtype in BOUND]
QUICK = [(name, block_size, "float32") for name in NAMES[1:] for block_size in BLOCK_SIZES]
QUICK += [
    ("reference", BLOCK_SIZES[2], "float32"),
    ("chunked", BLOCK_SIZES[3], "bfloat16"),
    ("flash_tpu", BLOCK_SIZES[1], "bfloat16"),
]


@cache
def case_of_block_size(block_size, dtype):
    mask = Radial(*SHORT, 0.2, True, *block_size)
    q, k, v = operands(1, 1200, 1200, 2, 1, 64, dtype)
    return mask, (q, k, v), exact_output(q, k, v, mask)


@pytest.mark.parametrize(("name", "block_size", "dtype"), quick(QUICK, CASES))
def test_every_implementation_applies_the_mask(name, block_size, dtype):
    mask, options, expected = case_of_block_size(block_size, dtype)
    assert mask.density(1200) < 0.97
    config = TILES if name == "flash_tpu" else None
    assert error(run(name, *options, mask, config=config), expected) <= BOUND[dtype]


@pytest.mark.parametrize("name", ["chunked", "flash_tpu"])
def test_text_after_the_video_is_attended_to_and_padding_is_not(name):
    mask = Radial(6, 140, 0.2, False, 128, 128)
    q, k, v = operands(1, 1000, 1000, 2, 2, 128)
    config = TILES if name == "flash_tpu" else None
    assert not mask.block_mask(970, 970).all()
    out = run(name, q, k, v, mask, config=config, kv_length=970)
    assert error(out[:, :970], exact_output(q[:, :970], k, v, mask, 970)) <= BOUND["float32"]


def test_chunked_attention_combines_a_key_mask_with_the_radial_mask():
    mask = Radial(*SHORT, 0.2, True, 128, 128)
    q, k, v = operands(2, 1200, 1200, 2, 1, 32)
    key_mask = jnp.asarray(np.random.default_rng(0).random((2, 1200)) < 0.8, bool)
    options = {"key_mask": key_mask, "window": mask, "scale": 0.2, "bias": None, "config": None, "return_lse": True}
    for output, expected in zip(
        *(jax.jit(partial(implementation.attention, **options))(q, k, v) for implementation in (chunked, reference)),
        strict=True,
    ):
        assert error(output, expected) <= BOUND["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_logits_are_exact_under_the_mask(dtype):
    mask = Radial(5, 140, 0.2, True, 128, 128)
    q, k, v = map(np.array, operands(1, 700, 700, 1, 1, 64, dtype))
    direction = np.sign(q[:, :1, :1])
    k[:, 300:310] = 60 * direction
    q = np.abs(q) * direction
    with count_calls("_raise_offset") as offset_raises:
        out = run("flash_tpu", q, k, v, mask, config=TILES)
        jax.effects_barrier()
    assert len(offset_raises) > 2  # small logits raise only two offsets: one for the last block of each 512 queries
    assert error(out, exact_output(q, k, v, mask)) <= BOUND[dtype]


def test_gradients_equal_those_of_the_reference():
    mask = Radial(*SHORT, 0.2, True, 128, 128)
    q, k, v = operands(1, 1200, 1200, 1, 1, 64)

    def gradients(name, config):
        def loss(*qkv):
            return (attention(*qkv, implementation=name, window=mask, config=config) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    expected = gradients("reference", None)
    for name, config in (("chunked", None), ("flash_tpu", TILES)):
        for gradient, expected_gradient in zip(gradients(name, config), expected, strict=True):
            assert error(gradient, expected_gradient) <= 1e-5


MESHES = [(1, 1, 8), (2, 1, 4), (2, 2, 2), (8, 1, 1)]


@pytest.mark.parametrize(("dp", "sp", "tp"), quick([(1, 1, 8), (2, 2, 2)], MESHES))
def test_several_devices_give_the_exact_result(dp, sp, tp):
    mask = Radial(7, 100, 0.2, True, 128, 128)
    q, k, v = operands(dp, 700, 700, 4, 4, 16)
    with use_partitioner(Partitioner(make_mesh(dp, sp, tp), SHARDING_RULES["fsdp"])):
        out = run("chunked", q, k, v, mask)
    assert error(out, exact_output(q, k, v, mask)) <= BOUND["float32"]


def test_a_text_names_radial_attention_and_its_decay():
    assert AttentionConfig.parse("radial") == AttentionConfig(radial=True)
    assert AttentionConfig.parse("radial:1") == AttentionConfig(radial=True, decay=1.0)
    assert AttentionConfig.parse("radial").mask((7, 10, 10)) == Radial(7, 100, 0.2)
    assert AttentionConfig.parse("radial").mask((7, 10, 10), decay=0.95, has_sink=False) == Radial(
        7, 100, 0.95, has_sink=False
    )
    assert AttentionConfig.parse("radial:1").mask((7, 10, 10), decay=0.95) == Radial(7, 100, 1.0)
    assert AttentionConfig.parse("chunked:window=9").mask((7, 10, 10)) is None
    q, k, v = operands(1, 1960, 1960, 1, 1, 32)
    requested = AttentionConfig.parse("radial:0.3")
    radial, mask = partial(attention, implementation=requested), requested.mask((14, 10, 14))
    windowed, unwindowed, dense = jax.jit(lambda *x: (radial(*x, window=mask), radial(*x), attention(*x)))(q, k, v)
    assert error(windowed, run("chunked", q, k, v, Radial(*SMALL, 0.3))) <= BOUND["float32"]
    assert (np.asarray(unwindowed) == dense).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("radial:0", "decay '0' number 0 16"),
        ("radial:nan", "a number above 0"),
        ("radial:17", "a number above 0"),
        ("radial:much", "a decay of 'much'"),
        ("radial:window=9", "window tiles"),
        ("radial:0.2,block_q=512", "window tiles"),
    ],
)
def test_invalid_radial_texts_are_refused(text, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        AttentionConfig.parse(text)


@pytest.mark.parametrize(("fields", "words"), [((0, 9, 0.2), "0 frames"), ((2, 9, 0.0), "decay 0.0")])
def test_invalid_masks_are_refused(fields, words):
    with pytest.raises(WanjaxError, match=words):
        Radial(*fields)
    with pytest.raises(WanjaxError, match="multiples of 128"):
        Radial(2, 9, 0.2, True, 100, 128)
