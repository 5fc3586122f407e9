# SPDX-License-Identifier: Apache-2.0
"""What `models` shows."""

import json
from pathlib import Path
from typing import Any

import click

from wanjax.registry import PRESETS, Preset, load

ROW = "{:26} {:>10} {:>8} {:>9} {:>6} {:>5} {:>8}  {}"


def show(as_json: bool) -> None:
    """Prints the models that are known by name, as a table or as JSON."""
    described = [_described(preset) for preset in PRESETS.values()]
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    click.echo(ROW.format("model", "parameters", "memory", "size", "frames", "steps", "guidance", "weights"))
    for model in described:
        chosen = model["defaults"]
        sizes = (
            _rounded(model["parameters"]),
            _rounded(model["memory"]) + "B",
            f"{chosen['width']}x{chosen['height']}",
        )
        scales = (chosen["guidance_scale"], chosen["guidance_scale_2"])  # the second is that of a second expert
        guidance = ", ".join(f"{scale:g}" for scale in scales if scale is not None)
        counts = (chosen["frames"], chosen["steps"], guidance)
        click.echo(ROW.format(model["name"], *sizes, *counts, model["licence"]))
        click.echo(f"    {model['about']}")


def _described(preset: Preset) -> dict[str, Any]:
    """A preset as JSON; `parameters` and `memory`, in bytes, are those of the transformer's weights."""
    shipped = Path(preset.source).is_dir()  # then its defaults stand beside its weights
    defaults = load(preset.name).defaults if shipped else preset.defaults
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
