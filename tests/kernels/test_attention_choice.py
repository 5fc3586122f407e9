# SPDX-License-Identifier: Apache-2.0
"""The platform and the shapes choose an implementation of attention; cuDNN's is tested without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from tests.support.attention import BOUND, exact, operands, run
from tests.support.compare import error
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, attention, choose_implementation, chunked, cudnn
from wanjax.kernels.target import Target, target

CARD = AbstractDevice("NVIDIA H200", None, "gpu")
TPU = AbstractDevice("TPU v6 lite", 1, "tpu")


def mesh(device):
    return AbstractMesh((1,), ("chips",), abstract_device=device)


def shapes(dtype="bfloat16", size=64, sharding=None):
    return [jax.ShapeDtypeStruct((1, 96, 2, size), jnp.dtype(dtype), sharding=sharding)] * 3


def test_an_array_or_its_sharding_tells_the_device_kind():
    cpu_target = Target("cpu", "cpu")
    x = jnp.ones((2, 3))
    assert target(x) == cpu_target
    assert target(jax.ShapeDtypeStruct((2,), jnp.float32)) == cpu_target
    assert target(jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh(TPU), PartitionSpec()))) == (
        "tpu",
        "TPU v6 lite",
    )


def test_a_traced_array_tells_the_device_kind():
    targets = []

    def append_target(x):
        targets.append(target(x))
        return x

    jax.jit(append_target)(jnp.ones(3))
    with jax.sharding.use_abstract_mesh(mesh(CARD)):
        jax.jit(append_target).trace(jax.ShapeDtypeStruct((3,), jnp.float32))
    with jax.default_device(jax.devices("cpu")[0]), jax.set_mesh(jax.make_mesh((1,), ("chips",))):
        jax.eval_shape(append_target, jnp.ones(3))
    assert targets == [("cpu", "cpu"), ("gpu", "NVIDIA H200"), ("cpu", "cpu")]


CPU = AbstractDevice("cpu", None, "cpu")


@pytest.mark.parametrize(
    ("device", "size", "implementation", "words"),
    [(CPU, 64, "cudnn", "cudnn NVIDIA's cpu chunked auto"), (TPU, 80, "flash_tpu", "size 80 64 128")],
    ids=["cudnn", "flash_tpu"],
)
def test_a_named_kernel_is_refused_where_it_cannot_run(device, size, implementation, words):
    """A default falls back to another kernel; a kernel that is named never does."""
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
    ("device", "operand_options", "implementation", "words"),
    [
        (CARD, {"dtype": "float32"}, None, "cudnn bfloat16 float16 float32"),
        (CARD, {}, "auto:window=5", "cudnn window"),
        (AbstractDevice("Tesla T4", None, "gpu"), {}, None, "cudnn Ampere Tesla T4"),
        (AbstractDevice("NVIDIA GeForce RTX 2080 Ti", None, "gpu"), {}, None, "cudnn Ampere 2080"),
        (TPU, {"size": 80}, None, "flash_tpu size 80 64 128"),
    ],
    ids=["a dtype", "a window", "an old card", "an old desktop card", "a size"],
)
def test_a_fallback_gives_its_reason(device, operand_options, implementation, words):
    with jax.sharding.use_abstract_mesh(mesh(device)):
        choice = choose_implementation(*shapes(**operand_options), implementation=implementation)
    assert choice.name == "chunked"
    assert has_line_with_words(choice.reason, words)


def test_cards_of_other_makers_use_chunked_attention():
    with jax.sharding.use_abstract_mesh(mesh(AbstractDevice("AMD Instinct MI300X", None, "rocm"))):
        assert choose_implementation(*shapes()).name == "chunked"


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_cudnn_refuses_inexact_configurations(change, message):
    operand_options = {key: change[key] for key in ("dtype", "size") if key in change}
    options = {key: value for key, value in change.items() if key not in operand_options}
    with jax.sharding.use_abstract_mesh(mesh(CARD)), pytest.raises(NotImplementedError, match=f"cudnn .*{message}"):
        choose_implementation(*shapes(**operand_options), implementation="cudnn", **options)


@pytest.fixture
def card_without_cudnn(monkeypatch):
    """Simulate a GPU on which JAX's own formula replaces cuDNN's kernel."""
    requested = []
    formula = jax.nn.dot_product_attention

    def attend_by_formula(*arguments, implementation, **options):
        requested.append(implementation)
        return formula(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend_by_formula)
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


def test_cudnn_attention_is_lowered_to_one_call(monkeypatch):
    """Lower for CUDA without a GPU: the program calls cuDNN's kernel, and has no matrix of scores."""
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
def test_a_text_names_an_implementation_and_a_window(text, expected):
    assert AttentionConfig.of(text) == AttentionConfig(*expected)


@pytest.mark.parametrize("text", ["auto:window=", "auto:window=x", "chunked:window=3,window=4", "auto:window=-3"])
def test_a_window_that_is_not_a_number_is_refused(text):
    with pytest.raises(WanjaxError, match=line_with_words("window number tokens window=4096")):
        AttentionConfig.parse(text)


@pytest.mark.parametrize("name", ["auto", "chunked", "reference"])
def test_a_window_in_the_text_applies_unless_the_call_has_one(name):
    q, k, v = operands(1, 40, 40, 2, 2, 16)
    out = attention(q, k, v, implementation=f"{name}:window=5")
    assert error(out, exact(q, k, v, window=(5, 5))) <= BOUND["float32"]
    wider = attention(q, k, v, implementation=f"{name}:window=5", window=9)
    assert error(wider, exact(q, k, v, window=(9, 9))) <= BOUND["float32"]
