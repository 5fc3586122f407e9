# SPDX-License-Identifier: Apache-2.0
"""Early checks of a command's options, without importing JAX, which takes seconds.

The code that uses the options checks them again.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wanjax.cli import listing
from wanjax.cli.names import TOKEN_VARIABLE
from wanjax.cli.options import PROMPT_LIST_SUFFIXES, check_file, is_given, on_command_line, option_of
from wanjax.cli.workflow_options import WORKFLOW_REQUESTS
from wanjax.errors import WanjaxError
from wanjax.jobs.addresses import parse_processes
from wanjax.media.inputs import CLIP_SUFFIXES, INPUT_SPECS
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.settings import SEAM_SETTINGS, read_seeds, seams_without_windows, strength_without_video
from wanjax.pipelines.text.prompt_extension import check_url
from wanjax.stores.paths import is_url

if TYPE_CHECKING:
    from wanjax.jobs.rows import RowErrors
    from wanjax.pipelines.request import VideoRequest

VIDEO_COMMANDS = (
    "generate",
    "batch",
    "encode",
    "plan",
    "warmup",
    "calibrate",
)  # commands that take the settings of a video
COMPLETE_VIDEO_COMMANDS = ("generate", "encode")  # commands that need a complete request
MODEL_PARAMETERS = ("model", "source")
FILE_PARAMETERS = ("noise", "decoder", "preview_decoder")
STAGE_READERS = ("denoise", "decode")  # commands that read the files of the previous stage from --dir
SINGLE_VIDEO_COMMANDS = ("generate", "decode")  # commands for which --out is a file
MULTI_VIDEO_PARAMETERS = ("prompts", "seeds", "count")  # with one of these options, --out is a folder
WORKER_COMMANDS = ("batch", "serve")  # commands that may start workers
# Parameters that only apply to the training of a LoRA
LORA_PARAMETERS = ("rank", "alpha", "dropout", "targets", "lora_format", "lora_rank")
PRICED_STEP_PARAMETERS = ("lora_rank", "full", "batch_size", "optimizer")  # parameters of `plan --train`


def check(ctx: click.Context, request: "VideoRequest | None") -> None:
    """Raise WanjaxError for a missing model or file, and for an invalid seed, address or suffix.

    Args:
        ctx: The command and its parameters.
        request: The settings that all videos of the command share; None for commands that make no video.
    """
    values = {name: value for name, value in ctx.params.items() if value not in (None, (), "")}
    if values.get("original_metadata"):  # the module `remake` checks the values that come from metadata
        values = {
            name: value
            for name, value in values.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
    _check_seeds(ctx, values.get("seeds"))
    _check_seams(ctx, request)
    if "at" in values:  # with --at, these options belong to the server
        values = {name: value for name, value in values.items() if name not in (*MODEL_PARAMETERS, "lora", "decoder")}
    if "data" in values and not values["data"].exists() and listing.find_model(model := str(values["data"])):
        order = shlex.join(["wanjax", "train", model, values["model"]])
        raise WanjaxError(f"{model} is a model, not a folder of clips: give the model first, as in `{order}`")
    for model in [values[name] for name in MODEL_PARAMETERS if name in values]:
        listing.check_name(model)
        if request is not None and ctx.info_name in VIDEO_COMMANDS and ctx.params.get("original_metadata") is None:
            is_complete = ctx.info_name in COMPLETE_VIDEO_COMMANDS and "prompts" not in values
            listing.check(model, request, is_complete=is_complete)
            if is_complete:
                listing.check_strength(model, request)
    for name in (*INPUT_SPECS, *FILE_PARAMETERS):
        for file in values[name] if isinstance(values.get(name), tuple) else [values.get(name)]:
            check_file(file, f"give --{name.replace('_', '-')} an existing file")
    for name in (name for name, spec in INPUT_SPECS.items() if spec.kind in ("image", "images")):
        for file in values[name] if isinstance(values.get(name), tuple) else [values.get(name)]:
            if file is not None and os.path.isdir(file):
                raise WanjaxError(f"{INPUT_SPECS[name].option} {file} is a folder: give a picture")
            if file is not None and Path(str(file)).suffix.lower() in CLIP_SUFFIXES:
                advice = ", or the clip as --video" if "video" in ctx.params else ""
                raise WanjaxError(f"{INPUT_SPECS[name].option} {file} is a clip: give a picture{advice}")
    if isinstance(folder := values.get("folder"), str | Path) and os.path.isfile(folder):
        raise WanjaxError(f"--dir {folder} is a file: give a folder")
    if os.path.exists(out := str(values.get("out", ""))) and not (os.path.isfile(out) or os.path.isdir(out)):
        raise WanjaxError(f"--out {out} is neither a file nor a folder: give a file to write")
    if WORKFLOW_REQUESTS not in ctx.meta:
        _check_prompts(values.get("prompts"))
    if ctx.info_name == "info" and not os.path.exists(values["file"]) and listing.find_model(values["file"]):
        raise WanjaxError(f"{values['file']} is a model, not a file: `wanjax models {values['file']}` describes it")
    if "chip" in values:
        _check_chip(values["chip"])
    if "processes" in values:
        parse_processes(values["processes"])
    if "offload" in values and isinstance(mesh := values.get("mesh"), MeshSizes):
        values["offload"].check_devices(prod(mesh))
    if "data" in values:
        _check_data(values["data"].expanduser())
    for text in values.get("lora", ()):
        _check_lora(text)
    if "extend_prompt" in values:
        check_url(values["extend_prompt"])
    if (
        "out" in values
        and ctx.info_name in SINGLE_VIDEO_COMMANDS
        and not any(name in values for name in MULTI_VIDEO_PARAMETERS)
    ):
        _check_suffix(values["out"])
    if ctx.info_name == "batch" or any(name in values for name in MULTI_VIDEO_PARAMETERS):
        _check_many_videos(values)
    if "noise" in values and not is_url(values["noise"]):
        _check_noise(values["noise"])
    if "full" in ctx.params:
        _check_training(ctx)
    if ctx.info_name == "convert":
        _check_conversion(values)
    if ctx.info_name in WORKER_COMMANDS:
        _check_workers(ctx)
    if ctx.info_name == "serve":
        _check_listen(ctx)
    if ctx.info_name == "worker":
        _check_worker(values)
    if ctx.info_name in STAGE_READERS:
        _check_stage(values["folder"], ctx.info_name)
    if "at" not in values and ctx.params.get("original_metadata") is None:
        _check_rows(values.get("prompts"), values.get("model"), request, ctx.meta.get(WORKFLOW_REQUESTS))


def _check_worker(values: Mapping[str, Any]) -> None:
    """Raise WanjaxError if a worker has no database, or no folder for its videos."""
    from wanjax.jobs.databases import ENV_VARIABLE, check_exists, resolve_database  # imported late for a quick --help

    if (url := resolve_database(values.get("database"))) is None:
        raise WanjaxError(f"no database: give --database FILE|URL, or set {ENV_VARIABLE} in the environment")
    if "out" in values and "folder" in values:
        raise WanjaxError("both --dir and --out: give --dir of the server, or --out of the batch")
    if "out" not in values and "folder" not in values:
        raise WanjaxError("no folder for videos: give --dir of the server, or --out of the batch")
    for name in ("preview", "preview_decoder", "extend_prompt"):
        if "out" in values and is_given(name):
            option = f"--{name.replace('_', '-')}"
            raise WanjaxError(
                f"{option} is for the jobs of a server, but --out is for a batch: leave it out, "
                "or give --dir in place of --out"
            )
    if "folder" in values and values.get("processes"):
        raise WanjaxError(
            "--processes is for a worker of a batch: leave it out, because a worker of a server is one process"
        )
    check_exists(url)


def _check_conversion(values: Mapping[str, Any]) -> None:
    """Raise UsageError if a conversion has no target, or if --verify is combined with options of a conversion."""
    source, target = values["source"], values.get("target")
    if target is not None:
        _check_folder_name(str(target), str(target), is_file=str(target).endswith(".safetensors"))
    if target is not None and listing.find_model(str(target)):
        advice = f"give another folder, such as my-{target}, because --model {target} would not read it"
        raise click.UsageError(f"{target} is the name of a model: {advice}")
    if not values["check"] and target is None:
        raise click.UsageError(f"the folder to write is missing: give `wanjax convert {source} FOLDER`")
    if values["check"] and "lora" in values:
        raise click.UsageError(
            "--verify checks an existing checkpoint, and --lora is for a new one: leave one of them out"
        )
    if values["check"] and "dtypes" in values:
        raise click.UsageError(
            "--verify checks an existing checkpoint, and --dtype is for a new one: leave one of them out"
        )
    if values["check"] and "precision" in values:
        raise click.UsageError(
            "--verify checks an existing checkpoint, and --precision is for a new one: leave one of them out"
        )
    if "precision" in values and values["to"] == "diffusers":
        raise click.UsageError(
            "--precision is for --to wanjax, and this command has --to diffusers: leave one of them out"
        )
    if values["check"] and target is not None:
        raise click.UsageError(f"--verify takes one folder, got {source} and {target}: leave out the second")


def _check_training(ctx: click.Context) -> None:
    """Raise UsageError for options of a LoRA together with --full, for options of a training step without --train, and
    for a file as the output."""
    out = str(ctx.params.get("out", ""))
    _check_folder_name(out, f"--out {out}", is_file=out.endswith(".safetensors"))
    for name in PRICED_STEP_PARAMETERS if not ctx.params.get("train", True) else ():
        if on_command_line(name, ctx):
            raise click.UsageError(f"{option_of(name)} is for a step of training: also give --train, or leave it out")
    for name in LORA_PARAMETERS if ctx.params["full"] else ():
        if on_command_line(name, ctx):
            raise click.UsageError(f"{option_of(name)} is for a LoRA, and --full trains all weights: leave one out")


def _check_seeds(ctx: click.Context, seeds: str | None) -> None:
    if seeds is None:
        return
    for other_name in ("count", "seed"):
        if (value := ctx.params.get(other_name)) is not None and (
            other_name == "count" or on_command_line(other_name, ctx)
        ):
            raise WanjaxError(f"both --seeds {seeds} and --{other_name} {value}: give one of them")
    read_seeds(seeds)


def _check_seams(ctx: click.Context, request: "VideoRequest | None") -> None:
    """Raise SettingError if an option for the seams of windows is given for a video of one window. The check is skipped
    if the number of windows may come from metadata (--from) or from a list of requests."""
    if ctx.info_name == "batch" or any(ctx.params.get(name) is not None for name in ("original_metadata", "prompts")):
        return
    for name in SEAM_SETTINGS:
        if name in ctx.params and on_command_line(name, ctx) and not (request and request.has_effect(name)):
            raise seams_without_windows(f"--{name}", "--windows", name)


def _check_prompts(file: str | None) -> None:
    advice = "give a file with a prompt on each line"
    if Path(str(file)).suffix.lower() not in PROMPT_LIST_SUFFIXES:  # the value may be a prompt
        advice += f"; for one prompt use `{shlex.join(['wanjax', 'generate', str(file)])}`"
    check_file(file, advice)
    if file is not None and os.path.isdir(file):
        raise WanjaxError(f"the folder {file} contains no workflow of ComfyUI: give a file with a prompt on each line")


def valid_rows(
    rows: "Sequence[VideoRequest]", model: str | None, options: "VideoRequest", row_errors: "RowErrors"
) -> "list[VideoRequest]":
    """Select the rows whose files exist and that a listed model supports with the options of the command. `row_errors`
    collects the errors of the other rows."""
    valid = []
    for row in rows:
        try:
            if model is not None:
                listing.check(model, row.with_defaults(options), is_complete=True)
            for name in row.inputs:
                for path in paths if isinstance(paths := row.inputs[name], list) else [paths]:
                    check_file(path, f"give {name} an existing file")
        except WanjaxError as error:
            row_errors.add(row.row, error, row.row_noun)
        else:
            valid.append(row)
    return valid


def _check_rows(
    file: str | None,
    model: str | None,
    request: "VideoRequest | None",
    rows: "Sequence[VideoRequest] | None",
) -> None:
    """Raise WanjaxError if every row of a file is wrong, or if an option has no effect on any row.

    If only some rows are wrong, the command reports them later, together with the rows that the model's own checks
    refuse. Standard input can be read only once, so it is checked later. `rows` are the requests of a folder.
    """
    if file is None or file == "-" or request is None or "prompt" in request.settings:
        return
    from wanjax.jobs.rows import RowErrors, read_requests, shared_by_all  # imported late for a quick --help

    row_errors, options = RowErrors(), shared_by_all(request)
    rows = read_requests(file, row_errors) if rows is None else rows
    if not valid_rows(rows, model, options, row_errors):
        row_errors.raise_if_any()
    if row_errors.rows:
        return
    complete_requests = [row.with_defaults(options) for row in rows]
    for name in ("strength", *SEAM_SETTINGS):
        if (
            name in options.settings
            and on_command_line(name)
            and not any(x.has_effect(name) for x in complete_requests)
        ):
            if name == "strength":
                raise strength_without_video(options.settings[name])
            raise seams_without_windows(f"--{name}", "--windows", name)


def _check_chip(name: str) -> None:
    from wanjax.pricing.roofline import find_hardware  # imported late for a quick --help

    find_hardware(name)


def _check_many_videos(values: Mapping[str, Any]) -> None:
    """Raise WanjaxError for options that apply only to a single video, if the command makes several videos."""
    for option in ("noise", "profile"):
        if option in values:
            raise WanjaxError(f"--{option} is for one video: leave it out for several")
    if "folder" in values:
        raise WanjaxError("--dir is for the stages of one video: give --out, a folder, for several videos")
    out = str(values.get("out", ""))
    _check_folder_name(out, f"--out {out}", is_file=bool(Path(out).suffix))


def _check_folder_name(name: str, text: str, *, is_file: bool) -> None:
    """Raise WanjaxError if the name of a folder to write seems to be a file's. `text` is the name in the message."""
    if is_file and not (name.endswith("/") or os.path.isdir(name)):
        raise WanjaxError(f"{text} has the suffix of a file: give the name of a folder, without the suffix")


