# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo-1.5: https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5, text and image to video."""

from wanjax.pipelines.family import Family
from wanjax.pipelines.hunyuanvideo.layouts import LAYOUT
from wanjax.pipelines.hunyuanvideo.model import IMAGE_TO_VIDEO, HunyuanVideoModel
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS
from wanjax.pipelines.hunyuanvideo.presets import DISTILLATIONS, PRESETS, default_settings
from wanjax.pipelines.hunyuanvideo.recognise import UNSUPPORTED
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, NUM_TEMPLATE_TOKENS, TEXT_LENGTH
from wanjax.pipelines.image_processor import StretchingImageProcessor
from wanjax.pipelines.text.byt5 import ByT5Tokenizer
from wanjax.pipelines.text.tokenizer import Tokenizer

FAMILY = Family(
    name="HunyuanVideo",
    networks=NETWORKS,
    pipelines=("HunyuanVideo15Pipeline", IMAGE_TO_VIDEO),
    read_model=HunyuanVideoModel.of,
    default_settings=default_settings,
    presets=PRESETS,
    loaders={
        "tokenizer": lambda folder: Tokenizer.load(folder, length=NUM_TEMPLATE_TOKENS + TEXT_LENGTH),
        "tokenizer_2": lambda folder: ByT5Tokenizer.load(folder, length=GLYPH_LENGTH),
        "feature_extractor": StretchingImageProcessor.load,
    },
    layouts=(LAYOUT,),
    unsupported_models=UNSUPPORTED,
    distillations=DISTILLATIONS,
    prompt_lengths=lambda model: {
        "tokenizer": (NUM_TEMPLATE_TOKENS + TEXT_LENGTH, NUM_TEMPLATE_TOKENS + model.prompt_tokens),
        "tokenizer_2": (GLYPH_LENGTH, GLYPH_LENGTH),
    },
)
