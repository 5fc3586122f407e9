# SPDX-License-Identifier: Apache-2.0
"""Typed arguments: shell completion, and messages for mistyped commands and options."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from copy import copy
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import click
from click.shell_completion import CompletionItem

from wanjax.cli.listing import listed_models
from wanjax.cli.names import TOKEN_VARIABLE
from wanjax.errors import SettingError, WanjaxError
from wanjax.pipelines.other_names import RENAMED
from wanjax.stores.paths import WEB_ADDRESS_PATTERN, download_advice, is_url

OLD_SCRIPT_OPTIONS = {
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
"""Maps the options of scripts before wanjax, written with dashes, to the present options."""
OTHER_OPTION_NAMES = {
    "sampler": "scheduler",
    "sampler-name": "scheduler",
    "sample-solver": "scheduler",
    "length": "frames",
    "resolution": "size",
    **dict.fromkeys(
        ("tiling", "tiled", "vae-tiling", "vae-slicing", "enable-vae-tiling", "enable-vae-slicing"), "tile"
    ),
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
    "device": "chip",
    "gpu": "chip",
    "num-videos-per-prompt": "count",
    "num-videos": "count",
    "batch-size": "count",
    "input-image": "image",
    "init-image": "image",
    "first-frame": "image",
    "vae-tiling": "tile",
    "enable-vae-tiling": "tile",
    "lowvram": "offload",
    "low-vram": "offload",
    "medvram": "offload",
    "novram": "offload",
    "cpu-offload": "offload",
    "enable-model-cpu-offload": "offload",
    "offload-model": "offload",
    "checkpointing-steps": "save-every",
    "epochs": "steps",
    "num-train-epochs": "steps",
    "prompt": "sample-prompt",  # of a training; other commands take the option itself
    "teacache": "cache",
    "enable-teacache": "cache",
    "magcache": "cache",
    "workflow": "from",
    "dry-run": "print-command",
    "pose": "video",
    "driving-video": "video",
} | {alias.replace("_", "-"): name.replace("_", "-") for alias, name in RENAMED.items()}
"""Maps options of other libraries and of older versions to the options that replace them."""

JAX_DEVICES = "JAX selects the devices; the environment variable JAX_PLATFORMS=cpu selects the CPU"
OPTION_ADVICE = {
    "token": ("--at", f"set the environment variable {TOKEN_VARIABLE} to the token"),
    **dict.fromkeys(
        ("lora-strength", "lora-scale", "lora-weight", "lora-weights", "strength-model"),
        ("--lora", "give the strength after the file, as in --lora FILE:0.5"),
    ),
    **dict.fromkeys(
        ("fp16", "bf16", "fp32", "half", "float16", "bfloat16", "float32"),
        ("--dtype", "give --dtype bfloat16 or --dtype float32"),
    ),
    **dict.fromkeys(("seconds", "num-seconds", "duration"), ("--frames", "give --frames; --fps frames make a second")),
    **dict.fromkeys(("device", "devices", "device-id", "gpu", "gpus", "cuda", "cpu", "tpu"), ("--help", JAX_DEVICES)),
}
"""Maps options of other commands and programs, without an equivalent option, to advice. The advice applies to commands
that have the option before it."""
STAGES = ("encode", "denoise", "decode")
MAX_NAME = 200  # the maximum number of characters of a name in a message


def shorten(name: str) -> str:
    """Cut a very long name for a message."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


OFFLOAD_VALUE = re.compile(r"(none|stages|blocks)(:.*)?", re.DOTALL)


