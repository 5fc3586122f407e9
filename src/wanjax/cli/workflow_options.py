# SPDX-License-Identifier: Apache-2.0
"""Options from a workflow of ComfyUI: `--from`, `--models`, `--inputs` and `--print-command`.

Only `find_workflow` reads files, and the modules that it needs are imported when a command has such an option.
"""

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from wanjax.errors import WanjaxError, comma_list, printable
from wanjax.figures import join_with_and
from wanjax.media.inputs import INPUT_SPECS
from wanjax.workflows import SUFFIXES

if TYPE_CHECKING:
    from wanjax.workflows.files import FileLocation
    from wanjax.workflows.graph import Graph
    from wanjax.workflows.request import Workflow

COMMAND_LINE = "wanjax.raw"
"""The key in the `meta` of a command's context for its arguments and the options on the command line."""
WORKFLOW = "wanjax.workflow"
"""The key in the `meta` of a command's context for the options from a workflow."""
WORKFLOW_REQUESTS = "wanjax.rows"
"""The key in the `meta` of a command's context for the requests of a folder of workflows."""
CONFIG_FILE = "generation_config.json"
FOLDERS = ("models", "inputs")  # options with the folders of a workflow's files
FILE_OPTIONS = ("--from", *(f"--{name}" for name in FOLDERS))  # options that a printed command does not need
PRINT_COMMAND = "--print-command"


class WorkflowOptions(NamedTuple):
    """The options that a command takes from a workflow.

    Args:
        file: The file with the workflow.
        values: Values by the names of parameters.
        missing: Sentences about parameters without a value, by parameter.
        downloads: Names on the hub of files to download, by parameter.
        file_notes: Sentences about the locations of files, by parameter.
        notes: Sentences about differences from ComfyUI.
    """

    file: str
    values: Mapping[str, Any]
    missing: Mapping[str, str]
    downloads: Mapping[str, Sequence[str]]
    file_notes: Mapping[str, Sequence[str]]
    notes: Sequence[str]

    def sentences(self, replaced: Collection[str] = ()) -> list[str]:
        """List the sentences for the user.

        Args:
            replaced: Parameters that the user has replaced. Sentences about their files are left out.
        """
        file_notes = [note for name, sentences in self.file_notes.items() if name not in replaced for note in sentences]
        return [*file_notes, *self.notes]


