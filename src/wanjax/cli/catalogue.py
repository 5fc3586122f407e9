# SPDX-License-Identifier: Apache-2.0
"""The commands `models`, which lists the named models, and `info`, which prints a video's metadata. Both commands run
without JAX."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wanjax.cli.listing import describe_model, listed_models
from wanjax.cli.tables import fold_text, stdout_width, table
from wanjax.errors import printable
from wanjax.layers.precision import PRECISIONS
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.settings import LOAD_SETTINGS, NO_MARGINS, total_frames
from wanjax.stores.paths import parse_path

if TYPE_CHECKING:
    from wanjax.cli.workflow_options import WorkflowOptions

MODEL_COLUMNS = ("model", "transformer", "memory", "size", "frames", "steps", "guidance", "weights")


def show_model(model: str, as_json: bool) -> None:
    """Print the inputs, sizes and recommended settings of a model, without reading weights."""
    model_info = dict(describe_model(model))
    if as_json:
        click.echo(json.dumps(model_info, indent=2, ensure_ascii=False))
        return
    needed_suffix = {name: " (needed)" for name in model_info["needs"]}
    shown_entries = {
        "takes": ["a prompt", *(f"{_input_option(name)}{needed_suffix.get(name, '')}" for name in model_info["takes"])],
        "sizes": [f"{name} {size}" for name, size in model_info["sizes"].items()],
        "parameters": _rounded_number(model_info["parameters"]),
        "memory": _rounded_number(model_info["memory"]) + "B",
        "networks": [f"{name} {_rounded_number(size)}B" for name, size in model_info["networks"].items()],
        "precisions": list(PRECISIONS) if model_info["full_precision"] else None,
    }
    defaults = {name: value for name, value in model_info["defaults"].items() if value != ""}
    defaults |= {name: "bfloat16, float32 on a CPU" for name in LOAD_SETTINGS if defaults.get(name) == "bfloat16"}
    hidden = ("defaults", "needs", "ids", "grid", "frames_step")
    _print_lines(
        _entries({name: value for name, value in model_info.items() if name not in hidden} | shown_entries | defaults)
    )


def _input_option(picture: str) -> str:
    """Return the name of the option that gives an input."""
    return f"--{picture.removesuffix('s').replace('_', '-')}"


def show_models(as_json: bool) -> None:
    """Print the models as a table or as JSON."""
    models = list(listed_models().values())
    if as_json:
        click.echo(json.dumps(models, indent=2, ensure_ascii=False))
        return
    rows, notes = [], []
    for model in models:
        settings = model["defaults"]
        sizes = (
            _rounded_number(model["parameters"]),
            _rounded_number(model["memory"]) + "B",
            f"{settings['width']}x{settings['height']}",
        )
        guidance_scales = [settings.get(name) for name in ("guidance_scale", "guidance_scale_2")]
        guidance = ", ".join(f"{scale:g}" for scale in guidance_scales if scale is not None)
        rows.append(
            (model["name"], *sizes, str(settings["frames"]), str(settings["steps"]), guidance, model["licence"])
        )
        notes.append(f"{model['about']}; takes: {' · '.join(model['tasks'])}")
    lines = table(MODEL_COLUMNS, rows, stdout_width(), notes)
    click.echo("\n".join([*lines.headings, *lines.rows]))


def _rounded_number(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


HIDDEN_ENTRIES = ("height", "width", "frames", "fps", "guidance_scale", "guidance_scale_2")
"""Entries of the metadata that are printed within other entries."""
WINDOW_ENTRIES = ("windows", "overlap", "match", "then")
RECORD_ORDER = ("model", "prompt", "original_prompt", "negative_prompt", "size", "frames", "steps", "guidance", "seed")
MODEL_ORDER = (
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
    "precisions",
    "full_precision",
)


def show_metadata(file: str, as_json: bool) -> None:
    """Print the metadata of a video, a stage's file or a generation_config.json."""
    from wanjax.media.damage import is_truncated  # imported late, because `models` does not need it
    from wanjax.media.metadata import DIGESTS_KEY, find_metadata

    metadata = find_metadata(file)
    if isinstance(path := parse_path(file), Path) and path.is_file() and is_truncated(path):
        click.echo(
            f"note: {file} is truncated: its settings are complete, but some of its frames are missing", err=True
        )
    if as_json:
        click.echo(json.dumps(metadata, indent=2))
        return
    metadata.pop(DIGESTS_KEY, None)  # only other programs need these entries
    _print_lines(_entries(metadata))


def show_workflow(options: "WorkflowOptions", as_json: bool) -> None:
    """Print the request of a workflow: its settings, the locations of its files, and the differences from ComfyUI."""
    values = dict(options.values)
    if as_json:
        entries = {"missing": options.missing, "notes": options.sentences()}
        click.echo(json.dumps(values | {k: v for k, v in entries.items() if v}, indent=2))
        return
    _print_lines(_entries(values))
    for sentence in (*options.missing.values(), *options.sentences()):
        click.echo(f"note: {printable(sentence)}")


def _print_lines(lines: Mapping[str, str]) -> None:
    name_width = max(map(len, lines))
    text_width = columns - name_width - 2 if (columns := stdout_width()) else None
    for name, text in lines.items():
        first_line, *other_lines = fold_text(text, text_width)
        click.echo(
            "\n".join(
                [f"{name:{name_width}}  {first_line}".rstrip(), *(f"{'':{name_width}}  {line}" for line in other_lines)]
            )
        )


def _entries(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Format the entries of metadata, the most important entries first. Entries that are None are left out."""
    entries = {name: value for name, value in metadata.items() if name not in HIDDEN_ENTRIES}
    if not metadata.get("original_prompt"):
        entries.pop("original_prompt", None)
    if not metadata.get("video"):
        entries.pop("strength", None)
    if not any(metadata.get(name) for name in INPUT_SPECS):
        entries.pop("resize", None)
    if metadata.get("outpaint") == NO_MARGINS:
        entries.pop("outpaint", None)
    if metadata.get("windows", 1) == 1:
        entries = {name: value for name, value in entries.items() if name not in WINDOW_ENTRIES}
    if {"height", "width"} <= metadata.keys() and "sizes" not in metadata:
        entries["size"] = f"{metadata['width']}x{metadata['height']}"
    if "frames" in metadata:
        entries["frames"] = f"{_frame_count(metadata)}" + (
            f" at {metadata['fps']} a second" if "fps" in metadata else ""
        )
    guidance_scales = [metadata.get(name) for name in ("guidance_scale", "guidance_scale_2")]
    entries["guidance"] = " and ".join(_as_text(scale) for scale in guidance_scales if scale is not None) or None
    order = [name for name in (*MODEL_ORDER, *RECORD_ORDER, *entries) if entries.get(name) is not None]
    return {name.replace("_", " "): _as_text(entries[name]) for name in dict.fromkeys(order)}


def _frame_count(metadata: Mapping[str, Any]) -> Any:
    """Compute the number of frames of all windows of a video. If the metadata has no valid numbers, return its entry
    unchanged."""
    numbers = metadata["frames"], metadata.get("windows", 1), metadata.get("overlap", 1)
    return total_frames(*numbers) if all(type(number) is int for number in numbers) else metadata["frames"]


def _as_text(value: Any) -> str:
    """Format a value on one line, without control characters."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {_as_text(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        value = ", ".join(map(_as_text, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return printable(text)
