# SPDX-License-Identifier: Apache-2.0
"""Each interface answers each mistake of the table with a message that names the value and what to do."""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wanjax
from tests.mistakes.requests import CHECKPOINT_MISTAKES, INTERFACES, MISTAKES, VALID, Mistake
from tests.serve.conftest import Server
from tests.support.commands import refused
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from tests.support.types import unchecked
from tests.support.words import has_line_with_words
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.pipeline import Pipeline
from wanjax.serve.served_models import LoadedModels

FAMILIES = [tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint]
OPTIONS = {name for parameter in main.commands["generate"].params for name in parameter.opts}


def mistake_id(mistake: Mistake) -> str:
    return ",".join(f"{name}={value!s:.30}" for name, value in mistake.fields.items())


def parametrize_mistakes(interface: str) -> Any:
    """Parametrize the test of an interface with the rows that are possible there."""
    return pytest.mark.parametrize(
        "mistake", [row for row in MISTAKES if interface not in row.excluded], ids=mistake_id
    )


def request(mistake: Mistake) -> dict[str, Any]:
    """Return the fields of a wrong request."""
    fields = {**VALID, **mistake.fields}
    return {name: value for name, value in fields.items() if value is not None}


def names_mistake(message: str, mistake: Mistake) -> bool:
    """Return whether a message has the words of the row, with fields as options or as keywords."""
    underscored = partial(re.sub, "(?<=[a-z])-(?=[a-z0-9])", "_")
    return has_line_with_words(underscored(message), underscored(mistake.words))


def as_in_toml(mistake: Mistake) -> Mistake:
    """Return a row with the booleans of its words as in TOML and JSON."""
    spellings = {"True": "true", "False": "false"}
    return mistake._replace(words=" ".join(spellings.get(word, word) for word in mistake.words.split(" ")))


def as_in_json(mistake: Mistake) -> Mistake:
    """Return a row with the booleans and lists of its words as in JSON."""
    quoted = re.sub(r"\[[^]]*\]", lambda text: text[0].replace("'", '"'), mistake.words)
    return as_in_toml(mistake._replace(words=quoted))


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
    """Return the option of a field."""
    return INPUT_SPECS[name].option if name in INPUT_SPECS else f"--{name.replace('_', '-')}"


def as_arguments(fields: dict[str, Any]) -> list[str]:
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    return [*prompt, *(f"{option(name)}={value}" for name, value in fields.items())]


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with numbers that JSON does not have as text, like in a form."""
    return {k: str(x) if isinstance(x, float) and not math.isfinite(x) else x for k, x in fields.items()}


def message_of_command(fields: dict[str, Any], *, command: str = "generate") -> str:
    message = refused(command, *as_arguments(fields))
    assert not list(Path().iterdir())
    return message


def message_of_toml(fields: dict[str, Any]) -> str:
    prompt = [fields.pop("prompt")] if "prompt" in fields else []
    values = {name: str(x) if isinstance(x, float) else json.dumps(x) for name, x in fields.items()}
    Path("my.toml").write_text("".join(f"{option(name)[2:]} = {value}\n" for name, value in values.items()))
    message = refused("generate", *prompt, "--config", "my.toml")
    assert [path.name for path in Path().iterdir()] == ["my.toml"]
    return message


def message_of_row(fields: dict[str, Any], **more: Any) -> str:
    Path("rows.jsonl").write_text(f"{json.dumps(VALID | more)}\n{json.dumps(as_json(fields))}\n")
    message = refused("batch", "rows.jsonl")
    assert has_line_with_words(message, "line 2")
    return message


def error_of_http(fields: dict[str, Any], server: Server) -> dict[str, Any]:
    """Return the error of the response: its message, and the field that it names."""
    body = json.dumps(as_json(fields))
    response = server.client.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert "\n" not in error["message"]
    assert not server.jobs()
    assert not list(server.folder.glob("video_*"))
    return error


def message_of_call(fields: dict[str, Any], pipe: Pipeline) -> str:
    with unchecked(), pytest.raises(WanjaxError) as caught:
        pipe(**{"prompt": None} | fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@parametrize_mistakes("command")
def test_a_command_with_a_mistake_is_refused(mistake):
    assert names_mistake(message_of_command(request(mistake)), mistake)


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": " "}, {"prompt": "caf\udce9"}], ids=str)
def test_an_encode_command_with_a_mistake_is_refused(prompt):
    [words] = {row.words for row in MISTAKES if row.fields == {"prompt": None} | prompt and row.words != "prompt"}
    assert names_mistake(message_of_command(prompt, command="encode"), Mistake(prompt, words))


@parametrize_mistakes("toml")
def test_a_file_of_options_with_a_mistake_is_refused(mistake):
    message = message_of_toml(request(mistake))
    assert names_mistake(message, as_in_toml(mistake))
    if any(option(name) not in OPTIONS or isinstance(x, bool | list) for name, x in mistake.fields.items()):
        assert has_line_with_words(message, "my.toml")  # an entry that a file may not have


@parametrize_mistakes("rows")
def test_a_row_with_a_mistake_is_refused(mistake):
    assert names_mistake(message_of_row(request(mistake)), as_in_json(mistake))


@parametrize_mistakes("http")
def test_a_request_by_http_with_a_mistake_is_refused(server, mistake):
    error = error_of_http(request(mistake), server)
    assert names_mistake(error["message"], as_in_json(mistake))
    assert error["param"] in mistake.fields


@parametrize_mistakes("python")
def test_a_call_with_a_mistake_is_refused(pipe, mistake):
    assert names_mistake(message_of_call(request(mistake), pipe), mistake)


@pytest.fixture(scope="module", params=quick([tiny_checkpoint], FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The interfaces of a small checkpoint, each a function from the fields of a wrong request to its message."""
    folder = str(request.param(tmp_path_factory.mktemp("checkpoint")))
    pipe = wanjax.load(folder)
    server = Server(LoadedModels(pipe), tmp_path_factory.mktemp("served"))
    yield {
        "command": lambda fields: message_of_command(fields | {"model": folder}),
        "toml": lambda fields: message_of_toml(fields | {"model": folder}),
        "rows": lambda fields: message_of_row(fields | {"model": folder}, model=folder),
        "http": lambda fields: error_of_http(fields, server)["message"],
        "python": lambda fields: message_of_call(fields, pipe),
    }
    server.stop()


@pytest.mark.parametrize("mistake", CHECKPOINT_MISTAKES, ids=mistake_id)
@pytest.mark.parametrize("interface", INTERFACES)
def test_mistakes_with_a_checkpoint_of_each_family_are_refused(checkpoint, interface, mistake):
    assert names_mistake(checkpoint[interface](request(mistake)), mistake)


def test_all_wrong_rows_are_reported_at_once():
    rows = [row for row in MISTAKES if "rows" not in row.excluded]
    for start in range(0, 20, 10):  # a message names 10 rows
        rows_of_message = rows[start : start + 10]
        Path("rows.jsonl").write_text("".join(json.dumps(as_json(request(row))) + "\n" for row in rows_of_message))
        message = refused("batch", "rows.jsonl")
        for row in rows_of_message:
            assert names_mistake(message, as_in_json(row))


def test_excluded_interfaces_exist():
    assert {interface for row in MISTAKES for interface in row.excluded} <= {*INTERFACES}
