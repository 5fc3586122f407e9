# SPDX-License-Identifier: Apache-2.0
"""LoRA in `load`, for every layout of checkpoints, for one or two experts, and on the command line."""

import json
import re
import shutil
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import wanjax
from tests.support.commands import refused
from tests.support.families import registered
from tests.support.hub import ID
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax import registry
from wanjax.checkpoints import modules
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.weight_changes import with_loras
from wanjax.cli import main
from wanjax.converters.wan.diffusers import transformer_weight_rules
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import model_description, open_source, presets
from wanjax.schedulers import FlowEuler, name_of

Q = "blocks.1.self_attn.q"
KEY = "blocks.1.attn1.to_q.weight"
WIDTH = 24
VIDEO = ["--size", "32x32", "--frames", "5", "--steps", "1"]


def run(*args):
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Write a LoRA for the q of one of the two blocks, with the authors' names."""
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    random = np.random.default_rng(0)
    down, up = (random.normal(size=shape).astype(np.float32) for shape in ((2, WIDTH), (WIDTH, 2)))
    save_safetensors(path, {f"diffusion_model.{Q}.lora_down.weight": down, f"diffusion_model.{Q}.lora_up.weight": up})
    return path


def change(file):
    tensors = load_safetensors(file)
    return tensors[f"diffusion_model.{Q}.lora_up.weight"] @ tensors[f"diffusion_model.{Q}.lora_down.weight"]


def q_weight(pipe):
    """Return the q of the network's second block, as diffusers stores it."""
    weights = {path: np.asarray(x) for path, x in modules.parameters(pipe.transformer).items()}
    return modules.ExportedTensors(weights, transformer_weight_rules(pipe.model.transformer)).read(KEY)


