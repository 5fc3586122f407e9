# SPDX-License-Identifier: Apache-2.0
"""The command `warmup`: the first steps of a run, which compile all its programs. Only these are kept."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Rendering
from wanjax.compilation import compile_cache_folder
from wanjax.kernels.attention import is_radial
from wanjax.pipelines.family import Architecture
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Cancelled, Step, dense_steps
from wanjax.pipelines.streaming import StreamingPipeline

STEPS, CHUNKS = 2, 3  # a run compiles nothing after these: later inputs have the sharding of the last outputs
PAIRS = 4  # of steps after one another: whole or reusing, each after each


def first_steps(architecture: Architecture, settings: Settings) -> int:
    """Returns the number of steps after which a run compiles nothing: a step is known once its pair of kinds is.

    Where the steps that reuse are not known, these are all steps. A video that is made block by block needs those of a
    block, and the first of the next.
    """
    if architecture.streams:
        return settings.steps + STEPS
    rule, reuses = architecture.cache_rule(settings), architecture.reused(settings)
    if not rule.counted and not rule.branches:
        return settings.steps
    if rule.branches:  # one program for all steps but a network's first
        first = {turn.start for turn in architecture.turns(settings)}
        reuses = [step not in first for step in range(len(reuses))]
    pairs = list(pairwise(reuses))
    return max([STEPS, *(pairs.index(pair) + 2 for pair in set(pairs))])


def until_sparse(attention: str | None, steps: int) -> int:
    """Returns the number of steps after which a dense and two sparse steps are taken, under radial attention."""
    return min(dense_steps(steps) + STEPS, steps) if is_radial(attention) else 0


def warmup(report: Report, **given: Any) -> None:
    """Takes the first steps of each stage."""
    meet(report, given.get("processes"))
    with TemporaryDirectory(prefix="wanjax-warmup-") as folder:
        run = Rehearsal(report, Path(folder), {"prompt": "", **given})
        run.denoise(run.embed())
        run.decode()
    report.table()
    report.note(f"what was compiled is in {compile_cache_folder()}")


class Rehearsal(Rendering):
    """A run that ends after the first steps of each stage."""

    def denoise(self, encoded: Any) -> None:
        with self.report.stage("denoise"):
            for scale in {scale > 1: scale for scale in self.settings.guidance_scales}.values():
                # two experts share a program, unless only one of them has guidance
                self._first_steps(encoded, replace(self.settings, guidance_scale=scale).to_json())
        self.pipe.free()

    def _first_steps(self, encoded: Any, settings: dict[str, Any]) -> None:
        least = until_sparse(self.pipe.components.options.get("attention"), self.settings.steps)
        last, kinds = max(first_steps(self.pipe.architecture, self.settings), least) - 1, []

        def take(step: Step) -> bool:
            self.report.stop_if_asked()
            jax.block_until_ready(step.latents)
            kinds.append(step.reuses)
            return step.index < last and (step.index + 1 < least or len(set(pairwise(kinds))) < PAIRS)

        with suppress(Cancelled):
            self.pipe.denoise(encoded, callback=take, batch_guidance=self.batch_guidance, **settings)

    def decode(self) -> None:
        pipe, shape = self.pipe, self.pipe.architecture.latent_shape(self.settings)
        latents = jnp.zeros(shape, jnp.float32)
        with self.report.stage("decode"):
            if isinstance(pipe, StreamingPipeline):
                block = latents[:, :, : pipe.block_frames]
                chunks = pipe.decode_blocks([block] * CHUNKS, tiling=self.tiling)
            else:
                chunks = pipe.decode_chunks(latents, tiling=self.tiling)
            for done, chunk in enumerate(islice(chunks, CHUNKS), 1):
                np.asarray(chunk)
                self.report.count("chunk", done, CHUNKS)
        self.pipe.free()
