# SPDX-License-Identifier: Apache-2.0
"""Small random networks of Wan Animate 2, and diffusers' mask on a CPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import AutoencoderKLWan, WanAnimate2Transformer3DModel
from diffusers.models.transformers import transformer_wan_animate_2
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.parity.references import randomise
from tests.support.toy_tokenizer import save_tokenizer
from wanjax.models.wan.config import VAE_2_1

SIZES: dict[str, Any] = {"dim": 96, "num_heads": 3, "ffn_dim": 250, "freq_dim": 128, "text_dim": 48}


@contextmanager
def uncompiled_mask() -> Iterator[None]:
    """Create diffusers' mask without compiling it, so that no GPU is needed."""
    create = transformer_wan_animate_2.create_block_mask

    def create_uncompiled(*arguments, **options):
        return create(*arguments, **options | {"_compile": False})

    with mock.patch.object(transformer_wan_animate_2, "create_block_mask", create_uncompiled):
        yield


@torch.no_grad()
def animate_transformer(layers: int, seed: int = 0) -> WanAnimate2Transformer3DModel:
    torch.manual_seed(seed)
    network: Any = WanAnimate2Transformer3DModel(num_layers=layers, **SIZES).eval()
    randomise(network, seed)
    for block in network.blocks:  # small random queries and keys would give even attention
        block.self_attn.norm_q.weight.mul_(2)
        block.self_attn.norm_k.weight.mul_(2)
        block.ffn[0].weight.mul_(3)
    network.head.head.weight.copy_(0.1 * torch.randn(network.head.head.weight.shape))
    return network


def save_checkpoint(folder: Path, networks: dict[str, Any], scheduler: Any) -> None:
    """Write a checkpoint as it is published; no library has the class that model_index.json names."""
    classes = {
        "image_encoder": ("transformers", "CLIPVisionModel"),
        "image_processor": ("transformers", "CLIPImageProcessor"),
        "scheduler": ("diffusers", type(scheduler).__name__),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "transformer": ("diffusers", "WanAnimate2Transformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    index = {"_class_name": "WanAnimate2Pipeline"} | {name: list(kind) for name, kind in classes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    for name, network in networks.items():
        network.save_pretrained(folder / name)
    scheduler.save_pretrained(folder / "scheduler")
    CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}).save_pretrained(
        folder / "image_processor"
    )


def animate_networks(folder: Path, layers: int) -> dict[str, Any]:
    """Return small random networks, and a tokenizer with files in the folder."""
    torch.manual_seed(0)
    text = UMT5Config(
        vocab_size=512, d_model=SIZES["text_dim"], d_kv=16, d_ff=96, num_layers=1, num_heads=2,
        relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=1280, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=224,
        patch_size=28, hidden_act="gelu",
    )  # fmt: skip
    networks: dict[str, Any] = {
        "text_encoder": UMT5EncoderModel(text),
        "image_encoder": CLIPVisionModel(vision),
        "vae": AutoencoderKLWan(
            base_dim=8, z_dim=16, num_res_blocks=1, latents_mean=list(VAE_2_1.latents_mean),
            latents_std=list(VAE_2_1.latents_std),
        ),
    }  # fmt: skip
    for seed, network in enumerate(networks.values(), 10):
        randomise(network.eval(), seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(folder))
    return {**networks, "transformer": animate_transformer(layers), "tokenizer": tokenizer}
