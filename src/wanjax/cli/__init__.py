# SPDX-License-Identifier: Apache-2.0
"""The command line: `wanjax "a red circle moving right"`.

This module defines the commands and their options. The code that runs them is in the other modules and is imported
only when a command runs, so that `--help` does not wait for JAX. A mistake of the user gives one sentence and no
traceback.
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
    in_words,
    shortened,
    with_option,
)
from wanjax.cli.report import Report, handle_interrupts
from wanjax.errors import DISK_FULL_ERRNOS, FILE_NAME_ERRNOS, WanjaxError, is_failure, is_out_of_memory
from wanjax.pricing import libtpu
from wanjax.signals import INTERRUPTED, stop

if TYPE_CHECKING:
    from wanjax.cli.parsed import (
        BulkOptions,
        CommandOptions,
        ListenOptions,
        PipelineOptions,
        ServeOptions,
        TrainingOptions,
        WorkerOptions,
    )
    from wanjax.pipelines.request import VideoRequest

FAILURE, MISTAKE = 1, 2  # exit statuses
NOTHING_MORE = "nothing more can be written"
NO_HOME = "determine home directory"  # of pathlib's error
CARDS = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg")  # device files of graphics cards: NVIDIA's, AMD's, Windows'
PLUGINS = "libtpu", "jax_cuda13_plugin"  # what JAX tries, with pages of messages, where their devices are absent
IMPLIED = "generate"  # the command of arguments that name none


class Commands(click.Group):
    """The group of commands. Arguments that do not begin with a command's name are those of `generate`."""

    command_class = defaults.Command
    commands: dict[str, defaults.Command]  # pyright: ignore[reportIncompatibleVariableOverride]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.commands if not self.commands[name].hidden]  # in the order of use

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for command in self.commands.values():
            command.take_inputs()
        group_options = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0] not in group_options | self.commands.keys():
            args = [IMPLIED, *args]
            ctx.meta[IMPLIED] = True
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadOptionUsage) as error:  # beside an option of the group, as --version
            click.echo(f"wanjax: {in_words(error)}", err=True)
            ctx.exit(MISTAKE)
        except OSError as error:  # while help is printed
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            click.echo(f"wanjax: {NOTHING_MORE}: {error.strerror}", err=True)
            ctx.exit(FAILURE)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if IMPLIED in ctx.meta and not ctx.resilient_parsing:  # as it is while a shell completes the arguments
            check_prompt(ctx, args[1:], IMPLIED)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options, and those of the implied command."""
        implied = click.Context(self.commands[IMPLIED], parent=ctx, resilient_parsing=True)
        items = super().shell_complete(ctx, incomplete)
        values = {item.value for item in items}
        return items + [x for x in implied.command.shell_complete(implied, incomplete) if x.value not in values]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._told(ctx)
        except BaseException as error:
            if ctx.obj and ctx.obj.has_peers:
                ctx.obj.leave(error)
            raise

    def _told(self, ctx: click.Context) -> Any:
        """Invokes the command; tells of an error in a sentence, and exits with its status."""
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:  # --help
            raise
        except click.ClickException as error:
            status, why = MISTAKE, in_words(error)
        except WanjaxError as error:
            status, why = FAILURE if is_failure(error) else MISTAKE, with_option(error)
        except OSError as error:
            name = shortened(str(error.filename or ""))
            if error.errno in DISK_FULL_ERRNOS:
                status, why = FAILURE, f"{NOTHING_MORE}{f' to {name!r}' if name else ''}: {error.strerror}"
            elif error.errno in FILE_NAME_ERRNOS and name:
                status, why = MISTAKE, f"{name!r} is no name of a file that can be used here: {error.strerror}"
            else:
                _tell_way_on(ctx)
                raise
        except KeyboardInterrupt:
            status, why = INTERRUPTED, "stopped"
        except Exception as error:
            if is_out_of_memory(error):
                status, why = FAILURE, "out of memory: a smaller --size, fewer --frames or --dtype bfloat16 need less"
            elif isinstance(error, RuntimeError) and NO_HOME in str(error):
                status, why = MISTAKE, "this user has no home folder, for which ~ in a name stands: give the whole path"
            else:
                _tell_way_on(ctx)
                raise
        click.echo(f"wanjax: {why}", err=True)
        _tell_way_on(ctx)
        ctx.exit(status)


def _tell_way_on(ctx: click.Context) -> None:
    if ctx.obj:
        click.echo(ctx.obj.outcome, err=True, nl=False)


@click.group(cls=Commands, context_settings=options.CONTEXT, epilog='`wanjax "PROMPT"` is `wanjax generate "PROMPT"`.')
@click.version_option(package_name="wanjax", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Videos from prompts, in JAX."""
    if libtpu.silence() and any(map(find_spec, PLUGINS)) and not any(map(glob, CARDS)):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # then no plugin is loaded
    ctx.obj = Report()
    ctx.with_resource(ctx.obj.print_warnings())
    if signal.getsignal(signal.SIGINT) is stop:  # the process is this command's own
        ctx.obj.owns_process = True
        ctx.with_resource(handle_interrupts(ctx.obj.interrupted))