def with_offload_values(arguments: Sequence[str]) -> list[str]:
    """Write `--offload VALUE` as `--offload=VALUE`, and `--offload` without such a value as `--offload=stages`."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    complete: list[str] = []
    for argument in arguments[:end]:
        if complete[-1:] == ["--offload"] and OFFLOAD_VALUE.fullmatch(argument):
            complete[-1] = f"--offload={argument}"
        else:
            complete.append(argument)
    return [*("--offload=stages" if argument == "--offload" else argument for argument in complete), *arguments[end:]]


def current_option_name(name: str) -> str:
    """Translate the name of an option of scripts before wanjax. In other names, only replace underscores by dashes."""
    dashed = name.replace("_", "-")
    return OLD_SCRIPT_OPTIONS.get(dashed, dashed)


OTHER_COMMANDS = {"remake": "generate --from FILE", "reproduce": "generate --from FILE", "price": "plan"}
"""Words that are probably meant as a command, not as a prompt, each with the right command."""
MIN_PREFIX = 3  # a shorter word does not count as the start of a command's name
PREFIX_WORDS = ("bat", "con", "den", "gene", "mod", "mode", "pla", "self", "war", "warm", "work")
"""English words that are the start of a command's name, but count as prompts."""
ARGUMENTS = {"source": ("model", "from"), "target": ("out", "dir")}
"""For an argument, the options of other commands that have the same meaning."""
SIMILARITY_CUTOFF = 0.75  # two words are similar if difflib's ratio is at least this
MAX_SUGGESTIONS = 2  # the maximum number of options that a message suggests


def check_prompt(ctx: click.Context, arguments: Sequence[str], default_command: str) -> None:
    """Raise UsageError if arguments without a command's name seem to be meant for another command, not for the default
    command.

    Another command seems to be meant if an option belongs only to other commands, if the prompt is one word that is
    similar to a command's name, or if --help follows a single word.
    """
    group = ctx.command
    assert isinstance(group, click.Group)
    word = _prompt(group.commands[default_command], ctx, arguments)
    word = "" if word is None or not word or word.split() != [word] else word
    if foreign_option := next(_foreign_options(group, arguments, default_command), None):
        option, command = foreign_option
        is_command = word and not word.startswith("-")
        problem = f"no command is named {word!r}" if is_command else f"`wanjax {default_command}` has no such option"
        raise click.UsageError(
            f"{option} is an option of `wanjax {command}`, and {problem}: `wanjax {command} --help` shows how to use it"
        )
    if not word:
        return
    if word.startswith("-"):
        _check_group_option(group, group.commands[default_command], ctx, word)
        return
    generate_command = f"`{shlex.join(['wanjax', default_command, word])}` makes a video of this word"
    if word in group.commands:
        raise click.UsageError(
            f"the command {word!r} must come before its options: give `wanjax {word} ...`; {generate_command}"
        )
    names = {name: name for name in group.list_commands(ctx)}
    commands = names | {"help": "--help", "version": "--version", "list": "models", "ls": "models"}
    if word.lower() in OTHER_COMMANDS:
        suggestion = OTHER_COMMANDS[word.lower()]
        raise click.UsageError(f"no command is named {word!r}: did you mean `wanjax {suggestion}`? {generate_command}")
    similar: list[str] = []
    if word.lower() not in PREFIX_WORDS:
        similar += [name for name in names if len(word) >= MIN_PREFIX and name.startswith(word.lower())]
        similar += get_close_matches(word.lower(), commands, n=1, cutoff=SIMILARITY_CUTOFF)
    for suggestion in similar[:1]:
        raise click.UsageError(
            f"no command is named {word!r}: did you mean `wanjax {commands[suggestion]}`? {generate_command}"
        )
    if {"--help", "-h"} & {*arguments}:
        raise click.UsageError(f"no command is named {word!r}: give one of {', '.join(group.list_commands(ctx))}")


def _check_group_option(group: click.Group, default_command: click.Command, ctx: click.Context, word: str) -> None:
    """Raise UsageError if a word with a dash is more similar to an option of the group than to an option of the
    command."""
    group_options = {name for parameter in group.get_params(ctx) for name in parameter.opts}
    options = [*sorted(group_options), *visible_options(default_command)]
    for suggestion in get_close_matches(word.lower(), options, n=1, cutoff=SIMILARITY_CUTOFF):
        if suggestion in group_options:
            raise click.UsageError(f"no option is named {word!r}: did you mean `wanjax {suggestion}`?")


