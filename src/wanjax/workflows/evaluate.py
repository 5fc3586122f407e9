# SPDX-License-Identifier: Apache-2.0
"""Follow a workflow from an output back through its links, and describe what its nodes make.

`FUNCTIONS` has a function for each type of node that any model may have. A family adds those of its own nodes. A
function describes the node's outputs; it computes numbers and texts, and nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from wanjax.errors import WanjaxError
from wanjax.workflows import arithmetic
from wanjax.workflows.graph import Graph, Node, Output, shown
from wanjax.workflows.values import (
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
)

Kind = TypeVar("Kind")
MAX_TEXT = 1_000_000  # characters of a text that nodes join
MAX_NUMBER = 2**64


class MediaSize(NamedTuple):
    """The size of a picture or clip, its number of frames, and its frames per second."""

    width: int
    height: int
    frames: int
    fps: float


class Reader:
    """Describes the outputs of nodes, each once."""

    def __init__(
        self,
        graph: Graph,
        functions: "Mapping[str, Callable[[At], Any]]",
        measure: Callable[[File], MediaSize | None],
    ):
        """Read a graph.

        Args:
            graph: The graph.
            functions: The function for each known type of node.
            measure: Returns the size of a picture or clip, or None if the file is missing.
        """
        self.graph, self.functions, self.measure = graph, functions, measure
        self.problems: list[Unknown] = []
        self._described: dict[str, tuple[Any, ...]] = {}
        self._current: set[str] = set()

    def output(self, output: Output) -> Any:
        """Describe an output of a node. None stands for an output that does not exist."""
        if output.node in self._current:
            raise WanjaxError(f"the nodes of the workflow form a circle at {self.graph.nodes[output.node]}: cut a link")
        if output.node not in self._described:
            if (node := self.graph.nodes.get(output.node)) is None:
                raise WanjaxError(
                    f"the workflow has a link to node {shown(output.node)}, which it lacks: save it again"
                )
            self._current.add(output.node)
            try:
                self._described[output.node] = self._describe(node)
            finally:
                self._current.discard(output.node)
        values = self._described[output.node]
        return values[output.slot] if 0 <= output.slot < len(values) else values[0] if len(values) == 1 else None

    def _describe(self, node: Node) -> tuple[Any, ...]:
        function = self.functions.get(node.type)
        value = Unknown(node) if function is None else function(At(self, node))
        return value if type(value) is tuple else (value,)

    def require(self, value: Any, kind: type[Kind]) -> Kind | None:
        """Return a value of a kind.

        For the output of an unknown node, note the problem, and return what the node itself is given of this kind.
        """
        seen: set[str] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, kind):
                return value
            if isinstance(value, Unknown) and value.node.id not in seen:
                seen.add(value.node.id)
                if value not in self.problems:
                    self.problems.append(value)
                waiting += [self.output(source) for source in value.node.inputs.values() if isinstance(source, Output)]
        return None


class At:
    """A node, and the values of its inputs."""

    def __init__(self, reader: Reader, node: Node):
        self.reader, self.node = reader, node

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return the value of an input, or the default if it is missing."""
        value = self.node.inputs.get(name, default)
        return self.reader.output(value) if isinstance(value, Output) else value

    def has(self, name: str) -> bool:
        return self.node.inputs.get(name) is not None

    def take(self, name: str, kind: type[Kind]) -> Kind:
        """Return an input of a kind. Raises WanjaxError if nothing of this kind is linked."""
        if (value := self.reader.require(self(name), kind)) is None:
            raise MissingInput(self.node, name)
        return value

    def maybe(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return an input of a kind, or None."""
        return self.reader.require(self(name), kind) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number, or `Unknown`."""
        value = self(name, default)
        if isinstance(value, Unknown):
            return value
        if isinstance(value, str):
            value = _to_number(value)
        if not _is_number(value):
            return Unknown(self.node, f"has {_repr(value)} as its {shown(name)}, which is not a number")
        return value

    def integer(self, name: str, default: int | None = None) -> Any:
        """Return a whole number, or `Unknown`."""
        value = self.number(name, default)
        return value if isinstance(value, Unknown) else int(value)

    def text(self, name: str, default: str = "") -> Any:
        """Return a text, or `Unknown`."""
        value = self(name, default)
        return value if isinstance(value, str | Unknown) else Unknown(self.node, f"has no text as its {name}")

    def file(self, name: str, kind: str) -> File:
        """Return the file that a widget names."""
        value = self(name)
        if not isinstance(value, str) or not value:
            raise WanjaxError(f"{self.node} names no file as its {name}: choose one in ComfyUI, and save again")
        return File(value, kind, self.node)


class MissingInput(WanjaxError):
    """An input that must be linked and is not."""

    def __init__(self, node: Node, name: str):
        super().__init__(f"{node} has nothing linked to {name}: link it in ComfyUI, and save again")


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number that is neither infinite nor huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _repr(value: Any) -> str:
    """Return a value as a message shows it. A description of nodes may be too large to be shown."""
    return f"{value!r:.40}" if value is None or isinstance(value, str | int | float) else "something else"


def _to_number(text: str) -> Any:
    try:
        return float(text) if any(letter in text for letter in ".eE") else int(text)
    except ValueError:
        return text


FUNCTIONS: dict[str, Callable[[At], Any]] = {}
"""Describes the outputs of a node, for each type that any model may have."""


def _node(*types: str) -> Callable[[Callable[[At], Any]], Callable[[At], Any]]:
    def register(function: Callable[[At], Any]) -> Callable[[At], Any]:
        FUNCTIONS.update(dict.fromkeys(types, function))
        return function

    return register


# Weights


@_node("UNETLoader", "UnetLoaderGGUF", "UnetLoaderGGUFAdvanced")
def _load_denoiser(at: At) -> Any:
    return Model(at.file("unet_name", "diffusion_models"))


@_node("CheckpointLoaderSimple")
def _load_checkpoint(at: At) -> Any:
    file = at.file("ckpt_name", "checkpoints")
    return Model(file), Encoder((file,)), Decoder(file)


@_node("CLIPLoader", "CLIPLoaderGGUF")
def _load_encoder(at: At) -> Any:
    return Encoder((at.file("clip_name", "text_encoders"),))


@_node("DualCLIPLoader", "DualCLIPLoaderGGUF")
def _load_encoders(at: At) -> Any:
    return Encoder((at.file("clip_name1", "text_encoders"), at.file("clip_name2", "text_encoders")))


@_node("VAELoader")
def _load_decoder(at: At) -> Any:
    return Decoder(at.file("vae_name", "vae"))


@_node("CLIPVisionLoader")
def _load_vision(at: At) -> Any:
    return Vision(at.file("clip_name", "clip_vision"))


@_node("CLIPVisionEncode")
def _encode_vision(at: At) -> Any:
    return at.maybe("clip_vision", Vision) or Vision(None)


@_node("LoraLoader", "LoraLoaderModelOnly")
def _load_lora(at: At) -> Any:
    model, strength = at.take("model", Model), at.number("strength_model", 1.0)
    if isinstance(strength, Unknown):
        at.reader.problems.append(strength)
    elif round(strength, 6):
        model = replace(model, loras=(*model.loras, (at.file("lora_name", "loras"), round(strength, 6))))
    return model, at("clip")


@_node("Power Lora Loader (rgthree)")
def _load_loras(at: At) -> Any:
    model = at.take("model", Model)
    for name in at.node.inputs:
        entry = at(name)
        if isinstance(entry, Mapping) and entry.get("on") is True and isinstance(entry.get("lora"), str):
            strength = entry.get("strength", 1.0)
            if not _is_number(strength):
                at.reader.problems.append(Unknown(at.node, f"has {_repr(strength)} as a strength"))
            elif round(strength, 6):
                lora = File(entry["lora"], "loras", at.node)
                model = replace(model, loras=(*model.loras, (lora, round(strength, 6))))
    return model, at("clip")


# Changes of a model


@_node("ModelSamplingSD3", "ModelSamplingAuraFlow")
def _shift(at: At) -> Any:
    return replace(at.take("model", Model), shift=_rounded(at.number("shift")))


def _rounded(number: Any) -> Any:
    return number if isinstance(number, Unknown) else round(float(number), 6)


@_node(
    "PathchSageAttentionKJ",
    "ModelPatchTorchSettings",
    "TorchCompileModel",
)
def change_speed(at: At) -> Any:
    """Describe a model that a node makes faster in ComfyUI.

    Args:
        at: The node.
    """
    model = at.take("model", Model)
    return replace(model, notes=(*model.notes, f"{at.node} changes only the speed in ComfyUI, and is left out"))


@_node("CFGZeroStar")
def _cfg_zero(at: At) -> Any:
    return with_settings(at.take("model", Model), guidance_rule="cfg-zero")


@_node("EasyCache")
def _easy_cache(at: At) -> Any:
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


# Texts and conditions


@_node("CLIPTextEncode")
def _encode_text(at: At) -> Any:
    return Condition(at.text("text"), at.maybe("clip", Encoder), at.node)


@_node("ConditioningZeroOut")
def _zero(at: At) -> Any:
    return replace(at.take("conditioning", Condition), text=None, node=at.node)


def condition(inputs: Mapping[str, str], needed: str | None = None) -> Callable[[At], Any]:
    """Return the function of a node that conditions a video on pictures.

    Args:
        inputs: The names of the node's pictures, each with the name of wanjax's input.
        needed: A picture without which the node is of no use.
    """

    def describe(at: At) -> Any:
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
        if vision and vision.file:
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
def empty_latents(at: At) -> Any:
    """Describe latents without pictures.

    Args:
        at: The node.
    """
    return Latents(_shape(at), at.node)


def image_latents(at: At) -> Any:
    """Describe latents that may have a first picture in them.

    Args:
        at: The node.
    """
    return Latents(_shape(at), at.node, {"image": at("start_image")} if at.has("start_image") else {})


@_node("TrimVideoLatent")
def _trim(at: At) -> Any:
    return at("samples")  # the pipeline removes the latents of reference pictures itself


# Sampling


@_node("KSampler")
def _sample(at: At) -> Any:
    steps = Steps(at.text("scheduler"), at.integer("steps"), denoise=at.number("denoise", 1.0))
    return _sampled(at, _guider(at), steps, Sampler(at.text("sampler_name")), Noise(at.integer("seed", 0)))


@_node("KSamplerAdvanced")
def _sample_part(at: At) -> Any:
    steps = Steps(
        at.text("scheduler"), at.integer("steps"), at.integer("start_at_step", 0), at.integer("end_at_step", 10_000)
    )
    noise = Noise(at.integer("noise_seed", 0) if at("add_noise", "enable") == "enable" else None)
    is_finished = at("return_with_leftover_noise", "disable") == "disable"
    return _sampled(at, _guider(at), steps, Sampler(at.text("sampler_name")), noise, is_finished)


@_node("SamplerCustom")
def _sample_custom(at: At) -> Any:
    noise = Noise(at.integer("noise_seed", 0) if at("add_noise", True) is True else None)
    latents = _sampled(at, _guider(at), at.take("sigmas", Steps), at.take("sampler", Sampler), noise)
    return latents, latents


@_node("SamplerCustomAdvanced")
def _sample_advanced(at: At) -> Any:
    guider, noise = at.take("guider", Guider), at.take("noise", Noise)
    latents = _sampled(at, guider, at.take("sigmas", Steps), at.take("sampler", Sampler), noise)
    return latents, latents


def _guider(at: At) -> Guider:
    return Guider(
        at.take("model", Model),
        at.take("positive", Condition),
        at.maybe("negative", Condition),
        _rounded(at.number("cfg", 1.0)),
    )


def _sampled(
    at: At, guider: Guider, steps: Steps, sampler: Sampler, noise: Noise, is_finished: bool = True
) -> Sampled | Unknown:
    latents = at.reader.require(at("latent_image"), AnyLatents)
    if latents is None:
        raise MissingInput(at.node, "latent_image")
    return Sampled(at.node, guider, steps, sampler, noise, latents, is_finished)


@_node("CFGGuider")
def _cfg_guider(at: At) -> Any:
    return _guider(at)


@_node("BasicGuider")
def _basic_guider(at: At) -> Any:
    return Guider(at.take("model", Model), at.take("conditioning", Condition), None, 1.0)


@_node("RandomNoise")
def _noise(at: At) -> Any:
    return Noise(at.integer("noise_seed", 0))


@_node("DisableNoise")
def _no_noise(at: At) -> Any:
    return Noise(None)


@_node("KSamplerSelect")
def _sampler(at: At) -> Any:
    return Sampler(at.text("sampler_name"))


@_node("BasicScheduler")
def _schedule(at: At) -> Any:
    return Steps(
        at.text("scheduler"), at.integer("steps"), denoise=at.number("denoise", 1.0), model=at.maybe("model", Model)
    )


@_node("SplitSigmas")
def _split(at: At) -> Any:
    steps, number = at.take("sigmas", Steps), at.integer("step")
    if isinstance(number, Unknown):
        return number, number
    return replace(steps, end=steps.start + number), replace(steps, start=steps.start + number)


# Pictures and clips


@_node("LoadImage")
def _load_image(at: At) -> Any:
    file = at.file("image", "input")
    return Pictures(file, at.node, frames=1), Unknown(at.node, "loads a mask with a picture: save it as a picture")


@_node("LoadImageMask")
def _load_mask(at: At) -> Any:
    return Pictures(at.file("image", "input"), at.node, frames=1)


@_node("ImageToMask", "MaskToImage")
def _as_mask(at: At) -> Any:
    pictures = at("image" if at.has("image") else "mask")
    is_loaded = isinstance(pictures, Pictures) and pictures.file is not None
    return pictures if is_loaded else Unknown(at.node, "is not known to wanjax, unless it has a file")


@_node("LoadVideo")
def _load_video(at: At) -> Any:
    file = at.file("file", "input")
    return Film(Pictures(file, at.node), _measured(at, file, "fps"), at.node)


@_node("VHS_LoadVideo")
def _load_clip(at: At) -> Any:
    file = at.file("video", "input")
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
    return Pictures(file, at.node, width, height, frames), _measured(at, file, "frames"), None, None


def _measured(at: At, file: File, name: str) -> Any:
    """Return a number of a file, or `Unknown` if the file is missing."""
    size = at.reader.measure(file)
    if size is None:
        return Unknown(at.node, f"loads {shown(base_name(file.name))}, which is not in a folder given by --inputs")
    return getattr(size, name)


def base_name(name: str) -> str:
    """Return the last part of a file's name in a workflow, which may come from Windows.

    Args:
        name: The name.
    """
    return PurePosixPath(name.replace("\\", "/").removesuffix(" [input]").removesuffix(" [output]")).name


@_node("GetVideoComponents")
def _components(at: At) -> Any:
    film = at.take("video", Film)
    return film.pictures, None, film.fps


@_node("GetImageSize")
def _size(at: At) -> Any:
    pictures = at.reader.require(at("image"), Pictures)
    if pictures is None:
        return (Unknown(at.node, "measures pictures that other nodes compose"),) * 3
    return tuple(
        getattr(pictures, name)
        if getattr(pictures, name) is not None
        else _measured(at, pictures.file, name)
        if pictures.file
        else Unknown(at.node, "measures pictures that other nodes compose")
        for name in ("width", "height", "frames")
    )


@_node("ImageScale", "ImageResizeKJv2")
def _scale(at: At) -> Any:
    pictures = at("image")
    if not isinstance(pictures, Pictures):
        return pictures
    sides = [at.integer(name) or None for name in ("width", "height")]
    if any(sides):  # a side of 0 then follows from the other
        sides = [side or Unknown(at.node, "resizes by proportion") for side in sides]
    resized = replace(pictures, width=sides[0], height=sides[1])
    return resized, sides[0], sides[1], None


@_node("ResizeImageMaskNode")
def _resize(at: At) -> Any:
    pictures = at("input")
    if not isinstance(pictures, Pictures):
        return pictures
    if at("resize_type") == "scale dimensions":
        return replace(pictures, width=at.integer("resize_type.width"), height=at.integer("resize_type.height"))
    unknown = Unknown(at.node, f"resizes by {_repr(at('resize_type'))}, which is only known when it runs")
    return replace(pictures, width=unknown, height=unknown)


@_node("ImageFromBatch")
def _frames_of(at: At) -> Any:
    pictures, first = at("image"), at.integer("batch_index", 0)
    if not isinstance(pictures, Pictures) or first:
        return pictures if isinstance(pictures, Unknown) else Unknown(at.node, "takes frames from the middle of a clip")
    return replace(pictures, frames=at.integer("length", 1))


@_node("VAEDecode", "VAEDecodeTiled")
def _decode(at: At) -> Any:
    latents = at.reader.require(at("samples"), AnyLatents)
    if latents is None:
        raise MissingInput(at.node, "samples")
    return Pictures(
        None,
        at.node,
        latents=latents,
        is_tiled=at.node.type == "VAEDecodeTiled",
        decoder=at.maybe("vae", Decoder),
    )


# Values


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
def _constant_text(at: At) -> Any:
    return at.text("string")


@_node("StringConcatenate")
def _join(at: At) -> Any:
    parts = [at.text(name) for name in ("string_a", "string_b", "delimiter")]
    if unknown := [part for part in parts if isinstance(part, Unknown)]:
        return unknown[0]
    if sum(map(len, parts)) > MAX_TEXT:
        raise WanjaxError(f"{at.node} joins texts to more than {MAX_TEXT:,} characters: shorten them")
    return parts[2].join(parts[:2])


@_node("ComfyMathExpression")
def _compute(at: At) -> Any:
    values: dict[str, float] = {}
    for name in at.node.inputs:
        letter = name.removeprefix("values.")
        if letter != name and at(name) is not None:
            value = at(name)
            if isinstance(value, Unknown):
                return (value,) * 3
            values[letter] = value if isinstance(value, bool) else at.number(name)
    if unknown := [value for value in values.values() if isinstance(value, Unknown)]:
        return (unknown[0],) * 3
    expression = at.text("expression")
    if isinstance(expression, Unknown):
        return (expression,) * 3
    result = arithmetic.compute(expression, values)
    return float(result), int(result), bool(result)


@_node("ComfyNumberConvert")
def _convert(at: At) -> Any:
    number = at.number("value")
    return (number, number) if isinstance(number, Unknown) else (float(number), int(number))


@_node("ComfySwitchNode")
def _switch(at: At) -> Any:
    switch = at("switch", False)
    if not isinstance(switch, bool):
        return switch if isinstance(switch, Unknown) else Unknown(at.node, "has a switch that is neither on nor off")
    return at("on_true" if switch else "on_false")


# Outputs


@_node("CreateVideo")
def _create(at: At) -> Any:
    return Film(at.take("images", Pictures), at.number("fps", 24.0), at.node)


@_node("SaveVideo")
def _save(at: At) -> Any:
    return at.take("video", Film)


@_node("SaveWEBM", "SaveAnimatedWEBP", "SaveAnimatedPNG")
def _save_pictures(at: At) -> Any:
    return Film(at.take("images", Pictures), at.number("fps", 16.0), at.node)


@_node("VHS_VideoCombine")
def _combine(at: At) -> Any:
    return Film(at.take("images", Pictures), at.number("frame_rate", 16.0), at.node)


@_node("SaveImage", "PreviewImage")
def _save_frames(at: At) -> Any:
    return Film(at.take("images", Pictures), None, at.node)
