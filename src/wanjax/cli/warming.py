# SPDX-License-Identifier: Apache-2.0
"""What `warmup` does: the beginning of a run, which compiles all of it, and nothing is kept but what was compiled."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.cache import compile_cache_folder
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Run
from wanjax.pipelines.base import Cancelled, Embeddings, Step

STEPS, CHUNKS = 2, 3  # from which on a run compiles nothing: what comes back from a step lies as it will from then on


def warmup(report: Report, **given: Any) -> None:
    """Takes the first steps of each stage."""
    meet(report, given.get("processes"))
    with TemporaryDirectory(prefix="wanjax-warmup-") as folder:
        run = Rehearsal(report, Path(folder), {"prompt": "", **given})
        run.denoise(run.embed())
        run.decode()
    report.table()
    report.note(f"what was compiled is in {compile_cache_folder()}")


class Rehearsal(Run):
    """The beginning of each stage."""

    def denoise(self, embeddings: Embeddings) -> None:
        chosen = self.settings
        second = chosen.guidance_scale if chosen.guidance_scale_2 is None else chosen.guidance_scale_2
        with self.report.stage("denoise"):
            for scale in {scale > 1: scale for scale in (chosen.guidance_scale, second)}.values():
                # two experts run the same program, unless one of them is without guidance
                self._first_steps(embeddings, replace(chosen, guidance_scale=scale).to_json())
        self.pipe.free()

    def _first_steps(self, embeddings: Embeddings, settings: dict[str, Any]) -> None:
        def take(step: Step) -> bool:
            self.report.advance("step", step.index + 1, STEPS)
            jax.block_until_ready(step.latents)
            return step.index + 1 < STEPS

        with suppress(Cancelled):
            self.pipe.denoise(embeddings, callback=take, batch_guidance=self.batch_guidance, **settings)

    def decode(self) -> None:
        latents = jnp.zeros(self.pipe.latent_shape(self.settings), jnp.float32)
        with self.report.stage("decode"):
            chunks = self.pipe.decode_chunks(latents, tiling=self.tiling)
            for done, chunk in enumerate(islice(chunks, CHUNKS), 1):
                np.asarray(chunk)
                self.report.advance("chunk", done, CHUNKS)
        self.pipe.free()
