# SPDX-License-Identifier: Apache-2.0
"""Stored arrays: Orbax reads them, they are restored with any sharding, and messages name faults."""

import json
import math
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support.arrays import save
from tests.support.devices import most_bytes_on_a_device, nbytes_on_each, on_eight_devices
from tests.support.words import has_line_with_words
from wanjax.checkpoints import arrays as store
from wanjax.checkpoints import modules
from wanjax.checkpoints.arrays import OrbaxCheckpoint, StoredArray, Writer, chunk_shape
from wanjax.checkpoints.files import Spec
from wanjax.errors import WanjaxError
from wanjax.layers.placement import axes_of
from wanjax.models.t5 import UMT5_XXL, T5Encoder

TENSORS = {
    "blocks.q.kernel": np.arange(6 * 16 * 24, dtype=np.float32).reshape(6, 16, 24),
    "blocks.q.bias": np.linspace(-1, 1, 6 * 24).reshape(6, 24).astype(ml_dtypes.bfloat16),
    "levels.0.gamma": np.zeros(5, np.float32),  # the format omits chunks of zeros by default
    "scalar": np.array(7.0, np.float16),
}
STACKED = ("blocks.q.kernel", "blocks.q.bias")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write the tensors, each in several chunks."""
    monkeypatch.setattr(store, "MAX_CHUNK_BYTES", 1 << 10)
    specs = {name: Spec(x.shape, x.dtype) for name, x in TENSORS.items()}
    chunks = {name: chunk_shape(spec, name in STACKED) for name, spec in specs.items()}
    arrays = OrbaxCheckpoint.create(tmp_path / "w", specs, chunks)
    with Writer() as writer:
        for name, x in TENSORS.items():
            for piece in arrays[name].chunk_slices():
                writer.write(arrays[name], piece, np.asarray(x[piece]))
    return tmp_path / "w"


def error_message(read, *args):
    """Return the message with which `read` fails."""
    with pytest.raises(WanjaxError) as caught:
        read(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(
    st.lists(st.integers(1, 50), max_size=4).map(tuple),
    st.sampled_from([np.float32, np.int8, ml_dtypes.bfloat16]),
    st.booleans(),
)
def test_chunks_cover_an_array_and_are_small(shape, dtype, stacked):
    spec = Spec(shape, np.dtype(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MAX_CHUNK_BYTES", 256)
        chunk = chunk_shape(spec, stacked and bool(shape))
    assert len(chunk) == len(shape)
    assert all(1 <= size <= total for size, total in zip(chunk, shape, strict=True))
    assert math.prod(chunk) * spec.dtype.itemsize <= 256


def test_a_chunk_of_a_stack_is_complete_blocks_or_a_part_of_one():
    large, small = Spec((40, 5120, 13824), np.dtype(np.float32)), Spec((40, 5120), np.dtype(np.float32))
    assert chunk_shape(large, True)[0] == 1
    assert chunk_shape(small, True) == (40, 5120)
    assert chunk_shape(Spec((30, 1536, 256), np.dtype(np.float32)), True) == (10, 1536, 256)


def test_arrays_are_read_as_written(folder):
    arrays = OrbaxCheckpoint(folder)
    assert arrays.specs.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert arrays.specs[name] == Spec(x.shape, x.dtype)
        assert arrays.read(name).tobytes() == x.tobytes()
    np.testing.assert_array_equal(arrays["blocks.q.kernel"][3], TENSORS["blocks.q.kernel"][3])
    part = arrays["blocks.q.kernel"].read((slice(1, 5), slice(3, 9), slice(None)), np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(part, TENSORS["blocks.q.kernel"][1:5, 3:9].astype(ml_dtypes.bfloat16))
    assert len(list(arrays["blocks.q.kernel"].chunk_slices())) > 6
    assert {path for path in folder.rglob("*") if path.is_file()} == arrays.files()


def test_orbax_reads_stored_arrays(folder):
    """Orbax's checkpointer restores the tree and the values."""
    tree = {
        "blocks": {"q": {name: TENSORS[f"blocks.q.{name}"] for name in ("kernel", "bias")}},
        "levels": {"0": {"gamma": TENSORS["levels.0.gamma"]}},
        "scalar": TENSORS["scalar"],
    }
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, tree)
    flat = {".".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(restored)}
    assert flat.keys() == TENSORS.keys()
    for name, x in flat.items():
        assert np.asarray(x).tobytes() == TENSORS[name].tobytes()


def test_on_one_cpu_an_array_needs_no_extra_memory(folder, monkeypatch):
    buffers = []
    aligned_empty = store.aligned_empty
    monkeypatch.setattr(store, "aligned_empty", lambda *args: buffers.append(aligned_empty(*args)) or buffers[-1])
    [weights] = (
        OrbaxCheckpoint(folder).restore({"blocks.q.kernel": jax.ShapeDtypeStruct((6, 16, 24), jnp.bfloat16)}).values()
    )
    assert len(buffers) == 1
    assert weights.unsafe_buffer_pointer() == buffers[0].ctypes.data


def last_chunk(folder, name="blocks.q.kernel"):
    return sorted((folder / name / "c").rglob("*"))[-1]


