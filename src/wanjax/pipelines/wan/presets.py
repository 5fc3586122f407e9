# SPDX-License-Identifier: Apache-2.0
"""Wan's published checkpoints, and the default settings of other checkpoints."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from wanjax.checkpoints.sources import Source, read_json
from wanjax.kernels.attention import SparseLinearAttentionConfig
from wanjax.models.clip import CLIP_VIT_H
from wanjax.models.t5 import UMT5_XXL
from wanjax.models.wan.config import (
    ANIMATE_14B,
    CAUSAL_1_3B,
    FLF2V_14B,
    I2V_14B,
    I2V_A14B,
    INP_1_3B,
    INP_5B,
    POSE_14B,
    T2V_1_3B,
    T2V_14B,
    TI2V_5B,
    VACE_1_3B,
    VACE_14B,
    VAE_2_1,
    VAE_2_2,
    TransformerConfig,
)
from wanjax.pipelines.distillation import Distillation
from wanjax.pipelines.family import UNSTATED_LICENCE, Preset, TrainingDomain, best_match, with_checkpoint_settings
from wanjax.pipelines.settings import NO_MARGINS, Settings
from wanjax.pipelines.wan.animate import CharacterAnimation
from wanjax.pipelines.wan.checkpoints import THREE_STEP_SOLVER
from wanjax.pipelines.wan.model import WanModel
from wanjax.pipelines.wan.pose import PoseToVideo
from wanjax.pipelines.wan.tasks import (
    CausalTextToVideo,
    ControlledVideo,
    FirstAndLastFrameToVideo,
    FirstFrameInpainting,
    FirstFrameToVideo,
    ImageToVideo,
    ImageToVideoWithEncoder,
    Inpainting,
    InpaintingWithEncoder,
    TextToVideo,
    as_class,
)
from wanjax.schedulers import RCM, Consistency, FlowDPM, FlowEuler, Scheduler, shift_of

NANO = Path(str(files("wanjax") / "nano"))
OFFICIAL_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，"
    "残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走"
)
SHAKING, CUTTING = (
    "镜头晃动，",
    "镜头切换，",
)  # the Chinese for "camera shake" and "scene cut"
ANIMATE_NEGATIVE_PROMPT = (
    "过曝，静态，细节模糊不清，字幕，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，"
    "画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，三条腿"
)
CLIP_PROMPT = "人物动作的参考视频"  # "a reference video of a person's movements"
DEFAULTS = Settings(
    model="",
    prompt="",
    negative_prompt=OFFICIAL_NEGATIVE_PROMPT,
    height=480,
    width=832,
    frames=81,
    fps=16,
    steps=50,
    guidance_scale=5.0,
    guidance_scale_2=None,
    boundary=None,
    boundary_step=None,
    flow_shift=5.0,
    sigmas="official",
    seed=42,
    dtype="bfloat16",
    resize="crop",
    strength=0.8,
)
T2V = TextToVideo(text_encoder=UMT5_XXL, transformer=T2V_14B, vae=VAE_2_1)
T2V_SMALL = replace(T2V, transformer=T2V_1_3B)
I2V = as_class(ImageToVideoWithEncoder, T2V, transformer=I2V_14B, image_encoder=CLIP_VIT_H)
FLF2V = as_class(FirstAndLastFrameToVideo, I2V, transformer=FLF2V_14B)
VACE = as_class(ControlledVideo, T2V, transformer=VACE_14B)
VACE_SMALL = replace(VACE, transformer=VACE_1_3B)
T2V_EXPERTS = replace(T2V, has_experts=True)
I2V_EXPERTS = as_class(ImageToVideo, T2V_EXPERTS, transformer=I2V_A14B)
TI2V = as_class(FirstFrameToVideo, T2V, transformer=TI2V_5B, vae=VAE_2_2)
ANIMATE = as_class(CharacterAnimation, I2V, transformer=ANIMATE_14B, image_encoder=CLIP_VIT_H, scheduler=FlowDPM())
POSE = as_class(PoseToVideo, I2V, transformer=POSE_14B)
OVERLAP = 5  # our choice: consecutive windows of a controlled video share 5 frames (two latent frames)
CONTROL_SETTINGS: dict[str, Any] = {"overlap": OVERLAP, "outpaint": NO_MARGINS}
HD: dict[str, Any] = {"height": 720, "width": 1280}
SD: dict[str, Any] = {"height": 480, "width": 832}
HD_AND_SD: dict[str, Any] = HD | {"sizes": ((480, 832),)}

# A step count in a name marks a distillation only if the name is a video model's. `Lightning` and `DMD` can also name a
# subject or a style of a LoRA. `Lightning` therefore marks a distillation only right after the version, as in
# `Wan2.2-Lightning`. `DMD` never marks one.
_MODEL_NAME = r"(?=.*(?:\bwan|14b\b|\b5b\b|1-3b\b|[tif]2v))"
_STEP_COUNT = (
    r"(?:\bwan-?2-?[12]-lightning(?:$|-(?:[tif]2v|ti2v|a?14b|high|low|lora|v\d)\b)"
    r"|\b(?:[1-9]|1\d|20)-?steps?\b)"
)
LIGHTX2V = Distillation(
    name="LightX2V",
    name_pattern=rf"lightx2v|(?:step|cfg)-?distill|\bseko\b|^{_MODEL_NAME}.*{_STEP_COUNT}",
    steps=4,
    flow_shift=5.0,
    scheduler=FlowEuler(),
)
TURBO = Distillation(
    name="TurboDiffusion",
    name_pattern=r"\bturbo(?:wan|diffusion)",
    steps=4,
    scheduler=RCM(),
    image_scheduler=RCM(sigma_max=200.0),
)
R_CM = replace(TURBO, name="rCM", name_pattern=r"\brcm(?:\b|\d)")
TURBO_5B = Distillation(
    name="Wan2.2-TI2V-5B-Turbo",
    name_pattern=r"\b5b\b.*\bturbo\b|\bturbo\b.*\b5b\b",
    steps=4,
    flow_shift=5.0,
    scheduler=Consistency(),
)
SELF_FORCING = replace(TURBO_5B, name="Self-Forcing", name_pattern=r"self-?forcing")
CAUSVID = Distillation(
    name="CausVid, bidirectional",
    name_pattern=r"caus-?vid.*bidirect|\bbidirectional-checkpoint",
    steps=3,
    flow_shift=8.0,
    scheduler=THREE_STEP_SOLVER,
)
FASTWAN = replace(CAUSVID, name="FastWan", name_pattern=r"\bfastwan")
LONGLIVE_PLUG = Distillation(
    name="LongLive-Plug",
    name_pattern=r"longlive-?plug.*\b14b\b.*few-?step",
    steps=4,
    flow_shift=5.0,
    scheduler=FlowEuler(),
)
LONGLIVE_PLUG_5B = replace(LONGLIVE_PLUG, name_pattern=r"longlive-?plug.*\b5b\b.*few-?step", scheduler=None)
LONGLIVE_PLUG_GUIDANCE = Distillation(
    name="LongLive-Plug, guidance alone", name_pattern=r"longlive-?plug.*\bcfg\b", flow_shift=5.0
)
RAPID = replace(LIGHTX2V, name="Rapid, a merge with LightX2V's LoRA", name_pattern=rf"^{_MODEL_NAME}.*\brapid\b")
CAUSVID_LORA = Distillation(name="CausVid", name_pattern=r"caus-?vid", steps=4, flow_shift=8.0)
ACCVIDEO = Distillation(name="AccVideo", name_pattern=r"\bacc-?vid(?:eo)?\b", steps=10)
DISTILLATIONS = (
    *(LONGLIVE_PLUG, LONGLIVE_PLUG_5B, LONGLIVE_PLUG_GUIDANCE),
    *(RAPID, TURBO, R_CM, FASTWAN, TURBO_5B, SELF_FORCING, CAUSVID, CAUSVID_LORA, ACCVIDEO, LIGHTX2V),
)
"""Distillations, which words in a checkpoint's name identify. Sources: configs/distill/ of ModelTC/LightX2V;
inference_config.json of Efficient-Large-Model/LongLive-Plug-Wan2.1-T2V-14B-few-step, and inference.py and configs/ of
LongLive-Plug in NVlabs/LongLive;
rcm/inference/ of NVlabs/rcm and turbodiffusion/inference/ of thu-ml/TurboDiffusion; fastvideo/configs/ of
hao-ai-lab/FastVideo; configs/wan_bidirectional_dmd_from_scratch.yaml of tianweiy/CausVid, and ComfyUI's examples for
LoRAs made of its causal model; README.md of aejion/AccVideo; README.md of quanhaol/Wan2.2-TI2V-5B-Turbo, which samples
as Self-Forcing does.
"""


def _official_preset(
    name: str,
    source: str,
    about: str,
    model: WanModel,
    parameters: int,
    aliases: tuple[str, ...] = (),
    sizes: tuple[tuple[int, int], ...] = (),
    **settings: Any,
) -> Preset:
    """Create the preset of a checkpoint by Wan's authors; `settings` override the defaults."""
    return Preset(
        name=name,
        source=f"Wan-AI/{source}",
        about=about,
        transformer_parameters=parameters,
        licence="Apache-2.0",
        param_dtype="bfloat16",
        defaults=replace(DEFAULTS, model=name, **settings),
        model=model,
        aliases=aliases,
        sizes=sizes,
    )


