# SPDX-License-Identifier: Apache-2.0
"""The command line: `wanjax "a red circle moving right"`.

This module defines the commands and their options. The other modules of this package have the code that runs the
commands. The code of a command is imported only when the command runs, so that `--help` does not wait for JAX. If the
user makes a mistake, the command prints one sentence without a traceback.
"""

import os
import signal
from collections.abc import Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from wanjax.cli import defaults, options, scale_options, train_options
from wanjax.cli.arguments import (
    check_prompt,
    complete_commands,
    complete_files,
    complete_models,
    describe_click_error,
    message_with_option,
    shorten,
)
from wanjax.cli.report import Report, handle_interrupts, print_error
from wanjax.errors import (
    DISK_FULL_ERRNOS,
    FILE_NAME_ERRNOS,
    RequestError,
    WanjaxError,
    is_failure,
    is_out_of_memory,
    printable,
)
from wanjax.layers.precision import STORABLE_PRECISIONS
from wanjax.pricing import libtpu
from wanjax.signals import INTERRUPTED, stop

if TYPE_CHECKING:
    from wanjax.cli.parsed import (
        CommandOptions,
        ListenOptions,
        PipelineOptions,
        ServeOptions,
        TrainingOptions,
        WorkerOptions,
        WorkloadOptions,
    )
    from wanjax.pipelines.request import VideoRequest

FAILURE, USAGE_ERROR = 1, 2  # exit statuses
CANNOT_WRITE = "cannot write"
LINE_END = "\n"
NO_HOME_MESSAGE = "determine home directory"  # a part of the message of pathlib's error
GPU_DEVICE_FILES = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg")  # device files of NVIDIA, of AMD, and of both on Windows
DEVICE_PLUGINS = (
    "libtpu",
    "jax_cuda13_plugin",
)  # plugins that JAX tries; each prints pages of messages if no device is present
DEFAULT_COMMAND = "generate"  # the command that runs if the arguments name no command


class Commands(click.Group):
    """The group of all commands. Arguments that do not start with the name of a command are passed to `generate`."""

    command_class = defaults.Command
    commands: dict[str, defaults.Command]  # pyright: ignore[reportIncompatibleVariableOverride]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [
            name for name in self.commands if not self.commands[name].hidden
        ]  # the help shows commands in the order of their definitions; click would sort them by name

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for command in self.commands.values():
            command.add_registered_inputs()
        group_options = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0] not in group_options | self.commands.keys():
            args = [DEFAULT_COMMAND, *args]
            ctx.meta[DEFAULT_COMMAND] = True
        try:
            return super().parse_args(ctx, args)
        # an unknown option next to an option of the group, such as --version
        except (click.NoSuchOption, click.BadOptionUsage) as error:
            click.echo(f"wanjax: {describe_click_error(error)}", err=True)
            ctx.exit(USAGE_ERROR)
        except OSError as error:  # raised while the help is printed
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            click.echo(f"wanjax: {CANNOT_WRITE}: {error.strerror}", err=True)
            ctx.exit(FAILURE)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # with resilient parsing, a shell asks for completions
        if DEFAULT_COMMAND in ctx.meta and not ctx.resilient_parsing:
            check_prompt(ctx, args[1:], DEFAULT_COMMAND)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands, the group's options, and the arguments of the default command."""
        default_context = click.Context(self.commands[DEFAULT_COMMAND], parent=ctx, resilient_parsing=True)
        items = super().shell_complete(ctx, incomplete)
        values = {item.value for item in items}
        return items + [
            item
            for item in default_context.command.shell_complete(default_context, incomplete)
            if item.value not in values
        ]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke_and_report_errors(ctx)
        except BaseException as error:
            if ctx.obj and ctx.obj.has_peers:
                ctx.obj.exit_despite_peers(error)
            raise

    def _invoke_and_report_errors(self, ctx: click.Context) -> Any:
        """Invoke the command; print an error as one sentence, and exit with its status."""
        is_wrong_request = False
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:  # --help
            raise
        except click.ClickException as error:
            status, message = USAGE_ERROR, describe_click_error(error)
        except WanjaxError as error:
            command = self.commands.get(ctx.invoked_subcommand or "")
            status, message = FAILURE if is_failure(error) else USAGE_ERROR, message_with_option(error, command)
            is_wrong_request = isinstance(error, RequestError)
        except OSError as error:
            name = shorten(str(error.filename or ""))
            if error.errno in DISK_FULL_ERRNOS:
                status, message = FAILURE, f"{CANNOT_WRITE}{f' to {name!r}' if name else ''}: {error.strerror}"
            elif error.errno in FILE_NAME_ERRNOS and name:
                status, message = USAGE_ERROR, f"{name!r} cannot be used as the name of a file: {error.strerror}"
            else:
                _print_outcome(ctx)
                raise
        except KeyboardInterrupt:
            status, message = INTERRUPTED, "stopped"
        except Exception as error:
            if is_out_of_memory(error):
                status, message = FAILURE, "out of memory: give a smaller --size, fewer --frames, or --dtype bfloat16"
            elif isinstance(error, RuntimeError) and NO_HOME_MESSAGE in str(error):
                status, message = (
                    USAGE_ERROR,
                    "~ cannot be expanded, because this user has no home folder: give the whole path",
                )
            else:
                _print_outcome(ctx)
                raise
        print_error(f"wanjax: {printable(message, allowed=LINE_END)}\n")
        if not is_wrong_request:  # the same command with a wrong request would fail again
            _print_outcome(ctx)
        ctx.exit(status)


