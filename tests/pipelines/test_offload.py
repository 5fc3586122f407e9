# SPDX-License-Identifier: Apache-2.0
"""Networks are freed as `offload` says, and the text of a pipeline says which are loaded."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.tiny import tiny_checkpoint, tiny_experts_checkpoint, tiny_image_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.layers.offload import Offload
from wanjax.layers.placement import bytes_by_device
from wanjax.pipelines import components, memory
from wanjax.pipelines.components import Components

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2, "guidance_scale": 1.0}
NETWORKS = ("text_encoder", "image_encoder", "transformer", "transformer_2", "vae")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def loaded_networks(pipe) -> list[str]:
    return [name for name in NETWORKS if pipe.components.has(name)]


@pytest.fixture
def networks_at_load(monkeypatch):
    """Record which networks are loaded after each load, by the name of the network that was loaded."""
    loaded_after = {}
    get = Components.get

    def get_and_record(self, name):
        is_new = not self.has(name)
        component = get(self, name)
        if is_new and name in NETWORKS:
            loaded_after[name] = [network for network in NETWORKS if self.has(network)]
        return component

    monkeypatch.setattr(Components, "get", get_and_record)
    return loaded_after


def test_each_network_is_freed_at_the_end_of_its_stage(model, networks_at_load):
    pipe = wanjax.load(model, offload="stages")
    video = pipe("a", **SMALL)
    assert loaded_networks(pipe) == []
    assert networks_at_load == {"text_encoder": ["text_encoder"], "transformer": ["transformer"], "vae": ["vae"]}
    pipe.components.offload = Offload.of("none")
    np.testing.assert_array_equal(pipe("a", **SMALL).frames, video.frames)
    assert loaded_networks(pipe) == ["text_encoder", "transformer", "vae"]


def test_videos_of_a_batch_are_decoded_by_one_autoencoder(model, monkeypatch):
    pipe, reads = wanjax.load(model, offload="stages", mesh=wanjax.make_mesh(dp=2, devices=jax.devices()[:2])), []
    load = pipe.components._loaders["vae"]
    monkeypatch.setitem(pipe.components._loaders, "vae", lambda make_room: reads.append("vae") or load(make_room))
    assert len(list(pipe.videos(["a"], seeds=[1, 2], **SMALL))) == 2
    assert reads == ["vae"]
    assert loaded_networks(pipe) == []


def test_the_text_encoder_is_freed_before_pictures_are_encoded(tmp_path, networks_at_load):
    pipe = wanjax.load(tiny_image_checkpoint(tmp_path), offload="stages")
    pipe.encode("a", image=np.zeros((32, 32, 3), np.uint8))
    assert "text_encoder" not in networks_at_load["image_encoder"] + networks_at_load["vae"]
    assert loaded_networks(pipe) == []


def test_one_expert_is_freed_before_the_other_is_read(tmp_path, networks_at_load):
    pipe = wanjax.load(tiny_experts_checkpoint(tmp_path), offload="stages")
    pipe.denoise(pipe.encode("a"), **SMALL)
    assert networks_at_load["transformer_2"] == ["transformer_2"]


@pytest.mark.parametrize("free", [0, 1e12])
def test_networks_are_freed_only_where_memory_is_short(model, networks_at_load, machine, free):
    machine.has_free_memory(free)
    pipe = wanjax.load(model)
    pipe("a", **SMALL)
    all_three = ["text_encoder", "transformer", "vae"]
    assert loaded_networks(pipe) == (all_three if free else ["vae"])
    assert networks_at_load["vae"] == (all_three if free else ["vae"])


def test_no_more_networks_are_freed_than_necessary(machine):
    """Each network has 4 bytes, and 10 are free: the third network frees the first, and the fourth frees the second."""

    def network(size):
        return nnx.Linear(1, size, use_bias=False, rngs=nnx.Rngs(0))

    def load(make_room, size):
        make_room(nnx.eval_shape(partial(network, size)))
        return network(size)

    parts = Components({name: partial(load, size=1) for name in "abcd"} | {"all": partial(load, size=3)})
    loaded_names = lambda: "".join(name for name in "abcdx" if parts.has(name))  # noqa: E731
    machine.has_free_memory(lambda: 10 - 4 * len(loaded_names()))
    for name, expected in zip("abcd", ("a", "ab", "bc", "cd"), strict=True):
        parts.get(name)
        assert loaded_names() == expected
    parts.override("x", network(1))
    parts.get("all")
    assert loaded_names() == "x"
    parts.offload = Offload.of("none")
    for name in "abc":
        parts.get(name)
    assert loaded_names() == "abcx"


def test_a_network_that_the_user_sets_is_not_freed(model):
    pipe = wanjax.load(model, offload="stages")
    encoder = pipe.text_encoder
    pipe.components.override("text_encoder", encoder)
    pipe.encode("a")
    assert pipe.text_encoder is encoder


def test_bytes_are_counted_on_each_device():
    """A module and its shapes have the same bytes; each shard counts on its own device."""
    devices = jax.devices()[:2]
    mesh = wanjax.make_mesh(tp=2, devices=devices)

    def make_module() -> nnx.Module:
        return nnx.Linear(4, 6, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    assert bytes_by_device(make_module()) == bytes_by_device(nnx.eval_shape(make_module)) == {devices[0]: 4 * (24 + 6)}
    graphdef, state = nnx.split(make_module())
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    sharded = nnx.merge(graphdef, jax.device_put(state, sharding))
    assert bytes_by_device(sharded) == dict.fromkeys(devices, 4 * (12 + 3))


def test_free_memory_includes_file_caches_up_to_the_limits(monkeypatch):
    """Free memory includes the file cache of the system, and is limited by control groups."""
    group_limits = []
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=50))
    monkeypatch.setattr(memory, "_group_limits", lambda: iter(group_limits))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    for available, limit, expected in ((900, None, 900 - 250), (100, None, 0), (900, 400, 350 - 100), (900, 60, 0)):
        virtual_memory = SimpleNamespace(total=1000, available=available)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda virtual_memory=virtual_memory: virtual_memory)
        group_limits[:] = [limit] if limit else []
        assert components.free_memory(SimpleNamespace(memory_stats=lambda: None)) == expected
    stats = {"bytes_limit": 1000, "bytes_in_use": 100}
    assert components.free_memory(SimpleNamespace(memory_stats=lambda: stats)) == 650


def test_memory_that_other_programs_use_gives_a_warning(monkeypatch):
    """The run fits the machine if other programs end, so that it is not refused."""
    settings = wanjax.load("nano").settings()
    machine = SimpleNamespace(total=1000, available=300)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: SimpleNamespace(total=0, free=0))
    monkeypatch.setattr(memory, "_group_limits", lambda: iter(()))
    monkeypatch.setattr(memory, "process_memory", lambda: 50)
    memory.check_memory(settings, 350, "denoise")
    with pytest.warns(WanjaxWarning, match=line_with_words("needs at least 351 denoise 350 smaller size")):
        memory.check_memory(settings, 351, "denoise")
    with pytest.raises(WanjaxError, match=line_with_words("needs at least this machine has smaller size")):
        memory.check_memory(settings, 1001)


def test_the_text_of_a_pipeline_lists_its_components():
    pipe = wanjax.load("nano", dtype="float32")
    kind = jax.devices()[0].device_kind
    first, *parts = repr(pipe).splitlines()
    assert first == f"Pipeline: nano, text and image to video, float32, on 1 x {kind}"
    assert parts == [
        "  text_encoder: not loaded",
        "  tokenizer: not loaded",
        "  transformer: not loaded",
        "  vae: not loaded",
        "  scheduler: unipc",
    ]
    _ = pipe.transformer, pipe.tokenizer
    parts = repr(pipe).splitlines()
    assert "  tokenizer: loaded" in parts
    assert "  transformer: loaded, 9.5 MB in float32" in parts
    pipe = wanjax.load("nano", mesh=wanjax.make_mesh(dp=2, tp=4), scheduler="euler")
    assert repr(pipe).splitlines()[0].endswith(f"on 8 x {kind} (dp=2,sp=1,tp=4, rules fsdp)")
    assert repr(pipe).endswith("scheduler: euler")
