# SPDX-License-Identifier: Apache-2.0
"""The command `train`: encodes the data, trains, and tells what was written."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from wanjax import loading, registry
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import given_settings
from wanjax.errors import WanjaxError, WriteError
from wanjax.kernels.compiler_options import kept_set
from wanjax.training.adapters import LoraConfig
from wanjax.training.config import TrainConfig
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.run import Training


def train(report: Report, *, model: str, data: Path, out: Path, **given: Any) -> None:
    """Trains a model on a data set."""
    meet(report, given.get("processes"))
    config = config_of(size=size_of(model, **given), **{k: v for k, v in given.items() if k != "size"})
    pipe = loading.load(
        model,
        dtype=given.get("dtype"),
        vae_dtype=given.get("vae_dtype"),
        param_dtype="float32" if config.lora is None else None,
        attention=given.get("attention"),
        mesh=given.get("mesh"),
        video=clips_of(config),
        rules=given["rules"],
        compiler=given.get("compiler") or kept_set(),
        progress=report.load,
        note=report.note,
    )
    begun = Training(pipe, data, out, config, note=report.note, count=report.count)
    report.goes_on()
    with report.stage("train"):
        try:
            written = begun.run()
        except WanjaxError as error:
            if not isinstance(error, WriteError):  # a disk that is full may have room again
                report.way_on = None  # it would end in the same way
            raise
    report.way_on = None
    report.table()
    report.made(written.absolute(), {"model": model, "steps": config.steps}, seconds=report.seconds)


def clips_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a video that costs what a clip does: of its shape, with one prompt."""
    height, width = config.size or (None, None)
    shape = {"height": height, "width": width, "frames": config.frames}
    return {"guidance_scale": 1.0} | {name: x for name, x in shape.items() if x is not None}


def size_of(model: str, **given: Any) -> tuple[int, int] | None:
    """Returns the height and width of the clips where an option gives one; the other is then the model's own."""
    chosen = given_settings(**{name: given[name] for name in ("size", "height", "width")})
    return registry.size_of(model, chosen) if chosen else None


def config_of(size: tuple[int, int] | None, **given: Any) -> TrainConfig:
    """Returns the settings of a training from the command's options."""
    lora = None
    if not given["full"]:
        lora = LoraConfig(given["rank"], given["alpha"], given["dropout"], tuple(given["targets"]))
    names = ("rate", "warm_up", "schedule", "clip", "weight_decay")
    optimizer = OptimizerConfig(name=given["optimizer"], **{name: given[name] for name in names})
    own = {field.name for field in fields(TrainConfig)} - {"lora", "optimizer", "size", "samples"}
    rest = {name: value for name, value in given.items() if name in own}
    return TrainConfig(lora=lora, optimizer=optimizer, size=size, samples=tuple(given["samples"]), **rest)
