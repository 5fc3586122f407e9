# SPDX-License-Identifier: Apache-2.0
"""The command `train`: encode the data, train the model, and print the result."""

from functools import partial
from pathlib import Path

import click

from wanjax import registry
from wanjax.cli.parsed import PipelineOptions, options_from
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import load_pipeline
from wanjax.errors import WanjaxError, may_succeed_later
from wanjax.pipelines.request import VideoRequest, check_alternatives
from wanjax.training.adapters import LoraConfig
from wanjax.training.config import TrainConfig
from wanjax.training.loop import OtherTrainingError
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.train import Training


def train(report: Report, options: PipelineOptions, ctx: click.Context, *, data: Path, out: Path) -> None:
    """Train a model on a data set, with settings from the parameters of the command."""
    init_distributed(report, options.processes, trains=True)
    model = str(options.model)
    config = train_config(ctx, model)
    options = options._replace(param_dtype="float32" if config.lora is None else None)
    pipe = load_pipeline(options, clip_request(config), progress=report.load, note=report.note)
    training = Training(pipe, data, out, config, note=report.note, report_progress=report.set_progress)
    report.enable_resume(training.has_saved_work)
    with report.stage("train"):
        try:
            result_path = training.run()
        except OtherTrainingError as error:
            report.resume_command = None
            raise WanjaxError(error.message(partial(_option, ctx))) from error
        except WanjaxError as error:
            if not may_succeed_later(error):
                report.resume_command = None
            raise
    report.resume_command = None
    report.table()
    report.print_result(result_path.absolute(), {"model": model, "steps": config.steps}, seconds=report.seconds)


def _option(ctx: click.Context, name: str) -> str:
    """Return the option for a setting of a training, such as --lora-rank for "lora.rank". If it has none, return its
    name."""
    first, last = ("", *name.partition("[")[0].split("."))[-2:]
    options = {parameter.name: parameter.opts[-1] for parameter in ctx.command.params}
    return options.get(last) or options.get(first) or name


def clip_request(config: TrainConfig) -> VideoRequest:
    """Build the request for a video that costs as much as a clip, because it has the same shape and one prompt."""
    height, width = config.size or (None, None)
    shape = {"height": height, "width": width, "frames": config.frames}
    return VideoRequest({"guidance_scale": 1.0} | {name: value for name, value in shape.items() if value is not None})


def clip_size(
    model: str, *, size: tuple[int, int] | str | None = None, height: int | None = None, width: int | None = None
) -> tuple[int, int] | None:
    """Return the height and width of clips. If the options give only one of the two, the model supplies the other."""
    sizes = {
        name: value for name, value in {"size": size, "height": height, "width": width}.items() if value is not None
    }
    check_alternatives(sizes, name_prefix="--")
    return registry.find_size(model, sizes) if sizes else None


def train_config(ctx: click.Context, model: str) -> TrainConfig:
    """Build the settings of a training from the parameters of the command."""
    size = clip_size(model, **{name: ctx.params[name] for name in ("size", "height", "width")})
    lora = None if ctx.params["full"] else options_from(LoraConfig, ctx)
    optimizer = options_from(OptimizerConfig, ctx, name=ctx.params["optimizer"])
    return options_from(TrainConfig, ctx, size=size, lora=lora, optimizer=optimizer)
