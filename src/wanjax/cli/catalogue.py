# SPDX-License-Identifier: Apache-2.0
"""The commands `models` and `info`: the checkpoints known by name, and the record of a video."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click

import wanjax
from wanjax import converters
from wanjax.compilers import kept
from wanjax.media.records import read_record
from wanjax.media.stage_files import PICTURE_FILES
from wanjax.pipelines.family import Family, Preset
from wanjax.pipelines.record import DIGESTS
from wanjax.registry import load, outline, presets

ROW = "{:26} {:>11} {:>8} {:>9} {:>6} {:>5} {:>8}  {}"


def show_models(as_json: bool) -> None:
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


LEFT_OUT = ("height", "width", "frames", "fps", "guidance_scale", "guidance_scale_2", DIGESTS)
"""Entries that are told together or with others; digests are for machines."""
FIRST = ("model", "prompt", "negative_prompt", "size", "frames", "steps", "guidance", "seed")


def show_record(file: str, as_json: bool) -> None:
    """Prints the record in a file."""
    record = read_record(file)
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    lines = _entries(record)
    width = max(map(len, lines))
    for name, text in lines.items():
        click.echo(f"{name:{width}}  {text}".rstrip())


def _entries(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the entries of a record as texts, in the order of their importance; those that are None are left out."""
    told = {name: value for name, value in record.items() if name not in LEFT_OUT}
    if not record.get("video"):
        told.pop("strength", None)
    if not any(record.get(name) for name in PICTURE_FILES):
        told.pop("resize", None)
    if {"height", "width"} <= record.keys():
        told["size"] = f"{record['width']}x{record['height']}"
    if "frames" in record:
        told["frames"] = f"{record['frames']}" + (f" at {record['fps']} a second" if "fps" in record else "")
    scales = [record.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    told["guidance"] = " and ".join(_text(scale) for scale in scales if scale is not None) or None
    order = [name for name in (*FIRST, *told) if told.get(name) is not None]
    return {name.replace("_", " "): _text(told[name]) for name in dict.fromkeys(order)}


def _text(value: Any) -> str:
    """Returns a value on one line, without characters that would steer a terminal."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        value = ", ".join(map(_text, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
