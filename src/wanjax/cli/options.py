# SPDX-License-Identifier: Apache-2.0
"""The options of the command line. An option has the same name in all commands. A group of options is a decorator."""

import os
import re
import sys
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wanjax.cli.arguments import complete_files, complete_models, current_option_name
from wanjax.errors import OTHER_SOLVER_NAMES, WanjaxError, repr_short, suggest_choice
from wanjax.layers.offload import Offload
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.inputs import IMAGE, INPUT_SPECS, InputSpec
from wanjax.pipelines.mesh_sizes import parse_mesh
from wanjax.pipelines.settings import MAX_VIDEOS, Settings, schema
from wanjax.stores.paths import missing_file, parse_path

Decorator = Callable[[Any], Any]


def on_command_line(name: str, ctx: click.Context | None = None) -> bool:
    """Whether a parameter is on the command line of `ctx`, by default the context of the running command."""
    ctx = ctx or click.get_current_context(silent=True)
    return ctx is not None and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def is_given(name: str) -> bool:
    """Whether a parameter of the running command has a value from the command line or a file."""
    return click.get_current_context().get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def option_of(name: str) -> str:
    """Return the long option, such as --seed, of a parameter of the running command."""
    return next(
        parameter.opts[-1] for parameter in click.get_current_context().command.params if parameter.name == name
    )


SETTINGS = schema(Settings)
COMPILE_CACHE = "wanjax.compile_cache"  # key of the `meta` of a command's context, for the shared compile cache
CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": current_option_name, "max_content_width": 100}

CHOICES = {
    "attention": ("auto", "reference", "chunked", "cudnn", "flash_tpu", "splash", "radial", "sla"),
    "cache": ("magcache", "teacache", "easycache", "deepcache", "guidance", "none", "auto"),
    "guidance_rule": ("cfg-zero", "apg", "nag", "none"),
    "scheduler": ("unipc", "euler", "dpm++", "ddim", "dpm", "consistency", "rcm", "rcm-ode"),
}
"""Names that an option accepts before a colon. The names are repeated here because the modules that define them import
JAX, and a mistyped name should be reported before JAX is imported."""
CHOICE_DESCRIPTIONS = {
    "attention": "implementation of attention",
    "cache": "step cache",
}  # the words for an option in a message, if they differ from its name


CHOICE_NOTES = {
    "scheduler": " (ddim and dpm are for models that predict v, the others for models that predict a velocity)"
}
"""Text that a message appends to the choices of an option, to say which models can use which choices."""


def check_choice(option: str, text: str | None) -> None:
    """Raise WanjaxError unless the text of an option starts with the name of a choice."""
    name, names = (text or "").partition(":")[0], CHOICES[option]
    if text is not None and name not in names:
        description = CHOICE_DESCRIPTIONS.get(option, option.replace("_", " "))
        is_other_name = option == "scheduler" and name in OTHER_SOLVER_NAMES
        advice = f"did you mean {OTHER_SOLVER_NAMES[name]}?" if is_other_name else suggest_choice(name, names)
        raise WanjaxError(
            f"--{option.replace('_', '-')} got {repr_short(text)}, which names no {description}: "
            f"{advice}"
            f"{CHOICE_NOTES.get(option, '')}"
        )


def check_file(file: Any, advice: str) -> None:
    """Raise WanjaxError, with advice, for a local file that does not exist."""
    if file is None or str(file) == "-":
        return
    path = parse_path(file)
    if isinstance(path, Path) and not os.path.exists(path):  # os.path raises no error for an invalid name
        raise WanjaxError(missing_file(path, advice))


