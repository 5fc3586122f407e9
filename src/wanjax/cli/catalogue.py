# SPDX-License-Identifier: Apache-2.0
"""The command `models`: the published checkpoints known by name."""

import json
from typing import Any

import click

from wanjax.pipelines.family import Preset
from wanjax.registry import load, presets

ROW = "{:26} {:>10} {:>8} {:>9} {:>6} {:>5} {:>8}  {}"


def show(as_json: bool) -> None:
    """Prints the models as a table or as JSON."""
    known = presets().values()
    described = [_described(preset) for preset in known]
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    click.echo(ROW.format("model", "parameters", "memory", "size", "frames", "steps", "guidance", "weights"))
    for preset, model in zip(known, described, strict=True):
        chosen = model["defaults"]
        sizes = (
            _rounded(model["parameters"]),
            _rounded(model["memory"]) + "B",
            f"{chosen['width']}x{chosen['height']}",
        )
        guidance = ", ".join(f"{scale:g}" for scale in preset.defaults.guidance_scales)
        counts = (chosen["frames"], chosen["steps"], guidance)
        click.echo(ROW.format(model["name"], *sizes, *counts, model["licence"]))
        click.echo(f"    {model['about']}")


def _described(preset: Preset) -> dict[str, Any]:
    """Returns a preset as JSON; `parameters` and `memory` (bytes) are those of the transformer's weights."""
    defaults = load(preset.name).defaults if preset.shipped else preset.defaults
    item = {"bfloat16": 2, "float32": 4}[preset.param_dtype]
    return {
        "name": preset.name,
        "about": preset.about,
        "source": preset.source,
        "parameters": preset.transformer_parameters,
        "memory": item * preset.transformer_parameters,
        "licence": preset.licence,
        "defaults": {k: v for k, v in defaults.to_json().items() if k not in ("model", "prompt")},
    }


def _rounded(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"
