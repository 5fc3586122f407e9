# SPDX-License-Identifier: Apache-2.0
"""Workflows of Wan Animate: a character, clips, and segments that continue each other."""

from typing import Any

import pytest

from tests.support.workflows import graph_of
from wanjax.errors import WanjaxError
from wanjax.workflows.request import Missing, Workflow, read_workflow

CLIPS = {"pose_video": "pose", "face_video": "face"}
REPLACEMENT = {"background_video": "street", "character_mask": "people"}
LENGTH, OVERLAP = 77, 5


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def animate(segments: int = 1, clips: dict[str, Any] = CLIPS, **changes: Any) -> dict[str, Any]:
    """Return a workflow of the API's form with segments, like ComfyUI's template of Wan Animate.

    Args:
        segments: The number of segments.
        clips: The names of clips by input, or an output of a node.
        changes: Changes of inputs by node, or whole nodes.
    """
    loader = node("UNETLoader", unet_name="Wan2_2-Animate-14B_fp8_e4m3fn_scaled_KJ.safetensors", weight_dtype="default")
    workflow = {
        "loader": loader,
        "light": node("LoraLoaderModelOnly", model=["loader", 0], lora_name="WanAnimate_relight_lora_fp16.safetensors"),
        "shift": node("ModelSamplingSD3", model=["light", 0], shift=8.0),
        "clip": node("CLIPLoader", clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan"),
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "vision": node("CLIPVisionLoader", clip_name="clip_vision_h.safetensors"),
        "seen": node("CLIPVisionEncode", clip_vision=["vision", 0], image=["picture", 0]),
        "picture": node("LoadImage", image="character.png"),
        "good": node("CLIPTextEncode", clip=["clip", 0], text="the character dances"),
        "bad": node("CLIPTextEncode", clip=["clip", 0], text="blurred"),
    }
    inputs: dict[str, Any] = {}
    for name, clip in clips.items():
        workflow |= {clip: node("VHS_LoadVideo", video=f"{clip}.mp4")} if isinstance(clip, str) else {}
        inputs[name] = [clip, 0] if isinstance(clip, str) else clip
    frames = None
    for number in range(segments):
        follow, sample, decode, new, joined = (
            f"{name} {number}" for name in ("follow", "sample", "decode", "new", "all")
        )
        first = {"video_frame_offset": 0} if frames is None else {}
        following = {"continue_motion": frames, "video_frame_offset": [f"follow {number - 1}", 5]} if frames else first
        condition = {"positive": ["good", 0], "negative": ["bad", 0], "vae": ["vae", 0]}
        shape = {"width": 640, "height": 480, "length": LENGTH, "batch_size": 1}
        pictures = {"clip_vision_output": ["seen", 0], "reference_image": ["picture", 0], **inputs}
        workflow |= {
            follow: node(
                "WanAnimateToVideo", **condition, **shape, **pictures, continue_motion_max_frames=OVERLAP, **following
            ),
            sample: node(
                "KSampler",
                **{"model": ["shift", 0], "positive": [follow, 0], "negative": [follow, 1]},
                **{"latent_image": [follow, 2], "seed": 7 + number, "steps": 6, "cfg": 1.0, "sampler_name": "euler"},
                **{"scheduler": "simple", "denoise": 1.0},
            ),
            f"trim {number}": node("TrimVideoLatent", samples=[sample, 0], trim_amount=[follow, 3]),
            decode: node("VAEDecode", samples=[f"trim {number}", 0], vae=["vae", 0]),
            new: node("ImageFromBatch", image=[decode, 0], batch_index=[follow, 4], length=4096),
        }
        workflow |= {joined: node("ImageBatch", image1=frames, image2=[new, 0])} if frames else {}
        frames = [joined, 0] if frames else [decode, 0]
        workflow |= {
            f"film {number}": node("CreateVideo", images=frames, fps=16.0),
            f"save {number}": node("SaveVideo", video=[f"film {number}", 0]),
        }
    for name, change in changes.items():
        key = name.replace("_", " ")
        workflow |= {key: change} if "class_type" in change else {}
        workflow[key]["inputs"] |= change.get("inputs", change)
    return workflow


def read_request(*arguments: Any, **changes: Any) -> Workflow:
    return read_workflow(graph_of(animate(*arguments, **changes)))


def error_message(*arguments: Any, **changes: Any) -> str:
    with pytest.raises(WanjaxError) as error:
        read_request(*arguments, **changes)
    return str(error.value)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments_become_windows_of_one_video(segments):
    workflow = read_request(segments, CLIPS | REPLACEMENT)
    settings = workflow.settings
    assert workflow.model == "wan2.2-animate-14b"
    assert [file.name for file in workflow.files] == ["Wan2_2-Animate-14B_fp8_e4m3fn_scaled_KJ.safetensors"]
    assert [(use.file.name, use.strength) for use in workflow.loras] == [
        ("WanAnimate_relight_lora_fp16.safetensors", 1)
    ]
    assert (settings["windows"], settings.get("overlap")) == (segments, OVERLAP if segments > 1 else None)
    assert (settings["width"], settings["height"], settings["frames"], settings["fps"]) == (640, 480, LENGTH, 16)
    assert (settings["steps"], settings["guidance_scale"], settings["flow_shift"], settings["seed"]) == (6, 1, 8, 7)
    assert (settings["prompt"], settings["negative_prompt"]) == ("the character dances", "blurred")
    assert {name: value.name for name, value in workflow.inputs.items()} == {
        **{"image": "character.png", "video": "pose.mp4", "face": "face.mp4"},
        **{"background": "street.mp4", "mask": "people.mp4"},
    }
    assert any("adds bars to the character" in note for note in workflow.notes)
    assert any("noise of its own seed" in note for note in workflow.notes) == (segments > 1)
    assert any("film" in note or "is read, and not" in note for note in workflow.notes) == (segments > 1)


def test_clips_computed_from_a_video_are_missing_inputs():
    poses = {
        name: node("DWPreprocessor", image=["film", 0], detect_face=face) for name, face in (("p", "no"), ("f", "yes"))
    }
    mask = node("Sam2Segmentation", image=["film", 0])
    clips = {
        "pose_video": ["p", 0],
        "face_video": ["f", 0],
        "background_video": ["drawn", 0],
        "character_mask": ["m", 0],
    }
    drawn = node("DrawMaskOnImage", image=["film", 0], mask=["m", 0])
    workflow = read_request(1, clips, **poses, m=mask, drawn=drawn, film=node("VHS_LoadVideo", video="film.mp4"))
    missing = {name: value.sentence for name, value in workflow.inputs.items() if isinstance(value, Missing)}
    assert missing.keys() == {"video", "face", "background", "mask"}
    assert "node p (DWPreprocessor) composes a video when it runs" in missing["video"]
    assert missing["face"].endswith("save the result in ComfyUI, and give it by --face FILE")
    assert "DrawMaskOnImage" in missing["background"]
    assert "--mask FILE" in missing["mask"]


def test_an_unlinked_clip_is_a_missing_input():
    workflow = read_request(1, {"pose_video": "pose"})
    problem = "node follow 0 (WanAnimateToVideo) has no face_video, which wanjax needs"
    assert workflow.inputs["face"].sentence == f"{problem}: give a clip of the face by --face FILE"


def test_a_single_picture_can_be_the_mask():
    workflow = read_request(
        1,
        CLIPS | {"background_video": "street", "character_mask": ["picture mask", 0]},
        **{"picture_mask": node("LoadImageMask", image="mask.png", channel="red")},
    )
    assert workflow.inputs["mask"].name == "mask.png"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"follow_1": {"video_frame_offset": 60}}, "starts at frame 55 of the clip"),
        ({"follow_1": {"width": 832}}, "has another shape than node follow 0"),
        ({"follow_0": {"video_frame_offset": 10}}, "has 10 as its video_frame_offset"),
        ({"sample_1": {"steps": 8}}, "is made with other settings or inputs than node follow 0"),
        ({"new_1": {"batch_index": 0}}, "leaves out 0 frames of a segment that takes over 5"),
        ({"all_1": {"image1": ["new 1", 0]}}, "continues frames that do not precede it"),
        ({"film_1": {"images": ["decode 1", 0]}}, "join both by ImageBatch"),
        ({"follow_1": {"continue_motion_max_frames": 9}}, "has 9 as its continue_motion_max_frames"),
        ({"follow_1": {"continue_motion": ["picture", 0]}}, "continues the frames of a file"),
    ],
)
def test_unsupported_segments_are_refused(changes, words):
    assert words in error_message(2, save_0=node("PreviewImage", images=["decode 0", 0]), **changes)


def test_unsupported_later_segments_give_a_shorter_video():
    workflow = read_request(2, follow_1={"video_frame_offset": 60})
    assert workflow.settings["windows"] == 1
    assert any("starts at frame 55 of the clip" in note for note in workflow.notes)


def test_skipped_frames_are_noted():
    assert "leaves out the first 3 frames" in error_message(new_0={"batch_index": 3}, film_0={"images": ["new 0", 0]})
    workflow = read_request(new_0={"length": 9}, film_0={"images": ["new 0", 0]})
    assert any(note.startswith("only 9 frames of") for note in workflow.notes)
