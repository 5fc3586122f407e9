# SPDX-License-Identifier: Apache-2.0
"""CogVideoX and CogVideoX-1.5: https://github.com/zai-org/CogVideo, text and image to video."""

from pathlib import Path

from wanjax.pipelines.caching.cache_tables import TABLES_FILE
from wanjax.pipelines.cogvideox.model import CogVideoXModel
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.cogvideox.presets import PRESETS, default_settings
from wanjax.pipelines.family import Family
from wanjax.pipelines.text.tokenizer import Tokenizer

TEXT_LENGTH = 226
"""The number of tokens that the published transformers read of a prompt, including padding."""

FAMILY = Family(
    name="CogVideoX",
    networks=NETWORKS,
    pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline"),
    read_model=CogVideoXModel.of,
    default_settings=default_settings,
    presets=PRESETS,
    tables=Path(__file__).parent / TABLES_FILE,
    prompt_lengths=lambda model: {"tokenizer": (model.transformer.text_length,) * 2},
    loaders={"tokenizer": lambda folder: Tokenizer.load(folder, length=TEXT_LENGTH)},
    unsupported_models={"CogVideoX's transformer alone": ("patch_embed.text_proj.", "mixins.patch_embed.")},
)
