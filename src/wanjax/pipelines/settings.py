# SPDX-License-Identifier: Apache-2.0
"""The settings of a video, each described once.

The command's options, TOML files, the server's fields, records that are read back and the keywords of the library all
come from the fields of `Settings`. JAX is not imported here, so that `--help` is quick.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from wanjax.errors import SettingError, WanjaxError, near_names, repr_short
from wanjax.figures import quantity

if TYPE_CHECKING:
    from wanjax.pipelines.caching.rules import CacheRule
    from wanjax.pipelines.guidance import GuidanceRule

DTYPES = ("bfloat16", "float32")
LOADED = ("model", "dtype", "vae_dtype")  # settings that loading decides; a video cannot change them
RESIZES = ("crop", "pad", "stretch")
LONGEST_NUMBER = 40  # characters
LARGEST_SIDE = 16_384  # pixels
MOST_GUIDANCE = 100  # far beyond use
MOST_SHIFT = 100  # far beyond use
SEED_BITS = 64
SEEDS = re.compile(r"\s*(\d{1,20})(?:\.\.(\d{1,20}))?\s*", re.ASCII)  # one, or from the first to the last
PIXELS = re.compile(r"\s*(\d{1,6})\s*[x×*]\s*(\d{1,6})\s*", re.IGNORECASE)  # width and height
SIZE_NAME = re.compile(r"\d{1,6}p|portrait|square")
WAYS = ("official", "diffusers")
DRAW = -1  # in place of a seed: draw one
MOST_VIDEOS = 100_000  # of one call or command
KINDS = {str: "a text in UTF-8", bool: "true or false", int: "a whole number", float: "a finite number"}
SomeSettings = TypeVar("SomeSettings", bound="Settings")


class Setting(NamedTuple):
    """A setting: its type, its help, and the values that it may have.

    Args:
        name: Its name in Python, in TOML files and in requests.
        kind: The type of its values.
        help: What it does, in a sentence, for the command, the page and `help`.
        group: The section of the command's help that shows it. None leaves the option out.
        metavar: What stands for a value in the command's help.
        least, above, most: The bounds of a number: from, above and at most.
        choices: The values that it may have, if they are few.
        usual: A value that a message gives as an example.
        several: Whether a command takes it more than once.
        aliases: Its names in other libraries.
        convert: Returns the value for a text, where that is neither a text nor a number, or for several texts.
    """

    name: str
    kind: type
    help: str = ""
    group: str | None = None
    metavar: str = ""
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    usual: Any = None
    several: bool = False
    aliases: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None

    @property
    def allowed(self) -> str:
        """The values that it may have, in words."""
        if self.choices:
            return " or ".join(self.choices)
        bounds = [f"above {self.above:.15g}"] * (self.above > -math.inf)
        bounds += [f"from {self.least:.15g} on"] * (self.least > -math.inf)
        bounds += [f"at most {self.most:.15g}"] * (self.most < math.inf)
        usual = "" if self.usual is None else f", such as {self.usual}"
        return " ".join([KINDS[self.kind], *filter(None, [" and ".join(bounds)])]) + usual

    def read(self, value: Any) -> Any:
        """Return a value of Python, NumPy, JSON or TOML as the setting's own type.

        Raises SettingError for a value of another type or out of range.
        """
        if self.convert:
            try:
                return self.convert(value)
            except WanjaxError as error:
                raise SettingError(str(error), self.name) from error
        typed = self._typed(value)
        within = typed in self.choices if self.choices else typed is not None
        if isinstance(typed, int | float):
            within = self.least <= typed <= self.most and self.above < typed < math.inf
        if not within:
            raise SettingError(f"{self.name} is given as {repr_short(value)}: give {self.allowed}", self.name)
        return typed

    def parse(self, text: Any) -> Any:
        """Return the value in a text, such as a form's, as the setting's own type; other values as `read` does.

        Raises SettingError for a value of another type or out of range.
        """
        if not isinstance(text, str) or self.kind is str or len(text) > LONGEST_NUMBER:
            return self.read(text)
        if self.kind is bool:
            return self.read({"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text))
        try:
            value = self.kind(text)
        except ValueError:
            value = text
        return self.read(value)

    def _typed(self, value: Any) -> Any:
        """Return a value as the setting's type; None for a value of another type."""
        if self.kind is bool:
            return bool(value) if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool" else None
        if self.kind is int:
            return whole(value)
        if self.kind is float:
            return float(value) if not isinstance(value, bool) and isinstance(value, Real) else None
        return str(value) if is_text(value) else None  # not of a subclass, such as that of `extend_prompt`


