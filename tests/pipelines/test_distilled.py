# SPDX-License-Identifier: Apache-2.0
"""Distilled LoRAs and models are recognised by their names, and use their publisher's steps and solver."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import save_safetensors
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import WanjaxWarning
from wanjax.media.metadata import read_metadata
from wanjax.pipelines.distillation import find_distillation, model_name_in
from wanjax.pipelines.hunyuanvideo import FAMILY as HUNYUANVIDEO
from wanjax.pipelines.wan import FAMILY as WAN
from wanjax.registry import apply_distilled_loras, model_description, presets
from wanjax.schedulers import name_of, parse

LIGHTX2V = "wan_lightx2v_4step.safetensors"
SEKO = "lightx2v/Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1"
LONGLIVE_PLUG = "Efficient-Large-Model/LongLive-Plug"
THREE_STEP_SOLVER = "consistency:timesteps=1000,757,522"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors", ("LightX2V", 4)),
        ("lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", ("LightX2V", 4)),
        ("lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16.safetensors", ("LightX2V", 4)),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors", ("LightX2V", 4)),
        ("wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022.safetensors", ("LightX2V", 4)),
        ("wan2.2_t2v_A14b_high_noise_lora_rank64_lightx2v_4step_1217.safetensors", ("LightX2V", 4)),
        ("wan2.2_i2v_A14b_low_noise_lightx2v_4step_720p_260412.safetensors", ("LightX2V", 4)),
        ("wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_720p_260412.safetensors", ("LightX2V", 4)),
        ("Wan_2_2_I2V_A14B_LOW_lightx2v_4step_lora_260412_rank_64_fp16.safetensors", ("LightX2V", 4)),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_260412_rank_256_fp16.safetensors", ("LightX2V", 4)),
        ("LongLive-Plug-Wan2.1-T2V-14B-few-step.safetensors", ("LongLive-Plug", 4)),
        (f"{LONGLIVE_PLUG}-Wan2.1-T2V-14B-few-step/generator_lora_lightx2v.safetensors", ("LightX2V", 4)),
        (f"{LONGLIVE_PLUG}-Wan2.2-TI2V-5B-few-step/adapter_model.safetensors", ("LongLive-Plug", 4)),
        (f"{LONGLIVE_PLUG}-Wan2.2-TI2V-5B-few-step/generator_lora.pt", ("LongLive-Plug", 4)),
        (f"{LONGLIVE_PLUG}-Wan2.1-T2V-14B-cfg/adapter_model.safetensors", ("LongLive-Plug, guidance alone", None)),
        ("LongLive-Plug-Wan2.2-TI2V-5B-cfg.safetensors", ("LongLive-Plug, guidance alone", None)),
        ("LongLive-2.0-5B", None),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_MoE_distill_lora_rank_64_bf16.safetensors", ("LightX2V", 4)),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16.safetensors", ("LightX2V", 4)),
        (f"{SEKO}/high_noise_model.safetensors", ("LightX2V", 4)),
        ("wan2.2_t2v_A14b_lora_8steps.safetensors", ("LightX2V", 8)),
        ("Wan2.2-Lightning_I2V-A14B_HIGH.safetensors", ("LightX2V", 4)),
        ("Wan21_CausVid_14B_T2V_lora_rank32.safetensors", ("CausVid", 4)),
        ("Wan21_CausVid_bidirect2_T2V_1_3B_lora_rank32.safetensors", ("CausVid, bidirectional", 3)),
        ("Wan21_AccVid_T2V_14B_lora_rank32_fp16.safetensors", ("AccVideo", 10)),
        ("FastWan_T2V_14B_480p_lora_rank_128_bf16.safetensors", ("FastWan", 3)),
        ("Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16.safetensors", ("FastWan", 3)),
        ("Wan22_TI2V_5B_Turbo_lora_rank_64_fp16.safetensors", ("Wan2.2-TI2V-5B-Turbo", 4)),
        ("Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83_bf16.safetensors", ("rCM", 4)),
        ("self_forcing_1.3b_lora.safetensors", ("Self-Forcing", 4)),
        ("Wan2_1-T2V-14B_CausVid_fp8_e4m3fn.safetensors", ("CausVid", 4)),
        ("Wan2.1-T2V-14B-StepDistill-CfgDistill", ("LightX2V", 4)),
        ("wan2.1_t2v_14B_bf16.safetensors", None),
        ("Wan2.1-Fun-14B-InP-MPS_reward_lora.safetensors", None),
        ("lightning_bolt.safetensors", None),  # a word that means something else
        ("wan_lightning_strike_v1.safetensors", None),
        ("wan2.1_t2v_14b_lightning_effect.safetensors", None),
        ("thunder_and_lightning_i2v.safetensors", None),
        ("hyper_realism_wan2.1.safetensors", None),
        ("wan_dmd_style.safetensors", None),
        ("turbo.safetensors", None),
        ("hyperrealism_wan_14b.safetensors", None),  # a word inside another
        ("wan_lightningmcqueen_14b.safetensors", None),
        ("turbocharged_car_5b.safetensors", None),
        ("wan21_style_4000steps.safetensors", None),  # training steps
        ("wan21_style_step-4.safetensors", None),
        ("style_for_lightx2v_t2v_14b.safetensors", None),  # made for distilled weights, or without them
        ("wan21_t2v_14b_not_FastWan.safetensors", None),
        ("wan21_t2v_14b_without_AccVid.safetensors", None),
        ("wan21_t2v_14b_no_causvid.safetensors", None),
    ],
)
def test_distilled_weights_are_recognised_by_name(name, expected):
    distillation = find_distillation(model_name_in(f"/loras/{name}"), WAN.distillations)
    assert (distillation and (distillation.name, distillation.steps)) == expected


def test_long_numbers_in_names_are_read_quickly():
    """A name that begins with a hash or a time is read quickly."""
    assert model_name_in(f"/loras/{'1' * 200}x.safetensors") == "1" * 200 + "x"
    assert model_name_in(f"/loras/a-style/{'1' * 200}.safetensors") == "a-style"
    assert model_name_in("/loras/a-style/transformer_2-models-00001-of-00002.safetensors") == "a-style"


@pytest.mark.parametrize("folder", ["loras", "checkpoint-500"])
def test_a_folder_of_many_loras_is_not_recognised(folder):
    assert model_name_in(f"/wan_i2v_4steps/{folder}/pytorch_lora_weights.safetensors") == "wan-i2v-4steps"


@pytest.mark.parametrize(
    "name", ["hy1.5_t2v_480p_lightx2v_4step", "hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16.safetensors"]
)
def test_distilled_weights_of_hunyuanvideo_are_recognised_by_name(name):
    """LightX2V's configuration of this model has four steps and a shift of 5."""
    distillation = find_distillation(model_name_in(name), HUNYUANVIDEO.distillations)
    assert distillation is not None
    assert distillation.settings == {"steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0}


def apply_loras(model, *loras):
    """Return the description of a model with distilled LoRAs, and the messages; no file is read."""
    messages = []
    described_model = apply_distilled_loras(
        model_description(model), [Lora.parse(text) for text in loras], messages.append
    )
    return described_model, messages


@pytest.mark.parametrize("name", [name for name, preset in presets().items() if preset.loras])
def test_a_lora_has_the_settings_of_its_preset(name):
    """Only the preset decides the size and the number of frames."""
    preset = presets()[name]
    described_model, [message] = apply_loras(
        re.sub("-(?:4step|lightx2v|longlive-plug|causvid)$", "", name), *preset.loras
    )
    preset_fields = {key: getattr(preset.defaults, key) for key in ("model", "height", "width", "frames")}
    assert described_model.settings.updated(preset_fields) == preset.defaults
    assert described_model.model.scheduler == model_description(name).model.scheduler
    assert has_line_with_words(message, f"distilled 4 steps guidance 1 shift {preset.defaults.flow_shift:g}")
    assert not has_line_with_words(message, "together")


@pytest.mark.parametrize(
    ("model", "lora", "steps", "shift", "solver"),
    [
        ("wan2.1-t2v-14b", "Wan21_CausVid_14B_T2V_lora_rank32.safetensors:0.7", 4, 8.0, "unipc"),
        ("wan2.1-vace-14b", "Wan21_CausVid_14B_T2V_lora_rank32.safetensors:0.3", 4, 8.0, "unipc"),
        ("wan2.1-t2v-14b", "Wan21_AccVid_T2V_14B_lora_rank32_fp16.safetensors", 10, 5.0, "unipc"),
        ("wan2.1-t2v-14b", "FastWan_T2V_14B_480p_lora_rank_128_bf16.safetensors", 3, 8.0, THREE_STEP_SOLVER),
        ("wan2.1-t2v-14b", "Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83_bf16.safetensors", 4, 5.0, "rcm"),
        ("wan2.2-i2v-a14b", "Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83.safetensors", 4, 5.0, "rcm:sigma_max=200"),
        ("wan2.1-i2v-14b-480p", "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", 4, 5.0, "euler"),
        ("wan2.2-ti2v-5b", f"{LONGLIVE_PLUG}-Wan2.2-TI2V-5B-few-step/adapter_model.safetensors", 4, 5.0, "unipc"),
        ("wan2.1-t2v-14b", "LongLive-Plug-Wan2.1-T2V-14B-few-step.safetensors", 4, 5.0, "euler"),
        ("wan2.1-t2v-14b", "LongLive-Plug-Wan2.1-T2V-14B-cfg.safetensors", 50, 5.0, "unipc"),
        ("wan2.2-ti2v-5b", "Wan22_TI2V_5B_Turbo_lora_rank_64_fp16.safetensors", 4, 5.0, "consistency"),
        ("hunyuanvideo1.5-480p-t2v", "HunyuanVideo-1.5_T2V_480p_lightx2v_4step_lora.safetensors", 4, 5.0, "euler"),
    ],
)
def test_a_lora_has_its_publishers_settings(model, lora, steps, shift, solver):
    described_model, _ = apply_loras(model, lora)
    settings, preset = described_model.settings, model_description(model).settings
    assert (settings.steps, settings.flow_shift, name_of(described_model.model.scheduler)) == (steps, shift, solver)
    assert {*settings.guidance_scales} == {1.0}
    assert (settings.size, settings.boundary, settings.model) == (preset.size, preset.boundary, model)
    assert len(described_model.model.spec.schedule(settings).timesteps) == steps


def test_a_lora_pair_changes_settings_and_half_a_pair_does_not():
    high, low = (f"{noise}=wan2.2_t2v_lightx2v_4steps_lora_v1_{noise}_noise.safetensors" for noise in ("high", "low"))
    described_model, [messages] = apply_loras("wan2.2-t2v-a14b", high, low)
    assert (described_model.settings.steps, "together" in messages) == (4, False)
    phases = described_model.model.spec.phases(
        described_model.model.spec.schedule(described_model.settings), described_model.settings
    )
    assert [phase.scales for phase in phases] == [(1.0, 1.0), (1.0, 1.0)]  # ComfyUI's example changes at 2 of 4
    for half in (high, low):
        described_model, [messages] = apply_loras("wan2.2-t2v-a14b", half)
        assert described_model == model_description("wan2.2-t2v-a14b")
        assert has_line_with_words(messages, f"{half} expert 40 steps")


@pytest.mark.parametrize(
    ("model", "names", "noises"),
    [
        ("wan2.2-t2v-a14b", "wan2.2_t2v_A14b_{}_noise_lora_rank64_lightx2v_4step_1217", ("high", "low")),
        ("wan2.2-i2v-a14b", "wan2.2_i2v_A14b_{}_noise_lora_rank64_lightx2v_4step_720p_260412", ("high", "low")),
        ("wan2.2-i2v-a14b", "Wan_2_2_I2V_A14B_{}_lightx2v_4step_lora_260412_rank_64_fp16", ("HIGH", "LOW")),
        ("wan2.2-i2v-a14b", "Wan_2_2_I2V_A14B_{}_lightx2v_4step_lora_260412_rank_256_fp16", ("HIGH", "LOW")),
    ],
)
def test_the_newer_pairs_of_lightx2v_run_two_steps_each(model, names, noises):
    """LightX2V's configs/distill/wan22 has boundary_step_index 2, and timesteps 1000, 937.5, 833.3 and 625."""
    described_model, [messages] = apply_loras(
        model, *(f"{noise.lower()}={names.format(noise)}.safetensors" for noise in noises)
    )
    assert has_line_with_words(messages, "distilled 4 steps guidance 1 shift 5 euler")
    assert "together" not in messages
    schedule = described_model.model.spec.schedule(described_model.settings)
    np.testing.assert_allclose(schedule.timesteps, [1000, 937.5, 2500 / 3, 625], rtol=1e-6)
    phases = described_model.model.spec.phases(schedule, described_model.settings)
    assert [phase.scales for phase in phases] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_guidance_lora_and_a_few_step_lora_combine_in_any_order():
    few_step_lora = "LongLive-Plug-Wan2.1-T2V-14B-few-step.safetensors"
    guidance_lora = "LongLive-Plug-Wan2.1-T2V-14B-cfg.safetensors:0.5"
    for loras in ((few_step_lora, guidance_lora), (guidance_lora, few_step_lora)):
        described_model, [messages] = apply_loras("wan2.1-t2v-14b", *loras)
        assert (
            described_model.settings.steps,
            described_model.settings.guidance_scale,
            name_of(described_model.model.scheduler),
        ) == (
            4,
            1.0,
            "euler",
        )
        assert has_line_with_words(messages, f"{few_step_lora} distilled 4 steps guidance 1 shift 5")
        assert "together" not in messages
    described_model, [messages] = apply_loras("wan2.1-t2v-14b", guidance_lora)
    assert (described_model.settings.steps, described_model.settings.guidance_scale) == (50, 1.0)
    assert "50 steps" not in messages


def test_several_distilled_loras_give_a_note():
    second_lora = "Wan21_AccVid_T2V_14B_lora_rank32_fp16.safetensors"
    described_model, [message] = apply_loras("wan2.1-t2v-14b", LIGHTX2V, second_lora)
    assert described_model.settings.steps == 4  # the first LoRA's steps
    assert has_line_with_words(message, f"{LIGHTX2V} {second_lora} together")
    for model in ("wan2.1-t2v-14b-4step", "wan2.1-t2v-14b-rcm-480p"):
        described_model, [message] = apply_loras(model, second_lora)
        assert described_model == model_description(model)
        assert has_line_with_words(message, f"{second_lora} {model} itself keeps 4 steps")


@pytest.mark.parametrize("lora", [f"{LIGHTX2V}:0", f"{LIGHTX2V}:-0.5", "lightning_bolt.safetensors"])
def test_a_lora_without_strength_or_of_another_kind_changes_no_setting(lora):
    assert apply_loras("wan2.1-t2v-14b", lora) == (model_description("wan2.1-t2v-14b"), [])


@pytest.fixture
def lora(tmp_path):
    """A LoRA for the bundled model, with a name of distilled weights."""
    pipe = wanjax.load("nano")
    width = pipe.model.cost(pipe.defaults).width
    factor = np.random.default_rng(0).normal(size=(2, width)).astype(np.float32) / width
    tensors = {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": factor}
    tensors |= {"diffusion_model.blocks.0.self_attn.q.lora_B.weight": factor.T.copy()}
    save_safetensors(path := tmp_path / LIGHTX2V, tensors)
    return path


def test_settings_of_a_lora_apply_by_default(lora):
    with pytest.warns(WanjaxWarning, match="4 steps"):
        pipe = wanjax.load("nano", lora=lora)
    settings = pipe.settings(prompt="a")
    assert (settings.steps, settings.guidance_scale, settings.flow_shift) == (4, 1.0, 5.0)
    assert name_of(pipe.scheduler) == "euler"
    settings = pipe.settings(prompt="a", steps=7, guidance_scale=2, flow_shift=3)
    assert (settings.steps, settings.guidance_scale, settings.flow_shift) == (7, 2.0, 3.0)
    pipe = wanjax.load("nano", lora=lora, scheduler="unipc", note=lambda sentence: None)
    assert (name_of(pipe.scheduler), pipe.defaults.steps) == ("unipc", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wanjax.load("nano", lora=f"{lora}:0").defaults == wanjax.load("nano").defaults


def test_a_converted_checkpoint_keeps_the_settings_of_its_lora(lora, tmp_path):
    succeeded(command("convert", "nano", tmp_path / "made", "--lora", lora))
    messages = []
    pipe = wanjax.load(tmp_path / "made", note=messages.append)
    assert (pipe.defaults.steps, pipe.defaults.guidance_scale, pipe.scheduler) == (4, 1.0, parse("euler"))
    assert has_line_with_words(messages[0], "made distilled 4 steps")


def test_the_command_uses_settings_of_a_lora_and_reproduces_the_video(lora, tmp_path, monkeypatch):
    """A TOML file and typed options override them; metadata has all settings that were used."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("[generate]\nsteps = 3\n")
    small = ("--size", "32x32", "--frames", "5", "--lora", lora)
    result = succeeded(command("generate", "a red circle", "--out", "a.mp4", *small))
    assert has_line_with_words(result.stderr, f"{LIGHTX2V} distilled 4 steps")
    metadata = read_metadata("a.mp4")
    assert [metadata[x] for x in ("steps", "guidance_scale", "flow_shift", "scheduler")] == [4, 1.0, 5.0, "euler"]
    succeeded(command("generate", "a red circle", "--out", "b.mp4", "--config", "a.toml", *small))
    assert read_metadata("b.mp4")["steps"] == 3
    succeeded(command("generate", "--from", "a.mp4", "--out", "c.mp4"))
    assert read_metadata("c.mp4") == metadata
    assert Path("c.mp4").read_bytes() == Path("a.mp4").read_bytes()


def test_stages_use_the_settings_of_a_distilled_lora(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--size", "32x32", "--frames", "5", "--dir", "made")
    succeeded(command("encode", "a red circle", *small))
    succeeded(command("denoise", "--dir", "made", "--lora", lora))
    succeeded(command("decode", "--dir", "made"))
    metadata = read_metadata("made/output_video.mp4")
    assert [metadata[x] for x in ("steps", "guidance_scale", "flow_shift", "scheduler")] == [4, 1.0, 5.0, "euler"]
