# SPDX-License-Identifier: Apache-2.0
"""The measurements of a bench, at a model's shapes: attention, products, the stages' programs and messages."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import ceil, prod
from os import cpu_count
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.bench.measure import Measured, distance, measure, mesh_of
from wanjax.bench.operations import (
    CLOSE,
    COLLECTIVES,
    attend,
    attend_sparsely,
    check_attention,
    exchange,
    multiply,
    multiply_by_numpy,
)
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, AttentionConfig, choose
from wanjax.kernels.compiler_options import FAST, SAFE, SETS
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.meshes import auto_mesh, step_cost
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.hardware import Hardware, mesh_on, priced_on
from wanjax.plan.video_programs import STEP, programs_of
from wanjax.pricing.chips import KINDS, SLICES
from wanjax.pricing.digests import versions
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.roofline import Machine, machines
from wanjax.registry import Outline
from wanjax.sharding import MESH_AXES, RULES, Partitioner

COMPILER, MODEL = "the chip's compiler", "a stated model"
Build = Callable[[Mesh | AbstractMesh, AttentionConfig], Lowering]  # of a mesh and the attention


@dataclass(frozen=True)
class LocalDevices:
    """The devices of this process: the hardware that a plan prices, if it knows theirs, and how it prices them."""

    hardware: Hardware | None
    source: str

    @property
    def name(self) -> str:
        return self.hardware.name if self.hardware is not None else ""

    def price(self, build: Build, axes: Mapping[str, int]) -> tuple[float | None, str]:
        """Return the seconds of a program on a mesh of these axes by the plan, or None and why there are none.

        The model counts the operations of attention's plain formula.
        """
        if self.hardware is None:
            return None, "no model of these devices is stated"
        modelled = isinstance(self.hardware, Machine)
        if modelled and prod(axes.values()) > 1:
            return None, "the model is of one device"
        try:
            lowering = build(mesh_on(self.hardware, axes), AttentionConfig("reference") if modelled else AUTO)
            [priced] = priced_on(self.hardware, [("", lowering)])
        except (WanjaxError, CompilerError) as error:
            return None, str(error).splitlines()[0][:200]
        return priced.seconds, "" if priced.seconds is not None else "by the compiler it does not fit"


def local_devices(devices: Sequence[Any]) -> LocalDevices:
    """Return the hardware that a plan prices for these devices."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if kind in KINDS:
        slices = [each for each in SLICES.values() if each.chip == KINDS[kind] and each.devices == len(devices)]
        return LocalDevices(slices[0] if slices else None, COMPILER)
    matches = [x for x in machines().values() if kind.startswith(x.kind) or x.kind == platform == "cpu"]
    return LocalDevices(matches[0] if matches else None, MODEL)


PROGRAMS = {"encode_prompts": "text", STEP: "a step", "decode_first": "first frames", "decode_next": "later frames"}
SAME_ANSWER = {"float32": 1e-4, "bfloat16": 3e-2}  # relative L2 distance between two sets of compiler options
WIDER = 4  # times a token's width is what the measured projection makes of it
WORTH = 0.99  # of the other set's seconds: a set is kept instead of `safe` if it takes less
ALONE: Mapping[str, int] = dict.fromkeys(MESH_AXES, 1)
Tell = Callable[[str], Any]


@dataclass(frozen=True)
class BenchSize:
    """The size of a bench: (height, width) and frames of a video, the number of layers, and seconds a program.

    `decoded` is the size of frames for the autoencoder. None is the model's own.
    """

    size: tuple[int, int] | None
    decoded: tuple[int, int] | None
    frames: int | None
    layers: int | None
    budget: float


SIZES = {
    ("cpu", True): BenchSize((256, 256), (64, 64), 17, 1, 2.0),
    ("cpu", False): BenchSize((480, 832), (256, 256), 17, 2, 20.0),
    ("other", True): BenchSize(None, None, None, None, 3.0),
    ("other", False): BenchSize(None, None, None, None, 30.0),
}


