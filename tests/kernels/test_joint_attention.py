# SPDX-License-Identifier: Apache-2.0
"""Every implementation of joint attention of video and text, dense or radial, is compared with the formula."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import BOUND, attend_while_gathering, exact, normal
from tests.support.compare import error
from tests.support.devices import on_meshes
from wanjax.kernels.attention import VideoTextPair, flash_tpu, joint, joint_attention
from wanjax.kernels.attention.api import _attend_on_one_device
from wanjax.kernels.attention.radial import Radial
from wanjax.sharding import (
    ONE_DEVICE_PARTITIONER,
    SHARDING_RULES,
    Partitioner,
    make_mesh,
    padded_length,
    shard_tokens,
    use_partitioner,
)

FRAMES, FRAME, TEXT = 7, 100, 40  # the video ends within a block of 128, in which text begins
VIDEO = FRAMES * FRAME
TEXTS = (9, 40, 1)
MASK = Radial(FRAMES, FRAME, 0.1, False, 128, 128)
TILES = flash_tpu.Config(128, 512, 256, interpret=True)


def operands(heads=2, size=32, dtype="float32", text=TEXT):
    return [
        VideoTextPair(normal(i, 3, VIDEO, heads, size, dtype=dtype), normal(i + 9, 3, text, heads, size, dtype=dtype))
        for i in range(3)
    ]


def exact_output(q, k, v, window=None, texts=TEXTS):
    """Return the formula in float64 over the joint sequence."""
    q, k, v = (np.concatenate([np.float64(part) for part in pair], axis=1) for pair in (q, k, v))
    total = q.shape[1]
    hidden = np.zeros((total, total)) if window is None else np.where(window.token_mask(total, total), 0, -np.inf)
    mask = np.arange(total) < VIDEO + np.asarray(texts)[:, None]
    return exact(q, k, v, key_mask=mask, bias=np.where(np.isinf(hidden), -1e30, 0)[None, None])


def attend(q, k, v, texts, *, window=None, partitioner=None, name="chunked", config=None, has_room=False):
    with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
        axes = ("batch", "length", None, None)
        length = padded_length(VIDEO, room=q.text.shape[1] if has_room else 0)
        q, k, v = (
            VideoTextPair(shard_tokens(x.video, axes, length=length), shard_tokens(x.text, axes)) for x in (q, k, v)
        )
        kernel = partial(_attend_on_one_device, name=name, key_mask=None, scale=q.video.shape[3] ** -0.5)
        kernel = partial(kernel, bias=None, config=config)
        return joint.attention(kernel, q, k, v, length=VIDEO, text_lengths=texts, window=window)


def join_video_and_text(out, text_length):
    return np.concatenate([out.video[:, :VIDEO], out.text[:, :text_length]], axis=1)


def run(q, k, v, window=None, texts=TEXTS, **options):
    out = jax.jit(partial(attend, window=window, **options))(q, k, v, jnp.asarray(texts, jnp.int32))
    return join_video_and_text(out, q.text.shape[1])


def test_the_radial_mask_of_these_tests_hides_tokens():
    assert MASK.density(VIDEO + TEXT) < 0.85


@cache
def expected_output(window):
    q, k, v = operands(size=64)
    return exact_output(q, k, v, window)


@pytest.mark.parametrize("window", [None, MASK], ids=["dense", "radial"])
@pytest.mark.parametrize("name", ["reference", "chunked", "flash_tpu"])
def test_every_implementation_is_exact(name, window):
    q, k, v = operands(size=64)
    out = run(q, k, v, window, name=name, config=TILES if name == "flash_tpu" else None)
    assert error(out, expected_output(window)) <= BOUND["float32"]


@pytest.mark.parametrize("window", [None, MASK], ids=["dense", "radial"])
def test_long_texts_in_bfloat16_are_near(window):
    """Texts end within a block, at its end, and before the first block. The text spans two blocks of held keys."""
    q, k, v = operands(heads=1, size=64, dtype="bfloat16", text=600)
    texts, config = (68 + 128, 600, 0), flash_tpu.Config(256, 512, 512, interpret=True, buffers=1)
    out = run(q, k, v, window, texts, name="flash_tpu", config=config)
    assert error(out, exact_output(q, k, v, window, texts)) <= BOUND["bfloat16"]


def test_padding_may_hold_anything_finite():
    q, k, v = operands()
    hidden = np.arange(TEXT)[None, :, None, None] >= np.asarray(TEXTS)[:, None, None, None]
    other_k, other_v = (VideoTextPair(x.video, np.where(hidden, np.float32(1e4), x.text)) for x in (k, v))
    for window in (None, MASK):
        out = run(q, other_k, other_v, window)
        assert error(out, exact_output(q, k, v, window)) <= BOUND["float32"]


@cache
def gradients(name, window):
    config = TILES if name == "flash_tpu" else None
    kernel = partial(_attend_on_one_device, name=name, key_mask=None, scale=0.2, bias=None, config=config)

    def loss(operands, texts):
        out = joint.attention(kernel, *operands, length=VIDEO, text_lengths=texts, window=window)
        return sum(jnp.sum(jnp.sin(part)) for part in out)

    return jax.tree.leaves(jax.jit(jax.grad(loss))(operands(heads=1, size=64), jnp.asarray(TEXTS, jnp.int32)))


@pytest.mark.parametrize("window", [None, MASK], ids=["dense", "radial"])
@pytest.mark.parametrize("name", ["chunked", "flash_tpu"])
def test_gradients_equal_those_of_the_reference(name, window):
    for gradient, expected in zip(gradients(name, window), gradients("reference", window), strict=True):
        assert error(gradient, np.float64(expected)) <= 1e-5


MESHES = on_meshes(((1, 1, 8), "fsdp"), ((2, 2, 2), "tp"))


@pytest.mark.parametrize("has_room", [False, True], ids=["", "text in the padding"])
@pytest.mark.parametrize("window", [None, MASK], ids=["dense", "radial"])
@pytest.mark.parametrize(("axes", "rules"), MESHES)
def test_several_devices_give_the_exact_result(axes, rules, window, has_room):
    """No axis divides the number of tokens, and on some meshes none divides the heads."""
    q, k, v = operands(heads=4, size=8)
    if axes[0] > 1:
        q, k, v = (jax.tree.map(lambda x: np.resize(x, (axes[0], *x.shape[1:])), pair) for pair in (q, k, v))
    texts = np.resize(TEXTS, len(q.video))
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES[rules])
    out = run(q, k, v, window, texts, partitioner=partitioner, has_room=has_room)
    assert error(out, exact_output(q, k, v, window, texts)) <= BOUND["float32"]


@pytest.mark.parametrize("axes", [(1, 1, 8), (1, 8, 1)])
def test_joint_attention_gathers_weights(axes):
    q, k, v = operands(heads=4, size=8)
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES["fsdp"])
    out = attend_while_gathering(
        partitioner, partial(attend, partitioner=partitioner), q, k, v, jnp.asarray(TEXTS, jnp.int32)
    )
    assert error(join_video_and_text(out, TEXT), exact_output(q, k, v)) <= BOUND["float32"]


def test_joint_attention_takes_a_named_implementation():
    q, k, v = operands()
    texts = jnp.asarray(TEXTS, jnp.int32)
    for name, window in (("radial:0.1", MASK), ("auto", None)):
        named = partial(joint_attention, length=VIDEO, window=window, implementation=name)
        out = jax.jit(named)(q, k, v, text_lengths=texts)
        assert error(np.concatenate(out, axis=1), exact_output(q, k, v, window)) <= BOUND["float32"]
