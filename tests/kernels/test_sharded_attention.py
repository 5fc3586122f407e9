# SPDX-License-Identifier: Apache-2.0
"""Attention over eight devices against the formula, and its collectives."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import SMALL_TILES, exact, exact_gradients, normal, operands, with_waiting_weights
from tests.support.compare import error
from tests.support.devices import MESHES, SPREADING
from tests.support.quick import quick
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import attention
from wanjax.sharding import ONE_DEVICE_PARTITIONER, SHARDING_RULES, Partitioner, constrain, make_mesh, use_partitioner

BOUND = 1e-6  # the error of float32 attention, as on one device
TOKENS = ("batch", "length", "heads", "head_dim")


def partitioner(axes, rules="fsdp"):
    return Partitioner(make_mesh(*axes), SHARDING_RULES[rules])


def compiled(partitioner, q, k, v, **options):
    """Compile attention with the partitioner's sharding of activations; return the executable and its arguments."""
    static = {key: options.pop(key) for key in ("window", "scale", "kv_length") if key in options}

    def run(q, k, v, options):
        with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
            q = constrain(q, TOKENS)
            return constrain(attention(q, k, v, implementation="reference", **static, **options), TOKENS)

    return jax.jit(run).lower(q, k, v, options).compile(), (q, k, v, options)


def run(partitioner, q, k, v, **options):
    executable, arguments = compiled(partitioner, q, k, v, **options)
    return executable(*arguments)


CASES = [(axes, rules, (4, 12, 40)[(i + j) % 3]) for i, axes in enumerate(MESHES) for j, rules in enumerate(SPREADING)]
CASES += [((1, 1, 8), "fsdp", 12), ((2, 2, 2), "fsdp", 3)]
OTHERS = [((2, 1, 4), "fsdp", 12), ((2, 2, 2), "fsdp", 40), ((1, 4, 2), "tp", 12), ((1, 8, 1), "fsdp", 12)]


@pytest.mark.parametrize(("axes", "rules", "heads"), quick([case for case in CASES if case not in OTHERS], CASES))
def test_self_attention(axes, rules, heads):
    """Two examples, which `dp` splits, of 37 tokens, which no axis divides."""
    q, k, v = operands(2, 37, 37, heads, heads, 4)
    assert error(run(partitioner(axes, rules), q, k, v), exact(q, k, v)) <= BOUND


@pytest.mark.parametrize("length", [40, 37])
@pytest.mark.parametrize("center", [False, True])
def test_the_ring_of_a_kernel_with_state(length, center):
    """The kernel for TPUs adds each shard's keys to the sums of the others, unless a mean of its own leaves each."""
    q, k, v = operands(2, length, length, 2, 2, 64)
    with use_partitioner(partitioner((2, 4, 1))):
        config = replace(SMALL_TILES, center_keys=center)
        out = jax.jit(partial(attention, implementation="flash_tpu", config=config))(q, k, v)
    assert error(out, exact(q, k, v)) <= BOUND


@pytest.mark.parametrize("axes", [(1, 1, 8), (1, 4, 2), (1, 8, 1)])
def test_keys_behind_the_real_ones_take_no_part(axes):
    """The last devices of a ring may hold padding keys only."""
    q, k, v = operands(1, 40, 40, 8, 8, 4)
    keys = 9
    loud = [np.where(np.arange(40)[:, None, None] < keys, x, np.float32(1e4)) for x in (k, v)]
    out = run(partitioner(axes), q, *loud, kv_length=keys)
    assert error(out, exact(q, k[:, :keys], v[:, :keys])) <= BOUND


DIVIDED = [(name, axes) for name in ("chunked", "flash_tpu") for axes in ((1, 1, 8), (1, 4, 2), (2, 2, 2))]


@pytest.mark.parametrize(("name", "axes"), quick(DIVIDED[1:5], DIVIDED))
def test_gradients(name, axes):
    """Around a ring, those of keys and values return to the device that they came from."""
    q, k, v = operands(2, 37, 37, 2, 2, 64)
    g = normal(5, *q.shape)
    config = SMALL_TILES if name == "flash_tpu" else None

    def loss(q, k, v):
        with use_partitioner(partitioner(axes)):
            q = constrain(q, TOKENS)
            return jnp.sum(g * constrain(attention(q, k, v, implementation=name, config=config, scale=0.3), TOKENS))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for ours, expected in zip(gradients, exact_gradients(q, k, v, g, scale=0.3), strict=False):
        assert error(ours, expected) <= 3 * BOUND


RINGS = [
    (name, size, mask) for name in ("flash_tpu", "chunked") for size in (4, 8) for mask in ("all", "first", "scattered")
]


