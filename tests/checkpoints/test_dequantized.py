# SPDX-License-Identifier: Apache-2.0
"""8-bit weights with scales, with every published name and shape of the scales: dequantized to within one rounding."""

import json
import shutil
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import wanjax
from tests.support.comfy_files import block_scales, convrot, json_bytes, per_row
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import Tensors, load_safetensors, save_safetensors
from wanjax.checkpoints.pieces import widen
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

ROUNDING = 2.0**-4  # the relative error of a number with three mantissa bits
SMALLEST = 2.0**-10  # half the distance between numbers is_near 0, in units of the scale
SHAPES = [(192, 384), (256, 256), (160, 256), (256, 96)]


def weight(shape):
    """Return a weight with rows and columns of very different magnitudes."""
    random = np.random.default_rng(0)
    x = random.normal(size=shape) * np.exp(random.normal(size=(shape[0], *(1 for _ in shape[1:]))))
    return (x * np.exp(np.linspace(-1, 1, shape[-1]))).astype(np.float32)


def per_tensor(x):
    return block_scales(x, *x.shape)


def per_row_vector(x):
    scale, full_scale = per_row(x)
    return scale[:, 0], full_scale


def groups_with_axis(x):
    scale, full_scale = block_scales(x, 1, 32)
    return scale[..., None], full_scale


def groups(x):
    return block_scales(x, 1, 32)


def blocks_of_128(x):
    return block_scales(x, 128, 128)


def blocks_of_32(x):
    return block_scales(x, 32, 32)


def one_element(x):
    scale, full_scale = per_tensor(x)
    return scale.reshape(1), full_scale


def scalar(x):
    scale, full_scale = per_tensor(x)
    return scale.reshape(()), full_scale


LAYOUTS = [
    per_tensor,
    one_element,
    scalar,
    per_row,
    per_row_vector,
    groups_with_axis,
    groups,
    blocks_of_128,
    blocks_of_32,
]


def quantize(name, x, layout, scale_name="weight_scale", values_name="weight", dtype=ml_dtypes.float8_e4m3fn):
    """Return the tensors of a quantized weight, and its scale for every number."""
    scale, full_scale = layout(x)
    return {f"{name}.{values_name}": (x / full_scale).astype(dtype), f"{name}.{scale_name}": scale}, full_scale


def is_near(result, x, full_scale):
    return (np.abs(result - x) <= np.abs(x) * ROUNDING + full_scale * SMALLEST).all()