@main.command()
@options.prompt
@defaults.source
@options.many
@options.making
@options.at
@options.profile
@options.preview
@options.own_folder
@options.own_out
@options.reporting
@defaults.config
def generate(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    command: "CommandOptions",
    at: str | None,
    original_metadata: Mapping[str, Any] | None,
) -> None:
    """Make a video of PROMPT, and of pictures with models that take them.

    Runs the three stages, each freed before the next, and keeps their files, so that a run that was stopped can be
    resumed. The video's name has the prompt, the seed and the time, unless --out or --dir is given. Options that are
    not given have the values that the model's authors recommend.

    With --prompts, --seeds or --count one load makes many videos, into the folder --out, as `wanjax batch` does. Each
    is saved when it is done, and one that is there already is not made again, unless with --force.

    With --from a video is made again from what it tells of itself, in place of PROMPT and options, or beside them.

    With --at a running `wanjax serve` makes the video, or the videos: it takes the same settings and pictures. Options
    that are the server's, such as --model and --lora, have to be those that it was started with.
    """
    if at is not None:
        from wanjax.cli import remote

        return remote.generate(report, request, options, command, at, original_metadata)
    if original_metadata is not None:
        from wanjax.cli import remake

        request, options, original_metadata = remake.complete_from_record(request, options, original_metadata)
    from wanjax.cli import many, stages
    from wanjax.cli.extending import Extender, extended

    extend = Extender.from_options(report, request, options, command)
    if command.prompts is None:
        request, extend = extended(request, extend), None
    if command.several:
        many.generate(report, request, options, command, extend=extend, original_metadata=original_metadata)
    else:
        stages.generate(report, request, options, command, original_metadata)