def _prompt(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> str | None:
    """Find the prompt among arguments that may include unknown options. Return None if there is no prompt."""
    parser = command.make_parser(click.Context(command, parent=ctx, resilient_parsing=True))
    parser.ignore_unknown_options = True
    try:
        prompt = parser.parse_args([*arguments])[0].get("prompt")
    except click.UsageError:  # the command itself will report this error
        return None
    return prompt if isinstance(prompt, str) else None  # some versions of click return a sentinel for a missing prompt


def _foreign_options(group: click.Group, arguments: Sequence[str], default_command: str) -> Iterator[tuple[str, str]]:
    """Yield the options in the arguments that only other commands have, each with the first command that has the
    option. An option that has another name in the default command, or other advice, is left out."""
    own_options = {option for parameter in group.commands[default_command].params for option in parameter.opts} | {
        "--help"
    }
    options_by_command = {
        name: visible_options(command) for name, command in group.commands.items() if not command.hidden
    }
    for argument in arguments:
        option = f"--{current_option_name(argument[2:].partition('=')[0])}"
        same_option = f"--{OTHER_OPTION_NAMES.get(option[2:])}"  # what the default command calls it
        if option[2:] in OPTION_ADVICE:
            continue
        if argument.startswith("--") and option not in own_options and same_option not in own_options:
            yield from ((option, name) for name in options_by_command if option in options_by_command[name])


def visible_options(command: click.Command) -> dict[str, click.Option]:
    """Map names such as `--seed` to a command's options. Hidden options are left out."""
    visible = [
        parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
    ]
    return {name: option for option in visible for name in option.opts}


def _no_option(command: click.Command, ctx: click.Context, arguments: Sequence[str], name: str) -> click.UsageError:
    """Build the error for an unknown option. The option may be a mistyped name, or a prompt that starts with a dash."""
    has_prompt = any(
        parameter.name == "prompt" and isinstance(parameter, click.Argument) for parameter in command.params
    )
    for argument in arguments if has_prompt else ():
        if not _matches_option(argument, name):
            continue
        command_line = f"{ctx.command_path} [OPTIONS] -- {shlex.quote(argument)}"
        if argument.split() != [argument]:
            return click.UsageError(f"a prompt that starts with a dash must follow --: give `{command_line}`", ctx)
        if not argument.startswith("--") and len(argument) > 2:  # a word, not several one-letter options
            suggestion = _suggest_option(command, ctx, argument[1:])
            separator = " A" if suggestion.endswith("?") else "; a"
            advice = f"{suggestion}{separator} prompt that starts with a dash must follow --, as in `{command_line}`"
            return click.UsageError(f"no option is named {argument!r}: {advice}", ctx)
    positional = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    for argument in arguments if positional and not has_prompt else ():
        if _matches_option(argument, name) and (os.path.splitext(argument)[1] or os.path.lexists(argument)):
            more = " ..." if len(positional) > 1 else ""
            command_line = f"{ctx.command_path} -- {shlex.quote(argument)}{more}"
            return click.UsageError(f"a name that starts with a dash must follow --: give `{command_line}`", ctx)
    return click.UsageError(f"no option is named {name!r}: {_suggest_option(command, ctx, name.lstrip('-'))}", ctx)


def _suggest_option(command: click.Command, ctx: click.Context, name: str) -> str:
    """Return advice for a message: what to give in place of an unknown option. `name` has no leading dashes."""
    options = visible_options(command)
    option_by_name = {option.lstrip("-"): option for option in options}
    dashed = name.replace("_", "-").lower()
    other_name = OTHER_OPTION_NAMES.get(dashed, dashed)
    for candidate in (other_name, OTHER_OPTION_NAMES.get(other_name)):
        if candidate in option_by_name:
            return f"give {option_by_name[candidate]} in its place"
    needed_option, advice = OPTION_ADVICE.get(dashed, ("", ""))
    if needed_option in (*options, "--help") and advice:
        return advice
    for argument in (parameter for parameter in command.params if isinstance(parameter, click.Argument)):
        if dashed in (argument.name, *ARGUMENTS.get(str(argument.name), ())):
            argument_name = argument.make_metavar(ctx).strip("[]")
            return f"{argument_name} is an argument without an option: give `{_usage_of(command, ctx)}`"
    group = ctx.parent.command if ctx.parent else None
    commands = group.commands if isinstance(group, click.Group) else {}
    stages = [commands[name] for name in STAGES if command.name in STAGES and name in commands]
    for stage in stages:
        if any(dashed == parameter.name for parameter in stage.params if isinstance(parameter, click.Argument)):
            return f"it is the argument of `wanjax {stage.name}`; this command is `{_usage_of(command, ctx)}`"
    for other in (*stages, *commands.values()):
        if f"--{dashed}" in visible_options(other) and not other.hidden:
            return f"it is an option of `wanjax {other.name}`; this command is `{_usage_of(command, ctx)}`"
    names = {old: f"--{new}" for old, new in OLD_SCRIPT_OPTIONS.items() if f"--{new}" in options} | option_by_name
    suggestions = [
        names[word] for word in get_close_matches(dashed, names, n=MAX_SUGGESTIONS, cutoff=SIMILARITY_CUTOFF)
    ]
    if suggestions:
        return f"did you mean {' or '.join(dict.fromkeys(suggestions))}?"
    return f"`{ctx.command_path} --help-all` lists all options"


def _usage_of(command: click.Command, ctx: click.Context) -> str:
    """Format the usage of a command, such as "wanjax train [OPTIONS] MODEL DATA"."""
    return " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])


def _matches_option(argument: str, name: str) -> bool:
    """Whether click reads an argument as the option of this name, or as several one-letter options that include it."""
    if argument.startswith("--"):
        return f"--{current_option_name(argument[2:].partition('=')[0])}" == name
    return argument.startswith("-") and name[1:] in argument


def _check_flag_values(command: click.Command, ctx: click.Context, arguments: Sequence[str], word: str) -> None:
    """Raise UsageError if a surplus argument follows an option that takes no value, or --offload."""
    flags = {
        option
        for parameter in command.params
        if isinstance(parameter, click.Option) and (parameter.is_flag or parameter.name == "offload")
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for option, argument in pairwise(arguments):
        if argument == word and option in flags:
            values, advice = "takes no value", "leave it out"
            if option == "--offload":
                values, advice = "takes none, stages, blocks or blocks:N", "give one of them, or --offload alone"
            is_quoted = any(" " in text for text in arguments)
            needs_quotes = ctx.params.get("prompt") and not is_quoted
            quotes = ", and put a prompt of several words in quotes" if needs_quotes else ""
            raise click.UsageError(f"{option} {values}, got {shorten(word)!r}: {advice}{quotes}", ctx)


def check_extra(
    command: click.Command, ctx: click.Context, extra_words: Sequence[str], arguments: Sequence[str]
) -> None:
    """Raise UsageError for surplus arguments, such as the words of a prompt without quotes.

    Args:
        command: The command.
        ctx: The command's context.
        extra_words: The surplus arguments.
        arguments: All arguments of the command.
    """
    if ctx.resilient_parsing or not extra_words:
        return
    for option, file, word in zip(arguments, arguments[1:], arguments[2:], strict=False):
        if option == "--lora" and NUMBER.fullmatch(word) and word in (ctx.params.get("prompt"), *extra_words):
            raise click.UsageError(f"the strength of a LoRA follows a colon: give --lora {file}:{word}", ctx)
    if len(extra_words) == 1:
        prompt, word = str(ctx.params.get("prompt")), extra_words[0]
        _check_flag_values(command, ctx, arguments, prompt if " " in word and " " not in prompt else word)
    options = visible_options(command)
    if "--model" in options and (
        model := next((x for x in [ctx.params.get("prompt"), *extra_words] if x in listed_models()), None)
    ):
        raise click.UsageError(f"{model} is a model: give `{ctx.command_path} --model {model} ...`", ctx)
    if prompt := ctx.params.get("prompt"):
        if option := next((word for word in extra_words if word in visible_options(command)), None):
            raise click.UsageError(f"{option} follows -- and the prompt: give options before --", ctx)
        file = next((word for word in extra_words if os.path.splitext(word)[1] and os.path.isfile(word)), None)
        if file is not None and prompt.split() == [prompt] and "--from" in options:
            quoted_file = shlex.quote(file)
            advice_to_repeat = f"`wanjax generate --from {quoted_file}` makes a video again"
            advice_to_show = f"`wanjax info {quoted_file}` shows its settings"
            advice = "a prompt of several words is put in quotes"
            raise click.UsageError(
                f"no command is named {prompt!r}, and {file} is a file: {advice_to_repeat}, {advice_to_show}, "
                f"and {advice}"
            )
        if all(len(text.split()) > 1 for text in (prompt, *extra_words)) and "--prompts" in options:
            advice = "write each prompt on a line of a file, and give the file to --prompts"
            raise click.UsageError(f"{1 + len(extra_words)} prompts are given, for one video: {advice}", ctx)
        words = " ".join([prompt, *extra_words])
        command_line = f"{ctx.command_path} {'-- ' if words.startswith('-') else ''}{shlex.quote(words)}"
        raise click.UsageError(
            f"the prompt is {1 + len(extra_words)} arguments: put it in quotes, as in `{command_line}`", ctx
        )
    extra_words = [shorten(word) for word in extra_words]
    words = " and ".join(map(repr, extra_words))
    advice = "put a name with spaces in quotes"
    name = shlex.quote(" ".join(extra_words))
    if len(extra_words) == 1 and os.path.isfile(extra_words[0]):
        advice = "leave it out"
        if "--dir" in options:
            advice = f"give the folder of a stage's files as `{ctx.command_path} --dir FOLDER`, or leave it out"
    elif "--model" in options and len(extra_words) == 1 and extra_words[0].split() == [extra_words[0]]:
        advice = f"give a model as `{ctx.command_path} --model {name}`"
        if "--dir" in options:
            advice = f"give stage files as `{ctx.command_path} --dir {name}`, and {advice}"
    elif not any(isinstance(parameter, click.Argument) for parameter in command.params):
        advice = f"`wanjax generate` and `wanjax encode` take a prompt, as in `wanjax generate {name}`"
    raise click.UsageError(f"`{_usage_of(command, ctx)}` takes no further argument {words}: {advice}", ctx)


def describe_click_error(error: click.ClickException) -> str:
    """Turn an error of click into one sentence: the option, its wrong value, and what to give instead."""
    parameter = getattr(error, "param", None)
    if isinstance(error, click.BadOptionUsage) and not isinstance(error, click.NoSuchOption):
        return f"{error.option_name} has no value: give one after it" if error.option_name else str(error)
    if not isinstance(error, click.BadParameter) or parameter is None:
        return error.format_message()
    is_option = isinstance(parameter, click.Option)
    name = parameter.opts[-1] if is_option else (parameter.metavar or parameter.human_readable_name).upper()
    if isinstance(error, click.MissingParameter):
        if is_option:
            return f"{name} is missing: give {name} {parameter.metavar or 'VALUE'}"
        return f"{name} is missing: " + (
            f"give `{_usage_of(error.ctx.command, error.ctx)}`" if error.ctx else "give it"
        )
    if (file_kind := WRONG_FILE_KIND.search(error.message)) is not None:
        actual_kind, expected_kind = ("a file", "a folder") if file_kind[2] == "file" else ("a folder", "a file")
        return f"{name} {file_kind[1]} is {actual_kind}: give {expected_kind}"
    if (no_access := NO_ACCESS.search(error.message)) is not None:
        return f"{name} {no_access[1]} cannot be used by this user: change its permissions, or give another one"
    invalid = INVALID_VALUE.match(error.message)
    if invalid is None:
        return error.message if name in error.message else f"{name}: {error.message.removesuffix('.')}"
    values = _expected_values(parameter.type)
    if parameter.metavar == "MIB":
        values = values.replace("a whole number", "a whole number of MiB")
    return f"{name} got {invalid[1]}: give {values}"


def message_with_option(error: WanjaxError, command: click.Command | None = None) -> str:
    """Return the message of an error, with options, such as --guidance-scale, in place of the names of settings.

    Args:
        error: The error.
        command: The command whose options replace names with underscores; None replaces only the wrong setting.
    """
    from wanjax.jobs.rows import RowError  # imported late for a quick --help

    sentence = str(error)
    if isinstance(error, RowError):
        return sentence
    for option in [option for parameter in command.params for option in parameter.opts] if command else ():
        if option.startswith("--") and "_" in (name := option[2:].replace("-", "_")):
            sentence = re.sub(BARE_NAME.format(name), option, sentence)
    if not isinstance(error, SettingError):
        return sentence
    if error.setting == "strength":
        return sentence.replace("give a video too, or no strength", "give --video too, or no --strength")
    if error.setting == "prompt":
        return sentence  # the prompt is an argument
    option = f"--{error.setting.replace('_', '-')}"
    name = re.escape(error.setting)
    return re.sub(rf"^{name}(?= (?:must be|contains) )|(?<= has no setting ){name}\b", option, sentence)


BARE_NAME = r"""(?<![\w.'"`/=(\[{{-]){}(?![\w.'"`/=(-]|:\S)"""  # matches a name outside code, paths and quotation marks
NUMBER = re.compile(r"-?\d*\.?\d+")
SEVERAL_SEEDS = re.compile(r"\d+(?:(?:,|\.\.)\d+)+")
INVALID_VALUE = re.compile(r"(.+?) is not (?:a valid|in the range|one of) ")  # matches click's messages
WRONG_FILE_KIND = re.compile(r"(?:File|Directory|Path) '(.+)' is a (file|directory)\b")
NO_ACCESS = re.compile(r"(?:File|Directory|Path) '(.+)' is not (?:readable|writable)\b")


def _expected_values(param_type: click.ParamType) -> str:
    """Describe the values that a parameter type of click accepts."""
    if isinstance(param_type, click.Choice):
        return " or ".join(map(str, param_type.choices))
    text = "a whole number" if isinstance(param_type, click.types.IntParamType) else "a number"
    lower, upper = getattr(param_type, "min", None), getattr(param_type, "max", None)
    text += "" if lower is None else f" from {lower} {'on' if upper is None else f'to {upper}'}"
    return text if upper is None or lower is not None else f"{text} of at most {upper}"


LORA_STRENGTH = re.compile(r":-?\d*\.?\d+$")  # at the end of the value of --lora
STORE_PARAMETERS = (
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
"""Parameters whose value may be a file or folder in a store."""
OUTPUT_PARAMETERS = ("out", "folder", "target", "compile_cache", "database", "profile", "latent_cache")
"""Parameters whose value is a file or folder to write."""
HUB_PARAMETERS = ("model", "source", "lora")
"""Parameters whose value may also be a name on the hub."""
NON_FILE_PARAMETERS = (
    "extend_prompt",
    "at",
    "token",
    "origins",
    "prompt",
    "prompt_option",
    "negative_prompt",
    "sample_prompts",
)


def check_values(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> None:
    """Raise UsageError for the character `\\0`, an empty name of a file, and a URL that the parameter does not accept.

    An empty name often comes from an unset variable of the shell. Some of click's types would read an empty name as the
    current folder. Files come only from this machine, from the hub by id, and, for some parameters, from stores.
    """
    if ctx.resilient_parsing:  # a shell asks for completions
        return
    if any("\0" in word for word in arguments):
        raise click.UsageError("an option or the prompt contains the character \\0: leave it out")
    try:
        values = _all_values(command, ctx, arguments)
    except click.NoSuchOption as error:
        raise _no_option(command, ctx, arguments, error.option_name) from error
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for parameter in command.params:
        value = values.get(str(parameter.name))
        if isinstance(parameter, click.Option) and isinstance(value, list):
            _check_repeated(parameter, value)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(parameter, click.Option) and isinstance(text, str) and text in names:
                raise click.UsageError(f"{parameter.opts[-1]} has no value before {text}: give one after it")
            if parameter.name == "seed" and "--seeds" in names and SEVERAL_SEEDS.fullmatch(str(text)):
                raise click.UsageError(
                    f"--seed got several seeds, {text}: give --seeds {text}, a video for each of them"
                )
            if parameter.name == "then" and isinstance(text, str) and not text.strip():
                raise click.UsageError("--then got an empty prompt: give a text, or leave it out")
            if text == "" and _names_files(parameter):
                option = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name
                raise click.UsageError(f"{option} got an empty name: give the name of a file or folder")
            if (
                isinstance(text, str)
                and WEB_ADDRESS_PATTERN.fullmatch(text)
                and parameter.name not in NON_FILE_PARAMETERS
            ):
                if parameter.name in OUTPUT_PARAMETERS:
                    raise click.UsageError(
                        f"{text} is a web address, where no files can be written: give {_writable_paths(parameter)}"
                    )
                address = LORA_STRENGTH.sub("", text) if parameter.name == "lora" else text
                advice = download_advice(address, accepts_hub=parameter.name in HUB_PARAMETERS)
                raise click.UsageError(f"{address} is {advice}")
            if isinstance(text, str) and is_url(text) and _names_files(parameter):
                option = parameter.opts[-1]
                if parameter.name not in STORE_PARAMETERS or isinstance(parameter.type, click.Path):
                    raise click.UsageError(f"{option} {text} is a URL: give a file or folder of this machine")
                if text.lower().startswith("memory:") and ctx.obj and ctx.obj.runs_alone:
                    raise click.UsageError(
                        f"{text} is lost when this command ends: give a file or folder of this machine, or s3://"
                    )


def _writable_paths(parameter: click.Parameter) -> str:
    """Describe, for a message, the places to which the files of a parameter can be written."""
    if parameter.name == "database":
        return "a file on this machine, or postgresql://USER:PASSWORD@HOST/NAME"
    local_path_text = f"a {'folder' if parameter.metavar and 'FOLDER' in parameter.metavar else 'file'} on this machine"
    return (
        local_path_text
        if isinstance(parameter.type, click.Path)
        else f"{local_path_text}, gs://BUCKET/NAME or s3://BUCKET/NAME"
    )


def _all_values(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> dict[str, Any]:
    """Map parameters to their texts. An option has all values from the command line. click itself keeps only the last
    value."""
    parser = copy(command)
    parser.params = [copy(parameter) for parameter in command.params]
    for parameter in parser.params:
        if isinstance(parameter, click.Option) and not parameter.count:
            parameter.multiple = True
    return parser.make_parser(ctx).parse_args([*arguments])[0]


def _check_repeated(option: click.Option, values: Sequence[Any]) -> None:
    """Raise UsageError if an option that takes one value appears several times with different values."""
    distinct_values = [*dict.fromkeys(values)]
    if option.multiple or len(distinct_values) < 2:
        return
    name = option.opts[-1]
    if option.is_bool_flag:
        raise click.UsageError(f"both {name} and {option.secondary_opts[-1]}: give one of them")
    texts = " and as ".join(shorten(str(value)) for value in distinct_values)
    raise click.UsageError(f"{name} is given as {texts}: give it once")


def _names_files(parameter: click.Parameter) -> bool:
    """Whether a parameter takes names of files, folders or models."""
    description = f"{parameter.metavar or ''} {parameter.name}".upper()
    kinds = ("FILE", "FOLDER", "MODEL", "SOURCE", "PROMPTS")
    return isinstance(parameter.type, click.Path) or any(kind in description for kind in kinds)


def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def complete_models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a listed model. Let the shell complete a path."""
    if incomplete.startswith((".", "~")) or os.sep in incomplete:
        return complete_files(ctx, parameter, incomplete)
    models = listed_models().items()
    return [CompletionItem(name, help=model["about"]) for name, model in models if name.startswith(incomplete)]


def complete_commands(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a command."""
    group = ctx.parent.command if ctx.parent else None
    assert isinstance(group, click.Group)
    return [CompletionItem(name) for name in group.list_commands(ctx) if name.startswith(incomplete)]
