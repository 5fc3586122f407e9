# SPDX-License-Identifier: Apache-2.0
"""The command line's options. An option has one name in all commands; a group of options is a decorator."""

import os
import re
import sys
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wanjax.cli.arguments import complete_files, complete_models, our_name
from wanjax.errors import WanjaxError, choice, repr_short
from wanjax.media.bounds import BOUNDS
from wanjax.media.inputs import IMAGE, INPUTS, InputSpec
from wanjax.pipelines.mesh_sizes import parse_mesh
from wanjax.pipelines.settings import MOST_VIDEOS, Settings, schema
from wanjax.stores.paths import missing_file, parse_path

Decorator = Callable[[Any], Any]


def is_typed(name: str, ctx: click.Context | None = None) -> bool:
    """Return whether a parameter of a command (None is the one that runs, if any) stands on the command line."""
    ctx = ctx or click.get_current_context(silent=True)
    return ctx is not None and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def is_given(name: str) -> bool:
    """Return whether a parameter of the command that runs has a value from the command line or a file."""
    return click.get_current_context().get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def option_of(name: str) -> str:
    """Return the long option by which a parameter of the command that runs is given."""
    return next(x.opts[-1] for x in click.get_current_context().command.params if x.name == name)


SETTINGS = schema(Settings)
COMPILE_CACHE = "wanjax.compile_cache"  # the key, in a command's context, of a cache that is shared
CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": our_name, "max_content_width": 100}


NAMED = {
    "attention": ("auto", "reference", "chunked", "cudnn", "flash_tpu", "splash", "radial", "sla"),
    "cache": ("magcache", "teacache", "easycache", "deepcache", "guidance", "none", "auto"),
    "guidance_rule": ("cfg-zero", "apg", "nag", "none"),
    "scheduler": ("unipc", "euler", "dpm++", "ddim", "dpm", "consistency", "rcm", "rcm-ode"),
}
"""What an option may name before a colon. The tables of these import JAX, for which a mistyped name does not wait."""
WHAT = {"attention": "implementation of attention", "cache": "step cache"}  # in a message, where its name is another


def check_named(option: str, text: str | None) -> None:
    """Raise WanjaxError where an option's text names nothing that there is."""
    name, names = (text or "").partition(":")[0], NAMED[option]
    if text is not None and name not in names:
        what = WHAT.get(option, option.replace("_", " "))
        raise WanjaxError(
            f"--{option.replace('_', '-')} names no {what}, got {repr_short(text)}: {choice(name, names)}"
        )


def check_file(file: Any, advice: str) -> None:
    """Raise WanjaxError, with what to do, where there is no file of a name on this machine."""
    if file is None or str(file) == "-":
        return
    path = parse_path(file)
    if isinstance(path, Path) and not os.path.exists(path):  # which raises nothing for names that are none
        raise WanjaxError(missing_file(path, advice))


