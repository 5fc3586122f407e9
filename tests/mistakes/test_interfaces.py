# SPDX-License-Identifier: Apache-2.0
"""Every interface answers each mistake of the table with a message that names the value and what to do."""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wanjax
from tests.mistakes.requests import INTERFACES, MISTAKES, OF_A_CHECKPOINT, VALID, Mistake
from tests.serve.conftest import Server
from tests.support.commands import refused
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from tests.support.types import unchecked
from tests.support.words import has_line_with
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.pipeline import Pipeline
from wanjax.serve.served_models import LoadedModels

OPTIONS = {name for parameter in main.commands["generate"].params for name in parameter.opts}


def name_of(mistake: Mistake) -> str:
    return ",".join(f"{name}={value!s:.30}" for name, value in mistake.fields.items())


def through(interface: str) -> Any:
    """Decorate the test of an interface with the rows that go through it."""
    return pytest.mark.parametrize("mistake", [row for row in MISTAKES if interface not in row.elsewhere], ids=name_of)


def request(mistake: Mistake) -> dict[str, Any]:
    """Return the fields of a wrong request."""
    fields = {**VALID, **mistake.fields}
    return {name: value for name, value in fields.items() if value is not None}


def names_mistake(sentence: str, mistake: Mistake) -> bool:
    """Return whether a sentence names what the row asks for, with fields as options or as keywords."""
    underscored = partial(re.sub, "(?<=[a-z])-(?=[a-z0-9])", "_")
    return has_line_with(underscored(sentence), underscored(mistake.words))


def in_toml(mistake: Mistake) -> Mistake:
    """Return a row with the booleans of its sentence as TOML and JSON write them."""
    written = {"True": "true", "False": "false"}
    return mistake._replace(words=" ".join(written.get(word, word) for word in mistake.words.split(" ")))


def in_json(mistake: Mistake) -> Mistake:
    """Return a row with the booleans and the lists of its sentence as JSON writes them."""
    quoted = re.sub(r"\[[^]]*\]", lambda text: text[0].replace("'", '"'), mistake.words)
    return in_toml(mistake._replace(words=quoted))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return wanjax.load("nano")


@pytest.fixture(scope="module")
def server(pipe: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(LoadedModels(pipe), tmp_path_factory.mktemp("served"))
    yield server
    server.stop()


def option(name: str) -> str:
    """Return the option by which a field is typed."""
    return INPUT_SPECS[name].option if name in INPUT_SPECS else f"--{name.replace('_', '-')}"


def typed(fields: dict[str, Any]) -> list[str]:
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    return [*prompt, *(f"{option(name)}={value}" for name, value in fields.items())]


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields in which a number that JSON has not is a text, as in a form."""
    return {k: str(x) if isinstance(x, float) and not math.isfinite(x) else x for k, x in fields.items()}


def by_command(fields: dict[str, Any], *, command: str = "generate") -> str:
    sentence = refused(command, *typed(fields))
    assert not list(Path().iterdir())
    return sentence


def by_toml(fields: dict[str, Any]) -> str:
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    values = {name: str(x) if isinstance(x, float) else json.dumps(x) for name, x in fields.items()}
    Path("my.toml").write_text("".join(f"{option(name)[2:]} = {value}\n" for name, value in values.items()))
    sentence = refused("generate", *prompt, "--config", "my.toml")
    assert [path.name for path in Path().iterdir()] == ["my.toml"]
    return sentence


def by_row(fields: dict[str, Any], **more: Any) -> str:
    Path("rows.jsonl").write_text(f"{json.dumps(VALID | more)}\n{json.dumps(as_json(fields))}\n")
    sentence = refused("batch", "rows.jsonl")
    assert has_line_with(sentence, "line 2")
    return sentence


def by_http(fields: dict[str, Any], server: Server) -> dict[str, Any]:
    """Return the error with which a server answers: its sentence, and the field that it names."""
    body = json.dumps(as_json(fields))
    answer = server.client.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert "\n" not in error["message"]
    assert not server.jobs()
    assert not list(server.folder.glob("video_*"))
    return error


def by_call(fields: dict[str, Any], pipe: Pipeline) -> str:
    with unchecked(), pytest.raises(WanjaxError) as caught:
        pipe(**{"prompt": None} | fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@through("command")
def test_the_command(mistake):
    assert names_mistake(by_command(request(mistake)), mistake)


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": " "}, {"prompt": "caf\udce9"}], ids=str)
def test_the_command_that_encodes(prompt):
    [words] = {row.words for row in MISTAKES if row.fields == {"prompt": None} | prompt and row.words != "prompt"}
    assert names_mistake(by_command(prompt, command="encode"), Mistake(prompt, words))


@through("toml")
def test_a_file_of_options(mistake):
    sentence = by_toml(request(mistake))
    assert names_mistake(sentence, in_toml(mistake))
    if any(option(name) not in OPTIONS or isinstance(x, bool | list) for name, x in mistake.fields.items()):
        assert has_line_with(sentence, "my.toml")  # which does not hold what it may


@through("rows")
def test_a_row(mistake):
    assert names_mistake(by_row(request(mistake)), in_json(mistake))


@through("http")
def test_http(server, mistake):
    error = by_http(request(mistake), server)
    assert names_mistake(error["message"], in_json(mistake))
    assert error["param"] in mistake.fields


@through("python")
def test_a_call(pipe, mistake):
    assert names_mistake(by_call(request(mistake), pipe), mistake)


@pytest.fixture(scope="module", params=[tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The interfaces of a small checkpoint: what each answers to the fields of a wrong request."""
    folder = str(request.param(tmp_path_factory.mktemp("checkpoint")))
    pipe = wanjax.load(folder)
    server = Server(LoadedModels(pipe), tmp_path_factory.mktemp("served"))
    yield {
        "command": lambda fields: by_command(fields | {"model": folder}),
        "toml": lambda fields: by_toml(fields | {"model": folder}),
        "rows": lambda fields: by_row(fields | {"model": folder}, model=folder),
        "http": lambda fields: by_http(fields, server)["message"],
        "python": lambda fields: by_call(fields, pipe),
    }
    server.stop()


@pytest.mark.parametrize("mistake", OF_A_CHECKPOINT, ids=name_of)
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_checkpoint_of_each_family(checkpoint, interface, mistake):
    assert names_mistake(checkpoint[interface](request(mistake)), mistake)


def test_all_wrong_rows_are_reported_at_once():
    rows = [row for row in MISTAKES if "rows" not in row.elsewhere]
    for start in range(0, 20, 10):  # which a message names
        some = rows[start : start + 10]
        Path("rows.jsonl").write_text("".join(json.dumps(as_json(request(row))) + "\n" for row in some))
        sentence = refused("batch", "rows.jsonl")
        for row in some:
            assert names_mistake(sentence, in_json(row))


def test_an_interface_is_omitted_with_a_reason():
    assert {interface for row in MISTAKES for interface in row.elsewhere} <= {*INTERFACES}
