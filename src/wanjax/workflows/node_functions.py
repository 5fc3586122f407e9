# SPDX-License-Identifier: Apache-2.0
"""The functions that describe nodes for any model. A family adds the functions of its own nodes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.media.inputs import VIDEO
from wanjax.workflows import arithmetic
from wanjax.workflows.evaluate import MissingInput, NodeInputs, is_number, repr_value
from wanjax.workflows.graph import short_text
from wanjax.workflows.values import (
    INPUT,
    AnyLatents,
    Condition,
    Decoder,
    Encoder,
    File,
    Guider,
    Latents,
    Model,
    Noise,
    Pictures,
    SampledLatents,
    Sampler,
    Shape,
    Steps,
    Unknown,
    VideoOutput,
    Vision,
    base_name,
)

MAX_TEXT = 1_000_000  # the maximum number of characters of a text that nodes join
FUNCTIONS: dict[str, Callable[[NodeInputs], Any]] = {}
"""For each type of node that any model may have, the function that describes its outputs."""


def _node(*types: str) -> Callable[[Callable[[NodeInputs], Any]], Callable[[NodeInputs], Any]]:
    def register(function: Callable[[NodeInputs], Any]) -> Callable[[NodeInputs], Any]:
        FUNCTIONS.update(dict.fromkeys(types, function))
        return function

    return register


@_node("UNETLoader", "UnetLoaderGGUF", "UnetLoaderGGUFAdvanced")
def _load_denoiser(node: NodeInputs) -> Model:
    return Model(node.file("unet_name", "diffusion_models"))


@_node("CheckpointLoaderSimple")
def _load_checkpoint(node: NodeInputs) -> tuple[Model, Encoder, Decoder]:
    file = node.file("ckpt_name", "checkpoints")
    return Model(file), Encoder((file,)), Decoder(file)


@_node("CLIPLoader", "CLIPLoaderGGUF")
def _load_encoder(node: NodeInputs) -> Encoder:
    return Encoder((node.file("clip_name", "text_encoders"),))


@_node("DualCLIPLoader", "DualCLIPLoaderGGUF")
def _load_encoders(node: NodeInputs) -> Encoder:
    return Encoder((node.file("clip_name1", "text_encoders"), node.file("clip_name2", "text_encoders")))


@_node("VAELoader")
def _load_decoder(node: NodeInputs) -> Decoder:
    return Decoder(node.file("vae_name", "vae"))


@_node("CLIPVisionLoader")
def _load_vision(node: NodeInputs) -> Vision:
    return Vision(node.file("clip_name", "clip_vision"))


@_node("CLIPVisionEncode")
def _encode_vision(node: NodeInputs) -> Vision | None:
    return node.optional_input("clip_vision", Vision)


@_node("LoraLoader", "LoraLoaderModelOnly")
def _load_lora(node: NodeInputs) -> tuple[Model, Any]:
    return _with_lora(
        node, node.require_input("model", Model), node("lora_name"), node.number("strength_model", 1.0)
    ), node("clip")


@_node("Power Lora Loader (rgthree)")
def _load_loras(node: NodeInputs) -> tuple[Model, Any]:
    model = node.require_input("model", Model)
    for name in node.graph_node.inputs:
        entry = node(name)
        if isinstance(entry, Mapping) and entry.get("on") is True and isinstance(entry.get("lora"), str):
            strength = entry.get("strength", 1.0)
            if not is_number(strength):
                strength = Unknown(node.graph_node, f"has {repr_value(strength)} as a strength")
            model = _with_lora(node, model, entry["lora"], strength)
    return model, node("clip")


def _with_lora(node: NodeInputs, model: Model, name: Any, strength: float | Unknown) -> Model:
    """Return a model with one more LoRA, or the model itself if the strength is 0."""
    if isinstance(strength, Unknown):
        node.reader.problems.append(strength)
    elif round(strength, 6):
        return replace(model, loras=(*model.loras, (node.file_of(name, "lora_name", "loras"), round(strength, 6))))
    return model


@_node("ModelSamplingSD3", "ModelSamplingAuraFlow")
def _set_shift(node: NodeInputs) -> Model:
    return replace(node.require_input("model", Model), shift=_round_number(node.number("shift")))


def _round_number(number: float | Unknown) -> float | Unknown:
    return number if isinstance(number, Unknown) else round(float(number), 6)


@_node("PathchSageAttentionKJ", "ModelPatchTorchSettings", "TorchCompileModel")
def ignore_speed_node(node: NodeInputs) -> Model:
    """Describe the model of a node that only makes the model faster in ComfyUI.

    Args:
        node: The node.
    """
    model = node.require_input("model", Model)
    return replace(model, notes=(*model.notes, f"{node.graph_node} changes only the speed in ComfyUI, and is left out"))


@_node("CFGZeroStar")
def _cfg_zero(node: NodeInputs) -> Model:
    model = with_settings(node.require_input("model", Model), guidance_rule="cfg-zero:zero_steps=0")
    note = (
        f"{node.graph_node} scales clean latents: cfg-zero of wanjax scales the prediction of the network, "
        "which is close but not the same"
    )
    return replace(model, notes=(*model.notes, note))


@_node("EasyCache")
def _easy_cache(node: NodeInputs) -> Model:
    model = node.require_input("model", Model)
    note = (
        f"{node.graph_node} is left out, because its threshold has another meaning here: "
        "give --cache easycache to use one"
    )
    return replace(model, notes=(*model.notes, note))


def with_settings(model: Model, **settings: Any) -> Model:
    """Add settings of a video to a model.

    Args:
        model: The model.
        settings: Settings by name.
    """
    return replace(model, settings={**model.settings, **settings})


@_node("CLIPTextEncode")
def _encode_text(node: NodeInputs) -> Condition:
    return Condition(node.text("text"), node.optional_input("clip", Encoder), node.graph_node)


@_node("ConditioningZeroOut")
def _zero_condition(node: NodeInputs) -> Condition:
    return replace(node.require_input("conditioning", Condition), text=None, node=node.graph_node)


def conditioning_node(inputs: Mapping[str, str], needed: str | None = None) -> Callable[[NodeInputs], Any]:
    """Return the function of a node that conditions a video on pictures.

    Args:
        inputs: The names of the node's pictures, each with the name of wanjax's input.
        needed: The name of a required picture; without it the node has no effect.
    """

    def describe(node: NodeInputs) -> tuple[Condition, Condition, Latents, int]:
        pictures = {input_name: node(node_input) for node_input, input_name in inputs.items() if node.has(node_input)}
        positive, negative = node.require_input("positive", Condition), node.require_input("negative", Condition)
        strength = node.number("strength", 1.0)
        if isinstance(strength, Unknown):
            node.reader.problems.append(strength)
        elif round(strength, 6) != 1:
            node.reader.problems.append(
                Unknown(node.graph_node, f"has the strength {strength:g}, but wanjax supports only 1")
            )
        if needed and not node.has(needed):
            raise MissingInput(node.graph_node, needed)
        vision = node.optional_input("clip_vision_output", Vision) or node.optional_input(
            "clip_vision_start_image", Vision
        )
        if vision:
            pictures["vision"] = vision
        return (
            replace(positive, inputs=pictures, node=node.graph_node),
            replace(negative, inputs=pictures, node=node.graph_node),
            Latents(_video_shape(node), node.graph_node),
            0,
        )

    return describe


def _video_shape(node: NodeInputs) -> Shape:
    width, height = node.integer("width"), node.integer("height")
    return Shape(width, height, node.integer("length", 1), node.integer("batch_size", 1))


@_node("EmptyLatentImage")
def empty_latents(node: NodeInputs) -> Latents:
    """Describe latents without pictures.

    Args:
        node: The node.
    """
    return Latents(_video_shape(node), node.graph_node)


def image_latents(node: NodeInputs) -> Latents:
    """Describe latents that may contain a first picture.

    Args:
        node: The node.
    """
    return Latents(
        _video_shape(node), node.graph_node, {"image": node("start_image")} if node.has("start_image") else {}
    )


@_node("VAEEncode")
def _encode(node: NodeInputs) -> Latents | Unknown:
    clip = node.require_input("pixels", Pictures)
    if not clip.is_loaded or clip.frames == 1:
        return Unknown(
            node.graph_node, "encodes something else than a clip from a file, which wanjax cannot start from"
        )
    shape = Shape(*(side_of(node, clip, name) for name in ("width", "height", "frames")))
    return Latents(shape, node.graph_node, {VIDEO.name: clip})


@_node("TrimVideoLatent")
def _trim(node: NodeInputs) -> Any:
    return node("samples")  # the pipeline removes the latents of reference pictures itself


@_node("KSampler")
def _sample(node: NodeInputs) -> SampledLatents:
    steps = Steps(node.text("scheduler"), node.integer("steps"), denoise=node.number("denoise", 1.0))
    return _sample_latents(
        node, _guider(node), steps, Sampler(node.text("sampler_name")), Noise(node.integer("seed", 0))
    )


@_node("KSamplerAdvanced")
def _sample_part(node: NodeInputs) -> SampledLatents:
    steps = Steps(
        node.text("scheduler"),
        node.integer("steps"),
        node.integer("start_at_step", 0),
        node.integer("end_at_step", 10_000),
    )
    noise = Noise(node.integer("noise_seed", 0) if node("add_noise", "enable") == "enable" else None)
    is_finished = node("return_with_leftover_noise", "disable") == "disable"
    return _sample_latents(node, _guider(node), steps, Sampler(node.text("sampler_name")), noise, is_finished)


@_node("SamplerCustom")
def _sample_custom(node: NodeInputs) -> tuple[SampledLatents, SampledLatents]:
    noise = Noise(node.integer("noise_seed", 0) if node("add_noise", True) is True else None)
    latents = _sample_latents(
        node, _guider(node), node.require_input("sigmas", Steps), node.require_input("sampler", Sampler), noise
    )
    return latents, latents


@_node("SamplerCustomAdvanced")
def _sample_advanced(node: NodeInputs) -> tuple[SampledLatents, SampledLatents]:
    guider, noise = node.require_input("guider", Guider), node.require_input("noise", Noise)
    latents = _sample_latents(
        node, guider, node.require_input("sigmas", Steps), node.require_input("sampler", Sampler), noise
    )
    return latents, latents


@_node("CFGGuider")
def _guider(node: NodeInputs) -> Guider:
    return Guider(
        node.require_input("model", Model),
        node.require_input("positive", Condition),
        node.optional_input("negative", Condition),
        _round_number(node.number("cfg", 1.0)),
    )


def _sample_latents(
    node: NodeInputs, guider: Guider, steps: Steps, sampler: Sampler, noise: Noise, is_finished: bool = True
) -> SampledLatents:
    return SampledLatents(
        node.graph_node, guider, steps, sampler, noise, node.require_input("latent_image", AnyLatents), is_finished
    )


@_node("BasicGuider")
def _basic_guider(node: NodeInputs) -> Guider:
    return Guider(node.require_input("model", Model), node.require_input("conditioning", Condition), None, 1.0)


@_node("RandomNoise")
def _noise(node: NodeInputs) -> Noise:
    return Noise(node.integer("noise_seed", 0))


@_node("DisableNoise")
def _no_noise(node: NodeInputs) -> Noise:
    return Noise(None)


@_node("KSamplerSelect")
def _sampler(node: NodeInputs) -> Sampler:
    return Sampler(node.text("sampler_name"))


@_node("BasicScheduler")
def _schedule(node: NodeInputs) -> Steps:
    return Steps(
        node.text("scheduler"),
        node.integer("steps"),
        denoise=node.number("denoise", 1.0),
        model=node.optional_input("model", Model),
    )


@_node("SplitSigmas")
def _split(node: NodeInputs) -> tuple[Steps, Steps] | Unknown:
    steps, number = node.require_input("sigmas", Steps), node.integer("step")
    if isinstance(number, Unknown):
        return number
    return replace(steps, end=steps.start + number), replace(steps, start=steps.start + number)


@_node("LoadImage")
def _load_image(node: NodeInputs) -> tuple[Pictures, Unknown]:
    file = node.file("image", INPUT)
    return Pictures(file, node.graph_node, frames=1), Unknown(
        node.graph_node, "loads a mask with a picture: save it as a picture"
    )


@_node("LoadImageMask")
def _load_mask(node: NodeInputs) -> Pictures:
    return Pictures(node.file("image", INPUT), node.graph_node, frames=1)


@_node("ImageToMask", "MaskToImage")
def _as_mask(node: NodeInputs) -> Pictures | Unknown:
    pictures = node("image" if node.has("image") else "mask")
    if not isinstance(pictures, Pictures) or pictures.latents is not None:
        return Unknown(node.graph_node, "is not known to wanjax, unless it has a file")
    return pictures


@_node("LoadVideo")
def _load_video(node: NodeInputs) -> VideoOutput:
    file = node.file("file", INPUT)
    return VideoOutput(Pictures(file, node.graph_node), file_property(node, file, "fps"), node.graph_node)


@_node("VHS_LoadVideo")
def _load_clip(node: NodeInputs) -> tuple[Pictures, Any, None, None]:
    file = node.file("video", INPUT)
    width, height = (node.integer(f"custom_{side}", 0) or None for side in ("width", "height"))
    frames = node.integer("frame_load_cap", 0) or None
    if skipped := node.integer("skip_first_frames", 0):
        node.reader.problems.append(
            skipped
            if isinstance(skipped, Unknown)
            else Unknown(node.graph_node, f"skips the first {skipped} frames of a clip")
        )
    if rate := node.number("force_rate", 0):
        node.reader.problems.append(
            rate
            if isinstance(rate, Unknown)
            else Unknown(node.graph_node, f"changes a clip to {rate:g} frames per second")
        )
    return Pictures(file, node.graph_node, width, height, frames), file_property(node, file, "frames"), None, None


def file_property(node: NodeInputs, file: File, name: str) -> Any:
    """Return the size, the number of frames or the frame rate of a file, or `Unknown` if the file is missing.

    Args:
        node: A node.
        file: The picture or clip.
        name: The name of the field of `MediaSize`.
    """
    size = node.reader.measure(file)
    if size is None:
        return Unknown(file.node, f"loads {short_text(base_name(file.name))}, which is missing", is_missing_file=True)
    return getattr(size, name)


@_node("GetVideoComponents")
def _components(node: NodeInputs) -> tuple[Pictures, None, Any]:
    video_output = node.require_input("video", VideoOutput)
    return video_output.pictures, None, video_output.fps


@_node("GetImageSize")
def _size(node: NodeInputs) -> tuple[Any, Any, Any]:
    pictures = node.reader.require(node("image"), Pictures)
    return side_of(node, pictures, "width"), side_of(node, pictures, "height"), side_of(node, pictures, "frames")


def side_of(node: NodeInputs, pictures: Pictures | None, name: str) -> Any:
    """Return the width, height or number of frames of pictures, or `Unknown`.

    Args:
        node: The node that asks.
        pictures: The pictures.
        name: The name of the field.
    """
    value = pictures and getattr(pictures, name)
    if value is None and pictures is not None and pictures.file is not None:
        return file_property(node, pictures.file, name)
    return Unknown(node.graph_node, "measures pictures that other nodes compose") if value is None else value


def _resize_pictures(node: NodeInputs, pictures: Pictures, compute: Callable[[int, int], tuple[int, int]]) -> Pictures:
    """Return pictures with the size that `compute` returns for their size."""
    width, height = side_of(node, pictures, "width"), side_of(node, pictures, "height")
    if isinstance(width, Unknown) or isinstance(height, Unknown):
        unknown = width if isinstance(width, Unknown) else height
        return replace(pictures, width=unknown, height=unknown)
    width, height = compute(width, height)
    return replace(pictures, width=max(1, width), height=max(1, height))


@_node("ImageScale")
def _scale(node: NodeInputs) -> Any:
    pictures, width, height = node("image"), node.integer("width"), node.integer("height")
    if not isinstance(pictures, Pictures) or isinstance(width, Unknown) or isinstance(height, Unknown):
        return replace(pictures, width=width, height=height) if isinstance(pictures, Pictures) else pictures
    if not width and not height:
        return pictures
    resized = (
        pictures
        if width and height
        else _resize_pictures(node, pictures, lambda *sides: _fit_into(sides, width, height))
    )
    return replace(resized, width=width or resized.width, height=height or resized.height)


@_node("ImageResizeKJv2")
def _resize_in_proportion(node: NodeInputs) -> Any:
    pictures, mode = node("image"), node("keep_proportion", "stretch")
    width, height, divisor = node.integer("width"), node.integer("height"), node.integer("divisible_by", 1)
    if not isinstance(pictures, Pictures):
        return pictures
    if isinstance(width, Unknown) or isinstance(height, Unknown) or isinstance(divisor, Unknown):
        resized = replace(pictures, width=width, height=height)
    elif mode == "total_pixels":
        unknown = Unknown(node.graph_node, "resizes by the number of pixels, which is only known when it runs")
        resized = replace(pictures, width=unknown, height=unknown)
    elif width and height and mode != "resize":
        resized = replace(pictures, width=width, height=height)
    elif mode in ("stretch", "crop"):
        resized = _resize_pictures(node, pictures, lambda *sides: (width or sides[0], height or sides[1]))
    elif width or height:
        resized = _resize_pictures(node, pictures, lambda *sides: _fit_into(sides, width, height))
    else:
        resized = pictures
    if isinstance(divisor, int) and divisor > 1:
        resized = _resize_pictures(
            node, resized, lambda *sides: (sides[0] - sides[0] % divisor, sides[1] - sides[1] % divisor)
        )
    return resized, resized.width, resized.height, None


def _fit_into(sides: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Return the largest size with the aspect ratio of `sides` that fits into a frame. A frame's side of 0 sets no
    limit."""
    factor = min(limit / side for limit, side in zip((width, height), sides, strict=True) if limit)
    return round(sides[0] * factor), round(sides[1] * factor)


