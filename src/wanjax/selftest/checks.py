# SPDX-License-Identifier: Apache-2.0
"""The checks of the self-test: each compares what this machine computes with what is known.

What nano and the small models of each family made on another machine is kept in the package, as signatures in
`golden.json`; `python -m tests.support.golden` makes that file anew. What is kept for a kernel is its verdict.
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
from wanjax.bench.measure import mesh_of
from wanjax.bench.operations import CLOSE, check_attention, exchange
from wanjax.bench.suite import BenchSize, Row, Suite, axes_of, local_devices, sized
from wanjax.checkpoints.convert import ToWanjax
from wanjax.figures import mesh_text
from wanjax.kernels import admission, admitted
from wanjax.layers.tiling import Tiling
from wanjax.registry import find_checkpoint, kinds, outline
from wanjax.selftest.signatures import distance, signature
from wanjax.selftest.small_models import model_names, random_array, small_pipeline, stages
from wanjax.sharding import RULES, Partitioner, make_mesh, one_device
from wanjax.signals import cleanup_on_exit

GOLDEN = Path(__file__).parent / "golden.json"
BOUNDS: Mapping[str, float] = {"cpu": 1e-4, "gpu": 1e-2, "tpu": 1e-2}
"""The largest relative L2 distance from what is kept, by the kind of device, in float32.

A CPU rounds as the one on which it was made. Accelerators multiply float32 in several passes, of which the fewest keep
some eight bits more than bfloat16.
"""
HALF_BOUND = 0.1  # of the same in bfloat16, whose steps are 4e-3, after two guided steps
PROMPT, NANO_STEPS = "a red circle moving right", 4
NANO = "nano"
TILED_SIZE, TILES = (64, 128), Tiling(64, (64, 48))  # the last tile of a row is narrower than the others
HEADS, HEAD_DIM = 2, 128  # of attention that is compared
INTERPRETED = "flash_tpu"  # the kernel that a machine without a TPU runs in Pallas' interpreter
MESSAGES = {"tokens": 64, "width": 64, "dtype": "float32"}
SIZES: Mapping[bool, tuple[str, BenchSize]] = {
    True: ("wan2.1-t2v-1.3b", BenchSize((256, 256), (64, 64), 17, 1, 1.0)),
    False: ("wan2.1-t2v-14b", BenchSize(None, None, None, 1, 3.0)),
}
"""What is timed, on a CPU and elsewhere: one layer of a transformer, and the first chunk of an autoencoder."""
TIMED = ("step", "decode_first")


@dataclass(frozen=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: What was checked.
        distance: The relative L2 distance from what is known, or None where the answer is yes or no.
        bound: The largest distance that is right.
        fault: What is wrong, in words; "" where nothing is.
        note: What else is to be known, such as why a check was left out.
        seconds: How long it took, with compiling.
    """

    name: str
    distance: float | None = None
    bound: float | None = None
    fault: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.fault

    @property
    def outcome(self) -> str:
        """The outcome in a word."""
        if self.fault:
            return "wrong"
        return "left out" if self.distance is None and self.note.startswith("left out") else "right"


Tell = Callable[[str], Any]


def checks(tell: Tell) -> Iterator[Check]:
    """Yield the outcome of each check; `tell` receives a sentence before each. A check that raises is a wrong one."""
    named: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("kernels", check_kernels),
        ("attention", check_attentions),
        (NANO, check_nano),
        *((model, partial(check_family, model)) for model in model_names()),
        ("tiles", check_tiles),
        ("checkpoint", check_checkpoint),
        ("messages", check_messages),
        ("mesh", check_mesh),
    ]
    exact = nullcontext() if _platform() == "cpu" else jax.default_matmul_precision("highest")
    for name, run in named:
        tell(name)
        start = perf_counter()
        try:
            with exact:
                outcomes = list(run())
        except Exception as error:  # whatever a compiler or a device raises
            first = (str(error).strip().splitlines() or [""])[0][:200]
            outcomes = [Check(name, fault=f"{type(error).__name__}: {first}")]
        seconds = (perf_counter() - start) / len(outcomes)
        yield from (replace(one, seconds=seconds) for one in outcomes)


