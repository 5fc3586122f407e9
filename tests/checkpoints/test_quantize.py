# SPDX-License-Identifier: Apache-2.0
"""Weights rounded to 8 bits by `load` and by a conversion are equal bit for bit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import wanjax
from tests.support.conversion import checksums
from tests.support.devices import on_eight_devices
from tests.support.tiny import tiny_checkpoint, tiny_control_checkpoint, tiny_experts_checkpoint
from tests.support.words import line_with_words
from wanjax import WanjaxError
from wanjax.checkpoints import stream
from wanjax.checkpoints.convert import ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.manifest import verify
from wanjax.checkpoints.modules import parameters
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.quantize import FloatKernel, quantize
from wanjax.kernels.quantized_matmul import quantize_weight
from wanjax.layers.linear import linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.precision import PRECISIONS
from wanjax.layers.quantized import QuantizedLinear, quantized_layers
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source, presets

QUANTIZING = [precision for precision in PRECISIONS.values() if precision.quantizes]


def layer_of(precision, features_in, features_out):
    """Return an abstract quantized projection."""
    kw = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    return QuantizedLinear(
        as_shapes(lambda rngs: linear(features_in, features_out, ("embed", "mlp"), **kw, rngs=rngs)), precision
    )


@pytest.mark.parametrize("precision", QUANTIZING, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_are_rounded_on_the_host_as_by_the_kernel(precision, dtype):
    layer = layer_of(precision, 256, 300)
    kernel = np.random.default_rng(0).normal(size=(300, 256)).astype(dtype).T
    kernel[:, 7] = 0  # a channel of zeros
    values, scale = quantize(kernel, layer)
    layer_format: Any = layer.number_format
    expected = quantize_weight(jnp.asarray(kernel), number_format=layer_format, hadamard_size=layer.hadamard_size)
    np.testing.assert_allclose(scale, expected.scale, rtol=1e-6)
    differing = np.float32(values) != np.float32(expected.values)  # the last bit of a sum or of a scale decides ties
    assert (values.dtype, values.shape, differing.mean() < 3e-3) == (expected.values.dtype, (256, 300), True)
    assert np.all(np.float32(values[:, 7]) == 0)
    assert np.isfinite(scale).all()


def test_a_number_that_is_not_finite_is_not_hidden():
    """Its channel's scale is not finite either."""
    kernel = np.zeros((192, 80), np.float32)
    kernel[5, 6] = np.nan
    assert np.isnan(quantize(kernel, layer_of(PRECISIONS["int8"], 192, 80)).scale).nonzero()[0].tolist() == [6]


def weights_of(pipe, name="transformer"):
    return {key: np.asarray(x) for key, x in parameters(getattr(pipe, name)).items()}


def assert_equal(weights, expected):
    assert weights.keys() == expected.keys()
    for name, x in weights.items():
        assert (x.dtype, x.shape, x.tobytes()) == (
            expected[name].dtype,
            expected[name].shape,
            expected[name].tobytes(),
        ), name


def convert(source, target, precision):
    assert ConversionToWanjax(open_source(source), target, NETWORKS, precision=PRECISIONS[precision]).run()
    return target


@pytest.mark.parametrize(
    ("write_checkpoint", "precision"),
    [
        pytest.param(tiny_checkpoint, "int8", marks=pytest.mark.slow),  # experts have two such networks
        (tiny_control_checkpoint, "int8-weights"),
        (tiny_experts_checkpoint, "int8"),
    ],
)
def test_a_converted_checkpoint_has_the_weights_that_loading_rounds(write_checkpoint, precision, tmp_path):
    source = write_checkpoint(tmp_path / "source")
    converted = convert(source, tmp_path / "converted", precision)
    rounded, loaded = wanjax.load(source, precision=precision), wanjax.load(converted)
    assert rounded.defaults.precision == loaded.defaults.precision == precision
    for name in rounded.model.spec.denoisers:
        layers = quantized_layers(getattr(loaded, name))
        assert {layer.values[...].dtype for layer in layers.values()} == {jnp.dtype(jnp.int8)}
        assert_equal(weights_of(loaded, name), weights_of(rounded, name))
    assert_equal(weights_of(loaded, "text_encoder"), weights_of(rounded, "text_encoder"))
    manifest = verify(open_source(converted))
    assert manifest["request"]["precision"] == precision
    assert manifest["networks"]["transformer"]["blocks.self_attn.q.values"].startswith("int8 [2, 24, 24] ")


