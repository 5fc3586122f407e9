# SPDX-License-Identifier: Apache-2.0
"""Options from files, in place of the command line: `--config`, a TOML file, and `--from`, the record of a video.

Both become click's `default_map`. What is typed counts first, then the record, then the TOML file. Beside a record, the
TOML file gives no options that shape the video.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wanjax.cli import sections
from wanjax.cli.arguments import ELSEWHERE, check_extra, check_words, our_name, visible_options
from wanjax.cli.options import SETTINGS, check_file, input_option, is_typed, of_file
from wanjax.errors import WanjaxError, reason
from wanjax.media.inputs import IMAGE, INPUTS, REFERENCES
from wanjax.media.text_files import read_text
from wanjax.pipelines.settings import read_size

OVERRIDES = {
    "size": ("height", "width"),
    "prompt": ("prompts",),
    "prompts": ("prompt",),
    "seed": ("seeds",),
    "seeds": ("count", "seed"),
    "count": ("seeds",),
    "follow": ("sigmas",),
}
"""Parameters that, where they are typed, take the place of others that come from a file."""
NOT_SHAPING = ("folder", "out", "force", "profile", "processes", "quiet", "verbose", "stats", "in_json")
"""Parameters that do not shape a video."""
SAFE = "safe"
CONFIG, RECORD = "wanjax.config", "wanjax.record"  # keys, in a command's context, of options from files


def files_recorded() -> dict[str, str]:
    """Return the entries of a record that name files, and the options that give others."""
    others = {"noise": "--noise FILE", "lora": "--lora FILE", "decoder": "--decoder FILE", "model": "--model FOLDER"}
    return {name: f"{spec.option} FILE" for name, spec in INPUTS.items()} | others


def recorded_parameters() -> set[str]:
    """Return the parameters of `generate` that a record gives. No file that is written is among them."""
    return {*SETTINGS, *files_recorded(), "scheduler", "attention", "mesh", "rules", "compiler", "batch_guidance"}


class Command(sections.Command):
    """A command of which some options may come from files."""

    _inputs: tuple[click.Parameter, ...] = ()  # those of registered families

    allow_extra_args = True  # which are refused below, with what they may be meant for

    def take_inputs(self) -> None:
        """Give a command that has the options of all inputs those of registered families too."""
        declared = [candidate for candidate in self.params if candidate not in self._inputs]
        names = {candidate.name for candidate in declared}
        command_table = [input_option(candidate) for name, candidate in INPUTS.items() if name not in names]
        self._inputs = tuple(command_table) if {IMAGE.name, REFERENCES.name} <= names else ()
        self.params[:] = [*declared, *self._inputs]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        check_words(self, ctx, args)
        rest = super().parse_args(ctx, args)
        check_extra(self, ctx, rest)
        from_file = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP}
        replaced = {
            overridden
            for name, overridden_names in OVERRIDES.items()
            if is_typed(name, ctx)
            for overridden in overridden_names
        }
        candidate = "prompts" in replaced or ctx.params.get("prompts") is None  # each line of a list may name a video
        if candidate and "video" in ctx.params and ctx.params["video"] is None:
            replaced.add("strength")  # that of a video to begin from
        ctx.params.update(dict.fromkeys(replaced & from_file))
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        from wanjax.cli.checks import check  # imported late for a quick --help
        from wanjax.cli.runs import sweep

        folder = ctx.params.get("folder")
        sweep(but=folder if isinstance(folder, Path) else None)
        assert self.callback is not None
        names = signature(self.callback).parameters
        arguments = {name: ctx.params[name] for name in names if name in ctx.params}
        if others := [name for name in names if name not in ctx.params]:
            from wanjax.cli.parsed import VALUES  # a listing of models needs none of them

            arguments |= {name: VALUES[name](ctx) for name in others}
        check(ctx, arguments.get("request"))
        return ctx.invoke(self.callback, **arguments)


def read_config(ctx: click.Context, parameter: click.Parameter, file: str | None) -> None:
    """Take options from a TOML file: those at its top, which hold for all commands, and the command's own table.

    Raises WanjaxError, with the name of the key, for an option that no command has and a value of another type.
    """
    if file is not None and not ctx.resilient_parsing:
        check_file(Path(file).expanduser(), "give --config a TOML file that there is")
        ctx.meta[CONFIG] = _from_config(file, ctx)
        _set_defaults(ctx)


def find_metadata(ctx: click.Context, parameter: click.Parameter, file: str | None) -> dict[str, Any] | None:
    """Take the prompt and the options from the record of a video, which it returns."""
    if file is None or ctx.resilient_parsing:
        return None
    record = _load_record(file)
    parameters = [x for x in ctx.command.params if x.name in recorded_parameters() and record.get(x.name) is not None]
    values = {x.name: _checked_value(file, x.name, record[x.name], x) for x in parameters}
    ctx.meta[RECORD] = {"compiler": SAFE, **values, "tile": "tiling" in record}  # the set that records do not name
    _set_defaults(ctx)
    return record


def _load_record(file: str) -> dict[str, Any]:
    """Return the record of a video that is to be made again; raise WanjaxError where it does not name its model."""
    from wanjax.cli.runs import check_not_past  # imported late for a quick --help
    from wanjax.media import metadata

    check_not_past(Path(file))
    record = metadata.find_metadata(file)
    if not isinstance(record.get("model"), str):
        raise WanjaxError(f"{file} names no model: the generation_config.json beside a stage's file does")
    return record


def _set_defaults(ctx: click.Context) -> None:
    """Make the options of the files click's defaults; beside a record, a TOML file cannot change the video."""
    options, record = ctx.meta.get(CONFIG, {}), ctx.meta.get(RECORD)
    if record is not None:
        options = {name: value for name, value in options.items() if name in NOT_SHAPING} | record
    ctx.default_map = options