@_node("ImageScaleBy")
def _scale_by(node: NodeInputs) -> Any:
    pictures, factor = node("image"), node.number("scale_by", 1.0)
    if not isinstance(pictures, Pictures):
        return pictures
    if isinstance(factor, Unknown):
        return replace(pictures, width=factor, height=factor)
    return _resize_pictures(node, pictures, lambda width, height: (round(width * factor), round(height * factor)))


@_node("ResizeImageMaskNode")
def _resize(node: NodeInputs) -> Any:
    pictures = node("input")
    if not isinstance(pictures, Pictures):
        return pictures
    if node("resize_type") == "scale dimensions":
        return replace(pictures, width=node.integer("resize_type.width"), height=node.integer("resize_type.height"))
    unknown = Unknown(
        node.graph_node, f"resizes by {repr_value(node('resize_type'))}, which is only known when it runs"
    )
    return replace(pictures, width=unknown, height=unknown)


@_node("ImageFromBatch")
def _frames_of(node: NodeInputs) -> Pictures | Unknown:
    pictures, first = node("image"), node.integer("batch_index", 0)
    if not isinstance(pictures, Pictures) or isinstance(first, Unknown):
        return first if isinstance(first, Unknown) else pictures
    if first and pictures.latents is None:
        return Unknown(node.graph_node, "takes frames from the middle of a clip")
    return replace(pictures, frames=node.integer("length", 1), skipped=pictures.skipped + first)


