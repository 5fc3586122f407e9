# SPDX-License-Identifier: Apache-2.0
"""Arguments as they are typed: their completion by a shell, and commands and options that are mistyped."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from copy import copy
from difflib import get_close_matches
from typing import Any

import click
from click.shell_completion import CompletionItem

from wanjax.cli.listing import listed_models
from wanjax.errors import SettingError, WanjaxError
from wanjax.pipelines.other_names import RENAMED
from wanjax.stores.paths import WEB_ADDRESS, download_advice, is_url

OF_SCRIPTS = {
    "model-id": "model",
    "num-frames": "frames",
    "num-inference-steps": "steps",
    "input-dir": "dir",
    "output-dir": "dir",
    "output-path": "out",
    "output-video": "out",
    "bqsize": "block-q",
    "bkvsize": "block-kv",
    "bkvcomputesize": "block-kv-compute",
    "window-size": "window",
}
"""Options of the scripts before wanjax, with dashes for underscores, and their names here."""
ELSEWHERE = {
    "sampler": "scheduler",
    "sampler-name": "scheduler",
    "sample-solver": "scheduler",
    "length": "frames",
    "resolution": "size",
    "output": "out",
    "output-file": "out",
    "save-file": "out",
    "lr": "learning-rate",
    "rate": "learning-rate",
    "lr-schedule": "lr-scheduler",
    "schedule": "lr-scheduler",
    "lr-warmup-steps": "warmup-steps",
    "warm-up": "warmup-steps",
    "train-batch-size": "batch-size",
    "batch": "batch-size",
    "gradient-accumulation-steps": "grad-accum-steps",
    "accumulate": "grad-accum-steps",
    "max-train-steps": "steps",
    "clip": "max-grad-norm",
    "average": "ema-decay",
    "network-dim": "lora-rank",
    "rank": "lora-rank",
    "network-alpha": "lora-alpha",
    "alpha": "lora-alpha",
    "dropout": "lora-dropout",
    "target": "lora-target",
    "dialect": "lora-format",
    "dropped-captions": "caption-dropout",
    "preserved-uncaptioned": "uncaptioned-preservation",
    "logit-deviation": "logit-std",
    "shortest": "min-frames",
    "store": "latent-cache",
    "validation-prompt": "sample-prompt",
    "sample": "sample-prompt",
    "validation-steps": "validation-every",
    "evaluate-every": "validation-every",
    "held-out": "holdout-every",
    "checkpointing-steps": "save-every",
} | {alias.replace("_", "-"): name.replace("_", "-") for alias, name in RENAMED.items()}
"""Options of other libraries and their names here, where a command has one; those of settings are theirs."""


MAX_NAME = 200  # characters of a name in a message


def shortened(name: str) -> str:
    """Return a name as messages show it: without its end if it is very long."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


def our_name(name: str) -> str:
    """Return the name of an option here, which may be given as the scripts before wanjax spelled it."""
    dashed = name.replace("_", "-")
    return OF_SCRIPTS.get(dashed, dashed)


ARGUMENTS = {"source": ("model", "from"), "target": ("out", "dir")}
"""Names that other commands have for a command's arguments."""
NEAR = 0.75  # the ratio of difflib from which two words count as near
MOST_NEAR = 2  # near options in a message


def check_prompt(ctx: click.Context, arguments: Sequence[str], implied: str) -> None:
    """Raise UsageError where arguments without a command are meant for another command than the `implied` one.

    They are if an option belongs only to other commands; or if the prompt is one word that is near a command's name,
    or that asks for help.
    """
    group = ctx.command
    assert isinstance(group, click.Group)
    word = _prompt(group.commands[implied], ctx, arguments)
    word = "" if word is None or not word or word.split() != [word] else word
    if foreign := next(_foreign(group, arguments, implied), None):
        option, command = foreign
        fault = f"no command is named {word!r}" if word else f"`wanjax {implied}` has no such option"
        raise click.UsageError(f"{option} is an option of `wanjax {command}`, and {fault}")
    if not word:
        return
    if word.startswith("-"):
        _check_group_option(group, group.commands[implied], ctx, word)
        return
    again = f"`{shlex.join(['wanjax', implied, word])}` makes a video of this word"
    if word in group.commands:
        raise click.UsageError(f"{word!r} is a command, which precedes its options: `wanjax {word} ...`; {again}")
    others = {"help": "--help", "version": "--version", "list": "models", "ls": "models"}
    commands = {name: name for name in group.list_commands(ctx)} | others
    for near in get_close_matches(word.lower(), commands, n=1, cutoff=NEAR):
        raise click.UsageError(f"no command is named {word!r}: `wanjax {commands[near]}` is near; {again}")
    if {"--help", "-h"} & {*arguments}:
        raise click.UsageError(f"no command is named {word!r}: there are {', '.join(group.list_commands(ctx))}")


