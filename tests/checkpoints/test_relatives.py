# SPDX-License-Identifier: Apache-2.0
"""Sparse files like published ones: which model they are recognised as, and what a refusal says that they are.

Names and shapes are those of the publishers' code and of ComfyUI's and LightX2V's files.
"""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.published import hollow_file, text_encoder_keys, transformer_keys, vae_keys
from tests.support.words import has_line_with_words
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.models.t5 import UMT5_XXL
from wanjax.models.wan.config import (
    I2V_14B,
    I2V_A14B,
    INP_1_3B,
    INP_5B,
    T2V_1_3B,
    T2V_14B,
    VACE_14B,
    VAE_2_1,
    VAE_2_2,
)
from wanjax.pipelines.wan.presets import FUN_PRESETS
from wanjax.registry import companion_files, inspect_checkpoint, open_for_loading, open_source
from wanjax.schedulers import name_of

HIGH, LOW = (f"wan2.2_i2v_A14b_{noise}_noise_lightx2v_4step" for noise in ("high", "low"))
COMFY = "model.diffusion_model."


def shapes_by_original_names(config):
    """Return the names and shapes of a transformer by its authors' names."""
    return {original.TRANSFORMER.to_authors(key): shape for key, shape in transformer_keys(config).items()}


def write_file(path, config, extra=None, without=(), vae=VAE_2_1):
    """Write a file of a transformer and an autoencoder with ComfyUI's names, and extra tensors."""
    keys = {
        COMFY + key: shape
        for key, shape in (shapes_by_original_names(config) | (extra or {})).items()
        if key not in without
    }
    return hollow_file(path, keys | {f"vae.{key}": shape for key, shape in vae_keys(vae).items()})


