# SPDX-License-Identifier: Apache-2.0
"""The programs that a pipeline runs to make a video, as jobs for the compiler: shapes and shardings, never weights.

    networks = PUBLISHED["wan2.1-t2v-14b"]                         # wanjax.networks; or architecture(source)
    video = PRESETS["wan2.1-t2v-14b"].defaults                     # wanjax.registry; size, frames, steps, guidance
    runs = stages(networks, video, "v6e-8", {"dp": 2, "sp": 1, "tp": 4})
    for stage in ("encode", "denoise", "decode"):
        for run in runs[stage]:
            compiled = compile_job(run.job)
            print(stage, run.name, compiled.memory.peak, run.times * price(compiled).total.mid)

Each program is traced from the function that the pipeline itself compiles, with the arguments that it is given there,
so that what is priced is what runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from wanjax.abstract import CLASSES, abstract
from wanjax.kernels.attention.target import target_of
from wanjax.layers.conv import VIDEO
from wanjax.layers.linear import placed
from wanjax.models.t5 import T5Config
from wanjax.models.vision import CLIPVisionConfig
from wanjax.models.wan.config import ControlTransformerConfig, ImageTransformerConfig, TransformerConfig, VAEConfig
from wanjax.pipelines import programs
from wanjax.pipelines.base import Settings
from wanjax.pipelines.tasks import FIRST_AND_LAST_FRAME, TASKS, TEXT_TO_VIDEO, Condition, Task
from wanjax.pipelines.text import TEXT_LENGTH
from wanjax.plan.compile import Job
from wanjax.plan.program import Program
from wanjax.schedulers import UniPC, one_step
from wanjax.sharding import MESH_AXES, RULES, Layout

CONFIGS = {config.__name__: config for config in CLASSES}


@dataclass(frozen=True)
class Architecture:
    """The shapes of a pipeline's networks, and what it makes videos from."""

    text_encoder: T5Config
    transformer: TransformerConfig
    vae: VAEConfig
    task: Task = TEXT_TO_VIDEO
    image_encoder: CLIPVisionConfig | None = None


class Run(NamedTuple):
    """A program by its name, and how often a video has it run."""

    name: str
    job: Job
    times: int


def stages(
    networks: Architecture,
    settings: Settings,
    place: str,
    mesh: Mapping[str, int],
    *,
    rules: str = "fsdp",
    attention: str | None = None,
    batch_guidance: bool = False,
) -> dict[str, tuple[Run, ...]]:
    """The programs of `encode`, `denoise` and `decode` on a slice such as v6e-8, of which the mesh has every device.

    `mesh` gives the sizes of dp, sp and tp; the other keywords are those of `wanjax.load` and `WanPipeline.denoise`.
    Whether the slice and the mesh can be is for `compile_job` to say.
    """
    parts, size = _to_json(networks), settings.size
    axes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}

    def run(name: str, times: int, *of: str, **more: Any) -> Run:
        """A program of some of the networks: models and videos that have them in common have its price in common."""
        given = {"networks": {part: parts[part] for part in of}, "rules": rules, "dtype": settings.dtype}
        return Run(name, Job(place, f"{__name__}:{name}", given | more, axes), times)

    chunks = (settings.frames - 1) // networks.vae.temporal_factor
    encode = [run("encode_prompts", 1, "text_encoder")]
    if networks.image_encoder is not None:
        encode.append(run("encode_images", 1, "image_encoder", "task"))
    if condition_channels(networks):
        clips = 2 if isinstance(networks.transformer, ControlTransformerConfig) else 1
        encode.append(run("encode_first", clips, "vae", size=size))
        encode += [run("encode_next", clips * chunks, "vae", size=size)] if chunks else []
    denoised = ("transformer", "vae", "image_encoder", "task")
    video = {"size": size, "frames": settings.frames}
    video |= {"guided": settings.guidance_scale > 1, "attention": attention, "batch_guidance": batch_guidance}
    denoise = [
        run("context", 1 if settings.boundary is None else 2, *denoised, **video),
        run("step", settings.steps, *denoised, **video),
    ]
    decode = [run("decode_first", 1, "vae", size=size)]
    decode += [run("decode_next", chunks, "vae", size=size)] if chunks else []
    return {"encode": tuple(encode), "denoise": tuple(denoise), "decode": tuple(decode)}


