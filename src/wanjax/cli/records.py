# SPDX-License-Identifier: Apache-2.0
"""The command `info`: the record of a video, as a table or as JSON."""

import json
from collections.abc import Mapping
from typing import Any

import click

from wanjax.media.records import read_record
from wanjax.media.stage_files import PICTURE_FILES

LEFT_OUT = ("height", "width", "frames", "fps", "guidance_scale", "guidance_scale_2")  # told together, or with others
FIRST = ("model", "prompt", "negative_prompt", "size", "frames", "steps", "guidance", "seed")


def show(file: str, as_json: bool) -> None:
    """Prints the record in a file."""
    record = read_record(file)
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    lines = _lines(record)
    width = max(map(len, lines))
    for name, text in lines.items():
        click.echo(f"{name:{width}}  {text}".rstrip())


def _lines(record: Mapping[str, Any]) -> dict[str, str]:
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
