# SPDX-License-Identifier: Apache-2.0
"""A stage in both libraries, its timing, and helpers for the stages of the families."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.synthetic import config_of
from benchmarks.timing import Run, speed_ratio, time_alternately
from tests.parity.references import StateDict, relative_l2
from tests.support.programs import caller
from wanjax.checkpoints import modules
from wanjax.checkpoints.network_kinds import read_network
from wanjax.execution import Program
from wanjax.pipelines.components import Components
from wanjax.pipelines.pipeline import Pipeline
from wanjax.registry import kinds, presets

STEPS = 2  # of a denoising run


@dataclass(frozen=True)
class Case:
    """One stage in both libraries: two functions that return the same array."""

    name: str
    target: float  # the speed ratio to reach
    ours: Run
    theirs: Run
    num_steps: int = 1  # the number of steps in a call


@dataclass(frozen=True)
class Result:
    """Median seconds per step of each library, theirs / ours, and the relative L2 error between the two results."""

    name: str
    target: float
    ours: float
    theirs: float
    ratio: float
    relative_error: float


@dataclass(frozen=True)
class Sizes:
    """The number of layers of the text encoder and of the transformer, the decoded video, and the number of steps.

    `denoised_size` has the height, width and frames of the denoised video, and `dtype` its dtype.
    """

    layers: int
    height: int
    width: int
    frames: int
    denoised_size: tuple[int, int, int] = (256, 256, 17)
    dtype: str = "float32"


Stages = Mapping[str, Callable[[Sizes], Iterator[Case]]]


def convert_reference(reference: torch.nn.Module, dtype: str = "float32") -> Any:
    """Return our network with the weights of a reference, in a dtype."""
    network = read_network(type(reference).__name__, config_of(reference), kinds())
    abstract = network.abstract(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    return modules.load(abstract, network.rules, StateDict(reference), ignore=network.unused)


def encode_function(program: Program, *arguments: Any) -> Callable[[], jax.Array]:
    """Return a function that encodes a prompt and a negative one by a family's program, and joins the results."""
    graphdef, weights, *texts = arguments
    run = partial(caller(), program, graphdef, *texts, weights)
    return lambda: jnp.concatenate(run())


def torch_pipeline(kind: Any, **components: Any) -> Any:
    """Return a pipeline of diffusers without a tokenizer and a text encoder, and without its progress bar."""
    pipeline = kind(tokenizer=None, text_encoder=None, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pipeline_of(model: str, networks: Mapping[str, nnx.Module], **shapes: Any) -> Pipeline:
    """Return the pipeline of a preset with loaded networks; `shapes` replace configs of its model."""
    preset, components = presets()[model], Components({})
    assert preset.model is not None
    for name, network in networks.items():
        components.override(name, network)
    return Pipeline(components, replace(preset.model, **shapes), preset.defaults)


def decode_case(
    model: str, reference: Any, unscaled: Callable[[torch.Tensor], torch.Tensor], sizes: Sizes, *, target: float
) -> Case:
    """Return the decoding of a video. `unscaled` converts denoised latents to the autoencoder's scale."""
    pipeline = pipeline_of(model, {"vae": convert_reference(reference)})
    factor, channels = pipeline.model.vae.spatial_factor, pipeline.model.vae.latent_channels
    shape = (1, channels, (sizes.frames + 3) // 4, sizes.height // factor, sizes.width // factor)
    latents = np.random.default_rng(0).standard_normal(shape, np.float32)

    def ours() -> np.ndarray:
        return pipeline.decode(jnp.asarray(latents), jnp.float32)

    def theirs() -> torch.Tensor:
        video = reference.decode(unscaled(torch.from_numpy(latents))).sample
        return (video[0].permute(1, 2, 3, 0) * 0.5 + 0.5).clamp(0, 1)

    return Case(f"VAE decode, {sizes.frames} frames of {sizes.width} × {sizes.height}", target, ours, theirs)


def measure(case: Case, repeats: int) -> Result:
    """Compare the results of both libraries, and time them in turns."""

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            return case.theirs()

    relative_error = relative_l2(case.ours(), theirs())
    timings = time_alternately({"ours": case.ours, "theirs": theirs}, repeats, warm_up=0)  # the functions have just run
    seconds = {name: timing.median / case.num_steps for name, timing in timings.items()}
    return Result(case.name, case.target, **seconds, ratio=speed_ratio(**timings), relative_error=relative_error)


def show(results: list[Result]) -> None:
    """Print the results as a table."""
    table = Table("stage", "wanjax, s", "torch, s", "torch / wanjax", "target", "relative L2 distance")
    for r in results:
        missed_note = "" if r.ratio >= r.target else " (missed)"
        table.add_row(
            r.name,
            f"{r.ours:.3f}",
            f"{r.theirs:.3f}",
            f"{r.ratio:.2f}{missed_note}",
            f"{r.target:.1f}",
            f"{r.relative_error:.1e}",
        )
    Console(width=140).print(table)
