# SPDX-License-Identifier: Apache-2.0
"""The widgets of nodes that any model may have.

The editor saves the values of a node's widgets as a list without names. This table has the names, in the order of the
node's definition. A type that is not in the table is unknown. A node of an unknown type must not lie on the path to the
video.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

SEED_WIDGETS = ("seed", "noise_seed", "value")
"""Widgets after which the editor saves an additional value: what happens to the widget after a run."""
CONTROL_WORDS = ("fixed", "increment", "decrement", "randomize")
RESIZE_TYPES = {
    "scale dimensions": ("width", "height", "crop"),
    "scale by multiplier": ("multiplier",),
    "scale longer dimension": ("longer_size",),
    "scale shorter dimension": ("shorter_size",),
    "scale width": ("width",),
    "scale height": ("height",),
    "scale total pixels": ("megapixels",),
    "match size": ("crop",),
    "scale to multiple": ("multiple",),
}
"""The widgets of a resizing node, by the type of resizing."""


class NodeType(NamedTuple):
    """The names of a node's widgets.

    Args:
        widgets: The names, in order.
        variants: Further names, by the value of the first widget.
        last: Names after the names of a variant.
        numbered: The name of widgets that are JSON objects. The API's form numbers them: `lora_1`, `lora_2`.
    """

    widgets: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    last: tuple[str, ...] = ()
    numbered: str = ""

    def widget_names(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of all widgets of a node.

        Args:
            values: The values of its widgets.
        """
        if self.numbered:
            return tuple(f"{self.numbered}_{number}" for number in range(len(values)))
        if not self.variants:
            return self.widgets
        variant_names = self.variants.get(str(values[0]), ()) if values else ()
        return (*self.widgets, *(f"{self.widgets[0]}.{name}" for name in variant_names), *self.last)


def video_shape_widgets(*names: str) -> NodeType:
    """Return the type of a node whose first widgets are the shape of a video.

    Args:
        names: The names of its further widgets.
    """
    return NodeType(("width", "height", "length", "batch_size", *names))