def _check_workers(ctx: click.Context) -> None:
    """Raise WanjaxError for an impossible number of workers, and for options of workers if the command has no
    workers."""
    from wanjax.cli.parsed import WorkerOptions, options_from  # imported late for a quick listing of models
    from wanjax.jobs.databases import check_name, resolve_database
    from wanjax.jobs.ray_cluster import check_cluster

    worker_options, workers = options_from(WorkerOptions, ctx), ctx.params["workers"]
    if (database := resolve_database(worker_options.database)) is not None:
        check_name(database)
    is_server = ctx.info_name == "serve"
    ray_values = {
        "--hosts": worker_options.hosts > 1,
        "--resources": worker_options.resources,
        "--dashboard": worker_options.dashboard,
    }
    for option in [option for option, value in ray_values.items() if value and worker_options.ray is None]:
        advice = "give --workers 2 --ray auto" if is_server else "give --ray ADDRESS, or --ray local for this machine"
        raise WanjaxError(f"{option} is for workers in Ray: {advice}")
    if worker_options.ray is not None:
        if is_server and workers is None:
            raise WanjaxError("--ray is for several workers: also give --workers 2, or another number")
        check_cluster(worker_options.ray)
    if workers in (0, (0, 0)) and resolve_database(worker_options.database) is None:
        raise WanjaxError(
            "--workers 0 leaves the videos to workers on other hosts: give the --database URL of these workers"
        )
    is_alone = workers is None if is_server else worker_options.is_alone(workers)
    if ctx.params["processes"] and not is_alone:
        raise WanjaxError("--processes is for a single worker of several processes: leave it out, or give one worker")


