# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2: https://github.com/Wan-Video, text, image and control to video."""

from pathlib import Path

from wanjax.pipelines.caching.cache_tables import TABLES_FILE
from wanjax.pipelines.family import Family
from wanjax.pipelines.image_processor import ImageProcessor
from wanjax.pipelines.text.tokenizer import Tokenizer
from wanjax.pipelines.wan.checkpoints import ANIMATE_PIPELINE, CAUSAL_PIPELINES, POSE_PIPELINE, model_of
from wanjax.pipelines.wan.layouts import LAYOUT
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.presets import DISTILLATIONS, PRESETS, default_settings
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.pipelines.wan.recognise import UNSUPPORTED, find_autoencoder

FAMILY = Family(
    name="Wan",
    networks=NETWORKS,
    pipelines=(
        "WanPipeline",
        "WanImageToVideoPipeline",
        "WanFunInpaintPipeline",
        "WanVACEPipeline",
        "WanDMDPipeline",
        ANIMATE_PIPELINE,
        POSE_PIPELINE,
        *CAUSAL_PIPELINES,
    ),
    read_model=model_of,
    default_settings=default_settings,
    presets=PRESETS,
    tables=Path(__file__).parent / TABLES_FILE,
    distillations=DISTILLATIONS,
    loaders={
        "tokenizer": lambda folder: Tokenizer.load(folder, length=TEXT_LENGTH),
        "image_processor": ImageProcessor.load,
    },
    layouts=(LAYOUT,),
    unsupported_models=UNSUPPORTED,
    prompt_lengths=lambda model: {"tokenizer": (TEXT_LENGTH, TEXT_LENGTH)},
    find_autoencoder=find_autoencoder,
)