NODE_TYPES = {
    # weights
    "UNETLoader": NodeType(("unet_name", "weight_dtype")),
    "UnetLoaderGGUF": NodeType(("unet_name",)),
    "UnetLoaderGGUFAdvanced": NodeType(("unet_name", "dequant_dtype", "patch_dtype", "patch_on_device")),
    "CheckpointLoaderSimple": NodeType(("ckpt_name",)),
    "CLIPLoader": NodeType(("clip_name", "type", "device")),
    "CLIPLoaderGGUF": NodeType(("clip_name", "type")),
    "DualCLIPLoader": NodeType(("clip_name1", "clip_name2", "type", "device")),
    "DualCLIPLoaderGGUF": NodeType(("clip_name1", "clip_name2", "type")),
    "CLIPVisionLoader": NodeType(("clip_name",)),
    "VAELoader": NodeType(("vae_name",)),
    "LoraLoader": NodeType(("lora_name", "strength_model", "strength_clip")),
    "LoraLoaderModelOnly": NodeType(("lora_name", "strength_model")),
    "Power Lora Loader (rgthree)": NodeType(numbered="lora"),
    # changes of a model
    "ModelSamplingSD3": NodeType(("shift",)),
    "ModelSamplingAuraFlow": NodeType(("shift",)),
    "CFGZeroStar": NodeType(),
    "EasyCache": NodeType(("reuse_threshold", "start_percent", "end_percent", "verbose")),
    "PathchSageAttentionKJ": NodeType(("sage_attention", "allow_compile")),
    "ModelPatchTorchSettings": NodeType(("enable_fp16_accumulation",)),
    "TorchCompileModel": NodeType(("backend",)),
    # texts and conditions
    "CLIPTextEncode": NodeType(("text",)),
    "CLIPVisionEncode": NodeType(("crop",)),
    "ConditioningZeroOut": NodeType(),
    # latents
    "EmptyLatentImage": NodeType(("width", "height", "batch_size")),
    "TrimVideoLatent": NodeType(("trim_amount",)),
    "VAEEncode": NodeType(),
    # sampling
    "KSampler": NodeType(("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise")),
    "KSamplerAdvanced": NodeType(
        (
            "add_noise",
            "noise_seed",
            "steps",
            "cfg",
            "sampler_name",
            "scheduler",
            "start_at_step",
            "end_at_step",
            "return_with_leftover_noise",
        )
    ),
    "SamplerCustom": NodeType(("add_noise", "noise_seed", "cfg")),
    "SamplerCustomAdvanced": NodeType(),
    "KSamplerSelect": NodeType(("sampler_name",)),
    "BasicScheduler": NodeType(("scheduler", "steps", "denoise")),
    "SplitSigmas": NodeType(("step",)),
    "CFGGuider": NodeType(("cfg",)),
    "BasicGuider": NodeType(),
    "RandomNoise": NodeType(("noise_seed",)),
    "DisableNoise": NodeType(),
    # pictures and clips
    "LoadImage": NodeType(("image", "upload")),
    "LoadImageMask": NodeType(("image", "channel", "upload")),
    "LoadVideo": NodeType(("file", "upload")),
    "VHS_LoadVideo": NodeType(
        ("video", "force_rate", "custom_width", "custom_height", "frame_load_cap", "skip_first_frames")
    ),
    "GetVideoComponents": NodeType(),
    "GetImageSize": NodeType(),
    "ImageScale": NodeType(("upscale_method", "width", "height", "crop")),
    "ImageScaleBy": NodeType(("upscale_method", "scale_by")),
    "ImageResizeKJv2": NodeType(
        ("width", "height", "upscale_method", "keep_proportion", "pad_color", "crop_position", "divisible_by")
    ),
    "ResizeImageMaskNode": NodeType(("resize_type",), RESIZE_TYPES, ("scale_method",)),
    "ImageToMask": NodeType(("channel",)),
    "MaskToImage": NodeType(),
    "ImageFromBatch": NodeType(("batch_index", "length")),
    "SolidMask": NodeType(("value", "width", "height")),
    "EmptyImage": NodeType(("width", "height", "batch_size", "color")),
    "InvertMask": NodeType(),
    "RepeatImageBatch": NodeType(("amount",)),
    "ImageBatch": NodeType(),
    "BatchImagesNode": NodeType(),
    "ImagePadForOutpaint": NodeType(("left", "top", "right", "bottom", "feathering")),
    "VAEDecode": NodeType(),
    "VAEDecodeTiled": NodeType(("tile_size", "overlap", "temporal_size", "temporal_overlap")),
    # values
    "PrimitiveInt": NodeType(("value",)),
    "PrimitiveFloat": NodeType(("value",)),
    "PrimitiveBoolean": NodeType(("value",)),
    "PrimitiveString": NodeType(("value",)),
    "PrimitiveStringMultiline": NodeType(("value",)),
    "INTConstant": NodeType(("value",)),
    "FloatConstant": NodeType(("value",)),
    "StringConstantMultiline": NodeType(("string", "strip_newlines")),
    "StringConcatenate": NodeType(("string_a", "string_b", "delimiter")),
    "ComfyMathExpression": NodeType(("expression",)),
    "ComfyNumberConvert": NodeType(),
    "ComfySwitchNode": NodeType(("switch",)),
    # outputs
    "CreateVideo": NodeType(("fps",)),
    "SaveVideo": NodeType(("filename_prefix", "format", "codec")),
    "SaveWEBM": NodeType(("filename_prefix", "codec", "fps", "crf")),
    "SaveAnimatedWEBP": NodeType(("filename_prefix", "fps", "lossless", "quality", "method")),
    "SaveAnimatedPNG": NodeType(("filename_prefix", "fps", "compress_level")),
    "SaveImage": NodeType(("filename_prefix",)),
    "PreviewImage": NodeType(),
    "VHS_VideoCombine": NodeType(("frame_rate", "loop_count", "filename_prefix", "format", "pingpong", "save_output")),
}