def _to_json(networks: Architecture) -> dict[str, Any]:
    parts = {field.name: getattr(networks, field.name) for field in fields(networks)}
    return {
        name: {"config": type(part).__name__, **asdict(part)} if type(part).__name__ in CONFIGS else part
        for name, part in parts.items()
    } | {"task": next(name for name, task in TASKS.items() if task == networks.task)}


def _from_json(json: Mapping[str, Any]) -> SimpleNamespace:
    """The parts of an `Architecture` that are there."""
    parts = dict(json)
    for name, values in json.items():
        if isinstance(values, Mapping):
            sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "config"}
            parts[name] = CONFIGS[values["config"]](**sizes)
    if "task" in parts:
        parts["task"] = TASKS[parts["task"]]
    return SimpleNamespace(**parts)


class _Plan:
    """What the programs of one video are traced with: networks, the layout, and the shapes of latents."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        networks: Mapping[str, Any],
        rules: str,
        dtype: str,
        size: Sequence[int] = (),
        frames: int = 1,
    ):
        self.networks: Any = _from_json(networks)
        self.layout = Layout(mesh, RULES[rules])
        self.dtype = jnp.dtype(dtype)
        self.size = tuple(size)
        self.frames = frames

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape [1 T H W] of the video's latents."""
        vae = self.networks.vae
        return 1, (self.frames - 1) // vae.temporal_factor + 1, *(n // vae.spatial_factor for n in self.size)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Any = None) -> jax.ShapeDtypeStruct:
        """An array whole on every device or, with the logical names of its axes, laid out as an activation."""
        spec = PartitionSpec() if axes is None else self.layout.activation(axes, shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.layout.mesh, spec))

    def arrays(self, function: Callable, *arguments: Any, axes: Any = None) -> Any:
        """The arrays that a function gives."""
        with jax.set_mesh(self.layout.mesh):  # some are of other dtypes on other chips
            given = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: self.array(x.shape, x.dtype, axes), given)

    def keys(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Keys or values [layers B S E] of cross-attention: all on every device, or by heads."""
        spec = self.layout.activation((None, "batch", None, "heads"), (*x.shape[:3], self.networks.transformer.heads))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.layout.mesh, spec))

    def network(self, name: str, dtype: DTypeLike, **options: Any) -> tuple[Any, Any]:
        """A network's definition, and its weights where they lie."""
        network = abstract(getattr(self.networks, name), dtype=dtype, param_dtype=dtype, **options)
        return nnx.split(placed(network, self.layout))

    def program(self, function: Callable, static: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Program:
        """A function of pipelines.programs; `donate` counts its arguments without the static one."""
        run = partial(programs.laid_out(function, self.layout), static)
        options = programs.compiler_options(function, target_of(self.layout.mesh.devices.flat[0]))
        return Program(run, arguments, donate, options)


def encode_prompts(mesh: Mesh, **video: Any) -> Program:
    """A prompt and a negative prompt, of any length, to their features."""
    plan = _Plan(mesh, **video)
    graphdef, weights = plan.network("text_encoder", plan.dtype)
    ids, mask = (plan.array((2, TEXT_LENGTH), dtype) for dtype in (jnp.int32, jnp.bool_))
    return plan.program(programs.encode_prompts, (graphdef,), ids, mask, weights)


def encode_images(mesh: Mesh, **video: Any) -> Program:
    """The features of the first image, or of the first and the last."""
    plan = _Plan(mesh, **video)
    graphdef, weights = plan.network("image_encoder", jnp.float32)
    images = plan.array((_images(plan), *2 * (_vision(plan).image_size,), 3), jnp.float32)
    return plan.program(programs.encode_images, (graphdef,), images, weights)


def context(mesh: Mesh, *, attention: str | None, guided: bool, batch_guidance: bool, **video: Any) -> Program:
    """What no step changes: the keys and values of one prompt or of both, and the tables of RoPE."""
    plan = _Plan(mesh, **video)
    static, arguments = _given_once(plan, attention, guided, batch_guidance)
    return plan.program(programs.make_context, static, *arguments)


def _given_once(plan: _Plan, attention: str | None, guided: bool, batch_guidance: bool) -> tuple[Any, tuple]:
    """What `make_context` is given: latents, weights, prompts and the condition, behind what is static."""
    graphdef, weights = plan.network("transformer", plan.dtype, attention=attention)
    x = plan.array((*plan.latents, plan.networks.vae.latent_channels), jnp.float32)
    text = plan.array((1, TEXT_LENGTH, plan.networks.transformer.text_width), plan.dtype)
    prompts = (text,) * (2 if guided else 1)
    if batch_guidance or plan.layout.size("dp") > 1:
        prompts = (plan.array((len(prompts), *text.shape[1:]), plan.dtype),)
    return (graphdef, plan.networks.task), (x, weights, prompts, _condition(plan))


def step(mesh: Mesh, *, attention: str | None, guided: bool, batch_guidance: bool, **video: Any) -> Program:
    """One step: the transformer on one prompt or on both, guidance, and the scheduler."""
    plan = _Plan(mesh, **video)
    static, arguments = _given_once(plan, attention, guided, batch_guidance)
    make_context = partial(programs.laid_out(programs.make_context, plan.layout), static)
    contexts, rope = jax.eval_shape(make_context, *arguments)
    (graphdef, task), (x, weights, _, condition) = static, arguments
    scheduler = UniPC(1.0)  # its numbers come as arguments
    schedule = jax.tree.map(lambda x: plan.array(x.shape, x.dtype), one_step(scheduler.schedule(2), 0))
    state = plan.arrays(scheduler.init, schedule, x)
    return plan.program(
        programs.guided_step,
        (graphdef, scheduler, task),
        x,
        state,
        weights,
        jax.tree.map(plan.keys, contexts),
        jax.tree.map(lambda table: plan.array(table.shape, table.dtype, ("length", None)), rope),
        condition,
        plan.array((), jnp.float32),
        schedule,
        donate=(0, 1),
    )


def decode_first(mesh: Mesh, **video: Any) -> Program:
    """The first latent frame to the first frame."""
    return _decode(_Plan(mesh, **video), None)


def decode_next(mesh: Mesh, **video: Any) -> Program:
    """Another latent frame, after the first, to its frames."""
    plan = _Plan(mesh, **video)
    return _decode(plan, _kept(plan, _decode(plan, None)))


def encode_first(mesh: Mesh, **video: Any) -> Program:
    """The first frame of a clip to its latents."""
    return _encode(_Plan(mesh, **video), 1, None)


def encode_next(mesh: Mesh, **video: Any) -> Program:
    """More frames of a clip, as many as a latent frame is, to their latents."""
    plan = _Plan(mesh, **video)
    return _encode(plan, plan.networks.vae.temporal_factor, _kept(plan, _encode(plan, 1, None)))


def _decode(plan: _Plan, cache: Any) -> Program:
    graphdef, weights = plan.network("vae", jnp.float32)
    z = plan.array((1, 1, *plan.latents[2:], plan.networks.vae.latent_channels), jnp.float32)
    static = graphdef, jnp.dtype(jnp.uint8), plan.networks.vae.patch
    return plan.program(programs.decode_to_frames, static, z, cache, weights, donate=(1,))


def _encode(plan: _Plan, frames: int, cache: Any) -> Program:
    graphdef, weights = plan.network("vae", jnp.float32)
    vae = plan.networks.vae
    cells = (1, frames, *(n // vae.patch for n in plan.size), vae.cell_channels)
    return plan.program(programs.encode_frames, (graphdef,), plan.array(cells, jnp.float32), cache, weights)


def _kept(plan: _Plan, program: Program) -> Any:
    """What an autoencoder keeps between chunks, where it lies."""
    return plan.arrays(lambda *arguments: program.function(*arguments)[1], *program.arguments, axes=VIDEO)


def _vision(plan: _Plan) -> CLIPVisionConfig:
    assert plan.networks.image_encoder is not None
    return plan.networks.image_encoder


def _images(plan: _Plan) -> int:
    return 2 if plan.networks.task == FIRST_AND_LAST_FRAME else 1


def _condition(plan: _Plan) -> Condition:
    """What a step is given beside the prompt: of the tasks that have it."""
    config = plan.networks.transformer
    channels = condition_channels(plan.networks)
    image = None
    if isinstance(config, ImageTransformerConfig):
        image = plan.array((1, _images(plan) * _vision(plan).tokens, config.image_width), jnp.float32)
    return Condition(plan.array((*plan.latents, channels), jnp.float32) if channels else None, image)


def condition_channels(networks: Architecture) -> int:
    """Of the clip that stands beside the latents; none where a prompt is enough."""
    config = networks.transformer
    if isinstance(config, ControlTransformerConfig):
        return config.control_channels
    return config.channels_in - networks.vae.latent_channels
