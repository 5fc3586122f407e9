# SPDX-License-Identifier: Apache-2.0
"""The name of a checkpoint tells which published model it is: tensors do not distinguish models of one shape."""

import json
from itertools import combinations

import pytest

from tests.support.published import hollow_file, transformer_keys, vae_keys
from tests.support.words import has_line_with_words
from wanjax.converters.wan import original
from wanjax.models.wan.config import I2V_14B, I2V_A14B, T2V_1_3B, T2V_14B, TI2V_5B, VAE_2_1, VAE_2_2
from wanjax.pipelines.distillation import model_name_in
from wanjax.pipelines.family import best_match
from wanjax.pipelines.hunyuanvideo import FAMILY as HUNYUANVIDEO
from wanjax.pipelines.hunyuanvideo import layouts as hunyuan_layouts
from wanjax.registry import FAMILIES, describe_distillation, inspect_checkpoint, presets
from wanjax.schedulers import name_of

HD, SD = (720, 1280), (480, 832)


def tensors_of_preset(preset):
    """Return what the tensors of a preset determine: its configuration, and the number of its transformers."""
    model = preset.model
    return type(model).__name__, model.transformer, model.spec.denoisers


PRESETS_OF_EQUAL_SHAPES = [
    pair
    for family in FAMILIES
    for pair in combinations([x for x in family.presets if x.model is not None and not x.loras], 2)
    if tensors_of_preset(pair[0]) == tensors_of_preset(pair[1])
]


def test_many_presets_have_equal_shapes():
    names = [{first.name, second.name} for first, second in PRESETS_OF_EQUAL_SHAPES]
    assert len(names) >= 30
    assert {"wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p"} in names