@dataclass(frozen=True)
class Row:
    """One measurement beside the plan's seconds for it, or why there are none."""

    name: str
    what: str
    compiler: str
    compiling: float | None = None
    first: float | None = None
    seconds: float | None = None
    runs: int = 0
    spread: float | None = None
    modelled: float | None = None
    note: str = ""
    operations: int = 0

    @property
    def rate(self) -> float | None:
        """Operations a second, where they are counted."""
        return self.operations / self.seconds if self.seconds and self.operations else None

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.modelled if self.seconds and self.modelled else None


@dataclass(frozen=True)
class Bench:
    """The results. `exact` has the distance of each attention from the reference; `differ` that of the sets' answers.

    `better` is the set of compiler options to keep for these devices, None where the sets are the same there.
    """

    model: str
    size: str
    frames: int
    layers: int
    dtype: str
    quick: bool
    devices: str
    mesh: Mapping[str, int]
    place: str
    modelled_by: str
    versions: Mapping[str, str]
    rows: list[Row]
    exact: Mapping[str, float]
    differ: float | None
    better: str | None
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) | {"ratio": row.ratio, "rate": row.rate} for row in self.rows]}


def bench(outline: Outline, scale: BenchSize, *, quick: bool, tell: Tell) -> Bench:
    """Run all measurements; `tell` receives a sentence before each."""
    model, settings = outline.model, sized(outline.settings, scale, outline.model)
    devices, outline = jax.devices(), replace(outline, settings=settings)
    here = local_devices(devices)
    axes = axes_of(outline, devices)
    used = devices[: axes["dp"] * axes["sp"] * axes["tp"]]
    suite = Suite(outline, scale, used, here, axes, tell)
    exact = suite.exact()
    rows = [suite.attention(), *suite.products(), *suite.programs(), *suite.messages()]
    differ, better = suite.compare(rows)
    return Bench(
        model=settings.model,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        layers=min(scale.layers or 10**9, model.cost(settings).layers),
        dtype=settings.dtype,
        quick=quick,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        mesh=axes,
        place=here.name,
        modelled_by=here.source,
        versions={"cores": str(cpu_count()), **versions("wanjax", "jax", "jaxlib", "libtpu")},
        rows=rows,
        exact=exact,
        differ=differ,
        better=better,
        faults=suite.faults,
    )


