# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints with the names, shapes and dtypes of published ones, and random weights.

Wan 2.1 T2V 1.3B has UMT5-XXL in bfloat16 and the other networks in float32, about 18 GB. CogVideoX-1.5 5B, with T5-XXL,
is all in bfloat16, about 21 GB. HunyuanVideo-1.5, with the language model of Qwen2.5-VL, is all in bfloat16, about
35 GB. The weights are in shards as on the hub. The tokenizers are small.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support.tiny import (
    COGVIDEOX_INDEX,
    COGVIDEOX_SCHEDULER,
    HUNYUAN_INDEX,
    HUNYUAN_SCHEDULER,
    INDEX,
    PICTURE_COMPONENTS,
    SCHEDULER,
    save_byte_tokenizer,
)
from tests.support.toy_chat_tokenizer import save_chat_tokenizer
from tests.support.toy_tokenizer import save_tokenizer
from wanjax.checkpoints.files import Spec, save_index, split_into_shards, write_safetensors

STD = 0.02
BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
XXL: dict[str, Any] = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"
}  # fmt: skip


class Checkpoint(NamedTuple):
    """A checkpoint's networks without values, each with the dtype of its weights, and the checkpoint's other files.

    `tokenizers` are functions that write a tokenizer into its folder.
    """

    networks: Mapping[str, tuple[Any, np.dtype]]
    scheduler: Mapping[str, Any]
    index: Mapping[str, Any]
    tokenizers: Mapping[str, Callable[[Path], Any]]


class RandomTensors:
    """Tensors of given shapes, as views of one array of noise, so that the whole checkpoint is never in memory.

    Each row of a matrix is the row above it, shifted by `STEP` values. Scales of norms are ones.
    """

    STEP = 7

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype):
        longest = max(np.prod(shape[1:], dtype=int) + self.STEP * shape[0] for shape in shapes.values())
        noise = STD * np.random.default_rng(0).standard_normal(longest, np.float32)
        self.noise = noise.astype(dtype)
        self.specs = {key: Spec(shape, self.noise.dtype) for key, shape in shapes.items()}

    def read(self, key: str) -> np.ndarray:
        rows, *inner_sizes = self.specs[key].shape
        if key.endswith("gamma") or (key.endswith("weight") and not inner_sizes):
            return np.ones((rows, *inner_sizes), self.noise.dtype)
        columns = np.prod(inner_sizes, dtype=int)
        step = self.STEP * self.noise.itemsize
        x = np.lib.stride_tricks.as_strided(self.noise, (rows, columns), (step, self.noise.itemsize))
        return x.reshape(rows, *inner_sizes)


def wan() -> Checkpoint:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    text = UMT5Config(vocab_size=256384, architectures=["UMT5EncoderModel"], **XXL)
    networks = {
        "text_encoder": (UMT5EncoderModel(text), BFLOAT16),
        "transformer": (WanTransformer3DModel(num_attention_heads=12, num_layers=30, ffn_dim=8960), FLOAT32),
        "vae": (AutoencoderKLWan(), FLOAT32),
    }
    return Checkpoint(networks, SCHEDULER, INDEX, {"tokenizer": partial(save_tokenizer, model_max_length=512)})


def cogvideox() -> Checkpoint:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    text = T5Config(vocab_size=32128, architectures=["T5EncoderModel"], **XXL)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=48, attention_head_dim=64, num_layers=42, patch_size_t=2, patch_bias=False,
        sample_height=300, sample_width=300, sample_frames=81, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    networks = {
        "text_encoder": (T5EncoderModel(text), BFLOAT16),
        "transformer": (transformer, BFLOAT16),
        "vae": (AutoencoderKLCogVideoX(scaling_factor=0.7, invert_scale_latents=True), BFLOAT16),
    }
    return Checkpoint(
        networks, COGVIDEOX_SCHEDULER, COGVIDEOX_INDEX, {"tokenizer": partial(save_tokenizer, model_max_length=226)}
    )


def hunyuanvideo() -> Checkpoint:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    chats = Qwen2_5_VLTextConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )  # fmt: skip
    glyphs = T5Config(
        vocab_size=1510, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu"
    )
    networks = {
        "text_encoder": (Qwen2_5_VLTextModel(chats), BFLOAT16),
        "text_encoder_2": (T5EncoderModel(glyphs), BFLOAT16),
        "transformer": (HunyuanVideo15Transformer3DModel(), BFLOAT16),
        "vae": (AutoencoderKLHunyuanVideo15(), BFLOAT16),
    }
    index = {name: kind for name, kind in HUNYUAN_INDEX.items() if name not in (*PICTURE_COMPONENTS, "guider")}
    tokenizers = {"tokenizer": save_chat_tokenizer, "tokenizer_2": save_byte_tokenizer}
    return Checkpoint(networks, HUNYUAN_SCHEDULER, {"_class_name": "HunyuanVideo15Pipeline"} | index, tokenizers)


MODELS: dict[str, Callable[[], Checkpoint]] = {
    "wan2.1-t2v-1.3b": wan,
    "cogvideox1.5-5b": cogvideox,
    "hunyuanvideo1.5-480p-t2v": hunyuanvideo,
}


def build_checkpoint(model: str) -> Checkpoint:
    """Build a model's checkpoint from the classes of diffusers and transformers, on torch's meta device."""
    import torch

    with torch.device("meta"):
        return MODELS[model]()


def config_of(network: Any) -> dict[str, Any]:
    """Return the config.json of a network of diffusers or transformers."""
    return dict(network.config if isinstance(network.config, Mapping) else network.config.to_dict())


def write_checkpoint(model: str, folder: Path) -> None:
    """Write a folder in the diffusers layout."""
    checkpoint = build_checkpoint(model)
    for name, (network, dtype) in checkpoint.networks.items():
        stem = "model" if checkpoint.index[name][0] == "transformers" else "diffusion_pytorch_model"
        _write_json(folder / name / "config.json", config_of(network))
        _write_weights(folder / name, network, dtype, stem)
    for name, save in checkpoint.tokenizers.items():
        save(folder / name)
    _write_json(folder / "scheduler" / "scheduler_config.json", checkpoint.scheduler)
    _write_json(folder / "model_index.json", checkpoint.index)


def _write_weights(folder: Path, network: Any, dtype: np.dtype, stem: str) -> None:
    """Write random weights, in shards with an index if they are large."""
    tied = "encoder.embed_tokens.weight"  # the same tensor as shared.weight; files hold it once
    tensors = RandomTensors({k: tuple(x.shape) for k, x in network.state_dict().items() if k != tied}, dtype)
    files = split_into_shards(tensors, stem)
    for name, keys in files.items():
        write_safetensors(folder / name, tensors, keys)
    if len(files) > 1:
        save_index(folder, stem, files, sum(spec.nbytes for spec in tensors.specs.values()))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")