@main.command()
@options.batch
@options.seeds
@options.making
@options.folder_out
@options.reporting
@defaults.config
def batch(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    command: "CommandOptions",
    workers: int | None,
    by: "WorkerOptions",
) -> None:
    """Make a video of each request in PROMPTS, by one worker or many.

    PROMPTS, or standard input for -, has a prompt or a JSON object on each line, or is a JSON array of them; a .csv or
    .parquet has a request in each row. A request may have any setting of a video, pictures and clips by name, and its
    own seed; the options are for what it leaves open. All requests are checked before the first video is made.

    Each video gets its name when it is whole, and is listed in manifest.jsonl beside it. The same command goes on with
    what is missing, whatever ended the one before. Several workers are processes of this machine, actors of Ray with
    --ray, or with --database those of `wanjax worker` on other hosts.
    """
    from wanjax.cli import many
    from wanjax.cli.extending import Extender

    many.generate(
        report, request, options, command, workers, by, Extender.from_options(report, request, options, command)
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
@options.stage_folder
@options.reporting
@defaults.config
def encode(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Encode PROMPT and pictures, the first stage.

    Writes the embeddings and the model's recommended settings to --dir. Pictures are encoded for one size and length of
    the video, which later stages cannot change.
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
@options.profile
@options.preview
@options.stage_folder
@options.reporting
@defaults.config
def denoise(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Make latents, the second stage.

    Reads the files that `encode` wrote to --dir. Options that are not given have the values stored there.
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
@options.reporting
@defaults.config
def decode(report: Report, request: "VideoRequest", options: "PipelineOptions", command: "CommandOptions") -> None:
    """Decode latents to a video, the third stage.

    Reads the files that `denoise` or `generate` wrote to --dir.
    """
    from wanjax.cli import stages

    stages.decode(report, request, options, command)


@main.command()
@options.model_named
@options.chip
@options.quoted
@options.video
@options.mesh
@options.rules
@options.tile
@options.decoder
@options.offload
@train_options.priced
@scale_options.at_scale
@options.quiet
@click.option("--programs", is_flag=True, help="List each program; for NVIDIA's cards also the kernels that it starts.")
@options.as_json
@defaults.config
def plan(
    report: Report,
    request: "VideoRequest",
    options: "PipelineOptions",
    chip: str,
    training: "TrainingOptions",
    bulk: "BulkOptions",
    as_json: bool,
    programs: bool,
) -> None:
    """Price a video with MODEL, or nano, without the chips.

    Prints the memory of each stage, the seconds of a step and of the run, and what limits them. Programs for TPUs are
    compiled by the TPU's own compiler and priced. With the extra plan-cuda programs for NVIDIA's cards are compiled by
    XLA, and their times estimated by a stated model, by which other devices are priced. No weights are loaded,
    and a LoRA, which is merged into them, changes no price. Pictures that are not given are of the video's own size.
    A step of training is priced with --train, and many videos are with --requests: which slices make them by
    --deadline, which mesh takes the fewest chip-hours, and at which cost.
    """
    from wanjax.cli import planning

    planning.plan(report, request, options, chip, training, bulk, as_json=as_json, programs=programs)


@main.command()
@options.model
@options.chip_elsewhere
@options.quoted
@options.video
@options.devices
@options.tile
@options.decoder
@options.offload
@options.telling
@options.stats
@defaults.config
def warmup(report: Report, request: "VideoRequest", options: "PipelineOptions", chip: str | None) -> None:
    """Compile all programs that a run needs.

    Records a run without loading its weights, so that `generate` with the same options begins at once. The compiled
    programs stay in the user's cache, or in --compile-cache, for all who share it. Other options, code or devices never
    use them. With --chip that cache is filled ahead of time, for TPUs that need not be here.
    """
    from wanjax.cli import planning

    planning.warmup(report, request, options, chip)


@main.command()
@click.argument("model", default="nano", shell_complete=complete_models)
@click.option(
    "--with-prompt", "texts", multiple=True, metavar="TEXT", help="In place of the own ones; several may be given."
)
@options.image
@options.shape
@options.setting("steps")
@options.setting("guidance_scale")
@options.attention
@options.compute
@options.mesh
@options.rules
@options.telling
@defaults.config
def calibrate(report: Report, request: "VideoRequest", options: "PipelineOptions", texts: tuple[str, ...]) -> None:
    """Measure what step caches need to know of MODEL.

    Denoises a few prompts without a cache, and keeps MagCache's ratios and TeaCache's polynomial in the user's folder
    for data, where `--cache` finds them. The size, the number of steps and the guidance are best those of later videos.
    """
    from wanjax.cli import measuring

    measuring.calibrate(report, request, options, texts)


@main.command()
@click.argument("source", shell_complete=complete_models)
@click.argument("target", required=False, metavar="[FOLDER]", shell_complete=complete_files)
@click.option("--to", type=click.Choice(["wanjax", "diffusers"]), default="wanjax", show_default=True, help="Layout.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[COMPONENT=]DTYPE",
    help="What weights are stored in: bfloat16 or float32, for all but the autoencoder, or for the component named.",
)
@options.lora
@click.option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
@click.option("--verify", "check", is_flag=True, help="Compare SOURCE, a wanjax checkpoint, with its checksums.")
@options.telling
@defaults.config
def convert(
    report: Report,
    source: str,
    target: str | None,
    to: str,
    dtypes: tuple[str, ...],
    lora: tuple[str, ...],
    revision: str | None,
    check: bool,
) -> None:
    """Convert SOURCE, a name, hub id, folder or file, to a checkpoint in FOLDER.

    A folder has the layout of diffusers or of the model's authors. A file holds the transformer, and may hold other
    components, as for ComfyUI. The checkpoint in FOLDER loads directly onto any number of devices. Weights keep their
    dtype unless --dtype is given. With --lora the checkpoint has the LoRA merged in. The same command resumes a
    conversion that was stopped.
    """
    from wanjax.cli import conversion

    conversion.convert(report, source, target, to, dtypes, lora, revision, check)


@main.command()
@click.argument("model", shell_complete=complete_models)
@click.argument("data", type=click.Path(path_type=Path), shell_complete=complete_files)
@train_options.train
@options.shape
@options.attention
@options.compute
@options.devices
@options.telling
@options.stats
@options.json
@defaults.config
def train(report: Report, options: "PipelineOptions", ctx: click.Context, data: Path, out: Path) -> None:
    """Train a LoRA for MODEL, or all its weights, on DATA.

    DATA is a folder of clips and pictures with a text file of the same name beside each, or with a metadata.csv or
    metadata.jsonl, or such a table. Clips and captions are encoded once, and kept beside the data. The same command
    resumes a training that was stopped, and with more --steps a finished one. It ends with FOLDER/lora.safetensors, for
    --lora, or with FOLDER/checkpoint. `wanjax plan MODEL --train` prices a step before.
    """
    from wanjax.cli import training

    training.train(report, options, ctx, data=data, out=out)


@main.command()
@click.argument("file", shell_complete=complete_files)
@options.as_json
@defaults.config
def info(file: str, as_json: bool) -> None:
    """Tell what made the video FILE.

    Prints the model, the prompt, the settings and all else that shaped it, which a video keeps in its metadata. FILE
    may also be a stage's file or a generation_config.json. `wanjax generate --from FILE` makes the video again.
    """
    from wanjax.cli import catalogue

    catalogue.show_record(file, as_json)


@main.command()
@click.argument("model", required=False, shell_complete=complete_models)
@options.as_json
@defaults.config
def models(model: str | None, as_json: bool) -> None:
    """List the models known by name, or tell what MODEL takes and makes.

    The list has the number of the transformer's parameters, the memory of all networks' weights, the recommended
    settings, and the licence of the weights. Of MODEL, which may also be a hub id or a folder, it tells the pictures
    that it takes, its sizes by name, and all recommended settings.
    """
    from wanjax.cli import catalogue

    if model is None:
        catalogue.show_models(as_json)
    else:
        catalogue.show_model(model, as_json)


@main.command()
@click.argument("model", default="wan2.1-t2v-1.3b", shell_complete=complete_models)
@click.option("--quick", is_flag=True, help="About a minute, in place of ten.")
@click.option("--keep/--no-keep", default=True, help="Keep the better set of compiler options for --compiler.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which an issue can hold.")
@options.telling
@defaults.config
def bench(report: Report, model: str, quick: bool, keep: bool, as_json: bool) -> None:
    """Measure this machine's devices at the shapes of MODEL, beside what `wanjax plan` says of them.

    Weights are random, so nothing is downloaded. Attention is compared with the reference before it is timed. The first
    run of each program, and its compiling, are told apart from those that count. Where the two sets of compiler options
    differ, both take a step, and the better one is kept for this machine.
    """
    from wanjax.cli import measuring

    measuring.bench(report, model=model, quick=quick, keep=keep, as_json=as_json)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    metavar="FOLDER",
    help="Where the two files go.",
    shell_complete=complete_files,
)
@click.option("--timings/--no-timings", "timed", default=True, help="Time real shapes after the checks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the tables.")
@options.telling
@defaults.config
def selftest(report: Report, out: Path, timed: bool, as_json: bool) -> None:
    """Check that this machine computes what it should, in two minutes, without a network.

    The hand-written kernels, attention, the bundled model and a small random model of each family are compared with
    what is kept in the package, a checkpoint is written and read back, and on several devices their messages and a
    sharded run are compared too. Then real shapes are timed, beside what `wanjax plan` says of this chip. Writes
    selftest-CHIP.json and selftest-CHIP.md, which an issue can hold. Exits with 1 where something is wrong.
    """
    from wanjax.cli import measuring

    measuring.selftest(report, out=out, timed=timed, as_json=as_json)


@main.command()
@options.served
@options.serving
@defaults.config
def serve(
    report: Report,
    options: "PipelineOptions",
    served: "ServeOptions",
    listen: "ListenOptions",
    folder: str,
    workers: tuple[int, int] | None,
    by: "WorkerOptions",
) -> None:
    """Keep a model loaded and compiled behind HTTP, with a page.

    Videos are made one after another, or with --workers several at once. POST /v1/videos asks for one, in the shape of
    OpenAI's videos API, with this command's settings by name beside it. Videos are kept in --dir, and requests in
    --database. Without a token only this machine is answered; behind a proxy one is needed.
    """
    from wanjax.cli import serving

    serving.serve(report, options, served, listen, folder, workers, by)


@main.command()
@options.served
@options.offload
@options.working
@defaults.config
def worker(
    report: Report,
    options: "PipelineOptions",
    served: "ServeOptions",
    database: str | None,
    out: str | None,
    folder: str | None,
    retries: int,
) -> None:
    """Make the videos of a `wanjax serve` or `wanjax batch` of another host, from its database.

    Leases jobs from --database, makes each video into the one place that all have, and ends when it is told to: with
    Ctrl-C or SIGTERM the video under way waits again. A file of SQLite must exist: the server or the batch that has the
    jobs makes it. A worker needs the options that shape the videos, such as --model and --lora. Any number may join and
    leave.
    """
    from wanjax.cli import working

    working.work_for(report, options, served, database, out, folder, retries)


@main.command("help", hidden=True)
@click.argument("command", required=False, shell_complete=complete_commands)
def help_(ctx: click.Context, command: str | None) -> None:
    """Show the help of COMMAND."""
    assert ctx.parent is not None
    if command is None:
        click.echo(ctx.parent.get_help())
    elif command in main.commands:
        subcommand = main.commands[command]
        click.echo(subcommand.get_help(click.Context(subcommand, info_name=command, parent=ctx.parent)))
    else:
        raise click.UsageError(f"no command is named {command!r}: there are {', '.join(main.list_commands(ctx))}")
