# SPDX-License-Identifier: Apache-2.0
"""The checks of the self-test. Each check compares results of this machine with expected results.

The file `golden.json` in the package has signatures of results that another machine computed, with nano and with small
models of each family. `python -m tests.support.golden` writes the file. Kernels are compared with reference
implementations instead.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax import loading
from wanjax.bench.measure import mesh_of_first_devices
from wanjax.bench.operations import MAX_ATTENTION_ERRORS, check_attention, collective_program
from wanjax.bench.suite import BenchSize, BenchSuite, Measurement, auto_mesh_axes, bench_settings, find_local_hardware
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.figures import format_mesh
from wanjax.kernels import admission, admitted
from wanjax.layers.tiling import Tiling
from wanjax.registry import find_checkpoint, kinds, model_description
from wanjax.selftest.signatures import relative_error, signature
from wanjax.selftest.small_models import model_names, random_array, run_stages, small_pipeline
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, one_device_partitioner
from wanjax.signals import cleanup_on_exit

GOLDEN = Path(__file__).parent / "golden.json"
BOUNDS: Mapping[str, float] = {"cpu": 1e-4, "gpu": 1e-2, "tpu": 1e-2}
"""The maximum relative L2 error against the golden results in float32, by the kind of device.

CPUs round like the CPU that computed the golden results. Accelerators multiply float32 in several passes of bfloat16.
With the smallest number of passes, a product has about eight more correct bits than in bfloat16.
"""
BFLOAT16_BOUND = 0.1  # the bound in bfloat16 after two guided steps; one rounding in bfloat16 is up to 4e-3
PROMPT, NANO_STEPS = "a red circle moving right", 4
NANO = "nano"
TILED_SIZE, TILES = (64, 128), Tiling(64, (64, 48))  # the last tile of a row is narrower than the others
HEADS, HEAD_DIM = 2, 128  # the shape of the operands in the check of attention
INTERPRETED_KERNEL = "flash_tpu"  # the kernel that CPUs run in Pallas' interpreter
COLLECTIVE_SIZES = {"tokens": 64, "width": 64, "dtype": "float32"}
SIZES: Mapping[bool, tuple[str, BenchSize]] = {
    True: ("wan2.1-t2v-1.3b", BenchSize((256, 256), (64, 64), 17, 1, 1.0)),
    False: ("wan2.1-t2v-14b", BenchSize(None, None, None, 1, 3.0)),
}
"""The model and the size for timings. The key says whether the device is a CPU."""
TIMED_PROGRAMS = ("step", "decode_first")


@dataclass(frozen=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: The name of the check.
        relative_error: The relative L2 error of the result; None if the check measures none.
        bound: The maximum relative error that passes.
        fault: A description of the failure; "" if the check passed.
        note: Further information, such as why the check was skipped.
        seconds: The duration of the check, with compilation.
    """

    name: str
    relative_error: float | None = None
    bound: float | None = None
    fault: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.fault

    @property
    def outcome(self) -> str:
        """The outcome in one or two words."""
        if self.fault:
            return "wrong"
        return "left out" if self.relative_error is None and self.note.startswith("left out") else "right"


Announce = Callable[[str], Any]


def checks(announce: Announce) -> Iterator[Check]:
    """Run all checks. Before each check, `announce` is called with a sentence. A check that raises an error has
    failed."""
    checks_by_name: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("kernels", check_kernels),
        ("attention", check_attentions),
        (NANO, check_nano),
        *((model, partial(check_family, model)) for model in model_names()),
        ("tiles", check_tiles),
        ("checkpoint", check_checkpoint),
        ("collectives", check_collectives),
        ("mesh", check_mesh),
    ]
    precision = nullcontext() if _platform() == "cpu" else jax.default_matmul_precision("highest")
    for name, run in checks_by_name:
        announce(name)
        start = perf_counter()
        try:
            with precision:
                outcomes = list(run())
        except Exception as error:  # compilers and devices raise many types of errors
            first_line = (str(error).strip().splitlines() or [""])[0][:200]
            outcomes = [Check(name, fault=f"{type(error).__name__}: {first_line}")]
        seconds = (perf_counter() - start) / len(outcomes)
        yield from (replace(outcome, seconds=seconds) for outcome in outcomes)