@pytest.mark.parametrize(("name", "size", "mask"), quick([RINGS[0], RINGS[8], RINGS[10]], RINGS))
def test_the_gradient_of_a_ring(name, size, mask):
    """Weights come from the log-sum-exp over all keys, though a device never holds more than a part of them."""
    q, k, v = operands(2, 37, 37, 2, 2, 64)
    g, options = normal(5, *q.shape), {}
    if mask == "first":
        options["kv_length"], valid = 23, np.broadcast_to(np.arange(37) < 23, (2, 37))
    elif mask == "scattered":
        valid = np.random.default_rng(3).random((2, 37)) < 0.6
        options["key_mask"] = jnp.asarray(valid)
    else:
        valid = None
    ring = Partitioner(make_mesh(1, size, 1, devices=jax.devices()[:size]), SHARDING_RULES["fsdp"])
    config = SMALL_TILES if name == "flash_tpu" else None

    def loss(q, k, v):
        with use_partitioner(ring):
            q = constrain(q, TOKENS)
            out = attention(q, k, v, implementation=name, config=config, scale=0.3, **options)
            return jnp.sum(g * constrain(out, TOKENS)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert error(out, exact(q, k, v, scale=0.3, key_mask=valid)) <= BOUND
    for ours, expected in zip(gradients, exact_gradients(q, k, v, g, scale=0.3, key_mask=valid), strict=False):
        assert error(ours, expected) <= 1.5 * BOUND


@pytest.mark.parametrize("axes", [(2, 1, 4), (2, 2, 2)])
def test_masked_keys_with_shared_heads(axes):
    q, k, v = operands(2, 24, 24, 8, 2, 4)
    mask = np.random.default_rng(3).random((2, 24)) < 0.5
    mask[1] = False
    out = np.asarray(run(partitioner(axes), q, k, v, key_mask=mask))
    assert not out[1].any()
    assert error(out, exact(q, k, v, key_mask=mask)) <= BOUND


@pytest.mark.parametrize("rules", SPREADING)
@pytest.mark.parametrize("option", ["bias", "window"])
def test_bias_and_window(rules, option):
    q, k, v = operands(2, 19, 19, 4, 4, 4)
    options = {"bias": normal(5, 1, 4, 19, 19)} if option == "bias" else {"window": (3, 1)}
    assert error(run(partitioner((2, 2, 2), rules), q, k, v, **options), exact(q, k, v, **options)) <= BOUND


def collectives(partitioner, *operands, **options):
    """Return the number of collectives of each kind in the compiled program."""
    text = compiled(partitioner, *operands, **options)[0].as_text()
    assert text is not None
    return Counter(re.findall(r"= .*? (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text))


def test_heads_are_exchanged_for_tokens_once_in_each_direction():
    counts = collectives(partitioner((1, 1, 8)), *operands(1, 64, 64, 8, 8, 4))
    assert counts["all-to-all"] == 4
    assert not counts["all-gather"]
    assert not counts["collective-permute"]


def test_heads_that_lie_apart_are_not_traded():
    assert not collectives(partitioner((2, 1, 4), "tp"), *operands(2, 64, 64, 8, 8, 4))


def test_few_keys_are_not_moved():
    q, k, v = operands(1, 64, 5, 8, 8, 4)
    assert not collectives(partitioner((1, 2, 4)), q, k, v)
    assert error(run(partitioner((1, 2, 4)), q, k, v), exact(q, k, v)) <= BOUND


def test_the_ring_sends_keys_and_values_round_once():
    q, k, v = operands(1, 64, 64, 8, 8, 4)
    executable, arguments = compiled(partitioner((1, 8, 1)), q, k, v)
    assert collectives(partitioner((1, 8, 1)), q, k, v) == {"collective-permute": 2 * 7}
    assert executable(*arguments).sharding.spec[1] == "sp"


@pytest.mark.parametrize(("name", "axes"), [("flash_tpu", (2, 4, 1)), ("chunked", (1, 8, 1)), ("chunked", (2, 1, 4))])
def test_attention_gathers_weights(name, axes):
    """The weights of the next block are complete on every device, and attention is what it is without them."""
    q, k, v = operands(2, 37, 37, 4, 4, 64)
    config = SMALL_TILES if name == "flash_tpu" else None

    def attend(q, k, v):
        return attention(constrain(q, TOKENS), k, v, implementation=name, config=config)

    assert error(with_waiting_weights(partitioner(axes), attend, q, k, v), exact(q, k, v)) <= BOUND


@pytest.mark.parametrize(("axes", "keys"), [((1, 1, 1), 0), ((1, 1, 1), 6)])
def test_absent_keys(axes, keys):
    with pytest.raises(WanjaxError, match=f"from 1 to 5 for 5 keys, got {keys}"):
        attention(*operands(1, 5, 5, 1, 1, 4), kv_length=keys)
