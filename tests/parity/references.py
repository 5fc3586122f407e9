# SPDX-License-Identifier: Apache-2.0
"""Small random reference models, their weights moved into ours, and how far two answers are apart."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tests.toy_tokenizer import save_tokenizer
from wanjax.checkpoint import Spec
from wanjax.converters import engine
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.networks import NETWORKS


class StateDict:
    """A torch module's weights, read as the engine reads a checkpoint."""

    def __init__(self, module: torch.nn.Module):
        self.tensors = {key: value.detach().float().numpy() for key, value in module.state_dict().items()}

    def keys(self):
        return self.tensors.keys()

    def spec(self, key: str):
        return Spec(self.tensors[key].shape, self.tensors[key].dtype)

    def read(self, key: str):
        return self.tensors[key]


def relative_l2(answer: Any, reference: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (answer, reference))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Random values for every weight, those that start as zeros or ones included, so that each one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2 or parameter.squeeze().ndim < 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter == 1).float())


def small_parts(folder: Path) -> dict[str, Any]:
    """All that Wan's pipelines have in common but their transformer: what it reads is 48 wide, latents have 4 channels.

    The tokenizer is written to the folder.
    """
    parts = {
        "text_encoder": UMT5EncoderModel(
            UMT5Config(
                vocab_size=512, d_model=48, d_kv=16, d_ff=96, num_layers=1, num_heads=2,
                relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
            )
        ),
        "vae": AutoencoderKLWan(
            base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 2.0, 1.0]
        ),
    }  # fmt: skip
    for seed, network in enumerate(parts.values(), 10):
        randomise(network.eval(), seed)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(folder))
    return {**parts, "scheduler": scheduler, "tokenizer": tokenizer}


def channels_last(x: torch.Tensor) -> np.ndarray:
    """[B, C, T, H, W] to ours."""
    return np.ascontiguousarray(x.detach().float().numpy().transpose(0, 2, 3, 4, 1))


def wan_transformer(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanTransformer:
    network = NETWORKS[type(reference).__name__](reference.config)
    return engine.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))


def wan_vae(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanVAE:
    network = NETWORKS["AutoencoderKLWan"](reference.config)
    return engine.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))