def check_kernels() -> Iterator[Check]:
    """Yield the verdict on each hand-written kernel; without a TPU one of them runs in the interpreter."""
    from wanjax.kernels.trials import KERNELS  # needs all kernels, which no other check does

    if (kind := admitted.tpu_kind()) is not None:
        for name, reason in admission.kernel_verdicts(kind, admission.KERNELS).items():
            yield Check(f"kernel {name}", fault=reason)
        return
    if jax.default_backend() == "cpu":
        [kernel] = [one for one in KERNELS if one.name == INTERPRETED]
        yield Check(f"kernel {kernel.name}", fault=admission.rejection_reason(kernel), note="in the interpreter")
    else:
        yield Check("kernels", note="left out: the hand-written kernels are for TPUs")


def check_attentions() -> Iterator[Check]:
    """Compare each implementation of attention that runs here with the reference."""
    for dtype, bound in CLOSE.items():
        bound = max(bound, BOUNDS[_platform()] if dtype == "float32" else 0.0)
        for name, far in check_attention(HEADS, HEAD_DIM, dtype).items():
            yield compared(f"attention {name}, {dtype}", far, bound)


def check_nano() -> Iterator[Check]:
    """Compare what each stage of a video by the bundled model makes with what is kept."""
    yield from _against_golden(NANO, nano_stages(), BOUNDS[_platform()])


def nano_stages() -> dict[str, np.ndarray]:
    """Return the latents and the frames of a video by the bundled model, in float32."""
    pipe = loading.load(NANO, dtype="float32", vae_dtype="float32", mesh=make_mesh(devices=jax.local_devices()[:1]))
    pipe.progress = False
    latents = pipe.denoise(pipe.encode(PROMPT), steps=NANO_STEPS, seed=0)
    return {"latents": np.asarray(latents), "frames": pipe.decode(latents, jnp.float32)}


def check_family(model: str) -> Iterator[Check]:
    """Compare what each stage of a small model makes with what is kept, in float32; elsewhere in bfloat16 too."""
    yield from _against_golden(model, stages(small_pipeline(model, one_device())), BOUNDS[_platform()])
    if _platform() != "cpu":
        results = stages(small_pipeline(model, one_device(), "bfloat16"))
        yield from _against_golden(model, results, HALF_BOUND, ", bfloat16")


def check_tiles() -> Iterator[Check]:
    """Compare frames that are decoded in tiles with what is kept."""
    yield from _against_golden("tiles", tiled_frames(), BOUNDS[_platform()])


def tiled_frames() -> dict[str, np.ndarray]:
    """Return the frames of random latents, decoded in overlapping tiles."""
    pipe = small_pipeline(model_names()[0], one_device())
    height, width = TILED_SIZE
    settings = replace(pipe.defaults, height=height, width=width, frames=1)
    latents = random_array("latents", pipe.model.spec.latent_shape(settings))
    return {"frames": pipe.decode(jnp.asarray(latents), jnp.float32, tiling=TILES)}


def check_checkpoint() -> Iterator[Check]:
    """Convert the bundled model to a folder, read it back, and compare all weights bit for bit."""
    folder = Path(tempfile.mkdtemp(prefix="wanjax-selftest-"))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    with cleanup_on_exit(remove), ExitStack() as stack:
        stack.callback(remove)
        source, _ = find_checkpoint(NANO)
        ToWanjax(source, folder / NANO, kinds(), origin=NANO).run(lambda *_: None, lambda *_: None)
        written, bundled = (loading.load(name, dtype="float32") for name in (folder / NANO, NANO))
        for name in ("text_encoder", "transformer", "vae"):
            pair = (nnx.state(pipe.components.get(name)) for pipe in (written, bundled))
            same = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), *pair)
            differ = not all(jax.tree.leaves(same))
            yield Check(f"checkpoint, {name}", fault="what was read back is not what was written" if differ else "")