ALLOW_EMPTY = Setting("allow_empty_prompt", bool)
"""The field of a request that makes an empty prompt no mistake: most of them are a variable that was not set."""


def setting(help: str = "", *, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """Return a field of settings: its help, its default if every model has the same, and other fields of `Setting`."""
    return field(default=default, metadata={"help": help, **more})


def _cache(value: Any) -> "CacheRule":
    from wanjax.pipelines.caching.rules import cache_rule  # imported late for a quick --help

    return cache_rule(value)


def read_lines(value: Any) -> str:
    """Return a text or a list of texts as the lines of one text; raise WanjaxError for other values."""
    texts = value if isinstance(value, list | tuple) else [value]
    if not all(map(is_text, texts)):
        raise WanjaxError(f"later prompts are given as {repr_short(value)}: give a text, or a list of texts")
    lines = texts[0].splitlines() if len(texts) == 1 else [" ".join(text.splitlines()) for text in texts]
    return "\n".join(line.strip() for line in lines if line.strip())


def _rule(value: Any) -> "GuidanceRule":
    from wanjax.pipelines.guidance import guidance_rule  # imported late for a quick --help

    return guidance_rule(value)


def read_seed(value: Any) -> int:
    """Return a seed, or DRAW for "random" and -1; raise WanjaxError for other values."""
    number = DRAW if isinstance(value, str) and value == "random" else whole(value)
    if number is None or not (number == DRAW or 0 <= number < 2**SEED_BITS):
        raise WanjaxError(
            f"the seed is given as {repr_short(value)}: give a whole number from 0 to 2^{SEED_BITS} - 1, or random, "
            "which draws one"
        )
    return number


def read_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as "1,5,8..11"; raise WanjaxError for another, and for too many of them."""
    ranges = [_range(part, text) for part in text.split(",")]
    if (total := sum(each.stop - each.start for each in ranges)) > MOST_VIDEOS:
        raise WanjaxError(f"the seeds {text[:80]} are {total:,} where {MOST_VIDEOS:,} are the most")
    return [read_seed(seed) for seed in dict.fromkeys(seed for some in ranges for seed in some)]


def _range(part: str, text: str) -> range:
    """Return the seeds of a part of a list; raise WanjaxError where it is none."""
    if (bounds := SEEDS.fullmatch(part)) is None:
        raise WanjaxError(f"the seeds {text[:80]!r} are no list of whole numbers such as 1,5,8..11")
    first, last = int(bounds[1]), int(bounds[2] or bounds[1])
    if last < first:
        raise WanjaxError(f"the seeds {part.strip()} end before they begin: {last}..{first} are in order")
    return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a video.

    The defaults are those that a model's authors recommend; None stands for a setting that a model does not have.
    `size` is (height, width) in pixels.
    """

    model: str = setting(aliases=("pretrained_model_name_or_path",))
    prompt: str
    original_prompt: str = setting("The prompts that a language model extended, one in a line.", default="")
    negative_prompt: str = setting(
        "What the video should not show.", group="text", metavar="TEXT", aliases=("negative", "n_prompt")
    )
    height: int = setting("Height in pixels.", group="shape", metavar="N", most=LARGEST_SIDE)
    width: int = setting("Width in pixels.", group="shape", metavar="N", most=LARGEST_SIDE)
    frames: int = setting(
        "Number of frames.", group="shape", metavar="4n+1", most=100_000, aliases=("num_frames", "frame_num", "length")
    )
    windows: int = setting(
        "Make a longer video of N windows, each of so many frames and begun from the last frames of the one before. "
        "For models that take a first picture or a control clip. Window n has the seed of the first plus n - 1.",
        default=1, group="windows", metavar="N", least=1, most=1000,
    )  # fmt: skip
    overlap: int = setting(
        "Frames that a window takes over from the one before: 1 as its first picture, more for a control clip.",
        default=1, group="windows", metavar="N", least=1,
    )  # fmt: skip
    then: str = setting(
        "What the next window shows, if not the same. Give it again for later windows, or a line for each.",
        default="", convert=read_lines, several=True, group="windows", metavar="TEXT",
    )  # fmt: skip
    fps: int = setting("Frames a second.", group="denoising", metavar="N", least=1, aliases=("frame_rate",))
    steps: int = setting(
        "Denoising steps.",
        group="denoising", metavar="N", least=1, most=1_000_000, usual=50,
        aliases=("num_inference_steps", "sample_steps", "num_steps"),
    )  # fmt: skip
    guidance_scale: float = setting(
        "How far to go from the negative prompt to the prompt; 1 is no guidance.",
        group="denoising", metavar="X", least=0, most=MOST_GUIDANCE, usual=5,
        aliases=("cfg", "cfg_scale", "guide_scale"),
    )  # fmt: skip
    guidance_scale_2: float | None = setting(
        "The same for the second of two experts, which takes the steps of low noise; if missing, the first's.",
        default=None, group="denoising", metavar="X", least=0, most=MOST_GUIDANCE, usual=3,
    )  # fmt: skip
    boundary: float | None = setting(
        "The noise level, from 1 to 0, at which the second expert takes over.",
        default=None, group="denoising", metavar="X", least=0, most=1, usual=0.875, aliases=("boundary_ratio",),
    )  # fmt: skip
    strength: float = setting(
        "How far to go away from the clip that the video begins from: the share of the steps that are taken.",
        group="denoising", metavar="X", above=0, most=1, usual=0.8, aliases=("denoise",),
    )  # fmt: skip
    dynamic_guidance: bool | None = setting(
        "Let the guidance scale follow a cosine over the steps, for models that support it.",
        default=None, group="denoising", aliases=("use_dynamic_cfg",),
    )  # fmt: skip
    guidance_rule: "GuidanceRule" = setting(  # noqa: RUF009
        "Guide by another rule: cfg-zero, apg, or nag, which uses the negative prompt even at a guidance scale of 1. "
        "Settings follow a colon, as in nag:scale=11; none is the default.",
        default="none", convert=_rule, group="denoising", metavar="NAME",
    )  # fmt: skip
    flow_shift: float | None = setting(
        "Shift the steps to high noise, above 1.",
        default=None, group="denoising", metavar="X", above=0, most=MOST_SHIFT, usual=5,
        aliases=("shift", "sample_shift"),
    )  # fmt: skip
    follow: str = setting(
        "Which reference to match where the model's authors and diffusers differ.  [default: official]",
        default="official", group="denoising", choices=WAYS,
    )  # fmt: skip
    sigmas: str | None = setting(
        "The same for the noise levels alone.  [default: the way that is followed]",
        default=None, group="denoising", choices=WAYS,
    )  # fmt: skip
    cache: "CacheRule" = setting(  # noqa: RUF009
        "Reuse values of earlier steps in some steps, which is faster and changes the video: magcache, teacache, "
        "easycache, deepcache or guidance. Settings follow a colon, as in magcache:0.06,2,0.2 or "
        "teacache:0.1,mode=plain; auto is the best for the model, none the default.",
        default="none", convert=_cache, group="denoising", metavar="NAME",
    )  # fmt: skip
    seed: int = setting(
        "Seed of the noise; random or -1 draws one, which the metadata keeps.  [default: 42]",
        convert=read_seed, group="denoising", metavar="N", usual=42,
    )  # fmt: skip
    dtype: str = setting(
        "What the networks compute in, bfloat16 or float32.  [default: float32 on a CPU, else as the weights are kept]",
        group="compute", choices=DTYPES, metavar="DTYPE", aliases=("torch_dtype",),
    )  # fmt: skip
    vae_dtype: str = setting(
        "What the autoencoder computes in; bfloat16 is faster and needs less memory.",
        default="float32", group="compute", choices=DTYPES, metavar="DTYPE",
    )  # fmt: skip
    resize: str = setting(
        "How to bring pictures of other proportions to the video's size.", group="pictures", choices=RESIZES
    )

    def __post_init__(self) -> None:
        """Read each value as its setting's type; raise WanjaxError for one that is of another or out of range."""
        if original := getattr(self.prompt, "original", ""):  # of `extend_prompt`
            object.__setattr__(self, "original_prompt", original)
        for name, field_setting in schema(type(self)).items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, field_setting.read(value))

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def length(self) -> int:
        """The frames of the whole video, of all its windows."""
        return length_of(self.frames, self.windows, self.overlap)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each window."""
        lines = [self.prompt, *self.then.splitlines()]
        return [lines[min(number, len(lines) - 1)] for number in range(self.windows)]

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """The guidance scales that occur in a video's steps."""
        return tuple(scale for scale in (self.guidance_scale, self.guidance_scale_2) if scale is not None)

    @property
    def guided(self) -> bool:
        """True where some step also runs the negative prompt."""
        return max(self.guidance_scales) > 1

    @property
    def split(self) -> bool:
        """True where it helps that a mesh splits the two prompts of a step."""
        return self.guided and not self.cache.apart

    def to_json(self) -> dict[str, Any]:
        """Return the settings that the model has, as JSON."""
        values = {name: getattr(self, name) for name in schema(type(self))}
        return {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items() if v is not None}

    def updated(self: SomeSettings, values: Mapping[str, Any]) -> SomeSettings:
        """Return these settings with the given values; ignore unknown names and values that are None.

        Raises WanjaxError for a value of another type or out of range.

        Args:
            values: Values by name.
        """
        names = schema(type(self))
        return dataclasses.replace(self, **{k: v for k, v in values.items() if k in names and v is not None})

    def check(self, *, spatial: int, temporal: int) -> None:
        """Raise WanjaxError unless sizes and the number of frames fit a model.

        Args:
            spatial: Pixels that each side has to be a multiple of.
            temporal: Frames are this many times n, plus 1.
        """
        check_shape(self.height, self.width, self.frames, spatial=spatial, temporal=temporal)

    @property
    def strong_steps(self) -> int:
        """The number of steps that a given video takes; raises WanjaxError where it is 0."""
        if not (steps := int(self.steps * self.strength)):
            least = math.ceil(1000 / self.steps) / 1000
            raise WanjaxError(
                f"a strength of {self.strength} takes none of {quantity(self.steps, 'step')}: {least} takes one"
            )
        return steps


