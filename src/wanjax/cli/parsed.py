# SPDX-License-Identifier: Apache-2.0
"""Parsed parameters of a command: a `VideoRequest`, and named tuples of the other options.

This module does not import JAX, so that `--help` and error messages appear at once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import click

from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.settings import LOAD_SETTINGS, Settings, schema
from wanjax.stores.paths import full_name

if TYPE_CHECKING:
    from wanjax.checkpoints.lora_source import Lora
    from wanjax.kernels.attention import AttentionConfig
    from wanjax.layers.offload import Offload
    from wanjax.layers.tiling import Tiling
    from wanjax.pipelines.mesh_sizes import AutoMesh, MeshSizes
    from wanjax.pipelines.request import VideoRequest

Options = TypeVar("Options")


class PipelineOptions(NamedTuple):
    """The model, and the options to load and run it for all videos. `wanjax.load` chooses the value of an option that
    is None."""

    model: str | None = None
    dtype: str | None = None
    vae_dtype: str | None = None
    param_dtype: str | None = None
    precision: str | None = None
    revision: str | None = None
    lora: "tuple[str | Lora, ...]" = ()
    decoder: str | None = None
    attention: "AttentionConfig | None" = None
    mesh: "MeshSizes | AutoMesh | None" = None
    rules: str = "fsdp"
    compiler: str | None = None
    offload: "Offload | None" = None
    verify: bool = False
    processes: str | None = None
    tile: bool = False
    tiling: "Tiling | None" = None
    batch_guidance: bool = False

    @property
    def run_options(self) -> dict[str, Any]:
        """The keyword arguments that these options give to a run."""
        from wanjax.layers.tiling import Tiling  # imported late, because this needs JAX

        return {"tiling": self.tiling or (Tiling() if self.tile else None), "batch_guidance": self.batch_guidance}


class CommandOptions(NamedTuple):
    """The videos that a command makes, the names of their files, and the previews."""

    prompts: str | None = None
    seeds: str | None = None
    count: int | None = None
    extend_prompt: str | None = None
    extend_model: str | None = None
    folder: Path | None = None
    out: str | None = None
    force: bool = False
    noise: str | None = None
    profile: Path | None = None
    preview: bool = False
    preview_decoder: Path | None = None

    @property
    def makes_several(self) -> bool:
        """Whether the options allow the command to make more than one video."""
        return (self.prompts, self.seeds, self.count) != (None, None, None)


class WorkerOptions(NamedTuple):
    """The location and the resources of the workers of a batch."""

    database: str | None = None
    ray: str | None = None
    hosts: int = 1
    retries: int = 2
    resources: str | None = None
    dashboard: bool = False

    def is_alone(self, workers: int | None) -> bool:
        """Whether this process makes all videos of a batch by itself, with this number of workers."""
        from wanjax.jobs.databases import resolve_database  # imported late for a quick list of models

        return workers in (None, 1) and self.ray is None and resolve_database(self.database) is None


class ListenOptions(NamedTuple):
    """The address of a server, and the clients that it answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    origins: tuple[str, ...] = ()


class ServeOptions(NamedTuple):
    """Limits of a server, and how its workers make videos. `wanjax worker` has only some of these options."""

    max_queue: int = 1
    max_pixels: int | None = None
    max_steps: int = 1
    max_upload: int = 1
    extend_prompt: str | None = None
    extend_model: str | None = None
    preview: bool = True
    preview_decoder: Path | None = None
    rehearse: bool = True


class TrainingOptions(NamedTuple):
    """A step of training that `plan` prices with --train."""

    train: bool = False
    lora_rank: int = 32
    full: bool = False
    batch_size: int = 1
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"


class WorkloadOptions(NamedTuple):
    """The many videos that `plan` prices. The fields are those of `plan.scale.Workload`. If `requests` is None, `plan`
    prices one video."""

    requests: int | None = None
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


def request_of(ctx: click.Context) -> "VideoRequest":
    """Build the request for the videos of a command from its parameters. Raises SettingError for a wrong value."""
    from wanjax.pipelines.request import SCHEDULER, VideoRequest, check_alternatives  # imported late for a quick --help

    names = {"size", SCHEDULER.name, *INPUT_SPECS, *schema(Settings)} - {*LOAD_SETTINGS}
    fields = {name: value for name, value in ctx.params.items() if name in names and value not in (None, ())}
    check_alternatives(fields, name_prefix="--")
    for name in fields.keys() & INPUT_SPECS.keys():
        input_paths = fields[name]
        fields[name] = [*map(full_name, input_paths)] if isinstance(input_paths, tuple) else full_name(input_paths)
    return VideoRequest.parse(fields, complete=False)


def options_from(options_type: type[Options], ctx: click.Context, **extra: Any) -> Options:
    """Build a named tuple from `extra` and from those parameters of a command that have the names of its fields."""
    values = {name: ctx.params[name] for name in options_type.__annotations__ if name in ctx.params}
    return options_type(**{**values, **extra})


ARGUMENT_PARSERS: Mapping[str, Callable[[click.Context], Any]] = {
    "report": lambda ctx: ctx.obj,
    "ctx": lambda ctx: ctx,
    "request": request_of,
    "options": partial(options_from, PipelineOptions),
    "command": partial(options_from, CommandOptions),
    "worker_options": partial(options_from, WorkerOptions),
    "listen_options": partial(options_from, ListenOptions),
    "serve_options": partial(options_from, ServeOptions),
    "training_options": partial(options_from, TrainingOptions),
    "workload_options": partial(options_from, WorkloadOptions),
}
"""For each argument of the commands' functions, by name: the function that builds it from the command's parameters."""
