# SPDX-License-Identifier: Apache-2.0
"""A request means the same from every interface: Python, TOML, rows of CSV and JSON Lines, forms and JSON."""

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
def read_by_server(nano):
    """Return a function that reads a request to a server of nano."""

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
    """Return the request of `wanjax batch` with a file of prompts and a file of options."""
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
def test_a_request_is_the_same_from_every_interface(tmp_path, read_by_server, fields, shape):
    fields |= shape
    request = VideoRequest.parse(fields)
    assert request == from_rows(tmp_path, fields, "jsonl") == from_rows(tmp_path, fields, "csv")
    assert request == from_toml(tmp_path, fields)
    assert request == read_by_server(fields) == read_by_server({name: str(value) for name, value in fields.items()})
    assert request == VideoRequest.parse(request.fields) == VideoRequest(**json.loads(json.dumps(asdict(request))))


def test_input_files_are_the_same_from_every_interface(tmp_path):
    files = {name: str(tmp_path / name) for name in ("image", "video")}
    request = VideoRequest.parse({"prompt": "a", **files})
    assert request.inputs == files
    assert request == from_rows(tmp_path, {"prompt": "a", **files}, "jsonl") == from_toml(tmp_path, request.fields)
    assert request == VideoRequest.parse({"prompt": "a", "input_reference": files["image"], "video": files["video"]})
    from_text, from_list = ({"prompt": "a", "references": references} for references in ("b.png", ["b.png"]))
    assert VideoRequest.parse(from_text) == VideoRequest.parse(from_list) != VideoRequest.parse({"prompt": "a"})


def test_only_clients_have_a_limit_on_the_length_of_texts():
    for fields in ({"prompt": "x" * 4001}, {"then": "x" * 4001}, {"scheduler": "y" * 201}):
        assert VideoRequest.parse({"prompt": "a"} | fields)


def test_a_text_gives_the_strengths_of_loras():
    assert VideoRequest.parse({"prompt": "a", "lora": "cat:0.5, b:1"}).lora == {"cat": 0.5, "b": 1.0}


def test_seconds_become_the_nearest_number_of_frames(nano, read_by_server, tmp_path):
    fields = {"prompt": "a", "seconds": 1.2, "size": "32x32"}
    limits = Limits.of(nano.defaults)
    [job] = VideoMaker(lambda: nano, tmp_path).tasks_for([from_rows(tmp_path, fields, "csv")])
    frames = uploads.complete_settings(read_by_server(fields), nano, {}, limits)[0].frames
    assert job.request.settings["frames"] == frames == round((1.2 * nano.defaults.fps - 1) / 4) * 4 + 1
    assert "seconds" not in job.request.settings


def test_the_length_and_size_of_a_request_replace_those_of_the_options():
    options = VideoRequest.parse({"size": "480p", "frames": 9, "scheduler": "euler", "image": "a.png"}, complete=False)
    request = VideoRequest.parse({"prompt": "a", "seconds": 2, "width": 64, "image": "b.png"})
    assert request.with_defaults(options) == replace(request, scheduler="euler")
