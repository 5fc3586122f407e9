# SPDX-License-Identifier: Apache-2.0
"""Options from files: `--config`, a TOML file, and `--from`, the metadata of a video or a workflow of ComfyUI.

Both options set click's `default_map`. The command line overrides the metadata, and the metadata overrides the TOML
file. With `--from`, options of the TOML file that shape the video are ignored.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wanjax.cli import sections, workflow_options
from wanjax.cli.arguments import (
    OTHER_OPTION_NAMES,
    check_extra,
    check_values,
    complete_files,
    current_option_name,
    visible_options,
    with_offload_values,
)
from wanjax.cli.options import (
    SETTINGS,
    check_file,
    combine_options,
    file_option,
    input_option,
    on_command_line,
)
from wanjax.errors import WanjaxError, reason
from wanjax.media.inputs import IMAGE, INPUT_SPECS, REFERENCES
from wanjax.media.text_files import read_text
from wanjax.pipelines.settings import NO_MARGINS, SEAM_SETTINGS, read_size
from wanjax.stores.paths import full_name

OVERRIDDEN_PARAMETERS = {
    "size": ("height", "width"),
    "prompt": ("prompts",),
    "prompts": ("prompt",),
    "seed": ("seeds",),
    "seeds": ("count", "seed"),
    "count": ("seeds",),
    "follow": ("sigmas",),
    "boundary": ("boundary_step",),
}
"""For each parameter, the parameters that it overrides: if it is on the command line, their values in a file are
ignored."""
MACHINE_PARAMETERS = (
    *("mesh", "rules", "dtype", "vae_dtype", "precision", "attention", "offload", "compiler", "decoder"),
    "batch_guidance",
)
"""Parameters that a workflow of ComfyUI does not set."""
NON_VIDEO_PARAMETERS = ("folder", "out", "force", "profile", "processes", "quiet", "verbose", "stats", "in_json")
"""Parameters that do not change the content of a video."""
SAFE_COMPILER = "safe"
DOWNLOADING_COMMANDS = ("generate", "batch")  # commands that load the weights which a workflow names
OPTIONS_NOT_IN_CONFIG = ("config", "from", "models", "inputs", "print-command")  # options that a TOML file does not set
SHARED_PARAMETERS = ("model", "lora", "tile")  # the parameters that must be equal in all workflows of a folder
WORKFLOW_ROW = "workflow"  # the noun for a row that is a workflow
CONFIG, METADATA = "wanjax.config", "wanjax.record"  # keys of the `meta` of a command's context


def options_of_file_entries() -> dict[str, str]:
    """Map each entry of metadata that names a file to the option that gives another file."""
    others = {"noise": "--noise FILE", "lora": "--lora FILE", "decoder": "--decoder FILE", "model": "--model FOLDER"}
    return {name: f"{spec.option} FILE" for name, spec in INPUT_SPECS.items()} | others


def metadata_parameters() -> set[str]:
    """Return the parameters of `generate` that metadata can set. None of them is a file to write."""
    return {
        *SETTINGS,
        *options_of_file_entries(),
        "scheduler",
        "attention",
        "mesh",
        "rules",
        "compiler",
        "batch_guidance",
    }


class Command(sections.Command):
    """A command that can read options from files."""

    _inputs: tuple[click.Parameter, ...] = ()  # options of families that were registered in this process

    allow_extra_args = True  # `check_extra` then reports surplus arguments, with a suggestion

    def add_registered_inputs(self) -> None:
        """Add options for the inputs of newly registered families, if the command has options for inputs."""
        declared = [parameter for parameter in self.params if parameter not in self._inputs]
        names = {parameter.name for parameter in declared}
        extra_options = [input_option(parameter) for name, parameter in INPUT_SPECS.items() if name not in names]
        self._inputs = tuple(extra_options) if {IMAGE.name, REFERENCES.name} <= names else ()
        self.params[:] = [*declared, *self._inputs]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments, args = list(args), with_offload_values(args)
        check_values(self, ctx, args)
        workflow_options.store_command_line(self, ctx, args)
        extra = super().parse_args(ctx, args)
        check_extra(self, ctx, extra, arguments)
        names_from_files = {
            name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
        }
        overridden_options = {
            overridden
            for name, overridden_names in OVERRIDDEN_PARAMETERS.items()
            if on_command_line(name, ctx)
            for overridden in overridden_names
        }
        may_be_one_video = (
            "prompts" in overridden_options or ctx.params.get("prompts") is None
        )  # a line of --prompts may name an input video
        if may_be_one_video and "video" in ctx.params and ctx.params["video"] is None:
            overridden_options.add("strength")  # strength applies to an input video
        ctx.params.update(dict.fromkeys(overridden_options & names_from_files))
        return extra

    def invoke(self, ctx: click.Context) -> Any:
        from wanjax.cli.checks import check  # imported late for a quick --help
        from wanjax.cli.runs import remove_old_runs

        folder = ctx.params.get("folder")
        remove_old_runs(keep=folder if isinstance(folder, Path) else None)
        assert self.callback is not None
        names = signature(self.callback).parameters
        arguments = {name: ctx.params[name] for name in names if name in ctx.params}
        if other_names := [name for name in names if name not in ctx.params]:
            from wanjax.cli.parsed import ARGUMENT_PARSERS  # imported late for a quick list of models

            arguments |= {name: ARGUMENT_PARSERS[name](ctx) for name in other_names}
        if "original_metadata" in ctx.params:  # `info` finds the workflow later
            workflow_options.check_folders(ctx)
        workflow_options.check_missing(ctx, OVERRIDDEN_PARAMETERS)
        check(ctx, arguments.get("request"))
        workflow_options.report_workflow(ctx)
        if ctx.params.get("print_command"):
            click.echo(workflow_options.command_text(ctx))
            return None
        if ctx.info_name in DOWNLOADING_COMMANDS:
            workflow_options.confirm_downloads(ctx)
        return ctx.invoke(self.callback, **arguments)


def read_config(ctx: click.Context, parameter: click.Parameter, file: str | None) -> None:
    """Read options from a TOML file: the options at the top of the file, which all commands share, and the table of the
    command.

    Raises:
        WanjaxError: A key is not an option of any command, or its value has the wrong type. The message names the key.
    """
    if file is not None and not ctx.resilient_parsing:
        check_file(Path(file).expanduser(), "give --config an existing TOML file")
        ctx.meta[CONFIG] = _options_from_config(file, ctx)
        _set_defaults(ctx)


def find_metadata(ctx: click.Context, parameter: click.Parameter, file: str | None) -> dict[str, Any] | None:
    """Read the prompt and the options from the metadata of a video; return the metadata."""
    if file is None or ctx.resilient_parsing:
        return None
    from wanjax.cli.runs import is_run_folder  # imported late for a quick --help

    if (graph := workflow_options.find_workflow(file)) is not None:
        set_workflow(ctx, file, graph)
        return None
    if ctx.info_name != "generate":
        check_file(file, "give --from an existing workflow of ComfyUI")
        raise WanjaxError(
            f"{file} contains no workflow of ComfyUI: `wanjax generate --from` reads a video of wanjax, and `wanjax "
            "info` shows its settings"
        )
    metadata = _load_metadata(file)
    # an option may replace a wrong value of the metadata
    names = metadata_parameters() - workflow_options.options_on_command_line(ctx)
    parameters = [x for x in ctx.command.params if x.name in names and metadata.get(x.name) is not None]
    values = {x.name: _checked_value(file, x.name, metadata[x.name], x) for x in parameters}
    if metadata.get("windows", 1) == 1 and not metadata.get("video"):
        values = {name: value for name, value in values.items() if name not in SEAM_SETTINGS}
    if values.get("outpaint") == NO_MARGINS:
        del values["outpaint"]  # another model may lack the setting
    if is_run_folder(Path(file)):  # the run resumes there
        values["folder"] = file
    ctx.meta[METADATA] = {
        "compiler": SAFE_COMPILER,
        **values,
        "tile": "tiling" in metadata,
    }  # metadata without an entry for the compiler options means the set `safe`
    _set_defaults(ctx)
    return metadata


def find_prompts(ctx: click.Context, parameter: click.Parameter, file: str) -> str | None:
    """Return the file with the requests of a batch. If the file is a workflow, use its options and return None. If it
    is a folder of workflows, use their requests and return the folder."""
    if not ctx.resilient_parsing and (graphs := workflow_options.find_workflows(file)):
        set_workflows(ctx, file, graphs)
        return file
    if ctx.resilient_parsing or (graph := workflow_options.find_workflow(file, may_be_prompts=True)) is None:
        return file
    _check_without_from(ctx, file)
    set_workflow(ctx, file, graph)
    ctx.params["prompt"] = ctx.meta[workflow_options.WORKFLOW].values["prompt"]
    return None


def _check_without_from(ctx: click.Context, file: str) -> None:
    if ctx.meta[workflow_options.COMMAND_LINE][1].get("original_metadata") is not None:
        raise click.UsageError(f"{file} and --from are both workflows: give one of them")


def set_workflows(ctx: click.Context, folder: str, graphs: Mapping[str, Any]) -> None:
    """Use the requests of all workflows in a folder. The workflows have the same model and the same LoRAs."""
    from wanjax.pipelines.request import VideoRequest, field_names  # imported late for a quick --help

    _check_without_from(ctx, folder)
    names = {*ctx.meta[workflow_options.COMMAND_LINE][1]} - {"prompts"}  # of options on the command line
    if "count" in names:
        raise click.UsageError(f"each workflow in {folder} has its own seed: leave --count out, or give --seeds")
    names |= {name for replacing in names for name in OVERRIDDEN_PARAMETERS.get(replacing, ())}
    all_options, rows = [], []
    for number, (file, graph) in enumerate(graphs.items(), 1):
        options = workflow_options.options_of(ctx, file, graph)
        if sentences := [sentence for name, sentence in options.missing.items() if name not in names]:
            raise WanjaxError(f"{file}: {sentences[0]}")
        fields = {
            name: value
            for name, value in options.values.items()
            if name in field_names() and name not in (*names, *SHARED_PARAMETERS)
        }
        for name in fields.keys() & INPUT_SPECS.keys():
            paths = fields[name]
            fields[name] = [*map(full_name, paths)] if isinstance(paths, list) else full_name(paths)
        try:
            rows.append(VideoRequest.parse(fields, row=number, row_noun=WORKFLOW_ROW))
        except WanjaxError as error:
            raise WanjaxError(f"{file}: {error}") from error
        all_options.append(options)
    shared_names = [name for name in SHARED_PARAMETERS if name not in names]
    ctx.meta[workflow_options.WORKFLOW] = merged = workflow_options.merge_options(folder, all_options, shared_names)
    ctx.meta[workflow_options.WORKFLOW_REQUESTS] = rows
    ctx.meta[METADATA] = dict(merged.values)
    _set_defaults(ctx)


def set_workflow(ctx: click.Context, file: str, graph: Any) -> None:
    """Set options from a workflow of ComfyUI."""
    options = workflow_options.options_of(ctx, file, graph)
    parameters = {str(parameter.name): parameter for parameter in ctx.command.params}
    values = {
        name: _checked_value(file, name, value, parameters[name])
        for name, value in options.values.items()
        if name in parameters and name not in workflow_options.options_on_command_line(ctx)
    }
    ctx.meta[workflow_options.WORKFLOW] = options
    ctx.meta[METADATA] = values
    _set_defaults(ctx)


def _load_metadata(file: str) -> dict[str, Any]:
    """Load the metadata of the video of --from. Raises WanjaxError if the metadata does not name the model."""
    from wanjax.cli.runs import check_not_removed  # imported late for a quick --help
    from wanjax.media.metadata import find_metadata

    check_not_removed(Path(file))
    metadata = find_metadata(file)
    if not isinstance(metadata.get("model"), str):
        advice = "give the generation_config.json next to the stage's file"
        if Path(file).suffix == ".json":
            advice = 'add the entry "model" to the file, such as "nano"'
        raise WanjaxError(f"{file} names no model: {advice}")
    return metadata


def _set_defaults(ctx: click.Context) -> None:
    """Set click's defaults from the files. If there is metadata, the TOML file sets only options that do not change the
    video."""
    options, metadata = ctx.meta.get(CONFIG, {}), ctx.meta.get(METADATA)
    if metadata is not None:
        allowed_names = NON_VIDEO_PARAMETERS
        if workflow_options.WORKFLOW in ctx.meta:
            allowed_names = (*NON_VIDEO_PARAMETERS, *MACHINE_PARAMETERS)
        options = {name: value for name, value in options.items() if name in allowed_names} | metadata
    ctx.default_map = options


def _options_from_config(file: str, ctx: click.Context) -> dict[str, Any]:
    """Read the options of a TOML file for the command of a context, by the names of its parameters."""
    group, command = ctx.parent.command if ctx.parent else None, str(ctx.info_name)
    assert isinstance(group, click.Group)
    options_by_command = {name: _options(group.commands[name]) for name in group.list_commands(ctx)}
    options_by_name = {
        key: option
        for name in (*reversed(options_by_command), command)
        for key, option in options_by_command[name].items()
    }
    for key in (key for name in options_by_command for key in _argument_names(group.commands[name])):
        options_by_name.pop(key, None)
    tables: dict[str, Any] = {}
    file_options = _load_table(file)
    for name in options_by_command.keys() & file_options.keys():
        if not isinstance(command_table := file_options.pop(name), dict):
            raise WanjaxError(f"{file} gives {name} as {command_table!r}: write a table [{name}] with its options")
        tables[name] = _parse_table(
            f"{file}, in [{name}],", command_table, options_by_command[name], group.commands[name]
        )
    for name in (key for key, value in file_options.items() if isinstance(value, dict) and key not in options_by_name):
        similar = [
            f"[{candidate}]" for candidate in get_close_matches(name, options_by_command, n=1) or options_by_command
        ]
        raise WanjaxError(f"{file} has a table {name!r}, but no command has this name: write {' or '.join(similar)}")
    names = {option.name for option in options_by_command[command].values()}
    shared_settings = {
        name: value
        for name, value in _parse_table(file, file_options, options_by_name, ctx.command).items()
        if name in names
    }
    return shared_settings | tables.get(command, {})


def _load_table(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(Path(file).expanduser()))
    except (OSError, ValueError) as error:  # errors of TOML and of Unicode are subclasses of ValueError
        raise WanjaxError(
            f"the options in {file} cannot be read as TOML, {reason(error)}: write lines such as steps = 20"
        ) from error


def _options(command: click.Command) -> dict[str, click.Option]:
    """Map names without leading dashes to the options that a file may set for a command."""
    by_name = {name[2:]: option for name, option in visible_options(command).items() if name.startswith("--")}
    return {key: option for key, option in by_name.items() if key not in OPTIONS_NOT_IN_CONFIG}


def _argument_names(command: click.Command) -> list[str]:
    """Return the arguments of a command that also have a hidden option. The top of a TOML file cannot set them."""
    hidden_options = [
        option for option in command.params if isinstance(option, click.Option) and option.hidden and not option.is_flag
    ]
    argument_names = {option.name for option in command.params if isinstance(option, click.Argument)}
    return [name[2:] for option in hidden_options for name in option.opts if name[2:] in argument_names]


def _parse_table(
    location: str, table: Mapping[str, Any], options: Mapping[str, click.Option], command: click.Command
) -> dict[str, Any]:
    """Read the values of a table by the names of parameters. A size becomes a height and a width.

    Args:
        location: The name of the table for messages.
        table: The table.
        options: The options that the table may set, by their names without leading dashes.
        command: The command, whose arguments the table may not set.
    """
    values: dict[str, Any] = {}
    arguments = [parameter.name for parameter in command.params if isinstance(parameter, click.Argument)]
    for key, value in table.items():
        name = current_option_name(key)
        if name not in options and name in arguments:
            raise WanjaxError(f"{location} has the argument {key!r}: give it on the command line, not in this file")
        if name not in options:
            similar = (
                [OTHER_OPTION_NAMES[name]]
                if OTHER_OPTION_NAMES.get(name) in options
                else get_close_matches(name, options, n=1)
            )
            raise WanjaxError(
                f"{location} has an unknown option {key!r}{f': did you mean {similar[0]}?' if similar else ''}"
            )
        option = options[name]
        checked = _checked_value(location, key, value, option)
        if option.name == "size" and isinstance(sides := read_size(checked), tuple):
            values |= zip(("height", "width"), sides, strict=True)
        else:
            values[option.name] = checked
    return values


def _checked_value(location: str, key: str, value: Any, parameter: click.Parameter) -> Any:
    """Check the type of a parameter's value. If the parameter may be given more than once, return a list."""
    types: tuple[type, ...] = (str,)
    expected_text = "a text"
    if getattr(parameter, "is_flag", False):
        types, expected_text = (bool,), "true or false"
    elif isinstance(parameter.type, click.types.IntParamType):
        types, expected_text = (int,), "a whole number"
    elif parameter.name == "seed":
        types, expected_text = (int, str), "a whole number or random"
    elif isinstance(parameter.type, click.types.FloatParamType):
        types, expected_text = (int, float), "a number"
    is_multiple = getattr(parameter, "multiple", False)
    values = value if is_multiple and isinstance(value, list) else [value]
    if any(type(item) not in types for item in values):
        value_text = str(value).lower() if isinstance(value, bool) else repr(value)  # in the form of TOML and JSON
        raise WanjaxError(f"{location} gives {key} as {value_text}: write {expected_text}")
    # File names and metadata cannot contain this character
    if any("\0" in item for item in values if isinstance(item, str)):
        raise WanjaxError(f"{location} gives {key} as {value!r}: write a text without the character \\0")
    return values if is_multiple else value