OFFICIAL_PRESETS = (
    _official_preset(
        "wan2.1-t2v-1.3b",
        "Wan2.1-T2V-1.3B-Diffusers",
        "text to video, 480p",
        T2V_SMALL,
        1_418_996_800,
    ),
    _official_preset(
        "wan2.1-t2v-14b",
        "Wan2.1-T2V-14B-Diffusers",
        "text to video, 480p and 720p",
        T2V,
        14_288_491_584,
        **HD_AND_SD,
    ),
    _official_preset(
        "wan2.1-i2v-14b-480p",
        "Wan2.1-I2V-14B-480P-Diffusers",
        "image to video, 480p",
        I2V,
        16_394_878_784,
        negative_prompt=SHAKING + OFFICIAL_NEGATIVE_PROMPT,
        steps=40,
        flow_shift=3.0,
    ),
    _official_preset(
        "wan2.1-i2v-14b-720p",
        "Wan2.1-I2V-14B-720P-Diffusers",
        "image to video, 720p",
        I2V,
        16_394_878_784,
        negative_prompt=SHAKING + OFFICIAL_NEGATIVE_PROMPT,
        steps=40,
        flow_shift=5.0,
        **HD,
    ),
    _official_preset(
        "wan2.1-flf2v-14b",
        "Wan2.1-FLF2V-14B-720P-diffusers",
        "first and last frame to video, 720p",
        FLF2V,
        16_395_536_704,
        negative_prompt=CUTTING + SHAKING + OFFICIAL_NEGATIVE_PROMPT,
        flow_shift=16.0,
        **HD,
    ),
    _official_preset(
        "wan2.1-vace-1.3b",
        "Wan2.1-VACE-1.3B-diffusers",
        "video from a control clip, a mask and reference pictures, 480p",
        VACE_SMALL,
        2_153_972_032,
        flow_shift=16.0,
        **CONTROL_SETTINGS,
    ),
    _official_preset(
        "wan2.1-vace-14b",
        "Wan2.1-VACE-14B-diffusers",
        "video from a control clip, a mask and reference pictures, 480p and 720p",
        VACE,
        17_337_592_896,
        flow_shift=16.0,
        **CONTROL_SETTINGS,
        **HD_AND_SD,
    ),
    _official_preset(
        "wan2.2-t2v-a14b",
        "Wan2.2-T2V-A14B-Diffusers",
        "text to video, 480p and 720p; two experts of as many parameters each",
        T2V_EXPERTS,
        14_288_491_584,
        steps=40,
        guidance_scale=4.0,  # for the high-noise expert; the official pair (3.0, 4.0) lists the low-noise scale first
        guidance_scale_2=3.0,
        boundary=0.875,
        boundary_step=0,
        flow_shift=12.0,
        **HD_AND_SD,
    ),
    _official_preset(
        "wan2.2-i2v-a14b",
        "Wan2.2-I2V-A14B-Diffusers",
        "image to video, 480p and 720p; two experts of as many parameters each",
        I2V_EXPERTS,
        14_288_901_184,
        steps=40,
        guidance_scale=3.5,
        guidance_scale_2=3.5,
        boundary=0.9,
        boundary_step=0,
        aliases=("Wan-AI/Wan2.2-I2V-14B-Diffusers",),  # the spelling in some guides
        **HD_AND_SD,
    ),
    _official_preset(
        "wan2.2-ti2v-5b",
        "Wan2.2-TI2V-5B-Diffusers",
        "text and image to video, 704p",
        TI2V,
        4_999_787_712,
        height=704,
        width=1280,
        frames=121,
        fps=24,
    ),
    _official_preset(  # wan/configs/wan_animate_14B.py of the authors
        "wan2.2-animate-14b",
        "Wan2.2-Animate-14B-Diffusers",
        "a picture of a character, a pose clip and a clip of the face to video, or into a background",
        POSE,
        17_274_816_884,
        frames=77,
        fps=30,
        steps=20,
        guidance_scale=1.0,
        resize="pad",
        **HD_AND_SD,
    ),
)


