# SPDX-License-Identifier: Apache-2.0
"""The command `train`: encodes the data, trains, and tells what was written."""

from functools import partial
from pathlib import Path

import click

from wanjax import registry
from wanjax.cli.parsed import PipelineOptions, fill
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import loaded
from wanjax.errors import WanjaxError, WriteError
from wanjax.pipelines.request import VideoRequest, check_one_way
from wanjax.training.adapters import LoraConfig
from wanjax.training.config import TrainConfig
from wanjax.training.loop import OtherTrainingError
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.train import Training


def train(report: Report, options: PipelineOptions, ctx: click.Context, *, data: Path, out: Path) -> None:
    """Train a model on a data set, with the settings that are the parameters of the command."""
    init_distributed(report, options.processes, trains=True)
    model = str(options.model)
    config = config_of(ctx, model)
    options = options._replace(param_dtype="float32" if config.lora is None else None)
    pipe = loaded(options, clips_of(config), progress=report.load, note=report.note)
    begun = Training(pipe, data, out, config, note=report.note, count=report.count)
    report.enable_resume()
    with report.stage("train"):
        try:
            written = begun.run()
        except OtherTrainingError as error:
            report.resume_command = None
            option_names = ", ".join(dict.fromkeys(filter(None, map(partial(_option, ctx), error.names))))
            raise WanjaxError(f"{error} ({option_names})" if option_names else str(error)) from error
        except WanjaxError as error:
            if not isinstance(error, WriteError):  # a disk that is full may have room again
                report.resume_command = None  # it would end in the same way
            raise
    report.resume_command = None
    report.table()
    report.print_result(written.absolute(), {"model": model, "steps": config.steps}, seconds=report.seconds)


def _option(ctx: click.Context, name: str) -> str | None:
    """Return the option of the command that gives a training's setting, such as --lora-rank for "lora.rank"."""
    first, last = ("", *name.partition("[")[0].split("."))[-2:]
    options = {parameter.name: parameter.opts[-1] for parameter in ctx.command.params}
    return options.get(last) or options.get(first)


def clips_of(config: TrainConfig) -> VideoRequest:
    """Return the request of a video that costs what a clip does: of its shape, with one prompt."""
    height, width = config.size or (None, None)
    shape = {"height": height, "width": width, "frames": config.frames}
    return VideoRequest({"guidance_scale": 1.0} | {name: x for name, x in shape.items() if x is not None})


def size_of(
    model: str, *, size: tuple[int, int] | str | None = None, height: int | None = None, width: int | None = None
) -> tuple[int, int] | None:
    """Return the height and width of the clips where an option gives one; the other is then the model's own."""
    sizes = {name: x for name, x in {"size": size, "height": height, "width": width}.items() if x is not None}
    check_one_way(sizes, dashes="--")
    return registry.size_of(model, sizes) if sizes else None


def config_of(ctx: click.Context, model: str) -> TrainConfig:
    """Return the settings of a training of a model from the parameters of the command."""
    size = size_of(model, **{name: ctx.params[name] for name in ("size", "height", "width")})
    lora = None if ctx.params["full"] else fill(LoraConfig, ctx)
    optimizer = fill(OptimizerConfig, ctx, name=ctx.params["optimizer"])
    return fill(TrainConfig, ctx, size=size, lora=lora, optimizer=optimizer)
