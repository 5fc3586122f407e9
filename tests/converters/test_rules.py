# SPDX-License-Identifier: Apache-2.0
"""Weight rules: exact inverses, complete assignments, and weights with the module's dtypes and shardings."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support.compilations import compilations
from tests.support.devices import most_bytes_on_a_device, nbytes_on_each, on_eight_devices
from tests.support.words import has_line_with_words
from wanjax.checkpoints import modules, to_devices
from wanjax.checkpoints.files import SafetensorsFile, Tensors, aligned_empty
from wanjax.converters import weight_rules
from wanjax.converters.weight_rules import (
    CONV,
    IDENTITY,
    TRANSPOSE,
    WeightRule,
    conv,
    linear,
    norm,
    patches,
    rope_halves,
    squeeze,
)
from wanjax.errors import WanjaxError
from wanjax.layers.placement import axes_of, with_axes
from wanjax.layers.stack import stack

sizes = st.integers(1, 5)


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def transforms(draw):
    """Draw a function that makes a transform, and a source shape for it."""
    patch = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    heads, half = draw(sizes), draw(sizes)
    rest = tuple(draw(st.lists(sizes, max_size=2)))
    c, o = draw(sizes), draw(sizes)
    return draw(
        st.sampled_from(
            [
                (lambda: IDENTITY, rest),
                (lambda: TRANSPOSE, (o, c)),
                (lambda: CONV, (o, c, *patch)),
                (lambda: patches(patch), (o, c, *patch)),
                (lambda: rope_halves(heads), (heads * half * 2, *rest)),
                (lambda: rope_halves(heads) >> TRANSPOSE, (heads * half * 2, c)),
                (lambda: squeeze(1, 2, 3), (c, 1, 1, 1)),
                (lambda: squeeze(0), (1, o, c)),
                (lambda: squeeze(2, 3) >> TRANSPOSE, (o, c, 1, 1)),
            ]
        )
    )


@given(transforms())
def test_a_transform_has_an_exact_inverse_and_correct_shapes(case):
    make, shape = case
    transform = make()
    x = numbered(shape)
    y = transform.forward(x)
    np.testing.assert_array_equal(transform.inverse(y), x)
    assert transform.shape(shape) == y.shape
    assert transform.source_shape(y.shape) == shape


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (TRANSPOSE, (4,)),
        (CONV, ()),
        (patches((1, 2, 2)), (8, 3, 2, 2, 1)),
        (rope_halves(3), (8,)),
        (squeeze(1), (4, 2)),
    ],
)
def test_a_transform_does_not_apply_to_other_shapes(transform, shape):
    assert transform.shape(shape) is None


def test_transposes_and_convolutions_agree_with_their_definitions():
    w = numbered((4, 3, 2, 5, 6))
    assert CONV.forward(w)[1, 4, 5, 2, 3] == w[3, 2, 1, 4, 5]
    assert TRANSPOSE.forward(w[:, :, 0, 0, 0])[2, 3] == w[3, 2, 0, 0, 0]


def test_patches_gives_the_kernel_of_flattened_patches():
    """Compare the dense layer on a patch, flattened channel last, with the convolution on that patch."""
    rng = np.random.default_rng(0)
    w, patch = rng.normal(size=(7, 3, 1, 2, 2)), rng.normal(size=(1, 2, 2, 3))  # [E C pt ph pw], [pt ph pw C]
    np.testing.assert_allclose(
        patch.reshape(-1) @ patches((1, 2, 2)).forward(w), np.einsum("ecthw,thwc->e", w, patch), rtol=1e-12
    )


def test_rope_halves_moves_interleaved_pairs_half_a_head_apart():
    y = rope_halves(2).forward(np.arange(12))
    np.testing.assert_array_equal(y, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11])


class Block(nnx.Module):
    def __init__(self, *, param_dtype, rngs):
        axes = with_axes(nnx.initializers.lecun_normal(), ("embed", "heads"))
        self.q = nnx.Linear(6, 8, kernel_init=axes, param_dtype=param_dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(8, param_dtype=param_dtype, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, *, param_dtype=jnp.float32, rngs):
        self.blocks = stack(lambda rngs: Block(param_dtype=param_dtype, rngs=rngs), 3, rngs)
        self.levels = nnx.List(
            [nnx.Conv(2, 3, (2, 2), param_dtype=param_dtype, rngs=rngs) for _ in range(2)],
        )
        self.patch = nnx.Linear(12, 6, use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.table = nnx.Param(jnp.zeros((6, 4), jnp.float32))


RULES = [
    *linear("blocks.{i}.attn.to_q", "blocks.q", rows=rope_halves(2)),
    *norm("blocks.{i}.norm_q", "blocks.norm", rows=rope_halves(2)),
    *conv("levels.{j}.conv", "levels.{j}"),
    WeightRule("patch_embedding.weight", "patch.kernel", patches((1, 2, 2)), aliases=("tied.weight",)),
    WeightRule("scale_shift_table", "table", squeeze(0)),
]
SHAPES = {
    **{f"blocks.{i}.attn.to_q.weight": (8, 6) for i in range(3)},
    **{f"blocks.{i}.attn.to_q.bias": (8,) for i in range(3)},
    **{f"blocks.{i}.norm_q.weight": (8,) for i in range(3)},
    **{f"levels.{j}.conv.weight": (3, 2, 2, 2) for j in range(2)},
    **{f"levels.{j}.conv.bias": (3,) for j in range(2)},
    "patch_embedding.weight": (6, 3, 1, 2, 2),
    "scale_shift_table": (1, 6, 4),
}


class RecordingTensors(Tensors):
    """A checkpoint in memory that records the keys read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.keys_read = []

    def read(self, key):
        self.keys_read.append(key)
        return super().read(key)