def _animate_preset(name: str, source: str, about: str, distilled: bool, **settings: Any) -> Preset:
    """Create the preset of a checkpoint of Wan Animate 2.

    Settings follow modular_pipelines/wan_animate_2 of diffusers; the negative prompt is that of the authors' code.
    """
    model, parameters = replace(ANIMATE, distilled=distilled), 16_394_878_784
    area: dict[str, Any] = {"height": 800, "width": 640, "fps": 24, "resize": "pad"}
    prompts: dict[str, Any] = {"clip_prompt": CLIP_PROMPT, "negative_prompt": ANIMATE_NEGATIVE_PROMPT}
    preset = _official_preset(
        name, source, about, model, parameters, sizes=((720, 1280),), **area, **prompts, **settings
    )
    return replace(preset, words=("distill(?:ed|ation)?",) if distilled else ())


ANIMATE_PRESETS = (
    _animate_preset(
        "wan2.2-animate-2-14b",
        "Wan2.2-Animate-2-14B-Diffusers",
        "a picture of a character and a driving clip to video",
        distilled=False,
        steps=40,
        guidance_scale=3.0,
    ),
    _animate_preset(
        "wan2.2-animate-2-14b-distilled",
        "Wan2.2-Animate-2-14B-Distilled-Diffusers",
        "a picture of a character and a driving clip to video, in 10 steps",
        distilled=True,
        steps=10,
        guidance_scale=1.0,
    ),
)