def _from_config(file: str, ctx: click.Context) -> dict[str, Any]:
    """Return the options of a TOML file for the command of a context, by the names of its parameters."""
    group, command = ctx.parent.command if ctx.parent else None, str(ctx.info_name)
    assert isinstance(group, click.Group)
    options_of = {name: _options(group.commands[name]) for name in group.list_commands(ctx)}
    all_options = {key: option for name in (*reversed(options_of), command) for key, option in options_of[name].items()}
    for key in (key for name in options_of for key in _argument_names(group.commands[name])):
        all_options.pop(key, None)
    tables: dict[str, Any] = {}
    table = _table(file)
    for name in options_of.keys() & table.keys():
        if not isinstance(command_table := table.pop(name), dict):
            raise WanjaxError(f"{file} gives {name} as {command_table!r}: write a table of its options, [{name}]")
        tables[name] = _parse_table(f"{file}, in [{name}],", command_table, options_of[name])
    for name in (key for key, value in table.items() if isinstance(value, dict) and key not in all_options):
        near = [f"[{candidate}]" for candidate in get_close_matches(name, options_of, n=1) or options_of]
        raise WanjaxError(f"{file} has the table {name!r}, which is no command: write {' or '.join(near)}")
    names = {option.name for option in options_of[command].values()}
    shared = {name: value for name, value in _parse_table(file, table, all_options).items() if name in names}
    return shared | tables.get(command, {})


def _table(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(Path(file).expanduser()))
    except (OSError, ValueError) as error:  # TOML's and Unicode's errors are of the second kind
        raise WanjaxError(f"the options in {file} cannot be read, {reason(error)}") from error


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a file may give a command, by their names without dashes before them."""
    by_name = {name[2:]: option for name, option in visible_options(command).items() if name.startswith("--")}
    return {key: option for key, option in by_name.items() if key not in ("config", "from")}


def _argument_names(command: click.Command) -> list[str]:
    """Return the names of a command's arguments that scripts gave as options: no file gives them to all commands."""
    hidden = [x for x in command.params if isinstance(x, click.Option) and x.hidden and not x.is_flag]
    arguments = {x.name for x in command.params if isinstance(x, click.Argument)}
    return [name[2:] for option in hidden for name in option.opts if name[2:] in arguments]


def _parse_table(location: str, table: Mapping[str, Any], options: Mapping[str, click.Option]) -> dict[str, Any]:
    """Return the values of a table by the names of their parameters; a size as height and width.

    `location` says in a message where the table stands.
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = our_name(key)
        if name not in options:
            near = [ELSEWHERE[name]] if ELSEWHERE.get(name) in options else get_close_matches(name, options, n=1)
            raise WanjaxError(
                f"{location} has {key!r}, which is no option there{f': did you mean {near[0]}?' if near else ''}"
            )
        option = options[name]
        checked = _checked_value(location, key, value, option)
        if option.name == "size" and isinstance(size := read_size(checked), tuple):
            values |= zip(("height", "width"), size, strict=True)
        else:
            values[option.name] = checked
    return values


def _checked_value(location: str, key: str, value: Any, parameter: click.Parameter) -> Any:
    """Return a parameter's value, a list where it may be given more than once; raise WanjaxError for another type."""
    types: tuple[type, ...] = (str,)
    expected = "a text"
    if getattr(parameter, "is_flag", False):
        types, expected = (bool,), "true or false"
    elif isinstance(parameter.type, click.types.IntParamType):
        types, expected = (int,), "a whole number"
    elif parameter.name == "seed":
        types, expected = (int, str), "a whole number or random"
    elif isinstance(parameter.type, click.types.FloatParamType):
        types, expected = (int, float), "a number"
    is_multiple = getattr(parameter, "multiple", False)
    values = value if is_multiple and isinstance(value, list) else [value]
    if any(type(candidate) not in types for candidate in values):
        raise WanjaxError(f"{location} gives {key} as {value!r}: write {expected}")
    if any(
        "\0" in candidate for candidate in values if isinstance(candidate, str)
    ):  # which no file's name and no metadata holds
        raise WanjaxError(f"{location} gives {key} as {value!r}: write a text without the character \\0")
    return values if is_multiple else value


config = of_file(
    "--config",
    is_eager=True,  # before the options that it gives
    expose_value=False,
    callback=read_config,
    help="Options from a TOML file; at its top or in a table such as [generate]. What is typed counts more.",
)
source = of_file(
    "--from",
    "original_metadata",
    is_eager=True,
    callback=find_metadata,
    help="Make the video FILE again, with its prompt and settings; a prompt and options change them. FILE "
    "may also be a stage's file or a generation_config.json.",
)
