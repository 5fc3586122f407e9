# SPDX-License-Identifier: Apache-2.0
"""The choice of a mesh: what it takes, and that a plan prices the mesh on which a run is made."""

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
SEVERAL = [place for place in SLICES.values() if place.devices > 1]


def cost_of(model=LARGE, *, size=None, attention=AUTO, rules="fsdp", offload=None, **settings) -> StepCost:
    shape = {} if size is None else {"height": size[0], "width": size[1]}
    video = model.settings.updated(shape | settings)
    how = {
        "attention": attention,
        "rules": SHARDING_RULES[rules],
        "offload": Offload.of(offload),
        "param_dtype": model.param_dtype,
    }
    return step_cost(model.family, model.model, video, **how)


def chosen(place: Slice, cost: StepCost, sp: int | None = None) -> MeshSizes:
    return choose_mesh(cost, place.devices, place.memory, place.chip, sp=sp)


@pytest.mark.parametrize("chip", [H100, cpu_machine()], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("devices", "model", "guided", "mesh"),
    [
        (8, LARGE, True, (2, 1, 4)),
        (16, LARGE, True, (2, 1, 8)),
        (8, LARGE, False, (1, 1, 8)),
        (16, LARGE, False, (1, 2, 8)),  # 16 do not divide 40 heads
        (8, SMALL, True, (2, 1, 4)),
        (16, SMALL, True, (2, 2, 4)),  # nor 8 these 12
        (3, SMALL, True, (1, 1, 3)),
        (1, SMALL, True, (1, 1, 1)),
        (8, model_description("nano"), True, (2, 1, 2)),  # of 80 tokens each device takes 32 at the least
    ],
)
def test_devices_behind_a_switch_take_guidance_then_heads_then_tokens(chip, devices, model, guided, mesh):
    cost = cost_of(model, guidance_scale=5.0 if guided else 1.0)
    assert choose_mesh(cost, devices, None, chip) == mesh


@pytest.mark.parametrize(
    ("chip", "size", "tokens_on_sp", "heads_on_tp"),
    [
        ("v6e-8", (720, 1280), (2, 4, 1), (2, 1, 4)),
        ("v6e-16", (720, 1280), (2, 8, 1), (2, 1, 8)),
        ("v6e-8", (480, 832), (2, 4, 1), (2, 1, 4)),
        ("v6e-16", (480, 832), (2, 1, 8), (2, 1, 8)),  # 4,095 tokens a device attend for less than they send
    ],
)
def test_tokens_of_tpus_go_on_sp_where_keys_go_round_for_nothing(chip, size, tokens_on_sp, heads_on_tp):
    assert chosen(SLICES[chip], cost_of(size=size)) == tokens_on_sp
    assert chosen(SLICES[chip], cost_of(size=size, attention=AttentionConfig.of("chunked"))) == heads_on_tp


def test_heads_that_do_not_divide_are_padded_where_that_costs_less_than_sending():
    assert model_description("cogvideox-2b").model.cost(model_description("cogvideox-2b").settings).num_heads == 30
    assert chosen(SLICES["v6e-8"], cost_of(model_description("cogvideox-2b"))) == (2, 1, 4)


def test_the_prompts_stay_together_where_their_weights_would_not_fit_twice():
    """The 14B's 26.6 GiB leave no room on two chips of 15.75, nor on two of 31.25 if both experts stay."""
    assert chosen(SLICES["v5e-4"], cost_of()) == (1, 4, 1)
    assert chosen(SLICES["v6e-4"], cost_of()) == (2, 2, 1)
    assert chosen(SLICES["v6e-4"], cost_of(EXPERTS)) == (2, 2, 1)
    assert chosen(SLICES["v6e-4"], cost_of(EXPERTS, offload="none")) == (1, 4, 1)


def test_where_the_weights_fit_on_no_mesh_they_are_divided_most():
    cost = cost_of()
    assert not any(weights_fit(cost, mesh, 2 * GIB) for mesh in meshes(cost, 4))
    assert choose_mesh(cost, 4, 2 * GIB, V5E) == (1, 4, 1)


def test_rules_say_which_axes_divide_the_weights():
    """`tp` divides by tp alone. Replicated weights may fill a chip: a plan says whether they fit."""
    place = SLICES["v6e-8"]
    assert cost_of().weight_shards(MeshSizes(2, 4, 1)) == 4
    assert cost_of(rules="tp").weight_shards(MeshSizes(2, 2, 2)) == 2
    assert chosen(place, cost_of(rules="tp")).tp > 1
    replicated = cost_of(rules="replicated")
    assert replicated.weight_shards(MeshSizes(2, 1, 4)) == 1
    assert weights_fit(replicated, MeshSizes(1, 8, 1), place.memory)
    assert not weights_fit(cost_of(EXPERTS, rules="replicated", offload="none"), MeshSizes(1, 8, 1), place.memory)


