# SPDX-License-Identifier: Apache-2.0
"""Attention over eight devices is compared with the formula, and its collectives are counted."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import SMALL_TILES, attend_while_gathering, exact, exact_gradients, normal, operands
from tests.support.compare import error
from tests.support.devices import MESHES, SHARDED_RULES
from tests.support.quick import quick
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import attention
from wanjax.sharding import ONE_DEVICE_PARTITIONER, SHARDING_RULES, Partitioner, constrain, make_mesh, use_partitioner

BOUND = 1e-6  # the error of float32 attention, as on one device
TOKENS = ("batch", "length", "heads", "head_dim")


def partitioner(axes, rules="fsdp"):
    return Partitioner(make_mesh(*axes), SHARDING_RULES[rules])


def compile_attention(partitioner, q, k, v, **options):
    """Compile attention with the partitioner's sharding of activations; return the executable and its arguments."""
    static_options = {key: options.pop(key) for key in ("window", "scale", "kv_length") if key in options}

    def run(q, k, v, options):
        with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
            q = constrain(q, TOKENS)
            return constrain(attention(q, k, v, implementation="reference", **static_options, **options), TOKENS)

    return jax.jit(run).lower(q, k, v, options).compile(), (q, k, v, options)


def run(partitioner, q, k, v, **options):
    executable, arguments = compile_attention(partitioner, q, k, v, **options)
    return executable(*arguments)


CASES = [
    (axes, rules, (4, 12, 40)[(i + j) % 3]) for i, axes in enumerate(MESHES) for j, rules in enumerate(SHARDED_RULES)
]
CASES += [((1, 1, 8), "fsdp", 12), ((2, 2, 2), "fsdp", 3)]
SLOW_CASES = [((2, 1, 4), "fsdp", 12), ((2, 2, 2), "fsdp", 40), ((1, 4, 2), "tp", 12), ((1, 8, 1), "fsdp", 12)]


@pytest.mark.parametrize(("axes", "rules", "heads"), quick([case for case in CASES if case not in SLOW_CASES], CASES))
def test_sharded_attention_is_exact(axes, rules, heads):
    """`dp` splits the two examples; no axis divides their 37 tokens."""
    q, k, v = operands(2, 37, 37, heads, heads, 4)
    assert error(run(partitioner(axes, rules), q, k, v), exact(q, k, v)) <= BOUND


@pytest.mark.parametrize("length", [40, 37])
@pytest.mark.parametrize("center", [False, True])
def test_a_ring_of_the_tpu_kernel_is_exact(length, center):
    """The TPU kernel adds each shard's keys to the sums of the other shards, unless each shard centers its keys."""
    q, k, v = operands(2, length, length, 2, 2, 64)
    with use_partitioner(partitioner((2, 4, 1))):
        config = replace(SMALL_TILES, center_keys=center)
        out = jax.jit(partial(attention, implementation="flash_tpu", config=config))(q, k, v)
    assert error(out, exact(q, k, v)) <= BOUND


@pytest.mark.parametrize("axes", [(1, 1, 8), (1, 4, 2), (1, 8, 1)])
def test_padding_keys_change_nothing(axes):
    """The last devices of a ring may have only padding keys."""
    q, k, v = operands(1, 40, 40, 8, 8, 4)
    num_keys = 9
    padded = [np.where(np.arange(40)[:, None, None] < num_keys, x, np.float32(1e4)) for x in (k, v)]
    out = run(partitioner(axes), q, *padded, kv_length=num_keys)
    assert error(out, exact(q, k[:, :num_keys], v[:, :num_keys])) <= BOUND


SHARDED_CASES = [(name, axes) for name in ("chunked", "flash_tpu") for axes in ((1, 1, 8), (1, 4, 2), (2, 2, 2))]


@pytest.mark.parametrize(("name", "axes"), quick(SHARDED_CASES[1:5], SHARDED_CASES))
def test_sharded_gradients_are_exact(name, axes):
    """The gradients of a ring's keys and values return to the device that has these keys and values."""
    q, k, v = operands(2, 37, 37, 2, 2, 64)
    g = normal(5, *q.shape)
    config = SMALL_TILES if name == "flash_tpu" else None

    def loss(q, k, v):
        with use_partitioner(partitioner(axes)):
            q = constrain(q, TOKENS)
            return jnp.sum(g * constrain(attention(q, k, v, implementation=name, config=config, scale=0.3), TOKENS))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for gradient, expected in zip(gradients, exact_gradients(q, k, v, g, scale=0.3), strict=False):
        assert error(gradient, expected) <= 3 * BOUND


