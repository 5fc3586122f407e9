# SPDX-License-Identifier: Apache-2.0
"""Each mistake of the table is answered by every door, with one sentence that names the value and what to do."""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wanjax
from tests.mistakes.requests import DOORS, MISTAKES, RIGHT, Mistake
from tests.serve.conftest import Server
from tests.support.commands import refused
from tests.support.types import unchecked
from tests.support.words import says
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.pipeline import Pipeline
from wanjax.serve.variants import Variants


def through(door: str) -> Any:
    """Decorate the test of a door with the rows that go through it."""
    rows = [row for row in MISTAKES if door not in row.elsewhere]
    names = [",".join(f"{name}={value!s:.30}" for name, value in row.fields.items()) for row in rows]
    return pytest.mark.parametrize("mistake", rows, ids=names)


def request(mistake: Mistake) -> dict[str, Any]:
    """Return the fields of a wrong request."""
    fields = {**RIGHT, **mistake.fields}
    return {name: value for name, value in fields.items() if value is not None}


def told(sentence: str, mistake: Mistake) -> bool:
    """Return whether a sentence names what the row asks for, with fields as options or as keywords."""
    underscored = partial(re.sub, "(?<=[a-z])-(?=[a-z0-9])", "_")
    return says(underscored(sentence), underscored(mistake.words))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return wanjax.load("nano")


@pytest.fixture(scope="module")
def server(pipe: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(Variants(pipe), tmp_path_factory.mktemp("served"))
    yield server
    server.stop()


def option(name: str) -> str:
    """Return the option by which a field is typed."""
    return INPUTS[name].option if name in INPUTS else f"--{name.replace('_', '-')}"


def typed(fields: dict[str, Any]) -> list[str]:
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    return [*prompt, *(f"{option(name)}={value}" for name, value in fields.items())]


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields in which a number that JSON has not is a text, as in a form."""
    return {k: str(x) if isinstance(x, float) and not math.isfinite(x) else x for k, x in fields.items()}


@through("command")
def test_the_command(mistake):
    assert told(refused("generate", *typed(request(mistake))), mistake)
    assert not list(Path().iterdir())


@through("toml")
def test_a_file_of_options(mistake):
    fields = request(mistake)
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    values = {name: str(x) if isinstance(x, float) else json.dumps(x) for name, x in fields.items()}
    Path("my.toml").write_text("".join(f"{option(name)[2:]} = {value}\n" for name, value in values.items()))
    assert told(refused("generate", *prompt, "--config", "my.toml"), mistake)
    assert [path.name for path in Path().iterdir()] == ["my.toml"]


@through("rows")
def test_a_row(mistake):
    Path("rows.jsonl").write_text(f"{json.dumps(RIGHT)}\n{json.dumps(as_json(request(mistake)))}\n")
    sentence = refused("batch", "rows.jsonl")
    assert says(sentence, "row 2")
    assert told(sentence, mistake)


@through("http")
def test_http(server, mistake):
    fields = as_json(request(mistake))
    answer = server.client.post("/v1/videos", content=json.dumps(fields), headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert "\n" not in error["message"]
    assert told(error["message"], mistake)
    assert error["param"] in mistake.fields
    assert not server.jobs()
    assert not list(server.folder.glob("video_*"))


@through("python")
def test_a_call(pipe, mistake):
    with unchecked(), pytest.raises(WanjaxError) as caught:
        pipe(**{"prompt": None} | request(mistake))
    assert "\n" not in str(caught.value)
    assert told(str(caught.value), mistake)


def test_all_wrong_rows_are_told_at_once():
    rows = [row for row in MISTAKES if "rows" not in row.elsewhere][:20]
    Path("rows.jsonl").write_text("".join(json.dumps(as_json(request(row))) + "\n" for row in rows))
    sentence = refused("batch", "rows.jsonl")
    for row in rows:
        assert told(sentence, row)


def test_a_door_is_left_out_with_a_reason():
    assert {door for row in MISTAKES for door in row.elsewhere} <= {*DOORS}
