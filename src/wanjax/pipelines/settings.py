# SPDX-License-Identifier: Apache-2.0
"""The settings of a video, defined once.

The fields of `Settings` define the command's options, the keys of TOML files, the server's fields, the entries of a
video's metadata and the library's keywords. This module does not import JAX, so that `--help` is quick.
"""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from wanjax.errors import SettingError, WanjaxError, near_names, repr_short
from wanjax.figures import pluralize
from wanjax.layers.precision import PRECISIONS, UNQUANTIZED

if TYPE_CHECKING:
    from wanjax.pipelines.caching.rules import CacheRule
    from wanjax.pipelines.guidance import GuidanceRule

DTYPES = ("bfloat16", "float32")
LOAD_SETTINGS = (
    "model",
    "dtype",
    "vae_dtype",
    "precision",
)  # settings that are fixed when a model is loaded; a video cannot change them
RESIZE_MODES = ("crop", "pad", "stretch")
MAX_NUMBER_LENGTH = 40  # characters
MAX_SIDE = 16_384  # pixels
MAX_GUIDANCE_SCALE = 100  # far above useful values
MAX_FLOW_SHIFT = 100  # far above useful values
SEED_BITS = 64
SEED_RANGE = re.compile(r"\s*(\d{1,20})(?:\.\.(\d{1,20}))?\s*", re.ASCII)  # a seed, or the first and the last seed
WIDTH_BY_HEIGHT = re.compile(r"\s*(\d{1,6})\s*[x×*]\s*(\d{1,6})\s*", re.IGNORECASE)  # in pixels
SIZE_NAME = re.compile(r"\d{1,6}p|portrait|square")
REFERENCE_IMPLEMENTATIONS = ("official", "diffusers")
COMFY = "comfy"
COMFY_SCHEDULES = {
    "simple": COMFY,
    "normal": "comfy-normal",
    "sgm_uniform": "comfy-sgm-uniform",
    "beta": "comfy-beta",
    "karras": "comfy-karras",
    "exponential": "comfy-exponential",
    "kl_optimal": "comfy-kl-optimal",
    "linear_quadratic": "comfy-linear-quadratic",
}
"""The values of `sigmas` for schedules of ComfyUI, by their names there."""
SIGMA_SCHEDULES = (*REFERENCE_IMPLEMENTATIONS, *COMFY_SCHEDULES.values())
RNGS = ("jax", TORCH := "torch")  # generators of noise
NO_MARGINS = "0,0,0,0"  # the order of the margins in `outpaint`
SEAM_SETTINGS = ("overlap", "match")  # settings without effect on a video of one window
MATCH_CHOICES = ("none", MATCH_COLOUR := "colour")  # the properties that a window can match to the previous window
RANDOM_SEED = -1  # a seed of -1 means: draw a seed at random
MAX_VIDEOS = 100_000  # the maximum number of videos of one call or command
TYPE_NAMES = {str: "a text in UTF-8", bool: "true or false", int: "a whole number", float: "a finite number"}
SomeSettings = TypeVar("SomeSettings", bound="Settings")


