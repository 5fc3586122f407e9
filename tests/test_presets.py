# SPDX-License-Identifier: Apache-2.0
"""The published models at their real sizes, as shapes: parameters, keys of the checkpoints, and defaults."""

import hashlib
import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.published import (
    TensorShapes,
    animate_keys,
    image_encoder_keys,
    pose_keys,
    text_encoder_keys,
    transformer_keys,
    vae_keys,
)
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Spec
from wanjax.checkpoints.network_kinds import network_of
from wanjax.checkpoints.sources import read_json
from wanjax.converters import clip, t5, weight_rules
from wanjax.converters.wan import animate, pose
from wanjax.converters.wan import diffusers as wan
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
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
)
from wanjax.pipelines.wan import FAMILY
from wanjax.pipelines.wan.presets import NANO, OFFICIAL_NEGATIVE_PROMPT
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.registry import FREE_LICENCE, find_checkpoint, model_description, presets
from wanjax.schedulers import parse

RCM_FILES, FASTWAN = "worstcoder/rcm-Wan/rCM_Wan2.1_T2V", "FastVideo/FastWan"
RCM_I2V = "worstcoder/rcm-Wan/Wan2.2-I2V-A14B-high-rCM4.0-merged.pt"
LIGHTX2V_I2V = "lightx2v/Wan2.2-Distill-Models/wan2.2_i2v_A14b_high_noise_lightx2v_4step_720p_260412.safetensors"
CAUSVID, THREE_STEPS = "tianweiy/CausVid/bidirectional_checkpoint2/model.pt", "consistency:timesteps=1000,757,522"


class Published(NamedTuple):
    """A network, the table of its weights, the keys of its checkpoint, and the number of its parameters."""

    config: Any
    rules: list[weight_rules.WeightRule]
    keys: TensorShapes
    parameters: int


