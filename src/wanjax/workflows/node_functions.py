# SPDX-License-Identifier: Apache-2.0
"""The functions of nodes that any model may have. A family adds those of its own nodes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.media.inputs import VIDEO
from wanjax.workflows import arithmetic
from wanjax.workflows.evaluate import At, MissingInput, is_number, repr_value
from wanjax.workflows.graph import shown
from wanjax.workflows.values import (
    INPUT,
    AnyLatents,
    Condition,
    Decoder,
    Encoder,
    File,
    Film,
    Guider,
    Latents,
    Model,
    Noise,
    Pictures,
    Sampled,
    Sampler,
    Shape,
    Steps,
    Unknown,
    Vision,
    base_name,
)

MAX_TEXT = 1_000_000  # characters of a text that nodes join
FUNCTIONS: dict[str, Callable[[At], Any]] = {}
"""Describes the outputs of a node, for each type that any model may have."""


def _node(*types: str) -> Callable[[Callable[[At], Any]], Callable[[At], Any]]:
    def register(function: Callable[[At], Any]) -> Callable[[At], Any]:
        FUNCTIONS.update(dict.fromkeys(types, function))
        return function

    return register


@_node("UNETLoader", "UnetLoaderGGUF", "UnetLoaderGGUFAdvanced")
def _load_denoiser(at: At) -> Model:
    return Model(at.file("unet_name", "diffusion_models"))


@_node("CheckpointLoaderSimple")
def _load_checkpoint(at: At) -> tuple[Model, Encoder, Decoder]:
    file = at.file("ckpt_name", "checkpoints")
    return Model(file), Encoder((file,)), Decoder(file)


@_node("CLIPLoader", "CLIPLoaderGGUF")
def _load_encoder(at: At) -> Encoder:
    return Encoder((at.file("clip_name", "text_encoders"),))


@_node("DualCLIPLoader", "DualCLIPLoaderGGUF")
def _load_encoders(at: At) -> Encoder:
    return Encoder((at.file("clip_name1", "text_encoders"), at.file("clip_name2", "text_encoders")))


@_node("VAELoader")
def _load_decoder(at: At) -> Decoder:
    return Decoder(at.file("vae_name", "vae"))


@_node("CLIPVisionLoader")
def _load_vision(at: At) -> Vision:
    return Vision(at.file("clip_name", "clip_vision"))


@_node("CLIPVisionEncode")
def _encode_vision(at: At) -> Vision | None:
    return at.maybe("clip_vision", Vision)


@_node("LoraLoader", "LoraLoaderModelOnly")
def _load_lora(at: At) -> tuple[Model, Any]:
    return _with_lora(at, at.take("model", Model), at("lora_name"), at.number("strength_model", 1.0)), at("clip")


@_node("Power Lora Loader (rgthree)")
def _load_loras(at: At) -> tuple[Model, Any]:
    model = at.take("model", Model)
    for name in at.node.inputs:
        entry = at(name)
        if isinstance(entry, Mapping) and entry.get("on") is True and isinstance(entry.get("lora"), str):
            strength = entry.get("strength", 1.0)
            if not is_number(strength):
                strength = Unknown(at.node, f"has {repr_value(strength)} as a strength")
            model = _with_lora(at, model, entry["lora"], strength)
    return model, at("clip")


def _with_lora(at: At, model: Model, name: Any, strength: float | Unknown) -> Model:
    """Return a model with one more LoRA, or the model itself if the strength is 0."""
    if isinstance(strength, Unknown):
        at.reader.problems.append(strength)
    elif round(strength, 6):
        return replace(model, loras=(*model.loras, (at.file_of(name, "lora_name", "loras"), round(strength, 6))))
    return model


@_node("ModelSamplingSD3", "ModelSamplingAuraFlow")
def _shift(at: At) -> Model:
    return replace(at.take("model", Model), shift=_rounded(at.number("shift")))


def _rounded(number: float | Unknown) -> float | Unknown:
    return number if isinstance(number, Unknown) else round(float(number), 6)


@_node("PathchSageAttentionKJ", "ModelPatchTorchSettings", "TorchCompileModel")
def change_speed(at: At) -> Model:
    """Describe a model that a node makes faster in ComfyUI.

    Args:
        at: The node.
    """
    model = at.take("model", Model)
    return replace(model, notes=(*model.notes, f"{at.node} changes only the speed in ComfyUI, and is left out"))


@_node("CFGZeroStar")
def _cfg_zero(at: At) -> Model:
    model = with_settings(at.take("model", Model), guidance_rule="cfg-zero:zero_steps=0")
    note = f"{at.node} scales clean latents, and cfg-zero here the prediction of the network: close, and not the same"
    return replace(model, notes=(*model.notes, note))


@_node("EasyCache")
def _easy_cache(at: At) -> Model:
    model = at.take("model", Model)
    note = f"{at.node} is left out, because its threshold has another meaning here: give --cache easycache to use one"
    return replace(model, notes=(*model.notes, note))


def with_settings(model: Model, **settings: Any) -> Model:
    """Add settings of a video to a model.

    Args:
        model: The model.
        settings: Settings by name.
    """
    return replace(model, settings={**model.settings, **settings})


@_node("CLIPTextEncode")
def _encode_text(at: At) -> Condition:
    return Condition(at.text("text"), at.maybe("clip", Encoder), at.node)


@_node("ConditioningZeroOut")
def _zero(at: At) -> Condition:
    return replace(at.take("conditioning", Condition), text=None, node=at.node)


def condition(inputs: Mapping[str, str], needed: str | None = None) -> Callable[[At], Any]:
    """Return the function of a node that conditions a video on pictures.

    Args:
        inputs: The names of the node's pictures, each with the name of wanjax's input.
        needed: A picture without which the node is of no use.
    """

    def describe(at: At) -> tuple[Condition, Condition, Latents, int]:
        pictures = {ours: at(theirs) for theirs, ours in inputs.items() if at.has(theirs)}
        positive, negative = at.take("positive", Condition), at.take("negative", Condition)
        strength = at.number("strength", 1.0)
        if isinstance(strength, Unknown):
            at.reader.problems.append(strength)
        elif round(strength, 6) != 1:
            at.reader.problems.append(Unknown(at.node, f"has the strength {strength:g}, and wanjax has only 1"))
        if needed and not at.has(needed):
            raise MissingInput(at.node, needed)
        vision = at.maybe("clip_vision_output", Vision) or at.maybe("clip_vision_start_image", Vision)
        if vision:
            pictures["vision"] = vision
        return (
            replace(positive, inputs=pictures, node=at.node),
            replace(negative, inputs=pictures, node=at.node),
            Latents(_shape(at), at.node),
            0,
        )

    return describe


def _shape(at: At) -> Shape:
    width, height = at.integer("width"), at.integer("height")
    return Shape(width, height, at.integer("length", 1), at.integer("batch_size", 1))


@_node("EmptyLatentImage")
def empty_latents(at: At) -> Latents:
    """Describe latents without pictures.

    Args:
        at: The node.
    """
    return Latents(_shape(at), at.node)


def image_latents(at: At) -> Latents:
    """Describe latents that may have a first picture in them.

    Args:
        at: The node.
    """
    return Latents(_shape(at), at.node, {"image": at("start_image")} if at.has("start_image") else {})


@_node("VAEEncode")
def _encode(at: At) -> Latents | Unknown:
    clip = at.take("pixels", Pictures)
    if not clip.is_loaded or clip.frames == 1:
        return Unknown(at.node, "encodes something else than a clip from a file, which wanjax cannot start from")
    shape = Shape(*(side_of(at, clip, name) for name in ("width", "height", "frames")))
    return Latents(shape, at.node, {VIDEO.name: clip})


@_node("TrimVideoLatent")
def _trim(at: At) -> Any:
    return at("samples")  # the pipeline removes the latents of reference pictures itself


@_node("KSampler")
def _sample(at: At) -> Sampled:
    steps = Steps(at.text("scheduler"), at.integer("steps"), denoise=at.number("denoise", 1.0))
    return _sampled(at, _guider(at), steps, Sampler(at.text("sampler_name")), Noise(at.integer("seed", 0)))


@_node("KSamplerAdvanced")
def _sample_part(at: At) -> Sampled:
    steps = Steps(
        at.text("scheduler"), at.integer("steps"), at.integer("start_at_step", 0), at.integer("end_at_step", 10_000)
    )
    noise = Noise(at.integer("noise_seed", 0) if at("add_noise", "enable") == "enable" else None)
    is_finished = at("return_with_leftover_noise", "disable") == "disable"
    return _sampled(at, _guider(at), steps, Sampler(at.text("sampler_name")), noise, is_finished)


@_node("SamplerCustom")
def _sample_custom(at: At) -> tuple[Sampled, Sampled]:
    noise = Noise(at.integer("noise_seed", 0) if at("add_noise", True) is True else None)
    latents = _sampled(at, _guider(at), at.take("sigmas", Steps), at.take("sampler", Sampler), noise)
    return latents, latents


@_node("SamplerCustomAdvanced")
def _sample_advanced(at: At) -> tuple[Sampled, Sampled]:
    guider, noise = at.take("guider", Guider), at.take("noise", Noise)
    latents = _sampled(at, guider, at.take("sigmas", Steps), at.take("sampler", Sampler), noise)
    return latents, latents


@_node("CFGGuider")
def _guider(at: At) -> Guider:
    return Guider(
        at.take("model", Model),
        at.take("positive", Condition),
        at.maybe("negative", Condition),
        _rounded(at.number("cfg", 1.0)),
    )


def _sampled(at: At, guider: Guider, steps: Steps, sampler: Sampler, noise: Noise, is_finished: bool = True) -> Sampled:
    return Sampled(at.node, guider, steps, sampler, noise, at.take("latent_image", AnyLatents), is_finished)


@_node("BasicGuider")
def _basic_guider(at: At) -> Guider:
    return Guider(at.take("model", Model), at.take("conditioning", Condition), None, 1.0)


@_node("RandomNoise")
def _noise(at: At) -> Noise:
    return Noise(at.integer("noise_seed", 0))


@_node("DisableNoise")
def _no_noise(at: At) -> Noise:
    return Noise(None)


@_node("KSamplerSelect")
def _sampler(at: At) -> Sampler:
    return Sampler(at.text("sampler_name"))


@_node("BasicScheduler")
def _schedule(at: At) -> Steps:
    return Steps(
        at.text("scheduler"), at.integer("steps"), denoise=at.number("denoise", 1.0), model=at.maybe("model", Model)
    )


@_node("SplitSigmas")
def _split(at: At) -> tuple[Steps, Steps] | Unknown:
    steps, number = at.take("sigmas", Steps), at.integer("step")
    if isinstance(number, Unknown):
        return number
    return replace(steps, end=steps.start + number), replace(steps, start=steps.start + number)


@_node("LoadImage")
def _load_image(at: At) -> tuple[Pictures, Unknown]:
    file = at.file("image", INPUT)
    return Pictures(file, at.node, frames=1), Unknown(at.node, "loads a mask with a picture: save it as a picture")


@_node("LoadImageMask")
def _load_mask(at: At) -> Pictures:
    return Pictures(at.file("image", INPUT), at.node, frames=1)


@_node("ImageToMask", "MaskToImage")
def _as_mask(at: At) -> Pictures | Unknown:
    pictures = at("image" if at.has("image") else "mask")
    if not isinstance(pictures, Pictures) or pictures.latents is not None:
        return Unknown(at.node, "is not known to wanjax, unless it has a file")
    return pictures


@_node("LoadVideo")
def _load_video(at: At) -> Film:
    file = at.file("file", INPUT)
    return Film(Pictures(file, at.node), measured(at, file, "fps"), at.node)


@_node("VHS_LoadVideo")
def _load_clip(at: At) -> tuple[Pictures, Any, None, None]:
    file = at.file("video", INPUT)
    width, height = (at.integer(f"custom_{side}", 0) or None for side in ("width", "height"))
    frames = at.integer("frame_load_cap", 0) or None
    if skipped := at.integer("skip_first_frames", 0):
        at.reader.problems.append(
            skipped if isinstance(skipped, Unknown) else Unknown(at.node, f"skips the first {skipped} frames of a clip")
        )
    if rate := at.number("force_rate", 0):
        at.reader.problems.append(
            rate if isinstance(rate, Unknown) else Unknown(at.node, f"changes a clip to {rate:g} frames per second")
        )
    return Pictures(file, at.node, width, height, frames), measured(at, file, "frames"), None, None


def measured(at: At, file: File, name: str) -> Any:
    """Return a number of a file, or `Unknown` if the file is missing.

    Args:
        at: A node.
        file: The picture or clip.
        name: The name of the field of `MediaSize`.
    """
    size = at.reader.measure(file)
    if size is None:
        return Unknown(file.node, f"loads {shown(base_name(file.name))}, which is missing", is_missing_file=True)
    return getattr(size, name)


@_node("GetVideoComponents")
def _components(at: At) -> tuple[Pictures, None, Any]:
    film = at.take("video", Film)
    return film.pictures, None, film.fps


@_node("GetImageSize")
def _size(at: At) -> tuple[Any, Any, Any]:
    pictures = at.reader.require(at("image"), Pictures)
    return side_of(at, pictures, "width"), side_of(at, pictures, "height"), side_of(at, pictures, "frames")


def side_of(at: At, pictures: Pictures | None, name: str) -> Any:
    """Return the width, height or number of frames of pictures, or `Unknown`.

    Args:
        at: The node that asks.
        pictures: The pictures.
        name: The name of the field.
    """
    value = pictures and getattr(pictures, name)
    if value is None and pictures is not None and pictures.file is not None:
        return measured(at, pictures.file, name)
    return Unknown(at.node, "measures pictures that other nodes compose") if value is None else value


def _resized(at: At, pictures: Pictures, compute: Callable[[int, int], tuple[int, int]]) -> Pictures:
    """Return pictures of the size that a function computes from their size."""
    width, height = side_of(at, pictures, "width"), side_of(at, pictures, "height")
    if isinstance(width, Unknown) or isinstance(height, Unknown):
        unknown = width if isinstance(width, Unknown) else height
        return replace(pictures, width=unknown, height=unknown)
    width, height = compute(width, height)
    return replace(pictures, width=max(1, width), height=max(1, height))


@_node("ImageScale")
def _scale(at: At) -> Any:
    pictures, width, height = at("image"), at.integer("width"), at.integer("height")
    if not isinstance(pictures, Pictures) or isinstance(width, Unknown) or isinstance(height, Unknown):
        return replace(pictures, width=width, height=height) if isinstance(pictures, Pictures) else pictures
    if not width and not height:
        return pictures
    resized = pictures if width and height else _resized(at, pictures, lambda *sides: _fitted(sides, width, height))
    return replace(resized, width=width or resized.width, height=height or resized.height)


@_node("ImageResizeKJv2")
def _resize_in_proportion(at: At) -> Any:
    pictures, mode = at("image"), at("keep_proportion", "stretch")
    width, height, divisor = at.integer("width"), at.integer("height"), at.integer("divisible_by", 1)
    if not isinstance(pictures, Pictures):
        return pictures
    if isinstance(width, Unknown) or isinstance(height, Unknown) or isinstance(divisor, Unknown):
        resized = replace(pictures, width=width, height=height)
    elif mode == "total_pixels":
        unknown = Unknown(at.node, "resizes by the number of pixels, which is only known when it runs")
        resized = replace(pictures, width=unknown, height=unknown)
    elif width and height and mode != "resize":
        resized = replace(pictures, width=width, height=height)
    elif mode in ("stretch", "crop"):
        resized = _resized(at, pictures, lambda *sides: (width or sides[0], height or sides[1]))
    elif width or height:
        resized = _resized(at, pictures, lambda *sides: _fitted(sides, width, height))
    else:
        resized = pictures
    if isinstance(divisor, int) and divisor > 1:
        resized = _resized(at, resized, lambda *sides: (sides[0] - sides[0] % divisor, sides[1] - sides[1] % divisor))
    return resized, resized.width, resized.height, None


def _fitted(sides: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Return the largest size in a frame that has the proportion of a size. A side of 0 does not bound it."""
    factor = min(limit / side for limit, side in zip((width, height), sides, strict=True) if limit)
    return round(sides[0] * factor), round(sides[1] * factor)


