# SPDX-License-Identifier: Apache-2.0
"""Blocks in the host's memory do not change a bit of the video; wrong values of `offload` are refused."""

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_causal_checkpoint,
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
)
from tests.support.words import has_line_with_words
from wanjax.errors import WanjaxError
from wanjax.layers.offload import AUTO_OFFLOAD, OFFLOADS, STAGES, Offload
from wanjax.layers.placement import bytes_by_device, host_bytes
from wanjax.sharding import HOST_MEMORY_KIND

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2, "guidance_scale": 1.0}
PICTURE = np.full((32, 32, 3), 80, np.uint8)
CHECKPOINTS = {
    "text": (tiny_checkpoint, {}),
    "image": (tiny_image_checkpoint, {"image": PICTURE}),
    "experts": (tiny_experts_checkpoint, {}),
    "control": (tiny_control_checkpoint, {}),
    "causal": (tiny_causal_checkpoint, {"frames": 29}),
    "cogvideox": (tiny_cogvideox_checkpoint, {}),
    "hunyuanvideo": (tiny_hunyuan_checkpoint, {}),
}


def memory_kinds(network: nnx.Module) -> dict[str, str]:
    paths = nnx.to_flat_state(nnx.state(network))
    return {".".join(map(str, path)): x.get_value().sharding.memory_kind for path, x in paths}


@cache
def pipeline(model, offload, **load):
    """Return a pipeline, which tests of the same model share."""
    return wanjax.load(model, offload=offload, **load)


def assert_same_video(model, offload="blocks", *, load=None, **request):
    """Compare the frames of pipelines with and without offloaded blocks."""
    frames = [pipeline(model, value, **(load or {}))("a circle", **request).frames for value in ("none", offload)]
    np.testing.assert_array_equal(*frames)


@pytest.mark.slow  # `test_every_way_to_denoise_makes_the_same_video` is a quick test with "blocks:3"
@pytest.mark.parametrize("offload", ["blocks:1", "blocks", "blocks:3", "blocks:8"])
def test_nano_makes_the_same_video(offload):
    assert_same_video("nano", offload, **SMALL, seed=3)


# every network offloads the blocks of the same stack, which tests/layers/test_stack.py checks too
@pytest.mark.parametrize("name", quick(["cogvideox"], CHECKPOINTS))
def test_every_kind_of_network_makes_the_same_video(tmp_path, name):
    make, request = CHECKPOINTS[name]
    assert_same_video(make(tmp_path), **SMALL | request)


@pytest.mark.parametrize("precision", quick(["int8-weights"], ["int8", "int8-weights"]))
def test_weights_of_8_bits_make_the_same_video(precision):
    assert_same_video("nano", load={"precision": precision}, **SMALL)


DEEPCACHE = {"cache": "deepcache:1,4,2", "steps": 4}
WAYS_TO_DENOISE = [{"batch_guidance": True, "guidance_scale": 4.0}, {"guidance_scale": 4.0}, DEEPCACHE]


@pytest.mark.parametrize("options", quick([DEEPCACHE], WAYS_TO_DENOISE), ids=str)
def test_every_way_to_denoise_makes_the_same_video(options):
    assert_same_video("nano", "blocks:3", **SMALL | options)


def test_matrices_of_blocks_are_in_the_host_s_memory(tmp_path):
    pipe = wanjax.load(tiny_checkpoint(tmp_path), offload="blocks")
    for network in (pipe.transformer, pipe.text_encoder):
        kinds = memory_kinds(network)
        assert {name for name, kind in kinds.items() if kind == HOST_MEMORY_KIND} == {
            name for name in kinds if name.startswith("blocks.") and name.endswith(".kernel")
        }
    assert HOST_MEMORY_KIND not in memory_kinds(pipe.vae).values()
    assert host_bytes(pipe.transformer) > 0
    assert bytes_by_device(pipe.transformer) == bytes_by_device(wanjax.load(tmp_path, offload="none").transformer)


