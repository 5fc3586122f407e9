# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a command's options, as far as that is known without JAX, whose import takes seconds.

What passes here is checked again where it is used.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wanjax.cli import listing
from wanjax.cli.names import TOKEN
from wanjax.cli.options import check_file, is_given, is_typed, option_of
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.settings import read_seeds
from wanjax.pipelines.text.prompt_extension import check_url

if TYPE_CHECKING:
    from wanjax.pipelines.request import VideoRequest

VIDEO = ("generate", "batch", "encode", "plan", "warmup", "calibrate")  # commands whose model makes a video
WHOLE = ("generate", "encode")  # those that are given all that a video is made from
MODELS = ("model", "source")
OTHER_FILES = ("noise", "decoder", "preview_decoder")
STAGES = ("denoise", "decode")  # commands that read what another left in --dir
ONE_VIDEO = ("generate", "decode")  # commands whose --out is a video's name
SEVERAL = ("prompts", "seeds", "count")  # but with these, which make it a folder
OF_LORA = ("rank", "alpha", "dropout", "targets", "lora_format", "lora_rank")  # parameters of training one
OF_STEP = ("lora_rank", "full", "batch_size", "optimizer")  # parameters of a step of training that `plan` prices
LISTS = (".txt", ".csv", ".json", ".jsonl", ".ndjson", ".parquet")  # suffixes of files with prompts
WORKERS = ("batch", "serve")  # commands that may start workers elsewhere