RINGS = [
    (name, size, mask) for name in ("flash_tpu", "chunked") for size in (4, 8) for mask in ("all", "first", "scattered")
]


@pytest.mark.parametrize(("name", "size", "mask"), quick([RINGS[0], RINGS[8], RINGS[10]], RINGS))
def test_gradients_of_a_ring_are_exact(name, size, mask):
    """The softmax weights come from the log-sum-exp over all keys, although a device never has all keys at once."""
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
    for gradient, expected in zip(gradients, exact_gradients(q, k, v, g, scale=0.3, key_mask=valid), strict=False):
        assert error(gradient, expected) <= 1.5 * BOUND


@pytest.mark.parametrize("axes", [(2, 1, 4), (2, 2, 2)])
def test_a_key_mask_applies_to_shared_heads(axes):
    q, k, v = operands(2, 24, 24, 8, 2, 4)
    mask = np.random.default_rng(3).random((2, 24)) < 0.5
    mask[1] = False
    out = np.asarray(run(partitioner(axes), q, k, v, key_mask=mask))
    assert not out[1].any()
    assert error(out, exact(q, k, v, key_mask=mask)) <= BOUND


@pytest.mark.parametrize("rules", SHARDED_RULES)
@pytest.mark.parametrize("option", ["bias", "window"])
def test_a_bias_or_a_window_is_sharded(rules, option):
    q, k, v = operands(2, 19, 19, 4, 4, 4)
    options = {"bias": normal(5, 1, 4, 19, 19)} if option == "bias" else {"window": (3, 1)}
    assert error(run(partitioner((2, 2, 2), rules), q, k, v, **options), exact(q, k, v, **options)) <= BOUND


def collectives(partitioner, *operands, **options):
    """Return the number of collectives of each kind in the compiled program."""
    text = compile_attention(partitioner, *operands, **options)[0].as_text()
    assert text is not None
    return Counter(re.findall(r"= .*? (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text))


def test_heads_are_exchanged_for_tokens_once_in_each_direction():
    counts = collectives(partitioner((1, 1, 8)), *operands(1, 64, 64, 8, 8, 4))
    assert counts["all-to-all"] == 4
    assert not counts["all-gather"]
    assert not counts["collective-permute"]


def test_heads_that_are_already_sharded_are_not_exchanged():
    assert not collectives(partitioner((2, 1, 4), "tp"), *operands(2, 64, 64, 8, 8, 4))


def test_few_keys_are_not_moved():
    q, k, v = operands(1, 64, 5, 8, 8, 4)
    assert not collectives(partitioner((1, 2, 4)), q, k, v)
    assert error(run(partitioner((1, 2, 4)), q, k, v), exact(q, k, v)) <= BOUND


def test_the_ring_sends_keys_and_values_round_once():
    q, k, v = operands(1, 64, 64, 8, 8, 4)
    executable, arguments = compile_attention(partitioner((1, 8, 1)), q, k, v)
    assert collectives(partitioner((1, 8, 1)), q, k, v) == {"collective-permute": 2 * 7}
    assert executable(*arguments).sharding.spec[1] == "sp"


@pytest.mark.parametrize(("name", "axes"), [("flash_tpu", (2, 4, 1)), ("chunked", (1, 8, 1)), ("chunked", (2, 1, 4))])
def test_attention_gathers_weights(name, axes):
    """Attention gathers the weights of the next block onto every device, and its result does not change."""
    q, k, v = operands(2, 37, 37, 4, 4, 64)
    config = SMALL_TILES if name == "flash_tpu" else None

    def attend(q, k, v):
        return attention(constrain(q, TOKENS), k, v, implementation=name, config=config)

    assert error(attend_while_gathering(partitioner(axes), attend, q, k, v), exact(q, k, v)) <= BOUND


@pytest.mark.parametrize(("axes", "kv_length"), [((1, 1, 1), 0), ((1, 1, 1), 6)])
def test_a_wrong_number_of_keys_is_refused(axes, kv_length):
    with pytest.raises(WanjaxError, match=f"from 1 to 5 for 5 keys, got {kv_length}"):
        attention(*operands(1, 5, 5, 1, 1, 4), kv_length=kv_length)
