# SPDX-License-Identifier: Apache-2.0
"""Small random pipelines of diffusers for HunyuanVideo, saved as checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import AutoTokenizer, SiglipImageProcessor
from transformers import ByT5Tokenizer as ReferenceByT5

from tests.parity.encoder_references import qwen_reference, siglip_reference
from tests.parity.references import randomise, t5_reference
from tests.support.toy_chat_tokenizer import save_chat_tokenizer

GUIDANCE, SHIFT, CHANNELS = 6.0, 5.0, 4
SIDE = 64  # of a square; a video from a picture has about as many pixels
TRANSFORMER = {
    "in_channels": 2 * CHANNELS + 1, "out_channels": CHANNELS, "num_attention_heads": 2, "attention_head_dim": 32,
    "num_layers": 3, "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 96, "text_embed_2_dim": 64,
    "image_embed_dim": 216, "rope_axes_dim": (8, 12, 12), "target_size": SIDE,
}  # fmt: skip


@torch.no_grad()
def transformer(**sizes: Any) -> HunyuanVideo15Transformer3DModel:
    """Return a transformer in which the timestep, gates and token types affect the result as much as the tokens."""
    torch.manual_seed(0)
    network = HunyuanVideo15Transformer3DModel(**TRANSFORMER | sizes).eval()
    randomise(network, 1)
    for name, weight in network.named_parameters():
        if weight.ndim == 2 and (".norm" in name or "norm_out" in name or "context_embedder_2" in name):
            weight.mul_(3)
        elif weight.ndim == 2 and ("timestep_embedder" in name or "to_q" in name):
            weight.mul_(2)
    return network


def autoencoder() -> AutoencoderKLHunyuanVideo15:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"block_out_channels": (8, 16, 16, 32, 32), "layers_per_block": 1}
    network = AutoencoderKLHunyuanVideo15(latent_channels=CHANNELS, scaling_factor=1.3, **sizes).eval()
    randomise(network, 2)
    return network


def components(folder: Path, guidance: float, **sizes: Any) -> dict[str, Any]:
    glyphs = ReferenceByT5()
    glyphs.add_tokens(["<color-0>", "<cn-font-1>"], special_tokens=True)
    return {
        "text_encoder": qwen_reference(vocab_size=400),
        "tokenizer": AutoTokenizer.from_pretrained(save_chat_tokenizer(folder)),
        "text_encoder_2": t5_reference("t5", vocab_size=400),
        "tokenizer_2": glyphs,
        "transformer": transformer(**sizes),
        "vae": autoencoder(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "guider": ClassifierFreeGuidance(guidance_scale=guidance),
    }


def save_pipeline(pipe: Any, folder: Path) -> Any:
    """Write the checkpoint of a pipeline to the folder, with the tokenizer as published, and return the pipeline.

    The pipeline has fewer masked tokens than usual, which does not change its results.
    """
    pipe.set_progress_bar_config(disable=True)
    pipe.tokenizer_max_length, pipe.vision_num_semantic_tokens = 300, 7
    pipe.save_pretrained(folder / "checkpoint")
    shutil.rmtree(folder / "checkpoint/tokenizer")
    save_chat_tokenizer(folder / "checkpoint/tokenizer")
    return pipe


def text_to_video(folder: Path, guidance: float = GUIDANCE) -> Any:
    return save_pipeline(HunyuanVideo15Pipeline(**components(folder / "toy", guidance)), folder)


def image_to_video(folder: Path, guidance: float = GUIDANCE, **sizes: Any) -> Any:
    images = {
        "image_encoder": siglip_reference(),
        "feature_extractor": SiglipImageProcessor(size={"height": 45, "width": 45}),
    }
    return save_pipeline(
        HunyuanVideo15ImageToVideoPipeline(**components(folder / "toy", guidance, **sizes), **images), folder
    )