def check_kernels() -> Iterator[Check]:
    """Test each hand-written kernel. Without a TPU, test only one kernel, in Pallas' interpreter."""
    from wanjax.kernels.trials import KERNELS  # this imports all kernels, and only this check needs them

    if (kind := admitted.tpu_kind()) is not None:
        for name, reason in admission.failure_reasons(kind, admission.KERNELS).items():
            yield Check(f"kernel {name}", fault=reason)
        return
    if jax.default_backend() == "cpu":
        [kernel] = [kernel for kernel in KERNELS if kernel.name == INTERPRETED_KERNEL]
        yield Check(f"kernel {kernel.name}", fault=admission.failure_reason(kernel), note="in the interpreter")
    else:
        yield Check("kernels", note="left out: the hand-written kernels are for TPUs")


def check_attentions() -> Iterator[Check]:
    """Compare each implementation of attention that runs on this device with the reference."""
    for dtype, bound in MAX_ATTENTION_ERRORS.items():
        bound = max(bound, BOUNDS[_platform()] if dtype == "float32" else 0.0)
        for name, measured in check_attention(HEADS, HEAD_DIM, dtype).items():
            yield check_from_error(f"attention {name}, {dtype}", measured, bound)


def check_nano() -> Iterator[Check]:
    """Compare the result of each stage of the bundled model with the golden results."""
    yield from _compare_with_golden(NANO, nano_stages(), BOUNDS[_platform()])


def nano_stages() -> dict[str, np.ndarray]:
    """Compute the latents and the frames of a video with the bundled model, in float32."""
    pipe = loading.load(NANO, dtype="float32", vae_dtype="float32", mesh=make_mesh(devices=jax.local_devices()[:1]))
    pipe.progress = False
    latents = pipe.denoise(pipe.encode(PROMPT), steps=NANO_STEPS, seed=0)
    return {"latents": np.asarray(latents), "frames": pipe.decode(latents, jnp.float32)}


def check_family(model: str) -> Iterator[Check]:
    """Compare the result of each stage of a small model with the golden results.

    Accelerators repeat this in bfloat16.
    """
    yield from _compare_with_golden(
        model, run_stages(small_pipeline(model, one_device_partitioner())), BOUNDS[_platform()]
    )
    if _platform() != "cpu":
        results = run_stages(small_pipeline(model, one_device_partitioner(), "bfloat16"))
        yield from _compare_with_golden(model, results, BFLOAT16_BOUND, ", bfloat16")


def check_tiles() -> Iterator[Check]:
    """Compare frames that are decoded in tiles with the golden results."""
    yield from _compare_with_golden("tiles", tiled_frames(), BOUNDS[_platform()])


def tiled_frames() -> dict[str, np.ndarray]:
    """Decode random latents in overlapping tiles."""
    pipe = small_pipeline(model_names()[0], one_device_partitioner())
    height, width = TILED_SIZE
    settings = replace(pipe.defaults, height=height, width=width, frames=1)
    latents = random_array("latents", pipe.model.spec.latent_shape(settings))
    return {"frames": pipe.decode(jnp.asarray(latents), jnp.float32, tiling=TILES)}


def check_checkpoint() -> Iterator[Check]:
    """Convert the bundled model to a folder, load it from there, and compare all weights bit for bit."""
    folder = Path(tempfile.mkdtemp(prefix="wanjax-selftest-"))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    with cleanup_on_exit(remove), ExitStack() as stack:
        stack.callback(remove)
        source, _ = find_checkpoint(NANO)
        ConversionToWanjax(source, folder / NANO, kinds(), published_name=NANO).run(lambda *_: None, lambda *_: None)
        written, bundled = (loading.load(name, dtype="float32") for name in (folder / NANO, NANO))
        for name in ("text_encoder", "transformer", "vae"):
            states = (nnx.state(pipe.components.get(name)) for pipe in (written, bundled))
            is_identical = all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), *states)))
            yield Check(
                f"checkpoint, {name}",
                fault="" if is_identical else "the loaded weights differ from the written weights",
            )