def store_command_line(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> None:
    """Store the options of a command line before their callbacks run, because `--from` depends on other options.

    Args:
        command: The command.
        ctx: Its context.
        arguments: Its arguments.
    """
    try:
        options, _, _ = command.make_parser(ctx).parse_args(list(arguments))
    except click.ClickException:  # the command itself will report this error
        options = {}
    ctx.meta[COMMAND_LINE] = (list(arguments), options)


def options_on_command_line(ctx: click.Context) -> set[str]:
    """Return the names of the options on the command line, without arguments.

    Args:
        ctx: The command's context.
    """
    return {
        str(x.name) for x in ctx.command.params if isinstance(x, click.Option) and x.name in ctx.meta[COMMAND_LINE][1]
    }


def find_workflow(file: str, *, may_be_prompts: bool = False) -> "Graph | None":
    """Return the graph of the workflow in a file, or None if it has none.

    Args:
        file: The file of --from.
        may_be_prompts: Whether JSON that is too large for a workflow is the prompts of a batch.

    Raises:
        WanjaxError: The workflow is damaged or too large.
    """
    path = Path(file).expanduser()
    if path.suffix.lower() not in SUFFIXES or path.name == CONFIG_FILE or not path.is_file():
        return None
    from wanjax.workflows import reading  # imported late for a quick --help

    try:
        return reading.find_workflow(path)
    except reading.UnreadJsonError:
        if may_be_prompts and path.suffix.lower() == ".json":
            return None
        raise


def find_workflows(folder: str) -> "dict[str, Graph]":
    """Return the workflows in the files of a folder, by the names of the files. The result is empty if `folder` is not
    a folder.

    Args:
        folder: The folder. Its subfolders are not read.

    Raises:
        WanjaxError: A workflow is damaged or too large.
    """
    path = Path(folder).expanduser()
    names = sorted(os.listdir(path)) if path.is_dir() else []
    graphs = {str(Path(folder) / name): find_workflow(os.path.join(folder, name)) for name in names}
    return {name: graph for name, graph in graphs.items() if graph is not None}


def merge_options(folder: str, options: Sequence[WorkflowOptions], names: Collection[str]) -> WorkflowOptions:
    """Return the options that all workflows of a folder share.

    Args:
        folder: The folder.
        options: The options of each workflow.
        names: The parameters that must be equal.

    Raises:
        WanjaxError: One of these parameters differs.
    """
    first = options[0]
    for other in options[1:]:
        for name in names:
            if other.values.get(name) != first.values.get(name):
                raise WanjaxError(
                    f"{other.file} has another {name} than {first.file}: a folder has workflows of one model with the "
                    f"same LoRAs, so move one of them, or give --{name}"
                )
    files_by_sentence: dict[str, list[str]] = {}
    for workflow_options in options:
        for sentence in dict.fromkeys(workflow_options.sentences()):
            files_by_sentence.setdefault(sentence, []).append(Path(workflow_options.file).name)
    notes = [
        sentence if len(files) == len(options) else f"{comma_list(files)}: {sentence}"
        for sentence, files in files_by_sentence.items()
    ]
    values = {name: first.values[name] for name in names if name in first.values}
    return WorkflowOptions(folder, values, {}, first.downloads, {}, notes)


def options_of(ctx: click.Context, file: str, graph: "Graph", command: str | None = None) -> WorkflowOptions:
    """Read a workflow's request as options of a command.

    Args:
        ctx: The command's context.
        file: The file with the workflow.
        graph: The workflow's graph.
        command: The command's name, if it differs from the name of the context.
    """
    from wanjax.workflows.files import Folders, find_file  # imported late for a quick --help
    from wanjax.workflows.reading import measure
    from wanjax.workflows.request import read_workflow

    folders = Folders(_folder(ctx, "models"), _folder(ctx, "inputs"))

    def measured(picture: Any) -> Any:
        path = find_file(picture, folders)
        return path and measure(path)

    try:
        workflow = read_workflow(graph, measured, steps=_whole_number(ctx.meta[COMMAND_LINE][1].get("steps")))
    except WanjaxError as error:
        raise WanjaxError(f"{file}: {error}") from error
    reader = _OptionReader(workflow, folders, downloads_nothing=(command or ctx.info_name) == "plan")
    reader.read()
    notes = [*workflow.notes, *_fit_to_command_line(ctx, reader.values)]
    return WorkflowOptions(file, reader.values, reader.missing, reader.downloads, reader.file_notes, notes)


def _fit_to_command_line(ctx: click.Context, values: dict[str, Any]) -> list[str]:
    """Adapt the values of a workflow to options on the command line that replace some of the values. Return sentences
    about the changes.

    With another number of steps, the second expert takes over at the same share of the steps. Settings that another
    model lacks are left out.

    Args:
        ctx: The command's context.
        values: The values of the workflow, which are changed.
    """
    from wanjax.cli import listing  # imported late for a quick --help
    from wanjax.cli.options import SETTINGS

    options, notes = ctx.meta[COMMAND_LINE][1], []
    steps, old_steps, boundary = _whole_number(options.get("steps")), values.get("steps"), values.get("boundary_step")
    if steps is not None and old_steps and boundary and "boundary_step" not in options:
        values["boundary_step"] = round(boundary * steps / old_steps)
        notes.append(
            f"the second expert takes over after step {values['boundary_step']} of {steps}, as in the workflow "
            f"after {boundary} of {old_steps}"
        )
    model = options.get("model") or options.get("model_option")
    if isinstance(model, str) and (listed_model := listing.find_model(model)):
        known_names = {*listed_model["defaults"], "prompt", "size", "seconds"}
        unsupported_names = [
            name for name in values if name in SETTINGS and name not in known_names and name not in options
        ]
        for name in unsupported_names:
            del values[name]
        if unsupported_names:
            notes.append(f"{model} has no {' and no '.join(unsupported_names)}: the workflow's values are left out")
    return notes


def _whole_number(option: Any) -> int | None:
    """Return the whole number of an option on the command line, or None."""
    return int(option) if str(option).isdecimal() else None


def check_folders(ctx: click.Context) -> None:
    """Raise UsageError for a folder of a workflow's files if the command has no workflow.

    Args:
        ctx: The command's context.
    """
    for name in FOLDERS:
        if name in ctx.meta[COMMAND_LINE][1] and WORKFLOW not in ctx.meta:
            raise click.UsageError(
                f"--{name} is the folder of a workflow's files, and there is no workflow: give a workflow with --from, "
                f"or leave --{name} out"
            )


def _folder(ctx: click.Context, name: str) -> Path | None:
    """Return the folder of an option. Raises WanjaxError if it does not exist."""
    text = ctx.meta[COMMAND_LINE][1].get(name)
    if not isinstance(text, str):
        return None
    if not (folder := Path(text).expanduser()).is_dir():
        raise WanjaxError(f"--{name} {folder} does not exist or is not a folder: give an existing folder")
    return folder


class _OptionReader:
    """Converts the request of a workflow to values of options, and finds its files."""

    def __init__(self, workflow: "Workflow", folders: Any, *, downloads_nothing: bool):
        self.workflow, self.folders, self.downloads_nothing = workflow, folders, downloads_nothing
        self.values: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.downloads: dict[str, list[str]] = {}
        self.file_notes: dict[str, list[str]] = {}

    def read(self) -> None:
        from wanjax.workflows.request import Missing

        for name, value in {**self.workflow.settings, "scheduler": self.workflow.scheduler}.items():
            if isinstance(value, Missing):
                self.missing[name] = value.sentence
            else:
                self.values[name] = value
        if self.workflow.is_tiled:
            self.values["tile"] = True
        self._read_model()
        self._read_loras()
        self._read_inputs()
        self._note_other_files()

    def _add_file_note(self, parameter: str, file: Any, location: str) -> None:
        from wanjax.workflows.values import base_name

        self.file_notes.setdefault(parameter, []).append(f"{base_name(file.name)}: {location}")

    def _locate(self, parameter: str, file: Any) -> "FileLocation | None":
        """Find a file of weights. If the file is missing, store the sentence about it under its parameter."""
        from wanjax.workflows.files import locate

        try:
            located = locate(file, self.folders, self.workflow.addresses)
        except WanjaxError as error:
            self.missing.setdefault(parameter, str(error))
            return None
        self._add_file_note(parameter, file, located.description)
        if located.needs_download:
            self.downloads.setdefault(parameter, []).append(located.name)
        return located

    def _read_model(self) -> None:
        from wanjax.registry import companion_files
        from wanjax.workflows.files import check_pair

        located = [self._locate("model", file) for file in self.workflow.files]
        names = [file.name for file in located if file is not None]
        if len(names) == len(located) == 2:
            try:
                check_pair(names[0], names[1], companion_files)
            except WanjaxError as error:
                self.missing["model"] = str(error)
        is_local = not self.downloads.get("model") and "model" not in self.missing
        if self.downloads_nothing and self.workflow.model and not (is_local and Path(names[0]).is_file()):
            self.values["model"] = self.workflow.model  # described without its files
            self.missing.pop("model", None)
        elif self.downloads_nothing and (hub_names := self.downloads.get("model")):
            self.missing["model"] = f"a plan does not download {hub_names[0]}: give --models FOLDER, or --model"
        elif "model" not in self.missing:
            self.values["model"] = names[0]

    def _read_loras(self) -> None:
        from wanjax.checkpoints.lora_source import Lora

        loras = []
        for use in self.workflow.loras:
            if (located := self._locate("lora", use.file)) is not None:
                loras.append(str(Lora(located.name, use.strength, use.expert)))
        if self.downloads_nothing and self.missing.pop("lora", None):
            self.file_notes["lora"] = ["a LoRA that is not found is left out, because it does not change the price"]
        if loras:
            self.values["lora"] = loras

    def _read_inputs(self) -> None:
        from wanjax.workflows.files import find_file
        from wanjax.workflows.request import Missing
        from wanjax.workflows.values import base_name

        for name, value in self.workflow.inputs.items():
            if isinstance(value, Missing):
                self.missing[name] = value.sentence
                continue
            paths = []
            for file in value if isinstance(value, list) else [value]:
                path = find_file(file, self.folders)
                if path is None:
                    folder_text = self.folders.inputs or "a folder given by --inputs"
                    self.missing[name] = (
                        f"{file.node} loads {base_name(file.name)}, which is not in {folder_text}: "
                        f"give {INPUT_SPECS[name].option} FILE, or --inputs FOLDER"
                    )
                else:
                    paths.append(str(path))
                    self._add_file_note(name, file, str(path))
            if name not in self.missing:
                self.values[name] = paths if isinstance(value, list) else paths[0]
        if self.downloads_nothing:  # a picture that is left out has the size of the video
            for name in self.workflow.inputs:
                self.missing.pop(name, None)

    def _note_other_files(self) -> None:
        """Add notes about components whose files the workflow names, but wanjax does not read. The notes say where the
        components come from."""
        from wanjax.cli import listing
        from wanjax.workflows.graph import short_text
        from wanjax.workflows.request import COMPONENTS
        from wanjax.workflows.values import base_name

        files = self.workflow.other_files
        if not files:
            return
        listed_model = listing.find_model(self.workflow.model or "")
        source = listed_model["source"] if listed_model else "the model's own repository"
        names = ", ".join(short_text(base_name(file.name)) for file in files)
        components = join_with_and([f"the {name}" for name in dict.fromkeys(COMPONENTS[file.kind] for file in files)])
        verb = "come" if " and " in components else "comes"
        self.file_notes.setdefault("model", []).append(
            f"{names}: not read from ComfyUI's folders, {components} {verb} from {source}"
        )


def check_missing(ctx: click.Context, overridden: Mapping[str, Sequence[str]]) -> None:
    """Raise an error for a value that neither the workflow nor the command line has.

    Args:
        ctx: The command's context.
        overridden: `defaults.OVERRIDDEN_PARAMETERS`.
    """
    options: WorkflowOptions | None = ctx.meta.get(WORKFLOW)
    if options is None:
        return

    def is_on_command_line(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    names = {parameter.name for parameter in ctx.command.params}
    for name, sentence in options.missing.items():
        overriding = [other for other, overridden_names in overridden.items() if name in overridden_names]
        if name in names and not any(map(is_on_command_line, (name, *overriding))):
            raise WanjaxError(f"{options.file}: {sentence}")


def report_workflow(ctx: click.Context) -> None:
    """Print the location of each file of a workflow, and the differences from ComfyUI.

    Args:
        ctx: The command's context.
    """
    options: WorkflowOptions | None = ctx.meta.get(WORKFLOW)
    if options is not None:
        replaced = [
            name for name in options.file_notes if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]
        for sentence in options.sentences(replaced):
            ctx.obj.note(sentence)


def confirm_downloads(ctx: click.Context) -> None:
    """Ask the user before the files that a workflow names are downloaded.

    Without a terminal, the user cannot be asked, and nothing is downloaded.

    Args:
        ctx: The command's context.

    Raises:
        WanjaxError: The user refuses, or cannot be asked.
    """
    options: WorkflowOptions | None = ctx.meta.get(WORKFLOW)
    if options is None or ctx.params.get("at") is not None:
        return
    names = [
        name
        for parameter, hub_names in options.downloads.items()
        if ctx.get_parameter_source(parameter) is ParameterSource.DEFAULT_MAP
        for name in hub_names
    ]
    if not names:
        return
    from wanjax.workflows.files import describe_download  # imported late for a quick --help

    described = describe_download(names)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WanjaxError(
            f"{options.file} needs {described}: give --models FOLDER with these files, or run the command that "
            f"{PRINT_COMMAND} prints to download them"
        )
    if not click.confirm(f"Download {described}?", err=True):
        raise WanjaxError("the files are not downloaded: give --models FOLDER with these files, or another --model")


def command_text(ctx: click.Context) -> str:
    """Return an equivalent command without the options --from, --models and --inputs.

    Args:
        ctx: The command's context.
    """
    workflow: WorkflowOptions | None = ctx.meta.get(WORKFLOW)
    if WORKFLOW_REQUESTS in ctx.meta:
        raise click.UsageError(
            f"{PRINT_COMMAND} prints the command of one workflow, and {ctx.params['prompts']} is a folder of them: "
            "give one of its files"
        )
    prompt: str | None = None
    words = ["wanjax", str(ctx.info_name)]
    if ctx.info_name == "batch" and workflow is not None and ctx.params.get("prompts") is None:
        _check_options_of_generate(ctx)
        words, prompt = ["wanjax", "generate"], workflow.values["prompt"]
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP or name not in ctx.params:
            continue
        value = (ctx.default_map or {}).get(name)
        if value is None or ctx.params[name] is None or value is False:  # False: a flag that is not set
            continue
        if name == "then" and not any(value):  # no prompts of later windows
            continue
        if name == "prompt" and isinstance(parameter, click.Argument):
            prompt = str(value)
            continue
        option = next((opt for opt in parameter.opts if opt.startswith("--")), f"--{name.replace('_', '-')}")
        for item in value if isinstance(value, list | tuple) else [value]:
            words += (
                [option] if item is True else [f"{option}={item}"] if str(item).startswith("-") else [option, str(item)]
            )
    words += _remaining_words(ctx)
    if prompt is not None:
        words += [prompt] if prompt.strip() and not prompt.startswith("-") else [f"--prompt={prompt}"]
        words += [] if prompt.strip() else ["--allow-empty-prompt"]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quote a word for a shell. Control characters become escapes."""
    if printable(word, allowed="\n") == word:
        return shlex.quote(word)
    escapes = {"\\": "\\\\", "'": "\\'"}
    return f"$'{''.join(escapes.get(char) or _escaped(char) for char in word)}'"


def _escaped(char: str) -> str:
    """Return a character in the form of $'...' in bash and zsh. Unprintable characters become escapes of their bytes in
    UTF-8."""
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))


def _check_options_of_generate(ctx: click.Context) -> None:
    """Raise UsageError for an option of `batch` that `generate` lacks, or that has another meaning in `generate`."""
    assert ctx.parent is not None
    if "out" in ctx.meta[COMMAND_LINE][1] and not {"count", "seeds"} & ctx.meta[COMMAND_LINE][1].keys():
        raise click.UsageError(
            f"{PRINT_COMMAND} prints a command of `wanjax generate`, whose --out names a file: leave --out out here, "
            "and give it with the printed command"
        )
    group = ctx.parent.command
    assert isinstance(group, click.Group)
    shared_names = {parameter.name for parameter in group.commands["generate"].params}
    for parameter in ctx.command.params:
        is_option = isinstance(parameter, click.Option) and parameter.expose_value
        if is_option and parameter.name in ctx.meta[COMMAND_LINE][1] and parameter.name not in shared_names:
            raise click.UsageError(
                f"{PRINT_COMMAND} prints a command of `wanjax generate`, and {parameter.opts[-1]} is only for "
                "`wanjax batch`: leave it out"
            )


def _remaining_words(ctx: click.Context) -> list[str]:
    """Return the words of the command line that `command_text` does not replace."""
    words, skips = [], False
    for word in ctx.meta[COMMAND_LINE][0]:
        name = word.partition("=")[0]
        if skips:
            skips = False
        elif name in FILE_OPTIONS:
            skips = "=" not in word
        elif word != PRINT_COMMAND and not _is_workflow_argument(ctx, word):
            words.append(word)
    return words


def _is_workflow_argument(ctx: click.Context, word: str) -> bool:
    """Return True if a word is the argument of a batch, in place of prompts, that names a workflow's file."""
    options: WorkflowOptions | None = ctx.meta.get(WORKFLOW)
    return options is not None and word == options.file and ctx.info_name == "batch"


def _folder_option(name: str, help_text: str) -> Any:
    return click.option(name, metavar="FOLDER", expose_value=False, help=help_text)


models = _folder_option(
    "--models",
    "With --from: ComfyUI's folder `models`, which has the files of a workflow. wanjax asks before it downloads other "
    "files.",
)
inputs = _folder_option(
    "--inputs", "With --from: ComfyUI's folder `input`, which has the pictures and clips of a workflow."
)
print_command = click.option(
    PRINT_COMMAND,
    "print_command",
    is_flag=True,
    help="Print the command that does the same as --from, and stop.",
)