@pytest.mark.parametrize("scale_name", ["scale_weight", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_name_and_shape_of_a_scale_is_dequantized(shape, layout, scale_name):
    x = weight(shape)
    tensors, full_scale = quantize("a.b", x, layout, scale_name)
    bias = np.ones(shape[0], np.float32)
    reader = DequantizedReader(Tensors(tensors | {"a.b.bias": bias}))
    assert set(reader.specs) == {"a.b.weight", "a.b.bias"}
    assert reader.specs["a.b.weight"] == (shape, np.dtype(np.float32))
    assert is_near(reader.read("a.b.weight"), x, full_scale)
    np.testing.assert_array_equal(reader.read("a.b.bias"), bias)


def test_a_kernel_has_a_scale_for_each_row():
    x = weight((8, 3, 1, 2, 2))
    full_scale = np.abs(x).max((1, 2, 3, 4), keepdims=True) / 448
    for shape in ((8,), (8, 1), (8, 1, 1, 1, 1)):
        tensors = {
            "p.weight": (x / full_scale).astype(ml_dtypes.float8_e4m3fn),
            "p.weight_scale": full_scale.reshape(shape),
        }
        assert is_near(DequantizedReader(Tensors(tensors)).read("p.weight"), x, full_scale)


@pytest.mark.parametrize(
    "other_tensors",
    [
        {"a.input_scale": np.ones((), np.float32)},
        {"a.scale_input": np.ones(1, np.float32), "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn)},
        {
            "a.comfy_quant": json_bytes(format="float8_e4m3fn", full_precision_matrix_mult=True),
            "x.scaled_fp8": np.zeros(2),
        },
        {"a.comfy_quant": json_bytes(format="float8_e4m3fn_rowwise", group_size=None)},
    ],
)
@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.uint8])
def test_other_tensors_of_a_scale_are_ignored(other_tensors, stored):
    x = weight((192, 384))
    tensors, full_scale = quantize("a", x, per_row_vector)
    tensors = tensors | other_tensors
    if stored is np.uint8 and "a.comfy_quant" in other_tensors:  # then only the tensor `comfy_quant` names the format
        tensors["a.weight"] = tensors["a.weight"].view(np.uint8)
    reader = DequantizedReader(Tensors(tensors))
    assert list(reader.specs) == ["a.weight"]
    assert is_near(reader.read("a.weight"), x, full_scale)


@pytest.mark.parametrize("layout", [per_tensor, scalar, per_row, per_row_vector, groups, blocks_of_128])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_of_lightx2v_become_bfloat16(shape, layout):
    """`int8_weight` replaces the weight and becomes bfloat16. The scale's shape says which numbers share a scale."""
    x = weight(shape)
    scale, full_scale = layout(x)
    scale, full_scale = np.asarray(scale * np.float32(3.5)), full_scale * np.float32(3.5)  # 128 steps in place of 448
    bias, norm = np.ones(shape[0], np.float32), np.ones(5, np.float32)
    integers = np.clip(np.round(x / full_scale), -128, 127).astype(np.int8)
    assert np.abs(integers.astype(int)).max() >= 127
    reader = DequantizedReader(
        Tensors({"a.int8_weight": integers, "a.scale": scale, "a.bias": bias, "norm.scale": norm})
    )
    assert set(reader.specs) == {"a.weight", "a.bias", "norm.scale"}
    assert reader.specs["a.weight"] == (shape, np.dtype(ml_dtypes.bfloat16))
    result = reader.read("a.weight")
    np.testing.assert_array_equal(result, (integers * full_scale).astype(ml_dtypes.bfloat16))
    assert (np.abs(result.astype(np.float32) - x) <= 2**-8 * np.abs(x) + full_scale).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", [per_tensor, scalar, one_element, per_row, per_row_vector, groups])
@pytest.mark.parametrize("name", ["weight_scale", "scale_weight"])
def test_integers_under_the_name_of_the_weight_are_dequantized(name, layout, dtype):
    """The formats of LightX2V and compressed-tensors: the weight is the product of integers and scale."""
    x = weight((192, 384))
    scale, _ = layout(x)
    scale = np.asarray(scale * np.float32(3.5), dtype)
    expanded = scale.astype(np.float32) if scale.size == 1 else scale.astype(np.float32).reshape(-1, 1)
    expanded = expanded if scale.shape[1:] != (12,) else np.repeat(scale.astype(np.float32), 32, 1)
    integers = np.random.default_rng(0).integers(-128, 128, x.shape).astype(np.int8)
    marker = {"scaled_fp8": np.zeros(2, ml_dtypes.float8_e4m3fn)} if name == "scale_weight" else {}
    reader = DequantizedReader(
        Tensors({"a.weight": integers, f"a.{name}": scale, "a.bias": np.ones(192, np.float32)} | marker)
    )
    assert reader.specs == {"a.weight": ((192, 384), np.float32), "a.bias": ((192,), np.float32)}
    np.testing.assert_array_equal(reader.read("a.weight"), integers * expanded)


QUANTO = ("weight._data", "weight._scale")
TORCHAO = [(f"{weight}qdata", f"{weight}scale") for weight in ("_weight_", "weight_", "weight:")]


@pytest.mark.parametrize("layout", [per_tensor, scalar, per_row, per_row_vector, groups, blocks_of_128, blocks_of_32])
@pytest.mark.parametrize("names", [QUANTO, *TORCHAO])
@pytest.mark.parametrize("shape", SHAPES)
def test_floats_and_integers_of_quanto_and_torchao_are_dequantized(shape, names, layout):
    x = weight(shape)
    scale, full_scale = layout(x)
    values_name, scale_name = (f"a.{name}" for name in names)
    other_tensors = {"a.bias": np.ones(3, np.float32), "a.input_scale": np.ones((), np.float32)}
    other_tensors |= {"a.output_scale": np.ones((), np.float32)}
    reader = DequantizedReader(
        Tensors({values_name: (x / full_scale).astype(ml_dtypes.float8_e4m3fn), scale_name: scale} | other_tensors)
    )
    assert list(reader.specs) == ["a.weight", "a.bias"]
    assert reader.specs["a.weight"] == (shape, np.dtype(np.float32))
    assert is_near(reader.read("a.weight"), x, full_scale)
    scale, full_scale = np.asarray(scale * np.float32(3.5)), full_scale * np.float32(3.5)  # 128 steps in place of 448
    integers = np.clip(np.round(x / full_scale), -128, 127).astype(np.int8)
    result = DequantizedReader(Tensors({values_name: integers, scale_name: scale})).read("a.weight")
    np.testing.assert_array_equal(result, integers * full_scale)
    assert (np.abs(result - x) <= 1.01 * full_scale).all()


@pytest.mark.parametrize("layout", [per_tensor, per_row, groups])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_with_a_zero_point_are_dequantized(shape, layout):
    """Each group of a weight has its own range, and 0 is anywhere in it."""
    x = weight(shape) + 1
    count, _ = layout(x)
    zero = np.random.default_rng(1).integers(-100, 100, count.shape).astype(np.int8)
    scale, full_scale = layout(x)
    expanded = expand(zero, x.shape)
    integers = np.clip(np.round(x / (full_scale * 16)) + expanded, -128, 127).astype(np.int8)
    tensors = {"a._weight_qdata": integers, "a._weight_scale": scale * 16, "a._weight_zero_point": zero}
    reader = DequantizedReader(Tensors(tensors))
    assert list(reader.specs) == ["a.weight"]
    np.testing.assert_array_equal(reader.read("a.weight"), (integers - expanded.astype(np.float32)) * (full_scale * 16))


def expand(x, shape):
    """Repeat each number over its part of an array of this shape."""
    return np.repeat(np.repeat(x, shape[0] // x.shape[0], 0), shape[1] // x.shape[1], 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_integers_with_the_scale_of_127_are_dequantized(shape):
    x = weight(shape)
    largest = np.abs(x).max(1)
    integers = np.round(x / largest[:, None] * 127).astype(np.int8)
    tensors = {"a.weight": integers, "a.SCB": largest, "a.weight_format": np.zeros((), np.uint8)}
    reader = DequantizedReader(Tensors(tensors))
    assert list(reader.specs) == ["a.weight"]
    assert (np.abs(reader.read("a.weight") - x) <= largest[:, None] / 127).all()


TORCHAO_TENSORS = {"a._weight_qdata": np.ones((4, 8), np.int8), "a._weight_scale": np.ones((4, 1), np.float32)}


SCB = {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.ones(4, np.float32)}
INT8 = {"a.int8_weight": np.ones((160, 96), np.int8), "a.scale": np.ones((2, 1), np.float32)}
FLOAT8 = {"a.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn), "a.weight_scale": np.ones((), np.float32)}
REFUSED = [  # tensors, and the words of the message
    *[  # the formats of other quantizers
        ({"a.weight._data._data": np.ones((2, 8), np.uint8)}, "a.weight._data._data quanto 4 floats"),
        ({"a.weight._data": np.ones((4, 8), np.int8)}, "a.weight._data a.weight._scale"),
        ({"a.weight._data": np.ones((4, 8), np.uint8), "a.weight._scale": np.ones((4, 1), np.float32)}, "uint8 8-bit"),
        ({"a.weight._data": np.ones((4, 8), np.int8), "a.weight._scale": np.ones((1, 8), np.float32)}, "[1, 8] [4, 8]"),
        ({"a.weight": np.ones((16, 1), np.uint8), "a.weight.absmax": np.ones(1)}, "a.weight.absmax bitsandbytes 4"),
        ({"a.weight": np.ones((16, 1), np.uint8)}, "a.weight uint8 scale"),
        ({"a.weight": np.ones((4, 8), np.int8)}, "a.weight int8 scale"),
        ({"a.weight": np.ones((4, 8), np.float32), "a.SCB": np.ones(4, np.float32)}, "a.weight float32 integers"),
        (
            TORCHAO_TENSORS | {"a._weight_zero_point": np.ones((4, 1), np.float32)},
            "a._weight_zero_point float32 integers",
        ),
        (TORCHAO_TENSORS | {"a._weight_zero_point": np.ones((2, 1), np.int8)}, "a._weight_zero_point [2, 1] [4, 1]"),
        (TORCHAO_TENSORS | {"a._weight_qdata": np.ones((4, 8), np.int32)}, "a._weight_qdata int32 8-bit"),
        (TORCHAO_TENSORS | {"a._weight_act_pre_scale": np.ones(8)}, "a._weight_act_pre_scale torchao"),
        ({"a._weight_scale_and_zero": np.ones(8), "a._weight_qdata": np.ones((4, 4), np.int32)}, "torchao floats"),
        ({"a.qweight": np.ones((4, 1), np.int32)}, "a.qweight 4"),
        (
            {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.ones(4), "a.weight_format": np.ones(())},
            "a.weight_format 0",
        ),
    ],
    *(
        (INT8 | change, words)
        for change, words in [
            ({"a.scale": np.ones((3, 1), np.float32)}, "a.scale [3, 1] a.int8_weight [160, 96]"),
            ({"a.scale": np.ones((), np.int32)}, "a.int8_weight int8 int32"),
            ({"a.int8_weight": np.ones((160, 96), np.int16)}, "a.int8_weight int16 8-bit integers"),
            ({"a.weight": np.ones((160, 96), np.float32)}, "a.int8_weight a.weight"),
            ({"a.scale": None}, "a.int8_weight scale"),
        ]
    ),
    *(
        (FLOAT8 | change, words)
        for change, words in [
            ({"a.weight_scale": np.ones(8, np.float32)}, "a.weight_scale [8] [4, 8]"),
            ({"a.weight_scale": np.ones((1, 8), np.float32)}, "[1, 8]"),
            ({"a.weight_scale": np.ones((4, 3), np.float32)}, "[4, 3]"),
            ({"a.weight_scale": np.ones((4, 2, 2), np.float32)}, "[4, 2, 2]"),
            ({"a.weight_scale": np.ones((8, 1), np.float32)}, "[8, 1]"),
            ({"a.weight_scale": np.ones(0, np.float32)}, "[0]"),
            ({"a.weight_scale": np.ones((), np.int32)}, "a.weight_scale int32"),
            ({"a.scale_weight": np.ones((), np.float32)}, "a.weight_scale a.scale_weight one"),
            ({"a.weight": np.ones((4, 8), np.uint8)}, "a.weight uint8"),
            ({"a.comfy_quant": json_bytes(format="nvfp4")}, "a.comfy_quant nvfp4 float8_e4m3fn"),
            ({"a.comfy_quant": json_bytes(format="mxfp8")}, "a.weight [4, 8] mxfp8 32"),
            ({"a.comfy_quant": json_bytes(format="int8_tensorwise")}, "int8_tensorwise float8_e4m3fn"),
            ({"a.comfy_quant": json_bytes(format="convrot_w4a4")}, "convrot_w4a4"),
            ({"a.comfy_quant": json_bytes(format="float8_e5m2")}, "float8_e5m2 float8_e4m3fn"),
            ({"a.comfy_quant": json_bytes(format="float8_e4m3fn", convrot=True)}, "convrot"),
            ({"a.comfy_quant": json_bytes(bits=8)}, "a.comfy_quant JSON"),
            ({"a.comfy_quant": np.full(5, 255, np.uint8)}, "a.comfy_quant JSON"),
            ({"a.comfy_quant": np.zeros(10_000, np.uint8)}, "a.comfy_quant JSON"),
            ({"a.weight_scale": np.array([1, 1, np.nan, 1], np.float32)}, "a.weight_scale"),
        ]
    ),
]


@pytest.mark.parametrize(("tensors", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_other_formats_are_refused(tensors, words):
    with pytest.raises(WanjaxError) as caught:
        DequantizedReader(Tensors({key: x for key, x in tensors.items() if x is not None})).read("a.weight")
    assert has_line_with_words(str(caught.value), words)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


NAME_PAIRS = [("weight_scale", "weight"), QUANTO[::-1], TORCHAO[0][::-1]]


def test_a_folder_of_quantized_weights_is_loaded_and_converted(checkpoint, tmp_path):
    """Layers of a transformer and of a text encoder, by the names of diffusers and transformers."""
    folder = shutil.copytree(checkpoint, tmp_path / "eight")
    for file in ("transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        tensors, count = {}, 0
        for key, x in load_safetensors(folder / file).items():
            is_quantized = x.ndim == 2 and key.endswith(".weight") and "shared" not in key and "bias" not in key
            names, layout, count = NAME_PAIRS[count % 3], LAYOUTS[count % 5], count + is_quantized
            module, x = key.removesuffix(".weight"), np.asarray(x)
            tensors |= quantize(module, x, layout, *names)[0] if is_quantized else {key: x}
        assert count > 5
        save_safetensors(folder / file, tensors)
    ConversionToWanjax(open_source(folder), tmp_path / "converted", NETWORKS).run()
    original, *quantised_pipes = (wanjax.load(path) for path in (checkpoint, folder, tmp_path / "converted"))
    for name in ("transformer", "text_encoder"):
        expected = modules.parameters(getattr(original, name))
        for pipe in quantised_pipes:
            result = modules.parameters(getattr(pipe, name))
            assert result.keys() == expected.keys()
            for key, x in expected.items():
                error = np.abs(np.asarray(result[key]) - np.asarray(x))
                assert (error <= np.abs(x) * ROUNDING + np.abs(x).max() / 448 * SMALLEST).all(), key
        jax.tree.map(
            np.testing.assert_array_equal, *(modules.parameters(getattr(pipe, name)) for pipe in quantised_pipes)
        )


@pytest.mark.parametrize("names", NAME_PAIRS[1:])
def test_a_file_of_quantized_weights_is_recognised(names, checkpoint, tmp_path):
    """The tensors that identify a transformer have other names here."""
    tensors, expected = {}, load_safetensors(checkpoint / "transformer/diffusion_pytorch_model.safetensors")
    for key, x in expected.items():
        is_quantized = x.ndim == 2 and key.endswith(".weight")
        tensors |= (
            quantize(key.removesuffix(".weight"), np.asarray(x), per_row_vector, *names)[0]
            if is_quantized
            else {key: x}
        )
    save_safetensors(tmp_path / "wan.safetensors", {f"model.diffusion_model.{key}": x for key, x in tensors.items()})
    weights = open_source(tmp_path / "wan.safetensors")["transformer"].weights()
    assert set(weights.specs) == set(expected)
    assert "condition_embedder.time_proj.weight" not in tensors


@pytest.mark.parametrize("method", ["nunchaku_lite", "gguf", None, 7])
def test_an_unsupported_quantizer_of_a_config_is_refused(method, checkpoint, tmp_path):
    """An unsupported method is named before weights are read; for others, the tensors suffice."""
    folder = shutil.copytree(checkpoint, tmp_path / "eight")
    config = json.loads((folder / "transformer/config.json").read_text())
    message = {"quantization_config": {"quant_method": method}}
    (folder / "transformer/config.json").write_text(json.dumps(config | message))
    if method is None:
        assert wanjax.load(folder).transformer is not None
        return
    with pytest.raises(WanjaxError) as refused:
        wanjax.load(folder)
    assert has_line_with_words(str(refused.value), f"transformer's config.json {method} floats")


@pytest.mark.parametrize("in_metadata", [False, True])
@pytest.mark.parametrize("layout", [per_row, per_tensor, scalar])
@pytest.mark.parametrize(("shape", "group"), [((96, 512), 256), ((64, 192), 64), ((8, 1024), 1024)])
def test_rotated_integers_are_dequantized(shape, group, layout, in_metadata):
    """ConvRot: within one rounding to bfloat16 of the rule in float64, and near the weight that was rounded."""
    x = weight(shape)
    tensors, entries, exact = convrot("model.a", x, group, layout, per_row=layout is per_row)
    reader: Any = Tensors(tensors | ({} if in_metadata else {"model.a.comfy_quant": json_bytes(**entries)}))
    if in_metadata:
        reader.metadata = {
            "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"model.a": entries}})
        }
    dequantized = DequantizedReader(reader)
    assert dequantized.specs == {"model.a.weight": (shape, np.dtype(np.float32))}
    result = dequantized.read("model.a.weight")
    np.testing.assert_allclose(result, exact, rtol=2**-9, atol=1e-6 * np.abs(exact).max())
    as_loaded = result.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert (np.abs(as_loaded - exact) <= 2**-8 * np.abs(exact) + 1e-6 * np.abs(exact).max()).all()
    assert np.linalg.norm(result - x) < (0.01 if layout is per_row else 0.04) * np.linalg.norm(x)


def test_integers_that_were_not_rotated_are_dequantized():
    x = weight((64, 160))  # 256 does not divide 160
    scale, full_scale = per_row(x)
    integers = np.clip(np.round(x / full_scale / 3.5), -128, 127).astype(np.int8)
    tensors = {"a.weight": integers, "a.weight_scale": scale, "a.comfy_quant": json_bytes(format="int8_tensorwise")}
    reader = DequantizedReader(Tensors(tensors))
    np.testing.assert_array_equal(reader.read("a.weight"), integers * scale)


ROTATED, ENTRIES, _ = convrot("a", weight((64, 512)), 256)
BLOCKS = {"a.weight": np.zeros((64, 64), ml_dtypes.float8_e4m3fn), "a.weight_scale": np.zeros((128, 4), np.uint8)}
HALVES = {"a.weight": np.zeros((64, 32), np.uint8), "a.weight_scale": np.zeros((128, 4), ml_dtypes.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("tensors", "entries", "words"),
    [
        (ROTATED, ENTRIES | {"convrot_groupsize": 100}, "convrot_groupsize 100 int8_tensorwise"),
        (ROTATED, ENTRIES | {"convrot_groupsize": 1024}, "a.weight [64, 512] 1024"),
        (ROTATED, ENTRIES | {"convrot_groupsize": "256"}, "convrot_groupsize"),
        (ROTATED, ENTRIES | {"convrot": "yes"}, "convrot"),
        (ROTATED, ENTRIES | {"mystery": 1}, "mystery"),
        (ROTATED | {"a.weight_scale": None}, ENTRIES, "a.weight int8_tensorwise a.weight_scale"),
        (
            BLOCKS | {"a.weight_scale": np.zeros((64, 2), np.uint8)},
            {"format": "mxfp8"},
            "a.weight_scale [64, 2] [128, 4]",
        ),
        (BLOCKS | {"a.weight_scale": np.full((128, 4), 255, np.uint8)}, {"format": "mxfp8"}, "a.weight_scale finite"),
        (BLOCKS | {"a.weight_scale": None}, {"format": "mxfp8"}, "a.weight a.weight_scale"),
        (HALVES, {"format": "nvfp4"}, "a.weight nvfp4 a.weight_scale_2"),
        (HALVES | {"a.weight_scale_2": np.ones(4, np.float32)}, {"format": "nvfp4"}, "a.weight_scale_2"),
    ],
)
def test_layers_that_contradict_their_format_are_refused(tensors, entries, words):
    named = tensors | {"a.comfy_quant": json_bytes(**entries)}
    present = {key: x for key, x in named.items() if x is not None}
    with pytest.raises(WanjaxError) as caught:
        DequantizedReader(Tensors(present)).read("a.weight")
    assert has_line_with_words(str(caught.value), words)
    assert "\n" not in str(caught.value)


def nvfp4(module, x):
    """Round a weight to NVFP4 in ModelOpt's layout; return its tensors, and the dequantized weight in float64."""
    rows = x.reshape(len(x), -1, 16)
    tensor_scale = np.float32(np.abs(x).max() / (6 * 448))
    scales = (np.abs(rows).max(-1) / 6 / tensor_scale).astype(ml_dtypes.float8_e4m3fn)
    factors = scales.astype(np.float64) * tensor_scale
    numbers = (rows / factors[..., None]).astype(ml_dtypes.float4_e2m1fn)
    codes = numbers.view(np.uint8).reshape(x.shape)
    tensors = {
        f"{module}.weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": np.asarray(tensor_scale),
        f"{module}.input_scale": np.asarray(0.01, np.float32),
    }
    return tensors, (numbers.astype(np.float64) * factors[..., None]).reshape(x.shape)


@pytest.mark.parametrize("shape", [(5, 48), (96, 512)])
def test_nvfp4_of_modelopt_is_dequantized(shape):
    x = weight(shape)
    tensors, exact = nvfp4("blocks.0.attn1.to_q", x)
    reader = DequantizedReader(Tensors(tensors | {"norm.weight": np.ones(3, np.float32)}))
    assert reader.specs == {
        "blocks.0.attn1.to_q.weight": (shape, np.dtype(np.float32)),
        "norm.weight": ((3,), np.dtype(np.float32)),
    }
    np.testing.assert_allclose(reader.read("blocks.0.attn1.to_q.weight"), exact, rtol=1e-6)
    assert np.linalg.norm(exact - x) < 0.2 * np.linalg.norm(x)


@pytest.mark.slow
def test_nvfp4_of_the_modelopt_library_is_dequantized():
    """NVIDIA's library quantizes and dequantizes the weight for comparison.

    It needs `pip install nvidia-modelopt omegaconf pulp`.
    """
    library = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="needs nvidia-modelopt")
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(weight((96, 512)))
    numbers, scales, tensor_scale = library.NVFP4QTensor.quantize(x, 16)
    read = numbers.dequantize(torch.float32, scale=scales, double_scale=tensor_scale, block_sizes={-1: 16})
    stored = {
        "a.weight": numbers._quantized_data.numpy(),
        "a.weight_scale": scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        "a.weight_scale_2": tensor_scale.numpy(),
    }
    np.testing.assert_array_equal(DequantizedReader(Tensors(stored)).read("a.weight"), read.numpy())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight_scale": np.ones((5, 2), ml_dtypes.float8_e4m3fn)}, "a.weight_scale [5, 2] [5, 48] nvfp4 [5, 3]"),
        ({"a.weight_scale": np.full((5, 3), np.nan, ml_dtypes.float8_e4m3fn)}, "a.weight_scale finite"),
        ({"a.weight_scale_2": np.ones(2, np.float32)}, "a.weight_scale_2 one number"),
        ({"a.weight_scale_2": None}, "a.weight uint8"),
        ({"a.pre_quant_scale": np.ones(48, np.float32)}, "a.pre_quant_scale ModelOpt"),
        ({"a.svdquant_lora_a": np.ones((4, 48), np.float32)}, "a.svdquant_lora_a ModelOpt"),
    ],
)
def test_invalid_nvfp4_of_modelopt_is_refused(change, words):
    tensors = {key: x for key, x in (nvfp4("a", weight((5, 48)))[0] | change).items() if x is not None}
    with pytest.raises(WanjaxError) as caught:
        DequantizedReader(Tensors(tensors)).read("a.weight")
    assert has_line_with_words(str(caught.value), words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, ml_dtypes.bfloat16])
def test_every_number_is_widened_like_numpy(kind):
    """In arrays of odd length, with strides, and transposed."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).view(kind)
    square = numbers[: 180 * 180].reshape(180, 180)
    for x in (numbers, numbers[:3], square[:, ::3], square.T):
        out = np.zeros(x.shape, np.float32)
        widen(x, out)
        np.testing.assert_array_equal(out, x.astype(np.float32))


def test_broken_formats_in_the_metadata_are_refused():
    reader: Any = Tensors(FLOAT8)
    for text in ("{", "[]", '{"layers": 3}', '{"layers": {"a": 3}}'):
        reader.metadata = {"_quantization_metadata": text}
        with pytest.raises(WanjaxError, match=r"get the file again$"):
            DequantizedReader(reader)


@pytest.mark.parametrize("shape", [(96, 512), (320, 768), (128, 64)])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "int8_tensorwise"])
def test_formats_of_the_comfy_kitchen_library_are_dequantized(kind, shape):
    """Comfy-Org's library quantizes the weight, and dequantizes it in float32 for comparison."""
    library = pytest.importorskip("comfy_kitchen")
    torch = pytest.importorskip("torch")
    from comfy_kitchen.backends.eager import quantization as plain

    x = torch.from_numpy(weight(shape))
    entries = {"format": kind}
    if kind == "int8_tensorwise":
        group = 256 if shape[1] % 256 == 0 else 64
        layout = library.tensor.TensorWiseINT8Layout
        numbers, params = layout.quantize(x, per_channel=True, convrot=True, convrot_groupsize=group)
        tensors = {"": numbers, "_scale": params.scale}
        expected = plain.dequantize_int8_convrot_weight(numbers, params.scale, group)
        entries |= {"convrot": True, "convrot_groupsize": group}
    elif kind == "mxfp8":
        numbers, params = library.tensor.TensorCoreMXFP8Layout.quantize(x)
        tensors = {"": numbers.view(torch.uint8), "_scale": params.scale.view(torch.uint8)}
        expected = plain.dequantize_mxfp8(numbers, params.scale, torch.float32)
    else:
        numbers, params = library.tensor.TensorCoreNVFP4Layout.quantize(x)
        tensors = {"": numbers, "_scale": params.block_scale.view(torch.uint8), "_scale_2": params.scale}
        expected = plain.dequantize_nvfp4(numbers, params.scale, params.block_scale, torch.float32)
    stored = {f"a.weight{name}": x.numpy() for name, x in tensors.items()}
    reader = DequantizedReader(Tensors(stored | {"a.comfy_quant": json_bytes(**entries)}))
    assert reader.specs == {"a.weight": (shape, np.dtype(np.float32))}
    largest = float(expected.abs().max())
    np.testing.assert_allclose(reader.read("a.weight"), expected.numpy(), rtol=1e-6, atol=1e-6 * largest)
    assert np.linalg.norm(reader.read("a.weight") - x.numpy()) < 0.2 * np.linalg.norm(x)