def length_of(frames: int, windows: int = 1, overlap: int = 1) -> int:
    """Return the frames of a whole video; each window after the first adds its frames after the overlap."""
    return frames + (windows - 1) * (frames - overlap)


@cache
def schema(kind: type[Settings]) -> Mapping[str, Setting]:
    """Return the settings that a class has, by name, in their order."""
    return {x.name: Setting(x.name, _kind(x.type), **x.metadata) for x in dataclasses.fields(kind)}


def _kind(annotation: Any) -> type:
    """Return the type of a field's values, `str` for one that a text names."""
    kind = next(iter(get_args(annotation)), annotation)
    return kind if kind in KINDS else str


def check_shape(height: int, width: int, frames: int, *, spatial: int, temporal: int) -> None:
    """Raise SettingError unless height and width are multiples of `spatial`, and frames are `temporal`·n + 1."""
    for name, pixels in (("height", height), ("width", width)):
        if pixels <= 0 or pixels % spatial:
            legal = _neighbours(pixels, spatial, 0)
            raise SettingError(f"the {name} {pixels} is not a multiple of {spatial} above 0: give {legal}", name)
    if frames <= 0 or (frames - 1) % temporal:
        legal = _neighbours(frames, temporal, 1)
        raise SettingError(f"{frames} frames are not of the form {temporal}n + 1: give {legal}", "frames")