def _named(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of an option of `NAMED` as it is, once its name is known.

    A video's metadata may name what another package has registered, so a default from there is checked later.
    """
    name = str(parameter.name)
    if not ctx.resilient_parsing and is_typed(name, ctx):
        check_named(name, value)
    return value


class Workers(click.ParamType):
    """A type of option: reads a number of workers, or the least and the most of them as 1..4."""

    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        bounds = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", str(value), re.ASCII)
        least, most = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (0, 0)
        if not bounds or least > most or (least == 0 < most):
            self.fail(f"{value} is no number of workers: 2 is one, and 1..4 are one to four, by what waits", param, ctx)
        return least, most


def together(*decorators: Decorator) -> Decorator:
    """Join decorators into one; the help lists their options in this order."""
    return lambda command: reduce(lambda inner, decorate: decorate(inner), reversed(decorators), command)


def _prompt(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the prompt: the argument, or the value of the hidden option --prompt; None with --prompts.

    One that is typed, in either way, takes the place of one from a file. An empty one is asked for on a terminal, and
    elsewhere refused, unless it is that of a record or --allow-empty-prompt is given.
    """
    option, allow_empty = ctx.params.pop("prompt_option", None), ctx.params.pop("allow_empty_prompt", False)
    typed = is_typed("prompt", ctx) or option is not None
    if option is not None and is_typed("prompt", ctx) and value != option:
        raise click.UsageError(f"the prompt is given twice, as {value!r} and as --prompt {option!r}: leave one out")
    value = value if option is None or is_typed("prompt", ctx) else option
    if typed and value and os.path.splitext(value)[1] and os.path.isfile(value):  # as of a shell's pattern: *.mp4
        raise click.UsageError(
            f"{value} is a file, and the prompt is expected there: --from, --image and --video take one file each"
        )
    if ctx.resilient_parsing or (value is None and ctx.params.get("prompts") is not None) or (value or "").strip():
        return value
    if allow_empty or (value is not None and not typed):
        return value or ""
    if sys.stdin.isatty() and sys.stderr.isatty():
        return click.prompt("What does the video show?", prompt_suffix=" ", err=True)
    fault = "missing" if value is None else "empty"
    raise click.UsageError(
        f'the prompt is {fault}: `wanjax {ctx.info_name} "a red circle moving right"` has one, and '
        "--allow-empty-prompt makes a video from none"
    )


number = partial(click.option, type=click.IntRange(min=1), metavar="N")
of_file = partial(click.option, metavar="FILE", shell_complete=complete_files)
# options that become a part of another one are eager, and so are read before it
tokens = partial(number, is_eager=True)
of_scripts = partial(click.option, is_eager=True, hidden=True)  # spellings of the scripts before wanjax


def _parts(ctx: click.Context, whole: click.Parameter, *names: str) -> dict[str, Any]:
    """Take the given ones of these options, which become parts of another: this one counts as given too."""
    values = {name: ctx.params.pop(name) for name in names}
    chosen = {name: value for name, value in values.items() if value is not None}
    for name in chosen:
        if (source := ctx.get_parameter_source(name)) and not is_given(str(whole.name)):
            ctx.set_parameter_source(str(whole.name), source)
    return chosen


def _attention(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Return the named implementation with the given tiles and window; None where it is to be chosen."""
    tiles = [f"{k}={v}" for k, v in _parts(ctx, parameter, "block_q", "block_kv", "block_kv_compute").items()]
    tiles += _parts(ctx, parameter, "use_k_smooth").values()
    window = [f"window={size}" for size in _parts(ctx, parameter, "window").values()]
    implied = _parts(ctx, parameter, "use_custom_attention").get("use_custom_attention")
    if implied and value and value.partition(":")[0] != implied:
        raise click.UsageError(
            f"--use-custom-attention is --attention {implied}, and {value} is given: one way is enough"
        )
    name = value or implied or ("flash_tpu" if tiles else "auto")
    text = ("," if ":" in name else ":").join([name, *filter(None, [",".join([*tiles, *window])])])
    if text == "auto":
        return None
    check_named("attention", text)
    from wanjax.kernels.attention import AttentionConfig  # imported late for a quick --help

    return AttentionConfig.parse(text)


def _mesh(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Return the mesh; options of scripts ask for a chosen one, which splits guidance, with `sp` as it was given."""
    parts = _parts(ctx, parameter, "use_dp", "sp_num")
    if parts and value not in (None, "auto"):
        raise click.UsageError(f"--{next(iter(parts)).replace('_', '-')} is given beside --mesh: one way is enough")
    text = f"auto,sp={parts['sp_num']}" if "sp_num" in parts else "auto" if parts else value
    if text is None:
        return None
    return parse_mesh(text)


def _rules(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the rules, which an option of scripts names too."""
    for rules in _parts(ctx, parameter, "use_fsdp").values():
        if value != rules:
            raise click.UsageError(f"--use-fsdp is --rules {rules}, and {value} is given: one way is enough")
    return value


prompt = together(
    click.argument("prompt", required=False, callback=_prompt),
    click.option("--prompt", "prompt_option", hidden=True, is_eager=True),
    click.option(
        "--allow-empty-prompt",
        is_flag=True,
        is_eager=True,
        help="Make a video from an empty prompt, a mistake otherwise.",
    ),
)
seeds = together(
    click.option("--seeds", metavar="LIST", help="Make a video with each of these seeds, such as 0..7 or 1,5,9."),
    number("--count", type=click.IntRange(1, MOST_VIDEOS), help="Make N videos, with seeds from --seed on."),
)
many = together(
    of_file(
        "--prompts",
        is_eager=True,  # before the prompt, which it replaces, is missed
        help="Make a video of each line of FILE, or of standard input for -, in place of PROMPT; a line, or a row of a "
        ".csv or .parquet, may be a whole request.",
    ),
    seeds,
)
ray = click.option(
    "--ray",
    metavar="ADDRESS",
    help="Place the workers in a Ray cluster: auto, HOST:PORT, or local for one that is started on this machine.",
)
database = click.option(
    "--database",
    metavar="PATH|URL",  # not FILE: what names a file is refused where it is a URL
    help="Where requests are kept, for all that share them: a file of SQLite on this machine, or postgresql://... "
    "for many; WANJAX_DATABASE in the environment names it too, and hides its password.  [default: the command's own]",
)


def renamed(old: str, new: str) -> Decorator:
    """Return an option that has another name now; one who gives it is told."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{old} is {new} now: give {new} in its place")

    return click.option(old, hidden=True, expose_value=False, callback=refuse)


dashboard = click.option("--dashboard", is_flag=True, help="Show the dashboard of a Ray cluster on this machine.")


def resources(more: str = "") -> Decorator:
    """Return the option of what a worker is given of a cluster, with more to say of it."""
    return click.option(
        "--resources",
        metavar="LIST",
        help=f"What each worker is given of the cluster, such as cpu=4,gpu=1 or TPU=4{more}.  [default: a host's TPUs, "
        "a graphics card, or a core]",
    )


retries = number(
    "--retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Try N times again where a video fails, or its worker dies.",
)
batch = together(
    click.argument("prompts", metavar="PROMPTS", shell_complete=complete_files),
    number(
        "--workers",
        type=click.IntRange(min=0),
        help="Make N videos at once, each by a worker of its own: a process of this machine, or with --ray an actor of "
        "a cluster; 0 leaves them to `wanjax worker` elsewhere.  [default: this process]",
    ),
    database,
    ray,
    number(
        "--hosts",
        default=1,
        show_default=True,
        help="Make each worker of N hosts together, such as those of a TPU slice; --resources are those of a host.",
    ),
    resources(),
    retries,
    dashboard,
)
working = together(
    database,
    of_file("--dir", "folder", metavar="FOLDER", help="Make the jobs of `wanjax serve`, into its --dir."),
    of_file("-o", "--out", metavar="FOLDER", help="Make the jobs of `wanjax batch`, into its --out."),
    retries,
)
of_model = partial(click.option, "--model", metavar="MODEL", shell_complete=complete_models)
model = of_model(
    default="nano",
    show_default=True,
    help="A name that `wanjax models` lists, an id on the Hugging Face hub, a folder or a file.",
)


def _either_model(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """Return the model, which an option names too; it is nano where none does."""
    other = ctx.params.pop("model_option", None)
    if None not in (value, other) and value != other and is_typed("model_option", ctx):
        raise click.UsageError(f"the model is given as {value} and as --model {other}: one way is enough")
    return value or other or "nano"


model_named = together(
    click.argument("model", required=False, callback=_either_model, shell_complete=complete_models),
    of_model("model_option", is_eager=True, help="The same as MODEL."),
)
model_override = of_model(help="Another model than that of the stage before.")


def setting(name: str) -> Decorator:
    """Return the option of a setting."""
    spec = SETTINGS[name]
    option = f"--{name.replace('_', '-')}"
    if spec.several:
        return click.option(option, multiple=True, metavar=spec.metavar, help=spec.help)
    if spec.kind is bool:
        return click.option(f"{option}/--no-{option[2:]}", default=None, help=spec.help)
    kind = str if name == "seed" else click.Choice(spec.choices) if spec.choices else spec.kind  # or random
    check = _named if name in NAMED else None
    return click.option(option, type=kind, metavar=spec.metavar or None, help=spec.help, callback=check)


def of_group(group: str) -> Decorator:
    """Return the options of a group of settings."""
    return together(*(setting(name) for name, spec in SETTINGS.items() if spec.group == group))


def _max_picture(ctx: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        BOUNDS.pixels = value * 10**6


text = of_group("text")


def of_input(spec: InputSpec) -> Decorator:
    """Return a decorator that gives a command the option of a picture or a clip."""
    more = {"images": " May be given more than once.", "clip": " A folder of pictures is a clip too."}
    return of_file(spec.option, spec.name, multiple=spec.kind == "images", help=spec.help + more.get(spec.kind, ""))


@cache
def input_option(spec: InputSpec) -> click.Parameter:
    """Return the option of a picture or a clip, for a command that is declared without it."""
    return click.command(of_input(spec)(lambda: None)).params[0]


image = of_input(IMAGE)
pictures = together(
    *map(of_input, INPUTS.values()),
    number(
        "--max-picture",
        type=click.IntRange(1, 4000),
        expose_value=False,
        callback=_max_picture,
        help="Million pixels that a given picture may have; a clip may have 16 times as many.  [default: 60]",
    ),
    of_group("pictures"),
)
shape = together(
    click.option(
        "--size",
        metavar="WxH",
        help="Width and height, as in 832x480, or 480p, 720p, portrait or square; `wanjax models NAME` lists the "
        "model's own, and 480p and its like take a given picture's proportions.  [default: the model's, in these]",
    ),
    of_group("shape"),
)
windows = of_group("windows")
denoising = together(
    of_group("denoising"),
    click.option(
        "--scheduler",
        metavar="NAME",
        callback=_named,
        help="Solver in place of the model's own: unipc or dpm++, of the second order or as unipc:order=1, or euler; "
        "consistency, rcm or rcm-ode, which adds no noise, for a model distilled to a few steps, as "
        "consistency:timesteps=1000,757,522 or rcm:sigma_max=200 where its authors have others; ddim or dpm for a "
        "model that predicts v.",
    ),
    click.option(
        "--noise",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Initial noise in place of the seed's: the tensor `noise` of a safetensors file.",
    ),
)
attention = together(
    click.option(
        "--attention",
        metavar="NAME",
        callback=_attention,
        help="Implementation of attention; auto is the best for platform and shape, radial[:DECAY] leaves out the far "
        "places of far frames, and sla[:top=SHARE] is for what learns it or has learnt it.  [default: auto]",
    ),
    tokens("--block-q", help="Queries that flash_tpu's self-attention takes at a time, and flash_tpu for it."),
    tokens("--block-kv", help="Keys that it keeps in a TPU's fast memory at a time."),
    tokens("--block-kv-compute", help="Keys that it goes through in one unrolled body."),
    tokens("--window", help="Tokens before and after its own to which self-attention is confined.  [default: all]"),
    of_scripts("--use-custom-attention", flag_value="flash_tpu", default=None),
    of_scripts("--use-k-smooth", flag_value="center_keys", default=None),
)
lora = of_file(
    "--lora",
    multiple=True,
    metavar="FILE[:X]",
    help="Merge a LoRA into the transformer, at the strength X; may be given more than once. FILE may be "
    "OWNER/NAME/FILE on the hub; of two experts, high=FILE and low=FILE mean one.",
)
extending = together(
    click.option(
        "--extend-prompt",
        metavar="URL",
        help="Let a language model extend the prompt, at an address that answers as OpenAI's chat completions do, "
        "such as http://localhost:11434/v1. WANJAX_EXTEND_KEY in the environment is shown to it. The record keeps "
        "both prompts.",
    ),
    click.option("--extend-model", metavar="NAME", help="The model there.  [default: the name default]"),
)
batch_guidance = click.option(
    "--batch-guidance",
    is_flag=True,
    help="Run prompt and negative prompt as a batch of two: more memory, and on some devices faster.",
)
quoted = click.option(
    "--prompt",
    metavar="TEXT",
    help="A prompt like those to come: some models run another encoder where text is quoted.",
)
offload = click.option(
    "--offload/--no-offload",
    default=None,
    help="Free each network after its stage.  [default: free it; with several videos, where the next would not fit]",
)
verify = click.option(
    "--verify",
    is_flag=True,
    help="Compare the weights of a checkpoint that `wanjax convert` wrote with their checksums before they are loaded.",
)
decoder = click.option(
    "--decoder",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Decode frames by this tiny decoder, a file of TAEHV for the model's latents: quicker, and less exact.",
)
tile = click.option("--tile", is_flag=True, help="Decode frames in tiles, for frames that would not fit.")
compute = together(
    of_group("compute"),
    click.option(
        "--compiler",
        type=click.Choice(["safe", "fast"]),
        show_default="what `wanjax bench` kept for these devices, else safe; for plan safe",
        help="Options of TPUs' compiler: those in wide use, or also those that it prices better and that no chip here "
        "has run. An option that it refuses is left out.",
    ),
)
mesh = together(
    click.option(
        "--mesh",
        metavar="MESH",
        callback=_mesh,
        help="Devices to spread over, as dp=N,sp=N,tp=N or auto; guidance is spread over dp, the sequence over sp, "
        "and heads over tp.  [default: auto, and one on a CPU]",
    ),
    of_scripts("--use-dp", flag_value="auto", default=None),
    of_scripts("--sp-num", type=click.IntRange(min=1)),
)
rules = together(
    click.option(
        "--rules",
        type=click.Choice(["fsdp", "tp", "replicated"]),
        default="fsdp",
        show_default=True,
        callback=_rules,
        help="How weights are spread: gathered as used, by columns and rows, or whole on each.",
    ),
    of_scripts("--use-fsdp", flag_value="fsdp", default=None),
)
chip = click.option(
    "--chip",
    default="v6e-8",
    show_default=True,
    metavar="NAME",
    help="TPUs such as v4-8, v5e-8, v5p-8, v6e-16 or v7x-8; b200, h200, h100, a100, l40s, 4090 or t4, h100-8 for "
    "eight; or cpu.",
)

chip_elsewhere = click.option(
    "--chip",
    metavar="NAME",
    help="Compile for TPUs such as v6e-8, which need not be here, into --compile-cache.  [default: for what is here]",
)


def _compile_cache(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep the shared compile cache, and whether it is trusted, for what is compiled."""
    if value:
        ctx.meta.setdefault(COMPILE_CACHE, {})["name" if parameter.name == "compile_cache" else "trusted"] = value


compile_cache = together(
    click.option(
        "--compile-cache",
        metavar="FOLDER",
        expose_value=False,
        callback=_compile_cache,
        help="Share compiled programs with all who name this folder, s3://BUCKET/NAME or gs://BUCKET/NAME: the first "
        "compiles, and others wait and read. WANJAX_COMPILE_CACHE in the environment names it too.",
    ),
    click.option(
        "--trust-compile-cache",
        is_flag=True,
        expose_value=False,
        callback=_compile_cache,
        help="Say that all who can write there are trusted, since what is read there runs; so does "
        "WANJAX_TRUST_COMPILE_CACHE=1.",
    ),
)
devices = together(
    mesh,
    rules,
    compile_cache,
    click.option(
        "--processes",
        metavar="auto|HOST:PORT,COUNT,INDEX",
        help="Several processes as one, each started with the same command: found by JAX, or told.",
    ),
)
profile = click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write a trace of two steps there, and what a step takes beside what the devices can do.",
)
force = click.option("--force", is_flag=True, help="Make and replace what is there already.")
preview_decoder = click.option(
    "--preview-decoder",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Show previews by this tiny decoder, a file of TAEHV, which are sharper.",
)
preview = together(
    click.option(
        "--preview",
        is_flag=True,
        help="Show at a few steps what the video will be, on a terminal and in a file: preview.png in --dir, or "
        "NAME.preview.png beside the video.",
    ),
    preview_decoder,
)


at = click.option(
    "--at",
    metavar="URL",
    help="Let a running `wanjax serve` make the video, or several. WANJAX_TOKEN in the environment is shown to it.",
)


def folder(default: str | None, default_text: str = "") -> Decorator:
    """Return the option of the stages' folder, with its default or the sentence about it."""
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        default=default,
        show_default=default_text or True,
        metavar="FOLDER",
        help="Where the stages keep their files.",
    )


def out(default: str) -> Decorator:
    """Return the option of the video's name, with a sentence about its default."""
    return of_file(
        "-o",
        "--out",
        show_default=default,
        help="The video: .mp4, .mov, .webm, .gif, .webp, .png for one frame, or a folder of PNG if it has no suffix. "
        "Another one of this name is replaced only with --force.",
    )


def _quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Silence the report, and the bars of the hub's client, which reads the variable when it is imported."""
    if value:
        ctx.obj.quiet = True
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def _verbose(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.with_resource(ctx.obj.print_compilations())


def _reported(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Set the flag of the report that has the parameter's name."""
    setattr(ctx.obj, str(parameter.name), value)


quiet = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_quiet,
    help="Print nothing but the result, and errors.",
)
telling = together(
    quiet,
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_verbose,
        help="Print each program that is compiled or read from the cache, and their number.",
    ),
)
stats = click.option(
    "--stats",
    is_flag=True,
    expose_value=False,
    callback=_reported,
    help="Print where each second went: start, weights, compiling, the work, writing.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
json = click.option(
    "--json",
    "in_json",
    is_flag=True,
    expose_value=False,
    callback=_reported,
    help="Print what was made as a JSON object: its file, its record and the seconds of each stage.",
)
own_folder = folder(None, "in the user's cache, until the video is made")
stage_folder = folder("stage_outputs")
own_out = out("a name of its own in wanjax_videos, or output_video.mp4 in --dir")
folder_out = of_file(
    "-o", "--out", metavar="FOLDER", default="wanjax_videos", show_default=True, help="The folder of the videos."
)
stage_out = out("output_video.mp4 in --dir")
limit = partial(click.option, type=click.IntRange(min=1), show_default=True)
serving = together(
    click.option(
        "--workers",
        type=Workers(),
        metavar="N|MIN..MAX",
        help="Make N videos at once, each by a worker in a process of its own; of MIN to MAX workers as many as there "
        "are videos to make; 0 leaves them to other servers and workers of the database.  [default: one worker in this "
        "process]",
    ),
    renamed("--replicas", "--workers"),
    ray,
    resources(),
    dashboard,
    click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen at."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
    ),
    click.option(
        "--token",
        metavar="TEXT",
        help="What a request has to show; WANJAX_TOKEN in the environment sets it too, and hides it from other users.",
    ),
    click.option(
        "--origin",
        "origins",
        multiple=True,
        metavar="URL",
        help="An address from which the page may be opened, behind a proxy that does not send it as X-Forwarded-Host; "
        "may be given more than once.",
    ),
    of_file(
        "--dir",
        "folder",
        default="wanjax_served",
        show_default=True,
        metavar="FOLDER",
        help="Where videos are kept, for all servers and workers of a database; with --database a store too, "
        "s3://BUCKET/NAME.",
    ),
    database,
    renamed("--table", "--database"),
    limit("--max-queue", default=32, help="Videos that may wait."),
    number(
        "--max-pixels",
        help="Pixels that a video may have, over all frames.  [default: four times those of the model's own video]",
    ),
    limit("--max-steps", default=200, help="Steps that one may take."),
    limit("--max-upload", default=32, help="MiB that a request may have."),
    click.option(
        "--rehearse/--no-rehearse",
        default=True,
        show_default=True,
        help="Load the model and compile its default video's programs at once, or with the first request.",
    ),
)

served = together(
    model,
    attention,
    batch_guidance,
    lora,
    compute,
    devices,
    tile,
    extending,
    decoder,
    click.option(
        "--preview/--no-preview",
        default=True,
        help="Show on the server's page, at a few steps, what a video will be.  [default: preview]",
    ),
    preview_decoder,
    verify,
    telling,
)
"""What a server's videos are made with, by its own worker or another host's."""
video = together(pictures, shape, windows, denoising, lora, attention, batch_guidance, compute)
"""What decides how a video comes out, and what its programs are."""
making = together(model, extending, text, video, devices, tile, decoder, offload)
"""What whole videos are made with, one or many."""
reporting = together(force, verify, telling, stats, json)
"""What is replaced, checked and told by a command that makes a part of a video, or all of it."""