def test_a_flipped_byte_is_detected_at_any_read(folder):
    file = last_chunk(folder)
    contents = bytearray(file.read_bytes())
    contents[20] ^= 1
    file.write_bytes(contents)
    array = StoredArray(folder / "blocks.q.kernel")
    for read in (array.read, array.digest):
        assert f"{folder / 'blocks.q.kernel'} is damaged" in error_message(read)
    array.read([slice(0, 1)])  # another chunk


@pytest.mark.parametrize("size", [None, 0, 3, 100])
def test_a_truncated_or_missing_chunk_is_detected(folder, size):
    last_chunk(folder).unlink() if size is None else os.truncate(last_chunk(folder), size)
    array = StoredArray(folder / "blocks.q.kernel")
    assert has_line_with_words(error_message(array.read), "blocks.q.kernel damaged")
    assert not all(array.is_written(piece) for piece in array.chunk_slices())


def test_a_digest_depends_on_values_shape_and_dtype(folder):
    digests = {name: OrbaxCheckpoint(folder)[name].digest() for name in TENSORS}
    assert digests == {name: OrbaxCheckpoint(folder)[name].digest() for name in TENSORS}
    assert len(set(digests.values())) == len(TENSORS)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tree_metadata": {"a": {}}}', '{"tree_metadata": []}', "[" * 100_000, None]
)
def test_a_broken_tree_is_named(folder, text):
    (folder / "_METADATA").unlink() if text is None else (folder / "_METADATA").write_text(text)
    assert has_line_with_words(error_message(OrbaxCheckpoint, folder), f"{folder / '_METADATA'}")


@pytest.mark.parametrize("name", ["../x", "/etc", "a/b", "", "a..b", "\x1b"])
def test_a_tree_cannot_name_an_array_outside_its_folder(folder, name):
    tree = {"tree_metadata": {"x": {"key_metadata": [{"key": name, "key_type": 2}]}}}
    (folder / "_METADATA").write_text(json.dumps(tree))
    assert repr(name) in error_message(OrbaxCheckpoint, folder)


LARGE = {"name": "regular", "configuration": {"chunk_shape": [1 << 40] * 3}}


@pytest.mark.parametrize("key", ["shape", "chunk_grid", "data_type", "codecs"])
@pytest.mark.parametrize("value", [None, 7, [1 << 62] * 3, LARGE])
def test_broken_metadata_of_an_array_is_named(folder, key, value):
    file = folder / "blocks.q.kernel" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {key: value}))
    if key == "shape" and isinstance(value, list):  # the shape is valid, though no model has it
        return
    assert str(file.parent) in error_message(StoredArray, file.parent)


CONFIG = replace(
    UMT5_XXL, vocab_size=64, width=32, heads=8, head_dim=4, mlp_dim=64, layers=3, buckets=8, max_distance=16
)


def encoder():
    return T5Encoder(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def test_arrays_of_one_device_are_restored_on_eight_and_back(tmp_path):
    """The values are equal on the requested shards; no device ever holds more than its shards and one tensor."""
    model = encoder()
    save(model, tmp_path / "one")
    on_eight_devices(
        "from tests.checkpoints.test_arrays import restore_on_eight_devices; restore_on_eight_devices()", tmp_path
    )
    again = modules.restore(nnx.eval_shape(encoder), OrbaxCheckpoint(tmp_path / "eight"))
    for name, x in modules.parameters(model).items():
        assert np.asarray(modules.parameters(again)[name]).tobytes() == np.asarray(x).tobytes()


COLUMNS = {"vocab": "tp", "embed": None, "heads": "tp", "mlp": "tp", "layers": None}
ROWS = {"vocab": None, "embed": "tp", "heads": ("dp",), "mlp": "dp", "layers": None}


def sharded_encoder(sizes, rules):
    """Return the encoder as shapes with shardings."""
    mesh = jax.make_mesh(sizes, ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))

    def with_sharding(weight):
        x = weight.get_value()
        spec = PartitionSpec(*(rules.get(axis) for axis in axes_of(weight) or ()))
        return weight.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)))

    graphdef, state = nnx.split(nnx.eval_shape(encoder))
    return nnx.merge(
        graphdef, nnx.from_flat_state([(path, with_sharding(leaf)) for path, leaf in nnx.to_flat_state(state)])
    )


def restore_on_eight_devices():
    import sys
    from pathlib import Path

    folder = Path(sys.argv[1])
    abstract = sharded_encoder((2, 4), COLUMNS)
    targets = modules.parameters(abstract)
    shards = sum(map(nbytes_on_each, targets.values()))
    largest = max(x.size * x.dtype.itemsize for x in targets.values())
    assert shards < 0.6 * sum(x.size * x.dtype.itemsize for x in targets.values())
    held_bytes = []
    model = modules.restore(
        abstract, OrbaxCheckpoint(folder / "one"), progress=lambda *_: held_bytes.append(most_bytes_on_a_device())
    )
    assert max(held_bytes) <= shards + largest
    for name, x in modules.parameters(model).items():
        assert x.sharding == targets[name].sharding
        assert np.asarray(x).tobytes() == OrbaxCheckpoint(folder / "one").read(name).tobytes()
    save(model, folder / "eight")
    restored = modules.restore(sharded_encoder((4, 2), ROWS), OrbaxCheckpoint(folder / "eight"))
    for name, x in modules.parameters(restored).items():
        assert np.asarray(x).tobytes() == np.asarray(modules.parameters(model)[name]).tobytes()