def test_networks_stay_loaded_between_videos(tmp_path):
    pipe = wanjax.load(tiny_checkpoint(tmp_path), offload="blocks")
    pipe("a", **SMALL)
    assert all(pipe.components.has(name) for name in ("text_encoder", "transformer", "vae"))


def test_a_network_outside_of_a_pipeline_computes_the_same(tmp_path):
    pipes = [wanjax.load(tiny_checkpoint(tmp_path), offload=value) for value in ("none", "blocks")]
    config = pipes[0].transformer.config
    latents = np.ones((1, 1, 4, 4, config.channels_in), np.float32)
    text = np.ones((1, 3, config.text_width), np.float32)
    predictions = [jax.jit(lambda network, *x: network(*x))(pipe.transformer, latents, 500.0, text) for pipe in pipes]
    np.testing.assert_array_equal(*predictions)


@pytest.mark.parametrize("text", ["none", "stages", "blocks", "blocks:1", "blocks:8"])
def test_every_value_of_offload_is_accepted(text):
    assert str(Offload.of(text)) == text
    assert Offload.of(Offload.of(text)) == Offload.of(text)


def test_offload_takes_a_number_of_blocks():
    assert Offload.of("blocks:2") == OFFLOADS["blocks"]
    assert Offload.of("blocks:7").blocks == 7
    assert Offload.of(None) == AUTO_OFFLOAD


@pytest.mark.parametrize(
    "value", ["", "block", "blocks:", "blocks:0", "blocks:9", "blocks:-1", "blocks:x", "stages:2", True, 2]
)
def test_other_values_of_offload_are_refused(value):
    with pytest.raises(WanjaxError) as error:
        Offload.of(value)
    assert has_line_with_words(str(error.value), f"offload none stages blocks:N {value!r}")


def test_offloaded_blocks_do_not_change_when_networks_are_freed():
    for default in (STAGES, AUTO_OFFLOAD):
        assert default.overridden_by(None) == default
        assert default.overridden_by(OFFLOADS["none"]) == OFFLOADS["none"]
        offload = default.overridden_by(Offload.of("blocks:3"))
        assert (offload.frees_stages, offload.frees_on_demand) == (default.frees_stages, default.frees_on_demand)
        assert str(offload) == "blocks:3"


def test_offloaded_blocks_on_several_devices_are_refused():
    with pytest.raises(WanjaxError) as error:
        wanjax.load("nano", offload="blocks", mesh=wanjax.make_mesh(tp=2, devices=jax.devices()[:2]))
    assert has_line_with_words(str(error.value), "offload blocks one device 2 devices mesh")
    assert wanjax.load("nano", offload="blocks", mesh="auto").partitioner.mesh.size == 1


def test_blocks_that_exceed_the_host_s_memory_are_refused(monkeypatch):
    network = wanjax.load("nano", offload="blocks").transformer
    rounded = wanjax.load("nano", offload="blocks", precision="int8-weights").transformer
    accelerator = type("Device", (), {"platform": "gpu", "device_kind": "card"})()
    monkeypatch.setattr("wanjax.loading.local_devices", lambda: [accelerator])
    monkeypatch.setattr("wanjax.loading.memory.machine_memory", lambda: 1000)
    from wanjax.loading import check_memory

    with pytest.raises(WanjaxError) as error:
        check_memory("nano", "transformer", network)
    assert has_line_with_words(str(error.value), "transformer nano host offloaded 1 kB memory")
    assert "--precision" not in str(error.value)  # that precision does not fit either
    host = host_bytes(network)
    assert host_bytes(rounded) < 0.6 * host
    monkeypatch.setattr("wanjax.loading.memory.machine_memory", lambda: int(0.6 * host))
    with pytest.raises(WanjaxError, match="--precision int8-weights"):
        check_memory("nano", "transformer", network, lambda: rounded)