def check_collectives() -> Iterator[Check]:
    """Compare each collective over all devices with the same operation in NumPy."""
    devices = jax.devices()
    if len(devices) == 1:
        yield Check("collectives", note="left out: there is one device")
        return
    for kind, numpy_operation in NUMPY_COLLECTIVES.items():
        program = collective_program(
            mesh_of_first_devices({"tp": len(devices)}, devices), kind=kind, **COLLECTIVE_SIZES
        )
        [shape] = program.arguments
        x = (np.arange(prod(shape.shape), dtype=np.float32) % 97).reshape(shape.shape)
        received = jax.jit(program.function)(jax.make_array_from_callback(shape.shape, shape.sharding, x.__getitem__))
        expected = numpy_operation(x, len(devices))
        is_equal = all(np.array_equal(shard.data, expected[shard.index]) for shard in received.addressable_shards)
        yield Check(f"collective {kind.replace('_', '-')}", fault="" if is_equal else "the received numbers are wrong")


NUMPY_COLLECTIVES: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "all_reduce": lambda x, n: x.reshape(n, -1, x.shape[1]).sum(0),
    "all_gather": lambda x, n: x,
    "all_to_all": lambda x, n: x,
    "permute": lambda x, n: np.roll(x, x.shape[0] // n, axis=0),
    "reduce_scatter": lambda x, n: x.reshape(n, -1, x.shape[1]).sum(0),
}
"""The definition of each collective in NumPy, for an array [L E] that is sharded along L over n devices."""


def check_mesh() -> Iterator[Check]:
    """Compare the results of a small model on a mesh of devices with the golden results of one device."""
    devices = jax.devices()
    axes = mesh_axes(len(devices))
    if axes is None:
        yield Check("mesh", note="left out: there is one device")
        return
    mesh = make_mesh(*axes.values(), devices=devices[: prod(axes.values())])
    model = model_names()[0]
    for name, rules in SHARDING_RULES.items():
        results = run_stages(small_pipeline(model, Partitioner(mesh, rules)))
        yield from _compare_with_golden(
            model, results, 10 * BOUNDS[_platform()], f" on {format_mesh(axes, ', ')}, {name}"
        )


def mesh_axes(devices: int) -> dict[str, int] | None:
    """Choose a mesh of at most `devices` devices on which a small model can be sharded; return None for one device."""
    axes = {"dp": 1, "sp": 1, "tp": 1}
    for axis in ("tp", "sp", "dp"):
        if 2 * prod(axes.values()) <= devices:
            axes[axis] = 2
    return axes if prod(axes.values()) > 1 else None


def check_from_error(name: str, measured: float, bound: float) -> Check:
    """Build the outcome of a check from its relative error, which must be within the bound."""
    fault = "" if measured <= bound else f"its relative error is {measured:.1e}: at most {bound:g} is allowed"
    return Check(name, measured, bound, fault)


def _compare_with_golden(name: str, results: Mapping[str, Any], bound: float, suffix: str = "") -> Iterator[Check]:
    for stage, x in results.items():
        yield check_from_error(
            f"{name}, {stage}{suffix}", relative_error(signature(x), load_golden()[name][stage]), bound
        )


@cache
def load_golden() -> dict[str, dict[str, list[float]]]:
    """Read the golden signatures, by model and stage."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def compute_golden() -> dict[str, dict[str, list[float]]]:
    """Compute the golden signatures on this machine, by model and stage."""
    results = {NANO: nano_stages(), "tiles": tiled_frames()}
    results |= {model: run_stages(small_pipeline(model, one_device_partitioner())) for model in model_names()}
    return {name: {stage: signature(x) for stage, x in arrays.items()} for name, arrays in results.items()}


def timings(announce: Announce) -> Iterator[Measurement]:
    """Measure and price attention, a step with one layer, and the first decoded chunk, with a real model's shapes."""
    model, size = SIZES[_platform() == "cpu"]
    description = model_description(model)
    description = replace(description, settings=bench_settings(description.settings, size, description.model))
    axes = auto_mesh_axes(description, jax.devices())
    mesh_devices: Sequence[Any] = jax.devices()[: prod(axes.values())]
    suite = BenchSuite(description, size, mesh_devices, find_local_hardware(jax.devices()), axes, announce)
    yield suite.measure_attention()
    yield from suite.measure_programs(TIMED_PROGRAMS, ("safe",))


def _platform() -> str:
    return jax.default_backend() if jax.default_backend() in BOUNDS else "gpu"