def test_weights_are_counted_in_their_dtype():
    assert cost_of().weight_bytes == cost_of(EXPERTS).weight_bytes == BF16  # one of two experts
    wide = step_cost(LARGE.family, LARGE.model, LARGE.settings, param_dtype="float32")
    assert wide.weight_bytes == wide.network_bytes == 2 * BF16
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


def test_every_mesh_of_the_devices_is_a_candidate_once():
    result = list(meshes(cost_of(), 8))
    assert len(set(result)) == len(result) == 7
    assert all(prod(mesh) == 8 for mesh in result)
    assert list(meshes(cost_of(), 1)) == [(1, 1, 1)]


@pytest.mark.parametrize(
    ("model", "attention", "passes"),
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
def test_whose_keys_go_round(model, attention, passes):
    assert cost_of(model_description(model), attention=AttentionConfig.of(attention)).ring is passes


class StopError(Exception):
    """The mesh is chosen already: nothing needs to be traced."""


@pytest.fixture(scope="module")
def described():
    """The devices of every slice, none of which is here."""
    pytest.importorskip("libtpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return {place.name: topology_devices(place.topology) for place in SEVERAL}


@pytest.fixture
def mesh_of_plan(monkeypatch):
    """Return the mesh that a plan would price."""

    def stopped(place, axes):
        raise StopError(tuple(axes.values()))

    def of_plan(price, *arguments, **how):
        with pytest.raises(StopError) as stop:
            price(*arguments, **how)
        return stop.value.args[0]

    for module in (estimate, training_estimate):
        monkeypatch.setattr(module, "mesh_on", stopped)
    return of_plan


@pytest.fixture
def without_weights(tmp_path, monkeypatch):
    """Let every published model be loaded, from a checkpoint that lists no component."""
    (tmp_path / "model_index.json").write_text("{}")

    def admit(model: str, revision: str | None, note: object) -> Checkpoint:
        if isinstance(description := model_description(model), Checkpoint):
            return description
        values = {field.name: getattr(description, field.name) for field in fields(description)}
        assert description.preset is not None
        values["preset"] = replace(description.preset, loras=())  # they change no mesh
        return Checkpoint(**values, source=open_diffusers(model, tmp_path, "main"))

    monkeypatch.setattr(loading, "open_for_loading", admit)


def mesh_of_run(devices, model: str, **options) -> tuple[int, ...]:
    with substitute_devices(devices):
        return tuple(loading.load(model, mesh="auto", **options).partitioner.mesh.shape.values())


def test_a_plan_prices_the_mesh_of_a_run(described, without_weights, mesh_of_plan):
    """Every published model, on every slice."""
    differ = {}
    for model in presets():
        for place in SEVERAL:
            run = mesh_of_run(described[place.name], model)
            plan = mesh_of_plan(estimate.estimate_video, model_description(model), place.name)
            if run != plan:
                differ[model, place.name] = run, plan
    assert not differ


BY_COMMAND = [
    ("nano", "v6e-8", {"dp": 2, "sp": 2, "tp": 1}),  # four of eight chips
    ("wan2.1-t2v-14b", "v5e-4", {"dp": 1, "sp": 4, "tp": 1}),
    ("turbowan2.1-t2v-14b-480p", "v6e-16", {"dp": 1, "sp": 2, "tp": 8}),
]


@pytest.mark.parametrize(("model", "chip", "mesh"), quick(BY_COMMAND[:2], BY_COMMAND))
def test_the_command_prints_the_mesh_of_a_run(described, without_weights, monkeypatch, model, chip, mesh):
    price = Price(argument_bytes=1, peak_bytes=2, seconds=3.0, breakdown={"attention": 3.0})
    monkeypatch.setattr(estimate, "price_on", lambda place, programs, tell: [price] * len(programs))
    run = CliRunner().invoke(main, ["plan", model, "--chip", chip, "--json"])
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
    assert data["mesh"] == mesh
    assert data["devices"] == prod(mesh.values())
    assert mesh_of_run(described[chip], model) == tuple(mesh.values())


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
def test_a_plan_and_a_run_choose_the_same_mesh(described, without_weights, mesh_of_plan, model, chip, options):
    run = mesh_of_run(described[chip], model, **options)
    assert mesh_of_plan(estimate.estimate_video, model_description(model), chip, **options) == run


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_of_training_prices_the_mesh_of_a_training(described, without_weights, mesh_of_plan, full):
    """A clip has one prompt, so that no chips repeat the work of others."""
    how = {"lora": None if full else LoraConfig(), "optimizer_config": OptimizerConfig()}
    plan = mesh_of_plan(training_estimate.estimate_training, LARGE, "v6e-8", **how)
    video = {"guidance_scale": 1.0}
    run = mesh_of_run(described["v6e-8"], LARGE.settings.model, video=video, param_dtype="float32" if full else None)
    assert plan == run
    assert plan[0] == 1
