# SPDX-License-Identifier: Apache-2.0
"""Every implementation of sparse-linear attention, and its gradients, follow the published rule in float64."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.attention import normal, operands
from tests.support.compare import error
from tests.support.configs import TRANSFORMER
from tests.support.devices import MESHES, SHARDED_RULES
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels.attention import (
    AUTO,
    AttentionConfig,
    Projection,
    SparseLinearAttentionConfig,
    attention,
    sparse_linear_attention,
    sparse_linear_kernel,
)
from wanjax.kernels.attention.sparse_linear_tpu import Config
from wanjax.layers.rope import rope_3d
from wanjax.models.wan.transformer import SelfAttention, WanTransformer
from wanjax.pipelines.model import with_attention
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import compile_program
from wanjax.pricing.lowering import replicated
from wanjax.pricing.pallas_kernels import kernel_calls
from wanjax.registry import presets
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, use_partitioner

BOUND = {"float32": 2e-6, "bfloat16": 3e-3}
SMALL = SparseLinearAttentionConfig(0.3, 32, 16)


def softmax(x):
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def published_rule(*arguments: Any) -> np.ndarray:
    """Compute the published rule in float64, block by block. Means are rounded to the operands' dtype."""
    q, k, v, projection, sparse = arguments
    dtype, (length, heads, size) = q.dtype, q.shape[1:]
    q, k, v, kernel, bias = (np.asarray(x, np.float64) for x in (q, k, v, *projection))
    out = np.zeros(q.shape)
    for example, head in np.ndindex(len(q), heads):
        head_q, head_k, head_v = (x[example, :, head] for x in (q, k, v))
        sizes = (head_q, sparse.block_q), (head_k - head_k.mean(axis=0), sparse.block_kv)
        means = [
            np.array([x[start : start + block].mean(axis=0) for start in range(0, length, block)]) for x, block in sizes
        ]
        scores = np.matmul(np.asarray(means[0].astype(dtype), np.float64), means[1].astype(dtype).T)
        count = max(1, int(sparse.top * scores.shape[1]))
        for row, best_blocks in enumerate(np.argsort(-scores, axis=1, kind="stable")[:, :count]):
            selected = np.isin(np.arange(length) // sparse.block_kv, best_blocks)
            rows = slice(row * sparse.block_q, (row + 1) * sparse.block_q)
            out[example, rows, head] = softmax(head_q[rows] @ head_k[selected].T / size**0.5) @ head_v[selected]
        softmax_q, softmax_k = softmax(head_q), softmax(head_k)
        linear = softmax_q @ (softmax_k.T @ head_v) / (1e-5 + softmax_q @ softmax_k.sum(axis=0))[:, None]
        out[example, :, head] += linear @ kernel + bias
    return out


def projection(size, dtype="float32"):
    return Projection(0.2 * normal(7, size, size, dtype=dtype), normal(8, size, dtype=dtype))


def run(name, *operands_and_sparse: Any, **options):
    q, k, v, weights, sparse = operands_and_sparse
    static = {"sparse": sparse, "implementation": name, **options}
    return jax.jit(lambda *arguments: sparse_linear_attention(*arguments, **static))(q, k, v, weights)


NAMES = ("reference", "chunked")  # these implementations take blocks of any size
TOPS = (0.05, 0.15, 0.6, 1.0)
CASES = [(name, top, dtype) for name in NAMES for top in TOPS for dtype in BOUND]
QUICK = [("reference", 0.15, "float32"), ("chunked", 0.05, "float32"), ("chunked", 0.6, "bfloat16")]


@pytest.mark.parametrize(("name", "top", "dtype"), quick(QUICK, CASES))
def test_attention_follows_the_published_rule(name, top, dtype):
    """Lengths fill neither the last block of queries nor that of keys."""
    q, k, v = operands(2, 333, 333, 3, 3, 32, dtype)
    sparse, weights = SparseLinearAttentionConfig(top, 32, 16), projection(32, dtype)
    assert error(run(name, q, k, v, weights, sparse), published_rule(q, k, v, weights, sparse)) <= BOUND[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_large_logits_stay_exact(name):
    """Logits have a standard deviation of 196."""
    q, k, v = operands(1, 333, 333, 2, 2, 32)
    q, k = 14 * q, 14 * k
    weights = projection(32)
    assert error(run(name, q, k, v, weights, SMALL), published_rule(q, k, v, weights, SMALL)) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_first_of_equal_blocks_is_selected(name):
    """Keys are whole numbers and repeat, so that scores are exact and three blocks have equal scores."""
    random = np.random.default_rng(3)
    q, k = (jnp.asarray(random.integers(-4, 5, (1, 256, 2, 16)), jnp.float32) for _ in range(2))
    k = k.at[:, 128:].set(k[:, :128]).at[:, 16:32].set(k[:, :16])
    v, weights = normal(4, 1, 256, 2, 16), projection(16)
    for top in (0.05, 0.3, 0.7):
        sparse = SparseLinearAttentionConfig(top, 32, 16)
        assert error(run(name, q, k, v, weights, sparse), published_rule(q, k, v, weights, sparse)) <= BOUND["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_attention_to_all_blocks_is_dense_attention(name):
    q, k, v = operands(1, 150, 150, 2, 2, 32)
    zero_projection = Projection(jnp.zeros((32, 32)), jnp.zeros(32))
    out = run(name, q, k, v, zero_projection, SparseLinearAttentionConfig(1.0, 32, 16))
    assert error(out, attention(q, k, v, implementation="reference")) <= BOUND["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_at_least_one_block_is_attended_to(name):
    q, k, v = operands(1, 5, 5, 1, 1, 16)
    weights = projection(16)
    assert error(run(name, q, k, v, weights, SMALL), published_rule(q, k, v, weights, SMALL)) <= BOUND["float32"]
    assert [SparseLinearAttentionConfig(0.15).top_k(keys) for keys in (1, 400, 32_760, 75_600)] == [1, 1, 76, 177]


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    q, k, v = operands(2, 150, 150, 2, 2, 16)
    padded = [x.at[:, 131:].set(1e4) for x in (q, k, v)]
    weights = projection(16)
    out = run(name, *padded, weights, SMALL, kv_length=131)
    assert error(out[:, :131], published_rule(*(x[:, :131] for x in (q, k, v)), weights, SMALL)) <= BOUND["float32"]
    assert np.isfinite(np.asarray(out)).all()


def gradients(name, arguments, g, sparse, keys=None):
    def gradients_of_inputs(*arguments):
        run = partial(sparse_linear_attention, sparse=sparse, kv_length=keys, implementation=name)
        return jax.vjp(run, *arguments)[1](g)

    return jax.tree.leaves(jax.jit(gradients_of_inputs)(*arguments))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("bfloat16", 6e-3)])
def test_gradients_equal_those_of_the_reference(dtype, bound):
    """The gradients equal those that JAX derives for the reference; padding has no gradient."""
    q, k, v = operands(2, 150, 150, 2, 2, 32, dtype)
    options, g = (q, k, v, projection(32, dtype)), normal(9, *q.shape, dtype=dtype)
    expected = gradients("reference", options, g, SMALL, 131)
    for gradient, expected_gradient in zip(gradients("chunked", options, g, SMALL, 131), expected, strict=True):
        assert error(gradient, np.asarray(expected_gradient, np.float64)) <= bound
        assert gradient.shape[1:2] != (150,) or not np.asarray(gradient[:, 131:], np.float32).any()


SHARDED = [(axes, rules, heads) for axes in MESHES for rules in SHARDED_RULES for heads in (3, 4)]
QUICK_SHARDED = [((1, 1, 8), "fsdp", 3), ((2, 2, 2), "tp", 4), ((1, 4, 2), "fsdp", 4)]


@pytest.mark.parametrize(("axes", "rules", "heads"), quick(QUICK_SHARDED, SHARDED))
def test_several_devices_give_the_result_of_one(axes, rules, heads):
    """The result and all gradients equal those of one device, also if the mesh divides neither heads nor tokens."""
    q, k, v = operands(2, 99, 99, heads, heads, 16)
    options, g = (q, k, v, projection(16)), normal(9, *q.shape)
    one_device = [run(None, *options, SMALL), *gradients(None, options, g, SMALL)]
    with use_partitioner(Partitioner(make_mesh(*axes), SHARDING_RULES[rules])):
        eight_devices = [run(None, *options, SMALL), *gradients(None, options, g, SMALL)]
    for output, expected in zip(eight_devices, one_device, strict=True):
        assert error(output, np.asarray(expected, np.float64)) <= BOUND["float32"]


def test_a_text_names_sparse_linear_attention():
    assert AttentionConfig.parse("sla") == AttentionConfig(sparse=SparseLinearAttentionConfig(0.1, 128, 64))
    config = AttentionConfig.parse("sla:top=0.25,block_q=8,block_kv=4")
    assert config == AttentionConfig(sparse=SparseLinearAttentionConfig(0.25, 8, 4))
    for requested in (AttentionConfig.parse("sla"), config, AttentionConfig.parse("sla:top=1")):
        assert AttentionConfig.parse(str(requested)) == requested
        assert not requested.is_dense
        assert not requested.supports_ring
        assert requested.dense_only() == AttentionConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sla:top=0", "top=0.0 1"),
        ("sla:top=nan", "top=nan 1"),
        ("sla:top=1.1", "top=1.1 1"),
        ("sla:top=much", "'top=much' top=0.1"),
        ("sla:0.1", "'0.1' top=0.1"),
        ("sla:top=.1,top=.2", "top=0.1"),
        ("sla:block_q=1.5", "block_q=1.5 block_q=128"),
        ("sla:block_kv=0", "block_kv=0 1"),
        ("sla:window=9", "window=9 top=0.1"),
        ("slab", "'slab' sla radial"),
    ],
)
def test_invalid_texts_are_refused(text, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        AttentionConfig.parse(text)


def make_call(change: Any = lambda q, k, v, weights: (q, k, v, weights), sparse=SMALL, **options):
    """Return a call of attention with changed operands or options."""
    arguments = (*operands(1, 64, 64, 2, 2, 16), projection(16))
    return lambda: sparse_linear_attention(*change(*arguments), sparse=sparse, **options)


REFUSED_CALLS = [
    (make_call(lambda q, k, v, weights: (q, k[:, :32], v[:, :32], weights)), ""),
    (make_call(lambda q, k, v, weights: (q, k, v, projection(8))), ""),
    (make_call(kv_length=65), ""),
    (make_call(implementation="x"), ""),
    *((make_call(implementation=name, config=Config()), "") for name in NAMES),
    (lambda: attention(*operands(1, 64, 64, 2, 2, 16), implementation="sla"), "weights"),
    (lambda: run("tpu", *operands(1, 40, 40, 1, 1, 128), projection(128), SparseLinearAttentionConfig()), "TPUs"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED_CALLS)
def test_a_mismatch_of_operands_is_refused(call, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call()


KW = {"dtype": jnp.float32, "param_dtype": jnp.float32}
SPARSE_LINEAR_TRANSFORMER = replace(TRANSFORMER, sparse_linear=SparseLinearAttentionConfig())


def test_a_layer_of_sparse_linear_attention_starts_as_dense_attention():
    """The initial projection is zero: attention to all blocks is then dense attention. Other weights change it."""
    texts = ("auto", "sla:top=1", "sla:top=0.3,block_q=16,block_kv=8")
    layers: Any = (
        SelfAttention(SPARSE_LINEAR_TRANSFORMER, AttentionConfig.parse(x), **KW, rngs=nnx.Rngs(0)) for x in texts
    )
    dense_layer, full_layer, partial_layer = layers
    for layer in (full_layer, partial_layer):
        nnx.update(layer, nnx.state(dense_layer))
    x, rope = normal(1, 1, 96, TRANSFORMER.width), rope_3d((2, 6, 8), TRANSFORMER.rope_channels)
    forward = jax.jit(lambda layer: layer(x, rope)[0])
    expected = np.asarray(forward(dense_layer), np.float64)
    assert error(forward(full_layer), expected) <= 1e-5
    assert error(forward(partial_layer), expected) > 1e-3
    full_layer.proj_l.kernel[...] = normal(3, *full_layer.proj_l.kernel.shape)
    assert error(forward(full_layer), expected) > 1e-3


def test_a_sparse_linear_transformer_has_projection_weights():
    """Only such a transformer has weights of the projection, and it uses sparse-linear attention by default."""

    def transformer_of(config):
        return nnx.eval_shape(lambda: WanTransformer(config, **KW, rngs=nnx.Rngs(0)))

    assert transformer_of(SPARSE_LINEAR_TRANSFORMER).attention == AttentionConfig(sparse=SparseLinearAttentionConfig())
    dense, sparse = (
        nnx.to_flat_state(nnx.state(transformer_of(config))) for config in (TRANSFORMER, SPARSE_LINEAR_TRANSFORMER)
    )
    added_weights = dict(sparse).keys() - dict(dense).keys()
    assert {path[-1]: dict(sparse)[path].shape for path in added_weights} == {"kernel": (1, 24, 24), "bias": (1, 24)}
    latents = jax.ShapeDtypeStruct((1, 2, 12, 16, 6), jnp.float32)
    text, t = jax.ShapeDtypeStruct((1, 5, 40), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
    out = nnx.eval_shape(
        lambda network, *arguments: network(*arguments), transformer_of(SPARSE_LINEAR_TRANSFORMER), latents, t, text
    )
    assert out.shape == (1, 2, 12, 16, 16)


def test_a_dense_model_can_be_trained_with_sparse_linear_attention():
    """With `sla`, a dense model gets the projection; with any other attention, the model does not change."""
    model: Any = presets()["wan2.1-t2v-14b"].model
    requested = AttentionConfig.parse("sla:top=0.2")
    assert with_attention(model, requested, "wan").spec.resolve_attention(AUTO) == requested
    for name in ("auto", "radial", "chunked"):
        assert with_attention(model, AttentionConfig.parse(name), "wan") is model


@pytest.mark.parametrize("model", ["vace-14b", "causal", "cogvideox-2b", "hunyuanvideo1.5"])
def test_other_models_refuse_sparse_linear_attention(model):
    name = next(name for name in presets() if model in name)
    untrained: Any = presets()[name].model
    with pytest.raises(UnsupportedError, match=line_with_words("wan --attention auto")):
        with_attention(untrained, AttentionConfig.parse("sla"), "wan")


@pytest.mark.parametrize("requested", ["radial", "chunked", "auto:window=9"])
def test_a_model_trained_with_sparse_linear_attention_refuses_others(requested):
    model: Any = presets()["turbowan2.1-t2v-14b-480p"].model
    for allowed in ("auto", "sla", "sla:top=0.15"):
        assert with_attention(model, AttentionConfig.parse(allowed), "wan") is model
    with pytest.raises(UnsupportedError, match=line_with_words("wan --attention auto")):
        with_attention(model, AttentionConfig.parse(requested), "wan")


LOUD = 14.0  # logits of a standard deviation of 196
KERNEL_CASES = [
    ("float32", 0.8, 1.0, 3e-7, Config(2, interpret=True)),
    ("float32", 0.8, LOUD, 1e-5, Config(2, interpret=True)),
    ("bfloat16", 0.6, 1.0, 2e-3, Config(4, interpret=True)),
    ("bfloat16", 1.0, LOUD, 2e-3, Config(1, 1, interpret=True)),
]


@pytest.mark.parametrize(("dtype", "top", "gain", "bound", "config"), quick(KERNEL_CASES[::3], KERNEL_CASES))
def test_the_kernel_follows_the_published_rule(monkeypatch, dtype, top, gain, bound, config):
    """The tokens fill neither blocks nor grid steps, and padding follows them. Large logits are recomputed."""
    offset_raises: list[int] = []

    def count_and_set_offsets(*arguments, function=sparse_linear_kernel._set_offsets_to_max):
        jax.debug.callback(lambda: offset_raises.append(1))
        function(*arguments)

    monkeypatch.setattr(sparse_linear_kernel, "_set_offsets_to_max", count_and_set_offsets)
    q, k, v = operands(1, 470, 470, 2, 2, 128, dtype)
    arguments: Any = (*(x * jnp.asarray(gain, x.dtype) for x in (q, k)), v, projection(128, dtype))
    sparse = SparseLinearAttentionConfig(top)
    expected = published_rule(*(x[:, :450] for x in arguments[:3]), arguments[3], sparse)
    out = run("tpu", *arguments, sparse, kv_length=450, config=config)
    assert error(out[:, :450], expected) <= bound
    assert not np.asarray(out[:, 450:], np.float32).any()
    jax.effects_barrier()
    assert bool(offset_raises) == (gain == LOUD)


@pytest.mark.parametrize("num_kept", quick([130], [1, 130, 300]))
def test_blocks_with_equal_scores_are_listed_in_order(num_kept):
    """Equal scores are listed in their order. Scores include both zeros, both signs and very large numbers."""
    values = np.asarray([-1e30, -2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, 1e38], np.float32)
    random = np.random.default_rng(2)
    scores = random.choice(values, (140, 300))
    scores[7], scores[8] = 1.0, random.normal(size=300)
    sizes = sparse_linear_kernel.KernelSizes(1, 1, 1, 128, 64, num_kept, 4, 1)
    out = jax.jit(partial(sparse_linear_kernel.list_blocks, sizes=sizes, interpret=True))(scores)
    expected = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :num_kept], axis=1)
    assert (np.asarray(out)[:, :num_kept] == 64 * expected).all()


@pytest.mark.parametrize(
    ("options", "sparse", "words"),
    [
        ((64, "float32"), SparseLinearAttentionConfig(), "64"),
        ((128, "float16"), SparseLinearAttentionConfig(), "float16"),
        ((128, "bfloat16"), SMALL, "32 16"),
    ],
)
def test_operands_that_the_kernel_does_not_support_use_another(options, sparse, words):
    """If the kernel is named, it refuses the operands; if not, another implementation takes them."""
    size, dtype = options
    q, k, v = operands(1, 40, 40, 1, 1, size, dtype)
    with pytest.raises(UnsupportedError, match=line_with_words(words)):
        run("tpu", q, k, v, projection(size, dtype), sparse, config=Config(interpret=True))
    assert run(None, q, k, v, projection(size, dtype), sparse, config=Config(interpret=True)).dtype == q.dtype


def attend_small(mesh):
    """Lower the kernel for two examples of two heads on each device."""
    operands = [jax.ShapeDtypeStruct((2, 600, 2, 128), jnp.bfloat16)] * 3
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 128), (128,))]

    def run(q, k, v, kernel, bias):
        options = {
            "sparse": SparseLinearAttentionConfig(0.6),
            "kv_length": 580,
            "implementation": "tpu",
            "config": Config(2),
        }
        return sparse_linear_attention(q, k, v, Projection(kernel, bias), **options)

    return replicated(run, mesh, (*operands, *weights))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("chip", quick(["v6e-1"], ["v6e-1", "v5e-1", "v5p-8", "v7x-8"]))
def test_the_kernel_compiles_for_each_generation_of_tpu(chip):
    compiled = compile_program(attend_small(abstract_mesh(find_slice(chip))), chip)
    names = {call.name for call in kernel_calls(compiled).values()}
    assert names == {"sparse_linear_prepare", "sparse_linear_lists", "sparse_linear"}
