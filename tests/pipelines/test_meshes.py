# SPDX-License-Identifier: Apache-2.0
"""The automatic choice of a mesh: a run and a plan choose the same one."""

import json
from dataclasses import fields, replace
from math import prod

import pytest
from click.testing import CliRunner

from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax import loading
from wanjax.checkpoints.sources import open_diffusers
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.offload import Offload
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.meshes import StepCost, choose_mesh, meshes, step_cost, weights_fit
from wanjax.plan import estimate, training_estimate
from wanjax.pricing.chips import GIB, SLICES, V5E, Slice, topology_devices
from wanjax.pricing.compile import ENVIRONMENT
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import H100, cpu_machine
from wanjax.registry import Checkpoint, model_description, presets
from wanjax.sharding import SHARDING_RULES, substitute_devices
from wanjax.training.adapters import LoraConfig
from wanjax.training.optimizers import OptimizerConfig

LARGE, SMALL = model_description("wan2.1-t2v-14b"), model_description("wan2.1-t2v-1.3b")
EXPERTS = model_description("wan2.2-t2v-a14b")
BF16 = 2 * 14_288_491_584  # bytes of the 14B's weights
SLICES_OF_SEVERAL = [tpu_slice for tpu_slice in SLICES.values() if tpu_slice.devices > 1]


def cost_of(model=LARGE, *, size=None, attention=AUTO, rules="fsdp", offload=None, **settings) -> StepCost:
    shape = {} if size is None else {"height": size[0], "width": size[1]}
    video = model.settings.updated(shape | settings)
    options = {
        "attention": attention,
        "rules": SHARDING_RULES[rules],
        "offload": Offload.of(offload),
        "param_dtype": model.param_dtype,
    }
    return step_cost(model.family, model.model, video, **options)


def choose(tpu_slice: Slice, cost: StepCost, sp: int | None = None) -> MeshSizes:
    return choose_mesh(cost, tpu_slice.devices, tpu_slice.memory, tpu_slice.chip, sp=sp)


@pytest.mark.parametrize("chip", [H100, cpu_machine()], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("devices", "model", "guided", "mesh"),
    [
        (8, LARGE, True, (2, 1, 4)),
        (16, LARGE, True, (2, 1, 8)),
        (8, LARGE, False, (1, 1, 8)),
        (16, LARGE, False, (1, 2, 8)),  # 16 do not divide 40 heads
        (8, SMALL, True, (2, 1, 4)),
        (16, SMALL, True, (2, 2, 4)),  # 8 do not divide 12 heads
        (3, SMALL, True, (1, 1, 3)),
        (1, SMALL, True, (1, 1, 1)),
        (8, model_description("nano"), True, (2, 1, 2)),  # each device takes at least 32 of the 80 tokens
    ],
)
def test_switched_devices_share_guidance_then_heads_then_tokens(chip, devices, model, guided, mesh):
    cost = cost_of(model, guidance_scale=5.0 if guided else 1.0)
    assert choose_mesh(cost, devices, None, chip) == mesh


@pytest.mark.parametrize(
    ("chip", "size", "tokens_on_sp", "heads_on_tp"),
    [
        ("v6e-8", (720, 1280), (2, 4, 1), (2, 1, 4)),
        ("v6e-16", (720, 1280), (2, 8, 1), (2, 1, 8)),
        ("v6e-8", (480, 832), (2, 4, 1), (2, 1, 4)),
        ("v6e-16", (480, 832), (2, 1, 8), (2, 1, 8)),  # with 4,095 tokens a device, sending takes longer than attention
    ],
)
def test_tpus_share_tokens_where_a_ring_hides_its_messages(chip, size, tokens_on_sp, heads_on_tp):
    assert choose(SLICES[chip], cost_of(size=size)) == tokens_on_sp
    assert choose(SLICES[chip], cost_of(size=size, attention=AttentionConfig.of("chunked"))) == heads_on_tp


def test_padded_heads_are_chosen_where_they_cost_less_than_messages():
    assert model_description("cogvideox-2b").model.cost(model_description("cogvideox-2b").settings).num_heads == 30
    assert choose(SLICES["v6e-8"], cost_of(model_description("cogvideox-2b"))) == (2, 1, 4)


def test_both_prompts_share_devices_where_two_copies_do_not_fit():
    """The 14B's 26.6 GiB fit neither two chips of 15.75 GiB, nor two of 31.25 GiB if both experts stay loaded."""
    assert choose(SLICES["v5e-4"], cost_of()) == (1, 4, 1)
    assert choose(SLICES["v6e-4"], cost_of()) == (2, 2, 1)
    assert choose(SLICES["v6e-4"], cost_of(EXPERTS)) == (2, 2, 1)
    assert choose(SLICES["v6e-4"], cost_of(EXPERTS, offload="none")) == (1, 4, 1)


