# SPDX-License-Identifier: Apache-2.0
"""The conversion tables of Wan's networks in the diffusers layout: names and shapes of the weights, and config.json."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import (
    IDENTITY,
    Rule,
    Transform,
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
from wanjax.kernels.attention import SparseLinear
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

# Entries of config.json that select the architecture, and their supported values; the first is that of a missing entry.
TRANSFORMER_KIND = {
    "_class_name": ("WanTransformer3DModel", "WanVACETransformer3DModel", "CausalWanTransformer3DModel"),
    "cross_attn_norm": (True,),
    "qk_norm": ("rms_norm_across_heads",),
}
PUBLISHED_WIDTHS = {config.width for config in (T2V_1_3B, TI2V_5B, T2V_14B)}
HEAD_DIM = T2V_14B.head_dim  # of every published transformer
VAE_KIND = {
    "_class_name": ("AutoencoderKLWan",),
    "is_residual": (False, True),
    "attn_scales": ([], ()),
}


def transformer_config(json: Mapping[str, Any]) -> TransformerConfig:
    """Read a transformer's config from `transformer/config.json` of a diffusers folder.

    Its type says what the transformer sees in addition to the prompt: nothing, an image, or a control clip. Raises
    KeyError if a size is missing, WanjaxError if one contradicts another or the architecture is not supported.
    """
    check_kind("transformer", json, TRANSFORMER_KIND)
    plain = TransformerConfig(
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
    if plain.width in PUBLISHED_WIDTHS and plain.head_dim != HEAD_DIM:  # which the shapes of tensors would not show
        heads, right = f"{plain.heads} heads of {plain.head_dim}", f"{plain.width // HEAD_DIM} of {HEAD_DIM}"
        raise WanjaxError(f"the transformer's config.json has {heads} where Wan's of width {plain.width} have {right}")
    image_width, controlled = json.get("image_dim"), "vace_layers" in json
    if controlled or json.get("_class_name") == "CausalWanTransformer3DModel":
        check_kind("transformer", json, {"sparse_linear": (False,)})
    if image_width is None or controlled:
        check_kind(
            "transformer", json, {"image_dim": (None,), "added_kv_proj_dim": (None,), "pos_embed_seq_len": (None,)}
        )
        if json.get("_class_name") == "CausalWanTransformer3DModel":
            return _causal_config(plain, json)
        return _control_config(plain, json) if controlled else plain
    check_kind("transformer", json, {"added_kv_proj_dim": (plain.width,)})
    return ImageTransformerConfig(**vars(plain), image_width=image_width, image_positions=json.get("pos_embed_seq_len"))


def _sparse_linear(json: Mapping[str, Any]) -> SparseLinear | None:
    """Read the sparse-linear attention that a transformer was trained with: its text, or true for the authors' own."""
    text = json.get("sparse_linear", False)
    if isinstance(text, str):
        return SparseLinear.parse(text)
    check_kind("transformer", json, {"sparse_linear": (False, True)})
    return SparseLinear() if text else None


def sparse_linear_entry(sparse: SparseLinear | None) -> dict[str, Any]:
    """Return the entry of config.json on sparse-linear attention; none for a transformer without it."""
    return {"sparse_linear": str(sparse) or True} if sparse else {}


def _control_config(plain: TransformerConfig, json: Mapping[str, Any]) -> ControlTransformerConfig:
    layers, channels = json.get("vace_layers"), json.get("vace_in_channels")
    if not layers or channels is None:
        raise WanjaxError("the transformer's config.json has no vace_layers or no vace_in_channels, which VACE needs")
    stride = plain.layers // len(layers)
    if not stride or list(layers) != list(range(0, plain.layers, stride)) or plain.layers % stride:
        right = f"evenly spaced layers from 0 that divide {plain.layers}"
        raise WanjaxError(f"the transformer's config.json has vace_layers {list(layers)} where {right} are supported")
    return ControlTransformerConfig(**vars(plain), control_channels=channels, control_stride=stride)