@_node("VAEDecode", "VAEDecodeTiled")
def _decode(node: NodeInputs) -> Pictures:
    return Pictures(
        None,
        node.graph_node,
        latents=node.require_input("samples", AnyLatents),
        is_tiled=node.graph_node.type == "VAEDecodeTiled",
        decoder=node.optional_input("vae", Decoder),
    )


@_node(
    "PrimitiveInt",
    "PrimitiveFloat",
    "PrimitiveBoolean",
    "PrimitiveString",
    "PrimitiveStringMultiline",
    "INTConstant",
    "FloatConstant",
)
def _value(node: NodeInputs) -> Any:
    return node("value")


@_node("StringConstantMultiline")
def _constant_text(node: NodeInputs) -> str | Unknown:
    return node.text("string")


@_node("StringConcatenate")
def _join(node: NodeInputs) -> str | Unknown:
    texts = []
    for name in ("string_a", "delimiter", "string_b"):
        if isinstance(text := node.text(name), Unknown):
            return text
        texts.append(text)
    if sum(map(len, texts)) > MAX_TEXT:
        raise WanjaxError(f"{node.graph_node} joins texts to more than {MAX_TEXT:,} characters: shorten them")
    return "".join(texts)


@_node("ComfyMathExpression")
def _compute(node: NodeInputs) -> tuple[float, int, bool] | Unknown:
    values: dict[str, float] = {}
    for name in node.graph_node.inputs:
        variable = name.removeprefix("values.")
        if variable == name or (value := node(name)) is None:
            continue
        if isinstance(value := value if isinstance(value, bool) else node.number(name), Unknown):
            return value
        values[variable] = value
    expression = node.text("expression")
    if isinstance(expression, Unknown):
        return expression
    result = arithmetic.compute(expression, values)
    return float(result), int(result), bool(result)