def test_weights_that_fit_no_mesh_are_divided_most():
    cost = cost_of()
    assert not any(weights_fit(cost, mesh, 2 * GIB) for mesh in meshes(cost, 4))
    assert choose_mesh(cost, 4, 2 * GIB, V5E) == (1, 4, 1)


def test_the_rules_decide_which_axes_divide_the_weights():
    """`tp` divides weights by the tp axis only. Replicated weights may fill a chip: a plan says whether they fit."""
    tpu_slice = SLICES["v6e-8"]
    assert cost_of().weight_shards(MeshSizes(2, 4, 1)) == 4
    assert cost_of(rules="tp").weight_shards(MeshSizes(2, 2, 2)) == 2
    assert choose(tpu_slice, cost_of(rules="tp")).tp > 1
    replicated = cost_of(rules="replicated")
    assert replicated.weight_shards(MeshSizes(2, 1, 4)) == 1
    assert weights_fit(replicated, MeshSizes(1, 8, 1), tpu_slice.memory)
    assert not weights_fit(cost_of(EXPERTS, rules="replicated", offload="none"), MeshSizes(1, 8, 1), tpu_slice.memory)


def test_weights_are_counted_in_their_dtype():
    assert cost_of().weight_bytes == cost_of(EXPERTS).weight_bytes == BF16  # one of two experts
    float32_cost = step_cost(LARGE.family, LARGE.model, LARGE.settings, param_dtype="float32")
    assert float32_cost.weight_bytes == float32_cost.network_bytes == 2 * BF16
    assert cost_of(EXPERTS, offload="none").weight_bytes > 2 * BF16


@pytest.mark.parametrize(
    ("devices", "sp", "guided", "mesh"),
    [
        (8, 1, True, (2, 1, 4)),
        (8, 2, True, (2, 2, 2)),
        (8, 4, True, (2, 4, 1)),
        (8, 8, True, (1, 8, 1)),
        (8, 2, False, (1, 2, 4)),
    ],
)
def test_a_requested_sp_stays(devices, sp, guided, mesh):
    cost = cost_of(SMALL, guidance_scale=5.0 if guided else 1.0)
    assert choose_mesh(cost, devices, None, H100, sp=sp) == mesh
    with pytest.raises(WanjaxError, match=line_with_words("sp=3 divisor")):
        choose_mesh(cost, devices, None, H100, sp=3)


def test_each_mesh_of_the_devices_is_considered_once():
    candidates = list(meshes(cost_of(), 8))
    assert len(set(candidates)) == len(candidates) == 7
    assert all(prod(mesh) == 8 for mesh in candidates)
    assert list(meshes(cost_of(), 1)) == [(1, 1, 1)]


@pytest.mark.parametrize(
    ("model", "attention", "is_ring"),
    [
        ("wan2.1-t2v-14b", None, True),
        ("wan2.1-i2v-14b-720p", "flash_tpu:block_q=1024", True),
        ("wan2.2-i2v-a14b", "auto", True),
        ("cogvideox1.5-5b", None, False),
        ("wan2.1-t2v-14b", "radial", False),
        ("wan2.1-t2v-14b", "chunked", False),
        ("wan2.1-t2v-14b", "auto:window=4096", False),
        ("wan2.1-t2v-14b", "flash_tpu:center_keys", False),
        ("turbowan2.1-t2v-14b-720p", None, False),
        ("hunyuanvideo1.5-720p-t2v", None, False),
        ("wan2.1-t2v-1.3b-causal", None, False),
    ],
)
def test_a_ring_is_used_by_models_and_attention_that_support_it(model, attention, is_ring):
    assert cost_of(model_description(model), attention=AttentionConfig.of(attention)).can_use_ring is is_ring


class StopError(Exception):
    """The mesh is chosen, so that nothing needs to be traced."""