def _fun_preset(name: str, source: str, model: WanModel, parameters: int, **settings: Any) -> Preset:
    """Create the preset of a Fun InP checkpoint by Alibaba PAI.

    The model interpolates between a first and a last frame.

    Settings follow examples/wan2.1_fun/ and examples/wan2.2_fun/ of aigc-apps/VideoX-Fun: Euler's method at diffusers'
    noise levels, and stretched images.
    """
    overrides: dict[str, Any] = {"guidance_scale": 6.0, "sigmas": "diffusers", "resize": "stretch"}
    preset = _official_preset(
        name,
        source,
        "text, a first picture, or a first and a last picture to video, by Alibaba PAI",
        model,
        parameters,
        **overrides | settings,
    )
    return replace(preset, source=f"alibaba-pai/{source}", scheduler=FlowEuler(), words=("fun", "inp(?:aint)?"))


FUN_PRESETS = (
    _fun_preset(
        *("wan2.1-fun-1.3b-inp", "Wan2.1-Fun-1.3B-InP"),
        as_class(InpaintingWithEncoder, I2V, transformer=INP_1_3B),
        1_564_428_608,
    ),
    _fun_preset(
        *("wan2.1-fun-14b-inp", "Wan2.1-Fun-14B-InP"),
        as_class(InpaintingWithEncoder, I2V),
        16_394_878_784,
    ),
    _fun_preset(
        *("wan2.2-fun-a14b-inp", "Wan2.2-Fun-A14B-InP"),
        as_class(Inpainting, I2V_EXPERTS),
        14_288_901_184,
        guidance_scale_2=6.0,
        boundary=0.9,
        boundary_step=0,
    ),
    _fun_preset(
        *("wan2.2-fun-5b-inp", "Wan2.2-Fun-5B-InP"),
        as_class(FirstFrameInpainting, TI2V, transformer=INP_5B),
        5_000_426_688,
        height=704,
        width=1280,
        frames=121,
        fps=24,
    ),
)