@_node("ComfyNumberConvert")
def _convert(node: NodeInputs) -> tuple[float, int] | Unknown:
    number = node.number("value")
    return number if isinstance(number, Unknown) else (float(number), int(number))


@_node("ComfySwitchNode")
def _switch(node: NodeInputs) -> Any:
    switch = node("switch", False)
    if isinstance(switch, Unknown) and switch.is_missing_file:
        values = [node(name) for name in ("on_true", "on_false")]
        if all(isinstance(value, Pictures) and value.latents is not None for value in values) and (
            values[0].latents == values[1].latents
        ):
            return values[0]  # of the same video
    if not isinstance(switch, bool):
        return (
            switch
            if isinstance(switch, Unknown)
            else Unknown(node.graph_node, "has a switch that is neither on nor off")
        )
    return node("on_true" if switch else "on_false")


@_node("CreateVideo")
def _create(node: NodeInputs) -> VideoOutput:
    return VideoOutput(node.require_input("images", Pictures), node.number("fps", 24.0), node.graph_node)


@_node("SaveVideo")
def _save(node: NodeInputs) -> VideoOutput:
    return node.require_input("video", VideoOutput)


@_node("SaveWEBM", "SaveAnimatedWEBP", "SaveAnimatedPNG")
def _save_pictures(node: NodeInputs) -> VideoOutput:
    return VideoOutput(node.require_input("images", Pictures), node.number("fps", 16.0), node.graph_node)


@_node("VHS_VideoCombine")
def _combine(node: NodeInputs) -> VideoOutput:
    return VideoOutput(node.require_input("images", Pictures), node.number("frame_rate", 16.0), node.graph_node)


@_node("SaveImage", "PreviewImage")
def _save_frames(node: NodeInputs) -> VideoOutput:
    return VideoOutput(node.require_input("images", Pictures), None, node.graph_node)
