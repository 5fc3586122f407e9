# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for Wan's networks in the layout of diffusers: tensors and config.json."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import (
    IDENTITY,
    Transform,
    WeightRule,
    conv,
    embedder,
    feed_forward,
    gamma,
    layer,
    linear,
    norm,
    patches,
    pointwise,
    projections,
    rope_halves,
    squeeze,
)
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import SparseLinearAttentionConfig
from wanjax.models.wan.config import (
    T2V_1_3B,
    T2V_14B,
    TI2V_5B,
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)

# Entries of config.json that select the architecture, and their supported values; the first is the default.
TRANSFORMER_ENTRIES = {
    "_class_name": ("WanTransformer3DModel", "WanVACETransformer3DModel", "CausalWanTransformer3DModel"),
    "cross_attn_norm": (True,),
    "qk_norm": ("rms_norm_across_heads",),
}
PUBLISHED_WIDTHS = {config.width for config in (T2V_1_3B, TI2V_5B, T2V_14B)}
HEAD_DIM = T2V_14B.head_dim  # the head size of every published transformer
VAE_ENTRIES = {
    "_class_name": ("AutoencoderKLWan",),
    "is_residual": (False, True),
    "attn_scales": ([], ()),
}


def transformer_config(json: Mapping[str, Any]) -> TransformerConfig:
    """Read a transformer's config from `transformer/config.json` of a diffusers folder.

    The config's type depends on the model's inputs: only a prompt, or also an image or a control clip. Raises KeyError
    if a size is missing, and WanjaxError if sizes contradict each other or the architecture is not supported.
    """
    check_kind("transformer", json, TRANSFORMER_ENTRIES)
    base_config = TransformerConfig(
        layers=json["num_layers"],
        heads=json["num_attention_heads"],
        head_dim=json["attention_head_dim"],
        mlp_dim=json["ffn_dim"],
        channels_in=json["in_channels"],
        channels_out=json["out_channels"],
        patch=tuple(json["patch_size"]),
        text_width=json["text_dim"],
        frequency_dim=json["freq_dim"],
        eps=json["eps"],
        sparse_linear=_sparse_linear(json),
    )
    if (
        base_config.width in PUBLISHED_WIDTHS and base_config.head_dim != HEAD_DIM
    ):  # the shapes of tensors do not show the number of heads
        heads, expected_heads = (
            f"{base_config.heads} heads of {base_config.head_dim}",
            f"{base_config.width // HEAD_DIM} of {HEAD_DIM}",
        )
        raise WanjaxError(
            f"the transformer's config.json has {heads}, but Wan's transformers of width "
            f"{base_config.width} have {expected_heads}: give a published config.json"
        )
    image_width, is_controlled = json.get("image_dim"), "vace_layers" in json
    if is_controlled or json.get("_class_name") == "CausalWanTransformer3DModel":
        check_kind("transformer", json, {"sparse_linear": (False,)})
    if image_width is None or is_controlled:
        check_kind(
            "transformer", json, {"image_dim": (None,), "added_kv_proj_dim": (None,), "pos_embed_seq_len": (None,)}
        )
        if json.get("_class_name") == "CausalWanTransformer3DModel":
            return _causal_config(base_config, json)
        return _control_config(base_config, json) if is_controlled else base_config
    check_kind("transformer", json, {"added_kv_proj_dim": (base_config.width,)})
    return ImageTransformerConfig(
        **vars(base_config), image_width=image_width, image_positions=json.get("pos_embed_seq_len")
    )


def _sparse_linear(json: Mapping[str, Any]) -> SparseLinearAttentionConfig | None:
    """Read the sparse-linear attention of a transformer: a string, or true for the default."""
    text = json.get("sparse_linear", False)
    if isinstance(text, str):
        return SparseLinearAttentionConfig.parse(text)
    check_kind("transformer", json, {"sparse_linear": (False, True)})
    return SparseLinearAttentionConfig() if text else None


def sparse_linear_entry(sparse: SparseLinearAttentionConfig | None) -> dict[str, Any]:
    """Return the entry of config.json for sparse-linear attention; empty for a transformer with dense attention."""
    return {"sparse_linear": str(sparse) or True} if sparse else {}


def _control_config(base_config: TransformerConfig, json: Mapping[str, Any]) -> ControlTransformerConfig:
    layers, channels = json.get("vace_layers"), json.get("vace_in_channels")
    if not layers or channels is None:
        raise WanjaxError(
            "the transformer's config.json lacks vace_layers or vace_in_channels: give VACE's published file"
        )
    stride = base_config.layers // len(layers)
    if not stride or list(layers) != list(range(0, base_config.layers, stride)) or base_config.layers % stride:
        supported = f"evenly spaced layers from 0, at a distance that divides {base_config.layers}"
        raise WanjaxError(f"the transformer's config.json has vace_layers {list(layers)}: give {supported}")
    return ControlTransformerConfig(**vars(base_config), control_channels=channels, control_stride=stride)


