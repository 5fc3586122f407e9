# SPDX-License-Identifier: Apache-2.0
"""Networks in memory: which are freed automatically, and how a pipeline describes itself."""

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


def loaded(pipe) -> list[str]:
    return [name for name in NETWORKS if pipe.components.has(name)]


@pytest.fixture
def held(monkeypatch):
    """The networks that are loaded when another one has been read, by the name of that one."""
    seen = {}
    get = Components.get

    def recorded(self, name):
        new = not self.has(name)
        result = get(self, name)
        if new and name in NETWORKS:
            seen[name] = [network for network in NETWORKS if self.has(network)]
        return result

    monkeypatch.setattr(Components, "get", recorded)
    return seen


def test_each_network_is_freed_at_the_end_of_its_stage(model, held):
    pipe = wanjax.load(model, offload="stages")
    video = pipe("a", **SMALL)
    assert loaded(pipe) == []
    assert held == {"text_encoder": ["text_encoder"], "transformer": ["transformer"], "vae": ["vae"]}
    pipe.components.offload = Offload.of("none")
    np.testing.assert_array_equal(pipe("a", **SMALL).frames, video.frames)
    assert loaded(pipe) == ["text_encoder", "transformer", "vae"]


def test_videos_of_a_batch_are_decoded_by_one_autoencoder(model, monkeypatch):
    pipe, reads = wanjax.load(model, offload="stages", mesh=wanjax.make_mesh(dp=2, devices=jax.devices()[:2])), []
    load = pipe.components._loaders["vae"]
    monkeypatch.setitem(pipe.components._loaders, "vae", lambda make_room: reads.append("vae") or load(make_room))
    assert len(list(pipe.videos(["a"], seeds=[1, 2], **SMALL))) == 2
    assert reads == ["vae"]
    assert loaded(pipe) == []


def test_the_text_encoder_is_freed_before_pictures_are_encoded(tmp_path, held):
    pipe = wanjax.load(tiny_image_checkpoint(tmp_path), offload="stages")
    pipe.encode("a", image=np.zeros((32, 32, 3), np.uint8))
    assert "text_encoder" not in held["image_encoder"] + held["vae"]
    assert loaded(pipe) == []


def test_one_expert_is_freed_before_the_other_is_read(tmp_path, held):
    pipe = wanjax.load(tiny_experts_checkpoint(tmp_path), offload="stages")
    pipe.denoise(pipe.encode("a"), **SMALL)
    assert held["transformer_2"] == ["transformer_2"]


@pytest.mark.parametrize("free", [0, 1e12])
def test_networks_make_room_where_memory_is_short(model, held, machine, free):
    machine.has_free_memory(free)
    pipe = wanjax.load(model)
    pipe("a", **SMALL)
    all_three = ["text_encoder", "transformer", "vae"]
    assert loaded(pipe) == (all_three if free else ["vae"])
    assert held["vae"] == (all_three if free else ["vae"])


def test_only_as_many_networks_are_freed_as_have_to_go(machine):
    """Four networks of 4 bytes where 10 are free: the third makes the first go, the fourth the second."""

    def network(size):
        return nnx.Linear(1, size, use_bias=False, rngs=nnx.Rngs(0))

    def load(make_room, size):
        make_room(nnx.eval_shape(partial(network, size)))
        return network(size)

    parts = Components({name: partial(load, size=1) for name in "abcd"} | {"all": partial(load, size=3)})
    held = lambda: "".join(name for name in "abcdx" if parts.has(name))  # noqa: E731
    machine.has_free_memory(lambda: 10 - 4 * len(held()))
    for name, expected in zip("abcd", ("a", "ab", "bc", "cd"), strict=True):
        parts.get(name)
        assert held() == expected
    parts.override("x", network(1))
    parts.get("all")
    assert held() == "x"
    parts.offload = Offload.of("none")
    for name in "abc":
        parts.get(name)
    assert held() == "abcx"


def test_a_network_that_was_set_stays(model):
    pipe = wanjax.load(model, offload="stages")
    mine = pipe.text_encoder
    pipe.components.override("text_encoder", mine)
    pipe.encode("a")
    assert pipe.text_encoder is mine


def test_bytes_by_device():
    """Count a module and its shapes alike, each shard on its own device."""
    devices = jax.devices()[:2]
    mesh = wanjax.make_mesh(tp=2, devices=devices)

    def make() -> nnx.Module:
        return nnx.Linear(4, 6, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    assert bytes_by_device(make()) == bytes_by_device(nnx.eval_shape(make)) == {devices[0]: 4 * (24 + 6)}
    graphdef, state = nnx.split(make())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    sharded = nnx.merge(graphdef, jax.device_put(state, split))
    assert bytes_by_device(sharded) == dict.fromkeys(devices, 4 * (12 + 3))


def test_the_memory_that_is_free_for_weights(monkeypatch):
    """It holds the system's cache of files, and no more than the control groups allow."""
    allowed = []
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=50))
    monkeypatch.setattr(memory, "_group_limits", lambda: iter(allowed))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    for available, limit, expected in ((900, None, 900 - 250), (100, None, 0), (900, 400, 350 - 100), (900, 60, 0)):
        message = SimpleNamespace(total=1000, available=available)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda message=message: message)
        allowed[:] = [limit] if limit else []
        assert components.free_memory(SimpleNamespace(memory_stats=lambda: None)) == expected
    stats = {"bytes_limit": 1000, "bytes_in_use": 100}
    assert components.free_memory(SimpleNamespace(memory_stats=lambda: stats)) == 650


def test_memory_taken_by_other_programs_is_noted(monkeypatch):
    """It fits the machine, and a refusal would be wrong: the other programs may end."""
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


def test_a_pipeline_describes_itself():
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