def _causal_config(plain: TransformerConfig, json: Mapping[str, Any]) -> CausalTransformerConfig:
    """Read the blocks and the window; an attention to all frames sees as many as the authors keep."""
    block, local, sink = json.get("num_frames_per_block", 3), json.get("local_attn_size", -1), json.get("sink_size", 0)
    window = json.get("sliding_window_num_frames", 21) if local == -1 else local
    if block < 1 or window % block or sink % block or not 0 <= sink < window:
        raise WanjaxError(
            f"the transformer's config.json has blocks of {block} frames in a window of {window}, of which {sink} "
            "stay: multiples of the block are supported, such as 3, 21 and 0"
        )
    return CausalTransformerConfig(**vars(plain), block_frames=block, window=window, sink=sink)


def transformer_rules(config: TransformerConfig) -> list[Rule]:
    """Return the rules for every parameter of the transformer; the config's type selects the variant."""
    rules = _plain_rules(config)
    match config:
        case ImageTransformerConfig():
            return rules + _image_rules(config)
        case ControlTransformerConfig():
            return rules + _control_rules(config)
    return rules


def transformer_unused(config: TransformerConfig) -> list[str]:
    """Return patterns of the unused keys: the gates of video sparse attention (2505.13389), where all keys are seen.

    The names are those of fastvideo/models/dits/wanvideo.py of hao-ai-lab/FastVideo.
    """
    return ["blocks.*.to_gate_compress.*"]


def _control_rules(config: ControlTransformerConfig) -> list[Rule]:
    """Return the rules for the additional parameters of a transformer that follows a control clip."""
    return [
        *layer("vace_patch_embedding", "control_embed", patches(config.patch)),
        *linear("vace_blocks.0.proj_in", "control_in"),
        *_block("vace_blocks.{i}", "control_blocks", config),
        *linear("vace_blocks.{i}.proj_out", "control_blocks.hint"),
    ]


def _image_rules(config: ImageTransformerConfig) -> list[Rule]:
    """Return the rules for the additional parameters of a transformer that sees an image."""
    embed = "condition_embedder.image_embedder"
    return [
        *norm(f"{embed}.norm1", "image_embed.norm1", bias=True),
        *feed_forward(f"{embed}.ff", "image_embed.mlp"),
        *norm(f"{embed}.norm2", "image_embed.norm2", bias=True),
        *[Rule(f"{embed}.pos_embed", "image_embed.positions", squeeze(0))] * (config.image_positions is not None),
        *linear("blocks.{i}.attn2.add_k_proj", "blocks.cross_attn.image_k"),
        *linear("blocks.{i}.attn2.add_v_proj", "blocks.cross_attn.image_v"),
        *norm("blocks.{i}.attn2.norm_added_k", "blocks.cross_attn.image_k_norm"),
    ]


def _plain_rules(config: TransformerConfig) -> list[Rule]:
    return [
        *layer("patch_embedding", "patch_embed", patches(config.patch)),
        *embedder("condition_embedder.text_embedder", "text_embed"),
        *embedder("condition_embedder.time_embedder", "time_embed"),
        *linear("condition_embedder.time_proj", "time_proj"),
        *_block("blocks.{i}", "blocks", config),
        Rule("scale_shift_table", "table", squeeze(0)),
        *linear("proj_out", "proj_out"),
    ]


def _block(source: str, target: str, config: TransformerConfig) -> list[Rule]:
    return [
        *_attention(f"{source}.attn1", f"{target}.self_attn", rope_halves(config.heads)),
        *linear(f"{source}.attn1.proj_l", f"{target}.self_attn.proj_l") * bool(config.sparse_linear),
        *_attention(f"{source}.attn2", f"{target}.cross_attn", IDENTITY),
        *norm(f"{source}.norm2", f"{target}.norm2", bias=True),
        *feed_forward(f"{source}.ffn", f"{target}.mlp"),
        Rule(f"{source}.scale_shift_table", f"{target}.table", squeeze(0)),
    ]


def _attention(source: str, target: str, order: Transform) -> list[Rule]:
    """Return the rules of an attention layer; `order` rearranges the channels that RoPE rotates."""
    return [
        *projections(source, target, order),
        *norm(f"{source}.norm_q", f"{target}.q_norm", rows=order),
        *norm(f"{source}.norm_k", f"{target}.k_norm", rows=order),
    ]