NANO_TRANSFORMER = wan.transformer_config(read_json(NANO / "transformer" / "config.json"))
NETWORKS = {
    "nano": Published(
        NANO_TRANSFORMER,
        wan.transformer_weight_rules(NANO_TRANSFORMER),
        transformer_keys(NANO_TRANSFORMER),
        2_380_032,
    ),
    "wan2.1-t2v-1.3b": Published(
        T2V_1_3B, wan.transformer_weight_rules(T2V_1_3B), transformer_keys(T2V_1_3B), 1_418_996_800
    ),
    "wan2.1-t2v-14b": Published(
        T2V_14B, wan.transformer_weight_rules(T2V_14B), transformer_keys(T2V_14B), 14_288_491_584
    ),
    "wan2.2-t2v-a14b": Published(
        T2V_14B, wan.transformer_weight_rules(T2V_14B), transformer_keys(T2V_14B), 14_288_491_584
    ),
    "wan2.2-i2v-a14b": Published(
        I2V_A14B, wan.transformer_weight_rules(I2V_A14B), transformer_keys(I2V_A14B), 14_288_901_184
    ),
    "wan2.2-ti2v-5b": Published(
        TI2V_5B, wan.transformer_weight_rules(TI2V_5B), transformer_keys(TI2V_5B), 4_999_787_712
    ),
    "wan2.1-i2v-14b-480p": Published(
        I2V_14B, wan.transformer_weight_rules(I2V_14B), transformer_keys(I2V_14B), 16_394_878_784
    ),
    "wan2.1-i2v-14b-720p": Published(
        I2V_14B, wan.transformer_weight_rules(I2V_14B), transformer_keys(I2V_14B), 16_394_878_784
    ),
    "wan2.1-flf2v-14b": Published(
        FLF2V_14B,
        wan.transformer_weight_rules(FLF2V_14B),
        transformer_keys(FLF2V_14B),
        16_395_536_704,
    ),
    "wan2.1-vace-1.3b": Published(
        VACE_1_3B,
        wan.transformer_weight_rules(VACE_1_3B),
        transformer_keys(VACE_1_3B),
        2_153_972_032,
    ),
    "wan2.1-vace-14b": Published(
        VACE_14B,
        wan.transformer_weight_rules(VACE_14B),
        transformer_keys(VACE_14B),
        17_337_592_896,
    ),
    "wan2.2-animate-2-14b": Published(
        ANIMATE_14B, animate.transformer_weight_rules(ANIMATE_14B), animate_keys(ANIMATE_14B), 16_394_878_784
    ),
    "wan2.2-animate-14b": Published(
        POSE_14B, pose.transformer_weight_rules(POSE_14B), pose_keys(POSE_14B), 17_274_816_884
    ),
    "wan2.1-t2v-1.3b-causal": Published(
        CAUSAL_1_3B,
        wan.transformer_weight_rules(CAUSAL_1_3B),
        transformer_keys(T2V_1_3B),
        1_418_996_800,
    ),
    **{
        name: Published(config, wan.transformer_weight_rules(config), transformer_keys(config), parameters)
        for name, config, parameters in (
            ("wan2.1-fun-1.3b-inp", INP_1_3B, 1_564_428_608),
            ("wan2.1-fun-14b-inp", I2V_14B, 16_394_878_784),
            ("wan2.2-fun-a14b-inp", I2V_A14B, 14_288_901_184),
            ("wan2.2-fun-5b-inp", INP_5B, 5_000_426_688),
            ("turbowan2.1-t2v-1.3b", replace(T2V_1_3B, sparse_linear=SparseLinearAttentionConfig()), 1_419_492_160),
            ("turbowan2.1-t2v-14b", replace(T2V_14B, sparse_linear=SparseLinearAttentionConfig()), 14_289_152_064),
            ("turbowan2.2-i2v-a14b", replace(I2V_A14B, sparse_linear=SparseLinearAttentionConfig()), 14_289_561_664),
        )
    },
    "clip-vit-h": Published(
        CLIP_VIT_H, clip.clip_weight_rules(CLIP_VIT_H), image_encoder_keys(CLIP_VIT_H), 611_086_080
    ),
    "umt5-xxl": Published(UMT5_XXL, t5.t5_weight_rules(UMT5_XXL), text_encoder_keys(UMT5_XXL), 5_680_910_336),
    "wan2.1-vae": Published(VAE_2_1, wan.vae_weight_rules(VAE_2_1), vae_keys(VAE_2_1), 126_892_531),
    "wan2.2-vae": Published(VAE_2_2, wan.vae_weight_rules(VAE_2_2), vae_keys(VAE_2_2), 704_688_668),
}


@cache
def weights(name: str) -> dict[str, Any]:
    network = network_of(NETWORKS[name].config, FAMILY.networks)
    return modules.parameters(network.abstract(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))


