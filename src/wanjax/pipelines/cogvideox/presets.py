# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's published checkpoints, and the default settings of other checkpoints."""

from dataclasses import replace
from typing import Any

from wanjax.checkpoints.sources import Source
from wanjax.models.cogvideox.config import I2V_1_5_5B, I2V_5B, T2V_1_5_5B, T2V_2B, T2V_5B
from wanjax.models.cogvideox.vae_config import VAE_1_5, VAE_2B, VAE_5B
from wanjax.models.t5 import T5_XXL
from wanjax.pipelines.cogvideox.model import CogVideoXModel
from wanjax.pipelines.family import Preset, with_checkpoint_settings
from wanjax.pipelines.settings import Settings
from wanjax.schedulers.ddim import DDIM

DEFAULTS = Settings(
    model="",
    prompt="",
    negative_prompt="",
    height=768,
    width=1360,
    frames=81,
    fps=16,
    steps=50,
    guidance_scale=6.0,
    dynamic_guidance=False,
    seed=42,
    dtype="bfloat16",
    resize="crop",
    strength=0.8,
)
FIRST_GENERATION: dict[str, Any] = {"height": 480, "width": 720, "frames": 49, "fps": 8}
LICENCE = "CogVideoX licence"

T2V_1_5 = CogVideoXModel(text_encoder=T5_XXL, transformer=T2V_1_5_5B, vae=VAE_1_5)
I2V_1_5 = replace(T2V_1_5, transformer=I2V_1_5_5B)
T2V_1_0 = replace(T2V_1_5, transformer=T2V_5B, vae=VAE_5B)
I2V_1_0 = replace(T2V_1_0, transformer=I2V_5B)
T2V_1_0_SMALL = replace(T2V_1_0, transformer=T2V_2B, vae=VAE_2B, scheduler=DDIM(snr_shift=3.0))


def _preset(
    name: str,
    repository: str,
    about: str,
    model: CogVideoXModel,
    parameters: int,
    licence: str = LICENCE,
    **settings: Any,
) -> Preset:
    """Return the preset of a checkpoint by CogVideoX's authors. The hub has each checkpoint under two names of its
    authors."""
    return Preset(
        name=name,
        source=f"zai-org/{repository}",
        about=about,
        transformer_parameters=parameters,
        licence=licence,
        param_dtype="bfloat16",
        defaults=replace(DEFAULTS, model=name, **settings),
        model=model,
        aliases=(f"THUDM/{repository}",),
    )


PRESETS = (
    _preset("cogvideox1.5-5b", "CogVideoX1.5-5B", "text to video, 1360 × 768", T2V_1_5, 5_570_676_352),
    _preset("cogvideox1.5-5b-i2v", "CogVideoX1.5-5B-I2V", "image to video, 1360 × 768", I2V_1_5, 5_571_594_880),
    _preset(
        "cogvideox-2b",
        "CogVideoX-2b",
        "text to video, 720 × 480",
        T2V_1_0_SMALL,
        1_693_783_872,
        "Apache-2.0",
        **FIRST_GENERATION,
    ),
    _preset("cogvideox-5b", "CogVideoX-5b", "text to video, 720 × 480", T2V_1_0, 5_570_283_072, **FIRST_GENERATION),
    _preset(
        "cogvideox-5b-i2v", "CogVideoX-5b-I2V", "image to video, 720 × 480", I2V_1_0, 5_570_479_680, **FIRST_GENERATION
    ),
)


def default_settings(source: Source, model: CogVideoXModel, preset: Preset | None) -> Settings:
    """Return the default settings of a checkpoint: the settings of its preset, if it has a preset.

    For a checkpoint without a preset, return the settings of the first preset with the same patch and image input.
    generation_config.json overrides the settings.
    """
    if preset is not None:
        return preset.defaults
    similar = (preset for preset in PRESETS if _defaults_key(preset.model) == _defaults_key(model))
    return with_checkpoint_settings(source, next(similar, PRESETS[0]).defaults)


def _defaults_key(model: Any) -> tuple[Any, ...]:
    """Return the properties that decide the default settings."""
    return model.transformer.patch, model.starts_from_image