def check(ctx: click.Context, request: "VideoRequest | None") -> None:
    """Raise WanjaxError for a model or file that is not there, and for seeds, an address or a suffix that is none.

    Args:
        ctx: The command and its parameters.
        request: What they ask of each video, of the commands that make some.
    """
    values = {name: value for name, value in ctx.params.items() if value not in (None, (), "")}
    if values.get("original_metadata"):  # of which `remake` tells more
        values = {
            name: x for name, x in values.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
    _check_seeds(ctx, values.get("seeds"))
    if "at" in values:  # where these are the server's
        values = {name: value for name, value in values.items() if name not in (*MODELS, "lora", "decoder")}
    for model in [values[name] for name in MODELS if name in values]:
        listing.check_name(model)
        if request is not None and ctx.info_name in VIDEO and ctx.params.get("original_metadata") is None:
            listing.check(model, request, is_complete=ctx.info_name in WHOLE and "prompts" not in values)
    for name in (*INPUTS, *OTHER_FILES):
        for file in values[name] if isinstance(values.get(name), tuple) else [values.get(name)]:
            check_file(file, f"give --{name.replace('_', '-')} a file that there is")
    for name in (name for name, spec in INPUTS.items() if spec.kind in ("image", "images")):
        for file in values[name] if isinstance(values.get(name), tuple) else [values.get(name)]:
            if file is not None and os.path.isdir(file):
                raise WanjaxError(f"{INPUTS[name].option} {file} is a folder: give a picture")
    if isinstance(folder := values.get("folder"), str | Path) and os.path.isfile(folder):
        raise WanjaxError(f"--dir {folder} is a file: give a folder")
    _check_prompts(values.get("prompts"))
    if ctx.info_name == "info" and not os.path.exists(values["file"]) and listing.find_model(values["file"]):
        raise WanjaxError(f"{values['file']} is a model, not a file: `wanjax models {values['file']}` describes it")
    if "chip" in values:
        _check_chip(values["chip"])
    if "data" in values and not os.path.exists(data := values["data"].expanduser()):
        raise WanjaxError(f"there is no folder or table {data}: give a folder of clips with captions")
    for text in values.get("lora", ()):
        _check_lora(text)
    if "extend_prompt" in values:
        check_url(values["extend_prompt"])
    if "out" in values and ctx.info_name in ONE_VIDEO and not any(name in values for name in SEVERAL):
        _check_suffix(values["out"])
    if ctx.info_name == "batch" or any(name in values for name in SEVERAL):
        _check_several(values)
    if "full" in ctx.params:
        _check_training(ctx)
    if ctx.info_name == "convert":
        _check_conversion(values)
    if ctx.info_name in WORKERS:
        _check_workers(ctx)
    if ctx.info_name == "serve":
        _check_access(ctx)
    if ctx.info_name == "worker":
        _check_worker(values)
    if ctx.info_name in STAGES:
        _check_stage(values["folder"], ctx.info_name)


def _check_worker(values: Mapping[str, Any]) -> None:
    """Raise WanjaxError for a worker without a database that there is, or without a place for its videos."""
    from wanjax.jobs.databases import ENV_VARIABLE, check_exists, resolve_database  # imported late, as above

    if (url := resolve_database(values.get("database"))) is None:
        raise WanjaxError(f"no database is named: give --database FILE|URL, or {ENV_VARIABLE} in the environment")
    if "out" in values and "folder" in values:
        raise WanjaxError("--dir is given beside --out: give the one that the server or the batch has")
    if "out" not in values and "folder" not in values:
        raise WanjaxError("no place is named: give --dir, that of the server, or --out, that of the batch")
    for name in ("preview", "preview_decoder", "extend_prompt"):
        if "out" in values and is_given(name):
            error = f"--{name.replace('_', '-')} is for the jobs of a server, with --dir"
            raise WanjaxError(f"{error}: a batch has its prompts extended before, and shows no previews")
    if "folder" in values and values.get("processes"):
        raise WanjaxError("--processes is for the jobs of a batch: a worker of a server is one process")
    check_exists(url)


def _check_conversion(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a conversion without a target, and for options that --verify does not take."""
    source, target = values["source"], values.get("target")
    if not values["check"] and target is None:
        raise click.UsageError(f"the folder to write is missing: give `wanjax convert {source} FOLDER`")
    if values["check"] and "lora" in values:
        raise click.UsageError("--verify reads a checkpoint as it is, and --lora merges into a new one: leave one out")
    if values["check"] and "dtypes" in values:
        raise click.UsageError("--verify reads a checkpoint as it is, and --dtype is for a new one: leave one out")
    if values["check"] and target is not None:
        raise click.UsageError(f"--verify takes one folder, got {source} and {target}: leave out the second")


def _check_training(ctx: click.Context) -> None:
    """Raise UsageError for options of a LoRA beside --full, which trains none, and for those of a step without one."""
    for name in OF_STEP if not ctx.params.get("train", True) else ():
        if is_typed(name, ctx):
            raise click.UsageError(f"{option_of(name)} is for a step of training: give --train too, or leave it out")
    for name in OF_LORA if ctx.params["full"] else ():
        if is_typed(name, ctx):
            raise click.UsageError(f"{option_of(name)} is for a LoRA, and --full trains all weights: leave one out")


def _check_seeds(ctx: click.Context, seeds: str | None) -> None:
    if seeds is None:
        return
    for other in ("count", "seed"):
        if (value := ctx.params.get(other)) is not None and (other == "count" or is_typed(other, ctx)):
            raise WanjaxError(f"--seeds {seeds} is given beside --{other} {value}: one way is enough")
    read_seeds(seeds)


def _check_prompts(file: str | None) -> None:
    advice = "give a file with a prompt on each line"
    if Path(str(file)).suffix.lower() not in LISTS:  # else a file is meant
        advice += f"; for one prompt use `{shlex.join(['wanjax', 'generate', str(file)])}`"
    check_file(file, advice)
    if file is not None and os.path.isdir(file):
        raise WanjaxError(f"{file} is a folder: give a file with a prompt on each line")


def _check_chip(name: str) -> None:
    from wanjax.pricing.roofline import find_hardware  # imported late for a quick --help

    find_hardware(name)


def _check_several(values: Mapping[str, Any]) -> None:
    """Raise WanjaxError for options of one video, where there are several."""
    for option in ("noise", "profile"):
        if option in values:
            raise WanjaxError(f"--{option} is for one video: leave it out for several")
    if "folder" in values:
        raise WanjaxError("--dir keeps the stages of one video: give --out, the folder of several")
    if "out" in values and Path(values["out"]).suffix:
        raise WanjaxError(f"--out names the file {values['out']} for several videos: name a folder")


def _check_workers(ctx: click.Context) -> None:
    """Raise WanjaxError for workers that there cannot be, and for options of theirs without them."""
    from wanjax.cli.parsed import WorkerOptions, fill  # imported late for a quick listing of models
    from wanjax.jobs.databases import check_name, resolve_database
    from wanjax.jobs.ray_cluster import check_cluster

    elsewhere, workers = fill(WorkerOptions, ctx), ctx.params["workers"]
    if (database := resolve_database(elsewhere.database)) is not None:
        check_name(database)
    serves = ctx.info_name == "serve"
    of_ray = {"--hosts": elsewhere.hosts > 1, "--resources": elsewhere.resources, "--dashboard": elsewhere.dashboard}
    for option in [option for option, value in of_ray.items() if value and elsewhere.ray is None]:
        advice = "give --workers 2 --ray auto" if serves else "give --ray ADDRESS, or --ray local for this machine"
        raise WanjaxError(f"{option} is for workers of Ray: {advice}")
    if elsewhere.ray is not None:
        if serves and workers is None:
            raise WanjaxError("--ray is for several workers: give --workers 2 too, or another number")
        check_cluster(elsewhere.ray)
    if workers in (0, (0, 0)) and resolve_database(elsewhere.database) is None:
        raise WanjaxError("--workers 0 leaves the videos to workers elsewhere: give --database URL, which names theirs")
    alone = workers is None if serves else elsewhere.is_alone(workers)
    if ctx.params["processes"] and not alone:
        raise WanjaxError("--processes is for one worker, this process and those that it meets: leave out the others")


def _check_access(ctx: click.Context) -> None:
    from wanjax.cli.parsed import ListenOptions, fill  # imported late for a quick listing of models

    listen = fill(ListenOptions, ctx)
    try:
        from wanjax.serve.auth import Access
    except ImportError:  # of which the command tells
        return
    Access.read(listen.host, listen.token or os.environ.get(TOKEN) or None, listen.origins)


def _check_lora(text: str) -> None:
    from wanjax.checkpoints.hub import name_on_hub  # imported late: it needs NumPy
    from wanjax.checkpoints.lora_source import Lora

    name_on_hub(Lora.parse(text).named().file)


def _check_suffix(out: str) -> None:
    from wanjax.media.video import check_suffix  # imported late: it needs NumPy

    check_suffix(out)


def _check_stage(folder: Path, command: str) -> None:
    from wanjax.cli.runs import check_not_past  # imported late for a quick --help
    from wanjax.media.metadata import (  # imported late: it needs NumPy
        EMBEDDINGS,
        LATENTS,
        load_stage_settings,
        stage_file,
    )

    check_not_past(folder)
    load_stage_settings(folder)
    stage_file(folder, EMBEDDINGS if command == "denoise" else LATENTS)