CAUSAL_PRESET = replace(
    _official_preset(
        "wan2.1-t2v-1.3b-causal",
        "",
        "text to video, streamed in chunks, 480p; by Self-Forcing's authors",
        CausalTextToVideo(
            text_encoder=UMT5_XXL,
            transformer=CAUSAL_1_3B,
            vae=VAE_2_1,
            scheduler=Consistency(),
        ),
        1_418_996_800,
        **SELF_FORCING.settings,
    ),
    source="wlsaidhi/SFWan2.1-T2V-1.3B-Diffusers",  # of gdhe17/Self-Forcing, checkpoints/self_forcing_dmd.pt
    distillation=SELF_FORCING,
    licence="CC-BY-NC-SA-4.0",
)


def _lora_preset(
    name: str,
    kind: str,
    loras_text: str,
    *loras: str,
    distillation: Distillation = LIGHTX2V,
    licence: str | None = None,
    **settings: Any,
) -> Preset:
    """Create a preset of a published model with LoRAs for few steps without guidance.

    By default the LoRA is one for 4 steps by LightX2V. Euler's method runs at the noise levels 1, 0.75, 0.5, 0.25 with
    a shift of 5: the timesteps 1000, 937.5, 833.3 and 625. If there are two experts, each runs two steps. Follows
    configs/distill/ and models/schedulers/wan/step_distill/ of ModelTC/LightX2V, and wan/configs/ and
    wan/utils/fm_solvers_euler.py of ModelTC/Wan2.2-Lightning.
    """
    preset, distilled_name = preset_named(name), f"{name}-{kind}"
    return replace(
        preset,
        name=distilled_name,
        about=f"{preset.about.partition(',')[0]} in {distillation.steps} steps, with {loras_text}",
        licence=licence or preset.licence,
        defaults=distillation.apply_to(preset.defaults).updated({"model": distilled_name} | settings),
        loras=loras,
        scheduler=distillation.scheduler,
        distillation=distillation,
    )


def preset_named(name: str) -> Preset:
    """Return the published preset of this name."""
    return next(preset for preset in OFFICIAL_PRESETS if preset.name == name)


_LIGHTX2V_LORAS = "lightx2v/Wan2.1-Distill-Loras/wan2.1"
_LIGHTX2V_T2V_LORAS = "lightx2v/Wan2.2-Distill-Loras/wan2.2_t2v_A14b_{noise}_noise_lora_rank64_lightx2v_4step_1217"
_LIGHTNING_LORAS, _LIGHTNING_RANK = "lightx2v/Wan2.2-Lightning/Wan2.2", "A14B-4steps-lora-rank64-Seko"
_NOISES = ("high", "low")
FOUR_STEP_PRESETS = (
    _lora_preset(
        *("wan2.1-t2v-14b", "4step", "a LoRA by LightX2V"),
        f"{_LIGHTX2V_LORAS}_t2v_14b_lora_rank64_lightx2v_4step.safetensors",
        **SD,
    ),
    _lora_preset(
        *("wan2.1-i2v-14b-480p", "4step", "a LoRA by LightX2V"),
        f"{_LIGHTX2V_LORAS}_i2v_lora_rank64_lightx2v_4step.safetensors",
    ),
    _lora_preset(
        *("wan2.2-t2v-a14b", "4step", "a LoRA by Lightning"),
        *(
            f"{noise}={_LIGHTNING_LORAS}-T2V-{_LIGHTNING_RANK}-V1.1/{noise}_noise_model.safetensors"
            for noise in _NOISES
        ),
    ),
    _lora_preset(
        *("wan2.2-i2v-a14b", "4step", "a LoRA by Lightning"),
        *(f"{noise}={_LIGHTNING_LORAS}-I2V-{_LIGHTNING_RANK}-V1/{noise}_noise_model.safetensors" for noise in _NOISES),
    ),
    _lora_preset(
        *("wan2.2-t2v-a14b", "lightx2v", "a LoRA by LightX2V"),
        *(f"{noise}={_LIGHTX2V_T2V_LORAS.format(noise=noise)}.safetensors" for noise in _NOISES),
        **SD,
    ),
)

