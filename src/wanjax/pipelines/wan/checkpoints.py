# SPDX-License-Identifier: Apache-2.0
"""Create the model of a checkpoint from the checkpoint's configs."""

from collections.abc import Mapping
from typing import Any

from wanjax.checkpoints.network_kinds import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import (
    AnimateTransformerConfig,
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    PoseTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)
from wanjax.pipelines.wan.animate import CharacterAnimation
from wanjax.pipelines.wan.model import EXPERTS, WanModel
from wanjax.pipelines.wan.networks import NETWORKS
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
)
from wanjax.schedulers import Consistency, FlowDPM, FlowEuler, from_config

ANIMATE_PIPELINE, POSE_PIPELINE = "WanAnimate2Pipeline", "WanAnimatePipeline"
CAUSAL_PIPELINES = (
    "WanCausalDMDPipeline",
    "CausalForcingPipeline",
    "WanCausalForcingPipeline",
)
THREE_STEP_SOLVER = Consistency(timesteps=(1000.0, 757.0, 522.0))
"""The scheduler of FastWan and similar distilled models. The scheduler_config.json of such a model is still the base
model's.
"""


def model_of(source: Source, reads_encoder_configs: bool = False) -> WanModel:
    """Read a model from a checkpoint's configs.

    Args:
        source: The checkpoint.
        reads_encoder_configs: Whether to read the configs of the encoders too.

    Raises:
        WanjaxError: The configs contradict each other.
    """

    def config(component: str) -> Any:
        return network_in(source, component, NETWORKS).config

    def encoder(component: str) -> Any:
        return config(component) if reads_encoder_configs and component in source.components else None

    transformer, vae, kind = config("transformer"), config("vae"), source.index.get("_class_name")
    has_experts = EXPERTS[1] in source.components
    if has_experts and config(EXPERTS[1]) != transformer:
        raise WanjaxError(
            f"the two transformers of {source.name} differ in their config.json: both experts need the same config"
        )
    scheduler = THREE_STEP_SOLVER if kind == "WanDMDPipeline" else from_config(source["scheduler"].config())
    model_class = _model_class(source.index, transformer, vae)
    options: dict[str, Any] = {}
    if model_class is CharacterAnimation:  # the authors' solver is the same for both kinds of weights
        options, scheduler = {"distilled": isinstance(scheduler, FlowEuler)}, FlowDPM()
    return model_class(
        text_encoder=encoder("text_encoder"),
        transformer=transformer,
        vae=vae,
        image_encoder=encoder("image_encoder"),
        has_experts=has_experts,
        scheduler=scheduler,
        **options,
    )


def _model_class(index: Mapping[str, Any], transformer: TransformerConfig, vae: VAEConfig) -> type[WanModel]:
    """Find the class of a checkpoint from its model_index.json and its networks' configs.

    Raises WanjaxError if these contradict each other.
    """
    channels, has_base_config = transformer.channels_in, type(transformer) is TransformerConfig
    without_condition = channels == vae.latent_channels
    with_condition = channels == 2 * vae.latent_channels + vae.temporal_factor
    has_residual_vae = isinstance(vae, ResidualVAEConfig)
    if index.get("expand_timesteps") and without_condition and has_base_config:
        return FirstFrameToVideo
    if isinstance(transformer, CausalTransformerConfig) and without_condition:
        return CausalTextToVideo
    match index.get("_class_name"):
        case "WanDMDPipeline" if without_condition and has_residual_vae:
            return FirstFrameToVideo
        case "WanPipeline" | "WanDMDPipeline" if without_condition and has_base_config:
            return TextToVideo
        case "WanImageToVideoPipeline" if with_condition and has_base_config:
            return ImageToVideo
        case "WanImageToVideoPipeline" if with_condition and isinstance(transformer, ImageTransformerConfig):
            return ImageToVideoWithEncoder if transformer.image_positions is None else FirstAndLastFrameToVideo
        case "WanAnimate2Pipeline" if with_condition and isinstance(transformer, AnimateTransformerConfig):
            return CharacterAnimation
        case "WanAnimatePipeline" if with_condition and isinstance(transformer, PoseTransformerConfig):
            return PoseToVideo
        case "WanFunInpaintPipeline" if with_condition and isinstance(transformer, ImageTransformerConfig):
            return InpaintingWithEncoder
        case "WanFunInpaintPipeline" if with_condition and has_base_config:
            return FirstFrameInpainting if has_residual_vae else Inpainting
        case "WanVACEPipeline" if without_condition and isinstance(transformer, ControlTransformerConfig):
            return ControlledVideo
        case name:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {name} whose VAE has {vae.latent_channels} "
                f"channels cannot have a {type(transformer).__name__} with {channels}"
            )