def checkpoint(dtype=np.float32, **changed):
    rng = np.random.default_rng(0)
    tensors = {key: rng.normal(size=shape).astype(dtype) for key, shape in SHAPES.items()}
    return RecordingTensors({key: value for key, value in (tensors | changed).items() if value is not None})


def abstract_model(param_dtype=jnp.float32):
    return nnx.eval_shape(lambda: Model(param_dtype=param_dtype, rngs=nnx.Rngs(0)))


def test_load_fills_stacks_and_lists_and_leaves_the_abstract_module_unchanged():
    source, shapes = checkpoint(), abstract_model()
    model = modules.load(shapes, RULES, source)
    q = source.tensors["blocks.1.attn.to_q.weight"]
    np.testing.assert_array_equal(model.blocks.q.kernel[1], q[[0, 2, 1, 3, 4, 6, 5, 7]].T)
    np.testing.assert_array_equal(
        model.levels[1].kernel[...], source.tensors["levels.1.conv.weight"].transpose(2, 3, 1, 0)
    )
    np.testing.assert_array_equal(model.table[...], source.tensors["scale_shift_table"][0])
    assert axes_of(model.blocks.q.kernel) == ("layers", "embed", "heads")
    assert isinstance(shapes.blocks.q.kernel.get_value(), jax.ShapeDtypeStruct)
    assert sorted(source.keys_read) == sorted(SHAPES)  # each tensor is read once


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
def test_load_casts_to_the_dtype_of_each_parameter(dtype, param_dtype):
    source = checkpoint(dtype)
    model = modules.load(abstract_model(param_dtype), RULES, source)
    assert model.levels[0].kernel.dtype == param_dtype
    assert model.table.dtype == jnp.float32  # this one is float32 whatever the dtype of the others
    expected = source.tensors["levels.0.conv.bias"].astype(param_dtype)
    np.testing.assert_array_equal(np.asarray(model.levels[0].bias[...]), expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_export_inverts_load_bit_for_bit(dtype, tmp_path):
    source = checkpoint(dtype, scale_shift_table=np.ones((1, 6, 4), np.float32))
    model = modules.load(abstract_model(dtype), RULES, source)
    modules.export(model, RULES, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = SafetensorsFile(tmp_path / "model.safetensors")
    assert written.metadata == {"format": "pt"}
    assert set(written.specs) == set(SHAPES)
    for key, tensor in source.tensors.items():
        assert written.read(key).dtype == tensor.dtype
        assert written.read(key).tobytes() == tensor.tobytes()


def test_progress_counts_the_bytes_of_the_checkpoint():
    seen = []
    source = checkpoint(np.float16)
    modules.load(abstract_model(), RULES, source, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    assert len(seen) == len(SHAPES)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(1, 20)),
    dtypes=st.tuples(*[st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])] * 2),
    axes=st.permutations(range(3)),
)
def test_rearranging_in_pieces_equals_a_plain_copy(shape, dtypes, axes):
    x = np.linspace(-3, 3, np.prod(shape)).astype(dtypes[0]).reshape(shape).transpose(axes)
    out = np.zeros(x.shape, dtypes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_devices, "COPY_BYTES", 1 << 12)
        to_devices.rearrange(x, out)
    assert out.tobytes() == np.ascontiguousarray(x.astype(dtypes[1])).tobytes()


