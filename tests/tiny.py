# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of random weights, as small as every part allows, in the folder layout of diffusers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from tests.toy_tokenizer import save_tokenizer
from wanjax.converters import engine, t5, wan
from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE

TEXT_WIDTH = 16
LATENT_CHANNELS = 4
TEXT_LENGTH = 24

TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "patch_size": [1, 2, 2],
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "eps": 1e-6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}
VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 4,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.1, 0.9, 1.2, 1.0],
}
TEXT_ENCODER = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "vocab_size": 512,
    "d_model": TEXT_WIDTH,
    "num_heads": 2,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
}
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}
INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.0",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


@contextmanager
def compile_cache(folder: Path) -> Iterator[Path]:
    """Keeps what JAX compiles in the folder, so that the same program is compiled once."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # it does not look at the folder again otherwise
    try:
        yield folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def tiny_checkpoint(folder: Path) -> Path:
    """Writes the checkpoint, the same at every call, and returns its folder."""
    encoder, transformer, vae = t5.t5_config(TEXT_ENCODER), wan.transformer_config(TRANSFORMER), wan.vae_config(VAE)
    _save(folder / "text_encoder", TEXT_ENCODER, T5Encoder, encoder, t5.t5_rules(encoder), "model")
    _save(folder / "transformer", TRANSFORMER, WanTransformer, transformer, wan.transformer_rules(transformer))
    _save(folder / "vae", VAE, WanVAE, vae, wan.vae_rules(vae))
    save_tokenizer(folder / "tokenizer", model_max_length=TEXT_LENGTH)
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(folder / "model_index.json", INDEX)
    return folder


def _save(
    folder: Path,
    config: dict[str, Any],
    network: type[nnx.Module],
    sizes: Any,
    rules: list[engine.Rule],
    name: str = "diffusion_pytorch_model",
) -> None:
    _write_json(folder / "config.json", config)
    build = partial(network, sizes, dtype=jnp.float32, param_dtype=jnp.float32)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    graphdef, state = nnx.split(model)
    # drawn by NumPy: what JAX compiles to initialise small networks takes half a minute
    weights = jax.tree.map(lambda x: random.normal(0, 0.15, x.shape).astype(np.float32), state)
    engine.export(nnx.merge(graphdef, weights), rules, folder / f"{name}.safetensors")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