@_node("ImageScaleBy")
def _scale_by(at: At) -> Any:
    pictures, factor = at("image"), at.number("scale_by", 1.0)
    if not isinstance(pictures, Pictures):
        return pictures
    if isinstance(factor, Unknown):
        return replace(pictures, width=factor, height=factor)
    return _resized(at, pictures, lambda width, height: (round(width * factor), round(height * factor)))


@_node("ResizeImageMaskNode")
def _resize(at: At) -> Any:
    pictures = at("input")
    if not isinstance(pictures, Pictures):
        return pictures
    if at("resize_type") == "scale dimensions":
        return replace(pictures, width=at.integer("resize_type.width"), height=at.integer("resize_type.height"))
    unknown = Unknown(at.node, f"resizes by {repr_value(at('resize_type'))}, which is only known when it runs")
    return replace(pictures, width=unknown, height=unknown)


@_node("ImageFromBatch")
def _frames_of(at: At) -> Pictures | Unknown:
    pictures, first = at("image"), at.integer("batch_index", 0)
    if not isinstance(pictures, Pictures) or isinstance(first, Unknown):
        return first if isinstance(first, Unknown) else pictures
    if first and pictures.latents is None:
        return Unknown(at.node, "takes frames from the middle of a clip")
    return replace(pictures, frames=at.integer("length", 1), skipped=pictures.skipped + first)


