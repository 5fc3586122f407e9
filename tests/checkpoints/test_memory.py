# SPDX-License-Identifier: Apache-2.0
"""Networks that do not fit into memory are refused before any weights are downloaded or read."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as command
from tests.support.hub import ID
from tests.support.machine import RefuseExecution
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax import loading, registry
from wanjax.checkpoints.sources import open_diffusers
from wanjax.cli import stages
from wanjax.cli.stages import estimate_note, least_seconds
from wanjax.errors import WanjaxError
from wanjax.figures import format_duration
from wanjax.layers.placement import offloaded_bytes, with_shardings
from wanjax.layers.precision import PRECISIONS
from wanjax.pipelines import memory
from wanjax.pipelines.tracing import peak_bytes, trace_programs
from wanjax.pricing import roofline
from wanjax.pricing.chips import V6E
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh

GB = 1_000_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hub_with_model(server, tiny, online):
    """A hub with the checkpoint."""
    server.files = {str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    return server


def downloaded_weights(server) -> list[str]:
    return [name for name, _ in server.downloads if name.endswith(".safetensors")]


def bytes_of(tiny: Path, param_dtype: str) -> int:
    return wanjax.load(tiny, param_dtype=param_dtype).components.sizes["transformer"]


def test_a_model_of_the_hub_is_refused_before_its_weights_are_downloaded(
    hub_with_model, tiny, machine, tmp_path, monkeypatch
):
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    minimum = bytes_of(tiny, "bfloat16")  # the stored dtype is still unknown
    machine.has_memory(minimum - 1)
    with pytest.raises(WanjaxError, match=line_with_words(f"transformer {ID} needs machine")):
        wanjax.load(ID)
    output = refused("a", "--model", ID, "--size", "32x32", "--frames", "5")
    assert has_line_with_words(output, f"transformer {ID} 42.9 kB weights bfloat16")
    assert downloaded_weights(hub_with_model) == []
    machine.has_memory(minimum)
    assert wanjax.load(ID).components.sizes == {"transformer": minimum}  # the other configs need a download
    machine.has_memory(None)  # unknown, so nothing is refused
    pipe = wanjax.load(ID)
    assert downloaded_weights(hub_with_model) == []
    assert pipe.transformer is not None
    assert downloaded_weights(hub_with_model)


def test_the_memory_of_all_stages_is_checked_before_any_is_computed(hub_with_model, tiny, machine):
    """Decoding would fit, but not together with the networks of the other stages, which stay loaded."""
    settings = {"size": (64, 64), "frames": 1, "steps": 2}
    pipe = wanjax.load(tiny, offload="stages")
    needed, _ = peak_bytes(trace_programs(pipe, pipe.settings(**settings), memory=0))

    machine.has_memory(needed)
    with pytest.raises(AssertionError, match="executed"):
        wanjax.load(ID, offload="stages").with_strategy(RefuseExecution())("a", **settings)
    with pytest.raises(WanjaxError, match=line_with_words("64x64 memory")):
        wanjax.load(ID, offload="none").with_strategy(RefuseExecution())("a", **settings)


def test_the_exact_dtype_is_used_when_a_network_is_loaded(tiny, machine):
    """The weights are stored in float32."""
    exact = bytes_of(tiny, "float32")
    machine.has_memory(exact - 1)
    pipe = wanjax.load(tiny)
    with pytest.raises(WanjaxError, match=line_with_words("float32 machine bfloat16")):
        _ = pipe.transformer
    assert wanjax.load(tiny, param_dtype="bfloat16").transformer is not None
    with pytest.raises(WanjaxError, match=line_with_words("float32 memory bfloat16")):
        wanjax.load(tiny, param_dtype="float32")
    machine.has_memory(exact)
    assert pipe.transformer is not None


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("wan2.1-t2v-14b", 28 * GB, "transformer wan2.1-t2v-14b 28.6 GB"),
        ("wan2.2-t2v-a14b", 28 * GB, "transformer wan2.2-t2v-a14b 28.6 GB"),
        ("wan2.1-t2v-14b", 29 * GB, None),
        ("wan2.1-t2v-1.3b", 11 * GB, "text_encoder wan2.1-t2v-1.3b 11.4 GB"),
        ("wan2.1-t2v-1.3b", 12 * GB, None),
        ("nano", 1_000_000, "of nano needs "),
    ],
)
def test_published_models_are_checked_against_the_memory(model, size, message, machine, tmp_path, monkeypatch):
    """The configs are those of the presets, because tests read nothing from the real hub."""
    description = registry.model_description(model)
    if model == "nano":
        result = registry.inspect_checkpoint(model)
    else:
        classes = {name: ["", ""] for name in description.model.spec.networks}
        (tmp_path / "model_index.json").write_text(json.dumps(classes))
        result = registry.Checkpoint(**vars(description), source=open_diffusers(model, tmp_path))
    monkeypatch.setattr(registry, "inspect_checkpoint", lambda *_: result)
    machine.has_memory(size)
    if message is None:
        assert max(wanjax.load(model).components.sizes.values()) <= size
        return
    with pytest.raises(WanjaxError) as caught:
        wanjax.load(model)
    assert has_line_with_words(str(caught.value), message)
    names = registry.models_that_fit(size)
    assert (names == []) == (model == "nano")
    assert model not in names
    assert all(name in str(caught.value) for name in names)


def test_models_that_fit_into_a_size_are_listed():
    assert registry.models_that_fit(0) == []
    assert registry.models_that_fit(1 * GB) == ["nano"]
    assert {"wan2.1-t2v-1.3b", "wan2.2-ti2v-5b"} & {*registry.models_that_fit(12 * GB)}
    assert "wan2.1-vace-14b" in registry.models_that_fit(1000 * GB)


def test_a_mesh_divides_the_weights(monkeypatch):
    """The devices of a CPU share one memory; other devices have one each."""
    description = registry.model_description("wan2.1-t2v-14b")
    network = description.family.network_of(description.model.spec.networks["transformer"]).abstract(
        dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    sharded = with_shardings(network, Partitioner(make_mesh(1, 1, 8), SHARDING_RULES["fsdp"]))
    one_device = memory.bytes_needed(network)
    assert one_device == pytest.approx(28.6 * GB, rel=0.01)
    assert memory.bytes_needed(sharded) >= one_device
    monkeypatch.setattr(memory, "device_platform", lambda: "tpu")
    assert memory.bytes_needed(sharded) == pytest.approx(one_device / 8, rel=0.01)
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", memory_stats=lambda: {"bytes_limit": 16 * GB})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [chip])
    loading.check_memory("it", "transformer", sharded)
    monkeypatch.setattr(memory, "bytes_by_device", lambda _: {"chip": one_device})
    with pytest.raises(WanjaxError, match=line_with_words("TPU v5 16 GB mesh sp tp 2")):
        loading.check_memory("it", "transformer", network)


ROUND, OFFLOAD = "--precision int8-weights", "--offload blocks"


@pytest.mark.parametrize(
    ("size", "host", "options"),
    [
        (15.5 * GB, 64 * GB, {ROUND, OFFLOAD}),
        (15.5 * GB, 20 * GB, {ROUND}),
        (8 * GB, 64 * GB, {OFFLOAD}),
        (8 * GB, 20 * GB, {ROUND, OFFLOAD, "both"}),
        (8 * GB, 10 * GB, set()),
        (0.5 * GB, 64 * GB, set()),
    ],
)
def test_the_message_lists_the_options_that_make_a_network_fit(size, host, options, monkeypatch):
    """The 14B has 28.6 GB in bfloat16 and 15 GB in 8 bits; two of its forty blocks have 1.4 GB and 0.7 GB."""
    description = registry.model_description("wan2.1-t2v-14b")
    info = description.family.network_of(description.model.spec.networks["transformer"])
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    network = info.abstract(**kinds)
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", memory_stats=lambda: {"bytes_limit": int(size)})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [chip])
    monkeypatch.setattr(memory, "machine_memory", lambda: int(host))
    monkeypatch.setattr(memory, "bytes_by_device", lambda network: {"chip": offloaded_bytes(network, 40)[0]})
    monkeypatch.setattr(memory, "device_platform", lambda: "tpu")
    with pytest.raises(WanjaxError) as caught:
        loading.check_memory(
            "it", "transformer", network, lambda: info.abstract(precision=PRECISIONS["int8-weights"], **kinds)
        )
    text = str(caught.value)
    assert {option for option in (ROUND, OFFLOAD) if option in text} == options - {"both"}
    assert (f"{ROUND} {OFFLOAD}" in text) == ("both" in options)
    assert has_line_with_words(text, "mesh sp tp")
    with pytest.raises(WanjaxError) as caught:  # a text encoder has no weights for a precision
        loading.check_memory("it", "text_encoder", network)
    assert ROUND not in str(caught.value)


def test_the_message_suggests_a_precision_if_the_model_then_fits(machine, tmp_path, monkeypatch):
    description = registry.model_description("wan2.1-t2v-14b")
    classes = {name: ["", ""] for name in description.model.spec.networks}
    (tmp_path / "model_index.json").write_text(json.dumps(classes))
    result = registry.Checkpoint(**vars(description), source=open_diffusers("wan2.1-t2v-14b", tmp_path))
    monkeypatch.setattr(registry, "inspect_checkpoint", lambda *_: result)
    machine.has_memory(20 * GB)
    with pytest.raises(WanjaxError, match=ROUND):
        wanjax.load("wan2.1-t2v-14b")
    wanjax.load("wan2.1-t2v-14b", precision="int8-weights")
    machine.has_memory(14 * GB)
    for precision in (None, "int8-weights"):
        with pytest.raises(WanjaxError) as caught:
            wanjax.load("wan2.1-t2v-14b", precision=precision)
        assert ROUND not in str(caught.value)


def test_the_total_memory_respects_control_groups(monkeypatch, tmp_path):
    cpu = jax.devices()[0]
    monkeypatch.setattr(memory, "CGROUPS_FILE", tmp_path / "groups")
    monkeypatch.setattr(memory, "CGROUPS_ROOT", tmp_path)
    swap = SimpleNamespace(total=0)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: swap)
    total = memory.total_memory(cpu)
    assert total is not None
    assert total > GB
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path, text in (
        ("groups", "0::/a/b\n"),
        ("memory.max", "max\n"),
        ("a/memory.max", "700000000\n"),
        ("a/b/memory.max", "max"),
    ):
        (tmp_path / path).write_text(text)
    assert memory.total_memory(cpu) == 700_000_000
    swap.total = 1000
    assert memory.total_memory(cpu) == 700_001_000
    (tmp_path / "memory").mkdir()  # the first version of control groups
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("600000000")
    (tmp_path / "groups").write_text("5:cpu:/x\n4:memory:/x\n")
    assert memory.total_memory(cpu) == 600_001_000
    assert memory.total_memory(SimpleNamespace(platform="gpu", memory_stats=lambda: None)) is None


def test_the_needed_memory_is_reported(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("a", "--model", tiny, "--size", "32x32", "--frames", "5", "--steps", "1", "--dtype", "float32")
    assert "weights" not in succeeded(command(*options)).stderr  # less than a gigabyte
    monkeypatch.setattr(stages, "LARGE_BYTES", 0)
    output = succeeded(command(*options)).stderr
    assert re.search(r"the weights of its (transformer|text_encoder) take about \d+\.\d kB of memory\n", output)
    assert "at least" not in output  # the peak FLOP/s of a CPU are unknown
    pipe = wanjax.load(tiny)
    settings = pipe.settings(guidance_scale=5.0, steps=4)
    flops = sum(pipe.model.cost(settings).flops.values())
    assert least_seconds(pipe, settings, 4, "TPU v6 lite") == pytest.approx(4 * 2 * flops / V6E.flops)
    assert least_seconds(pipe, pipe.settings(guidance_scale=1.0), 4, "TPU v6e") == pytest.approx(4 * flops / V6E.flops)
    assert least_seconds(pipe, settings, 4, "cpu") is None
    assert "denoising" not in str(estimate_note(pipe, settings, False))
    monkeypatch.setattr(stages, "LONG_RUN_SECONDS", 0.0)
    about = format_duration(4 * 2 * flops / roofline.cpu_machine().flops)
    assert has_line_with_words(str(estimate_note(pipe, settings, False)), f"denoising about {about} 40 GFLOP/s core")
    sharded = wanjax.load(tiny, mesh="dp=2,sp=2,tp=2")
    assert least_seconds(sharded, settings, 4, "TPU v6e") == pytest.approx(flops / V6E.flops)
    windowed = wanjax.load(tiny, attention="chunked:window=4")
    seconds = least_seconds(windowed, settings, 4, "TPU v6e")
    assert seconds is not None
    assert 0 < seconds < 4 * 2 * flops / V6E.flops
    assert least_seconds(windowed, settings, 4, "NVIDIA H200") is not None