config = file_option(
    "--config",
    is_eager=True,  # eager: read before the options that the file sets
    expose_value=False,
    callback=read_config,
    help="Read options from a TOML file: from its top, or from a table such as [generate]. Options on the "
    "command line override the file.",
)
source = file_option(
    "--from",
    "original_metadata",
    is_eager=True,
    callback=find_metadata,
    help="Make the video FILE again, with the prompt and the settings in its metadata. A prompt and options that you "
    "add replace these values. FILE may also be a stage's file, a generation_config.json, a workflow of ComfyUI, or "
    "a video or picture that contains a workflow.",
)
batch_prompts = click.argument(
    "prompts", metavar="PROMPTS", shell_complete=complete_files, is_eager=True, callback=find_prompts
)
workflow_folders = combine_options(workflow_options.models, workflow_options.inputs)
from_workflow = combine_options(
    file_option(
        "--from",
        "original_metadata",
        is_eager=True,
        callback=find_metadata,
        help="Read the request from FILE, a workflow of ComfyUI. FILE may be a video or picture that contains one. The "
        "request is the model, the settings, the LoRAs and the pictures. Options that you add replace them.",
    ),
    workflow_options.models,
    workflow_options.inputs,
    workflow_options.print_command,
)
source = combine_options(source, workflow_options.models, workflow_options.inputs, workflow_options.print_command)
