# SPDX-License-Identifier: Apache-2.0
"""The command `models`: the published checkpoints known by name."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import click

import wanjax
from wanjax import converters
from wanjax.compilers import kept
from wanjax.pipelines.family import Family, Preset
from wanjax.registry import load, outline, presets

ROW = "{:26} {:>11} {:>8} {:>9} {:>6} {:>5} {:>8}  {}"


def show(as_json: bool) -> None:
    """Prints the models as a table or as JSON."""
    known = presets().values()
    described = [_described(preset) for preset in known]
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    click.echo(ROW.format("model", "transformer", "memory", "size", "frames", "steps", "guidance", "weights"))
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
    """Returns a preset as JSON. `parameters` are those of the transformer, or of each of two.

    `networks` are the bytes of each network's weights as they are kept on devices, and `memory` is their sum.
    """
    networks = _weights(preset)
    defaults = load(preset.name).defaults if preset.shipped else preset.defaults
    return {
        "name": preset.name,
        "about": preset.about,
        "source": preset.source,
        "parameters": preset.transformer_parameters,
        "memory": sum(networks.values()),
        "networks": networks,
        "licence": preset.licence,
        "defaults": {k: v for k, v in defaults.to_json().items() if k not in ("model", "prompt")},
    }


def _weights(preset: Preset) -> dict[str, int]:
    """Returns the bytes of the weights of each network, as they are kept on devices."""
    family, architecture, _ = outline(preset.name)
    item = {"bfloat16": 2, "float32": 4}[preset.param_dtype]
    sizes = {}
    for name, config in architecture.networks.items():
        sizes[name] = (4 if family.network_of(config).float32 else item) * _parameters(family, config)
    return sizes


def _parameters(family: Family, config: Any) -> int:
    """Returns the number of a network's parameters, which takes a second to count and is kept."""
    key = {"network": repr(config), "code": _code_digest(), **kept.versions("jax", "flax")}
    if (count := kept.recall("parameters", key)) is None:
        count = family.network_of(config).parameters
        kept.keep("parameters", key, count)
    return count


@cache
def _code_digest() -> str:
    """Returns one digest of all Python files of this package."""
    folders = (Path(wanjax.__file__).parent, Path(converters.__file__).parent)
    return kept.digest(path for folder in folders for path in sorted(folder.rglob("*.py")))


def _rounded(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"
