# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with the names, shapes and dtypes of the published Wan 2.1 T2V 1.3B: about 18 GB of random weights.

UMT5-XXL is in bfloat16, the transformer and the autoencoder in float32, sharded as on the hub. The tokenizer is small.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support.toy_tokenizer import save_tokenizer
from wanjax.checkpoints.files import Spec, save_index, shards, write_safetensors

SPREAD = 0.02


class RandomTensors:
    """Tensors of given shapes, as views of one array of noise, so that the whole checkpoint is never in memory.

    Each row of a matrix is the row above it, shifted by `STEP` values.
    """

    STEP = 7

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype):
        self.shapes = shapes
        longest = max(np.prod(shape[1:], dtype=int) + self.STEP * shape[0] for shape in shapes.values())
        noise = SPREAD * np.random.default_rng(0).standard_normal(longest, np.float32)
        self.noise = noise.astype(dtype)

    def keys(self) -> Sequence[str]:
        return tuple(self.shapes)

    def spec(self, key: str) -> Spec:
        return Spec(self.shapes[key], self.noise.dtype)

    def read(self, key: str) -> np.ndarray:
        rows, *rest = self.shapes[key]
        if key.endswith(("norm.weight", "norm_q.weight", "norm_k.weight", "norm2.weight", "gamma")):
            return np.ones((rows, *rest), self.noise.dtype)
        columns = np.prod(rest, dtype=int)
        step = self.STEP * self.noise.itemsize
        x = np.lib.stride_tricks.as_strided(self.noise, (rows, columns), (step, self.noise.itemsize))
        return x.reshape(rows, *rest)


def write_checkpoint(folder: Path) -> None:
    """Writes a folder in the diffusers layout; names and shapes come from the classes of diffusers and transformers."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    text = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", architectures=["UMT5EncoderModel"],
    )  # fmt: skip
    with torch.device("meta"):
        encoder = UMT5EncoderModel(text)
        transformer = WanTransformer3DModel(num_attention_heads=12, num_layers=30, ffn_dim=8960)
    vae = AutoencoderKLWan()
    bfloat16, float32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    _write_component(folder / "text_encoder", text.to_dict(), encoder, bfloat16, "model")
    _write_component(folder / "transformer", dict(transformer.config), transformer, float32, "diffusion_pytorch_model")
    _write_component(folder / "vae", dict(vae.config), vae, float32, "diffusion_pytorch_model")
    save_tokenizer(folder / "tokenizer", model_max_length=512)
    scheduler = {
        "_class_name": "UniPCMultistepScheduler", "num_train_timesteps": 1000, "solver_order": 2,
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0,
    }  # fmt: skip
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    parts = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }  # fmt: skip
    _write_json(folder / "model_index.json", {"_class_name": "WanPipeline", **parts})


def _write_component(folder: Path, config: dict, model, dtype: np.dtype, stem: str) -> None:
    """Writes config.json and the weights, in shards with an index if they are large."""
    _write_json(folder / "config.json", config)
    tied = "encoder.embed_tokens.weight"  # the same tensor as shared.weight; files hold it once
    tensors = RandomTensors({k: tuple(x.shape) for k, x in model.state_dict().items() if k != tied}, dtype)
    files = shards(tensors, stem)
    for name, keys in files.items():
        write_safetensors(folder / name, tensors, keys)
    if len(files) > 1:
        save_index(folder, stem, files, sum(tensors.spec(key).nbytes for key in tensors.keys()))  # noqa: SIM118


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")
