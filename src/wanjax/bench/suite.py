# SPDX-License-Identifier: Apache-2.0
"""Measure attention, matrix products, stages and collectives at the shapes of a model."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import ceil, prod
from os import cpu_count
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.bench.measure import MeasuredProgram, measure, mesh_of_first_devices, relative_l2_error
from wanjax.bench.operations import (
    COLLECTIVES,
    MAX_ATTENTION_ERRORS,
    attention_program,
    check_attention,
    collective_program,
    matmul_program,
    sparse_attention_program,
    time_numpy_matmul,
)
from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig, choose_implementation
from wanjax.kernels.compiler_options import FAST_SET, OPTION_SETS, SAFE_SET
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.meshes import auto_mesh, step_cost
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.hardware import Hardware, mesh_on, price_on
from wanjax.plan.video_programs import STEP, programs_of
from wanjax.pricing.chips import CHIPS_BY_DEVICE_KIND, SLICES
from wanjax.pricing.digests import versions
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.roofline import Machine, machines
from wanjax.registry import ModelDescription
from wanjax.sharding import MESH_AXES, SHARDING_RULES, Partitioner

PRICED_BY_COMPILER, PRICED_BY_ROOFLINE = "the chip's compiler", "a stated model"
BuildProgram = Callable[[Mesh | AbstractMesh, AttentionConfig], AbstractCall]  # builds a program for a mesh


@dataclass(frozen=True)
class LocalHardware:
    """The devices of this process, described as a plan needs them.

    `hardware` is None if a plan cannot price these devices.
    """

    hardware: Hardware | None
    price_source: str

    @property
    def name(self) -> str:
        return self.hardware.name if self.hardware is not None else ""

    def price(self, build: BuildProgram, axes: Mapping[str, int]) -> tuple[float | None, str]:
        """Price a program on a mesh with these axes. Return its seconds and "", or None and the reason for no price.

        If a model of the device gives the price, it counts the operations of the reference attention.
        """
        if self.hardware is None:
            return None, "there is no model of these devices"
        by_roofline = isinstance(self.hardware, Machine)
        if by_roofline and prod(axes.values()) > 1:
            return None, "the model covers a single device"
        try:
            abstract_call = build(mesh_on(self.hardware, axes), AttentionConfig("reference") if by_roofline else AUTO)
            [price] = price_on(self.hardware, [("", abstract_call)])
        except WanjaxError as error:
            return None, str(error).splitlines()[0][:200]
        return (
            price.seconds,
            "" if price.seconds is not None else "the compiler says that it does not fit into memory",
        )


def find_local_hardware(devices: Sequence[Any]) -> LocalHardware:
    """Find these devices in the hardware tables of plans."""
    device_kind, platform = devices[0].device_kind, devices[0].platform
    if device_kind in CHIPS_BY_DEVICE_KIND:
        slices = [
            tpu_slice
            for tpu_slice in SLICES.values()
            if tpu_slice.chip == CHIPS_BY_DEVICE_KIND[device_kind] and tpu_slice.devices == len(devices)
        ]
        return LocalHardware(slices[0] if slices else None, PRICED_BY_COMPILER)
    matches = [
        machine
        for machine in machines().values()
        if device_kind.startswith(machine.device_kind) or machine.device_kind == platform == "cpu"
    ]
    return LocalHardware(matches[0] if matches else None, PRICED_BY_ROOFLINE)


PROGRAM_TITLES = {
    "encode_prompts": "text",
    STEP: "a step",
    "decode_first": "first frames",
    "decode_next": "later frames",
}
MAX_OPTIONS_ERRORS = {"float32": 1e-4, "bfloat16": 3e-2}
"""The maximum relative L2 error between the results with two sets of compiler options."""
MLP_EXPANSION = 4  # the output width of the measured projection, relative to its input width
MAX_FAST_SHARE = 0.99  # `fast` is chosen if it takes less than this share of the time of `safe`
ONE_DEVICE_AXES: Mapping[str, int] = dict.fromkeys(MESH_AXES, 1)
Announce = Callable[[str], Any]


@dataclass(frozen=True)
class BenchSize:
    """The size of a bench. None means the model's default.

    `size` is the (height, width) of the video, and `decoded_size` the (height, width) of the frames that are decoded.
    `layers` is the maximum number of transformer layers. `budget` is the seconds in which a program is run repeatedly.
    """

    size: tuple[int, int] | None
    decoded_size: tuple[int, int] | None
    frames: int | None
    layers: int | None
    budget: float


BENCH_SIZES = {
    ("cpu", True): BenchSize((256, 256), (64, 64), 17, 1, 2.0),
    ("cpu", False): BenchSize((480, 832), (256, 256), 17, 2, 20.0),
    ("other", True): BenchSize(None, None, None, None, 3.0),
    ("other", False): BenchSize(None, None, None, None, 30.0),
}


@dataclass(frozen=True)
class Measurement:
    """A measurement, and the seconds that a plan predicts (`modelled`). If one is missing, `note` has the reason."""

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
        """Operations per second; None if the number of operations is unknown."""
        return self.operations / self.seconds if self.seconds and self.operations else None

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.modelled if self.seconds and self.modelled else None


@dataclass(frozen=True)
class BenchReport:
    """The results of a bench.

    `attention_errors` has the relative error of each implementation of attention against the reference.
    `option_sets_error` is the relative error between the results with the two sets of compiler options.
    `faster_option_set` is the set to use on these devices; None if the two sets are equal on these devices.
    """

    model: str
    size: str
    frames: int
    layers: int
    dtype: str
    quick: bool
    devices: str
    mesh: Mapping[str, int]
    hardware: str
    modelled_by: str
    versions: Mapping[str, str]
    rows: list[Measurement]
    attention_errors: Mapping[str, float]
    option_sets_error: float | None
    faster_option_set: str | None
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) | {"ratio": row.ratio, "rate": row.rate} for row in self.rows]}


def bench(description: ModelDescription, size: BenchSize, *, quick: bool, announce: Announce) -> BenchReport:
    """Run all measurements. Before each measurement, call `announce` with a sentence."""
    model, settings = description.model, bench_settings(description.settings, size, description.model)
    devices, description = jax.devices(), replace(description, settings=settings)
    local_hardware = find_local_hardware(devices)
    axes = auto_mesh_axes(description, devices)
    mesh_devices = devices[: axes["dp"] * axes["sp"] * axes["tp"]]
    suite = BenchSuite(description, size, mesh_devices, local_hardware, axes, announce)
    attention_errors = suite.compare_attention()
    rows = [
        suite.measure_attention(),
        *suite.measure_matmuls(),
        *suite.measure_programs(),
        *suite.measure_collectives(),
    ]
    option_sets_error, faster_option_set = suite.compare_options()
    return BenchReport(
        model=settings.model,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        layers=min(size.layers or 10**9, model.cost(settings).num_layers),
        dtype=settings.dtype,
        quick=quick,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        mesh=axes,
        hardware=local_hardware.name,
        modelled_by=local_hardware.price_source,
        versions={"cores": str(cpu_count()), **versions("wanjax", "jax", "jaxlib", "libtpu")},
        rows=rows,
        attention_errors=attention_errors,
        option_sets_error=option_sets_error,
        faster_option_set=faster_option_set,
        faults=suite.faults,
    )


class BenchSuite:
    """The measurements of a bench on the devices of this process."""

    def __init__(
        self,
        description: ModelDescription,
        size: BenchSize,
        devices: Sequence[Any],
        local_hardware: LocalHardware,
        axes: Mapping[str, int],
        announce: Announce,
    ):
        self.description = description
        self.model = model = description.model
        self.settings = settings = description.settings
        self.size = size
        self.devices = devices
        self.local_hardware = local_hardware
        self.axes = axes
        self.announce = announce
        self.forward_cost = model.cost(settings)
        self.decode_settings = settings.updated(_height_and_width(size.decoded_size or settings.size))
        self.faults: list[str] = []
        self._measured_steps: dict[str, MeasuredProgram] = {}
        self._programs: dict[Any, dict[str, AbstractCall]] = {}

    def compare_attention(self) -> dict[str, float]:
        """Compare each implementation of attention with the reference. Add a fault for each wrong implementation."""
        self.announce("attention, compared with the reference")
        dtype = self.settings.dtype
        errors = check_attention(
            self.forward_cost.num_heads, self.forward_cost.width // self.forward_cost.num_heads, dtype
        )
        for name, measured_error in errors.items():
            if not measured_error <= (bound := MAX_ATTENTION_ERRORS[dtype]):
                self.faults.append(
                    f"{name} has a relative error of {measured_error:.1e} against the reference: at most {bound:g} is "
                    "allowed"
                )
        return errors

    def measure_attention(self) -> Measurement:
        """Measure self-attention on one device, with as many heads as a device of the mesh computes."""
        tokens, heads = self.forward_cost.num_tokens, ceil(self.forward_cost.num_heads / self.axes["tp"])
        shape = (1, tokens, heads, self.forward_cost.width // self.forward_cost.num_heads)
        sizes: dict[str, Any] = {"heads": heads, "head_dim": shape[3], "dtype": self.settings.dtype}
        if sparse := self.model.spec.resolve_attention(AUTO).sparse:
            name, build = "sparse-linear", partial(sparse_attention_program, sparse=sparse, tokens=tokens, **sizes)
        else:
            operand = jax.ShapeDtypeStruct(shape, self.settings.dtype)
            name, build = (
                choose_implementation(operand, operand, operand).name,
                partial(attention_program, queries=tokens, keys=tokens, **sizes),
            )
        row, _ = self._measure_and_price(
            "attention",
            f"{name}, {list(shape)}",
            SAFE_SET,
            build,
            find_local_hardware(self.devices[:1]),
            ONE_DEVICE_AXES,
        )
        return row

    def measure_matmuls(self) -> Iterator[Measurement]:
        """Measure a projection on one device; on a CPU in each dtype, and with NumPy for comparison."""
        tokens, width = self.forward_cost.num_tokens, self.forward_cost.width
        on_cpu = self.devices[0].platform == "cpu"
        operations = 2 * tokens * width * MLP_EXPANSION * width
        for dtype in MAX_ATTENTION_ERRORS if on_cpu else (self.settings.dtype,):
            build = partial(matmul_program, tokens=tokens, width=width, output_width=MLP_EXPANSION * width, dtype=dtype)
            what = f"{dtype}, [{tokens} {width}] by [{width} {MLP_EXPANSION * width}]"
            row, _ = self._measure_and_price(
                "a product", what, SAFE_SET, build, find_local_hardware(self.devices[:1]), ONE_DEVICE_AXES
            )
            yield replace(row, operations=operations)
        if on_cpu:
            library, timing = time_numpy_matmul(tokens, width, MLP_EXPANSION * width, self.size.budget)
            yield Measurement(
                "a product", f"float32, by NumPy's {library}", SAFE_SET, None, timing.first_seconds,
                timing.median_seconds, len(timing.run_seconds), timing.spread, operations=operations,
            )  # fmt: skip

    def measure_programs(
        self, names: Collection[str] = tuple(PROGRAM_TITLES), sets: Sequence[str] = tuple(OPTION_SETS)
    ) -> Iterator[Measurement]:
        """Measure the named programs. If the two sets of compiler options differ, measure the step with both."""
        for compiler in sets:
            programs = self.build_programs(mesh_of_first_devices(self.axes, self.devices), compiler)
            for name, abstract_call in programs.items():
                if name not in names or (
                    compiler == FAST_SET and (name != STEP or not self._differs_from_safe(abstract_call))
                ):
                    continue
                build = partial(self._program, name, compiler)
                row, measured = self._measure_and_price(
                    PROGRAM_TITLES[name], self._describe_shape(name), compiler, build, self.local_hardware, self.axes
                )
                if name == STEP and measured is not None:
                    self._measured_steps[compiler] = measured
                yield row

    def build_programs(
        self, mesh: Mesh | AbstractMesh, compiler: str, attention: AttentionConfig = AUTO
    ) -> dict[str, AbstractCall]:
        """Build the programs of a video for a mesh, and return them by name. The networks have the bench's number of
        layers.

        A model with sparse attention uses it, and ignores `attention`.
        """
        if self.model.spec.resolve_attention(AUTO).is_sparse:
            attention = AUTO
        if (programs := self._programs.get((mesh, compiler, attention))) is None:
            reduced_model = limit_layers(self.model, self.size.layers)
            options = {"attention": attention, "compiler": compiler}
            programs = {}
            for settings, stages in ((self.settings, ("encode", "denoise")), (self.decode_settings, ("decode",))):
                partitioner = Partitioner(mesh, SHARDING_RULES["fsdp"])
                pipe = abstract_pipeline(
                    replace(self.description, model=reduced_model, settings=settings), partitioner, **options
                )
                scheduled = programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))
                programs |= {
                    entry.name: entry.abstract_call
                    for entry in scheduled
                    if entry.stage in stages and entry.name in PROGRAM_TITLES
                }
            self._programs[mesh, compiler, attention] = programs
        return {name: programs[name] for name in PROGRAM_TITLES if name in programs}

    def _program(self, name: str, compiler: str, mesh: Mesh | AbstractMesh, attention: AttentionConfig) -> AbstractCall:
        return self.build_programs(mesh, compiler, attention)[name]

    def _differs_from_safe(self, fast: AbstractCall) -> bool:
        """Return whether the compiler options of a step differ from the options in the set `safe`."""
        safe = self.build_programs(mesh_of_first_devices(self.axes, self.devices), SAFE_SET)[STEP]
        return fast.compiler_options != safe.compiler_options

    def measure_collectives(self) -> Iterator[Measurement]:
        """If there are several devices, measure collectives between all devices, on the tokens of the video."""
        if len(self.devices) == 1:
            return
        for kind in COLLECTIVES:
            tokens, width = self.forward_cost.num_tokens, self.forward_cost.width
            sizes = {"kind": kind, "tokens": tokens, "width": width, "dtype": self.settings.dtype}
            axes = {"dp": 1, "sp": 1, "tp": len(self.devices)}
            what = f"[{tokens} {width}] over {len(self.devices)}"
            yield self._measure_and_price(
                kind.replace("_", "-"), what, SAFE_SET, partial(collective_program, **sizes), self.local_hardware, axes
            )[0]

    def compare_options(self) -> tuple[float | None, str | None]:
        """Compare a step's results with both sets of compiler options; return the relative error and the faster set.

        Both are None if there is only one set.
        """
        if self._measured_steps.keys() != set(OPTION_SETS):
            return None, None
        safe, fast = (self._measured_steps[name] for name in OPTION_SETS)
        option_sets_error = relative_l2_error(fast.result, safe.result)
        if not option_sets_error <= MAX_OPTIONS_ERRORS[self.settings.dtype]:
            self.faults.append(
                f"the results of the two sets of compiler options are {option_sets_error:.1e} apart: `safe` is used"
            )
            return option_sets_error, SAFE_SET
        return (
            option_sets_error,
            FAST_SET if fast.timing.median_seconds < MAX_FAST_SHARE * safe.timing.median_seconds else SAFE_SET,
        )

    def _describe_shape(self, name: str) -> str:
        if name == "encode_prompts":
            return f"2 prompts{self._layers_text}"
        if name == STEP:
            prompts = "two prompts" if self.settings.guided else "one prompt"
            return f"{self.forward_cost.num_tokens} tokens, {prompts}{self._layers_text}"
        return f"{self.decode_settings.width}x{self.decode_settings.height}"

    @property
    def _layers_text(self) -> str:
        return "" if self.size.layers is None else f", {pluralize(self.size.layers, 'layer')}"

    def _measure_and_price(
        self,
        name: str,
        what: str,
        compiler: str,
        build: BuildProgram,
        local_hardware: LocalHardware,
        axes: Mapping[str, int],
    ) -> tuple[Measurement, MeasuredProgram | None]:
        """Measure and price a program. If it fails, the note of the row has the reason."""
        self.announce(f"{name}, {what}")
        modelled, note = local_hardware.price(build, axes)
        try:
            measured = measure(build(mesh_of_first_devices(axes, self.devices), AUTO), self.size.budget)
        except (WanjaxError, jax.errors.JaxRuntimeError, MemoryError) as error:
            cause = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            return Measurement(name, what, compiler, modelled=modelled, note=f"did not run: {cause}"), None
        timing = measured.timing
        row = Measurement(
            name, what, compiler, timing.compile_seconds, timing.first_seconds,
            timing.median_seconds, len(timing.run_seconds), timing.spread, modelled,
            "; ".join(filter(None, (*measured.rejected_options, note))),
        )  # fmt: skip
        return row, measured


def bench_settings(defaults: Settings, size: BenchSize, model: VideoModel) -> Settings:
    """Return the settings of the video whose programs are measured."""
    dtype = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    settings = defaults.updated(
        {**_height_and_width(size.size or defaults.size), "frames": size.frames, "dtype": dtype}
    )
    settings.check(spatial=model.spec.size_multiple, temporal=model.vae.temporal_factor)
    return settings


def _height_and_width(size: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("height", "width"), size, strict=True))


def auto_mesh_axes(description: ModelDescription, devices: Sequence[Any]) -> dict[str, int]:
    """Choose the axes of a mesh of these devices, as `wanjax.load` does for a video of the description's settings."""
    cost = step_cost(description.family, description.model, description.settings, param_dtype=description.param_dtype)
    return auto_mesh(cost, devices)._asdict()


def limit_layers(model: VideoModel, layers: int | None) -> VideoModel:
    """Limit the number of layers in each transformer of a model; None keeps all layers."""
    if layers is None:
        return model
    configs: dict[str, Any] = {entry.name: getattr(model, entry.name) for entry in fields(model)}
    reduced_configs = {
        name: replace(config, layers=min(layers, config.layers))
        for name, config in configs.items()
        if isinstance(getattr(config, "layers", None), int)
    }
    return replace(model, **reduced_configs)