def sides(size: Any, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the height and width of a size: (height, width), WIDTHxHEIGHT, or the name of one of a model's `sizes`.

    Raises WanjaxError for any other value.
    """
    pair = (pixels(size) or sizes.get(size)) if isinstance(size, str) else size
    if pair is None:
        named = ", ".join(sizes)
        height, width = next(iter(sizes.values()), (480, 832))
        raise SettingError(
            f"{repr_short(size)} is no size of the model: give {named}, or pixels such as {width}x{height}", "size"
        )
    if isinstance(pair, tuple | list) and len(pair) == 2:
        height, width = (whole(n) for n in pair)
        if height is not None and width is not None:
            return {"height": height, "width": width}
    raise WanjaxError(f"size is given as {repr_short(size)}: give (height, width), such as (480, 832)")


def pixels(text: str) -> tuple[int, int] | None:
    """Return the height and width of a size such as 832x480, width first; None for another text."""
    match = PIXELS.fullmatch(text)
    return (int(match[2]), int(match[1])) if match else None


def read_size(text: str) -> tuple[int, int] | str:
    """Return the height and width of a size such as 832x480, or the name of a size as it is; raise SettingError."""
    if (size := pixels(text)) is None and not SIZE_NAME.fullmatch(text):
        names = "or a name that the model has, such as square"
        message = f"size is given as {repr_short(text)}: give WIDTHxHEIGHT, such as 832x480, {names}"
        raise SettingError(message, "size")
    return size or text


def no_setting(name: str, model: str | None, settings: Iterable[str]) -> WanjaxError:
    """Return the error for a setting that a model does not have; `settings` are the names of those that it has."""
    near = [f"did you mean {one}?" for one in near_names(name, settings, 1)] or [
        "leave it out, or choose a model that has it"
    ]
    return WanjaxError(f"{name} is no setting of {model}: {near[0]}")


def whole(value: Any) -> int | None:
    """Return a whole number of Python or NumPy as an int, and None for any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_text(text: Any) -> bool:
    """Return whether a value is a text in UTF-8; a command line may hold bytes that are not."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _neighbours(value: int, unit: int, offset: int) -> str:
    """Return the nearest legal values of an illegal one, as text."""
    below = (value - offset) // unit * unit + offset
    return f"{below} or {below + unit}" if below > 0 else f"{unit if offset == 0 else offset}"