def _check_group_option(group: click.Group, implied: click.Command, ctx: click.Context, word: str) -> None:
    """Raise UsageError where a word with a dash is nearer to an option of the group than to one of the command."""
    group_options = {name for parameter in group.get_params(ctx) for name in parameter.opts}
    options = [*sorted(group_options), *visible_options(implied)]
    for near in get_close_matches(word.lower(), options, n=1, cutoff=NEAR):
        if near in group_options:
            raise click.UsageError(f"no option is named {word!r}: `wanjax {near}` is near")


def _prompt(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> str | None:
    """Return the command's argument among arguments that may hold unknown options; None where there is none."""
    parser = command.make_parser(click.Context(command, parent=ctx, resilient_parsing=True))
    parser.ignore_unknown_options = True
    try:
        prompt = parser.parse_args([*arguments])[0].get("prompt")
    except click.UsageError:  # which the command itself reports
        return None
    return prompt if isinstance(prompt, str) else None  # a missing one is a sentinel in some versions of click


def _foreign(group: click.Group, arguments: Sequence[str], implied: str) -> Iterator[tuple[str, str]]:
    """Yield the options among the arguments that only other commands have, each with the first of these commands."""
    own_options = {option for each in group.commands[implied].params for option in each.opts} | {"--help"}
    options_of = {name: visible_options(command) for name, command in group.commands.items() if not command.hidden}
    for argument in arguments:
        option = f"--{our_name(argument[2:].partition('=')[0])}"
        if argument.startswith("--") and option not in own_options:
            yield from ((option, name) for name in options_of if option in options_of[name])


def visible_options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command that its help shows, by their names with dashes."""
    shown = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    return {name: option for option in shown for name in option.opts}


def _no_option(command: click.Command, ctx: click.Context, arguments: Sequence[str], name: str) -> click.UsageError:
    """Return the error for an option that a command does not have: a mistyped name, or a prompt with a dash."""
    has_prompt = any(each.name == "prompt" and isinstance(each, click.Argument) for each in command.params)
    for argument in arguments if has_prompt else ():
        if _is_of(argument, name) and argument.split() != [argument]:
            again = f"{ctx.command_path} [OPTIONS] -- {shlex.quote(argument)}"
            return click.UsageError(f"a prompt that begins with a dash stands behind --, as in `{again}`", ctx)
    return click.UsageError(f"no option is named {name!r}: {_right_option(command, ctx, name.lstrip('-'))}", ctx)


def _right_option(command: click.Command, ctx: click.Context, name: str) -> str:
    """Return what to give in place of an option that a command does not have, by its name without dashes before it."""
    options = visible_options(command)
    present = {option.lstrip("-"): option for option in options}
    dashed = name.replace("_", "-").lower()
    if (option := present.get(ELSEWHERE.get(dashed, dashed))) is not None:
        return f"{option} is its name here"
    for argument in (each for each in command.params if isinstance(each, click.Argument)):
        if dashed in (argument.name, *ARGUMENTS.get(str(argument.name), ())):
            return f"{argument.make_metavar(ctx).strip('[]')} stands without it, as in `{_form(command, ctx)}`"
    group = ctx.parent.command if ctx.parent else None
    for other in group.commands.values() if isinstance(group, click.Group) else ():
        if f"--{dashed}" in visible_options(other) and not other.hidden:
            return f"`wanjax {other.name}` has it, and the form here is `{_form(command, ctx)}`"
    names = {old: f"--{new}" for old, new in OF_SCRIPTS.items() if f"--{new}" in options} | present
    near = [names[word] for word in get_close_matches(dashed, names, n=MOST_NEAR, cutoff=NEAR)]
    if near:
        return f"{' or '.join(dict.fromkeys(near))} is near"
    return f"`{ctx.command_path} --help-all` has all"


def _form(command: click.Command, ctx: click.Context) -> str:
    """Return a command with the places of its arguments, such as "wanjax train [OPTIONS] MODEL DATA"."""
    return " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])


def _is_of(argument: str, name: str) -> bool:
    """Tell whether an argument is what click takes for an option of this name, or for several of one letter."""
    if argument.startswith("--"):
        return f"--{our_name(argument[2:].partition('=')[0])}" == name
    return argument.startswith("-") and name[1:] in argument


def check_extra(command: click.Command, ctx: click.Context, extra: Sequence[str]) -> None:
    """Raise UsageError for arguments that a command has no place for, which quotes may have to make one."""
    if ctx.resilient_parsing or not extra:
        return
    options = visible_options(command)
    if "--model" in options and (
        model := next((x for x in [ctx.params.get("prompt"), *extra] if x in listed_models()), None)
    ):
        raise click.UsageError(
            f"{model} is a model: `{ctx.command_path} --model {model} ...` is the way to give one", ctx
        )
    if prompt := ctx.params.get("prompt"):
        if option := next((word for word in extra if word in visible_options(command)), None):
            raise click.UsageError(f"{option} stands behind -- and the prompt: options stand before --", ctx)
        words = " ".join([prompt, *extra])
        again = f"{ctx.command_path} {'-- ' if words.startswith('-') else ''}{shlex.quote(words)}"
        raise click.UsageError(f"the prompt is {1 + len(extra)} arguments where quotes make it one: `{again}`", ctx)
    extra = [shortened(word) for word in extra]
    words = " and ".join(map(repr, extra))
    advice = "a name with spaces stands in quotes"
    if "--model" in options and len(extra) == 1 and extra[0].split() == [extra[0]]:
        name = shlex.quote(extra[0])
        advice = f"a model is given as `{ctx.command_path} --model {name}`"
        if "--dir" in options:
            advice = f"stage files are given as `{ctx.command_path} --dir {name}`, and {advice}"
    elif not any(isinstance(each, click.Argument) for each in command.params):
        again = f"`wanjax generate {shlex.quote(' '.join(extra))}`"
        advice = f"`wanjax generate` and `wanjax encode` take a prompt, as in {again}"
    raise click.UsageError(f"no place is left for {words} in `{_form(command, ctx)}`: {advice}", ctx)


def in_words(error: click.ClickException) -> str:
    """Return the sentence of an error of click's, with the option, its value and what to give."""
    parameter = getattr(error, "param", None)
    if isinstance(error, click.BadOptionUsage) and not isinstance(error, click.NoSuchOption):
        return f"{error.option_name} stands without a value: give one behind it" if error.option_name else str(error)
    if not isinstance(error, click.BadParameter) or parameter is None:
        return error.format_message()
    is_option = isinstance(parameter, click.Option)
    name = parameter.opts[-1] if is_option else (parameter.metavar or parameter.human_readable_name).upper()
    if isinstance(error, click.MissingParameter):
        if is_option:
            return f"{name} is missing: give {name} {parameter.metavar or 'VALUE'}"
        return f"{name} is missing: " + (
            f"the form is `{_form(error.ctx.command, error.ctx)}`" if error.ctx else "give it"
        )
    if (kinds := KINDS.search(error.message)) is not None:
        is_there, wanted = ("a file", "a folder") if kinds[2] == "file" else ("a folder", "a file")
        return f"{name} {kinds[1]} is {is_there}: give {wanted}"
    if (closed := CLOSED.search(error.message)) is not None:
        return f"{name} {closed[1]} is closed to this user: change its permissions, or give another one"
    mistaken = VALUE.match(error.message)
    if mistaken is None:
        return error.message if name in error.message else f"{name}: {error.message.removesuffix('.')}"
    return f"{name} is given as {mistaken[1]}: give {_right(parameter.type)}"


def with_option(error: WanjaxError) -> str:
    """Return the sentence of an error, which names a setting that is given by its option, as click's errors do."""
    sentence = str(error)
    if not isinstance(error, SettingError) or not sentence.startswith(f"{error.setting} is given as "):
        return sentence
    return f"--{error.setting.replace('_', '-')}{sentence.removeprefix(error.setting)}"


VALUE = re.compile(r"(.+?) is not (?:a valid|in the range|one of) ")  # of click's sentences
KINDS = re.compile(r"(?:File|Directory|Path) '(.+)' is a (file|directory)\b")  # too
CLOSED = re.compile(r"(?:File|Directory|Path) '(.+)' is not (?:readable|writable)\b")


def _right(kind: click.ParamType) -> str:
    """Return the values of a type of click's, in words."""
    if isinstance(kind, click.Choice):
        return " or ".join(map(str, kind.choices))
    words = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    words += "" if least is None else f" from {least} {'on' if most is None else f'to {most}'}"
    return words if most is None or least is not None else f"{words} of at most {most}"


HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?", re.IGNORECASE)
IN_STORES = (
    "out",
    "target",
    "source",
    "model",
    "model_option",
    "file",
    "original_metadata",
    "compile_cache",
    "folder",
    "database",
)
"""Parameters whose values may be in a store."""
WRITTEN = ("out", "folder", "target", "compile_cache", "database", "profile", "latent_cache")
"""Parameters that name what is written."""
NO_FILES = ("extend_prompt", "at", "token", "origins", "prompt", "prompt_option", "negative_prompt", "sample_prompts")


def check_words(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> None:
    """Raise UsageError for the character 0, and for an empty name, an address or a URL of a store in place of a file.

    An empty name, as of a variable that is not set in a shell, would be the current folder to some of click's types, or
    a picture that nobody misses. Nothing is fetched but from the hub, by its ids, and from stores where that is meant.
    """
    if ctx.resilient_parsing:  # as it is while a shell completes the arguments
        return
    if any("\0" in word for word in arguments):
        raise click.UsageError("an option or the prompt holds the character \\0: leave it out")
    try:
        values = _all_values(command, ctx, arguments)
    except click.NoSuchOption as error:
        raise _no_option(command, ctx, arguments, error.option_name) from error
    for parameter in command.params:
        value = values.get(str(parameter.name))
        if isinstance(parameter, click.Option) and isinstance(value, list):
            _check_repeated(parameter, value)
        for one in value if isinstance(value, list) else [value]:
            if one == "" and _names_files(parameter):
                option = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name
                raise click.UsageError(f"{option} is given an empty name: give that of a file or folder")
            if isinstance(one, str) and WEB_ADDRESS.fullmatch(one) and parameter.name not in NO_FILES:
                if parameter.name in WRITTEN:
                    raise click.UsageError(
                        f"{one} is a web address, where no files can be kept: give {_places(parameter)}"
                    )
                page = HUB.fullmatch(one)
                right = f"a page of the hub: give its id, {page[1]}" if page else download_advice(one)
                raise click.UsageError(f"{one} is {right}")
            if isinstance(one, str) and is_url(one) and _names_files(parameter):
                option = parameter.opts[-1]
                if parameter.name not in IN_STORES or isinstance(parameter.type, click.Path):
                    raise click.UsageError(f"{option} {one} is a URL: give the name of a file or folder here")
                if one.lower().startswith("memory:") and ctx.obj and ctx.obj.owns_process:
                    raise click.UsageError(f"{one} would be gone with this command: give a name here or s3://")


def _places(parameter: click.Parameter) -> str:
    """Return where the files can be that a parameter names for writing."""
    if parameter.name == "database":
        return "a file on this machine, or postgresql://USER:PASSWORD@HOST/NAME"
    here = f"a {'folder' if parameter.metavar and 'FOLDER' in parameter.metavar else 'file'} on this machine"
    return here if isinstance(parameter.type, click.Path) else f"{here}, gs://BUCKET/NAME or s3://BUCKET/NAME"


def _all_values(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the texts of the arguments by parameter: of an option all that are given, where click keeps the last."""
    parser = copy(command)
    parser.params = [copy(parameter) for parameter in command.params]
    for parameter in parser.params:
        if isinstance(parameter, click.Option) and not parameter.count:
            parameter.multiple = True
    return parser.make_parser(ctx).parse_args([*arguments])[0]


def _check_repeated(option: click.Option, values: Sequence[Any]) -> None:
    """Raise UsageError where an option that takes one value is given several that differ."""
    different = [*dict.fromkeys(values)]
    if option.multiple or len(different) < 2:
        return
    name = option.opts[-1]
    if option.is_bool_flag:
        raise click.UsageError(f"{name} is given beside {option.secondary_opts[-1]}: give one of them")
    texts = " and as ".join(shortened(str(value)) for value in different)
    raise click.UsageError(f"{name} is given as {texts}: give it once")


def _names_files(parameter: click.Parameter) -> bool:
    """Return whether the values of a parameter are names of files, folders or models."""
    shown = f"{parameter.metavar or ''} {parameter.name}".upper()
    return isinstance(parameter.type, click.Path) or any(kind in shown for kind in ("FILE", "FOLDER", "MODEL"))


def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion to the shell, which knows the files."""
    return [CompletionItem(incomplete, type="file")]


def complete_models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the models that `wanjax models` lists; for a path, leave the completion to the shell."""
    if incomplete.startswith((".", "~")) or os.sep in incomplete:
        return complete_files(ctx, parameter, incomplete)
    models = listed_models().items()
    return [CompletionItem(name, help=model["about"]) for name, model in models if name.startswith(incomplete)]


def complete_commands(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands of the group."""
    group = ctx.parent.command if ctx.parent else None
    assert isinstance(group, click.Group)
    return [CompletionItem(name) for name in group.list_commands(ctx) if name.startswith(incomplete)]
