# SPDX-License-Identifier: Apache-2.0
"""What the parameters of a command are parsed to, once: a `VideoRequest`, and a value for each thing beside it.

JAX is not imported here, so that `--help` and a mistake wait for nothing.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import click

from wanjax.media.inputs import INPUTS
from wanjax.pipelines.settings import LOADED, Settings, schema
from wanjax.stores.paths import full_name

if TYPE_CHECKING:
    from wanjax.checkpoints.lora_source import Lora
    from wanjax.kernels.attention import AttentionConfig
    from wanjax.layers.tiling import Tiling
    from wanjax.pipelines.mesh_sizes import AutoMesh, MeshSizes
    from wanjax.pipelines.request import VideoRequest

Kind = TypeVar("Kind")


class PipelineOptions(NamedTuple):
    """A model, how it is loaded, and how all videos are made with it; None leaves the choice to `wanjax.load`."""

    model: str | None = None
    dtype: str | None = None
    vae_dtype: str | None = None
    param_dtype: str | None = None
    revision: str | None = None
    lora: "tuple[str | Lora, ...]" = ()
    decoder: str | None = None
    attention: "AttentionConfig | None" = None
    mesh: "MeshSizes | AutoMesh | None" = None
    rules: str = "fsdp"
    compiler: str | None = None
    offload: bool | None = None
    verify: bool = False
    processes: str | None = None
    tile: bool = False
    tiling: "Tiling | None" = None
    batch_guidance: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """The keywords of a run."""
        from wanjax.layers.tiling import Tiling  # imported late: it needs JAX

        return {"tiling": self.tiling or (Tiling() if self.tile else None), "batch_guidance": self.batch_guidance}


class CommandOptions(NamedTuple):
    """Which videos a command makes, where they and the files of their stages go, and what is shown meanwhile."""

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
    def several(self) -> bool:
        """Whether there may be more than one video."""
        return (self.prompts, self.seeds, self.count) != (None, None, None)


class WorkerOptions(NamedTuple):
    """Where the workers of many videos are, and what they are given."""

    database: str | None = None
    ray: str | None = None
    hosts: int = 1
    retries: int = 2
    resources: str | None = None
    dashboard: bool = False

    def is_alone(self, workers: int | None) -> bool:
        """Whether this process makes all videos of a batch with so many workers."""
        from wanjax.jobs.databases import resolve_database  # imported late for a quick listing of models

        return workers in (None, 1) and self.ray is None and resolve_database(self.database) is None


class ListenOptions(NamedTuple):
    """Where a server listens, and whom it answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    origins: tuple[str, ...] = ()


class ServeOptions(NamedTuple):
    """What a server bounds, and how its workers make videos; `wanjax worker` has but some of these."""

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
    """A step of training that `plan` prices; --train says so."""

    train: bool = False
    lora_rank: int = 32
    full: bool = False
    batch_size: int = 1
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"


class BulkOptions(NamedTuple):
    """Many videos that `plan` prices: the fields of `plan.scale.Workload`; without `requests` it prices one."""

    requests: int | None = None
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


def request_of(ctx: click.Context) -> "VideoRequest":
    """Return what the parameters of a command ask of each video; raise SettingError for a wrong one."""
    from wanjax.pipelines.request import SCHEDULER, VideoRequest, check_one_way  # imported late for a quick --help

    names = {"size", SCHEDULER.name, *INPUTS, *schema(Settings)} - {*LOADED}
    fields = {name: value for name, value in ctx.params.items() if name in names and value not in (None, ())}
    check_one_way(fields, dashes="--")
    for name in fields.keys() & INPUTS.keys():
        files = fields[name]
        fields[name] = [*map(full_name, files)] if isinstance(files, tuple) else full_name(files)
    return VideoRequest.parse(fields, whole=False)


def fill(kind: type[Kind], ctx: click.Context, **more: Any) -> Kind:
    """Return a value whose fields are the parameters of a command that have their names, and `more` fields."""
    values = {name: ctx.params[name] for name in kind.__annotations__ if name in ctx.params}
    return kind(**{**values, **more})


VALUES: Mapping[str, Callable[[click.Context], Any]] = {
    "report": lambda ctx: ctx.obj,
    "ctx": lambda ctx: ctx,
    "request": request_of,
    "options": partial(fill, PipelineOptions),
    "command": partial(fill, CommandOptions),
    "by": partial(fill, WorkerOptions),
    "listen": partial(fill, ListenOptions),
    "served": partial(fill, ServeOptions),
    "training": partial(fill, TrainingOptions),
    "bulk": partial(fill, BulkOptions),
}
"""What makes an argument of a command's function from the command's parameters, by the argument's name."""