def _check_listen(ctx: click.Context) -> None:
    from wanjax.cli.parsed import ListenOptions, options_from  # imported late for a quick listing of models

    listen = options_from(ListenOptions, ctx)
    try:
        from wanjax.serve.auth import Access
    except ImportError:  # the command itself will report this error
        return
    Access.read(listen.host, listen.token or os.environ.get(TOKEN_VARIABLE) or None, listen.origins)


def _check_lora(text: str) -> None:
    from wanjax.checkpoints.hub import parse_hub_file  # imported late, because this needs NumPy
    from wanjax.checkpoints.lora_source import Lora

    parse_hub_file(Lora.parse(text).resolve_folder().file)


def _check_data(data: Path) -> None:
    from wanjax.media.training_data import check_data  # imported late for a quick --help

    check_data(data)


def _check_noise(file: str) -> None:
    from wanjax.media.noise_file import open_noise  # imported late, because this needs NumPy

    open_noise(file)


def _check_suffix(out: str) -> None:
    from wanjax.media.video import check_suffix  # imported late, because this needs NumPy

    check_suffix(out)


def _check_stage(folder: Path, command: str) -> None:
    from wanjax.cli.runs import check_not_removed  # imported late for a quick --help
    from wanjax.media.metadata import (  # imported late, because this needs NumPy
        EMBEDDINGS_FILE,
        LATENTS_FILE,
        load_stage_settings,
        stage_file,
    )

    check_not_removed(folder)
    load_stage_settings(folder)
    stage_file(folder, EMBEDDINGS_FILE if command == "denoise" else LATENTS_FILE)