# The model cards give the strengths. For the 14B, inference_config.json beside the LoRA gives LightX2V's steps. For the
# 5B, LongLive-Plug's inference.py runs the model's own solver at 125 frames.
_PLUG = "Efficient-Large-Model/LongLive-Plug"
LONGLIVE_PLUG_PRESETS = (
    _lora_preset(
        *("wan2.1-t2v-14b", "longlive-plug", "two LoRAs by LongLive-Plug"),
        f"{_PLUG}-Wan2.1-T2V-14B-few-step/generator_lora_lightx2v.safetensors",
        f"{_PLUG}-Wan2.1-T2V-14B-cfg/adapter_model.safetensors:0.5",
        distillation=LONGLIVE_PLUG,
        **SD,
    ),
    _lora_preset(
        *("wan2.2-ti2v-5b", "longlive-plug", "two LoRAs by LongLive-Plug"),
        f"{_PLUG}-Wan2.2-TI2V-5B-few-step/adapter_model.safetensors",
        f"{_PLUG}-Wan2.2-TI2V-5B-cfg/adapter_model.safetensors:0.5",
        distillation=LONGLIVE_PLUG_5B,
        frames=125,
    ),
)

# No publisher distils VACE. ComfyUI's examples for VACE 14B with a control clip or reference pictures take CausVid's
# LoRA at this strength.
FOUR_STEP_VACE_PRESET = _lora_preset(
    *("wan2.1-vace-14b", "causvid", "a LoRA of CausVid"),
    "Kijai/WanVideo_comfy/Wan21_CausVid_14B_T2V_lora_rank32.safetensors:0.3",
    distillation=CAUSVID_LORA,
    licence=UNSTATED_LICENCE,
)


def _distilled_preset(
    name: str,
    kind: str,
    source: str,
    about: str,
    distillation: Distillation,
    scheduler: Scheduler | None = None,
    **settings: Any,
) -> Preset:
    """Create a preset with distilled weights of the same shapes, for a few steps without guidance."""
    preset, distilled_name = preset_named(name), f"{name}-{kind}"
    return replace(
        preset,
        name=distilled_name,
        source=source,
        about=f"{preset.about.partition(',')[0]} {about}",
        licence=settings.pop("licence", preset.licence),
        defaults=distillation.apply_to(preset.defaults).updated({"model": distilled_name} | settings),
        scheduler=scheduler or distillation.scheduler,
        aliases=(),
        sizes=(),
        distillation=distillation,
    )


# Wan.md and rcm/inference/ of NVlabs/rcm; fastvideo/configs/pipelines/, pipelines/basic/wan/presets.py and
# pipelines/stages/denoising.py of hao-ai-lab/FastVideo; configs/wan_bidirectional_dmd_from_scratch.yaml of
# tianweiy/CausVid. All FastWan models have the noise levels of shift 8.
_RCM_FILE, _CAUSVID_FILE = "worstcoder/rcm-Wan/rCM_Wan2.1_T2V", "tianweiy/CausVid/bidirectional_checkpoint2/model.pt"
_RCM_I2V = "worstcoder/rcm-Wan/Wan2.2-I2V-A14B"  # the high-noise file has 4 times the weight change, as in Wan.md
_LIGHTX2V_I2V = "lightx2v/Wan2.2-Distill-Models/wan2.2_i2v_A14b_high_noise_lightx2v_4step_720p_260412.safetensors"
DISTILLED_PRESETS = (
    _distilled_preset(
        "wan2.1-t2v-1.3b", "rcm", f"{_RCM_FILE}_1.3B_480p.pt", "in 4 steps by rCM, 480p", R_CM, frames=77
    ),
    _distilled_preset(
        "wan2.1-t2v-14b", "rcm-480p", f"{_RCM_FILE}_14B_480p.pt", "in 4 steps by rCM, 480p", R_CM, frames=77, **SD
    ),
    _distilled_preset(
        *("wan2.1-t2v-14b", "rcm-720p", f"{_RCM_FILE}_14B_720p.pt", "in 4 steps by rCM, 720p"),
        R_CM,
        RCM(sigma_max=120.0),
        frames=77,
    ),
    _distilled_preset(
        *("wan2.1-t2v-1.3b", "causvid", _CAUSVID_FILE, "in 3 steps by CausVid, bidirectional", CAUSVID),
        licence="CC-BY-NC-4.0",
    ),
    _distilled_preset(
        *("wan2.1-t2v-1.3b", "fastwan", "FastVideo/FastWan2.1-T2V-1.3B-Diffusers"),
        *("in 3 steps by FastWan, with full attention instead of sparse", FASTWAN),
        height=448,
        frames=61,
    ),
    _distilled_preset(
        *("wan2.2-i2v-a14b", "rcm", f"{_RCM_I2V}-high-rCM4.0-merged.pt", "in 4 steps by rCM, 720p", R_CM),
        R_CM.solver(needs_image=True),
        resize="stretch",
    ),
    _distilled_preset(  # configs/distill/wan22/wan_moe_i2v_distill_model.json of ModelTC/LightX2V
        *("wan2.2-i2v-a14b", "lightx2v", _LIGHTX2V_I2V, "in 4 steps by LightX2V, 720p", LIGHTX2V),
    ),
    _distilled_preset(
        *("wan2.2-ti2v-5b", "fastwan", "FastVideo/FastWan2.2-TI2V-5B-FullAttn-Diffusers"),
        *("in 3 steps by FastWan, 704p", FASTWAN),
    ),
)