def error_message(source, rules=RULES, **options):
    with pytest.raises(WanjaxError) as caught:
        modules.load(abstract_model(), rules, source, **options)
    return str(caught.value)


def test_assigning_needs_only_shapes():
    sources = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    assignments = weight_rules.assign(RULES, sources, modules.parameters(abstract_model()))
    assert sorted(key for each in assignments for key in each.sources) == sorted(SHAPES)


def test_all_errors_are_listed_at_once_and_nothing_is_read():
    source = checkpoint(
        **{
            "blocks.0.attn.to_q.weight": None,
            "blocks.1.attn.to_q.weight": None,
            "scale_shift_table": None,
            "levels.1.conv.bias": np.zeros(4, np.float32),
            "patch_embedding.weight": np.zeros((6, 3, 1, 2, 2), np.int8),
            **{f"blocks.{i}.extra": np.zeros(1, np.float32) for i in (3, 5, 6, 7)},
            "lone": np.zeros(1, np.float32),
        }
    )
    message = error_message(source)
    assert "missing: blocks.{0-1}.attn.to_q.weight, scale_shift_table;" in message
    assert has_line_with_words(message, "unused blocks.{3,5-7}.extra lone")
    assert has_line_with_words(message, "levels.1.conv.bias [4] [3]")
    assert has_line_with_words(message, "patch_embedding.weight int8 float32")
    assert "\n" not in message
    assert not source.keys_read


ENDLESS = [f"{name}.{'9' * 5000}.x" for name in "ab"] + [f"a.{'9' * 5000}.y"]  # large numbers are only parts of keys
FILLED_TWICE = [*RULES[:-1], WeightRule("levels.0.conv.bias", "table")]
NOT_FILLED = "parameters filled one rule table"
ERRORS = [  # tensors added to the checkpoint, the rules, and words of the message
    ({"blocks.2.attn.to_q.weight": np.zeros((6, 8), np.float32)}, RULES, "blocks.2.attn.to_q.weight [6, 8] [8, 6]"),
    ({"blocks.0.norm_added_q.weight": np.zeros(8, np.float32)}, RULES, "unused blocks.0.norm_added_q.weight"),
    (dict.fromkeys(ENDLESS, np.zeros(1, np.float32)), RULES, " ".join(["unused", *ENDLESS])),
    ({}, FILLED_TWICE, "twice levels.0.conv.bias"),
    ({}, RULES[:-1], NOT_FILLED),
    ({}, [*RULES, WeightRule("other", "table")], NOT_FILLED),
]


@pytest.mark.parametrize(("tensors", "rules", "words"), ERRORS)
def test_the_message_names_the_tensor_or_the_parameters(tensors, rules, words):
    assert has_line_with_words(error_message(checkpoint(**tensors), rules), words)


def test_two_stacked_placeholders_are_refused():
    with pytest.raises(ValueError, match="only one placeholder"):
        weight_rules.assign([WeightRule("a.{i}.b.{j}", "a")], {}, {"a": jax.ShapeDtypeStruct((2, 2), jnp.float32)})


def test_unused_keys_can_be_ignored_by_pattern():
    source = checkpoint(**{"blocks.0.norm_added_q.weight": np.zeros(8, np.float32)})
    modules.load(abstract_model(), RULES, source, ignore=["*.norm_added_q.*"])