def checkpoint(name: str) -> dict[str, Spec]:
    return {key: Spec(shape, np.dtype(jnp.bfloat16)) for key, shape in NETWORKS[name].keys.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_number_of_parameters_is_the_published_one(name):
    published = NETWORKS[name]
    assert sum(math.prod(shape) for shape in published.keys.values()) == published.parameters
    assert sum(weight.size for weight in weights(name).values()) == published.parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_every_key_of_the_checkpoint_is_mapped(name):
    sources = checkpoint(name)
    assignments = weight_rules.assign(NETWORKS[name].rules, sources, weights(name))
    assert sorted(key for each in assignments for key in each.sources) == sorted(sources)
    assert {each.target for each in assignments} == weights(name).keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_superfluous_and_missing_keys_are_reported(name):
    sources = checkpoint(name)
    key = list(sources)[len(sources) // 2]
    for wrong in ({k: v for k, v in sources.items() if k != key}, sources | {f"{key}.other": sources[key]}):
        with pytest.raises(WanjaxError, match=key.rsplit(".", 1)[-1]):
            weight_rules.assign(NETWORKS[name].rules, wrong, weights(name))


@pytest.mark.parametrize(
    ("name", "source", "guidance", "boundary", "shift"),
    [
        ("wan2.2-t2v-a14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", (4.0, 3.0), 0.875, 12.0),
        ("wan2.2-i2v-a14b", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", (3.5, 3.5), 0.9, 5.0),
    ],
)
def test_models_of_two_experts_have_the_published_defaults(name, source, guidance, boundary, shift):
    """The guidance scale at high noise is first; the official pair for text to video is written (3.0, 4.0)."""
    preset, defaults = presets()[name], presets()[name].defaults
    assert (preset.name, defaults.model, preset.source) == (name, name, source)
    assert (defaults.guidance_scale, defaults.guidance_scale_2) == guidance
    assert (defaults.boundary, defaults.flow_shift, defaults.steps) == (boundary, shift, 40)
    assert (defaults.size, defaults.frames, defaults.fps) == ((720, 1280), 81, 16)
    assert defaults.negative_prompt == OFFICIAL_NEGATIVE_PROMPT


def test_the_5b_has_the_published_defaults():
    preset, defaults = presets()["wan2.2-ti2v-5b"], presets()["wan2.2-ti2v-5b"].defaults
    assert (defaults.model, preset.source) == ("wan2.2-ti2v-5b", "Wan-AI/Wan2.2-TI2V-5B-Diffusers")
    assert (defaults.size, defaults.frames, defaults.fps) == ((704, 1280), 121, 24)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (50, 5.0, 5.0)
    assert (defaults.guidance_scale_2, defaults.boundary) == (None, None)
    assert defaults.negative_prompt == OFFICIAL_NEGATIVE_PROMPT


@pytest.mark.parametrize(("distilled", "steps", "guidance"), [(False, 40, 3.0), (True, 10, 1.0)])
def test_animation_models_have_the_published_defaults(distilled, steps, guidance):
    name = "wan2.2-animate-2-14b" + "-distilled" * distilled
    preset, defaults, model = presets()[name], presets()[name].defaults, model_description(name).model
    assert preset.source == f"Wan-AI/Wan2.2-Animate-2-14B{'-Distilled' * distilled}-Diffusers"
    assert (defaults.size, defaults.frames, defaults.fps, defaults.overlap) == ((800, 640), 81, 24, 1)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (steps, guidance, 5.0)
    assert (model.distilled, model.scheduler, model.spec.required_inputs) == (
        distilled,
        parse("dpm++"),
        ("image", "video"),
    )
    assert (defaults.clip_prompt, defaults.resize) == ("人物动作的参考视频", "pad")


def test_the_model_of_poses_has_the_published_defaults():
    preset = presets()["wan2.2-animate-14b"]
    defaults, spec = preset.defaults, model_description("wan2.2-animate-14b").model.spec
    assert preset.source == "Wan-AI/Wan2.2-Animate-14B-Diffusers"
    assert (defaults.size, defaults.frames, defaults.fps, defaults.overlap) == ((720, 1280), 77, 30, 1)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (20, 1.0, 5.0)
    assert (spec.scheduler, defaults.resize) == (parse("unipc"), "pad")
    assert (spec.input_names, spec.required_inputs) == (
        ("image", "video", "face", "background", "mask"),
        ("image", "video", "face"),
    )


INVALID_FOR_TWO_EXPERTS = [
    *({"guidance_scale": scale} for scale in (-1.0, math.inf, math.nan)),
    *({"guidance_scale_2": scale} for scale in (-1.0, math.inf, math.nan)),
    *({"flow_shift": shift} for shift in (0.0, math.inf, math.nan)),
]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        *(("wan2.2-t2v-a14b", change, "{name} {value} finite") for change in INVALID_FOR_TWO_EXPERTS),
        ("wan2.2-ti2v-5b", {"height": 720}, "height 720 32 704 736"),  # 704 is offered for it
    ],
    ids=str,
)
def test_invalid_numbers_are_refused(name, change, words):
    [(setting, value)] = change.items()
    defaults = presets()[name].defaults
    grid = 16 if name == "wan2.2-t2v-a14b" else VAE_2_2.spatial_factor * TI2V_5B.patch[1]
    defaults.check(spatial=grid, temporal=4)
    with pytest.raises(WanjaxError, match=line_with_words(words.format(name=setting, value=value))):
        defaults.updated(change).check(spatial=grid, temporal=4)


@pytest.mark.parametrize("name", [preset.name for preset in FAMILY.presets])
def test_a_preset_has_the_number_of_parameters_of_its_name(name):
    base = next(base_name for base_name in (*NETWORKS, "") if name == base_name or name.startswith(f"{base_name}-"))
    assert presets()[name].transformer_parameters == NETWORKS[base].parameters


@pytest.mark.parametrize(
    ("name", "source", "scheduler", "size", "frames", "steps", "shift", "licence"),
    [
        ("wan2.1-t2v-1.3b-rcm", f"{RCM_FILES}_1.3B_480p.pt", "rcm", (480, 832), 77, 4, 5.0, FREE_LICENCE),
        ("wan2.1-t2v-14b-rcm-480p", f"{RCM_FILES}_14B_480p.pt", "rcm", (480, 832), 77, 4, 5.0, FREE_LICENCE),
        (
            "wan2.1-t2v-14b-rcm-720p",
            f"{RCM_FILES}_14B_720p.pt",
            "rcm:sigma_max=120",
            (720, 1280),
            77,
            4,
            5.0,
            FREE_LICENCE,
        ),
        ("wan2.2-i2v-a14b-rcm", RCM_I2V, "rcm:sigma_max=200", (720, 1280), 81, 4, 5.0, FREE_LICENCE),
        ("wan2.2-i2v-a14b-lightx2v", LIGHTX2V_I2V, "euler", (720, 1280), 81, 4, 5.0, FREE_LICENCE),
        ("wan2.1-t2v-1.3b-causvid", CAUSVID, THREE_STEPS, (480, 832), 81, 3, 8.0, "CC-BY-NC-4.0"),
        (
            "wan2.1-t2v-1.3b-fastwan",
            f"{FASTWAN}2.1-T2V-1.3B-Diffusers",
            THREE_STEPS,
            (448, 832),
            61,
            3,
            8.0,
            FREE_LICENCE,
        ),
        (
            "wan2.2-ti2v-5b-fastwan",
            f"{FASTWAN}2.2-TI2V-5B-FullAttn-Diffusers",
            THREE_STEPS,
            (704, 1280),
            121,
            3,
            8.0,
            FREE_LICENCE,
        ),
    ],
)
def test_distilled_models_have_the_published_defaults(name, source, scheduler, size, frames, steps, shift, licence):
    preset, defaults = presets()[name], presets()[name].defaults
    assert (preset.source, preset.licence, preset.loras) == (source, licence, ())
    assert preset.scheduler == parse(scheduler)
    assert model_description(name).model.scheduler == parse(scheduler)
    assert (defaults.model, defaults.size, defaults.frames) == (name, size, frames)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (steps, 1.0, shift)
    defaults.check(spatial=32 if "5b" in name else 16, temporal=4)


@pytest.mark.parametrize(
    ("name", "size", "frames", "fps", "experts"),
    [
        ("wan2.1-fun-1.3b-inp", (480, 832), 81, 16, (None, None)),
        ("wan2.1-fun-14b-inp", (480, 832), 81, 16, (None, None)),
        ("wan2.2-fun-a14b-inp", (480, 832), 81, 16, (6.0, 0.9)),
        ("wan2.2-fun-5b-inp", (704, 1280), 121, 24, (None, None)),
    ],
)
def test_models_between_two_pictures_have_the_published_defaults(name, size, frames, fps, experts):
    preset, defaults, model = presets()[name], presets()[name].defaults, model_description(name).model
    assert name.endswith("-inp")
    assert preset.source.lower() == f"alibaba-pai/{name}"
    assert (preset.licence, model.scheduler) == (FREE_LICENCE, parse("euler"))
    assert (defaults.size, defaults.frames, defaults.fps) == (size, frames, fps)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (50, 6.0, 5.0)
    assert (defaults.guidance_scale_2, defaults.boundary) == experts
    assert (defaults.sigmas, defaults.resize) == ("diffusers", "stretch")
    assert (model.spec.input_names, model.spec.required_inputs) == (("image", "last_image"), ())
    assert ("image_encoder" in model.spec.networks) == name.startswith("wan2.1")


TURBO = "TurboDiffusion/TurboWan2."


@pytest.mark.parametrize(
    ("name", "source", "scheduler", "size", "scale_2", "boundary"),
    [
        ("turbowan2.1-t2v-1.3b-480p", "1-T2V-1.3B-480P/TurboWan2.1-T2V-1.3B-480P.pth", "rcm", 480, None, None),
        ("turbowan2.1-t2v-14b-480p", "1-T2V-14B-480P/TurboWan2.1-T2V-14B-480P.pth", "rcm", 480, None, None),
        ("turbowan2.1-t2v-14b-720p", "1-T2V-14B-720P/TurboWan2.1-T2V-14B-720P.pth", "rcm", 720, None, None),
        (
            *("turbowan2.2-i2v-a14b-720p", "2-I2V-A14B-720P/TurboWan2.2-I2V-A14B-high-720P.pth"),
            *("rcm:sigma_max=200", 720, 1.0, 0.9),
        ),
    ],
)
def test_models_with_sparse_linear_attention_have_the_published_defaults(
    name, source, scheduler, size, scale_2, boundary
):
    preset, defaults, model = presets()[name], presets()[name].defaults, model_description(name).model
    assert (preset.source, preset.licence, preset.loras) == (TURBO + source, FREE_LICENCE, ())
    assert preset.repository_names == [preset.source.split("/")[1]]
    assert model.scheduler == parse(scheduler)
    assert model.spec.resolve_attention(AttentionConfig()) == AttentionConfig.parse("sla:top=0.1")
    assert {min(defaults.size), *map(min, preset.sizes)} == {480, 720}
    assert (min(defaults.size), defaults.frames, defaults.steps) == (size, 81, 4)
    assert (defaults.guidance_scale, defaults.guidance_scale_2, defaults.boundary) == (1.0, scale_2, boundary)
    assert defaults.resize == ("stretch" if boundary else "crop")
    assert [len(x.scales) for x in model.spec.phases(model.spec.schedule(defaults), defaults)] == (
        [2, 2] if boundary else [4]
    )
    model.spec.check_settings(defaults)


def test_a_file_has_no_name_without_its_owner():
    """`--model model.pt` is a file that is missing, not the one file of that name on the hub."""
    assert presets()["wan2.1-t2v-1.3b-causvid"].repository_names == []
    assert presets()["wan2.1-t2v-1.3b-fastwan"].repository_names == ["FastWan2.1-T2V-1.3B-Diffusers"]
    with pytest.raises(WanjaxError, match=line_with_words("model 'model.pt'")):
        find_checkpoint("model.pt")


SMALL, LARGE = (480, 832), (720, 1280)
NO_SHAKING, NO_CUTS = "镜头晃动，", "镜头切换，"  # prefixes of negative prompts for models that animate pictures


@pytest.mark.parametrize(
    ("name", "source", "size", "steps", "shift", "negative"),
    [
        ("wan2.1-t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", SMALL, 50, 5.0, ""),
        ("wan2.1-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", LARGE, 50, 5.0, ""),
        ("wan2.1-i2v-14b-480p", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", SMALL, 40, 3.0, NO_SHAKING),
        ("wan2.1-i2v-14b-720p", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", LARGE, 40, 5.0, NO_SHAKING),
        ("wan2.1-flf2v-14b", "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", LARGE, 50, 16.0, NO_CUTS + NO_SHAKING),
        ("wan2.1-vace-1.3b", "Wan-AI/Wan2.1-VACE-1.3B-diffusers", SMALL, 50, 16.0, ""),
        ("wan2.1-vace-14b", "Wan-AI/Wan2.1-VACE-14B-diffusers", LARGE, 50, 16.0, ""),
    ],
)
def test_defaults_are_those_of_the_authors(name, source, size, steps, shift, negative):
    preset, defaults = presets()[name], presets()[name].defaults
    assert (preset.name, defaults.model, preset.source, preset.licence) == (name, name, source, "Apache-2.0")
    assert (defaults.size, defaults.frames, defaults.fps) == (size, 81, 16)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift) == (steps, 5.0, shift)
    assert (defaults.sigmas, defaults.resize) == ("official", "crop")
    assert TEXT_LENGTH == 512
    assert defaults.negative_prompt.startswith(negative)
    shared = hashlib.sha256(defaults.negative_prompt.removeprefix(negative).encode()).hexdigest()
    assert shared == "ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e"