def test_a_checkpoint_converted_in_floats_is_rounded_like_the_original(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    converted = convert(source, tmp_path / "converted", "none")
    for precision in ("int8", "fp8-weights"):
        loaded, rounded = (wanjax.load(folder, precision=precision) for folder in (converted, source))
        assert_equal(weights_of(loaded), weights_of(rounded))


def test_the_dtype_applies_to_the_weights_that_are_not_rounded(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    dtypes = dict.fromkeys(["transformer"], "bfloat16")
    conversion = ConversionToWanjax(
        open_source(source), tmp_path / "converted", NETWORKS, dtypes=dtypes, precision=PRECISIONS["int8"]
    )
    conversion.run()
    rounded = wanjax.load(source, precision="int8", param_dtype="bfloat16")
    assert_equal(weights_of(wanjax.load(tmp_path / "converted", param_dtype="bfloat16")), weights_of(rounded))
    words = checksums(tmp_path / "converted")["transformer"]
    assert {words[f"blocks.self_attn.q.{leaf}"].split()[0] for leaf in ("values", "scale")} == {"int8", "float32"}
    assert words["patch_embed.kernel"].startswith("bfloat16")


def test_each_number_of_nano_s_blocks_takes_one_byte(tmp_path):
    conversion = ConversionToWanjax(
        open_source(presets()["nano"].source), tmp_path / "nano", NETWORKS, precision=PRECISIONS["int8"]
    )
    conversion.run()
    (transformer,) = (converted for converted in conversion.networks if converted.name == "transformer")
    assert (transformer.parameters, transformer.bytes_read) == (2_380_032, 9_520_128)
    folder = tmp_path / "nano" / "transformer" / "weights"
    on_disk = sum(file.stat().st_size for file in folder.rglob("c/**/*") if file.is_file())
    description = network(conversion.source, "transformer", NETWORKS)
    assert transformer.bytes_written == description.weight_bytes("float32", PRECISIONS["int8"])
    assert transformer.bytes_written == 3_657_728 == pytest.approx(on_disk, rel=0.01)


def test_a_conversion_resumes_in_the_middle_of_a_kernel(tmp_path, monkeypatch):
    """If the values or the scale of a kernel are missing, it is rounded again."""
    source = tiny_checkpoint(tmp_path / "source")
    uninterrupted = convert(source, tmp_path / "uninterrupted", "int8")
    rounded = []

    def stop(kernel, layer, **options):
        rounded.append(kernel)
        if len(rounded) == 6:
            raise KeyboardInterrupt
        return quantize(kernel, layer, **options)

    monkeypatch.setattr(stream, "quantize", stop)
    conversion = ConversionToWanjax(open_source(source), tmp_path / "again", NETWORKS, precision=PRECISIONS["int8"])
    with pytest.raises(KeyboardInterrupt):
        conversion.run()
    monkeypatch.undo()
    scales = sorted(conversion.partial.rglob("*.scale/c/**/*"))
    (first, *_) = (path for path in scales if path.is_file())
    first.unlink()
    assert checksums(convert(source, tmp_path / "again", "int8")) == checksums(uninterrupted)


def test_another_precision_needs_another_folder(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "converted", "int8")
    assert not ConversionToWanjax(
        open_source(source), tmp_path / "converted", NETWORKS, precision=PRECISIONS["int8"]
    ).run()
    with pytest.raises(WanjaxError, match="converted"):
        convert(source, tmp_path / "converted", "int8-weights")


def test_stored_weights_of_8_bits_keep_their_precision_and_are_not_converted(tmp_path):
    converted = convert(tiny_checkpoint(tmp_path / "source"), tmp_path / "converted", "int8")
    lora = tmp_path / "style.safetensors"
    save_safetensors(lora, {"diffusion_model.blocks.0.self_attn.q.diff": np.zeros((24, 24), np.float32)})
    for precision in ("int8-weights", "none"):
        with pytest.raises(WanjaxError, match=line_with_words(f"{precision} int8")):
            wanjax.load(converted, precision=precision)
    with pytest.raises(WanjaxError, match=line_with_words("int8 diffusers")):
        ConversionToDiffusers(open_source(converted), tmp_path / "back", NETWORKS)
    with pytest.raises(WanjaxError, match=line_with_words("int8 diffusers")):
        ConversionToDiffusers(registry_source(converted, lora), tmp_path / "back", NETWORKS)
    with pytest.raises(WanjaxError, match=line_with_words("int8 conversion")):
        ConversionToWanjax(registry_source(converted, lora), tmp_path / "again", NETWORKS)
    manifest = json.loads((converted / "wanjax.json").read_text())
    manifest["request"]["precision"] = "int3"
    (converted / "wanjax.json").write_text(json.dumps(manifest))
    with pytest.raises(WanjaxError, match="int3"):
        wanjax.load(converted)


def test_a_lora_is_merged_before_weights_are_rounded(tmp_path):
    source, lora = tiny_checkpoint(tmp_path / "source"), tmp_path / "style.safetensors"
    change = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)
    save_safetensors(lora, {"diffusion_model.blocks.1.self_attn.q.diff": change})
    merged, base = (wanjax.load(source, lora=loras, dtype="float32") for loras in (str(lora), ()))
    rounded = wanjax.load(source, lora=str(lora), precision="int8-weights", dtype="float32")
    kernel, before = (np.asarray(pipe.transformer.blocks.self_attn.q.kernel[...]) for pipe in (merged, base))
    assert np.linalg.norm(kernel[1] - before[1]) == pytest.approx(np.linalg.norm(change), rel=1e-3)
    layer = rounded.transformer.blocks.self_attn.q
    for block in (0, 1):
        values, scale = quantize(kernel[block], layer)
        np.testing.assert_array_equal(layer.values[...][block], values)
        np.testing.assert_array_equal(layer.scale[...][block], scale)
    converted = tmp_path / "converted"
    ConversionToWanjax(registry_source(source, lora), converted, NETWORKS, precision=PRECISIONS["int8-weights"]).run()
    assert_equal(weights_of(wanjax.load(converted, dtype="float32")), weights_of(rounded))


def factors(path, module, shape, size):
    """Write a LoRA of rank 4 for one module, with a change of this norm; return the change."""
    random = np.random.default_rng(1)
    up, down = random.normal(size=(shape[0], 4)), random.normal(size=(4, shape[1]))
    up *= size / np.linalg.norm(up @ down)
    tensors = {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": down}
    save_safetensors(path, {key: x.astype(np.float32) for key, x in tensors.items()})
    return up @ down


def floats_of(layer, block):
    """Return a block's kernel [I O] in float64, for a projection without a rotation."""
    return np.asarray(layer.values[...][block], np.float64) * np.asarray(layer.scale[...][block], np.float64)


@pytest.mark.parametrize("precision", ["int8", "int8-weights"])
def test_a_lora_changes_stored_weights_of_8_bits(precision, tmp_path):
    """The other weights do not change, nor does this layer in the other block."""
    source, lora = tiny_checkpoint(tmp_path / "source"), tmp_path / "style.safetensors"
    converted = convert(source, tmp_path / "converted", precision)
    floats = wanjax.load(source, dtype="float32").transformer.blocks.self_attn.v.kernel[...][1]
    change = factors(lora, "diffusion_model.blocks.1.self_attn.v", (24, 24), 0.2 * np.linalg.norm(floats)).T
    base, changed = (wanjax.load(converted, lora=loras, dtype="float32") for loras in ((), str(lora)))
    assert changed.defaults.precision == precision
    before, after = (pipe.transformer.blocks.self_attn.v for pipe in (base, changed))
    expected = floats_of(before, 1) + change
    assert np.linalg.norm(floats_of(after, 1) - expected) < 0.01 * np.linalg.norm(expected)
    np.testing.assert_array_equal(after.values[...][0], before.values[...][0])
    old, new = weights_of(base), weights_of(changed)
    assert old.keys() == new.keys()
    for name in old.keys() - {"blocks.self_attn.v.values", "blocks.self_attn.v.scale"}:
        assert (new[name].dtype, new[name].shape) == (old[name].dtype, old[name].shape)
        np.testing.assert_allclose(np.float32(new[name]), np.float32(old[name]), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("size", [0.001, 0.003, 0.02])
def test_a_change_that_is_smaller_than_a_step_is_not_lost(size, rotated):
    """A second rounding with another step size keeps the change; with the same step size the change is lost."""
    layer, random = layer_of(PRECISIONS["int8" if rotated else "int8-weights"], 512, 512), np.random.default_rng(0)
    kernel = random.normal(size=(512, 512)).astype(np.float32)
    stored = FloatKernel(*quantize(kernel, layer), rotates=rotated)[...]
    change = random.normal(size=(512, 4)) @ random.normal(size=(4, 512))
    change *= size * np.linalg.norm(kernel) / np.linalg.norm(change)
    remaining = {}
    for again in (False, True):
        after = FloatKernel(
            *quantize((stored + change).astype(np.float32), layer, was_quantized=again), rotates=rotated
        )[...]
        remaining[again] = np.sum((after - stored) * change) / np.sum(change * change)
        assert np.linalg.norm(after - (kernel + change)) < 0.0125 * np.linalg.norm(kernel)
    assert remaining[True] == pytest.approx(1, abs=0.1)
    assert size > 0.01 or remaining[False] < 0.1


def test_a_lora_on_a_file_of_integers_is_not_lost(tmp_path):
    """The weights of the file are int8 with a scale for each row; `precision` rounds them again."""
    source, lora = tiny_checkpoint(tmp_path / "source"), tmp_path / "style.safetensors"
    (file,) = (source / "transformer").glob("*.safetensors")
    tensors, name = dict(load_safetensors(file)), "blocks.1.attn1.to_v"
    x = np.float32(tensors[f"{name}.weight"])
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    tensors |= {f"{name}.weight": np.rint(x / scale).astype(np.int8), f"{name}.weight_scale": scale}
    save_safetensors(file, {key: np.array(value) for key, value in tensors.items()})
    change = factors(lora, "diffusion_model.blocks.1.self_attn.v", (24, 24), 0.003 * np.linalg.norm(x)).T
    base, changed = (
        wanjax.load(source, lora=loras, precision="int8-weights").transformer.blocks.self_attn.v
        for loras in ((), str(lora))
    )
    np.testing.assert_array_equal(base.values[...][1].T, tensors[f"{name}.weight"])
    np.testing.assert_allclose(changed.scale[...][1], base.scale[...][1] * 1.04, rtol=0.01)
    np.testing.assert_array_equal(changed.scale[...][0], base.scale[...][0])
    share = np.sum((floats_of(changed, 1) - floats_of(base, 1)) * change) / np.sum(change * change)
    assert share == pytest.approx(1, abs=0.5)


def registry_source(source, lora):
    from wanjax.checkpoints.lora_source import Lora
    from wanjax.checkpoints.weight_changes import with_loras

    return with_loras(open_source(source), [Lora.parse(str(lora))], NETWORKS)


def compare_on_devices(source: Path, converted: Path) -> None:
    """Compare loading and a conversion on four devices with one device, and check the shards."""
    one_device = weights_of(wanjax.load(source, precision="int8", mesh=wanjax.make_mesh(devices=jax.devices()[:1])))
    for rules in ("fsdp", "tp"):
        mesh = wanjax.make_mesh(1, 2, 2, devices=jax.devices()[:4])
        kernel = wanjax.load(source, mesh=mesh, rules=rules).transformer.blocks.mlp.up.kernel[...]
        shard = kernel.sharding.shard_shape(kernel.shape)
        assert shard != kernel.shape
        for pipe in (
            wanjax.load(source, precision="int8", mesh=mesh, rules=rules),
            wanjax.load(converted, mesh=mesh, rules=rules),
        ):
            assert_equal(weights_of(pipe), one_device)
            values = pipe.transformer.blocks.mlp.up.values[...]
            assert values.dtype == jnp.int8
            assert values.sharding.shard_shape(values.shape) == shard


def test_each_device_holds_its_part_of_the_same_weights(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    converted = convert(source, tmp_path / "converted", "int8")
    code = (
        "import sys; from tests.checkpoints.test_quantize import compare_on_devices; compare_on_devices(*sys.argv[1:])"
    )
    on_eight_devices(code, source, converted)