@pytest.mark.parametrize("both", [False, True])
def test_a_tied_tensor_is_read_by_both_names(both):
    tied = checkpoint().tensors["patch_embedding.weight"]
    source = checkpoint(**{"tied.weight": tied, "patch_embedding.weight": tied if both else None})
    model = modules.load(abstract_model(), RULES, source)
    expected = patches((1, 2, 2)).forward(tied)
    np.testing.assert_array_equal(model.patch.kernel[...], expected)


def test_weights_on_one_cpu_use_the_buffer_into_which_they_are_read():
    """JAX uses the buffer into which a parameter is read, so it needs no more memory."""
    buffers = []

    def recording_empty(shape, dtype):
        buffers.append(aligned_empty(shape, dtype))
        return buffers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_devices, "aligned_empty", recording_empty)
        model = modules.load(abstract_model(), RULES, checkpoint())
    addresses = [buffer.ctypes.data for buffer in buffers]
    assert model.blocks.q.kernel.get_value().unsafe_buffer_pointer() in addresses
    assert model.patch.kernel.get_value().unsafe_buffer_pointer() in addresses


def test_only_a_large_stack_for_accelerators_is_loaded_by_block():
    def fits(platform, size):
        sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
        return to_devices._fits_in_host_memory(
            SimpleNamespace(sharding=sharding, size=size, dtype=np.dtype(ml_dtypes.bfloat16))
        )

    max_size = to_devices.SMALL_STACK // 2
    assert fits("tpu", max_size)
    assert not fits("tpu", max_size + 1)
    assert fits("cpu", max_size + 1)


def test_weights_are_loaded_onto_their_shards():
    """Each parameter has the requested sharding and the values of one device, with both ways to load it."""
    load_both_ways = "[load_onto_a_mesh(way) for way in ('assembled', 'block_by_block')]"
    on_eight_devices(f"from tests.converters.test_rules import load_onto_a_mesh; {load_both_ways}")


def load_onto_a_mesh(way):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))
    specs = {
        "blocks.q.kernel": (None, None, "tp"),
        "blocks.q.bias": (None, "tp"),
        "blocks.norm.scale": (None, ("dp", "tp")),
        "table": (None, "tp"),
        "patch.kernel": ("dp",),
    }
    graphdef, state = nnx.split(abstract_model())

    def with_sharding(path, leaf):
        spec = PartitionSpec(*specs.get(".".join(map(str, path)), ()))
        target = leaf.get_value()
        return leaf.replace(jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=NamedSharding(mesh, spec)))

    flat = [(path, with_sharding(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
    sharded = nnx.merge(graphdef, nnx.from_flat_state(flat))
    targets = modules.parameters(sharded)
    host_shapes, device_bytes, source = [], [], checkpoint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            to_devices, "aligned_empty", lambda shape, dtype: host_shapes.append(shape) or aligned_empty(shape, dtype)
        )
        patch.setattr(to_devices, "_fits_in_host_memory", lambda target: way == "assembled")
        model = modules.load(sharded, RULES, source, progress=lambda *_: device_bytes.append(most_bytes_on_a_device()))
        with compilations() as compiled:
            modules.load(sharded, RULES, source)
    assert compiled == []  # equal stacks share their programs
    assert sorted(source.keys_read) == sorted([*SHAPES, *SHAPES])  # each tensor is read once
    weights_by_path = modules.parameters(model)
    largest = max(x.size * x.dtype.itemsize for x in targets.values())
    assert max(device_bytes) <= sum(map(nbytes_on_each, targets.values())) + largest
    on_one_device = modules.parameters(modules.load(abstract_model(), RULES, checkpoint()))
    shards = {"assembled": (3, 6, 2), "block_by_block": (6, 2)}  # of a stack, and of a block
    assert set(shards.values()) & set(host_shapes) == {shards[way]}
    assert not {(3, 6, 8), (6, 8)} & set(host_shapes)  # no whole stack or block on the host
    for path, weights in weights_by_path.items():
        assert weights.sharding == NamedSharding(mesh, PartitionSpec(*specs.get(path, ()))), (path, weights.sharding)
        np.testing.assert_array_equal(weights, on_one_device[path])
