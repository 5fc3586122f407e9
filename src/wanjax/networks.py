# SPDX-License-Identifier: Apache-2.0
"""The networks that wanjax knows: of a component's class in model_index.json, how to build it and what fills it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from wanjax.abstract import abstract
from wanjax.converters import clip, t5, wan
from wanjax.converters.engine import Rule
from wanjax.errors import WanjaxError
from wanjax.models.t5 import UMT5_XXL
from wanjax.models.vision import CLIP_VIT_H
from wanjax.models.wan.config import (
    FLF2V_14B,
    I2V_14B,
    I2V_A14B,
    T2V_1_3B,
    T2V_14B,
    TI2V_5B,
    VACE_1_3B,
    VACE_14B,
    VAE_2_1,
    VAE_2_2,
)
from wanjax.pipelines.tasks import (
    ATTENDED_IMAGE_TO_VIDEO,
    CONTROLLED_VIDEO,
    FIRST_AND_LAST_FRAME,
    FIRST_FRAME_TO_VIDEO,
    IMAGE_TO_VIDEO,
    task_of,
)
from wanjax.plan.stages import Architecture
from wanjax.sources import Source


class Network(NamedTuple):
    """One network: the config that it is built from, and the rules that fill it from the names of its source.

    `float32` is set where its weights are kept in float32 whatever the others are in. `unused` are patterns of names
    that the source has and the network has no use for.
    """

    config: Any
    rules: list[Rule]
    float32: bool = False
    unused: Sequence[str] = ()

    def abstract(self, **options: Any) -> Any:
        """The network as shapes and dtypes alone; the options are those of its class, except `rngs`."""
        return abstract(self.config, **options)


def _t5(json: Mapping[str, Any]) -> Network:
    config = t5.t5_config(json)
    return Network(config, t5.t5_rules(config))


def _clip(json: Mapping[str, Any]) -> Network:
    config = clip.clip_config(json)
    rules, unused = clip.clip_rules(config), clip.clip_unused(config)
    return Network(config, rules, float32=True, unused=unused)


def _wan_transformer(json: Mapping[str, Any]) -> Network:
    config = wan.transformer_config(json)
    return Network(config, wan.transformer_rules(config))


def _wan_vae(json: Mapping[str, Any]) -> Network:
    config = wan.vae_config(json)
    return Network(config, wan.vae_rules(config), float32=True)


NETWORKS: dict[str, Callable[[Mapping[str, Any]], Network]] = {
    "T5EncoderModel": _t5,
    "UMT5EncoderModel": _t5,
    "CLIPVisionModel": _clip,
    "WanTransformer3DModel": _wan_transformer,
    "WanVACETransformer3DModel": _wan_transformer,
    "AutoencoderKLWan": _wan_vae,
}


def components(index: Mapping[str, Any]) -> dict[str, str]:
    """The class of each component that model_index.json lists; one that is listed as null is not there."""
    entries = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(kind) for name, (library, kind) in entries.items() if library is not None and kind is not None}


def network(source: Source, component: str) -> Network:
    """The network that a component of a checkpoint holds.

    Raises WanjaxError where it is missing, of a class that wanjax does not know, or its config is another model's.
    """
    listed = components(source.index)
    if component not in listed:
        raise WanjaxError(f"{source.name} lists no {component} in its model_index.json, which has {', '.join(listed)}")
    if listed[component] not in NETWORKS:
        known = ", ".join(NETWORKS)
        raise WanjaxError(f"the {component} of {source.name} is a {listed[component]}, where {known} can be read")
    return NETWORKS[listed[component]](source.config(component))


_T2V_14B = Architecture(UMT5_XXL, T2V_14B, VAE_2_1)
_I2V_14B = Architecture(UMT5_XXL, I2V_14B, VAE_2_1, ATTENDED_IMAGE_TO_VIDEO, CLIP_VIT_H)
PUBLISHED: Mapping[str, Architecture] = {
    "wan2.1-t2v-1.3b": replace(_T2V_14B, transformer=T2V_1_3B),
    "wan2.1-t2v-14b": _T2V_14B,
    "wan2.1-i2v-14b-480p": _I2V_14B,
    "wan2.1-i2v-14b-720p": _I2V_14B,
    "wan2.1-flf2v-14b": replace(_I2V_14B, transformer=FLF2V_14B, task=FIRST_AND_LAST_FRAME),
    "wan2.1-vace-1.3b": Architecture(UMT5_XXL, VACE_1_3B, VAE_2_1, CONTROLLED_VIDEO),
    "wan2.1-vace-14b": Architecture(UMT5_XXL, VACE_14B, VAE_2_1, CONTROLLED_VIDEO),
    "wan2.2-t2v-a14b": _T2V_14B,
    "wan2.2-i2v-a14b": Architecture(UMT5_XXL, I2V_A14B, VAE_2_1, IMAGE_TO_VIDEO),
    "wan2.2-ti2v-5b": Architecture(UMT5_XXL, TI2V_5B, VAE_2_2, FIRST_FRAME_TO_VIDEO),
}
"""The shapes of the checkpoints that are published, by the names of their presets, so that none need be downloaded."""


def architecture(source: Source) -> Architecture:
    """The shapes of a checkpoint's networks, from their config.json; raises as `network` does."""
    text_encoder, transformer, vae = (network(source, name).config for name in ("text_encoder", "transformer", "vae"))
    image_encoder = network(source, "image_encoder").config if "image_encoder" in components(source.index) else None
    return Architecture(text_encoder, transformer, vae, task_of(source.index, transformer, vae), image_encoder)
