# SPDX-License-Identifier: Apache-2.0
"""The choice of an implementation of attention by platform and shape; cuDNN's implementation without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from tests.support.attention import BOUND, exact, operands, run
from tests.support.compare import error
from tests.support.words import has_line_with, line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, attention, choose_implementation, chunked, cudnn
from wanjax.kernels.target import Target, target

CARD = AbstractDevice("NVIDIA H200", None, "gpu")
TPU = AbstractDevice("TPU v6 lite", 1, "tpu")


def mesh(device):
    return AbstractMesh((1,), ("chips",), abstract_device=device)


def shapes(dtype="bfloat16", size=64, sharding=None):
    return [jax.ShapeDtypeStruct((1, 96, 2, size), jnp.dtype(dtype), sharding=sharding)] * 3


def test_the_target_of_an_array():
    here = Target("cpu", "cpu")
    x = jnp.ones((2, 3))
    assert target(x) == here
    assert target(jax.ShapeDtypeStruct((2,), jnp.float32)) == here
    assert target(jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh(TPU), PartitionSpec()))) == (
        "tpu",
        "TPU v6 lite",
    )


def test_the_target_of_a_traced_array():
    seen = []

    def look(x):
        seen.append(target(x))
        return x

    jax.jit(look)(jnp.ones(3))
    with jax.sharding.use_abstract_mesh(mesh(CARD)):
        jax.jit(look).trace(jax.ShapeDtypeStruct((3,), jnp.float32))
    with jax.default_device(jax.devices("cpu")[0]), jax.set_mesh(jax.make_mesh((1,), ("chips",))):
        jax.eval_shape(look, jnp.ones(3))
    assert seen == [("cpu", "cpu"), ("gpu", "NVIDIA H200"), ("cpu", "cpu")]


CPU = AbstractDevice("cpu", None, "cpu")


@pytest.mark.parametrize(
    ("device", "size", "implementation", "words"),
    [(CPU, 64, "cudnn", "cudnn NVIDIA's cpu"), (TPU, 80, "flash_tpu", "size 80 64 128")],
    ids=["cudnn", "flash_tpu"],
)
def test_a_kernel_that_is_named_is_taken_or_refused(device, size, implementation, words):
    """No other one is taken in its place, as where none is named."""
    with jax.sharding.use_abstract_mesh(mesh(device)):
        assert choose_implementation(*shapes(size=size)).name == "chunked"
        with pytest.raises(NotImplementedError, match=line_with_words(words)):
            choose_implementation(*shapes(size=size), implementation=implementation)


def test_cards_and_tpus_prefer_their_kernels():
    for kind in ("NVIDIA H200", "NVIDIA A10G", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 3090", "NVIDIA L40S"):
        with jax.sharding.use_abstract_mesh(mesh(AbstractDevice(kind, None, "gpu"))):
            assert choose_implementation(*shapes()) == ("cudnn", "it is NVIDIA's own implementation")
    with jax.sharding.use_abstract_mesh(mesh(TPU)):
        assert (
            choose_implementation(*shapes()).name
            == choose_implementation(*shapes(), return_lse=True).name
            == "flash_tpu"
        )


@pytest.mark.parametrize(
    ("device", "kind", "implementation", "words"),
    [
        (CARD, {"dtype": "float32"}, None, "cudnn bfloat16 float16 float32"),
        (CARD, {}, "auto:window=5", "cudnn window"),
        (AbstractDevice("Tesla T4", None, "gpu"), {}, None, "cudnn Ampere Tesla T4"),
        (AbstractDevice("NVIDIA GeForce RTX 2080 Ti", None, "gpu"), {}, None, "cudnn Ampere 2080"),
        (TPU, {"size": 80}, None, "flash_tpu size 80 64 128"),
    ],
    ids=["a dtype", "a window", "an old card", "an old desktop card", "a size"],
)
def test_a_fallback_gives_its_reason(device, kind, implementation, words):
    with jax.sharding.use_abstract_mesh(mesh(device)):
        chosen = choose_implementation(*shapes(**kind), implementation=implementation)
    assert chosen.name == "chunked"
    assert has_line_with(chosen.reason, words)


def test_other_cards_do_not():
    with jax.sharding.use_abstract_mesh(mesh(AbstractDevice("AMD Instinct MI300X", None, "rocm"))):
        assert choose_implementation(*shapes()).name == "chunked"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ({"size": 60}, "a multiple of 8 up to 128, not 60"),
        ({"size": 256}, "a multiple of 8 up to 128, not 256"),
        ({"window": (3, 4)}, r"two-sided window such as \(3, 4\)"),
        ({"bias": jnp.zeros((1, 1, 96, 96))}, "would round a bias"),
        ({"return_lse": True}, "log-sum-exp in the operands' dtype"),
        ({"config": chunked.Config(8, 8, batched=True)}, "Config belongs to another implementation"),
    ],
)
def test_cudnn_refuses_inexact_configurations(changed, message):
    kind = {key: changed[key] for key in ("dtype", "size") if key in changed}
    options = {key: value for key, value in changed.items() if key not in kind}
    with jax.sharding.use_abstract_mesh(mesh(CARD)), pytest.raises(NotImplementedError, match=f"cudnn .*{message}"):
        choose_implementation(*shapes(**kind), implementation="cudnn", **options)


@pytest.fixture
def card_without_cudnn(monkeypatch):
    """Simulates a GPU, with JAX's own formula in place of cuDNN's kernel."""
    requested = []
    formula = jax.nn.dot_product_attention

    def play(*arguments, implementation, **options):
        requested.append(implementation)
        return formula(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", play)
    monkeypatch.setattr(cudnn, "target", lambda x: Target("gpu", "NVIDIA H200"))
    return requested


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (3, 2)])
def test_cudnn_gets_live_keys_first(card_without_cudnn, batch, kv_heads):
    q, k, v = operands(batch, 21, 17, 4, kv_heads, 16, "bfloat16")
    mask = np.random.default_rng(5).random((batch, 17)) < 0.6
    mask[0] = batch == 1  # in a batch of several, the first example has no key
    out = np.asarray(run("cudnn", q, k, v, key_mask=jnp.asarray(mask), scale=0.3), np.float64)
    expected = exact(q, k, v, key_mask=mask, scale=0.3)
    assert card_without_cudnn == ["cudnn"]
    assert out[0].any() == (batch == 1)
    np.testing.assert_allclose(out, expected, atol=0.03)  # the formula in place of cuDNN rounds its weights to bfloat16
    assert np.linalg.norm(out - expected) <= 6e-3 * np.linalg.norm(expected)


def test_cudnn_is_lowered(monkeypatch):
    """Lowers for CUDA without a GPU: the program has the call with the scale, and no score matrix."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

    class Versions:
        cudnn_get_version = staticmethod(lambda: 91500)

    monkeypatch.setattr(jax_cudnn, "cuda_versions", Versions)
    with jax.sharding.use_abstract_mesh(mesh(CARD)):
        traced = jax.jit(lambda q, k, v: attention(q, k, v, implementation="cudnn")).trace(*shapes())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert "96x96" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (None, None, None)),
        ("auto", (None, None, None)),
        ("auto:window=9", (None, None, 9)),
        ("chunked", ("chunked", None, None)),
        ("chunked:window=0", ("chunked", None, 0)),
    ],
)
def test_implementations_and_windows_are_named(text, expected):
    assert AttentionConfig.of(text) == AttentionConfig(*expected)


@pytest.mark.parametrize("text", ["auto:window=", "auto:window=x", "chunked:window=3,window=4", "auto:window=-3"])
def test_windows_that_are_no_number(text):
    with pytest.raises(WanjaxError, match=line_with_words("window number tokens window=4096")):
        AttentionConfig.parse(text)


@pytest.mark.parametrize("name", ["auto", "chunked", "reference"])
def test_a_named_window_is_that_of_the_call(name):
    q, k, v = operands(1, 40, 40, 2, 2, 16)
    out = attention(q, k, v, implementation=f"{name}:window=5")
    assert error(out, exact(q, k, v, window=(5, 5))) <= BOUND["float32"]
    wider = attention(q, k, v, implementation=f"{name}:window=5", window=9)
    assert error(wider, exact(q, k, v, window=(9, 9))) <= BOUND["float32"]