class Suite:
    """The measurements on some devices."""

    def __init__(
        self,
        outline: Outline,
        scale: BenchSize,
        devices: Sequence[Any],
        here: LocalDevices,
        axes: Mapping[str, int],
        tell: Tell,
    ):
        self.outline = outline
        self.model = model = outline.model
        self.settings = settings = outline.settings
        self.scale = scale
        self.devices = devices
        self.here = here
        self.axes = axes
        self.tell = tell
        self.work = model.cost(settings)
        self.decoded = settings.updated(_shape(scale.decoded or settings.size))
        self.faults: list[str] = []
        self._steps: dict[str, Measured] = {}
        self._built: dict[Any, dict[str, Lowering]] = {}

    def exact(self) -> dict[str, float]:
        """Compare every implementation of attention with the reference, and note those that are wrong."""
        self.tell("attention, compared with the reference")
        dtype = self.settings.dtype
        distances = check_attention(self.work.heads, self.work.width // self.work.heads, dtype)
        for name, far in distances.items():
            if not far <= CLOSE[dtype]:
                self.faults.append(f"{name} is {far:.1e} away from the reference where {CLOSE[dtype]:g} is allowed")
        return distances

    def attention(self) -> Row:
        """Measure self-attention on one device, with the share of the heads that it has in the mesh."""
        tokens, heads = self.work.tokens, ceil(self.work.heads / self.axes["tp"])
        shape = (1, tokens, heads, self.work.width // self.work.heads)
        sizes: dict[str, Any] = {"heads": heads, "head_dim": shape[3], "dtype": self.settings.dtype}
        if sparse := self.model.spec.attention(AUTO).sparse:
            name, build = "sparse-linear", partial(attend_sparsely, sparse=sparse, tokens=tokens, **sizes)
        else:
            some = jax.ShapeDtypeStruct(shape, self.settings.dtype)
            name, build = choose(some, some, some).name, partial(attend, queries=tokens, keys=tokens, **sizes)
        row, _ = self._row("attention", f"{name}, {list(shape)}", SAFE, build, local_devices(self.devices[:1]), ALONE)
        return row

    def products(self) -> Iterator[Row]:
        """Measure a projection on one device; on a CPU in each dtype, beside the rate of the library NumPy has."""
        tokens, width = self.work.tokens, self.work.width
        cpu = self.devices[0].platform == "cpu"
        operations = 2 * tokens * width * WIDER * width
        for dtype in CLOSE if cpu else (self.settings.dtype,):
            build = partial(multiply, tokens=tokens, width=width, inside=WIDER * width, dtype=dtype)
            what = f"{dtype}, [{tokens} {width}] by [{width} {WIDER * width}]"
            row, _ = self._row("a product", what, SAFE, build, local_devices(self.devices[:1]), ALONE)
            yield replace(row, operations=operations)
        if cpu:
            library, timing = multiply_by_numpy(tokens, width, WIDER * width, self.scale.budget)
            yield Row(
                "a product", f"float32, by NumPy's {library}", SAFE, None, timing.first, timing.median,
                len(timing.runs), timing.spread, operations=operations,
            )  # fmt: skip

    def programs(self, names: Collection[str] = tuple(PROGRAMS), sets: Sequence[str] = tuple(SETS)) -> Iterator[Row]:
        """Measure the programs of these names; the step with each set of compiler options that differs."""
        for set_ in sets:
            programs = self.programs_on(mesh_of(self.axes, self.devices), set_)
            for name, lowering in programs.items():
                if name not in names or (set_ == FAST and (name != STEP or not self._differs(lowering))):
                    continue
                build = partial(self._program, name, set_)
                row, measured = self._row(PROGRAMS[name], self._shape(name), set_, build, self.here, self.axes)
                if name == STEP and measured is not None:
                    self._steps[set_] = measured
                yield row

    def programs_on(
        self, mesh: Mesh | AbstractMesh, compiler: str, attention: AttentionConfig = AUTO
    ) -> dict[str, Lowering]:
        """Return the programs on a mesh, by their names, with as many layers as the scale keeps.

        Attention that leaves out some keys is the model's own, whichever is given.
        """
        if self.model.spec.attention(AUTO).is_sparse:
            attention = AUTO
        if (programs := self._built.get((mesh, compiler, attention))) is None:
            few = reduced(self.model, self.scale.layers)
            how = {"attention": attention, "compiler": compiler}
            programs = {}
            for settings, parts in ((self.settings, ("encode", "denoise")), (self.decoded, ("decode",))):
                partitioner = Partitioner(mesh, RULES["fsdp"])
                pipe = abstract_pipeline(replace(self.outline, model=few, settings=settings), partitioner, **how)
                scheduled = programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))
                programs |= {x.name: x.lowering for x in scheduled if x.stage in parts and x.name in PROGRAMS}
            self._built[mesh, compiler, attention] = programs
        return {name: programs[name] for name in PROGRAMS if name in programs}

    def _program(self, name: str, compiler: str, mesh: Mesh | AbstractMesh, attention: AttentionConfig) -> Lowering:
        return self.programs_on(mesh, compiler, attention)[name]

    def _differs(self, fast: Lowering) -> bool:
        """Return whether a step's compiler options differ from those of the set `safe`."""
        safe = self.programs_on(mesh_of(self.axes, self.devices), SAFE)[STEP]
        return fast.compiler_options != safe.compiler_options

    def messages(self) -> Iterator[Row]:
        """Measure messages as large as the tokens of the video between all devices, if there are several."""
        if len(self.devices) == 1:
            return
        for kind in COLLECTIVES:
            tokens, width = self.work.tokens, self.work.width
            sizes = {"kind": kind, "tokens": tokens, "width": width, "dtype": self.settings.dtype}
            axes = {"dp": 1, "sp": 1, "tp": len(self.devices)}
            what = f"[{tokens} {width}] over {len(self.devices)}"
            yield self._row(kind.replace("_", "-"), what, SAFE, partial(exchange, **sizes), self.here, axes)[0]

    def compare(self, rows: list[Row]) -> tuple[float | None, str | None]:
        """Return the distance between the answers of the sets, and the set to keep; None where there is one set."""
        if self._steps.keys() != set(SETS):
            return None, None
        safe, fast = (self._steps[name] for name in SETS)
        differ = distance(fast.result, safe.result)
        if not differ <= SAME_ANSWER[self.settings.dtype]:
            self.faults.append(f"the sets of compiler options give answers {differ:.1e} apart, so `safe` is kept")
            return differ, SAFE
        return differ, FAST if fast.timing.median < WORTH * safe.timing.median else SAFE

    def _shape(self, name: str) -> str:
        chosen = self.settings
        if name == "encode_prompts":
            return f"2 prompts{self._kept}"
        if name == STEP:
            return f"{self.work.tokens} tokens, {'two prompts' if chosen.guided else 'one prompt'}{self._kept}"
        return f"{self.decoded.width}x{self.decoded.height}"

    @property
    def _kept(self) -> str:
        return "" if self.scale.layers is None else f", {quantity(self.scale.layers, 'layer')}"

    def _row(
        self, name: str, what: str, compiler: str, build: Build, here: LocalDevices, axes: Mapping[str, int]
    ) -> tuple[Row, Measured | None]:
        """Measure a program and price it; one that fails becomes a row that says why."""
        self.tell(f"{name}, {what}")
        modelled, note = here.price(build, axes)
        try:
            measured = measure(build(mesh_of(axes, self.devices), AUTO), self.scale.budget)
        except (WanjaxError, jax.errors.JaxRuntimeError, MemoryError) as error:
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            return Row(name, what, compiler, modelled=modelled, note=f"did not run: {why}"), None
        timing = measured.timing
        row = Row(
            name, what, compiler, timing.compiling, timing.first, timing.median, len(timing.runs), timing.spread,
            modelled, "; ".join(filter(None, (*measured.refused, note))),
        )  # fmt: skip
        return row, measured


def sized(defaults: Settings, scale: BenchSize, model: VideoModel) -> Settings:
    """Return the settings of the video whose shapes are measured."""
    dtype = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    settings = defaults.updated({**_shape(scale.size or defaults.size), "frames": scale.frames, "dtype": dtype})
    settings.check(spatial=model.spec.size_multiple, temporal=model.vae.temporal_factor)
    return settings


def _shape(size: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("height", "width"), size, strict=True))


def axes_of(outline: Outline, devices: Sequence[Any]) -> dict[str, int]:
    """Return the axes of the mesh that `wanjax.load` takes for a video of the outline's settings on these devices."""
    cost = step_cost(outline.family, outline.model, outline.settings, param_dtype=outline.param_dtype)
    return auto_mesh(cost, devices)._asdict()


def reduced(model: VideoModel, layers: int | None) -> VideoModel:
    """Return the model with at most so many layers in each transformer; other sizes stay."""
    if layers is None:
        return model
    configs: dict[str, Any] = {entry.name: getattr(model, entry.name) for entry in fields(model)}
    fewer = {
        name: replace(config, layers=min(layers, config.layers))
        for name, config in configs.items()
        if isinstance(getattr(config, "layers", None), int)
    }
    return replace(model, **fewer)
