# SPDX-License-Identifier: Apache-2.0
"""The names and shapes of the tensors in the published Wan checkpoints, in the layout of diffusers.

The names in files that have more than the library reads are at the end.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import (
    ControlTransformerConfig,
    ImageTransformerConfig,
    PoseTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)

TensorShapes = dict[str, tuple[int, ...]]
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I8": 1}  # of an element


def header(
    keys: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """Return the beginning of a safetensors file with these tensors, and the number of bytes that follow it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in keys.items():
        begin, end = end, end + BYTES[dtypes[name]] * math.prod(shape)
        entries[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def hollow_file(
    path: Path,
    keys: Mapping[str, tuple[int, ...]],
    dtype: str = "BF16",
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write a safetensors file with these names and shapes, whose values take no disk space.

    dtypes: The dtypes of tensors that do not have `dtype`.
    """
    first, rest = header(keys, dict.fromkeys(keys, dtype) | dict(dtypes or {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(first)
        file.truncate(len(first) + rest)
    return path


def transformer_keys(config: TransformerConfig) -> TensorShapes:
    width, patch = config.width, config.patch
    cells = patch[0] * patch[1] * patch[2]
    keys: TensorShapes = {
        "patch_embedding.weight": (width, config.channels_in, *patch),
        "patch_embedding.bias": (width,),
        **_linear("condition_embedder.time_embedder.linear_1", width, config.frequency_dim),
        **_linear("condition_embedder.time_embedder.linear_2", width, width),
        **_linear("condition_embedder.time_proj", 6 * width, width),
        **_linear("condition_embedder.text_embedder.linear_1", width, config.text_width),
        **_linear("condition_embedder.text_embedder.linear_2", width, width),
        "scale_shift_table": (1, 2, width),
        **_linear("proj_out", cells * config.channels_out, width),
    }
    for block in (f"blocks.{i}" for i in range(config.layers)):
        keys |= _block(block, config)
    match config:
        case ImageTransformerConfig():
            return keys | image_keys(config)
        case ControlTransformerConfig():
            return keys | control_keys(config)
    return keys


ANIMATE_NAMES = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
    "proj_out": "head.head",
}
"""Parts of names in diffusers' image-to-video class, and in its class of Animate 2, with equal shapes."""


def animate_keys(config: TransformerConfig) -> TensorShapes:
    """Return the keys of Animate 2's transformer as diffusers publishes it."""

    def renamed(key: str) -> str:
        if key == "scale_shift_table":
            return "head.modulation"
        for old, new in ANIMATE_NAMES.items():
            if f".{old}." in f".{key}.":
                return f".{key}.".replace(f".{old}.", f".{new}.").strip(".")
        return key

    return {renamed(key): shape for key, shape in transformer_keys(config).items()}


def pose_keys(config: PoseTransformerConfig) -> TensorShapes:
    """Return the keys of Animate's transformer as diffusers publishes it."""
    width, network = config.width, "motion_encoder"
    keys = transformer_keys(config) | {
        "pose_patch_embedding.weight": (width, config.channels_out, *config.patch),
        "pose_patch_embedding.bias": (width,),
        f"{network}.conv_in.weight": (config.motion_channels[0], 3, 1, 1),
        f"{network}.conv_in.act_fn.bias": (config.motion_channels[0],),
        f"{network}.conv_out.weight": (config.motion_width, config.motion_channels[-1], 4, 4),
        f"{network}.motion_synthesis_weight": (config.motion_space, config.motions),
        "face_encoder.conv1_local.weight": (config.face_heads * config.face_width, config.motion_space, 3),
        "face_encoder.conv1_local.bias": (config.face_heads * config.face_width,),
        "face_encoder.padding_tokens": (1, 1, 1, width),
        **_linear("face_encoder.out_proj", width, config.face_width),
        **_linear(f"{network}.motion_network.4", config.motions, config.motion_width),
    }
    for i, (channels_in, channels_out) in enumerate(pairwise(config.motion_channels)):
        block = f"{network}.res_blocks.{i}"
        keys |= {
            f"{block}.conv1.weight": (channels_in, channels_in, 3, 3),
            f"{block}.conv1.act_fn.bias": (channels_in,),
            f"{block}.conv2.weight": (channels_out, channels_in, 3, 3),
            f"{block}.conv2.act_fn.bias": (channels_out,),
            f"{block}.conv_skip.weight": (channels_out, channels_in, 1, 1),
        }
    for i in range(4):
        keys |= _linear(f"{network}.motion_network.{i}", config.motion_width, config.motion_width)
    for conv in ("conv2", "conv3"):
        keys[f"face_encoder.{conv}.weight"] = (config.face_width, config.face_width, 3)
        keys[f"face_encoder.{conv}.bias"] = (config.face_width,)
    for i in range(config.layers // config.face_stride):
        adapter = f"face_adapter.{i}"
        for projection in ("to_q", "to_k", "to_v", "to_out"):
            keys |= _linear(f"{adapter}.{projection}", width, width)
        keys |= {f"{adapter}.norm_{x}.weight": (config.head_dim,) for x in "qk"}
    return keys


def _block(block: str, config: TransformerConfig) -> TensorShapes:
    width, keys = config.width, TensorShapes()
    for attention in (f"{block}.attn1", f"{block}.attn2"):
        for projection in ("to_q", "to_k", "to_v", "to_out.0"):
            keys |= _linear(f"{attention}.{projection}", width, width)
        keys |= {f"{attention}.norm_q.weight": (width,), f"{attention}.norm_k.weight": (width,)}
    if config.sparse_linear:
        keys |= _linear(f"{block}.attn1.proj_l", config.head_dim, config.head_dim)
    keys |= _norm(f"{block}.norm2", width)
    keys |= _linear(f"{block}.ffn.net.0.proj", config.mlp_dim, width)
    keys |= _linear(f"{block}.ffn.net.2", width, config.mlp_dim)
    keys[f"{block}.scale_shift_table"] = (1, 6, width)
    return keys


def control_keys(config: ControlTransformerConfig) -> TensorShapes:
    """Return the keys that a transformer with control clips adds."""
    width = config.width
    keys: TensorShapes = {
        "vace_patch_embedding.weight": (width, config.control_channels, *config.patch),
        "vace_patch_embedding.bias": (width,),
        **_linear("vace_blocks.0.proj_in", width, width),
    }
    for block in (f"vace_blocks.{i}" for i in range(config.control_blocks)):
        keys |= _block(block, config) | _linear(f"{block}.proj_out", width, width)
    return keys


def image_keys(config: ImageTransformerConfig) -> TensorShapes:
    """Return the keys that a transformer with cross-attention to images adds."""
    width_in, width, embed = config.image_width, config.width, "condition_embedder.image_embedder"
    keys = _norm(f"{embed}.norm1", width_in) | _norm(f"{embed}.norm2", width)
    keys |= _linear(f"{embed}.ff.net.0.proj", width_in, width_in) | _linear(f"{embed}.ff.net.2", width, width_in)
    if config.image_positions is not None:
        keys[f"{embed}.pos_embed"] = (1, config.image_positions, width_in)
    for attention in (f"blocks.{i}.attn2" for i in range(config.layers)):
        keys |= _linear(f"{attention}.add_k_proj", width, width) | _linear(f"{attention}.add_v_proj", width, width)
        keys[f"{attention}.norm_added_k.weight"] = (width,)
    return keys


def image_encoder_keys(config: CLIPVisionConfig) -> TensorShapes:
    """Return the keys of all blocks except the last block and the last norm, which are unused."""
    width, embeddings = config.width, "vision_model.embeddings"
    keys: TensorShapes = {
        f"{embeddings}.class_embedding": (width,),
        f"{embeddings}.position_embedding.weight": (config.tokens, width),
        f"{embeddings}.patch_embedding.weight": (width, 3, config.patch, config.patch),
        **_norm("vision_model.pre_layrnorm", width),
    }
    for block in (f"vision_model.encoder.layers.{i}" for i in range(config.layers)):
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            keys |= _linear(f"{block}.self_attn.{projection}", width, width)
        keys |= _norm(f"{block}.layer_norm1", width) | _norm(f"{block}.layer_norm2", width)
        keys |= _linear(f"{block}.mlp.fc1", config.mlp_dim, width) | _linear(f"{block}.mlp.fc2", width, config.mlp_dim)
    return keys


def vae_keys(config: VAEConfig) -> TensorShapes:
    """Return the keys of an autoencoder of four levels with two blocks; three change resolution, two also in time."""
    w, d, z, cell = config.width, config.decoder_width, config.latent_channels, config.patch_channels
    keys = _conv("quant_conv", 2 * z, 2 * z, 1, 1, 1) | _conv("post_quant_conv", z, z, 1, 1, 1)
    halves = (("encoder", 4 * w, (w, cell), (2 * z, 4 * w)), ("decoder", 4 * d, (4 * d, z), (cell, d)))
    for half, mid, first, last in halves:
        keys |= _conv(f"{half}.conv_in", *first, 3, 3, 3) | _conv(f"{half}.conv_out", *last, 3, 3, 3)
        keys[f"{half}.norm_out.gamma"] = (last[1], 1, 1, 1)
        keys |= _res_block(f"{half}.mid_block.resnets.0", mid, mid)
        keys |= _res_block(f"{half}.mid_block.resnets.1", mid, mid)
        attention = f"{half}.mid_block.attentions.0"
        keys[f"{attention}.norm.gamma"] = (mid, 1, 1)
        keys |= _conv(f"{attention}.to_qkv", 3 * mid, mid, 1, 1) | _conv(f"{attention}.proj", mid, mid, 1, 1)
    return keys | (_residual_levels(w, d) if isinstance(config, ResidualVAEConfig) else _levels(w))


def _levels(w: int) -> TensorShapes:
    """Return the keys of Wan 2.1's levels."""
    keys: TensorShapes = {}
    blocks = {0: (w, w), 1: (w, w), 3: (w, 2 * w), 4: (2 * w, 2 * w), 6: (2 * w, 4 * w), 7: (4 * w, 4 * w)}
    blocks |= {9: (4 * w, 4 * w), 10: (4 * w, 4 * w)}
    for i, channels in blocks.items():
        keys |= _res_block(f"encoder.down_blocks.{i}", *channels)
    for i, channels in {2: w, 5: 2 * w, 8: 4 * w}.items():
        keys |= _resample(f"encoder.down_blocks.{i}", channels, channels, channels if i != 2 else None)
    for i, (channels_in, channels) in enumerate(((4 * w, 4 * w), (2 * w, 4 * w), (2 * w, 2 * w), (w, w))):
        for j in range(3):
            keys |= _res_block(f"decoder.up_blocks.{i}.resnets.{j}", channels if j else channels_in, channels)
        if i < 3:
            time = 2 * channels if i < 2 else None
            keys |= _resample(f"decoder.up_blocks.{i}.upsamplers.0", channels, channels // 2, time)
    return keys


def _residual_levels(w: int, d: int) -> TensorShapes:
    """Return the keys of Wan 2.2's levels."""
    keys: TensorShapes = {}
    for i, (channels_in, channels) in enumerate(((w, w), (w, 2 * w), (2 * w, 4 * w), (4 * w, 4 * w))):
        for j in range(2):
            keys |= _res_block(f"encoder.down_blocks.{i}.resnets.{j}", channels if j else channels_in, channels)
        if i < 3:
            keys |= _resample(f"encoder.down_blocks.{i}.downsampler", channels, channels, channels if i else None)
    for i, (channels_in, channels) in enumerate(((4 * d, 4 * d), (4 * d, 4 * d), (4 * d, 2 * d), (2 * d, d))):
        for j in range(3):
            keys |= _res_block(f"decoder.up_blocks.{i}.resnets.{j}", channels if j else channels_in, channels)
        if i < 3:
            time = 2 * channels if i < 2 else None
            keys |= _resample(f"decoder.up_blocks.{i}.upsampler", channels, channels, time)
    return keys


def text_encoder_keys(config: T5Config) -> TensorShapes:
    width, inside, mlp = config.width, config.heads * config.head_dim, config.mlp_dim
    keys: TensorShapes = {"shared.weight": (config.vocab_size, width), "encoder.final_layer_norm.weight": (width,)}
    for block in (f"encoder.block.{i}" for i in range(config.layers)):
        attention, dense = f"{block}.layer.0.SelfAttention", f"{block}.layer.1.DenseReluDense"
        keys |= {f"{attention}.{name}.weight": (inside, width) for name in "qkv"}
        keys |= {f"{attention}.o.weight": (width, inside)}
        keys |= {f"{attention}.relative_attention_bias.weight": (config.buckets, config.heads)}
        keys |= {f"{dense}.{name}.weight": (mlp, width) for name in ("wi_0", "wi_1")}
        keys |= {f"{dense}.wo.weight": (width, mlp)}
        keys |= {f"{block}.layer.{i}.layer_norm.weight": (width,) for i in (0, 1)}
    return keys


def image_encoder_file(config: CLIPVisionConfig) -> TensorShapes:
    """Return the keys of a `CLIPVisionModelWithProjection` file. Its last block and its last layers are unused."""
    keys = image_encoder_keys(replace(config, layers=config.layers + 1)) | _norm("vision_model.post_layernorm", 1280)
    return keys | {"visual_projection.weight": (1024, 1280)}


def authors_image_encoder_file() -> TensorShapes:
    """Return the keys of the authors' models_clip_*.pth: CLIP's vision tower, and XLM-RoBERTa as its text tower.

    Follows wan/modules/clip.py and xlm_roberta.py of Wan-Video/Wan2.1.
    """
    keys: TensorShapes = {
        "log_scale": (),
        "visual.cls_embedding": (1, 1, 1280),
        "visual.pos_embedding": (1, 257, 1280),
        "visual.patch_embedding.weight": (1280, 3, 14, 14),
        "visual.head": (1280, 1024),
        **_norm("visual.pre_norm", 1280),
        **_norm("visual.post_norm", 1280),
        "textual.token_embedding.weight": (250002, 1024),
        "textual.type_embedding.weight": (1, 1024),
        "textual.pos_embedding.weight": (514, 1024),
        "textual.head.0.weight": (1024, 1024),
        "textual.head.2.weight": (1024, 1024),
        **_norm("textual.norm", 1024),
    }
    for block in (f"visual.transformer.{i}" for i in range(32)):
        keys |= _linear(f"{block}.attn.to_qkv", 3840, 1280) | _linear(f"{block}.attn.proj", 1280, 1280)
        keys |= _norm(f"{block}.norm1", 1280) | _norm(f"{block}.norm2", 1280)
        keys |= _linear(f"{block}.mlp.0", 5120, 1280) | _linear(f"{block}.mlp.2", 1280, 5120)
    for block in (f"textual.blocks.{i}" for i in range(24)):
        for projection in "qkvo":
            keys |= _linear(f"{block}.attn.{projection}", 1024, 1024)
        keys |= _norm(f"{block}.norm1", 1024) | _norm(f"{block}.norm2", 1024)
        keys |= _linear(f"{block}.ffn.0", 4096, 1024) | _linear(f"{block}.ffn.2", 1024, 4096)
    return keys


def _linear(name: str, features_out: int, features_in: int) -> TensorShapes:
    return {f"{name}.weight": (features_out, features_in), f"{name}.bias": (features_out,)}


def _norm(name: str, features: int) -> TensorShapes:
    return {f"{name}.weight": (features,), f"{name}.bias": (features,)}


def _conv(name: str, channels_out: int, channels_in: int, *kernel: int) -> TensorShapes:
    return {f"{name}.weight": (channels_out, channels_in, *kernel), f"{name}.bias": (channels_out,)}


def _resample(name: str, channels_in: int, channels_out: int, time: int | None) -> TensorShapes:
    """Return the keys of a change of resolution; `time` is the output channels of its convolution in time, if any."""
    keys = _conv(f"{name}.resample.1", channels_out, channels_in, 3, 3)
    return keys | (_conv(f"{name}.time_conv", time, channels_in, 3, 1, 1) if time else {})


def _res_block(name: str, channels_in: int, channels_out: int) -> TensorShapes:
    keys = {f"{name}.norm1.gamma": (channels_in, 1, 1, 1), f"{name}.norm2.gamma": (channels_out, 1, 1, 1)}
    keys |= _conv(f"{name}.conv1", channels_out, channels_in, 3, 3, 3)
    keys |= _conv(f"{name}.conv2", channels_out, channels_out, 3, 3, 3)
    if channels_in != channels_out:
        keys |= _conv(f"{name}.conv_shortcut", channels_out, channels_in, 1, 1, 1)
    return keys
