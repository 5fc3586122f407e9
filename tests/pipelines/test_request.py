# SPDX-License-Identifier: Apache-2.0
"""A request means the same by whichever interface it comes: Python, TOML, a row of either kind, a form and JSON."""

import csv
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wanjax
from wanjax.cli import main, many
from wanjax.cli.parsed import request_of
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.rows import read_requests, shared_by_all
from wanjax.pipelines.request import VideoRequest
from wanjax.serve import uploads
from wanjax.serve.limits import Limits
from wanjax.serve.served_models import ServedModels

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)
SHAPES = st.sampled_from(
    [{}, {"size": "64x32"}, {"size": "64p"}, {"height": 32, "width": 64}, {"size": "96*48"}, {"frames": 9}]
)
FIELDS = st.fixed_dictionaries(
    {"prompt": TEXTS.map(lambda text: f"a {text}".strip())},
    optional={
        "negative_prompt": TEXTS.filter(bool),
        "seed": st.integers(0, 2**64 - 1),
        "steps": st.integers(1, 200),
        "guidance_scale": st.floats(0, 20),
        "cache": st.sampled_from(["none", "magcache:0.06,2,0.2", "easycache"]),
        "guidance_rule": st.sampled_from(["none", "nag:scale=11", "cfg-zero"]),
        "follow": st.sampled_from(["official", "diffusers"]),
        "rng": st.sampled_from(["jax", "torch"]),
        "scheduler": st.sampled_from(["euler", "dpm++"]),
    },
)


@pytest.fixture(scope="module")
def nano():
    return wanjax.load("nano")


@pytest.fixture(scope="module")
def served(nano):
    """Read the fields of a request to a server of nano; the model that it names is that."""

    def read(fields):
        request, files = uploads.read_request(fields, {}, ServedModels({"nano": nano}, {}), Limits.of(nano.defaults))
        assert (request.model, files) == ("nano", {})
        return replace(request, model=None)

    return read


def from_rows(folder, fields, suffix):
    file = folder / f"rows.{suffix}"
    if suffix == "jsonl":
        file.write_text(json.dumps(fields))
    else:
        with file.open("w", encoding="utf-8", newline="") as opened:
            csv.writer(opened).writerows([fields, fields.values()])
    [request] = read_requests(str(file))
    assert request.row == 1
    return replace(request, row=0)


def from_toml(folder, fields):
    """Return the request of `wanjax batch`, whose prompt is a line of a file, and whose options those of another."""
    options = {name.replace("_", "-"): value for name, value in fields.items() if name != "prompt"}
    (folder / "my.toml").write_text("".join(f"{k} = {_toml(x)}\n" for k, x in options.items()), encoding="utf-8")
    (folder / "prompts.txt").write_text(fields["prompt"], encoding="utf-8")
    arguments = [str(folder / "prompts.txt"), "--config", str(folder / "my.toml")]
    with click.Context(main, info_name="wanjax", obj=SimpleNamespace()) as group:
        command = main.commands["batch"].make_context("batch", arguments, parent=group)
    options = request_of(command)
    [request] = many.requests_of(options, command.params["prompts"])
    return replace(request.with_defaults(shared_by_all(options)), row=0)


def _toml(value):
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@given(FIELDS, SHAPES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_is_the_same_by_every_interface(tmp_path, served, fields, shape):
    fields |= shape
    request = VideoRequest.parse(fields)
    assert request == from_rows(tmp_path, fields, "jsonl") == from_rows(tmp_path, fields, "csv")
    assert request == from_toml(tmp_path, fields)
    assert request == served(fields) == served({name: str(value) for name, value in fields.items()})
    assert request == VideoRequest.parse(request.fields) == VideoRequest(**json.loads(json.dumps(asdict(request))))


def test_files_are_the_same_by_the_interfaces_that_name_them(tmp_path):
    files = {name: str(tmp_path / name) for name in ("image", "video")}
    request = VideoRequest.parse({"prompt": "a", **files})
    assert request.inputs == files
    assert request == from_rows(tmp_path, {"prompt": "a", **files}, "jsonl") == from_toml(tmp_path, request.fields)
    assert request == VideoRequest.parse({"prompt": "a", "input_reference": files["image"], "video": files["video"]})
    one, two = ({"prompt": "a", "references": each} for each in ("b.png", ["b.png"]))
    assert VideoRequest.parse(one) == VideoRequest.parse(two) != VideoRequest.parse({"prompt": "a"})


def test_texts_are_bounded_only_for_clients():
    for fields in ({"prompt": "x" * 4001}, {"then": "x" * 4001}, {"scheduler": "y" * 201}):
        assert VideoRequest.parse({"prompt": "a"} | fields)


def test_strengths_of_loras_are_a_text():
    assert VideoRequest.parse({"prompt": "a", "lora": "cat:0.5, b:1"}).lora == {"cat": 0.5, "b": 1.0}


def test_seconds_are_the_nearest_frames_for_rows_and_for_a_server(nano, served, tmp_path):
    fields = {"prompt": "a", "seconds": 1.2, "size": "32x32"}
    result = Limits.of(nano.defaults)
    [job] = VideoMaker(lambda: nano, tmp_path).tasks_for([from_rows(tmp_path, fields, "csv")])
    frames = uploads.complete_settings(served(fields), nano, {}, result).frames
    assert job.request.settings["frames"] == frames == round((1.2 * nano.defaults.fps - 1) / 4) * 4 + 1
    assert "seconds" not in job.request.settings


def test_a_request_of_seconds_or_sides_is_not_mixed_with_the_options():
    options = VideoRequest.parse({"size": "480p", "frames": 9, "scheduler": "euler", "image": "a.png"}, complete=False)
    asked_for = VideoRequest.parse({"prompt": "a", "seconds": 2, "width": 64, "image": "b.png"})
    assert asked_for.with_defaults(options) == replace(asked_for, scheduler="euler")