@_node("VAEDecode", "VAEDecodeTiled")
def _decode(at: At) -> Pictures:
    return Pictures(
        None,
        at.node,
        latents=at.take("samples", AnyLatents),
        is_tiled=at.node.type == "VAEDecodeTiled",
        decoder=at.maybe("vae", Decoder),
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
def _value(at: At) -> Any:
    return at("value")


@_node("StringConstantMultiline")
def _constant_text(at: At) -> str | Unknown:
    return at.text("string")


@_node("StringConcatenate")
def _join(at: At) -> str | Unknown:
    texts = []
    for name in ("string_a", "delimiter", "string_b"):
        if isinstance(text := at.text(name), Unknown):
            return text
        texts.append(text)
    if sum(map(len, texts)) > MAX_TEXT:
        raise WanjaxError(f"{at.node} joins texts to more than {MAX_TEXT:,} characters: shorten them")
    return "".join(texts)


@_node("ComfyMathExpression")
def _compute(at: At) -> tuple[float, int, bool] | Unknown:
    values: dict[str, float] = {}
    for name in at.node.inputs:
        letter = name.removeprefix("values.")
        if letter == name or (value := at(name)) is None:
            continue
        if isinstance(value := value if isinstance(value, bool) else at.number(name), Unknown):
            return value
        values[letter] = value
    expression = at.text("expression")
    if isinstance(expression, Unknown):
        return expression
    result = arithmetic.compute(expression, values)
    return float(result), int(result), bool(result)


@_node("ComfyNumberConvert")
def _convert(at: At) -> tuple[float, int] | Unknown:
    number = at.number("value")
    return number if isinstance(number, Unknown) else (float(number), int(number))


@_node("ComfySwitchNode")
def _switch(at: At) -> Any:
    switch = at("switch", False)
    if isinstance(switch, Unknown) and switch.is_missing_file:
        values = [at(name) for name in ("on_true", "on_false")]
        if all(isinstance(value, Pictures) and value.latents is not None for value in values) and (
            values[0].latents == values[1].latents
        ):
            return values[0]  # of the same video
    if not isinstance(switch, bool):
        return switch if isinstance(switch, Unknown) else Unknown(at.node, "has a switch that is neither on nor off")
    return at("on_true" if switch else "on_false")


@_node("CreateVideo")
def _create(at: At) -> Film:
    return Film(at.take("images", Pictures), at.number("fps", 24.0), at.node)


@_node("SaveVideo")
def _save(at: At) -> Film:
    return at.take("video", Film)


@_node("SaveWEBM", "SaveAnimatedWEBP", "SaveAnimatedPNG")
def _save_pictures(at: At) -> Film:
    return Film(at.take("images", Pictures), at.number("fps", 16.0), at.node)


@_node("VHS_VideoCombine")
def _combine(at: At) -> Film:
    return Film(at.take("images", Pictures), at.number("frame_rate", 16.0), at.node)


@_node("SaveImage", "PreviewImage")
def _save_frames(at: At) -> Film:
    return Film(at.take("images", Pictures), None, at.node)