class Setting(NamedTuple):
    """A setting: its type, help text and allowed values.

    Args:
        name: The name in Python, in TOML files and in requests.
        kind: The type of its values.
        help: The help text, for the command, the web page and Python's `help`.
        group: The section of the command's help that lists it; None if the command has no such option.
        metavar: The placeholder for a value in the command's help.
        minimum: The lower bound of a number.
        exclusive_minimum: A lower bound that is not allowed itself.
        maximum: The upper bound of a number.
        choices: The allowed values; empty if all values within the bounds are allowed.
        example: A value that error messages give as an example.
        multiple: True if a command accepts the option more than once.
        aliases: The names of this setting in other libraries.
        convert: A function that parses a text, or several texts, into the value; None for plain texts and numbers.
    """

    name: str
    kind: type
    help: str = ""
    group: str | None = None
    metavar: str = ""
    minimum: float = -math.inf
    exclusive_minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    example: Any = None
    multiple: bool = False
    aliases: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None

    @property
    def allowed_values(self) -> str:
        """The allowed values, in words, for an error message."""
        if self.choices:
            return " or ".join(self.choices)
        minimum, maximum = f"{self.minimum:.15g}", f"{self.maximum:.15g}"
        has_minimum, has_maximum = self.minimum > -math.inf, self.maximum < math.inf
        if self.exclusive_minimum > -math.inf:
            bounds = f" above {self.exclusive_minimum:.15g}" + (f" and at most {maximum}" if has_maximum else "")
        elif has_minimum:
            bounds = f" from {minimum} to {maximum}" if has_maximum else f" of at least {minimum}"
        else:
            bounds = f" of at most {maximum}" if has_maximum else ""
        example = "" if self.example is None else f", such as {self.example}"
        return f"{TYPE_NAMES[self.kind]}{bounds}{example}"

    def read(self, value: Any) -> Any:
        """Convert a value from Python, NumPy, JSON or TOML to the setting's type.

        Raises SettingError for a value of another type or out of range.
        """
        if self.convert:
            try:
                return self.convert(value)
            except WanjaxError as error:
                raise SettingError(str(error), self.name) from error
        converted = self._convert(value)
        is_allowed = converted in self.choices if self.choices else converted is not None
        if isinstance(converted, int | float):
            is_allowed = self.minimum <= converted <= self.maximum and self.exclusive_minimum < converted < math.inf
        if not is_allowed:
            raise SettingError(f"{self.name} must be {self.allowed_values}, got {repr_short(value)}", self.name)
        return converted

    def parse(self, text: Any) -> Any:
        """Parse a text, such as a form's field, as the setting's type; convert other values as `read` does.

        Raises SettingError for a value of another type or out of range.
        """
        if not isinstance(text, str) or self.kind is str or len(text) > MAX_NUMBER_LENGTH:
            return self.read(text)
        if self.kind is bool:
            return self.read({"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text))
        try:
            value = self.kind(text)
        except ValueError:
            value = text
        is_number = not isinstance(value, float) or math.isfinite(value)
        return self.read(value if is_number else text)  # a message quotes the text, such as 1e400

    def _convert(self, value: Any) -> Any:
        """Convert a value to the setting's type; return None for a value of another type."""
        if self.kind is bool:
            return bool(value) if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool" else None
        if self.kind is int:
            return to_int(value)
        if self.kind is float:
            return float(value) if not isinstance(value, bool) and isinstance(value, Real) else None
        return str(value) if is_text(value) else None  # a plain str, not a subclass such as `ExtendedPrompt`


ALLOW_EMPTY = Setting("allow_empty_prompt", bool)
"""The field of a request that permits an empty prompt. By default an empty prompt is an error, because it is usually a
mistake, such as a shell variable that is not set."""


def setting(help: str = "", *, default: Any = dataclasses.MISSING, **attributes: Any) -> Any:
    """Define a field of the dataclass `Settings`.

    Args:
        help: The help text.
        default: The default of all models. Without it, each model sets its own default.
        attributes: Other fields of `Setting`.
    """
    return field(default=default, metadata={"help": help, **attributes})


def _parse_cache_rule(value: Any) -> "CacheRule":
    from wanjax.pipelines.caching.rules import cache_rule  # imported late for a quick --help

    return cache_rule(value)


def read_lines(value: Any) -> str:
    """Join a list of texts, or the JSON of such a list, to one text with a line for each. Return another text
    unchanged. Raise WanjaxError for other values."""
    texts = value if isinstance(value, list | tuple) else [value]
    if len(texts) == 1 and isinstance(texts[0], str) and texts[0].lstrip().startswith("["):  # the field of a form
        with suppress(ValueError, RecursionError):
            if isinstance(listed := json.loads(texts[0]), list) and all(map(is_text, listed)):
                texts = listed
    if not all(map(is_text, texts)):
        raise WanjaxError(f"the prompts of later windows must be a text or a list of texts, got {repr_short(value)}")
    lines = texts[0].splitlines() if len(texts) == 1 else [" ".join(text.splitlines()) for text in texts]
    return "\n".join(line.strip() for line in lines if line.strip())


def read_margins(value: Any) -> str:
    """Return four numbers of pixels as a text such as "120,0,120,0"; raise WanjaxError for other values.

    Args:
        value: The pixels at the left, the top, the right and the bottom.
    """
    texts = [part.strip() for part in value.split(",")] if is_text(value) else []
    if len(texts) != 4 or not all(re.fullmatch(r"\d{1,5}", text, re.ASCII) and int(text) <= MAX_SIDE for text in texts):
        raise WanjaxError(
            f"outpaint must be four whole numbers of pixels up to {MAX_SIDE}, left, top, right and bottom, such as "
            f"120,0,120,0, got {repr_short(value)}"
        )
    return ",".join(str(int(text)) for text in texts)


def _parse_guidance_rule(value: Any) -> "GuidanceRule":
    from wanjax.pipelines.guidance import guidance_rule  # imported late for a quick --help

    return guidance_rule(value)


def read_seed(value: Any) -> int:
    """Check a seed; return RANDOM_SEED for "random" and -1; raise WanjaxError for other values."""
    number = RANDOM_SEED if isinstance(value, str) and value == "random" else to_int(value)
    if number is None or not (number == RANDOM_SEED or 0 <= number < 2**SEED_BITS):
        raise WanjaxError(
            f"the seed must be a whole number from 0 to 2^{SEED_BITS} - 1, or random or -1 to draw one, "
            f"got {repr_short(value)}"
        )
    return number


def read_seeds(text: str) -> list[int]:
    """Parse a list of seeds such as "1,5,8..11"; raise WanjaxError if it is malformed or too long."""
    ranges = [_parse_seed_range(part, text) for part in text.split(",")]
    if (total := sum(each_range.stop - each_range.start for each_range in ranges)) > MAX_VIDEOS:
        raise WanjaxError(f"{text[:80]} lists {total:,} seeds: give at most {MAX_VIDEOS:,} seeds")
    return [read_seed(seed) for seed in dict.fromkeys(seed for each_range in ranges for seed in each_range)]


def _parse_seed_range(part: str, text: str) -> range:
    """Parse one item of a list of seeds: a seed, or a range of seeds. Raise WanjaxError if it is malformed."""
    if (match := SEED_RANGE.fullmatch(part)) is None:
        if dashed := re.fullmatch(r"(\d+)\s*-\s*(\d+)", part.strip()):
            raise WanjaxError(f"the range of seeds {part.strip()} has a dash: give {dashed[1]}..{dashed[2]}")
        raise WanjaxError(f"seeds must be a list of whole numbers and ranges such as 1,5,8..11, got {text[:80]!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise WanjaxError(f"the range of seeds {part.strip()} runs backwards: give {last}..{first}")
    return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a video.

    The defaults are the values that the model's authors recommend. A setting that a model does not have is None.
    `size` is (height, width) in pixels.
    """

    model: str = setting(aliases=("pretrained_model_name_or_path",))
    prompt: str
    original_prompt: str = setting("The prompts before a language model extended them, one per line.", default="")
    negative_prompt: str = setting(
        "What the video should not show.", group="text", metavar="TEXT", aliases=("negative", "n_prompt")
    )
    height: int = setting("Height in pixels.", group="shape", metavar="N", maximum=MAX_SIDE)
    width: int = setting("Width in pixels.", group="shape", metavar="N", maximum=MAX_SIDE)
    frames: int = setting(
        "Number of frames.",
        group="shape",
        metavar="4n+1",
        maximum=100_000,
        aliases=("num_frames", "frame_num", "length", "segment_frame_length"),
    )
    windows: int = setting(
        "Make a longer video of N windows, each of the given number of frames. A window starts from the last frames "
        "of the previous window, so the model must take a first image or a control clip. Window n uses the seed plus "
        "n - 1.",
        default=1, group="windows", metavar="N", minimum=1, maximum=1000,
    )  # fmt: skip
    overlap: int = setting(
        "Number of frames that a window shares with the previous window: 1 for models that take a first image, more "
        "for models that take a control clip.",
        default=1, group="windows", metavar="N", minimum=1, aliases=("prev_segment_conditioning_frames",),
    )  # fmt: skip
    match: str = setting(
        "What to match in the frames that two windows share: colour matches brightness, contrast and hue. With none, "
        "these drift in long videos.",
        default="none", group="windows", choices=MATCH_CHOICES,
    )  # fmt: skip
    then: str = setting(
        "Prompt of the next part (window) of a long video; by default the prompt stays the same. Give several for "
        "later windows, or one line per window.",
        default="", convert=read_lines, multiple=True, group="windows", metavar="TEXT",
    )  # fmt: skip
    clip_prompt: str | None = setting(
        "Description of the driving clip, for models that follow a clip.", default=None, group="text", metavar="TEXT"
    )
    fps: int = setting(
        "Frames per second.", group="denoising", metavar="N", minimum=1, maximum=240, aliases=("frame_rate",)
    )
    steps: int = setting(
        "Number of denoising steps.",
        group="denoising", metavar="N", minimum=1, maximum=1_000_000,
        aliases=("num_inference_steps", "sample_steps", "num_steps"),
    )  # fmt: skip
    guidance_scale: float = setting(
        "Strength of classifier-free guidance, away from the negative prompt and towards the prompt; 1 turns "
        "guidance off.",
        group="denoising", metavar="X", minimum=0, maximum=MAX_GUIDANCE_SCALE, example=5,
        aliases=("guidance", "cfg", "cfg_scale", "guide_scale"),
    )  # fmt: skip
    guidance_scale_2: float | None = setting(
        "Guidance scale of the second expert, which runs the steps at low noise.  [default: the first expert's]",
        default=None, group="denoising", metavar="X", minimum=0, maximum=MAX_GUIDANCE_SCALE, example=3,
    )  # fmt: skip
    boundary: float | None = setting(
        "Noise level at which the second expert takes over; noise levels fall from 1 to 0.",
        default=None, group="denoising", metavar="X", minimum=0, maximum=1, example=0.875, aliases=("boundary_ratio",),
    )  # fmt: skip
    boundary_step: int | None = setting(
        "Number of steps that the first expert takes, at any noise level. A number above 0 replaces the boundary.",
        default=None, group="denoising", metavar="N", minimum=0, maximum=1_000_000, example=2,
        aliases=("boundary_step_index",),
    )  # fmt: skip
    strength: float = setting(
        "How much to change the input video: the fraction of the steps that run, from 0 to 1.",
        group="denoising", metavar="X", exclusive_minimum=0, maximum=1, example=0.8, aliases=("denoise",),
    )  # fmt: skip
    dynamic_guidance: bool | None = setting(
        "Vary the guidance scale over the steps along a cosine, for models that support it.",
        default=None, group="denoising", aliases=("use_dynamic_cfg",),
    )  # fmt: skip
    guidance_rule: "GuidanceRule" = setting(  # noqa: RUF009
        "Method that replaces classifier-free guidance: cfg-zero, apg or nag. nag uses the negative prompt even at a "
        "guidance scale of 1. Parameters follow a colon, as in nag:scale=11. With each method, skip=9+10 also guides "
        "away from a prediction without blocks 9 and 10.  [default: none]",
        default="none", convert=_parse_guidance_rule, group="denoising", metavar="NAME",
    )  # fmt: skip
    flow_shift: float | None = setting(
        "Shift of the noise schedule; above 1, more steps run at high noise.",
        default=None, group="denoising", metavar="X", exclusive_minimum=0, maximum=MAX_FLOW_SHIFT, example=5,
        aliases=("shift", "sample_shift"),
    )  # fmt: skip
    follow: str = setting(
        "Implementation to follow if the model's authors (official) and diffusers differ.  [default: official]",
        default="official", group="denoising", choices=REFERENCE_IMPLEMENTATIONS,
    )  # fmt: skip
    sigmas: str | None = setting(
        "Noise levels of the model's authors (official), of diffusers or of ComfyUI. comfy is ComfyUI's schedule "
        "simple, and comfy-NAME is ComfyUI's schedule NAME.  [default: the value of --follow]",
        default=None, group="denoising", choices=SIGMA_SCHEDULES,
    )  # fmt: skip
    cache: "CacheRule" = setting(  # noqa: RUF009
        "Reuse results of earlier steps, which is faster and changes the video. The caches are magcache, teacache, "
        "easycache, deepcache and guidance. Parameters follow a colon, as in magcache:0.06,2,0.2 or "
        "teacache:0.1,mode=plain. auto selects the best cache for the model.  [default: none]",
        default="none", convert=_parse_cache_rule, group="denoising", metavar="NAME",
    )  # fmt: skip
    seed: int = setting(
        "Seed of the noise; random or -1 draws a seed and stores it in the metadata.  [default: 42]",
        convert=read_seed, group="denoising", metavar="N", example=42,
    )  # fmt: skip
    rng: str = setting(
        "Generator of the noise. torch draws the same numbers as torch's generator on a CPU. ComfyUI uses this "
        "generator, and diffusers uses it with generator=torch.Generator().manual_seed(N). wanjax cannot reproduce "
        "the numbers of torch's generator on a GPU.  [default: jax]",
        default="jax", group="denoising", choices=RNGS,
    )  # fmt: skip
    dtype: str = setting(
        "Data type in which the networks compute.  [default: float32 on a CPU, otherwise the type of the weights]",
        group="compute", choices=DTYPES, metavar="DTYPE", aliases=("torch_dtype",),
    )  # fmt: skip
    vae_dtype: str = setting(
        "Data type in which the autoencoder computes; bfloat16 is faster and needs less memory.",
        default="float32", group="compute", choices=DTYPES, metavar="DTYPE",
    )  # fmt: skip
    precision: str = setting(
        "Quantize the transformer's weights to 8 bits. int8 and fp8 also quantize the inputs of matrix products; "
        "int8-weights and fp8-weights do not.  [default: none, or as the checkpoint is stored]",
        default=UNQUANTIZED.name, group="compute", choices=tuple(PRECISIONS), metavar="NAME",
    )  # fmt: skip
    resize: str = setting(
        "How to fit pictures to the video's size if their proportions differ.", group="pictures", choices=RESIZE_MODES
    )
    outpaint: str | None = setting(
        "Pixels that the model adds around the clip: left, top, right and bottom, as in 120,0,120,0. The model must "
        "take a mask.",
        default=None, convert=read_margins, group="pictures", metavar="L,T,R,B",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Convert each value to its setting's type; raise WanjaxError for a value of another type or out of range."""
        if original_prompt := getattr(self.prompt, "original", ""):  # of `extend_prompt`
            object.__setattr__(self, "original_prompt", original_prompt)
        for name, one_setting in schema(type(self)).items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, one_setting.read(value))

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def margins(self) -> tuple[int, ...]:
        """The pixels that are added at the left, the top, the right and the bottom of a clip."""
        return tuple(map(int, (self.outpaint or NO_MARGINS).split(",")))

    @property
    def length(self) -> int:
        """The number of frames of the whole video, with all windows."""
        return total_frames(self.frames, self.windows, self.overlap)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each window."""
        lines = [self.prompt, *self.then.splitlines()]
        return [lines[min(index, len(lines) - 1)] for index in range(self.windows)]

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """The guidance scale of each expert."""
        return tuple(scale for scale in (self.guidance_scale, self.guidance_scale_2) if scale is not None)

    @property
    def guided(self) -> bool:
        """True if at least one step also runs the negative prompt."""
        return max(self.guidance_scales) > 1

    @property
    def can_split_prompts(self) -> bool:
        """True if a mesh may run the two prompts of a step on different devices."""
        return self.guided and not self.cache.needs_separate_forwards

    def to_json(self) -> dict[str, Any]:
        """Convert the settings to JSON, without the settings that the model does not have."""
        values = {name: getattr(self, name) for name in schema(type(self))}
        return {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items() if v is not None}

    def updated(self: SomeSettings, values: Mapping[str, Any]) -> SomeSettings:
        """Return a copy with some settings replaced. Unknown names and values that are None are ignored.

        Args:
            values: Values by name.

        Raises:
            WanjaxError: A value has another type or is out of range.
        """
        names = schema(type(self))
        return dataclasses.replace(self, **{k: v for k, v in values.items() if k in names and v is not None})

    def check(self, *, spatial: int, temporal: int) -> None:
        """Raise WanjaxError unless the size and the number of frames fit a model.

        Args:
            spatial: Height and width must be multiples of this number of pixels.
            temporal: The number of frames must be `temporal`·n + 1.
        """
        check_shape(self.height, self.width, self.frames, spatial=spatial, temporal=temporal)

    @property
    def steps_with_strength(self) -> int:
        """The number of steps that run when the video starts from an input video; raises WanjaxError if it is 0."""
        if not (steps := int(self.steps * self.strength)):
            min_strength = math.ceil(1000 / self.steps) / 1000
            min_steps = math.ceil(1 / self.strength)
            min_steps += int(min_steps * self.strength) < 1  # 49 * (1 / 49) is below 1 in floating point
            raise WanjaxError(
                f"a strength of {self.strength} leaves none of {pluralize(self.steps, 'step')}: give at least "
                f"{pluralize(min_steps, 'step')}, or a strength of {min_strength:g} or more"
            )
        return steps


def check_prompt_count(then: str, windows: int) -> None:
    """Raise SettingError if a video has more prompts than windows.

    Args:
        then: The prompts of the windows after the first, `Settings.then`.
        windows: The number of windows.
    """
    if (count := 1 + len(then.splitlines())) > windows:
        problem = f"{pluralize(count, 'prompt')} are given for {pluralize(windows, 'window')}"
        raise SettingError(f"{problem}: give at least {count} windows", "windows")


def total_frames(frames: int, windows: int = 1, overlap: int = 1) -> int:
    """Count the frames of a whole video. Each window after the first adds its frames minus the overlap."""
    return frames + (windows - 1) * (frames - overlap)


@cache
def schema(settings_type: type[Settings]) -> Mapping[str, Setting]:
    """Return the settings that a class defines, by name, in the order of their definition."""
    return {x.name: Setting(x.name, _value_type(x.type), **x.metadata) for x in dataclasses.fields(settings_type)}


def _value_type(annotation: Any) -> type:
    """Return the type of a field's values.

    For a step cache or a guidance rule it is `str`, because users give it as text.
    """
    kind = next(iter(get_args(annotation)), annotation)
    return kind if kind in TYPE_NAMES else str


def check_shape(height: int, width: int, frames: int, *, spatial: int, temporal: int) -> None:
    """Raise SettingError unless height and width are multiples of `spatial`, and frames are `temporal`·n + 1."""
    sides = {"height": height, "width": width}
    if invalid_sides := {name: pixels for name, pixels in sides.items() if pixels <= 0 or pixels % spatial}:
        names, got_text = (" and ".join(map(str, texts)) for texts in (invalid_sides, invalid_sides.values()))
        multiple = f"multiples of {spatial}" if len(invalid_sides) > 1 else f"a multiple of {spatial}"
        valid = ", and ".join(
            f"{_nearest_valid(pixels, spatial, 0)} for {name}" for name, pixels in invalid_sides.items()
        )
        raise SettingError(
            f"{names} must be {multiple} above 0, got {got_text}: give {valid}", next(iter(invalid_sides))
        )
    if frames <= 0 or (frames - 1) % temporal:
        valid = _nearest_valid(frames, temporal, 1)
        raise SettingError(f"the number of frames must be {temporal}n + 1, got {frames}: give {valid}", "frames")


def parse_size(size: Any, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Convert a size to the settings `height` and `width`.

    Args:
        size: (height, width), a text WIDTHxHEIGHT, or a name in `sizes`.
        sizes: The model's sizes, (height, width) by name.

    Raises:
        WanjaxError: The size has none of these forms.
    """
    pair = (parse_pixels(size) or sizes.get(size)) if isinstance(size, str) else size
    if pair is None:
        height, width = next(iter(sizes.values()), (480, 832))
        raise SettingError(
            f"the model has no size {repr_short(size)}: give {', '.join(sizes)}, or pixels such as {width}x{height}",
            "size",
        )
    if isinstance(pair, tuple | list) and len(pair) == 2:
        height, width = (to_int(side) for side in pair)
        if height is not None and width is not None:
            return {"height": height, "width": width}
    raise WanjaxError(f"size must be (height, width), such as (480, 832), got {repr_short(size)}")


def parse_pixels(text: str) -> tuple[int, int] | None:
    """Parse a size such as 832x480, width first, to (height, width); return None for any other text."""
    match = WIDTH_BY_HEIGHT.fullmatch(text)
    return (int(match[2]), int(match[1])) if match else None


def read_size(text: str) -> tuple[int, int] | str:
    """Parse a size such as 832x480 to (height, width). Return the name of a size unchanged.

    Raise SettingError otherwise.
    """
    if (size := parse_pixels(text)) is None and not SIZE_NAME.fullmatch(text):
        forms = "WIDTHxHEIGHT, such as 832x480, or the name of a size, such as square"
        raise SettingError(f"size must be {forms}, got {repr_short(text)}", "size")
    return size or text


def seams_without_windows(option: str, windows: str, name: str) -> SettingError:
    """Create the error for a setting of the seams between windows, for a video that has one window.

    Args:
        option: The setting as the user writes it.
        windows: The setting `windows` as the user writes it.
        name: The setting.
    """
    message = f"{option} joins the windows of a long video: give {windows} 2 or more, or leave {option} out"
    return SettingError(message, name)


def strength_without_video(strength: float) -> SettingError:
    """Create the error for a strength without an input video."""
    return SettingError(f"a strength of {strength} needs an input video: give a video too, or no strength", "strength")


def missing_setting(name: str, model: str | None, settings: Iterable[str]) -> SettingError:
    """Create the error for a setting that a model does not have.

    Args:
        name: The setting.
        model: The model.
        settings: The names of the model's settings.
    """
    similar = near_names(name, settings, 1)
    advice = f"did you mean {similar[0]}?" if similar else "leave it out, or choose a model that has it"
    return SettingError(f"{model} has no setting {name}: {advice}", name)


def to_int(value: Any) -> int | None:
    """Convert an integer of Python or NumPy to an int; return None for any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_text(text: Any) -> bool:
    """Return True if a value is a text that UTF-8 can encode; a command line may hold other bytes."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nearest_valid(value: int, unit: int, offset: int) -> str:
    """Name the valid values that are nearest to an invalid value."""
    lower = (value - offset) // unit * unit + offset
    return f"{lower} or {lower + unit}" if lower > 0 else f"{unit if offset == 0 else offset}"
