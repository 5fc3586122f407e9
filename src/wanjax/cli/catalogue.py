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
from wanjax.pipelines.family import Family, named_sizes
from wanjax.pipelines.record import DIGESTS
from wanjax.registry import outline, presets

ROW = "{:26} {:>11} {:>8} {:>9} {:>6} {:>5} {:>8}  {}"


def show_model(model: str, as_json: bool) -> None:
    """Prints what a model takes, its sizes and its recommended settings; reads no weights."""
    described = _described(model)
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    defaults, needs = described.pop("defaults"), described.pop("needs")
    described["takes"] = [
        "a prompt",
        *(f"{_option(name)}{' (needed)' * (name in needs)}" for name in described["takes"]),
    ]
    described["sizes"] = [f"{name} {size}" for name, size in described["sizes"].items()]
    described["parameters"] = _rounded(described["parameters"])
    described["memory"] = _rounded(described["memory"]) + "B"
    described["networks"] = [f"{name} {_rounded(size)}B" for name, size in described["networks"].items()]
    _print_lines(_entries(described | {k: v for k, v in defaults.items() if v != ""}))


def _option(picture: str) -> str:
    """Returns the option that gives a picture of this name."""
    return f"--{picture.removesuffix('s').replace('_', '-')}"


def show_models(as_json: bool) -> None:
    """Prints the models as a table or as JSON."""
    known = presets().values()
    described = [_described(preset.name) for preset in known]
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


def _described(model: str) -> dict[str, Any]:
    """Returns a model as JSON. `parameters` are those of the transformer, or of each of two.

    `networks` are the bytes of each network's weights as they are kept on devices, and `memory` is their sum. `takes`
    names the pictures and clips that the model can use, and `needs` those without which it makes no video. `about`,
    `source` and `licence` are known of published checkpoints alone.
    """
    family, architecture, defaults = outline(model)
    preset = presets().get(defaults.model)
    item = {"bfloat16": 2, "float32": 4}[preset.param_dtype if preset else defaults.dtype]
    counts = {name: _parameters(family, config) for name, config in architecture.networks.items()}
    exact = {name for name, config in architecture.networks.items() if family.network_of(config).float32}
    networks = {name: (4 if name in exact else item) * count for name, count in counts.items()}
    told = {"about": preset.about, "source": preset.source, "licence": preset.licence} if preset else {}
    sizes = named_sizes(architecture, defaults, preset.sizes if preset else ())
    return {
        "name": defaults.model,
        **told,
        "task": architecture.purpose,
        "takes": list(architecture.takes),
        "needs": list(architecture.needs),
        "sizes": {name: f"{width}x{height}" for name, (height, width) in sizes.items()},
        "parameters": counts["transformer"],
        "memory": sum(networks.values()),
        "networks": networks,
        "defaults": {k: v for k, v in defaults.to_json().items() if k not in ("model", "prompt")},
    }


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
FIRST_OF_A_MODEL = ("name", "about", "source", "licence", "task", "takes", "sizes", "parameters", "memory", "networks")


def show_record(file: str, as_json: bool) -> None:
    """Prints the record in a file."""
    record = read_record(file)
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    _print_lines(_entries(record))


def _print_lines(lines: Mapping[str, str]) -> None:
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
    if {"height", "width"} <= record.keys() and "sizes" not in record:
        told["size"] = f"{record['width']}x{record['height']}"
    if "frames" in record:
        told["frames"] = f"{record['frames']}" + (f" at {record['fps']} a second" if "fps" in record else "")
    scales = [record.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    told["guidance"] = " and ".join(_text(scale) for scale in scales if scale is not None) or None
    order = [name for name in (*FIRST_OF_A_MODEL, *FIRST, *told) if told.get(name) is not None]
    return {name.replace("_", " "): _text(told[name]) for name in dict.fromkeys(order)}


def _text(value: Any) -> str:
    """Returns a value on one line, without characters that would steer a terminal."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        value = ", ".join(map(_text, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