def _causal_config(base_config: TransformerConfig, json: Mapping[str, Any]) -> CausalTransformerConfig:
    """Read the frames per chunk and the attention window.

    If attention is unlimited, the authors' cache size is the window.
    """
    block, local_frames, sink_frames = (
        json.get("num_frames_per_block", 3),
        json.get("local_attn_size", -1),
        json.get("sink_size", 0),
    )
    window = json.get("sliding_window_num_frames", 21) if local_frames == -1 else local_frames
    if block < 1 or window % block or sink_frames % block or not 0 <= sink_frames < window:
        raise WanjaxError(
            f"the transformer's config.json has blocks of {block} frames, a window of {window} and "
            f"{sink_frames} sink frames: "
            "give a window and a sink that are multiples of the block, such as 3, 21 and 0"
        )
    return CausalTransformerConfig(**vars(base_config), chunk_frames=block, window=window, sink=sink_frames)


def transformer_weight_rules(config: TransformerConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the transformer; the config's type selects them."""
    rules = _plain_weight_rules(config)
    match config:
        case ImageTransformerConfig():
            return rules + _image_weight_rules(config)
        case ControlTransformerConfig():
            return rules + _control_weight_rules(config)
    return rules


def transformer_unused(config: TransformerConfig) -> list[str]:
    """Return patterns of unused keys: the gates of video sparse attention (2505.13389), which wanjax computes densely.

    The names are from fastvideo/models/dits/wanvideo.py of hao-ai-lab/FastVideo.
    """
    return ["blocks.*.to_gate_compress.*"]


def _control_weight_rules(config: ControlTransformerConfig) -> list[WeightRule]:
    """Return the rules for the parameters that a control clip adds to a transformer."""
    return [
        *layer("vace_patch_embedding", "control_embed", patches(config.patch)),
        *linear("vace_blocks.0.proj_in", "control_in"),
        *_block("vace_blocks.{i}", "control_blocks", config),
        *linear("vace_blocks.{i}.proj_out", "control_blocks.hint"),
    ]


def _image_weight_rules(config: ImageTransformerConfig) -> list[WeightRule]:
    """Return the rules for the parameters that an image adds to a transformer."""
    embed = "condition_embedder.image_embedder"
    return [
        *norm(f"{embed}.norm1", "image_embed.norm1", bias=True),
        *feed_forward(f"{embed}.ff", "image_embed.mlp"),
        *norm(f"{embed}.norm2", "image_embed.norm2", bias=True),
        *[WeightRule(f"{embed}.pos_embed", "image_embed.positions", squeeze(0))] * (config.image_positions is not None),
        *linear("blocks.{i}.attn2.add_k_proj", "blocks.cross_attn.image_k"),
        *linear("blocks.{i}.attn2.add_v_proj", "blocks.cross_attn.image_v"),
        *norm("blocks.{i}.attn2.norm_added_k", "blocks.cross_attn.image_k_norm"),
    ]


def _plain_weight_rules(config: TransformerConfig) -> list[WeightRule]:
    return [
        *layer("patch_embedding", "patch_embed", patches(config.patch)),
        *embedder("condition_embedder.text_embedder", "text_embed"),
        *embedder("condition_embedder.time_embedder", "time_embed"),
        *linear("condition_embedder.time_proj", "time_proj"),
        *_block("blocks.{i}", "blocks", config),
        WeightRule("scale_shift_table", "table", squeeze(0)),
        *linear("proj_out", "proj_out"),
    ]


def _block(source: str, target: str, config: TransformerConfig) -> list[WeightRule]:
    return [
        *_attention(f"{source}.attn1", f"{target}.self_attn", rope_halves(config.heads)),
        *linear(f"{source}.attn1.proj_l", f"{target}.self_attn.proj_l") * bool(config.sparse_linear),
        *_attention(f"{source}.attn2", f"{target}.cross_attn", IDENTITY),
        *norm(f"{source}.norm2", f"{target}.norm2", bias=True),
        *feed_forward(f"{source}.ffn", f"{target}.mlp"),
        WeightRule(f"{source}.scale_shift_table", f"{target}.table", squeeze(0)),
    ]


def _attention(source: str, target: str, order: Transform) -> list[WeightRule]:
    """Return the rules of an attention layer; `order` reorders the channels for RoPE."""
    return [
        *projections(source, target, order),
        *norm(f"{source}.norm_q", f"{target}.q_norm", rows=order),
        *norm(f"{source}.norm_k", f"{target}.k_norm", rows=order),
    ]


def vae_config(json: Mapping[str, Any]) -> VAEConfig:
    """Read an autoencoder's config from `vae/config.json`. Raises the same errors as `transformer_config`."""
    check_kind("VAE", json, VAE_ENTRIES)
    patch = json.get("patch_size") or 1
    for entry in ("in_channels", "out_channels"):
        if json.get(entry, 3) != 3 * patch**2:
            raise WanjaxError(
                f"the VAE's config.json has {entry} {json.get(entry, 3)}: with patch_size {patch} it must be "
                f"{3 * patch**2}, three colours of {patch} × {patch} pixels"
            )
    config_type = ResidualVAEConfig if json.get("is_residual") else VAEConfig
    return config_type(
        width=json["base_dim"],
        decoder_width=json.get("decoder_base_dim") or json["base_dim"],
        patch=patch,
        latent_channels=json["z_dim"],
        multipliers=tuple(json["dim_mult"]),
        res_blocks=json["num_res_blocks"],
        temporal_downsample=tuple(json["temperal_downsample"]),
        latents_mean=tuple(json["latents_mean"]),
        latents_std=tuple(json["latents_std"]),
    )


def vae_weight_rules(config: VAEConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the autoencoder; the config's type selects them."""
    levels = _residual_levels() if isinstance(config, ResidualVAEConfig) else _levels(config)
    return [
        *pointwise("quant_conv", "quant"),
        *pointwise("post_quant_conv", "post_quant"),
        *_shared_weight_rules("encoder"),
        *_shared_weight_rules("decoder"),
        *_res_block("decoder.up_blocks.{i}.resnets.{j}", "decoder.levels.{i}.res.{j}"),
        *levels,
    ]


def _shared_weight_rules(coder: str) -> list[WeightRule]:
    """Return the rules that encoder and decoder share: the first and last convolutions, and the middle block."""
    return [
        *conv(f"{coder}.conv_in", f"{coder}.conv_in"),
        *_res_block(f"{coder}.mid_block.resnets.0", f"{coder}.mid.res1"),
        gamma(f"{coder}.mid_block.attentions.0.norm", f"{coder}.mid.attention.norm", axes=(1, 2)),
        *pointwise(f"{coder}.mid_block.attentions.0.to_qkv", f"{coder}.mid.attention.qkv", axes=(2, 3)),
        *pointwise(f"{coder}.mid_block.attentions.0.proj", f"{coder}.mid.attention.out", axes=(2, 3)),
        *_res_block(f"{coder}.mid_block.resnets.1", f"{coder}.mid.res2"),
        gamma(f"{coder}.norm_out", f"{coder}.norm_out"),
        *conv(f"{coder}.conv_out", f"{coder}.conv_out"),
    ]


def _levels(config: VAEConfig) -> list[WeightRule]:
    """Return the rules of Wan 2.1's levels; its files number the encoder's blocks and downsamplers in one list."""
    rules = _resample("decoder.up_blocks.{i}.upsamplers.0", "decoder.levels.{i}.resample")
    for level in range(len(config.multipliers)):
        first = level * (config.res_blocks + 1)
        for block in range(config.res_blocks):
            rules += _res_block(f"encoder.down_blocks.{first + block}", f"encoder.levels.{level}.res.{block}")
        rules += _resample(f"encoder.down_blocks.{first + config.res_blocks}", f"encoder.levels.{level}.resample")
    return rules


def _residual_levels() -> list[WeightRule]:
    """Return the rules of Wan 2.2's levels."""
    return [
        *_res_block("encoder.down_blocks.{i}.resnets.{j}", "encoder.levels.{i}.res.{j}"),
        *_resample("encoder.down_blocks.{i}.downsampler", "encoder.levels.{i}.resample"),
        *_resample("decoder.up_blocks.{i}.upsampler", "decoder.levels.{i}.resample"),
    ]


def _resample(source: str, target: str) -> list[WeightRule]:
    return [*conv(f"{source}.resample.1", f"{target}.conv"), *conv(f"{source}.time_conv", f"{target}.time_conv")]


def _res_block(source: str, target: str) -> list[WeightRule]:
    return [
        gamma(f"{source}.norm1", f"{target}.norm1"),
        *conv(f"{source}.conv1", f"{target}.conv1"),
        gamma(f"{source}.norm2", f"{target}.norm2"),
        *conv(f"{source}.conv2", f"{target}.conv2"),
        *pointwise(f"{source}.conv_shortcut", f"{target}.shortcut"),
    ]
