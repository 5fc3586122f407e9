# SPDX-License-Identifier: Apache-2.0
"""The requests of ComfyUI's templates, and an error message for each unsupported template."""

import json

import pytest

from tests.support.workflows import api_form, graph_of, nodes_of, request_of, template, template_names, with_switch
from wanjax.errors import WanjaxError
from wanjax.pipelines.guidance import ZeroStar, guidance_rule
from wanjax.workflows.request import Missing, read_workflow

CAUSVID = "Wan21_CausVid_14B_T2V_lora_rank32.safetensors"
VACE = "wan2.1_vace_14B_fp16.safetensors"
# template: model, files, LoRAs, solver, steps, guidance, shift, width, height, frames, frames per second
EXPECTED = {
    "text_to_video_wan": (
        "wan2.1-t2v-1.3b",
        ["wan2.1_t2v_1.3B_fp16.safetensors"],
        [],
        *("unipc", 30, (6.0,), 8.0, 832, 480, 33, 16),
    ),
    "image_to_video_wan": (
        "wan2.1-i2v-14b-480p",
        ["wan2.1_i2v_480p_14B_fp16.safetensors"],
        [],
        *("unipc", 20, (6.0,), 8.0, 512, 512, 33, 16),
    ),
    "wan2.1_flf2v_720_f16": (
        "wan2.1-flf2v-14b",
        ["wan2.1_flf2v_720p_14B_fp16.safetensors"],
        [],
        *("unipc", 20, (3.0,), 8.0, 720, 1280, 33, 16),
    ),
    "wan2.1_fun_inp": (
        "wan2.1-fun-1.3b-inp",
        ["wan2.1_fun_inp_1.3B_bf16.safetensors"],
        [],
        *("unipc", 20, (6.0,), 5.0, 480, 768, 81, 16),
    ),
    "video_wan2_2_14B_t2v": (
        "wan2.2-t2v-a14b",
        [f"wan2.2_t2v_{expert}_noise_14B_fp8_scaled.safetensors" for expert in ("high", "low")],
        [],
        *("euler", 20, (3.5, 3.5), 5.0, 640, 640, 81, 16),
    ),
    "video_wan2_2_14B_i2v": (
        "wan2.2-i2v-a14b",
        [f"wan2.2_i2v_{expert}_noise_14B_fp8_scaled.safetensors" for expert in ("high", "low")],
        [],
        *("euler", 20, (3.5, 3.5), 5.0, 640, 640, 81, 16),
    ),
    "video_wan2_2_14B_flf2v": (
        "wan2.2-i2v-a14b",
        [f"wan2.2_i2v_{expert}_noise_14B_fp8_scaled.safetensors" for expert in ("high", "low")],
        [],
        *("euler", 20, (4.0, 4.0), 8.0, 640, 640, 81, 16),
    ),
    "video_wan2_2_5B_ti2v": (
        "wan2.2-ti2v-5b",
        ["wan2.2_ti2v_5B_fp16.safetensors"],
        [],
        *("unipc", 20, (5.0,), 8.0, 1280, 704, 121, 24),
    ),
    "video_wan_vace_14B_t2v": (
        "wan2.1-vace-14b",
        [VACE],
        [(CAUSVID, 0.7, None)],
        *("unipc", 4, (1.0,), 8.0, 1280, 720, 81, 16),
    ),
    "video_wan_vace_14B_v2v": (
        "wan2.1-vace-14b",
        [VACE],
        [(CAUSVID, 0.3, None)],
        *("unipc", 4, (1.0,), 8.0, 720, 720, 81, 16),
    ),
    "video_wan_vace_14B_ref2v": (
        "wan2.1-vace-14b",
        [VACE],
        [(CAUSVID, 0.3, None)],
        *("unipc", 4, (1.0,), 8.0, 768, 768, 81, 16),
    ),
    "video_wan_vace_inpainting": (
        "wan2.1-vace-14b",
        [VACE],
        [(CAUSVID, 0.3, None)],
        *("unipc", 6, (1.0,), 5.0, 720, 720, 81, None),  # the rate is that of a clip
    ),
    "video_wan_vace_outpainting": (
        "wan2.1-vace-14b",
        [VACE],
        [(CAUSVID, 0.4, None)],
        *("unipc", 3, (1.0,), 8.0, 960, 960, 81, 16),
    ),
    "video_wan_vace_flf2v": ("wan2.1-vace-14b", [VACE], [], *("unipc", 20, (6.0,), 8.0, 512, 512, 81, 16)),
    "video_wan_animate2": (
        "wan2.2-animate-2-14b",
        ["wan_animate_2_int8_convrot.safetensors"],
        [("lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", 1, None)],
        *("consistency", 6, (1.0,), 8.0, 480, 848, 81, None),  # the schedule's model has no shift of its own
    ),
    "video_wan_animate2_distilled": (
        "wan2.2-animate-2-14b-distilled",
        ["wan_animate_2_distill_int8_convrot.safetensors"],
        [],
        *("consistency", 10, (1.0,), 8.0, 480, 848, 81, None),
    ),
    "video_hunyuan_video_1.5_720p_t2v": (
        "hunyuanvideo1.5-720p-t2v",
        ["hunyuanvideo1.5_720p_t2v_fp16.safetensors"],
        [],
        *("euler", 20, (6.0,), 7.0, 1280, 720, 121, 24),
    ),
    "video_hunyuan_video_1.5_720p_i2v": (
        "hunyuanvideo1.5-720p-i2v",
        ["hunyuanvideo1.5_720p_i2v_fp16.safetensors"],
        [],
        *("euler", 20, (6.0,), 7.0, 1280, 720, 121, 24),
    ),
}
SWITCHED = {  # template: LoRAs, steps, guidance
    "video_wan2_2_14B_t2v": (
        [(f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{expert}_noise.safetensors", 1, expert) for expert in ("high", "low")],
        *(4, (1.0, 1.0)),
    ),
    "video_wan2_2_14B_i2v": (
        [(f"wan2.2_i2v_lightx2v_4steps_lora_v1_{expert}_noise.safetensors", 1, expert) for expert in ("high", "low")],
        *(4, (1.0, 1.0)),
    ),
    "video_wan_vace_inpainting": ([], 20, (6.0,)),
    "video_wan_vace_flf2v": (
        [("lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", 0.8, None)],
        *(6, (1.0,)),
    ),
}
INPUTS = {
    "image_to_video_wan": ["image"],
    "wan2.1_flf2v_720_f16": ["image", "last_image"],
    "wan2.1_fun_inp": ["image", "last_image"],
    "video_wan2_2_14B_i2v": ["image"],
    "video_wan2_2_14B_flf2v": ["image", "last_image"],
    "video_wan_vace_14B_v2v": ["video", "references"],
    "video_wan_vace_14B_ref2v": ["references"],
    "video_wan_animate2": ["image", "video"],
    "video_wan_animate2_distilled": ["image", "video"],
    "video_wan_vace_inpainting": ["references"],
    "video_wan_vace_outpainting": ["video"],
    "video_wan_vace_flf2v": ["image", "last_image"],
    "video_hunyuan_video_1.5_720p_i2v": ["image"],
}
MARGINS = {"video_wan_vace_outpainting": "120,120,120,200"}
COMPOSED = {  # inputs that nodes compose when they run: a network finds the mask in the clip
    "video_wan_vace_inpainting": {"video": "ImageCompositeMasked", "mask": "GrowMask"},
}
ERROR_WORDS = {  # template: words of its error message
    "3d_hunyuan3d-v2.1": "makes 3D models",
    "3d_triposplat_image_to_gaussian_splat": "of TripoSplat",
    "api_bytedance_text_to_video": "ByteDanceTextToVideoNode) calls a paid service",
    "api_wan_text_to_video": "WanTextToVideoApi) calls a paid service",
    "api_wan3_0_i2v": "Wan3ImageToVideoApi) calls a paid service",
    "api_kling2_6_t2v": "calls a paid service",
    "api_ltx2_5_t2v": "LtxApi25TextToVideo) calls a paid service",
    "api_openai_gpt_image_2_t2i": "calls a paid service",
    "api_elevenlabs_voice_isolation": "calls a paid service",
    "api_topaz_video_enhance": "calls a paid service",
    "api_vidu_q3_text_to_video": "calls a paid service",
    "audio_ace_step1_5_xl_base": "makes sound",
    "audio_stable_audio_example": "makes sound",
    "basic_datatype_conversion": "makes text",
    "flux_schnell": "makes pictures",
    "hidream_i1_dev": "makes pictures",
    "hunyuan_video_text_to_video": "of HunyuanVideo 1.0, whose workflows wanjax does not read",
    "image_chrono_edit_14B": "of ChronoEdit",
    "image_qwen_image": "makes pictures",
    "image_z_image_turbo": "makes pictures",
    "ltxv_text_to_video": "LTXVConditioning) belongs to LTX",
    "sdxl_simple_example": "makes pictures",
    "txt_to_image_to_video": "belongs to Stable Video Diffusion",
    "templates-6-key-frames": "joins the videos of several samplers",
    "utility_depth_anything3_video_depth_estimation": "no node of the workflow samples a video",
    "utility_sdpose_ood_video_to_pose_map": "no node of the workflow samples a video",
    "utility_video_frame_interpolation": "FrameInterpolate) is not known to wanjax, and no node of the workflow",
    "utility_void_video_inpainting": "void_pass2.safetensors, void_pass1.safetensors and node 167:35",
    "utility_birefnet_remove_background": "makes pictures",
    "video_causal_forcing_i2v": "a causal model",
    "video_humo": "WanHuMoImageToVideo) belongs to HuMo",
    "video_kandinsky5_t2v": "belongs to Kandinsky 5",
    "video_ltx2_5_t2v": "belongs to LTX",
    "video_minimax_h3_t2v": "of MiniMax",
    "video_wan2.1_alpha_t2v_14B": "JoinImageWithAlpha) is not known to wanjax: without it the workflow is a video of "
    "wan2.1-t2v-14b, 832x480, 33 frames, 20 steps",
    "video_wan2.1_fun_camera_v1.1_14B": "belongs to Wan Fun Control with a camera",
    "video_wan21_scail2_character_replacement": "belongs to SCAIL",
    "video_wan2_1_infinitetalk": "belongs to InfiniteTalk",
    "video_wan2_2_14B_fun_control": "belongs to Wan Fun Control",
    "video_wan2_2_14B_s2v": "belongs to Wan S2V",
    "video_wan_ati": "belongs to Wan ATI",
    "video_wan_dancer": "belongs to Wan Dancer",
    "video_wanmove_480p": "belongs to WanMove",
    "wan2.1_fun_control": "belongs to Wan Fun Control",
}
MORE_READABLE = {"video_wan2_2_14B_fun_inpaint", "video_wan2_2_5B_fun_inpaint"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_gives_the_expected_request(name):
    workflow, settings = request_of(template(name)), request_of(template(name)).settings
    model, files, loras, solver, steps, guidance, shift, width, height, frames, fps = EXPECTED[name]
    assert workflow.model == model
    assert [file.name for file in workflow.files] == files
    assert [(use.file.name, use.strength, use.expert) for use in workflow.loras] == loras
    assert workflow.scheduler == solver
    scales = [settings.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    assert tuple(scale for scale in scales if scale is not None) == guidance
    assert (settings["steps"], settings["flow_shift"]) == (steps, shift)
    assert (settings["width"], settings["height"], settings["frames"], settings.get("fps")) == (
        *(width, height, frames),
        fps,
    )
    assert settings["prompt"]
    assert {file.kind for file in workflow.other_files} >= {"text_encoders", "vae"}
    assert not any("own repository" in note for note in workflow.notes)
    inputs = workflow.inputs
    assert [key for key, value in inputs.items() if not isinstance(value, Missing)] == INPUTS.get(name, [])
    assert settings.get("outpaint") == MARGINS.get(name)
    composed = {key: value.sentence for key, value in inputs.items() if isinstance(value, Missing)}
    assert composed.keys() == COMPOSED.get(name, {}).keys()
    assert all(COMPOSED[name][key] in message for key, message in composed.items())


@pytest.mark.parametrize("name", SWITCHED)
def test_the_switch_of_a_template_changes_the_request(name):
    workflow = request_of(with_switch(name))
    loras, steps, guidance = SWITCHED[name]
    assert [(use.file.name, use.strength, use.expert) for use in workflow.loras] == loras
    settings = workflow.settings
    scales = [settings.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    assert (settings["steps"], tuple(scale for scale in scales if scale is not None)) == (steps, guidance)


def test_a_loop_over_a_driving_clip_makes_segments():
    looped, single = (request_of(template(name)) for name in ("video_wan_animate2", "video_wan_animate2_distilled"))
    assert "windows" not in looped.settings  # the clip decides how many
    assert single.settings["windows"] == 1
    assert looped.settings["clip_prompt"].startswith("A girl doing energetic street dance")
    assert single.settings["clip_prompt"].startswith("A man doing energetic street dance")
    assert looped.settings["prompt"].startswith("Character Description")
    assert any("has the same noise in each iteration of its loop" in note for note in looped.notes)
    assert all(any("stores keys and values in int8" in note for note in each.notes) for each in (looped, single))


@pytest.mark.parametrize("name", ["video_hunyuan_video_1.5_720p_t2v", "video_hunyuan_video_1.5_720p_i2v"])
def test_the_second_half_of_hunyuanvideo_gives_a_note(name):
    workflow = template(name)
    for node in nodes_of(workflow):
        node["mode"] = 0
    read = request_of(workflow)
    assert read.model == EXPECTED[name][0]  # the first half is still read
    assert any("is read, and not node" in note for note in read.notes)


@pytest.mark.parametrize("switched", [False, True])
def test_the_second_expert_starts_at_a_step_of_the_schedule(switched):
    name = "video_wan2_2_14B_t2v"
    settings = request_of(with_switch(name) if switched else template(name)).settings
    assert (settings["boundary_step"], settings["sigmas"]) == (2 if switched else 10, "comfy")


@pytest.mark.parametrize("name", [*EXPECTED, "video_ltx2_5_i2v"])
def test_both_forms_give_the_same_request(name):
    graph = graph_of(template(name))
    again = graph_of(json.loads(json.dumps(api_form(graph))))
    if name in EXPECTED:
        first, second = read_workflow(graph), read_workflow(again)
        assert first.addresses
        assert {**vars(first), "addresses": {}} == vars(second)
    else:
        messages = []
        for each_graph in (graph, again):
            with pytest.raises(WanjaxError) as error:
                read_workflow(each_graph)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_skipped_blocks_become_a_guidance_rule():
    """Their node is before the node of the shift, so its percents follow the model's default shift, 8."""
    workflow = template("wan2.1_fun_inp")
    [node] = [node for node in nodes_of(workflow) if node["type"] == "SkipLayerGuidanceDiT"]
    request = request_of(workflow)
    rule = guidance_rule(request.settings["guidance_rule"])
    assert rule == ZeroStar(
        skip="9+10", skip_scale=3, skip_start=round(7.92 / 7.93, 6), skip_end=round(1.6 / 2.4, 6), zero_steps=0
    )
    assert any("UNetTemporalAttentionMultiply) changes only models with" in note for note in request.notes)
    for mode, scale in ((4, 3), (0, 0)):  # bypassed, and of no effect
        node["mode"], node["widgets_values"][2] = mode, scale
        assert request_of(workflow).settings["guidance_rule"] == "cfg-zero:zero_steps=0"
    node["widgets_values"][2:] = [3, 0, 1, 0.5]
    with pytest.raises(WanjaxError, match=r"SkipLayerGuidanceDiT\) has 0.5 as its rescaling_scale"):
        request_of(workflow)
    node["widgets_values"][2:] = [3, 0, 1, 0]
    [sampler] = [node for node in nodes_of(workflow) if node["type"] == "KSampler"]
    sampler["widgets_values"][3] = 1  # without guidance, cfg-zero has no effect, and skipped blocks have
    assert request_of(workflow).settings["guidance_rule"] == "none:skip=9+10,skip_scale=3,skip_start=1,skip_end=0"


@pytest.mark.parametrize("name", ERROR_WORDS)
def test_an_unsupported_template_gives_the_expected_error(name):
    with pytest.raises(WanjaxError) as error:
        request_of(template(name))
    assert ERROR_WORDS[name] in str(error.value)


def test_each_unsupported_template_has_an_error_message():
    names = template_names()
    assert len(names) > 600
    for name in names:
        message, workflow = None, template(name)
        try:
            request_of(workflow)
        except WanjaxError as error:
            message = str(error)
        assert (message is None) == (name in EXPECTED or name in MORE_READABLE), name
        assert message is None or ("\n" not in message and 20 < len(message) < 500), name
