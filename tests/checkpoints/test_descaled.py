# SPDX-License-Identifier: Apache-2.0
"""8-bit weights with scales, in every published spelling and shape: at most one rounding from what they were."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import wanjax
from tests.support.tiny import tiny_checkpoint
from tests.support.words import says
from wanjax.checkpoints import modules
from wanjax.checkpoints.convert import ToWanjax
from wanjax.checkpoints.descaled import Descaled
from wanjax.checkpoints.files import Tensors, load_safetensors, save_safetensors
from wanjax.checkpoints.sources import open_source
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.networks import NETWORKS

ROUNDING = 2.0**-4  # of a number with three bits after the point, relative
SMALLEST = 2.0**-10  # half the distance of the numbers next to 0, in units of the scale
SHAPES = [(192, 384), (256, 256), (160, 256), (256, 96)]


def weight(shape):
    """Returns a weight whose rows, and parts of rows, are of very different sizes."""
    random = np.random.default_rng(0)
    x = random.normal(size=shape) * np.exp(random.normal(size=(shape[0], *(1 for _ in shape[1:]))))
    return (x * np.exp(np.linspace(-1, 1, shape[-1]))).astype(np.float32)


def largest(x, rows, columns):
    """Returns the largest number of each block of an array, and that array's shape filled with them."""
    out = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scale, filled = np.zeros(out, np.float32), np.zeros(x.shape, np.float32)
    for i in range(out[0]):
        for j in range(out[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = filled[block] = np.abs(x[block]).max() / 448
    return scale, filled


def per_tensor(x):
    return largest(x, *x.shape)


def per_row(x):
    return largest(x, 1, x.shape[1])


def flat(x):
    scale, filled = per_row(x)
    return scale[:, 0], filled


def parts(x):
    scale, filled = largest(x, 1, 32)
    return scale[..., None], filled


def without_axis(x):
    return largest(x, 1, 32)


def squares(x):
    return largest(x, 128, 128)


def small_squares(x):
    return largest(x, 32, 32)


def one(x):
    scale, filled = per_tensor(x)
    return scale.reshape(1), filled


def none(x):
    scale, filled = per_tensor(x)
    return scale.reshape(()), filled


LAYOUTS = [per_tensor, one, none, per_row, flat, parts, without_axis, squares, small_squares]


def eight_bits(name, x, layout, spelling="weight_scale", dtype=ml_dtypes.float8_e4m3fn):
    """Returns the tensors of a weight, and the sizes of its scale at every number."""
    scale, filled = layout(x)
    return {f"{name}.weight": (x / filled).astype(dtype), f"{name}.{spelling}": scale}, filled


def near(found, x, filled):
    return (np.abs(found - x) <= np.abs(x) * ROUNDING + filled * SMALLEST).all()


@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_and_shape(shape, layout, spelling):
    x = weight(shape)
    tensors, filled = eight_bits("a.b", x, layout, spelling)
    bias = np.ones(shape[0], np.float32)
    reader = Descaled(Tensors(tensors | {"a.b.bias": bias}))
    assert set(reader.keys()) == {"a.b.weight", "a.b.bias"}
    assert reader.spec("a.b.weight") == (shape, np.dtype(np.float32))
    assert near(reader.read("a.b.weight"), x, filled)
    np.testing.assert_array_equal(reader.read("a.b.bias"), bias)


def test_a_kernel_has_a_scale_for_each_row():
    x = weight((8, 3, 1, 2, 2))
    filled = np.abs(x).max((1, 2, 3, 4), keepdims=True) / 448
    for shape in ((8,), (8, 1), (8, 1, 1, 1, 1)):
        tensors = {"p.weight": (x / filled).astype(ml_dtypes.float8_e4m3fn), "p.weight_scale": filled.reshape(shape)}
        assert near(Descaled(Tensors(tensors)).read("p.weight"), x, filled)


def words_of(**told):
    return np.frombuffer(json.dumps(told).encode(), np.uint8)


@pytest.mark.parametrize(
    "beside",
    [
        {"a.input_scale": np.ones((), np.float32)},
        {"a.scale_input": np.ones(1, np.float32), "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn)},
        {
            "a.comfy_quant": words_of(format="float8_e4m3fn", full_precision_matrix_mult=True),
            "x.scaled_fp8": np.zeros(2),
        },
        {"a.comfy_quant": words_of(format="float8_e4m3fn_rowwise", group_size=None)},
    ],
)
@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.uint8])
def test_what_stands_beside_a_scale_is_left_out(beside, stored):
    x = weight((192, 384))
    tensors, filled = eight_bits("a", x, flat)
    tensors = tensors | beside
    if stored is np.uint8 and "a.comfy_quant" in beside:  # then the format is told there alone
        tensors["a.weight"] = tensors["a.weight"].view(np.uint8)
    reader = Descaled(Tensors(tensors))
    assert list(reader.keys()) == ["a.weight"]
    assert near(reader.read("a.weight"), x, filled)


@pytest.mark.parametrize("layout", [per_tensor, none, per_row, flat, without_axis, squares])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers(shape, layout):
    """They are in place of the weight, and become bfloat16; the scale's shape tells what it is for."""
    x = weight(shape)
    scale, filled = layout(x)
    scale, filled = np.asarray(scale * np.float32(3.5)), filled * np.float32(3.5)  # 128 steps in place of 448
    bias, norm = np.ones(shape[0], np.float32), np.ones(5, np.float32)
    whole = np.clip(np.round(x / filled), -128, 127).astype(np.int8)
    assert np.abs(whole.astype(int)).max() >= 127
    reader = Descaled(Tensors({"a.int8_weight": whole, "a.scale": scale, "a.bias": bias, "norm.scale": norm}))
    assert set(reader.keys()) == {"a.weight", "a.bias", "norm.scale"}
    assert reader.spec("a.weight") == (shape, np.dtype(ml_dtypes.bfloat16))
    found = reader.read("a.weight")
    np.testing.assert_array_equal(found, (whole * filled).astype(ml_dtypes.bfloat16))
    assert (np.abs(found.astype(np.float32) - x) <= 2**-8 * np.abs(x) + filled).all()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"a.scale": np.ones((3, 1), np.float32)}, "a.scale [3, 1] a.int8_weight [160, 96]"),
        ({"a.scale": np.ones((), np.int32)}, "a.int8_weight int8 int32"),
        ({"a.int8_weight": np.ones((160, 96), np.int16)}, "a.int8_weight int16 8-bit integers"),
        ({"a.weight": np.ones((160, 96), np.float32)}, "a.int8_weight a.weight"),
        ({"a.scale": None}, "a.int8_weight scale"),
        ({"a.comfy_quant": words_of(format="int8_tensorwise")}, "a.comfy_quant int8_tensorwise"),
    ],
)
def test_other_integers_are_one_sentence(change, what):
    tensors = {"a.int8_weight": np.ones((160, 96), np.int8), "a.scale": np.ones((2, 1), np.float32)} | change
    with pytest.raises(WanjaxError) as told:
        Descaled(Tensors({key: x for key, x in tensors.items() if x is not None}))
    assert says(str(told.value), what)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"a.weight_scale": np.ones(8, np.float32)}, "a.weight_scale [8] [4, 8]"),
        ({"a.weight_scale": np.ones((1, 8), np.float32)}, "[1, 8]"),
        ({"a.weight_scale": np.ones((4, 3), np.float32)}, "[4, 3]"),
        ({"a.weight_scale": np.ones((4, 2, 2), np.float32)}, "[4, 2, 2]"),
        ({"a.weight_scale": np.ones((8, 1), np.float32)}, "[8, 1]"),
        ({"a.weight_scale": np.ones(0, np.float32)}, "[0]"),
        ({"a.weight_scale": np.ones((), np.int32)}, "a.weight_scale int32"),
        ({"a.scale_weight": np.ones((), np.float32)}, "a.weight_scale a.scale_weight one"),
        ({"a.weight": np.ones((4, 8), np.int8)}, "a.weight int8"),
        ({"a.weight": np.ones((4, 8), np.uint8)}, "a.weight uint8"),
        ({"a.comfy_quant": words_of(format="nvfp4")}, "a.comfy_quant nvfp4 float8_e4m3fn"),
        ({"a.comfy_quant": words_of(format="mxfp8")}, "mxfp8"),
        ({"a.comfy_quant": words_of(format="float8_e5m2")}, "float8_e5m2 float8_e4m3fn"),
        ({"a.comfy_quant": words_of(format="float8_e4m3fn", convrot=True)}, "convrot"),
        ({"a.comfy_quant": words_of(bits=8)}, "a.comfy_quant JSON"),
        ({"a.comfy_quant": np.full(5, 255, np.uint8)}, "a.comfy_quant JSON"),
        ({"a.comfy_quant": np.zeros(10_000, np.uint8)}, "a.comfy_quant JSON"),
    ],
)
def test_anything_else_is_one_sentence(change, what):
    tensors = {"a.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn), "a.weight_scale": np.ones((), np.float32)}
    with pytest.raises(WanjaxError) as told:
        Descaled(Tensors(tensors | change))
    assert says(str(told.value), what)
    assert "\n" not in str(told.value)


def test_a_scale_that_is_not_finite_is_named():
    tensors = {"a.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn), "a.weight_scale": np.float32([1, 1, np.nan, 1])}
    with pytest.raises(WanjaxError, match=r"a\.weight_scale"):
        Descaled(Tensors(tensors)).read("a.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_a_folder_of_them_is_loaded_and_converted(checkpoint, tmp_path):
    """Layers of a transformer and of a text encoder, by the names of diffusers and transformers."""
    folder = shutil.copytree(checkpoint, tmp_path / "eight")
    for file in ("transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        tensors, count = {}, 0
        for key, x in load_safetensors(folder / file).items():
            chosen = x.ndim == 2 and key.endswith(".weight") and "shared" not in key and "bias" not in key
            layout, count = LAYOUTS[count % 5], count + chosen
            found = (
                eight_bits(key.removesuffix(".weight"), np.asarray(x), layout)[0] if chosen else {key: np.asarray(x)}
            )
            tensors |= found
        assert count > 5
        save_safetensors(folder / file, tensors)
    ToWanjax(open_source(folder), tmp_path / "converted", NETWORKS).run()
    whole, *others = (wanjax.load(path) for path in (checkpoint, folder, tmp_path / "converted"))
    for name in ("transformer", "text_encoder"):
        right = modules.parameters(getattr(whole, name))
        for pipe in others:
            found = modules.parameters(getattr(pipe, name))
            assert found.keys() == right.keys()
            for key, x in right.items():
                error = np.abs(np.asarray(found[key]) - np.asarray(x))
                assert (error <= np.abs(x) * ROUNDING + np.abs(x).max() / 448 * SMALLEST).all(), key
        jax.tree.map(np.testing.assert_array_equal, *(modules.parameters(getattr(pipe, name)) for pipe in others))