def _sparse_linear_preset(name: str, base: str, file: str, **settings: Any) -> Preset:
    """Create a preset by TurboDiffusion's authors.

    The model has sparse-linear attention and is distilled to four steps.

    `file` is the name of the transformer's file, or of the high-noise expert's file, without the suffix. The repository
    has almost the same name. Follows turbodiffusion/inference/ of thu-ml/TurboDiffusion. The README of that repository
    says that all models support 480p and 720p, and gives the best size of each model. Images are stretched to the
    video's size, and the autoencoder runs in bfloat16.
    """
    preset, repository = preset_named(base), f"TurboDiffusion/{file.replace('-high', '')}"
    model: Any = preset.model
    config = replace(model.transformer, sparse_linear=SparseLinearAttentionConfig())
    if model.spec.required_inputs:
        settings |= {"resize": "stretch"}
    size = f"{settings['height']}p"
    overrides = {"model": name, "vae_dtype": "bfloat16"}
    return replace(
        preset,
        name=name,
        source=f"{repository}/{file}.pth",
        about=f"{preset.about.partition(',')[0]} in 4 steps by TurboDiffusion, {size}",
        transformer_parameters=preset.transformer_parameters + config.layers * config.head_dim * (config.head_dim + 1),
        defaults=TURBO.apply_to(preset.defaults).updated(overrides | settings),
        model=replace(model, transformer=config),
        scheduler=TURBO.solver(needs_image=bool(model.spec.required_inputs)),
        distillation=TURBO,
        aliases=(repository,),
        sizes=((720, 1280),) if settings["height"] == 480 else ((480, 832),),
    )


SPARSE_LINEAR_PRESETS = (
    _sparse_linear_preset("turbowan2.1-t2v-1.3b-480p", "wan2.1-t2v-1.3b", "TurboWan2.1-T2V-1.3B-480P", **SD),
    _sparse_linear_preset("turbowan2.1-t2v-14b-480p", "wan2.1-t2v-14b", "TurboWan2.1-T2V-14B-480P", **SD),
    _sparse_linear_preset("turbowan2.1-t2v-14b-720p", "wan2.1-t2v-14b", "TurboWan2.1-T2V-14B-720P", **HD),
    _sparse_linear_preset("turbowan2.2-i2v-a14b-720p", "wan2.2-i2v-a14b", "TurboWan2.2-I2V-A14B-high-720P", **HD),
)


def _nano_domain() -> TrainingDomain:
    """Return the training domain of the bundled model.

    The bundled model's tokenizer knows only the domain's lower-case words.
    """
    pieces = read_json(NANO / "tokenizer" / "tokenizer.json")["model"]["vocab"]
    words = {piece[1:] for piece, _ in pieces if piece.startswith("▁") and piece[1:].isalpha() and piece.islower()}
    return TrainingDomain(
        about='one coloured shape that moves, grows, shrinks or stays, such as "a red circle moving right"',
        words=frozenset(words),
        size=(64, 64),
        frames=17,
    )


PRESETS = (
    Preset(
        name="nano",
        source=str(NANO),
        about="text and image to video, 64 × 64, one coloured shape; ships with wanjax and runs on any CPU",
        transformer_parameters=2_380_032,
        licence="Apache-2.0",
        param_dtype="float32",
        defaults=DEFAULTS.updated(read_json(NANO / "generation_config.json", missing={}) | {"model": "nano"}),
        domain=_nano_domain(),
    ),
    *OFFICIAL_PRESETS,
    *ANIMATE_PRESETS,
    *FUN_PRESETS,
    CAUSAL_PRESET,
    *FOUR_STEP_PRESETS,
    *LONGLIVE_PLUG_PRESETS,
    FOUR_STEP_VACE_PRESET,
    *DISTILLED_PRESETS,
    *SPARSE_LINEAR_PRESETS,
)


