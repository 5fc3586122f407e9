# SPDX-License-Identifier: Apache-2.0
"""The command `calibrate`: measures the tables of a checkpoint's step caches, and keeps them where `--cache` looks."""

import json
from collections.abc import Sequence
from typing import Any

from wanjax import registry
from wanjax.checkpoints.files import check_folder, writing
from wanjax.cli.report import Report
from wanjax.cli.stages import given_settings
from wanjax.kernels.compiler_options import kept_set
from wanjax.pipelines.caching.calibration import Measured, measure, reused_by, tables_from
from wanjax.pipelines.caching.tables import measured_file, to_json

PROMPTS = (
    "a cat plays the piano in a sunlit room",
    "waves break on a rocky shore at dusk, seen from above",
    "a woman walks through a crowded market and laughs",
    "a red circle moving right",
    "a blue square growing",
    "a green triangle staying still",
    "a yellow cross moving up",
)
MOST = 4  # prompts, where none are given


def calibrate(report: Report, *, model: str, prompts: Sequence[str], image: str | None, **given: Any) -> None:
    """Makes the latents of a few videos, and writes the tables that their steps told."""
    loading = {name: given.pop(name) for name in ("mesh", "rules", "attention", "dtype", "compiler")}
    loading["rules"] = loading["rules"] or "fsdp"
    loading["compiler"] = loading["compiler"] or kept_set()
    settings = given_settings(**given)
    pipe = registry.load(model, video=settings, progress=report.load, note=report.note, **loading)
    file, runs = measured_file(registry.tables_key(model)), []
    pipe.architecture.check_whole(model, "calibrating")
    check_folder(file.parent)
    chosen = prompts or suited(model)
    pictures, complete = pipe.prepare(image=image, **settings)
    for number, prompt in enumerate(chosen, 1):
        report.note(f"prompt {number} of {len(chosen)}: {prompt}")
        runs.append(_measured(report, pipe, pictures, complete.updated({"prompt": prompt})))
    tables = tables_from(runs)
    made = {"model": model, "steps": complete.steps, "prompts": list(chosen)}
    with writing(file) as beside:
        beside.write_text(json.dumps(to_json(tables) | made) + "\n", encoding="utf-8")
    for name, count in reused_by(tables, runs[0]).items():
        report.note(f"with --cache {name} {count} of {complete.steps} steps reuse what another kept")
    report.note(f"the tables are in {file}")


def suited(model: str) -> list[str]:
    """Returns prompts whose words a model knows."""
    preset = registry.presets().get(model)
    lesson = preset.lesson if preset else None
    return [prompt for prompt in PROMPTS if lesson is None or not lesson.unknown(prompt)][:MOST]


def _measured(report: Report, pipe: Any, pictures: Any, settings: Any) -> Measured:
    with report.stage("encode"):
        encoded = pipe.encode_prompts(settings.prompt, settings.negative_prompt)
        encoded = encoded._replace(**pipe.encode_pictures(pictures, settings))
    with report.stage("denoise"):
        return measure(pipe, encoded, settings)
