# SPDX-License-Identifier: Apache-2.0
"""What `models` shows."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from wanjax.registry import PRESETS, Preset


def show(as_json: bool) -> None:
    """Prints the models that are known by name, as a table or as JSON."""
    described = [_described(preset) for preset in PRESETS.values()]
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("model", "parameters", "memory", "size", "frames", "steps", "guidance", "weights", "what it is"):
        table.add_column(name, overflow="fold")
    for model in described:
        chosen = model["defaults"]
        table.add_row(
            model["name"],
            _rounded(model["parameters"]),
            f"{_rounded(model['memory'])}B",
            f"{chosen['width']}x{chosen['height']}",
            str(chosen["frames"]),
            str(chosen["steps"]),
            f"{chosen['guidance_scale']:g}",
            model["licence"],
            model["about"],
        )
    Console(highlight=False).print(table)


def _described(preset: Preset) -> dict[str, Any]:
    """A preset as JSON; `memory` is what the transformer's weights take, in bytes."""
    defaults = preset.defaults.to_json()
    item = {"bfloat16": 2, "float32": 4}[defaults["dtype"]]
    return {
        "name": preset.name,
        "about": preset.about,
        "source": preset.source,
        "parameters": preset.transformer_parameters,
        "memory": item * preset.transformer_parameters,
        "licence": preset.licence,
        "defaults": {name: value for name, value in defaults.items() if name not in ("model", "prompt")},
    }


def _rounded(number: float) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
