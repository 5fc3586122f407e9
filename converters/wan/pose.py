# SPDX-License-Identifier: Apache-2.0
"""Conversion of Wan Animate's transformer: diffusers' tensors and config.json, and the names in the authors' files.

Sources: diffusers' scripts/convert_wan_to_diffusers.py, and wan/modules/animate/ of the official Wan 2.2.
"""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import Specs, check_kind, count_modules, shape_of
from wanjax.converters.name_map import NameMap
from wanjax.converters.wan import diffusers
from wanjax.converters.wan.original import TRANSFORMER
from wanjax.converters.weight_rules import CONV, Transform, WeightRule, layer, linear, norm, patches, squeeze
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import POSE_14B, ImageTransformerConfig, PoseTransformerConfig

TRANSFORMER_CLASS = "WanAnimateTransformer3DModel"
ENTRIES = {
    "_class_name": (TRANSFORMER_CLASS,),
    **{name: diffusers.TRANSFORMER_ENTRIES[name] for name in ("cross_attn_norm", "qk_norm")},
    "pos_embed_seq_len": (None,),
}
SHARED_ENTRIES = (
    *("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "out_channels", "patch_size", "text_dim"),
    *("freq_dim", "eps", "image_dim", "added_kv_proj_dim"),
)
"""The entries of config.json that an image-to-video transformer has too."""
SMALLEST_FACE = 4  # pixels along the sides of the motion encoder's last pictures
BLOCKS = len(POSE_14B.motion_channels) - 1  # of the motion encoder, in every file of the authors
TIME_CONV = CONV >> Transform("pixels", squeeze(1, 2).inverse, squeeze(1, 2).forward)
"""A convolution over time as one over time, height and width: [O, I, taps] -> [taps, 1, 1, I, O]."""

_CONVS = "motion_encoder.enc.net_app.convs"
_BLOCK = "motion_encoder.res_blocks"
NAMES = NameMap(
    [
        *TRANSFORMER.pairs,
        ("pose_patch_embedding", "pose_patch_embedding"),
        (f"{_CONVS}.0.1", "motion_encoder.conv_in.act_fn"),
        (f"{_CONVS}.0.0", "motion_encoder.conv_in"),
        *(
            (f"{_CONVS}.{i + 1}.{author_name}", f"{_BLOCK}.{i}.{name}")
            for i in range(BLOCKS)
            for author_name, name in (
                ("conv1.1", "conv1.act_fn"),
                ("conv1.0", "conv1"),
                ("conv2.2", "conv2.act_fn"),
                ("conv2.1", "conv2"),
                ("skip.1", "conv_skip"),
            )
        ),
        (f"{_CONVS}.{BLOCKS + 1}", "motion_encoder.conv_out"),
        ("motion_encoder.enc.fc.{i}", "motion_encoder.motion_network.{i}"),
        ("motion_encoder.dec.direction.weight", "motion_encoder.motion_synthesis_weight"),
        *((f"face_encoder.{x}.conv", f"face_encoder.{x}") for x in ("conv1_local", "conv2", "conv3")),
        *((f"face_encoder.{x}", f"face_encoder.{x}") for x in ("out_proj", "padding_tokens")),
        *(
            (f"face_adapter.fuser_blocks.{{i}}.{author_name}", f"face_adapter.{{i}}.{name}")
            for author_name, name in (
                ("linear1_q", "to_q"),
                ("linear1_k", "to_k"),
                ("linear1_v", "to_v"),
                ("linear2", "to_out"),
                ("q_norm", "norm_q"),
                ("k_norm", "norm_k"),
            )
        ),
    ]
)
"""The names after the projection `linear1_kv` is split."""


def transformer_config(json: Mapping[str, Any]) -> PoseTransformerConfig:
    """Read a transformer's config from the `transformer/config.json` of diffusers' class.

    Raises KeyError and WanjaxError as the function of this name in `diffusers` does.
    """
    check_kind("transformer", json, ENTRIES)
    channels_in = json["in_channels"] or 2 * json["latent_channels"] + 4
    base = diffusers.transformer_config({name: json[name] for name in SHARED_ENTRIES} | {"in_channels": channels_in})
    if not isinstance(base, ImageTransformerConfig):
        raise WanjaxError("the transformer's config.json has no image_dim: give a published config.json")
    stride = json["inject_face_latents_blocks"]
    if base.layers % stride:
        raise WanjaxError(
            f"the transformer's config.json has inject_face_latents_blocks {stride}: give a divisor of "
            f"num_layers, {base.layers}"
        )
    return PoseTransformerConfig(
        **vars(base),
        face_size=json["motion_encoder_size"],
        motion_channels=_motion_channels(json["motion_encoder_size"], json["motion_encoder_channel_sizes"]),
        motion_width=json["motion_style_dim"],
        motions=json["motion_dim"],
        motion_space=json["motion_encoder_dim"],
        face_width=json["face_encoder_hidden_dim"],
        face_heads=json["face_encoder_num_heads"],
        face_stride=stride,
    )


def _motion_channels(face_size: int, table: Mapping[str, int] | None) -> tuple[int, ...]:
    """Return the motion encoder's channels from pictures of `face_size` pixels to the smallest.

    Args:
        face_size: The pixels along a side of the first pictures.
        table: The channels by pixels along a side; None for the published ones.
    """
    sizes = [SMALLEST_FACE * 2**i for i in range(10)]
    if face_size not in sizes[1:]:
        raise WanjaxError(f"the transformer's config.json has motion_encoder_size {face_size}: give a power of two")
    published = {POSE_14B.face_size >> i: channels for i, channels in enumerate(POSE_14B.motion_channels)}
    by_size = published | {2 * POSE_14B.face_size: POSE_14B.motion_channels[0] // 2}
    if table is not None:
        by_size = {int(size): channels for size, channels in table.items()}
    return tuple(by_size[size] for size in reversed(sizes) if size <= face_size)


def transformer_json(image_json: Mapping[str, Any], specs: Specs) -> dict[str, Any]:
    """Return the config.json of diffusers' class.

    Args:
        image_json: The config.json of an image-to-video transformer of the same shapes.
        specs: Shapes and dtypes by diffusers' names.
    """
    blocks, adapters = count_modules(specs, _BLOCK), count_modules(specs, "face_adapter")
    face_size = SMALLEST_FACE * 2**blocks
    convs = ["motion_encoder.conv_in", *(f"{_BLOCK}.{i}.conv2" for i in range(blocks))]
    motion_space, motions = shape_of(specs, "motion_encoder.motion_synthesis_weight", 2)
    face_width = shape_of(specs, "face_encoder.conv2.weight", 3)[0]
    return {
        **{name: value for name, value in image_json.items() if name != "_class_name"},
        "_class_name": TRANSFORMER_CLASS,
        "latent_channels": shape_of(specs, "pose_patch_embedding.weight", 5)[1],
        "motion_encoder_channel_sizes": {
            str(face_size >> i): shape_of(specs, f"{conv}.weight", 4)[0] for i, conv in enumerate(convs)
        },
        "motion_encoder_size": face_size,
        "motion_style_dim": shape_of(specs, "motion_encoder.conv_out.weight", 4)[0],
        "motion_dim": motions,
        "motion_encoder_dim": motion_space,
        "face_encoder_hidden_dim": face_width,
        "face_encoder_num_heads": shape_of(specs, "face_encoder.conv1_local.weight", 3)[0] // face_width,
        "inject_face_latents_blocks": max(image_json["num_layers"] // max(adapters, 1), 1),
    }


def transformer_weight_rules(config: PoseTransformerConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the transformer."""
    adapter, adapters = "face_adapter.{i}", "face_adapters"
    return [
        *diffusers.transformer_weight_rules(config),
        *layer("pose_patch_embedding", "pose_embed", patches(config.patch)),
        *_motion_encoder_weight_rules(),
        *layer("face_encoder.conv1_local", "face_encoder.conv1", TIME_CONV),
        *layer("face_encoder.conv2", "face_encoder.conv2", TIME_CONV),
        *layer("face_encoder.conv3", "face_encoder.conv3", TIME_CONV),
        *linear("face_encoder.out_proj", "face_encoder.out"),
        WeightRule("face_encoder.padding_tokens", "face_encoder.padding", squeeze(0, 1, 2)),
        *(rule for x in ("q", "k", "v", "out") for rule in linear(f"{adapter}.to_{x}", f"{adapters}.{x}")),
        *norm(f"{adapter}.norm_q", f"{adapters}.q_norm"),
        *norm(f"{adapter}.norm_k", f"{adapters}.k_norm"),
    ]


def _motion_encoder_weight_rules() -> list[WeightRule]:
    network = "motion_encoder"
    convs = {
        "conv_in": "conv_in",
        "res_blocks.{i}.conv1": "blocks.{i}.conv1",
        "res_blocks.{i}.conv2": "blocks.{i}.conv2",
    }
    without_bias = {"res_blocks.{i}.conv_skip": "blocks.{i}.shortcut", "conv_out": "conv_out"}
    return [
        *(
            WeightRule(f"{network}.{x}.weight", f"{network}.{y}.kernel", CONV)
            for x, y in (convs | without_bias).items()
        ),
        *(WeightRule(f"{network}.{x}.act_fn.bias", f"{network}.{y}.bias") for x, y in convs.items()),
        *linear(f"{network}.motion_network.{{i}}", f"{network}.layers.{{i}}"),
        *linear(f"{network}.motion_network.4", f"{network}.factors"),
        WeightRule(f"{network}.motion_synthesis_weight", f"{network}.directions"),
    ]