def _check_choice(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check that the value of an option starts with one of its `CHOICES`. A default from a video's metadata is checked
    later, because it may be a name that another package registers.
    """
    name = str(parameter.name)
    if not ctx.resilient_parsing and on_command_line(name, ctx):
        check_choice(name, value)
    return value


class WorkersType(click.ParamType):
    """The click type of an option whose value is a number of workers, or a range such as 1..4."""

    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        bounds = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", str(value), re.ASCII)
        min_workers, max_workers = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (0, 0)
        if not bounds or min_workers > max_workers or (min_workers == 0 < max_workers):
            self.fail(
                f"{value} is not a number of workers: give 2, or 1..4 for one to four by the number of waiting jobs",
                param,
                ctx,
            )
        return min_workers, max_workers


def combine_options(*decorators: Decorator) -> Decorator:
    """Combine decorators into one decorator. The options of the decorators appear in this order in the help."""
    return lambda command: reduce(lambda inner, decorate: decorate(inner), reversed(decorators), command)


PROMPT_LIST_SUFFIXES = (".txt", ".csv", ".json", ".jsonl", ".ndjson", ".parquet")


def _prompt(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the prompt: the argument, or the value of the hidden option --prompt. With --prompts, return None.

    A prompt on the command line replaces a prompt from a file. If the prompt is empty, a terminal asks the user for it.
    Without a terminal, an empty prompt is an error, except from metadata or with --allow-empty-prompt.
    """
    option, allow_empty = ctx.params.pop("prompt_option", None), ctx.params.pop("allow_empty_prompt", False)
    is_on_command_line = on_command_line("prompt", ctx) or option is not None
    if option is not None and on_command_line("prompt", ctx) and value != option:
        raise click.UsageError(f"the prompt is given twice, as {value!r} and as --prompt {option!r}: leave one out")
    value = value if option is None or on_command_line("prompt", ctx) else option
    takes_several = any(parameter.name == "prompts" for parameter in ctx.command.params)
    if (
        is_on_command_line and value and os.path.splitext(value)[1] and os.path.isfile(value)
    ):  # for example because a shell expanded *.mp4
        advice = "give the file to --from, --image or --video"
        if os.path.splitext(value)[1].lower() in PROMPT_LIST_SUFFIXES:
            advice = (
                "give prompts to --prompts, or a workflow to --from" if takes_several else "give one prompt as text"
            )
        raise click.UsageError(f"{value} is a file, but a prompt is expected here: {advice}")
    if is_on_command_line and value == "-" and not ctx.resilient_parsing:
        advice = "give `--prompts -` for a prompt on each line of standard input" if takes_several else "give a prompt"
        raise click.UsageError(f"- is not a prompt: {advice}")
    if ctx.resilient_parsing or (value is None and ctx.params.get("prompts") is not None) or (value or "").strip():
        return value
    if allow_empty or (value is not None and not is_on_command_line):
        return value or ""
    if sys.stdin.isatty() and sys.stderr.isatty():
        return click.prompt("What does the video show?", prompt_suffix=" ", err=True)
    problem = "missing" if value is None else "empty"
    from_pipe = ", or `--prompts -` for one on each line of standard input" if takes_several else ""
    raise click.UsageError(
        f'the prompt is {problem}: give one, as in `wanjax {ctx.info_name} "a red circle moving right"`{from_pipe}, or '
        "--allow-empty-prompt"
    )


number = partial(click.option, type=click.IntRange(min=1), metavar="N")
file_option = partial(click.option, metavar="FILE", shell_complete=complete_files)
# eager: read before the option whose value they complete
tokens = partial(number, is_eager=True)
old_script_option = partial(click.option, is_eager=True, hidden=True)  # options of scripts before wanjax


def _take_part_options(ctx: click.Context, target: click.Parameter, *names: str) -> dict[str, Any]:
    """Remove the options that become parts of `target` from the parameters. Return the removed options that the user
    gave. If there are any, `target` also counts as given."""
    values = {name: ctx.params.pop(name) for name in names}
    present = {name: value for name, value in values.items() if value is not None}
    for name in present:
        if (source := ctx.get_parameter_source(name)) and not is_given(str(target.name)):
            ctx.set_parameter_source(str(target.name), source)
    return present


def _attention(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Parse the implementation of attention, its tiles and its window. None lets the library choose."""
    tiles = [
        f"{k}={v}" for k, v in _take_part_options(ctx, parameter, "block_q", "block_kv", "block_kv_compute").items()
    ]
    tiles += _take_part_options(ctx, parameter, "use_k_smooth").values()
    window = [f"window={size}" for size in _take_part_options(ctx, parameter, "window").values()]
    implied_name = _take_part_options(ctx, parameter, "use_custom_attention").get("use_custom_attention")
    if implied_name and value and value.partition(":")[0] != implied_name:
        raise click.UsageError(
            f"--use-custom-attention means --attention {implied_name}, but --attention is {value}: give one of them"
        )
    name = value or implied_name or ("flash_tpu" if tiles else "auto")
    text = ("," if ":" in name else ":").join([name, *filter(None, [",".join([*tiles, *window])])])
    if text == "auto":
        return None
    check_choice("attention", text)
    from wanjax.kernels.attention import AttentionConfig  # imported late for a quick --help

    return AttentionConfig.parse(text)


def _mesh(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Parse the mesh. The options --use-dp and --sp-num of older scripts mean `auto`; --sp-num also sets the size of
    `sp`."""
    parts = _take_part_options(ctx, parameter, "use_dp", "sp_num")
    if parts and value not in (None, "auto"):
        raise click.UsageError(f"both --{next(iter(parts)).replace('_', '-')} and --mesh: give one of them")
    text = f"auto,sp={parts['sp_num']}" if "sp_num" in parts else "auto" if parts else value
    if text is None:
        return None
    return parse_mesh(text)


def _rules(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the sharding rules. The option --use-fsdp of older scripts also selects them."""
    for rules in _take_part_options(ctx, parameter, "use_fsdp").values():
        if value != rules:
            raise click.UsageError(f"--use-fsdp means --rules {rules}, but --rules is {value}: give one of them")
    return value


prompt = combine_options(
    click.argument("prompt", required=False, callback=_prompt),
    click.option("--prompt", "prompt_option", hidden=True, is_eager=True),
    click.option(
        "--allow-empty-prompt",
        is_flag=True,
        is_eager=True,
        help="Make a video even if the prompt is empty, which is otherwise an error.",
    ),
)
seeds = combine_options(
    click.option("--seeds", metavar="LIST", help="Make a video with each of these seeds, such as 0..7 or 1,5,9."),
    number(
        "--count",
        type=click.IntRange(1, MAX_VIDEOS),
        help="Make N videos. The first video has the seed of --seed, and the seed rises by 1 from video to video.",
    ),
)
many_prompts_options = combine_options(
    file_option(
        "--prompts",
        is_eager=True,  # eager: read before the prompt, because --prompts replaces the prompt
        help="Make a video from each line of FILE, in place of PROMPT. If FILE is -, read standard input. A line of "
        "JSON, or a row of a .csv or .parquet file, may also have settings.",
    ),
    seeds,
)
ray = click.option(
    "--ray",
    metavar="ADDRESS",
    help="Run the workers in a Ray cluster. ADDRESS is HOST:PORT, auto for the cluster that Ray finds, or local to "
    "start a cluster on this machine.",
)


def database(default: str) -> Decorator:
    """Return the option for the database of the jobs. `default` describes the default in the help, if there is one."""
    return click.option(
        "--database",
        metavar="PATH|URL",  # the metavar is not FILE, because an option with FILE refuses URLs
        help="Database of the jobs: an SQLite file on this machine, or postgresql://... for several machines. Commands "
        "with the same database work on the same jobs. The environment variable WANJAX_DATABASE sets the database "
        f"too, and keeps the password out of the command line.{default and f'  [default: {default}]'}",
    )


def renamed(old: str, new: str) -> Decorator:
    """Return a hidden option with an old name. The option only raises an error with the new name."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{old} has been renamed: give {new} in its place")

    return click.option(old, hidden=True, expose_value=False, callback=refuse)


dashboard = click.option("--dashboard", is_flag=True, help="Show the dashboard of a Ray cluster on this machine.")


def resources(extra: str = "") -> Decorator:
    """Return the option for the resources of a worker in a cluster. `extra` is appended to the help's first
    sentence."""
    return click.option(
        "--resources",
        metavar="LIST",
        help=f"Resources of each worker in the cluster, such as cpu=4,gpu=1 or TPU=4{extra}.  [default: a host's TPUs, "
        "a graphics card, or a core]",
    )


retries = number(
    "--retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Try a video again, at most N times, if it fails or its worker dies.",
)
batch = combine_options(
    number(
        "--workers",
        type=click.IntRange(min=0),
        help="Make N videos at once with N workers. A worker is a process of this machine, or with --ray an "
        "actor of a cluster. With 0, only `wanjax worker` on other hosts makes videos.  [default: this "
        "process makes them]",
    ),
    database("a temporary file"),
    ray,
    number(
        "--hosts",
        default=1,
        show_default=True,
        help="Let each worker span N hosts, such as the hosts of a TPU slice. --resources are the resources of one "
        "host.",
    ),
    resources(),
    retries,
    dashboard,
)
worker_command_options = combine_options(
    database(""),
    file_option("--dir", "folder", metavar="FOLDER", help="Make the videos of the `wanjax serve` with this --dir."),
    file_option("-o", "--out", metavar="FOLDER", help="Make the videos of the `wanjax batch` with this --out."),
    retries,
)
model_option_of = partial(click.option, "--model", metavar="MODEL", shell_complete=complete_models)
model = model_option_of(
    default="nano",
    show_default=True,
    help="A name that `wanjax models` lists, an id on the Hugging Face hub, a folder or a file.",
)


def _choose_model(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """Return the model of the argument or of --model. If both are missing, the model is nano."""
    option_value = ctx.params.pop("model_option", None)
    if option_value and value != option_value and on_command_line("model_option", ctx):
        if value is None or not on_command_line("model", ctx):  # an option replaces the model of a file
            ctx.set_parameter_source("model", ParameterSource.COMMANDLINE)
            return option_value
        raise click.UsageError(f"the model is {value} and --model is {option_value}: give one of them")
    return value or option_value or "nano"


model_argument = combine_options(
    click.argument("model", required=False, callback=_choose_model, shell_complete=complete_models),
    model_option_of("model_option", is_eager=True, help="Same as the argument MODEL."),
)
model_override = model_option_of(help="Use another model than the previous stage.")


def setting(name: str) -> Decorator:
    """Return the option for a setting of a video."""
    spec = SETTINGS[name]
    option = f"--{name.replace('_', '-')}"
    if spec.multiple:
        return click.option(option, multiple=True, metavar=spec.metavar, help=spec.help)
    if spec.kind is bool:
        return click.option(f"{option}/--no-{option[2:]}", default=None, help=spec.help)
    # The value of --seed may be the word random
    kind = str if name == "seed" else click.Choice(spec.choices) if spec.choices else spec.kind
    callback = _check_choice if name in CHOICES else None
    return click.option(option, type=kind, metavar=spec.metavar or None, help=spec.help, callback=callback)


def group_options(group: str) -> Decorator:
    """Return the options for all settings in a group."""
    return combine_options(*(setting(name) for name, spec in SETTINGS.items() if spec.group == group))


def _max_picture(ctx: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        MEDIA_LIMITS.max_pixels = value * 10**6


text = group_options("text")


def option_of_input(spec: InputSpec) -> Decorator:
    """Return a decorator that adds the option for an input, which is a picture or a clip."""
    suffix = {"images": " May be given more than once.", "clip": " A folder of pictures also counts as a clip."}
    return file_option(
        spec.option, spec.name, multiple=spec.kind == "images", help=spec.help + suffix.get(spec.kind, "")
    )


@cache
def input_option(spec: InputSpec) -> click.Parameter:
    """Build the option for an input as a parameter, to add it to an existing command."""
    return click.command(option_of_input(spec)(lambda: None)).params[0]


image = option_of_input(IMAGE)
pictures = combine_options(
    *map(option_of_input, INPUT_SPECS.values()),
    number(
        "--max-picture",
        type=click.IntRange(1, 4000),
        expose_value=False,
        callback=_max_picture,
        help="Limit input pictures to N million pixels, and clips to 16 times as many.  [default: 60]",
    ),
    group_options("pictures"),
)
shape = combine_options(
    click.option(
        "--size",
        metavar="WxH",
        help="Width and height, such as 832x480, or the name of a size, such as 480p or square. `wanjax models "
        "NAME` lists the names. With a name, the video has the proportions of the input picture.  "
        "[default: the model's size, in the proportions of the input picture]",
    ),
    group_options("shape"),
)
windows = group_options("windows")
denoising = combine_options(
    group_options("denoising"),
    click.option(
        "--scheduler",
        metavar="NAME",
        callback=_check_choice,
        help="Solver: unipc, dpm++ or euler. For models distilled to a few steps: consistency, rcm or rcm-ode "
        "(rcm-ode adds no noise). For models that predict v: ddim or dpm. Parameters follow a colon, as in "
        "unipc:order=1, consistency:timesteps=1000,757,522 or rcm:sigma_max=200. The default order of unipc and "
        "dpm++ is 2.  [default: the model's]",
    ),
    click.option(
        "--noise",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Read the initial noise from the tensor `noise` of a safetensors file, in place of noise from the seed.",
    ),
)
attention = combine_options(
    click.option(
        "--attention",
        metavar="NAME",
        callback=_attention,
        help="Implementation of attention. auto chooses one by platform and shape. radial[:DECAY] skips distant "
        "positions in distant frames. sla[:top=SHARE] is sparse-linear attention, for training and for models that "
        "were trained with it. flash_tpu:qk=int8 is faster on TPUs but not exact.  [default: auto]",
    ),
    tokens(
        "--block-q", help="Queries that flash_tpu processes at a time in self-attention. This option selects flash_tpu."
    ),
    tokens("--block-kv", help="Keys that flash_tpu holds in a TPU's VMEM at a time."),
    tokens("--block-kv-compute", help="Keys that flash_tpu processes in one unrolled loop body."),
    tokens("--window", help="Limit self-attention to N tokens before and after each token.  [default: all tokens]"),
    old_script_option("--use-custom-attention", flag_value="flash_tpu", default=None),
    old_script_option("--use-k-smooth", flag_value="center_keys", default=None),
)
lora = file_option(
    "--lora",
    multiple=True,
    metavar="FILE[:X]",
    help="Merge a LoRA into the transformer with strength X; may be given more than once. FILE may be "
    "OWNER/NAME/FILE on the hub. For a model with two experts, high=FILE changes only the expert "
    "for high noise, and low=FILE only the expert for low noise.",
)
extending = combine_options(
    click.option(
        "--extend-prompt",
        metavar="URL",
        help="Let a language model extend the prompt. URL is the address of an API like OpenAI's chat "
        "completions, such as http://localhost:11434/v1. The environment variable WANJAX_EXTEND_KEY is "
        "sent as the API's key. The metadata has both prompts.",
    ),
    click.option(
        "--extend-model",
        metavar="NAME",
        help="Name of the language model at the URL of --extend-prompt.  [default: the name `default`]",
    ),
)
batch_guidance = click.option(
    "--batch-guidance",
    is_flag=True,
    help="Compute the prompt and the negative prompt in one batch. The batch takes more memory, and is faster "
    "on some devices.",
)
example_prompt = click.option(
    "--prompt",
    metavar="TEXT",
    help="An example of the prompts that you will use. The example matters only for models that encode quoted text "
    "separately.",
)


def _offload(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Offload | None:
    """Parse the offload; --no-offload means none, and None leaves the choice to the command."""
    for name in _take_part_options(ctx, parameter, "no_offload").values():
        if value is not None:
            raise click.UsageError(f"--no-offload means --offload {name}, but --offload is {value}: give one of them")
        value = name
    return None if value is None else Offload.of(value)


offload = combine_options(
    click.option(
        "--offload",
        metavar="none|stages|blocks[:N]",
        callback=_offload,
        help="Use less of the device's memory. stages frees each network after its stage; --offload without a value "
        "means stages. blocks keeps transformer blocks in the host's memory, and copies N blocks to the device at a "
        "time. With 2, the default, one block computes while the next block is copied. none frees no network.  "
        "[default: stages; with several videos, free a network only if the next network does not fit]",
    ),
    click.option(
        "--no-offload",
        flag_value="none",
        default=None,
        is_eager=True,
        help="Same as --offload none.",
    ),
)
verify = click.option(
    "--verify",
    is_flag=True,
    help="Before loading a checkpoint that `wanjax convert` wrote, compare its weights with their checksums.",
)
decoder = click.option(
    "--decoder",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Decode with the decoder in FILE: a TAEHV file for the model's latents, or LightVAE. Both are faster and less "
    "exact than the model's own decoder.",
)
tile = click.option("--tile", is_flag=True, help="Decode frames in tiles, to save memory.")
compute = combine_options(
    group_options("compute"),
    click.option(
        "--compiler",
        type=click.Choice(["safe", "fast"]),
        show_default="the set that `wanjax bench` saved for these devices, or safe if it saved none; always safe for "
        "plan",
        help="Options of the TPU's compiler. The set safe has options in wide use. The set fast adds options that "
        "make programs faster by the compiler's own estimate; they have not been tested on a TPU. Options that the "
        "compiler rejects are left out.",
    ),
)
mesh = combine_options(
    click.option(
        "--mesh",
        metavar="MESH",
        callback=_mesh,
        help="Mesh of devices, as dp=N,sp=N,tp=N or auto. dp separates the prompt from the negative prompt, "
        "sp splits the sequence, and tp splits the heads.  "
        "[default: auto, and one device on a CPU]",
    ),
    old_script_option("--use-dp", flag_value="auto", default=None),
    old_script_option("--sp-num", type=click.IntRange(min=1)),
)
rules = combine_options(
    click.option(
        "--rules",
        type=click.Choice(["fsdp", "tp", "replicated"]),
        default="fsdp",
        show_default=True,
        callback=_rules,
        help="Sharding of weights. fsdp splits the weights and gathers them before use; tp splits columns and rows; "
        "replicated copies all weights to each device.",
    ),
    old_script_option("--use-fsdp", flag_value="fsdp", default=None),
)
chip = click.option(
    "--chip",
    default="v6e-8",
    show_default=True,
    metavar="NAME",
    help="TPUs such as v4-8, v5e-8, v5p-8, v6e-16 or v7x-8; NVIDIA's cards b200, h200, h100, a100, l40s, 4090 "
    "or t4, such as h100-8 for eight cards; or cpu.",
)

chip_elsewhere = click.option(
    "--chip",
    metavar="NAME",
    help="Compile for TPUs such as v6e-8 and store the programs in --compile-cache. This machine need not have "
    "the TPUs.  [default: this machine]",
)


def _compile_cache(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Save the folder of the shared compile cache in the command's context, and whether the user trusts it."""
    if value:
        ctx.meta.setdefault(COMPILE_CACHE, {})["name" if parameter.name == "compile_cache" else "trusted"] = value


compile_cache = combine_options(
    click.option(
        "--compile-cache",
        metavar="FOLDER",
        expose_value=False,
        callback=_compile_cache,
        help="Share compiled programs with everyone who uses this folder, s3://BUCKET/NAME or gs://BUCKET/NAME. The "
        "first process compiles a program; the other processes wait and read the program. The environment variable "
        "WANJAX_COMPILE_CACHE sets the folder too.",
    ),
    click.option(
        "--trust-compile-cache",
        is_flag=True,
        expose_value=False,
        callback=_compile_cache,
        help="Trust everyone who can write to the compile cache: this command runs programs from the cache, so whoever "
        "can write to the cache can run code on this machine. WANJAX_TRUST_COMPILE_CACHE=1 in the environment does "
        "the same.",
    ),
)
devices = combine_options(
    mesh,
    rules,
    compile_cache,
    click.option(
        "--processes",
        metavar="auto|HOST:PORT,COUNT,INDEX",
        help="Make one video with several processes, each started with the same command. With auto, JAX finds "
        "the other processes.",
    ),
)
profile = click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Trace two steps and write the trace to FOLDER. Also print the seconds of a step, and its operations "
    "per second as a share of the devices' peak.",
)
force = click.option("--force", is_flag=True, help="Replace existing files.")
preview_decoder = click.option(
    "--preview-decoder",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Decode previews with this tiny decoder, a TAEHV file. Such previews are sharper.",
)
preview = combine_options(
    click.option(
        "--preview",
        is_flag=True,
        help="Show previews of the video at a few steps, on a terminal and in a file: preview.png in --dir, or "
        "NAME.preview.png next to the video.",
    ),
    preview_decoder,
)

at = click.option(
    "--at",
    metavar="URL",
    help="Let a running `wanjax serve` make the video or the videos. The environment variable WANJAX_TOKEN is "
    "the server's token.",
)


def folder(default: str | None, default_text: str = "") -> Decorator:
    """Return the option for the folder of the stages' files. `default_text` describes the default in the help."""
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        default=default,
        show_default=default_text or True,
        metavar="FOLDER",
        help="Folder of the stages' files.",
    )


def out(default: str) -> Decorator:
    """Return the option for the name of the video. `default` describes the default in the help."""
    return file_option(
        "-o",
        "--out",
        show_default=default,
        help="The file of the video. The suffix is .mp4, .mov, .webm, .gif or .webp, or .png for a single frame. A "
        "name without a suffix is a folder of PNG files. Missing folders are created. A different video with this "
        "name is replaced only with --force.",
    )


def _quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Silence the report, and the progress bars of the hub's client by an environment variable. The client reads the
    variable when it is imported."""
    if value:
        ctx.obj.quiet = True
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def _verbose(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.with_resource(ctx.obj.print_compilations())


def _set_report_flag(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Set the attribute of the report with the name of the parameter."""
    setattr(ctx.obj, str(parameter.name), value)


quiet = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_quiet,
    help="Print only the result and errors.",
)
verbosity_options = combine_options(
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
    callback=_set_report_flag,
    help="Print the time for startup, weights, compiling, computing and writing, and how much the colours of windows "
    "drift.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
json = click.option(
    "--json",
    "in_json",
    is_flag=True,
    expose_value=False,
    callback=_set_report_flag,
    help="Print the result as a JSON object: the file, its metadata and the seconds of each stage.",
)
run_folder_option = folder(None, "in the user's cache, and removed when the video is complete")
stage_folder = folder("stage_outputs")
out_option = out("a new name in wanjax_videos, or output_video.mp4 in --dir")
folder_out = file_option(
    "-o", "--out", metavar="FOLDER", default="wanjax_videos", show_default=True, help="Folder of the videos."
)
stage_out = out("output_video.mp4 in --dir")
limit = partial(click.option, type=click.IntRange(min=1), show_default=True)
server_options = combine_options(
    click.option(
        "--workers",
        type=WorkersType(),
        metavar="N|MIN..MAX",
        help="Make N videos at once with N workers, each in its own process. With MIN..MAX, the number of "
        "workers follows the number of waiting videos. With 0, other servers and workers of the database "
        "make the videos.  [default: one worker in this process]",
    ),
    renamed("--replicas", "--workers"),
    ray,
    resources(),
    dashboard,
    click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port to listen on; 0 selects a free port.",
    ),
    click.option(
        "--token",
        metavar="TEXT",
        help="Token that requests must contain. The environment variable WANJAX_TOKEN sets the token too, and hides "
        "the token from other users of this machine.",
    ),
    click.option(
        "--origin",
        "origins",
        multiple=True,
        metavar="URL",
        help="Address of the server's page behind a proxy, if the proxy does not send this address as "
        "X-Forwarded-Host; may be given more than once.",
    ),
    file_option(
        "--dir",
        "folder",
        default="wanjax_served",
        show_default=True,
        metavar="FOLDER",
        help="Folder of the videos. All servers and workers of a database share it. With --database the folder "
        "may be in a store, such as s3://BUCKET/NAME.",
    ),
    database("jobs.sqlite in --dir"),
    renamed("--table", "--database"),
    limit("--max-queue", default=32, help="Maximum number of waiting videos."),
    number(
        "--max-pixels",
        help="Maximum number of pixels in all frames of a video.  [default: four times the pixels of the model's "
        "default video]",
    ),
    limit("--max-steps", default=200, help="Maximum number of steps of a video."),
    limit("--max-upload", default=32, metavar="MIB", help="Maximum size of a request, in MiB."),
    click.option(
        "--rehearse/--no-rehearse",
        default=True,
        show_default=True,
        help="Load the model and compile the programs of its default video at startup, or with --no-rehearse "
        "only at the first request.",
    ),
)

server_model_options = combine_options(
    model,
    attention,
    batch_guidance,
    lora,
    compute,
    devices,
    tile,
    extending,
    decoder,
    offload,
    click.option(
        "--preview/--no-preview",
        default=True,
        help="Show previews of a video at a few steps on the server's page.  [default: preview]",
    ),
    preview_decoder,
    verify,
    verbosity_options,
)
"""Options of the workers that make a server's videos, in the server's process or on other hosts."""
video = combine_options(pictures, shape, windows, denoising, lora, attention, batch_guidance, compute)
"""Options that change a video or the programs that compute it."""
generation_options = combine_options(model, extending, text, video, devices, tile, decoder, offload)
"""Options of the commands that run all stages, for one or many videos."""
output_options = combine_options(force, verify, verbosity_options, stats, json)
"""Options for replacing files, checking weights and reporting."""
