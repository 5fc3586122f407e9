# SPDX-License-Identifier: Apache-2.0
"""The commands `models` and `info`: the checkpoints known by name, and the record of a video, both without JAX."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from wanjax.cli.listing import describe_model, listed_models
from wanjax.cli.tables import folded, stdout_width, table
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.settings import LOADED, length_of
from wanjax.stores.paths import parse_path

MODELS = ("model", "transformer", "memory", "size", "frames", "steps", "guidance", "weights")


def show_model(model: str, as_json: bool) -> None:
    """Print what a model takes, its sizes and its recommended settings; read no weights."""
    model_info = dict(describe_model(model))
    if as_json:
        click.echo(json.dumps(model_info, indent=2, ensure_ascii=False))
        return
    needed = {name: " (needed)" for name in model_info["needs"]}
    shown_entries = {
        "takes": ["a prompt", *(f"{_option(name)}{needed.get(name, '')}" for name in model_info["takes"])],
        "sizes": [f"{name} {size}" for name, size in model_info["sizes"].items()],
        "parameters": _rounded(model_info["parameters"]),
        "memory": _rounded(model_info["memory"]) + "B",
        "networks": [f"{name} {_rounded(size)}B" for name, size in model_info["networks"].items()],
    }
    defaults = {name: value for name, value in model_info["defaults"].items() if value != ""}
    defaults |= {name: "bfloat16, float32 on a CPU" for name in LOADED if defaults.get(name) == "bfloat16"}
    left_out = ("defaults", "needs", "ids", "grid", "frames_step")
    _print_lines(
        _entries({name: value for name, value in model_info.items() if name not in left_out} | shown_entries | defaults)
    )


def _option(picture: str) -> str:
    """Return the option that gives a picture of this name."""
    return f"--{picture.removesuffix('s').replace('_', '-')}"


def show_models(as_json: bool) -> None:
    """Print the models as a table or as JSON."""
    models = list(listed_models().values())
    if as_json:
        click.echo(json.dumps(models, indent=2, ensure_ascii=False))
        return
    rows, notes = [], []
    for model in models:
        chosen = model["defaults"]
        sizes = (
            _rounded(model["parameters"]),
            _rounded(model["memory"]) + "B",
            f"{chosen['width']}x{chosen['height']}",
        )
        scales = [chosen.get(name) for name in ("guidance_scale", "guidance_scale_2")]
        guidance = ", ".join(f"{scale:g}" for scale in scales if scale is not None)
        rows.append((model["name"], *sizes, str(chosen["frames"]), str(chosen["steps"]), guidance, model["licence"]))
        notes.append(f"{model['about']}; takes: {' · '.join(model['tasks'])}")
    lines = table(MODELS, rows, stdout_width(), notes)
    click.echo("\n".join([*lines.headings, *lines.rows]))


def _rounded(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


LEFT_OUT = ("height", "width", "frames", "fps", "guidance_scale", "guidance_scale_2")
"""Entries that are told together or with others."""
WINDOWS = ("windows", "overlap", "then")
FIRST = ("model", "prompt", "original_prompt", "negative_prompt", "size", "frames", "steps", "guidance", "seed")
FIRST_OF_A_MODEL = (
    "name",
    "about",
    "source",
    "licence",
    "task",
    "tasks",
    "takes",
    "sizes",
    "parameters",
    "memory",
    "networks",
)


def show_record(file: str, as_json: bool) -> None:
    """Print the record in a file."""
    from wanjax.media.damage import is_cut_short  # imported late: a list of models needs none of it
    from wanjax.media.metadata import DIGESTS, find_metadata

    record = find_metadata(file)
    if isinstance(path := parse_path(file), Path) and path.is_file() and is_cut_short(path):
        click.echo(f"note: {file} is truncated: it has its settings, but not all of its frames", err=True)
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    record.pop(DIGESTS, None)  # which is for machines
    _print_lines(_entries(record))


def _print_lines(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    room = columns - width - 2 if (columns := stdout_width()) else None
    for name, text in lines.items():
        first, *rest = folded(text, room)
        click.echo("\n".join([f"{name:{width}}  {first}".rstrip(), *(f"{'':{width}}  {line}" for line in rest)]))


def _entries(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a record as texts, in the order of their importance; those that are None are left out."""
    entries = {name: value for name, value in record.items() if name not in LEFT_OUT}
    if not record.get("original_prompt"):
        entries.pop("original_prompt", None)
    if not record.get("video"):
        entries.pop("strength", None)
    if not any(record.get(name) for name in INPUTS):
        entries.pop("resize", None)
    if record.get("windows", 1) == 1:
        entries = {name: value for name, value in entries.items() if name not in WINDOWS}
    if {"height", "width"} <= record.keys() and "sizes" not in record:
        entries["size"] = f"{record['width']}x{record['height']}"
    if "frames" in record:
        entries["frames"] = f"{_length(record)}" + (f" at {record['fps']} a second" if "fps" in record else "")
    scales = [record.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    entries["guidance"] = " and ".join(_text(scale) for scale in scales if scale is not None) or None
    order = [name for name in (*FIRST_OF_A_MODEL, *FIRST, *entries) if entries.get(name) is not None]
    return {name.replace("_", " "): _text(entries[name]) for name in dict.fromkeys(order)}


def _length(record: Mapping[str, Any]) -> Any:
    """Return the frames of the whole video, of all its windows, where the record tells them in numbers."""
    numbers = record["frames"], record.get("windows", 1), record.get("overlap", 1)
    return length_of(*numbers) if all(type(number) is int for number in numbers) else record["frames"]


def _text(value: Any) -> str:
    """Return a value on one line, without characters that would steer a terminal."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        value = ", ".join(map(_text, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
