# SPDX-License-Identifier: Apache-2.0
"""Small random text and image encoders of transformers, and encoders of wanjax with the same weights."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, SiglipVisionConfig, SiglipVisionModel

from tests.parity.references import randomise
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import SafetensorsFolder
from wanjax.checkpoints.network_kinds import NetworkKind, read_network

QWEN_SIZES = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
SIGLIP_SIZES = {
    "hidden_size": 216,
    "intermediate_size": 280,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,  # each of 72 channels
    "image_size": 45,  # not a multiple of the patch size
    "patch_size": 7,
}


def qwen_reference(**sizes: Any) -> Qwen2_5_VLTextModel:
    """Return a model in which all norms and biases affect the result, with a peaked softmax."""
    torch.manual_seed(0)
    reference = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**QWEN_SIZES | sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif "embed" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5 * (2 if "q_proj" in name else 1))
    return reference


def siglip_reference(**sizes: Any) -> SiglipVisionModel:
    """Return a model in which all norms and biases affect the result, with a peaked softmax and nonlinear MLPs."""
    torch.manual_seed(0)
    reference = SiglipVisionModel(SiglipVisionConfig(**SIGLIP_SIZES | sizes)).eval()
    randomise(reference, seed=1)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "q_proj.weight" in name or "fc1.weight" in name:
                weight.mul_(3)
    return reference


def convert_reference(reference: torch.nn.Module, kind: NetworkKind, folder: Path, dtype=jnp.float32) -> Any:
    """Convert a model through the files that transformers writes."""
    reference.save_pretrained(folder)
    json_config = json.loads((folder / "config.json").read_text())
    network = read_network(type(reference).__name__, json_config, (kind,))
    abstract = network.abstract(dtype=dtype, param_dtype=dtype)
    return modules.load(abstract, network.rules, SafetensorsFolder(folder), ignore=network.unused)