def check_messages() -> Iterator[Check]:
    """Compare a message of each kind between all devices with what NumPy makes of the same numbers."""
    devices = jax.devices()
    if len(devices) == 1:
        yield Check("messages", note="left out: one device sends none")
        return
    for kind, expect in EXPECTED.items():
        program = exchange(mesh_of({"tp": len(devices)}, devices), kind=kind, **MESSAGES)
        [shape] = program.arguments
        x = (np.arange(prod(shape.shape), dtype=np.float32) % 97).reshape(shape.shape)
        arrived = jax.jit(program.function)(jax.make_array_from_callback(shape.shape, shape.sharding, x.__getitem__))
        expected = expect(x, len(devices))
        same = all(np.array_equal(part.data, expected[part.index]) for part in arrived.addressable_shards)
        yield Check(f"message {kind.replace('_', '-')}", fault="" if same else "other numbers arrived than were sent")


EXPECTED: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "all_reduce": lambda x, n: x.reshape(n, -1, x.shape[1]).sum(0),
    "all_gather": lambda x, n: x,
    "all_to_all": lambda x, n: x,
    "permute": lambda x, n: np.roll(x, x.shape[0] // n, axis=0),
    "reduce_scatter": lambda x, n: x.reshape(n, -1, x.shape[1]).sum(0),
}
"""What a message of each kind makes of an array [L E] that is split over n devices."""


def check_mesh() -> Iterator[Check]:
    """Compare what a small model makes on a mesh of all devices with what is kept of one device."""
    devices = jax.devices()
    axes = mesh_axes(len(devices))
    if axes is None:
        yield Check("mesh", note="left out: there is one device")
        return
    mesh = make_mesh(*axes.values(), devices=devices[: prod(axes.values())])
    model = model_names()[0]
    for name, rules in RULES.items():
        results = stages(small_pipeline(model, Partitioner(mesh, rules)))
        yield from _against_golden(model, results, 10 * BOUNDS[_platform()], f" on {mesh_text(axes, ', ')}, {name}")


def mesh_axes(devices: int) -> dict[str, int] | None:
    """Return a mesh of at most so many devices over which a small model can be split, or None for one device."""
    axes = {"dp": 1, "sp": 1, "tp": 1}
    for axis in ("tp", "sp", "dp"):
        if 2 * prod(axes.values()) <= devices:
            axes[axis] = 2
    return axes if prod(axes.values()) > 1 else None


def compared(name: str, far: float, bound: float) -> Check:
    """Return the outcome of a comparison."""
    fault = "" if far <= bound else f"it is {far:.1e} away from what is right, where {bound:g} is the most"
    return Check(name, far, bound, fault)


def _against_golden(name: str, results: Mapping[str, Any], bound: float, how: str = "") -> Iterator[Check]:
    for stage, x in results.items():
        yield compared(f"{name}, {stage}{how}", distance(signature(x), golden()[name][stage]), bound)


@cache
def golden() -> dict[str, dict[str, list[float]]]:
    """Return the signatures that are kept, by model and stage."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def golden_of_this_machine() -> dict[str, dict[str, list[float]]]:
    """Return the signatures of what this machine makes."""
    results = {NANO: nano_stages(), "tiles": tiled_frames()}
    results |= {model: stages(small_pipeline(model, one_device())) for model in model_names()}
    return {name: {stage: signature(x) for stage, x in each.items()} for name, each in results.items()}


def timings(tell: Tell) -> Iterator[Row]:
    """Yield the time of attention, of a layer's step and of a chunk at real shapes, beside the plan's."""
    model, scale = SIZES[_platform() == "cpu"]
    model_outline = outline(model)
    model_outline = replace(model_outline, settings=sized(model_outline.settings, scale, model_outline.model))
    axes = axes_of(model_outline, jax.devices())
    used: Sequence[Any] = jax.devices()[: prod(axes.values())]
    suite = Suite(model_outline, scale, used, local_devices(jax.devices()), axes, tell)
    yield suite.attention()
    yield from suite.programs(TIMED, ("safe",))


def _platform() -> str:
    return jax.default_backend() if jax.default_backend() in BOUNDS else "gpu"