def write_split(folder, keys, dtypes=None):
    """Write LightX2V's folder of a transformer: a file for each block, one for the rest, and an index."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for key in keys:
        name = f"block_{key.split('.')[1]}.safetensors" if key.startswith("blocks.") else "non_block.safetensors"
        files.setdefault(name, {})[key] = keys[key]
    for name, part in files.items():
        hollow_file(folder / name, part, dtypes={key: x for key, x in (dtypes or {}).items() if key in part})
    weight_map = {key: name for name, part in files.items() for key in part}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refusal(path):
    with pytest.raises(WanjaxError) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pipeline_class(source):
    return source.index["_class_name"]


def has_two_experts(source):
    return "transformer_2" in source.index


@pytest.mark.parametrize("expert_file", [f"{HIGH}_1030", LOW])
def test_the_other_of_two_experts_may_have_another_date(expert_file, tmp_path):
    for name in (f"{HIGH}_1030", LOW, f"{LOW.replace('lightx2v', 'scaled_fp8_e4m3_lightx2v')}"):
        write_file(tmp_path / f"{name}.safetensors", I2V_A14B)
    source = open_source(tmp_path / f"{expert_file}.safetensors")
    assert pipeline_class(source) == "WanImageToVideoPipeline"
    assert has_two_experts(source)
    files = [source[name].weights().paths[0].stem for name in ("transformer", "transformer_2")]
    assert files == [f"{HIGH}_1030", LOW]


def test_the_other_expert_is_downloaded_by_either_name():
    names = tuple(f"{LOW}{date}.safetensors" for date in ("_1030", ""))
    assert companion_files(f"{HIGH}_1030.safetensors") == list(names)
    assert companion_files(f"{LOW}.safetensors") == [f"{HIGH}.safetensors"]


def test_several_candidates_for_the_other_expert_are_named(tmp_path):
    names = [f"{HIGH}_{date}.safetensors" for date in ("1022", "1030")]
    for name in (*names, f"{LOW}.safetensors"):
        write_file(tmp_path / name, I2V_A14B)
    output = refusal(tmp_path / f"{LOW}.safetensors")
    assert has_line_with_words(output, " ".join([f"{LOW}.safetensors", *names, f"{HIGH}.safetensors"]))
    (tmp_path / names[0]).unlink()
    assert has_two_experts(open_source(tmp_path / f"{LOW}.safetensors"))


def test_names_with_different_endings_are_a_pair_only_with_noise(tmp_path):
    for name in ("wan_high_noise_fp8", "wan_low_noise_bf16", "t2v_high_quality", "t2v_low_memory"):
        write_file(tmp_path / f"{name}.safetensors", T2V_14B)
    assert pipeline_class(open_source(tmp_path / "wan_high_noise_fp8.safetensors")) == "WanPipeline"
    assert has_two_experts(open_source(tmp_path / "wan_high_noise_fp8.safetensors"))
    assert pipeline_class(open_source(tmp_path / "t2v_high_quality.safetensors")) == "WanPipeline"
    assert not has_two_experts(open_source(tmp_path / "t2v_high_quality.safetensors"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_lightx2v_s_int8_file_is_the_four_step_model(kind, tmp_path):
    """Matrices of the blocks are int8 with a float32 scale for each row, as tools/convert of ModelTC/LightX2V has them.

    The autoencoder is in the same folder, so that nothing is downloaded.
    """
    name = "wan2.1_i2v_720p_int8_lightx2v_4step"
    tensors = shapes_by_original_names(I2V_14B)
    matrices = [key for key, shape in tensors.items() if re.match(r"blocks\.\d+\..*\.weight$", key) and len(shape) == 2]
    scales = {f"{key}_scale": (tensors[key][0], 1) for key in matrices}
    dtypes = dict.fromkeys(matrices, "I8") | dict.fromkeys(scales, "F32")
    if kind == "file":
        vae = {f"vae.{key}": shape for key, shape in vae_keys(VAE_2_1).items()}
        path = hollow_file(tmp_path / f"{name}.safetensors", tensors | scales | vae, dtypes=dtypes)
    else:
        path = write_split(tmp_path / f"{name}_split", tensors | scales, dtypes)
        (path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 40, "eps": 1e-6}))
        hollow_file(path / "Wan2.1_VAE.safetensors", vae_keys(VAE_2_1))
    checkpoint = inspect_checkpoint(path)
    assert checkpoint.preset is not None
    assert (checkpoint.preset.name, checkpoint.settings.size) == ("wan2.1-i2v-14b-720p", (720, 1280))
    settings = checkpoint.settings
    assert (settings.steps, settings.guidance_scale, settings.flow_shift) == (4, 1.0, 5.0)
    assert name_of(checkpoint.model.scheduler) == "euler"
    specs = checkpoint.source["transformer"].weights().specs
    assert {key: spec.shape for key, spec in specs.items()} == transformer_keys(I2V_14B)
    assert Counter(str(spec.dtype) for spec in specs.values()) == {"float32": 40 * 12, "bfloat16": 1303 - 40 * 12}


def test_a_folder_of_block_files_is_opened(tmp_path):
    folder = write_split(tmp_path / "wan2.1_i2v_720p_int8_lightx2v_4step_split", shapes_by_original_names(I2V_14B))
    source = open_source(folder)
    assert pipeline_class(source) == "WanImageToVideoPipeline"
    assert not has_two_experts(source)
    assert len(source["transformer"].weights().specs) == len(shapes_by_original_names(I2V_14B))
    assert source.fallback_repo == "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 40, "eps": 1e-6}))
    hollow_file(folder / "Wan2.1_VAE.safetensors", vae_keys(VAE_2_1))
    source = open_source(folder)
    assert source.missing_components == ["image_encoder", "image_processor", "text_encoder", "tokenizer"]
    assert len(source["transformer"].weights().specs) == len(shapes_by_original_names(I2V_14B))


def test_folders_of_block_files_of_two_experts_are_opened(tmp_path):
    for name in (f"{HIGH}_split", f"{LOW}_split"):
        write_split(tmp_path / name, shapes_by_original_names(I2V_A14B))
    source = open_source(tmp_path / f"{LOW}_split")
    assert pipeline_class(source) == "WanImageToVideoPipeline"
    assert has_two_experts(source)
    assert [source[name].weights().paths[0].parent.name for name in ("transformer", "transformer_2")] == [
        f"{HIGH}_split",
        f"{LOW}_split",
    ]
    for path in (tmp_path / f"{HIGH}_split").iterdir():
        path.unlink()
    (tmp_path / f"{HIGH}_split").rmdir()
    assert has_line_with_words(refusal(tmp_path / f"{LOW}_split"), f"{LOW}_split {HIGH}_split")


def test_experts_in_subfolders_of_block_files_are_opened(tmp_path):
    for name in ("high_noise_model", "low_noise_model"):
        write_split(tmp_path / "model" / name, shapes_by_original_names(I2V_A14B))
    assert pipeline_class(open_source(tmp_path / "model")) == "WanImageToVideoPipeline"
    assert has_two_experts(open_source(tmp_path / "model"))


def test_a_folder_of_a_transformer_of_diffusers_is_opened(tmp_path):
    hollow_file(tmp_path / "diffusion_pytorch_model.safetensors", transformer_keys(T2V_1_3B))
    message = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(message))
    source = open_source(tmp_path)
    assert pipeline_class(source) == "WanPipeline"
    assert not has_two_experts(source)
    assert source.fallback_repo == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


def test_a_transformer_merged_from_two_experts_is_opened(tmp_path):
    checkpoint = inspect_checkpoint(write_file(tmp_path / "wan2.2-i2v-mega-aio.safetensors", I2V_A14B))
    settings = checkpoint.settings
    assert (checkpoint.preset, settings.boundary, settings.guidance_scale_2) == (None, None, None)
    assert (settings.steps, settings.guidance_scale, settings.flow_shift) == (40, 3.5, 5.0)
    assert checkpoint.source.fallback_repo == "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    assert has_line_with_words(checkpoint.source.notes[0], "wan2.2-i2v-mega-aio.safetensors one two")
    name = "wan2.2_i2v_high_noise_14B.safetensors"
    assert has_line_with_words(refusal(write_file(tmp_path / name, I2V_A14B)), f"{name} {name.replace('high', 'low')}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wan2_1-I2V-ATI-14B_fp8_e4m3fn", "ATI"),
        ("Wan21-WanMove_fp8_scaled_e4m3fn_KJ", "WanMove"),
        ("Wan-Move-14B-480P", "WanMove"),
    ],
)
def test_unsupported_motion_is_reported(name, words, tmp_path):
    checkpoint = inspect_checkpoint(write_file(tmp_path / f"{name}.safetensors", I2V_14B))
    assert checkpoint.preset is not None
    assert checkpoint.preset.name == "wan2.1-i2v-14b-480p"
    [message] = checkpoint.source.notes
    assert has_line_with_words(message, f"{name}.safetensors {words} not")
    assert not inspect_checkpoint(write_file(tmp_path / "wan2.1_i2v_480p_14B.safetensors", I2V_14B)).source.notes


FUN_FILES = {
    "wan2.1-fun-1.3b-inp": ("wan2.1_fun_inp_1.3B_bf16", INP_1_3B, VAE_2_1),
    "wan2.1-fun-14b-inp": ("Wan2.1-Fun-14B-InP_fp8_e4m3fn", I2V_14B, VAE_2_1),
    "wan2.2-fun-a14b-inp": ("wan2.2_fun_inpaint_high_noise_14B_fp8_scaled", I2V_A14B, VAE_2_1),
    "wan2.2-fun-5b-inp": ("wan2.2_fun_inpaint_5B_bf16", INP_5B, VAE_2_2),
}


@pytest.mark.parametrize("preset", FUN_PRESETS, ids=lambda preset: preset.name)
def test_a_file_of_fun_inp_is_recognised(preset, tmp_path):
    name, config, vae = FUN_FILES[preset.name]
    for each in {name, name.replace("high", "low")}:
        write_file(tmp_path / f"{each}.safetensors", config, vae=vae)
    checkpoint = inspect_checkpoint(tmp_path / f"{name}.safetensors")
    assert checkpoint.preset is not None
    assert checkpoint.preset == replace(
        preset, defaults=replace(preset.defaults, model=checkpoint.preset.defaults.model)
    )
    assert type(checkpoint.model) is type(preset.model)
    assert checkpoint.model.scheduler == preset.scheduler
    assert checkpoint.source.fallback_repo.startswith("Wan-AI/")
    assert checkpoint.source.fallback_repo.endswith("iffusers")


UNSUPPORTED_WAN = {  # by file name: the transformer, the unsupported tensors, and the words of the message
    "wan2.1_fun_control_1.3B_bf16": (replace(INP_1_3B, channels_in=48), {}, "48 36 [Fun Control]"),
    "wan2.2_fun_control_5B_bf16": (
        replace(INP_5B, channels_in=148),
        {"ref_conv.weight": (3072, 48, 2, 2)},
        "ref_conv.* [Fun Control]",
    ),
    "wan2.1_fun_camera_v1.1_1.3B_bf16": (
        replace(INP_1_3B, channels_in=32),
        {"control_adapter.conv.weight": (1536, 1536, 2, 2)},
        "control_adapter.* camera",
    ),
    "wan2.2_s2v_14B_fp8_scaled": (
        T2V_14B,
        {"casual_audio_encoder.weights": (1, 25, 1, 1), "audio_injector.injector.0.q.weight": (5120, 5120)},
        "casual_audio_encoder.* S2V",
    ),
    "wan2.1_14B_SCAIL_2_fp16": (
        replace(I2V_14B, channels_in=20),
        {f"patch_embedding_{x}.weight": (5120, n, 1, 2, 2) for x, n in (("pose", 20), ("mask", 28))},
        "patch_embedding_mask.* SCAIL-2",
    ),
    "Wan21-14B-SCAIL-preview": (
        replace(I2V_14B, channels_in=20),
        {"patch_embedding_pose.weight": (5120, 20, 1, 2, 2)},
        "patch_embedding_pose.* SCAIL",
    ),
    "wan2.2_dancer_14b_global_fp8_scaled": (
        I2V_14B,
        {"music_injector.injector.7.q.weight": (5120, 5120), "ref_conv.weight": (5120, 16, 2, 2)},
        "music_injector.* Dancer",
    ),
    "humo_17B": (
        I2V_A14B,
        {"audio_proj.audio_proj_glob_1.layer.weight": (512, 51200)},
        "audio_proj.audio_proj_glob* HuMo",
    ),
    "InfiniteTalk_whole": (
        I2V_14B,
        {"audio_proj.proj1.weight": (512, 46080), "blocks.0.audio_cross_attn.proj.weight": (5120, 5120)},
        "audio_proj.proj1.* InfiniteTalk",
    ),
    "FantasyTalking": (I2V_14B, {"blocks.0.cross_attn.processor.k_proj.weight": (5120, 2048)}, "FantasyTalking"),
}


OTHER_FILES = {  # by file name: the tensors, and the words of the message
    "wan2.1_infiniteTalk_multi_fp16": (
        {"audio_proj.proj1.weight": (512, 46080), "blocks.0.norm_x.weight": (5120,)},
        "InfiniteTalk",
    ),
    "Wan2_1-VACE_module_14B": (
        {k: v for k, v in shapes_by_original_names(VACE_14B).items() if k.startswith("vace")},
        "only VACE part",
    ),
    "Uni3C_controlnet": ({"controlnet_patch_embedding.weight": (5120, 20, 1, 2, 2)}, "Uni3C"),
    "hunyuan_video_720_fp8": (
        {"double_blocks.0.img_attn_qkv.weight": (9216, 3072), "txt_in.individual_token_refiner.a.weight": (3072,)},
        "HunyuanVideo first",
    ),
    "FramePackI2V_HY": (
        {"clean_x_embedder.proj.weight": (3072, 16, 1, 2, 2), "context_embedder.token_refiner.a.weight": (1,)},
        "FramePack",
    ),
    "ltxv-13b": ({"model.diffusion_model.patchify_proj.weight": (4096, 128)}, "LTX-Video"),
    "ltx-2-19b-dev": (
        {f"model.diffusion_model.{x}patchify_proj.weight": (4096, 128) for x in ("", "audio_")},
        "LTX-2",
    ),
    "CogVideoX_Fun_1_1_5b": (
        {"patch_embed.proj.weight": (3072, 33, 2, 2), "patch_embed.text_proj.weight": (3072, 4096)},
        "CogVideoX alone",
    ),
    "qwen_2.5_vl_7b": ({"model.layers.0.self_attn.q_proj.weight": (3584, 3584)}, "language alone"),
    "lightx2v_lora": ({"diffusion_model.blocks.0.self_attn.q.lora_down.weight": (64, 5120)}, "LoRA --lora"),
    "lokr": ({"lora_unet_blocks_0_self_attn_q.lokr_w1": (8, 8)}, "LoRA --lora"),
    "wan_2.1_vae": (vae_keys(VAE_2_1), "vae only transformer"),
    "umt5_xxl_fp16": (text_encoder_keys(UMT5_XXL), "text_encoder only transformer"),
    "else": ({"weight": (2, 2)}, "transformer"),
}


def write_another_class(path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    return path


REFUSED = {  # by file name: the function that writes it, and the words of the message
    **{
        name: (
            lambda path, config=config, unsupported=unsupported: write_file(path, config, unsupported),
            f"{name}.safetensors {words.replace('[', '').replace(']', '')}",
        )
        for name, (config, unsupported, words) in UNSUPPORTED_WAN.items()
    },
    **{
        name: (lambda path, tensors=tensors: hollow_file(path, tensors), words)
        for name, (tensors, words) in OTHER_FILES.items()
    },
    "flux": (write_another_class, "model_index.json FluxTransformer2DModel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_an_unsupported_model_is_identified(name, tmp_path):
    write, words = REFUSED[name]
    assert has_line_with_words(refusal(write(tmp_path / f"{name}.safetensors")), words)


def test_notes_are_printed_when_a_model_is_loaded(tmp_path, monkeypatch):
    path = write_file(tmp_path / "Wan2_1-I2V-ATI-14B.safetensors", I2V_14B)
    monkeypatch.setattr("wanjax.registry.check_complete", lambda source: None)
    notes = []
    open_for_loading(path, None, notes.append)
    assert any(has_line_with_words(note, "ATI") for note in notes)