def find_published(
    transformer: TransformerConfig, has_experts: bool, name_hint: str, shift: float | None = None
) -> Preset | None:
    """Find the published model with these shapes. Return None if no published model has them.

    The name and the flow shift select one of several models with the same shapes.
    """
    presets = (
        *OFFICIAL_PRESETS,
        *ANIMATE_PRESETS,
        *FUN_PRESETS,
        CAUSAL_PRESET,
        *DISTILLED_PRESETS,
        *SPARSE_LINEAR_PRESETS,
    )
    same_shape = [preset for preset in presets if _transformer_config(preset) == (transformer, has_experts)]
    return best_match(same_shape, name_hint, DISTILLATIONS, shift)


def find_fallback(transformer: TransformerConfig, has_experts: bool, name_hint: str) -> Preset | None:
    """Find a model in the layout of diffusers whose other components fit a transformer. Return None if no model fits.

    Prefers a model of the same shapes with full attention; the name selects one of several such models. Without a model
    of the same shapes, choose the first model whose transformer has the same text, latent and image widths.
    """
    dense_config = replace(transformer, sparse_linear=None)

    def input_widths(config: Any) -> tuple[Any, ...]:
        return config.text_width, config.channels_out, getattr(config, "image_width", None)

    compatible = [
        preset
        for preset in (*OFFICIAL_PRESETS, *ANIMATE_PRESETS, CAUSAL_PRESET)
        if input_widths(_transformer_config(preset)[0]) == input_widths(dense_config)
    ]
    same_config = [preset for preset in compatible if _transformer_config(preset)[0] == dense_config]
    same_experts = [preset for preset in same_config if _transformer_config(preset) == (dense_config, has_experts)]
    return best_match(same_experts or same_config or compatible[:1], name_hint, DISTILLATIONS)


def _transformer_config(preset: Preset) -> tuple[Any, bool]:
    """Return the config of a preset's transformer, and whether the preset has two transformers."""
    model: Any = preset.model
    return model.transformer, model.has_experts


def default_settings(source: Source, model: WanModel, preset: Preset | None) -> Settings:
    """Choose the default settings of a checkpoint: the settings of its preset, if it has a preset.

    A checkpoint without a preset gets the settings of the published model with the same shapes. If there is none, it
    gets the settings of the first published model with the same task and number of experts. If there is none either, it
    gets the settings of Wan 2.1 1.3B. The checkpoint's flow shift, distillation and generation_config.json override
    them.
    """
    if preset is None:
        settings = with_checkpoint_settings(
            source, _similar_settings(model, source), _distillation_settings(model.scheduler)
        )
    else:
        settings = preset.defaults
    if not model.has_experts:
        return replace(settings, boundary=None, boundary_step=None, guidance_scale_2=None)
    return replace(settings, boundary=source.index.get("boundary_ratio") or settings.boundary, boundary_step=0)


def _distillation_settings(scheduler: Scheduler) -> dict[str, Any]:
    """Return the settings that a distilled model's scheduler implies. Other schedulers imply no settings."""
    if not isinstance(scheduler, Consistency):
        return {}
    return FASTWAN.settings if scheduler == THREE_STEP_SOLVER else {"guidance_scale": 1.0, "steps": SELF_FORCING.steps}


def _similar_settings(model: WanModel, source: Source) -> Settings:
    """Return the settings of the published model with the same shapes, or else with the same task and experts."""
    kind, has_experts = type(model), model.has_experts
    if isinstance(model, CharacterAnimation):  # both checkpoints have the same shapes and the same shift
        return ANIMATE_PRESETS[model.distilled].defaults
    shift = shift_of(source["scheduler"].config())
    match = find_published(model.transformer, has_experts, source.name_hint, shift)
    if (kind, has_experts) == (ImageToVideo, False):
        has_experts = True  # a merge of two experts, because the only published model of this task has two
    for preset in (*([match] if match else []), *OFFICIAL_PRESETS, *FUN_PRESETS, CAUSAL_PRESET):
        preset_model = preset.model
        assert isinstance(preset_model, WanModel)
        if (type(preset_model), preset_model.has_experts) == (kind, has_experts):
            return preset.defaults
    return DEFAULTS
