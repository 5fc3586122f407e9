# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's published checkpoints, and the default settings of other checkpoints."""

from dataclasses import replace
from typing import Any

from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import FEW_STEPS_480P, SIZE_480P, SIZE_720P, TransformerConfig
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5
from wanjax.models.qwen2_vl import QWEN2_5_VL_7B
from wanjax.models.siglip import SIGLIP_SO400M
from wanjax.models.t5 import GLYPH_BYT5
from wanjax.pipelines.distillation import Distillation
from wanjax.pipelines.family import Preset, with_checkpoint_settings
from wanjax.pipelines.hunyuanvideo.model import HunyuanVideoModel
from wanjax.pipelines.settings import Settings

DEFAULTS = Settings(
    model="",
    prompt="",
    negative_prompt="",
    height=480,
    width=848,
    frames=121,
    fps=24,
    steps=50,
    guidance_scale=6.0,
    flow_shift=5.0,
    sigmas="official",
    seed=42,
    dtype="bfloat16",
    resize="crop",
    strength=0.8,
)
HD: dict[str, Any] = {"height": 720, "width": 1280}
NO_GUIDANCE: dict[str, Any] = {"guidance_scale": 1.0}
STEP_DISTILLED = Distillation(name="its authors", name_pattern=r"step-distill", steps=12, flow_shift=7.0)
LIGHTX2V = Distillation(
    name="LightX2V",
    name_pattern=r"lightx2v|distill-model|(?=.*(?:hunyuan|\bhy)).*\b[1-9]-?steps?\b",
    steps=4,
    flow_shift=5.0,
)
DISTILLATIONS = (LIGHTX2V, STEP_DISTILLED)
"""Distillations, keyed by the word that marks them in a checkpoint's name. The first follows LightX2V's
configs/hunyuan_video_15/hunyuan_video_t2v_480p_distill.json.
"""
GUIDER_OPTIONS: dict[str, Any] = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
"""Entries of guider_config.json, each with the only supported value."""
PARAMETERS = 8_326_608_160
STEP_DISTILLED_PARAMETERS = 8_331_330_848


def _preset(
    name: str,
    about: str,
    transformer: TransformerConfig = SIZE_480P,
    *,
    single_file: bool = False,
    distillation: Distillation | None = None,
    **settings: Any,
) -> Preset:
    """Create the preset of a checkpoint in diffusers' layout. The hub has the same checkpoint under two names.

    `name` is the end of the repository's name, such as `480p_t2v`. With `single_file`, the checkpoint is a transformer
    file by the authors. The checkpoint's other components come from another model, which differs only in the
    transformer's weights.
    """
    preset_name, owner = f"hunyuanvideo1.5-{name.replace('_', '-')}", "hunyuanvideo-community"
    takes_image = "i2v" in name
    model = HunyuanVideoModel(
        text_encoder=QWEN2_5_VL_7B,
        text_encoder_2=GLYPH_BYT5,
        image_encoder=SIGLIP_SO400M if takes_image else None,
        transformer=transformer,
        vae=VAE_1_5,
        starts_from_image=takes_image,
    )
    file = f"tencent/HunyuanVideo-1.5/transformer/{name}/diffusion_pytorch_model.safetensors"
    return Preset(
        name=preset_name,
        source=file if single_file else f"{owner}/HunyuanVideo-1.5-Diffusers-{name}",
        about=about,
        transformer_parameters=STEP_DISTILLED_PARAMETERS if transformer.uses_meanflow else PARAMETERS,
        licence="Tencent Hunyuan Community licence",
        param_dtype="bfloat16",
        defaults=replace(DEFAULTS, model=preset_name, **settings, **(distillation.settings if distillation else {})),
        model=model,
        aliases=() if single_file else (f"{owner}/HunyuanVideo-1.5-{name}",),
        distillation=distillation,
    )


PRESETS = (
    _preset("480p_t2v", "text to video, 848 × 480"),
    _preset("480p_i2v", "image to video, 848 × 480"),
    _preset("720p_t2v", "text to video, 1280 × 720", SIZE_720P, **HD, flow_shift=9.0),
    _preset("720p_i2v", "image to video, 1280 × 720", SIZE_720P, **HD, flow_shift=7.0),
    _preset("480p_t2v_distilled", "text to video, 848 × 480, without guidance", **NO_GUIDANCE),
    _preset("480p_i2v_distilled", "image to video, 848 × 480, without guidance", **NO_GUIDANCE),
    _preset(
        "720p_t2v_distilled", "text to video, 1280 × 720, without guidance",
        SIZE_720P, single_file=True, **HD, **NO_GUIDANCE, flow_shift=9.0,
    ),
    _preset(
        "720p_i2v_distilled", "image to video, 1280 × 720, without guidance",
        SIZE_720P, **HD, **NO_GUIDANCE, flow_shift=7.0,
    ),
    _preset(
        "720p_t2v_distilled_sparse",
        "text to video, 1280 × 720, without guidance, with full attention instead of sparse",
        SIZE_720P, single_file=True, **HD, **NO_GUIDANCE, flow_shift=9.0,
    ),
    _preset(
        "720p_i2v_distilled_sparse",
        "image to video, 1280 × 720, without guidance, with full attention instead of sparse",
        SIZE_720P, single_file=True, **HD, **NO_GUIDANCE, flow_shift=7.0,
    ),
    _preset(
        "480p_i2v_step_distilled", "image to video, 848 × 480, in 8 or 12 steps",
        FEW_STEPS_480P, distillation=STEP_DISTILLED,
    ),
)  # fmt: skip


def default_settings(source: Source, model: HunyuanVideoModel, preset: Preset | None) -> Settings:
    """Choose the default settings of a checkpoint: the settings of its preset, if it has a preset.

    If the checkpoint has no preset, use the settings of the first preset with the same resolution, image input and
    number of steps. The checkpoint's flow shift, guidance scale and generation_config.json override them.
    """
    if preset is not None:
        return preset.defaults
    similar = (preset for preset in PRESETS if _defaults_key(preset.model) == _defaults_key(model))
    return with_checkpoint_settings(
        source, next(similar, PRESETS[0]).defaults, {"guidance_scale": _guidance_scale(source)}
    )


def _guidance_scale(source: Source) -> float | None:
    """Read the guidance scale from the config of a checkpoint's guider; return None if the config has none.

    Raises WanjaxError if the guider has an unsupported option.
    """
    if "guider" not in source.components:
        return None
    guider = source["guider"].config()
    for entry, supported in GUIDER_OPTIONS.items():
        if (value := guider.get(entry, supported)) != supported:
            raise WanjaxError(f"the guider's {entry} {value!r} is not supported: set it to {supported!r}")
    return guider.get("guidance_scale") if guider.get("enabled", True) else 1.0


def _defaults_key(model: Any) -> tuple[Any, ...]:
    """Return the properties that decide the default settings."""
    transformer = model.transformer
    return transformer.target_size, transformer.uses_meanflow, model.starts_from_image