@pytest.mark.parametrize("pair", PRESETS_OF_EQUAL_SHAPES, ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_names_distinguish_presets_of_equal_shapes(pair):
    """The name of a repository, of a folder or of a file decides, in any order of the presets."""
    for preset in pair:
        family = next(family for family in FAMILIES if preset in family.presets)
        for source in preset.sources:
            owner, _, rest = source.partition("/")
            names = [source, f"/data/{rest}", f"/data/{owner}/snapshot/{rest}", f"/data/{rest.rpartition('/')[2]}"]
            for name in names:
                if family is HUNYUANVIDEO:
                    model_name = hunyuan_layouts._parse_model_name(
                        name.replace("/diffusion_pytorch_model.safetensors", "")
                    )
                    assert (
                        name.endswith("/diffusion_pytorch_model.safetensors")
                        or hunyuan_layouts.MODELS[str(model_name)] is preset
                    )
                elif model_name_in(name) not in ("", "data"):
                    assert best_match(pair, name, family.distillations) is preset, name
                    assert best_match(pair[::-1], name, family.distillations) is preset, name


def tensors(config):
    """Return the shapes of the tensors of a transformer and its autoencoder, by the authors' names."""
    vae = VAE_2_2 if config is TI2V_5B else VAE_2_1
    return {original.TRANSFORMER.to_authors(key): x for key, x in transformer_keys(config).items()}, vae_keys(vae)


def authors_folder(folder, config):
    """Write a folder in the authors' layout, with files without values."""
    transformer, vae = tensors(config)
    hollow_file(folder / "diffusion_pytorch_model.safetensors", transformer)
    hollow_file(folder / "Wan2.1_VAE.safetensors", vae)
    config_entries = {"_class_name": "WanModel", "num_heads": config.heads, "eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config_entries))
    return folder


def single_file(path, config):
    """Write a file of a transformer and an autoencoder in ComfyUI's layout, without values."""
    transformer, vae = tensors(config)
    named = {f"model.diffusion_model.{key}": x for key, x in transformer.items()}
    return hollow_file(path, named | {f"vae.{key}": x for key, x in vae.items()})


@pytest.mark.parametrize(
    ("config", "name", "preset", "size", "steps", "shift"),
    [
        (I2V_14B, "Wan2.1-I2V-14B-720P", "wan2.1-i2v-14b-720p", HD, 40, 5.0),
        (I2V_14B, "Wan2.1-I2V-14B-480P", "wan2.1-i2v-14b-480p", SD, 40, 3.0),
        (I2V_14B, "Wan2.1-I2V-14B", "wan2.1-i2v-14b-480p", SD, 40, 3.0),
        (T2V_14B, "Wan2.1-T2V-14B", "wan2.1-t2v-14b", HD, 50, 5.0),
    ],
)
def test_a_folder_of_the_authors_is_recognised_by_its_name(config, name, preset, size, steps, shift, tmp_path):
    checkpoint = inspect_checkpoint(authors_folder(tmp_path / name, config))
    assert checkpoint.preset is not None
    assert checkpoint.preset.name == preset
    assert (checkpoint.settings.size, checkpoint.settings.steps, checkpoint.settings.flow_shift) == (size, steps, shift)
    assert checkpoint.source.fallback_repo == checkpoint.preset.source


@pytest.mark.parametrize(
    ("config", "name", "preset"),
    [
        (I2V_14B, "wan2.1_i2v_480p_14B_fp16.safetensors", "wan2.1-i2v-14b-480p"),
        (I2V_14B, "wan2.1_i2v_720p_14B_fp16.safetensors", "wan2.1-i2v-14b-720p"),
        (I2V_14B, "Wan2_1-I2V-14B-480P_fp8_e4m3fn.safetensors", "wan2.1-i2v-14b-480p"),
        (I2V_14B, "Wan2_1-I2V-14B-720P_fp8_e4m3fn.safetensors", "wan2.1-i2v-14b-720p"),
        (I2V_14B, "Wan2.1-I2V-14B-720P/diffusion_pytorch_model.safetensors", "wan2.1-i2v-14b-720p"),
        (I2V_14B, "720p/Wan2_1-I2V-14B-480P.safetensors", "wan2.1-i2v-14b-480p"),
        (I2V_14B, "models--Wan-AI--Wan2.1-I2V-14B-720P/snapshots/0a1b/model.safetensors", "wan2.1-i2v-14b-720p"),
        (T2V_14B, "wan2.1_t2v_14B_bf16.safetensors", "wan2.1-t2v-14b"),
        (T2V_14B, "Wan2_1-T2V-14B_fp8_e4m3fn.safetensors", "wan2.1-t2v-14b"),
        (T2V_14B, "rCM_Wan2.1_T2V_14B_480p.safetensors", "wan2.1-t2v-14b-rcm-480p"),
        (T2V_14B, "rCM_Wan2.1_T2V_14B_720p.safetensors", "wan2.1-t2v-14b-rcm-720p"),
        (T2V_1_3B, "wan2.1_t2v_1.3B_fp16.safetensors", "wan2.1-t2v-1.3b"),
        (T2V_1_3B, "diffusion_pytorch_model.safetensors", "wan2.1-t2v-1.3b"),
        (T2V_1_3B, "rCM_Wan2.1_T2V_1.3B_480p.safetensors", "wan2.1-t2v-1.3b-rcm"),
        (T2V_1_3B, "CausVid/bidirectional_checkpoint2/model.safetensors", "wan2.1-t2v-1.3b-causvid"),
        (T2V_1_3B, "FastWan2.1-T2V-1.3B.safetensors", "wan2.1-t2v-1.3b-fastwan"),
        (TI2V_5B, "wan2.2_ti2v_5B_fp16.safetensors", "wan2.2-ti2v-5b"),
        (TI2V_5B, "Wan2_2-TI2V-5B-FastWanFullAttn_bf16.safetensors", "wan2.2-ti2v-5b-fastwan"),
    ],
)
def test_a_single_file_is_recognised_by_its_name(config, name, preset, tmp_path):
    checkpoint = inspect_checkpoint(single_file(tmp_path / name, config))
    assert checkpoint.preset is not None
    assert checkpoint.preset.name == preset
    assert checkpoint.settings.size == checkpoint.preset.defaults.size
    if name.count("/") or "_t2v_" in name or "2V-" in name:  # a name like those of published files
        assert describe_distillation(name, checkpoint) is None or checkpoint.distillation is not None


@pytest.mark.parametrize(
    ("config", "name", "base", "steps", "shift", "solver"),
    [
        (T2V_14B, "wan2.1_t2v_14b_lightx2v_4step.safetensors", "wan2.1-t2v-14b", 4, 5.0, "euler"),
        (I2V_14B, "wan2.1_i2v_480p_lightx2v_4step.safetensors", "wan2.1-i2v-14b-480p", 4, 5.0, "euler"),
        (I2V_14B, "wan2.1_i2v_720p_lightx2v_4step.safetensors", "wan2.1-i2v-14b-720p", 4, 5.0, "euler"),
        (T2V_14B, "Wan2_1-T2V-14B_CausVid_fp8_e4m3fn.safetensors", "wan2.1-t2v-14b", 4, 8.0, "unipc"),
        (T2V_14B, "Wan2_1-AccVideo-T2V-14B_fp8_e4m3fn.safetensors", "wan2.1-t2v-14b", 10, 5.0, "unipc"),
        (TI2V_5B, "Wan2_2-TI2V-5B-Turbo_fp16.safetensors", "wan2.2-ti2v-5b", 4, 5.0, "consistency"),
    ],
)
def test_a_distilled_file_has_its_publisher_s_settings(config, name, base, steps, shift, solver, tmp_path):
    checkpoint = inspect_checkpoint(single_file(tmp_path / name, config))
    assert checkpoint.preset is not None
    assert (checkpoint.preset.name, checkpoint.settings.size) == (base, presets()[base].defaults.size)
    assert (checkpoint.settings.steps, checkpoint.settings.guidance_scale) == (steps, 1.0)
    assert (checkpoint.settings.flow_shift, name_of(checkpoint.model.scheduler)) == (shift, solver)
    assert has_line_with_words(describe_distillation(name, checkpoint) or "", f"{name} distilled {steps} steps")


@pytest.mark.parametrize(
    ("names", "preset", "solver"),
    [
        ("wan2.2_i2v_A14b_{}_noise_lightx2v_4step.safetensors", "wan2.2-i2v-a14b-lightx2v", "euler"),
        ("wan2.2_i2v_A14b_{}_noise_lightx2v_4step_720p_260412.safetensors", "wan2.2-i2v-a14b-lightx2v", "euler"),
        ("Wan2.2-I2V-A14B-{}-rCM-merged.safetensors", "wan2.2-i2v-a14b-rcm", "rcm:sigma_max=200"),
    ],
)
def test_a_pair_of_distilled_experts_is_recognised_by_its_names(names, preset, solver, tmp_path):
    for noise in ("low", "high"):
        single_file(tmp_path / names.format(noise), I2V_A14B)
    checkpoint = inspect_checkpoint(tmp_path / names.format("high"))
    assert checkpoint.preset is not None
    assert (checkpoint.preset.name, name_of(checkpoint.model.scheduler)) == (preset, solver)
    settings = checkpoint.settings
    assert (settings.steps, settings.guidance_scales, settings.boundary) == (4, (1.0, 1.0), 0.9)
    phases = checkpoint.model.spec.phases(checkpoint.model.spec.schedule(settings), settings)
    assert [len(phase.scales) for phase in phases] == [2, 2]


def test_a_file_with_only_a_generator_is_recognised_as_causvid(tmp_path):
    """CausVid's `model.pt` has a generator without the EMA weights that Self-Forcing's files have."""
    transformer, vae = tensors(T2V_1_3B)
    named = {f"generator.model.{key}": x for key, x in transformer.items()}
    checkpoint = inspect_checkpoint(
        hollow_file(tmp_path / "model.safetensors", named | {f"vae.{key}": x for key, x in vae.items()})
    )
    assert checkpoint.preset is not None
    assert checkpoint.preset.name == "wan2.1-t2v-1.3b-causvid"
    assert (checkpoint.settings.steps, checkpoint.settings.guidance_scale, checkpoint.settings.flow_shift) == (
        3,
        1.0,
        8.0,
    )


@pytest.mark.parametrize(("name", "is_reported"), [("cat.safetensors", True), ("cat-t2v-14b.safetensors", False)])
def test_an_ambiguous_name_is_reported(name, is_reported, tmp_path):
    checkpoint = inspect_checkpoint(single_file(tmp_path / name, T2V_14B))
    assert checkpoint.distillation is None
    sentence = describe_distillation(name, checkpoint)
    assert (
        has_line_with_words(sentence or "", f"{name} distilled 50 steps guidance 5")
        if is_reported
        else sentence is None
    )


@pytest.mark.parametrize(
    ("name", "flow_shift", "size", "shift"),
    [
        ("mine", 3.0, SD, 3.0),
        ("mine", 5.0, HD, 5.0),
        ("mine", 7.0, SD, 7.0),
        ("mine-720p", 7.0, HD, 7.0),
        ("Wan2.1-I2V-14B-480P-Diffusers", 5.0, SD, 5.0),
    ],
)
def test_a_folder_of_diffusers_is_recognised_by_its_name_or_shift(name, flow_shift, size, shift, tmp_path):
    """If the name of the folder is ambiguous, the shift of its scheduler may decide."""
    source, folder = inspect_checkpoint(single_file(tmp_path / "a.safetensors", I2V_14B)).source, tmp_path / name
    configs = {component: source[component].config() for component in ("transformer", "vae", "scheduler")}
    configs["scheduler"] |= {"flow_shift": flow_shift}
    for component, config in configs.items():
        (folder / component).mkdir(parents=True)
        file = "scheduler_config.json" if component == "scheduler" else "config.json"
        (folder / component / file).write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(source.index))
    checkpoint = inspect_checkpoint(folder)
    assert checkpoint.preset is None
    assert (checkpoint.settings.size, checkpoint.settings.steps, checkpoint.settings.flow_shift) == (size, 40, shift)
    assert checkpoint.settings.negative_prompt.startswith("镜头晃动")