def vae_config(json: Mapping[str, Any]) -> VAEConfig:
    """Read an autoencoder's config from `vae/config.json`. Raises the errors of `transformer_config`."""
    check_kind("VAE", json, VAE_KIND)
    patch = json.get("patch_size") or 1
    for entry in ("in_channels", "out_channels"):
        if json.get(entry, 3) != 3 * patch**2:
            raise WanjaxError(
                f"the VAE's config.json has {entry} {json.get(entry, 3)} instead of {3 * patch**2}: three colours "
                f"of each of {patch} × {patch} pixels, by its patch_size"
            )
    shape = ResidualVAEConfig if json.get("is_residual") else VAEConfig
    return shape(
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


def vae_rules(config: VAEConfig) -> list[Rule]:
    """Return the rules for every parameter of the autoencoder; the config's type selects the variant."""
    levels = _residual_levels() if isinstance(config, ResidualVAEConfig) else _levels(config)
    return [
        *pointwise("quant_conv", "quant"),
        *pointwise("post_quant_conv", "post_quant"),
        *_ends("encoder"),
        *_ends("decoder"),
        *_res_block("decoder.up_blocks.{i}.resnets.{j}", "decoder.levels.{i}.res.{j}"),
        *levels,
    ]


def _ends(half: str) -> list[Rule]:
    """Return the rules that encoder and decoder share: the first and last convolutions, and the middle."""
    return [
        *conv(f"{half}.conv_in", f"{half}.conv_in"),
        *_res_block(f"{half}.mid_block.resnets.0", f"{half}.mid.res1"),
        gamma(f"{half}.mid_block.attentions.0.norm", f"{half}.mid.attention.norm", axes=(1, 2)),
        *pointwise(f"{half}.mid_block.attentions.0.to_qkv", f"{half}.mid.attention.qkv", axes=(2, 3)),
        *pointwise(f"{half}.mid_block.attentions.0.proj", f"{half}.mid.attention.out", axes=(2, 3)),
        *_res_block(f"{half}.mid_block.resnets.1", f"{half}.mid.res2"),
        gamma(f"{half}.norm_out", f"{half}.norm_out"),
        *conv(f"{half}.conv_out", f"{half}.conv_out"),
    ]


def _levels(config: VAEConfig) -> list[Rule]:
    """Return the rules of Wan 2.1's levels. Its files number the encoder's blocks and downsamplers in one list."""
    rules = _resample("decoder.up_blocks.{i}.upsamplers.0", "decoder.levels.{i}.resample")
    for level in range(len(config.multipliers)):
        first = level * (config.res_blocks + 1)
        for block in range(config.res_blocks):
            rules += _res_block(f"encoder.down_blocks.{first + block}", f"encoder.levels.{level}.res.{block}")
        rules += _resample(f"encoder.down_blocks.{first + config.res_blocks}", f"encoder.levels.{level}.resample")
    return rules


def _residual_levels() -> list[Rule]:
    """Return the rules of Wan 2.2's levels."""
    return [
        *_res_block("encoder.down_blocks.{i}.resnets.{j}", "encoder.levels.{i}.res.{j}"),
        *_resample("encoder.down_blocks.{i}.downsampler", "encoder.levels.{i}.resample"),
        *_resample("decoder.up_blocks.{i}.upsampler", "decoder.levels.{i}.resample"),
    ]


def _resample(source: str, target: str) -> list[Rule]:
    return [*conv(f"{source}.resample.1", f"{target}.conv"), *conv(f"{source}.time_conv", f"{target}.time_conv")]


def _res_block(source: str, target: str) -> list[Rule]:
    return [
        gamma(f"{source}.norm1", f"{target}.norm1"),
        *conv(f"{source}.conv1", f"{target}.conv1"),
        gamma(f"{source}.norm2", f"{target}.norm2"),
        *conv(f"{source}.conv2", f"{target}.conv2"),
        *pointwise(f"{source}.conv_shortcut", f"{target}.shortcut"),
    ]