@pytest.fixture(scope="module")
def slice_devices():
    """Describe the devices of every slice, which need not be present."""
    pytest.importorskip("libtpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return {tpu_slice.name: topology_devices(tpu_slice.topology) for tpu_slice in SLICES_OF_SEVERAL}


@pytest.fixture
def mesh_of_plan(monkeypatch):
    """Return a function that returns the mesh that a plan chooses."""

    def stop_at_mesh(hardware, axes):
        raise StopError(tuple(axes.values()))

    def chosen_mesh(price, *arguments, **options):
        with pytest.raises(StopError) as stop:
            price(*arguments, **options)
        return stop.value.args[0]

    for module in (estimate, training_estimate):
        monkeypatch.setattr(module, "mesh_on", stop_at_mesh)
    return chosen_mesh


@pytest.fixture
def without_weights(tmp_path, monkeypatch):
    """Load every published model from a checkpoint without components."""
    (tmp_path / "model_index.json").write_text("{}")

    def admit(model: str, revision: str | None, note: object) -> Checkpoint:
        if isinstance(description := model_description(model), Checkpoint):
            return description
        values = {field.name: getattr(description, field.name) for field in fields(description)}
        assert description.preset is not None
        values["preset"] = replace(description.preset, loras=())  # LoRAs do not change the mesh
        return Checkpoint(**values, source=open_diffusers(model, tmp_path, "main"))

    monkeypatch.setattr(loading, "open_for_loading", admit)


def mesh_of_run(devices, model: str, **options) -> tuple[int, ...]:
    with substitute_devices(devices):
        return tuple(loading.load(model, mesh="auto", **options).partitioner.mesh.shape.values())


MODELS_OF_EACH_KIND = [
    *("nano", "wan2.1-t2v-14b", "wan2.2-i2v-a14b", "wan2.1-t2v-1.3b-causal", "turbowan2.1-t2v-14b-720p"),
    *("cogvideox-2b", "hunyuanvideo1.5-480p-t2v"),
]


@pytest.mark.parametrize("model", quick(MODELS_OF_EACH_KIND, presets()))
def test_a_plan_prices_the_mesh_of_a_run(slice_devices, without_weights, mesh_of_plan, model):
    """This holds for every published model on every slice."""
    differences = {}
    for tpu_slice in SLICES_OF_SEVERAL:
        run = mesh_of_run(slice_devices[tpu_slice.name], model)
        plan = mesh_of_plan(estimate.estimate_video, model_description(model), tpu_slice.name)
        if run != plan:
            differences[tpu_slice.name] = run, plan
    assert not differences


MESHES_OF_COMMANDS = [
    ("nano", "v6e-8", {"dp": 2, "sp": 2, "tp": 1}),  # four of eight chips
    ("wan2.1-t2v-14b", "v5e-4", {"dp": 1, "sp": 4, "tp": 1}),
    ("turbowan2.1-t2v-14b-480p", "v6e-16", {"dp": 1, "sp": 2, "tp": 8}),
]


@pytest.mark.parametrize(("model", "chip", "mesh"), quick(MESHES_OF_COMMANDS[:1], MESHES_OF_COMMANDS))
def test_the_command_prints_the_mesh_of_a_run(slice_devices, without_weights, monkeypatch, model, chip, mesh):
    price = Price(argument_bytes=1, peak_bytes=2, seconds=3.0, breakdown={"attention": 3.0})
    monkeypatch.setattr(estimate, "price_on", lambda hardware, programs, tell: [price] * len(programs))
    run = CliRunner().invoke(main, ["plan", model, "--chip", chip, "--json"])
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
    assert data["mesh"] == mesh
    assert data["devices"] == prod(mesh.values())
    assert mesh_of_run(slice_devices[chip], model) == tuple(mesh.values())


@pytest.mark.parametrize(("model", "chip"), [("wan2.1-t2v-14b", "v5e-4"), ("wan2.2-t2v-a14b", "v6e-4")])
@pytest.mark.parametrize(
    "options",
    [
        {"attention": AttentionConfig.of("chunked")},
        {"rules": "tp"},
        {"rules": "replicated"},
        {"offload": Offload.of("none")},
    ],
)
def test_a_plan_and_a_run_choose_the_same_mesh(slice_devices, without_weights, mesh_of_plan, model, chip, options):
    run = mesh_of_run(slice_devices[chip], model, **options)
    assert mesh_of_plan(estimate.estimate_video, model_description(model), chip, **options) == run


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_of_training_prices_the_mesh_of_a_training(slice_devices, without_weights, mesh_of_plan, full):
    """A clip has one prompt, so that the mesh needs no axis for two prompts."""
    options = {"lora": None if full else LoraConfig(), "optimizer_config": OptimizerConfig()}
    plan = mesh_of_plan(training_estimate.estimate_training, LARGE, "v6e-8", **options)
    video = {"guidance_scale": 1.0}
    run = mesh_of_run(
        slice_devices["v6e-8"], LARGE.settings.model, video=video, param_dtype="float32" if full else None
    )
    assert plan == run
    assert plan[0] == 1