def _print_outcome(ctx: click.Context) -> None:
    if ctx.obj:
        print_error(ctx.obj.outcome)


@click.group(cls=Commands, context_settings=options.CONTEXT, epilog='`wanjax "PROMPT"` is `wanjax generate "PROMPT"`.')
@click.version_option(package_name="wanjax", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Make videos from prompts, in JAX."""
    libtpu.silence()
    has_device = libtpu.has_tpu() or any(map(glob, GPU_DEVICE_FILES))
    if any(map(find_spec, DEVICE_PLUGINS)) and not has_device:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # without devices, JAX loads no plugin
    ctx.obj = Report()
    ctx.with_resource(ctx.obj.print_warnings())
    if signal.getsignal(signal.SIGINT) is stop:  # True if no other code runs in this process
        ctx.obj.runs_alone = True
        ctx.with_resource(handle_interrupts(ctx.obj.interrupted))


@main.command()
@options.prompt
@defaults.source
@options.many_prompts_options
@options.generation_options
@options.at
@options.profile
@options.preview
@options.run_folder_option
@options.out_option
@options.output_options
@defaults.config
def generate(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    command: "CommandOptions",
    at: str | None,
    original_metadata: Mapping[str, Any] | None,
) -> None:
    """Make a video from PROMPT, and from pictures with models that take them.

    Runs three stages: encode, denoise and decode. Each stage frees its memory before the next one starts. The files of
    the stages are kept, so that you can resume a run that was stopped. The name of the video consists of the prompt,
    the seed and the time, unless you give --out or --dir. Options that you leave out take the values that the model's
    authors recommend.

    With --prompts, --seeds or --count the model is loaded once and makes many videos in the folder --out, as `wanjax
    batch` does. Each video is saved when it is complete. A video that already exists is made again only with --force.

    With --from a video is made again from the settings in its metadata. A prompt and options that you add replace
    settings from the metadata.

    With --at a running `wanjax serve` makes the video. The server accepts the same settings and pictures. Options that
    belong to the server, such as --model and --lora, must have the values with which the server was started.
    """
    if at is not None:
        from wanjax.cli import remote

        return remote.generate(report, request, options, command, at, original_metadata)
    if original_metadata is not None:
        from wanjax.cli import remake

        first_model = original_metadata["model"]
        request, options, original_metadata = remake.complete_from_metadata(request, options, original_metadata)
        if original_metadata is None:
            report.note(f"note: the settings are those of the video by {first_model}: {options.model} may need others")
    from wanjax.cli import many, stages
    from wanjax.cli.extending import Extender, extend_request

    extend = Extender.from_options(report, request, options, command)
    if command.prompts is None:
        request, extend = extend_request(request, extend), None
    if command.makes_several:
        many.generate(report, request, options, command, extend=extend, original_metadata=original_metadata)
    else:
        stages.generate(report, request, options, command, original_metadata)


@main.command()
@defaults.batch_prompts
@options.batch
@defaults.from_workflow
@options.seeds
@options.generation_options
@options.folder_out
@options.output_options
@defaults.config
def batch(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    command: "CommandOptions",
    workers: int | None,
    worker_options: "WorkerOptions",
) -> None:
    """Make a video from each request in PROMPTS, with one worker or many.

    PROMPTS is a file, or - for standard input. Each line of the file is a prompt or a JSON object. The file may also be
    a JSON array of prompts and objects. A .csv or .parquet file has a request in each row. A request may have any
    setting of a video, the names of pictures and clips, and its own seed. The options give the settings that a request
    does not have. With --from, these settings come from a workflow of ComfyUI. PROMPTS may also be such a workflow, or
    a folder of workflows of one model. All requests are checked before the first video is made.

    A video gets its name when it is complete, and manifest.jsonl in the same folder lists the video. If the command
    ends early, run the same command again: it makes the videos that are missing. The workers are processes of this
    machine. With --ray they are actors of a Ray cluster. With --database, processes of
    `wanjax worker` on other hosts can take jobs too.
    """
    from wanjax.cli import many
    from wanjax.cli.extending import Extender

    many.generate(
        report,
        request,
        options,
        command,
        workers,
        worker_options,
        Extender.from_options(report, request, options, command),
    )


@main.command()
@options.prompt
@options.model
@options.text
@options.pictures
@options.shape
@options.setting("follow")
@options.compute
@options.devices
@options.tile
@options.offload
@options.stage_folder
@options.output_options
@defaults.config
def encode(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Encode PROMPT and pictures: the first stage.

    Writes the embeddings and the model's recommended settings to --dir. Pictures are encoded for one size and one
    number of frames, which later stages cannot change.
    """
    from wanjax.cli import stages

    stages.encode(report, request, options, command)


@main.command()
@options.model_override
@options.shape
@options.denoising
@options.lora
@options.attention
@options.batch_guidance
@options.compute
@options.devices
@options.offload
@options.profile
@options.preview
@options.stage_folder
@options.output_options
@defaults.config
def denoise(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Denoise latents: the second stage.

    Reads the files that `encode` wrote to --dir. Options that you leave out take the values that are stored there.
    """
    from wanjax.cli import stages

    stages.denoise(report, request, options, command)


@main.command()
@options.model_override
@options.setting("fps")
@options.compute
@options.devices
@options.tile
@options.decoder
@options.stage_folder
@options.stage_out
@options.output_options
@defaults.config
def decode(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Decode latents to a video: the third stage.

    Reads the files that `denoise` or `generate` wrote to --dir.
    """
    from wanjax.cli import stages

    stages.decode(report, request, options, command)


@main.command()
@options.model_argument
@options.chip
@defaults.from_workflow
@options.example_prompt
@options.video
@options.mesh
@options.rules
@options.tile
@options.decoder
@options.offload
@train_options.priced_training_options
@scale_options.workload_options
@options.quiet
@click.option(
    "--programs", is_flag=True, help="List each program. For NVIDIA's cards, also list the kernels of each program."
)
@click.option(
    "--fit", is_flag=True, help="Print the options with which the video fits into 16, 24, 32 and 80 GiB of memory."
)
@options.as_json
@defaults.config
def plan(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    chip: str,
    training_options: "TrainingOptions",
    workload_options: "WorkloadOptions",
    as_json: bool,
    programs: bool,
    fit: bool,
) -> None:
    """Price a video of MODEL, by default nano, on chips that you need not have.

    Prints the memory of each stage, the seconds of a step and of the run, and what limits them. For TPUs, the TPU's own
    compiler compiles the programs and prices them. For NVIDIA's cards, with the extra plan-cuda, XLA compiles the
    programs and a documented model estimates their times. The documented model also prices other devices. No weights
    are loaded. A LoRA does not change the price, because it is merged into the weights. Pictures that you leave out
    have the size of the video.

    A step of training is priced with --train. Many videos are priced with --requests: how many slices meet --deadline,
    which mesh takes the fewest chip-hours, and what the videos cost.
    """
    from wanjax.cli import planning

    planning.plan(
        report, request, options, chip, training_options, workload_options, as_json=as_json, programs=programs, fit=fit
    )


@main.command()
@options.model
@options.chip_elsewhere
@options.example_prompt
@options.video
@options.devices
@options.tile
@options.decoder
@options.offload
@options.verbosity_options
@options.stats
@defaults.config
def warmup(report: Report, request: "VideoRequest", options: "PipelineOptions", chip: str | None) -> None:
    """Compile all programs that a run needs.

    Traces a run without loading its weights, so that `generate` with the same options starts without compiling. The
    compiled programs are kept in the user's cache, or in --compile-cache for everyone who shares it. A later run uses
    them only if it has the same options, code and devices. With --chip the programs are compiled for TPUs that this
    machine need not have.
    """
    from wanjax.cli import planning

    planning.warmup(report, request, options, chip)


@main.command()
@click.argument("model", default="nano", shell_complete=complete_models)
@click.option(
    "--with-prompt",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Prompt to use in place of the default prompts; may be given more than once.",
)
@options.image
@options.shape
@options.setting("steps")
@options.setting("guidance_scale")
@options.attention
@options.compute
@options.mesh
@options.rules
@options.verbosity_options
@defaults.config
def calibrate(report: Report, request: "VideoRequest", options: "PipelineOptions", texts: tuple[str, ...]) -> None:
    """Measure the tables that step caches need for MODEL.

    Denoises a few prompts without a cache. Writes MagCache's ratios and TeaCache's polynomial to the user's data
    folder, where `--cache` finds them. Give the same size, number of steps and guidance as for the videos that you will
    make.
    """
    from wanjax.cli import measuring

    measuring.calibrate(report, request, options, texts)


@main.command()
@click.argument("source", shell_complete=complete_models)
@click.argument("target", required=False, metavar="[FOLDER]", shell_complete=complete_files)
@click.option(
    "--to", type=click.Choice(["wanjax", "diffusers"]), default="wanjax", show_default=True, help="Layout of FOLDER."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[COMPONENT=]DTYPE",
    help="Dtype of the stored weights, bfloat16 or float32. The dtype applies to the named component, or to "
    "all components except the autoencoder.",
)
@click.option(
    "--precision",
    type=click.Choice(STORABLE_PRECISIONS),
    help="Store the transformer's projections with 8 bits, in the format of this precision.",
)
@options.lora
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of the repository on the hub.")
@click.option(
    "--verify", "check", is_flag=True, help="Compare SOURCE, a wanjax checkpoint, with its checksums; convert nothing."
)
@options.verbosity_options
@defaults.config
def convert(
    report: Report,
    source: str,
    target: str | None,
    to: str,
    dtypes: tuple[str, ...],
    precision: str | None,
    lora: tuple[str, ...],
    revision: str | None,
    check: bool,
) -> None:
    """Convert SOURCE, a name, hub id, folder or file, to a checkpoint in FOLDER.

    A source folder has the layout of diffusers or of the model's authors. A source file contains the transformer, and
    may contain other components, like a file for ComfyUI. The checkpoint in FOLDER loads directly onto any number of
    devices. Weights keep their dtype, unless you give --dtype. With --lora the LoRA is merged into the checkpoint. The
    same command resumes a conversion that was stopped.
    """
    from wanjax.cli import conversion

    conversion.convert(report, source, target, to, dtypes, precision, lora, revision, check)


@main.command()
@click.argument("model", shell_complete=complete_models)
@click.argument("data", type=click.Path(path_type=Path), shell_complete=complete_files)
@train_options.train
@options.shape
@options.attention
@options.compute
@options.devices
@options.verbosity_options
@options.stats
@options.json
@defaults.config
def train(report: Report, options: "PipelineOptions", ctx: click.Context, data: Path, out: Path) -> None:
    """Train a LoRA for MODEL, or all its weights, on DATA.

    DATA is a folder of clips and pictures, or a table of them. Captions are in a text file of the same name next to
    each clip, or in the folder's metadata.csv or metadata.jsonl. Clips and captions are encoded once and kept next to
    the data. The same command resumes a training that was stopped. Give more --steps to continue a training that is
    finished. The result is the file FOLDER/lora.safetensors, or with --full the folder FOLDER/checkpoint. `wanjax plan
    MODEL --train` prices a step before you start.
    """
    from wanjax.cli import training

    training.train(report, options, ctx, data=data, out=out)


@main.command()
@click.argument("file", shell_complete=complete_files)
@defaults.workflow_folders
@options.as_json
@defaults.config
def info(ctx: click.Context, file: str, as_json: bool) -> None:
    """Show how the video FILE was made.

    Prints the model, the prompt, the settings and everything else that shaped the video, from its metadata. FILE may
    also be a stage's file, a generation_config.json, a workflow of ComfyUI, or a video or picture that contains a
    workflow. `wanjax generate --from FILE` makes the video again.
    """
    from wanjax.cli import catalogue, workflow_options

    if (graph := workflow_options.find_workflow(file)) is not None:
        catalogue.show_workflow(workflow_options.options_of(ctx, file, graph), as_json)
    else:
        workflow_options.check_folders(ctx)
        catalogue.show_metadata(file, as_json)


@main.command()
@click.argument("model", required=False, shell_complete=complete_models)
@options.as_json
@defaults.config
def models(model: str | None, as_json: bool) -> None:
    """List the models that have a name, or describe MODEL.

    The list shows the parameters of the transformer, the memory of all weights, the recommended settings, and the
    licence of the weights. MODEL may also be a hub id or a folder. For MODEL, the command shows the pictures that the
    model takes, the names of its sizes, and all recommended settings.
    """
    from wanjax.cli import catalogue

    if model is None:
        catalogue.show_models(as_json)
    else:
        catalogue.show_model(model, as_json)


@main.command()
@click.argument("model", default="wan2.1-t2v-1.3b", shell_complete=complete_models)
@click.option("--quick", is_flag=True, help="Measure for about one minute instead of ten minutes.")
@click.option(
    "--keep/--no-keep", default=True, help="Save the faster set of compiler options as the default of --compiler."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON that you can attach to an issue.")
@options.verbosity_options
@defaults.config
def bench(report: Report, model: str, quick: bool, keep: bool, as_json: bool) -> None:
    """Measure this machine's devices at the shapes of MODEL, and compare the results with the times of `wanjax plan`.

    Weights are random, so nothing is downloaded. Attention is compared with the reference before it is timed. Compiling
    and the first run of each program are reported apart from the timed runs. If the two sets of compiler options differ
    on these devices, a step is timed with each set. The faster set is saved for this machine.
    """
    from wanjax.cli import measuring

    measuring.bench(report, model=model, quick=quick, keep=keep, as_json=as_json)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    metavar="FOLDER",
    help="Folder for the two files with the results.",
    shell_complete=complete_files,
)
@click.option(
    "--timings/--no-timings", "timed", default=True, help="Time real shapes after the checks, or only run the checks."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the tables.")
@options.verbosity_options
@defaults.config
def selftest(report: Report, out: Path, timed: bool, as_json: bool) -> None:
    """Check in two minutes, without a network, that this machine computes correctly.

    Compares results of the hand-written kernels, of attention, of the bundled model and of a small random model of each
    family with values in the package. Writes a checkpoint and reads it back. On several devices the command also checks
    collectives and a sharded run. Then it times real shapes, and compares the times with the times that `wanjax plan`
    predicts for this chip. Writes selftest-CHIP.json and selftest-CHIP.md, which you can attach to an issue. Exits with
    status 1 if a check fails.
    """
    from wanjax.cli import measuring

    measuring.selftest(report, out=out, timed=timed, as_json=as_json)


@main.command()
@options.server_model_options
@options.server_options
@defaults.config
def serve(
    report: Report,
    options: "PipelineOptions",
    serve_options: "ServeOptions",
    listen_options: "ListenOptions",
    folder: str,
    workers: tuple[int, int] | None,
    worker_options: "WorkerOptions",
) -> None:
    """Serve a model over HTTP, with a web page. The model stays loaded and compiled.

    Videos are made one after another, or with --workers several at once. POST /v1/videos requests a video. The request
    has the fields of OpenAI's videos API, and may have the settings of `wanjax generate` by name. Videos are kept in
    --dir, and jobs in --database. Without a token the server answers only clients on this machine. Behind a proxy, the
    server needs a token.
    """
    from wanjax.cli import serving

    serving.serve(report, options, serve_options, listen_options, folder, workers, worker_options)


@main.command()
@options.server_model_options
@options.worker_command_options
@defaults.config
def worker(
    report: Report,
    options: "PipelineOptions",
    serve_options: "ServeOptions",
    database: str | None,
    out: str | None,
    folder: str | None,
    retries: int,
) -> None:
    """Make videos for a `wanjax serve` or `wanjax batch` on another host, from its database.

    Leases jobs from --database, and writes each video to the folder that all hosts share. Ctrl-C or SIGTERM ends the
    worker, and its current job returns to the queue. If the database is an SQLite file, the file must exist: the server
    or the batch creates it. Give the worker all options that shape the videos, such as --model and --lora. Workers may
    join and leave at any time.
    """
    from wanjax.cli import working

    working.run_worker(report, options, serve_options, database, out, folder, retries)


@main.command("help", hidden=True)
@click.argument("command", required=False, shell_complete=complete_commands)
def help_(ctx: click.Context, command: str | None) -> None:
    """Show the help of COMMAND, or of all commands."""
    assert ctx.parent is not None
    if command is None:
        click.echo(ctx.parent.get_help())
    elif command in main.commands:
        subcommand = main.commands[command]
        click.echo(subcommand.get_help(click.Context(subcommand, info_name=command, parent=ctx.parent)))
    else:
        raise click.UsageError(f"no command is named {command!r}: give one of {', '.join(main.list_commands(ctx))}")