def test_a_lora_is_merged_when_the_transformer_is_loaded(checkpoint, file):
    base = q_weight(wanjax.load(checkpoint))
    notes = []
    merged = wanjax.load(checkpoint, lora=f"{file}:0.5", note=notes.append)
    assert notes == [f"{file}: 1 of 1 change merged"]
    np.testing.assert_allclose(q_weight(merged), base + 0.5 * change(file), rtol=1e-6, atol=1e-6)
    sum_of_two = wanjax.load(checkpoint, lora=[Lora(str(file)), f"{file}:-3"])
    np.testing.assert_allclose(q_weight(sum_of_two), base - 2 * change(file), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("location", ["file", "folder", "hub"])
def test_peft_s_alpha_is_read_for_a_file_a_folder_and_the_hub(location, checkpoint, file, tmp_path, server):
    tensors = {f"base_model.model.{key.partition('.')[2]}": x for key, x in load_safetensors(file).items()}
    names = "adapter_model.safetensors", "adapter_config.json"
    save_safetensors(tmp_path / names[0], tensors)
    (tmp_path / names[1]).write_text(json.dumps({"r": 2, "lora_alpha": 1, "alpha_pattern": {r".*\.(q|k)": 5, "v": 1}}))
    for name in names:
        server.files[f"loras/{name}"] = (tmp_path / name).read_bytes()
    lora = {"file": tmp_path / names[0], "folder": tmp_path, "hub": f"{ID}/loras/{names[0]}"}[location]
    notes = []
    merged = wanjax.load(checkpoint, lora=str(lora), note=notes.append)
    np.testing.assert_allclose(
        q_weight(merged), q_weight(wanjax.load(checkpoint)) + 2.5 * change(file), rtol=1e-6, atol=1e-6
    )
    assert has_line_with_words(notes[0], "1 of 1 'v'")


def test_a_strength_of_0_changes_no_weight(checkpoint, file):
    base, unchanged = (modules.parameters(wanjax.load(checkpoint, lora=x).transformer) for x in ((), f"{file}:0"))
    jax.tree.map(np.testing.assert_array_equal, base, unchanged)


def test_a_lora_is_merged_into_a_converted_checkpoint(checkpoint, file, tmp_path):
    ConversionToWanjax(open_source(checkpoint), tmp_path / "converted", NETWORKS).run()
    pipe = wanjax.load(tmp_path / "converted", lora=str(file))
    np.testing.assert_allclose(q_weight(pipe), q_weight(wanjax.load(checkpoint)) + change(file), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", quick(["bfloat16"], ["float32", "bfloat16"]))
def test_a_conversion_merges_a_lora(checkpoint, file, tmp_path, dtype):
    """The converted checkpoint, and the one converted back, have the weights that `load` merges."""
    converted, lora = tmp_path / "plain", f"{file}:0.5"
    run("convert", checkpoint, converted, "--dtype", dtype)
    assert "1 of 1 change merged" in run("convert", converted, tmp_path / "merged", "--lora", lora)
    run("convert", checkpoint, tmp_path / "at once", "--lora", lora, "--dtype", f"transformer={dtype}")
    run("convert", converted, tmp_path / "back", "--to", "diffusers", "--lora", lora)
    for name, source in (("merged", converted), ("back", converted), ("at once", checkpoint)):
        pipe, loaded = wanjax.load(tmp_path / name), wanjax.load(source, lora=lora, param_dtype=dtype)
        assert q_weight(pipe).dtype == dtype
        assert (q_weight(pipe) != q_weight(wanjax.load(converted))).any()
        weights = [modules.parameters(each.transformer) for each in (pipe, loaded)]
        jax.tree.map(np.testing.assert_array_equal, *weights)
    assert json.loads((tmp_path / "merged/wanjax.json").read_text())["request"]["loras"] == ["style.safetensors:0.5"]
    assert "already exists" in run("convert", converted, tmp_path / "merged", "--lora", lora)
    assert "/merged match: 200 arrays and 7 other files" in run("convert", tmp_path / "merged", "--verify")


def test_a_conversion_opens_its_source_once(checkpoint, file, tmp_path, monkeypatch):
    opened_sources = []
    monkeypatch.setattr(
        registry, "open_source", lambda name, *arguments: opened_sources.append(name) or open_source(name, *arguments)
    )
    run("convert", checkpoint, tmp_path / "merged", "--lora", file)
    assert opened_sources == [str(checkpoint)]


@pytest.fixture(scope="module")
def merged(checkpoint, file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "new"
    run("convert", checkpoint, folder, "--lora", file)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("CHECKPOINT MERGED --lora FILE:2", "already other contents another --lora: new folder"),
        ("CHECKPOINT MERGED", "already other contents another --lora: new folder"),
        ("CHECKPOINT MERGED --lora nowhere.safetensors", "no file nowhere.safetensors"),
        ("MERGED --verify --lora FILE", "--lora new"),
    ],
)
def test_another_lora_needs_another_folder(checkpoint, file, merged, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    paths = {"CHECKPOINT": checkpoint, "MERGED": merged, "FILE": file}
    options = re.sub("[A-Z]{4,}", lambda name: str(paths[name[0]]), arguments).split()
    assert has_line_with_words(refused("convert", *options), words)


def test_unmatched_changes_are_reported(checkpoint, file, tmp_path):
    unmatched = tmp_path / "other.safetensors"
    save_safetensors(unmatched, load_safetensors(file) | {"lora_te_x.diff": np.ones((5, 5), np.float32)})
    with pytest.warns(UserWarning, match=line_with_words("1 of 2 merged lora_te_x")):
        wanjax.load(checkpoint, lora=str(unmatched))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanjax.load(checkpoint, lora=str(file))


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("OTHER", "[5, 5] [24, 24] LoRA"),
        ("nowhere.safetensors", "nowhere.safetensors"),
        ("high=FILE", "experts high="),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_before_loading(checkpoint, file, tmp_path, lora, words):
    save_safetensors(other_lora := tmp_path / "other.safetensors", {f"{Q}.diff": np.ones((5, 5), np.float32)})
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        wanjax.load(checkpoint, lora=lora.replace("OTHER", str(other_lora)).replace("FILE", str(file)))


@pytest.fixture(scope="module")
def experts(checkpoint, tmp_path_factory):
    """The checkpoint with its transformer twice."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("experts") / "two")
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer_2": index["transformer"]}))
    return folder


def test_each_of_two_experts_may_have_a_separate_lora(experts, file):
    source = open_source(experts)
    rules = network(source, "transformer", NETWORKS).rules
    loras = [Lora(str(file)), Lora(str(file), 2.0, "high"), Lora(str(file), 4.0, "low")]
    adapted = with_loras(source, loras, NETWORKS)
    base = source["transformer"].tensors(rules).read(KEY)
    for component, strength in (("transformer", 3), ("transformer_2", 5)):
        merged = adapted[component].tensors(rules).read(KEY)
        np.testing.assert_allclose(merged, base + strength * change(file), rtol=1e-6, atol=1e-6)
    assert adapted["vae"].tensors([]).read("quant_conv.bias") is not None


HALVES = [  # prefixes of the halves of a file for the two experts
    ("transformer.", "transformer_2."),  # diffusers
    ("diffusion_model.transformer_1.", "diffusion_model.transformer_2."),  # ai-toolkit in memory
    ("pipe.dit.", "pipe.dit2."),  # DiffSynth-Studio
    ("high_noise_model.", "low_noise_model."),
]


@pytest.mark.parametrize("halves", HALVES)
def test_each_half_of_a_file_goes_to_its_expert(halves, checkpoint, experts, file, tmp_path):
    source = open_source(experts)
    both_halves, low = tmp_path / "both.safetensors", tmp_path / "low.safetensors"
    tensors = {key.removeprefix("diffusion_model."): x for key, x in load_safetensors(file).items()}
    second = {f"{halves[1]}{key}": -2 * x if "lora_up" in key else x for key, x in tensors.items()}
    save_safetensors(both_halves, {f"{halves[0]}{key}": x for key, x in tensors.items()} | second)
    save_safetensors(low, second)
    for lora in (f"{both_halves}", f"{low}"):  # a model of one transformer has no second half
        with pytest.raises(WanjaxError, match=line_with_words("experts LoRA")):
            wanjax.load(checkpoint, lora=lora)
    rules = network(source, "transformer", NETWORKS).rules
    base = source["transformer"].tensors(rules).read(KEY)
    for loras, strengths in (
        ([Lora(str(both_halves))], (1, -2)),
        ([Lora(str(low))], (0, -2)),
        ([Lora(str(both_halves), 2.0, "high")], (2, 0)),
        ([Lora(str(both_halves), 2.0, "low")], (0, -4)),
    ):
        notes = []
        adapted = with_loras(source, loras, NETWORKS, notes.append)
        for component, strength in zip(("transformer", "transformer_2"), strengths, strict=True):
            merged = adapted[component].tensors(rules).read(KEY)
            np.testing.assert_allclose(merged, base + strength * change(file), rtol=1e-6, atol=1e-6)
        assert all(has_line_with_words(note, "1 of 1") for note in notes)
    with pytest.raises(WanjaxError, match=line_with_words("low=")):
        with_loras(source, [Lora(str(low), 1.0, "high")], NETWORKS)


def test_stages_keep_the_lora_in_their_metadata(checkpoint, file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    messages = run("a cat", "--model", checkpoint, *VIDEO, "--dir", tmp_path / "one", "--lora", f"{file.name}:0.5")
    assert "style.safetensors: 1 of 1 change merged" in messages
    metadata = json.loads((tmp_path / "one/generation_config.json").read_text())
    assert metadata["lora"] == [f"{file}:0.5"]
    monkeypatch.chdir(tmp_path)
    run("denoise", "--dir", tmp_path / "one", "--force")  # with the settings stored there
    again = load_safetensors(tmp_path / "one/stage2_latents.safetensors")["latents"].copy()
    assert "changes merged" not in run("decode", "--dir", tmp_path / "one", "--force")
    assert json.loads((tmp_path / "one/generation_config.json").read_text())["lora"] == [f"{file}:0.5"]
    run("encode", "a cat", "--model", checkpoint, "--dir", tmp_path / "two")
    run("denoise", "--dir", tmp_path / "two", *VIDEO, "--lora", f"{file}:0.5")
    np.testing.assert_array_equal(load_safetensors(tmp_path / "two/stage2_latents.safetensors")["latents"], again)
    run("denoise", "--dir", tmp_path / "two", *VIDEO, "--lora", f"{file}:0", "--force")
    assert (load_safetensors(tmp_path / "two/stage2_latents.safetensors")["latents"] != again).any()


@pytest.mark.parametrize("lora", ["a.safetensors", [3], {"a": 1}])
def test_the_message_for_broken_metadata_names_the_lora(lora, checkpoint, file, tmp_path):
    run("encode", "a cat", "--model", checkpoint, "--dir", tmp_path)
    metadata = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(metadata | {"lora": lora}))
    result = CliRunner().invoke(main, ["denoise", "--dir", str(tmp_path), *VIDEO])
    assert result.exit_code == 2
    assert has_line_with_words(result.output, "generation_config.json lora")


FEW_STEPS = [name for name, preset in presets().items() if preset.loras and "lightx2v/" in preset.loras[0]]


@pytest.mark.parametrize("name", FEW_STEPS)
def test_few_step_presets_have_the_settings_of_their_authors(name):
    """Follow ModelTC/LightX2V, configs/distill: denoising_step_list 1000, 750, 500, 250, with levels shifted by 5."""
    preset = presets()[name]
    chosen = preset.defaults
    assert (chosen.steps, chosen.guidance_scale, chosen.flow_shift, chosen.model) == (4, 1.0, 5.0, name)
    scheduler = model_description(name).model.scheduler
    assert scheduler == preset.scheduler == FlowEuler()
    levels = np.array([1000, 750, 500, 250]) / 1000
    levels = 5 * levels / (1 + 4 * levels)
    schedule = scheduler.schedule(chosen.steps, shift=chosen.flow_shift, sigma_schedule=chosen.sigmas)
    np.testing.assert_allclose(schedule.timesteps, 1000 * levels, rtol=1e-6)
    np.testing.assert_allclose(schedule.timesteps, [1000, 937.5, 2500 / 3, 625], rtol=1e-6)
    np.testing.assert_allclose(schedule.sigmas, [*levels, 0], rtol=1e-6)
    loras = [Lora.parse(lora) for lora in preset.loras]
    assert all(lora.file.startswith("lightx2v/") and lora.strength == 1 for lora in loras)
    if chosen.boundary is None:
        assert [lora.expert for lora in loras] == [None]
    else:  # the split of LightX2V's boundary_step_index 2
        assert [lora.expert for lora in loras] == ["high", "low"]
        assert chosen.guidance_scale_2 == 1.0
        assert list(np.asarray(schedule.timesteps) >= 1000 * chosen.boundary) == [True, True, False, False]
    assert preset.source == presets()[name.removesuffix("-4step").removesuffix("-lightx2v")].source


@pytest.mark.parametrize(
    ("name", "base", "few_step_file", "solver", "video"),
    [
        *[("wan2.1-t2v-14b", "Wan2.1-T2V-14B", "generator_lora_lightx2v", "euler", (480, 832, 81, 16))],
        *[("wan2.2-ti2v-5b", "Wan2.2-TI2V-5B", "adapter_model", "unipc", (704, 1280, 125, 24))],
    ],
)
def test_longlive_plug_has_two_loras_with_the_strengths_of_its_authors(name, base, few_step_file, solver, video):
    """Follow the model cards (few-step : CFG = 1 : 0.5), inference_config.json, and configs/ of LongLive-Plug."""
    preset = presets()[f"{name}-longlive-plug"]
    few_step, guidance = map(Lora.parse, preset.loras)
    repository = f"Efficient-Large-Model/LongLive-Plug-{base}"
    assert (few_step.file, few_step.strength) == (f"{repository}-few-step/{few_step_file}.safetensors", 1)
    assert (guidance.file, guidance.strength) == (f"{repository}-cfg/adapter_model.safetensors", 0.5)
    chosen = preset.defaults
    assert (chosen.steps, chosen.guidance_scale, chosen.flow_shift) == (4, 1.0, 5.0)
    assert (chosen.height, chosen.width, chosen.frames, chosen.fps) == video
    assert name_of(model_description(preset.name).model.scheduler) == solver
    assert (preset.source, preset.licence) == (presets()[name].source, "Apache-2.0")
    chosen.check(spatial=32 if "5b" in name else 16, temporal=4)


def test_four_steps_of_vace_follow_comfyuis_examples():
    """Follow video_wan_vace_14B_v2v and _ref2v: CausVid's LoRA at 0.3, 4 steps of UniPC, guidance 1, shift 8."""
    preset = presets()["wan2.1-vace-14b-causvid"]
    [lora] = map(Lora.parse, preset.loras)
    assert (lora.file.rpartition("/")[2], lora.strength) == ("Wan21_CausVid_14B_T2V_lora_rank32.safetensors", 0.3)
    chosen = preset.defaults
    assert (chosen.steps, chosen.guidance_scale, chosen.flow_shift, chosen.frames) == (4, 1.0, 8.0, 81)
    assert name_of(model_description(preset.name).model.scheduler) == "unipc"


def test_a_preset_with_a_lora_is_not_converted_without_it(checkpoint, tmp_path):
    preset = replace(presets()[FEW_STEPS[0]], name="small-4step", source=str(checkpoint))
    with registered(presets=(preset,)):
        result = CliRunner().invoke(main, ["convert", "small-4step", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert has_line_with_words(result.output, "LoRA merge convert")


def test_a_preset_may_have_a_lora_and_another_scheduler(checkpoint, file):
    preset = replace(presets()[FEW_STEPS[0]], name="small-4step", source=str(checkpoint), loras=(f"{file}:0.5",))
    with registered(presets=(preset,)):
        pipe = wanjax.load("small-4step", lora=str(file), param_dtype="float32")
    np.testing.assert_allclose(
        q_weight(pipe), q_weight(wanjax.load(checkpoint)) + 1.5 * change(file), rtol=1e-6, atol=1e-6
    )
    assert isinstance(pipe.scheduler, FlowEuler)
    assert pipe.defaults.steps == 4
