# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI description of the server is valid, and requests and responses match it."""

import base64
import importlib
import subprocess
import sys
import time

import jsonschema
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from tests.serve.conftest import SMALL
from tests.support.media import picture
from tests.support.served import serving
from tests.support.workflows import template_text
from wanjax.pipelines.settings import Settings, schema
from wanjax.serve.routing import UNSUPPORTED_ROUTES

IMAGE = "data:image/png;base64," + base64.b64encode(picture()).decode()


@pytest.fixture
def server_and_document(start):
    server = start()
    return server, server.client.get("/openapi.json").json()


def validator_of(document, name):
    """Return a function that validates a value by a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return Draft202012Validator(schema).validate


def test_the_description_is_valid_openapi(server_and_document):
    _, document = server_and_document
    validate(document)
    fields = document["components"]["schemas"]["VideoRequest"]["properties"]
    assert {"prompt", "size", "seconds", "frames", "steps", "seed", "image", "input_reference", "lora"} <= fields.keys()
    settings = schema(Settings)
    for name in ("steps", "guidance_scale", "flow_shift"):
        assert fields[name]["description"] == settings[name].help
    assert (fields["steps"]["minimum"], fields["steps"]["maximum"]) == (1, 200)  # the limit of the server


def test_every_path_of_the_server_is_described(server_and_document):
    server, document = server_and_document
    paths = {(route.path, method.lower()) for route in server.application.application.routes
             if hasattr(route, "methods") for method in route.methods - {"HEAD"}}  # fmt: skip
    described_paths = {
        (path, method) for path, methods in document["paths"].items() for method in methods if method != "parameters"
    }
    page = {("/", "get"), ("/login", "post"), ("/openapi.json", "get")}
    assert described_paths == paths - page - {
        (path, method) for path in UNSUPPORTED_ROUTES for method in ("get", "post")
    }


def test_responses_match_their_description(server_and_document):
    server, document = server_and_document
    video = validator_of(document, "Video")
    id = server.client.post("/v1/videos", json=SMALL | {"image": IMAGE}).json()["id"]
    video(server.client.get(f"/v1/videos/{id}").json())
    video(server.wait_until_finished(id))
    failed = server.post_video(seed=1)["id"]
    video(server.client.post(f"/v1/videos/{failed}/cancel").json())
    validator_of(document, "Videos")(server.client.get("/v1/videos").json())
    validator_of(document, "Models")(server.client.get("/v1/models").json())
    validator_of(document, "Health")(server.client.get("/health").json())
    validator_of(document, "Error")(server.client.get("/v1/videos/none").json())
    validator_of(document, "Error")(server.client.post("/v1/videos", json={"prompt": 3}).json())
    response = server.client.post("/v1/requests", files={"file": ("a.json", template_text("text_to_video_wan"))})
    validator_of(document, "FileFields")(response.json())
    validator_of(document, "Deleted")(server.client.delete(f"/v1/videos/{id}").json())


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"image": IMAGE}, True),
        ({"input_reference": {"image_url": IMAGE}}, True),
        ({"seed": -1, "guidance_scale": 1.5, "then": ["a blue circle"], "windows": 2}, True),
        ({"prompt": None}, False),
        ({"steps": 0}, False),
        ({"steps": 201}, False),
        ({"steps": "many"}, False),
        ({"steps": "2"}, False),
        ({"guidance_scale": "2.5"}, False),
        ({"allow_empty_prompt": "true"}, False),
        ({"frames": None, "seconds": "0.2"}, True),
        ({"flow_shift": 0}, False),
        ({"fps": 1.5}, False),
        ({"scheduler": "none"}, False),
        ({"model": "other"}, False),
        ({"image": "/etc/passwd"}, False),
        ({"lora": {"a": 99}}, False),
    ],
    ids=str,
)
def test_the_server_and_its_description_accept_the_same_requests(server_and_document, fields, is_valid):
    server, document = server_and_document
    request = {name: value for name, value in (SMALL | fields).items() if value is not None}
    status = server.client.post("/v1/videos", json=request).status_code
    assert (status == 200) == is_valid
    if is_valid:
        validator_of(document, "VideoRequest")(request)
    else:
        with pytest.raises(jsonschema.ValidationError):
            validator_of(document, "VideoRequest")(request)


def test_every_status_of_a_wrong_request_is_described(start, tmp_path):
    """Send wrong parameters, ids, ranges, media types, sizes, hosts and tokens to each path that accepts them."""
    server, locked = start(upload=10_000), start(folder=tmp_path / "locked", token="a-token-of-the-tests", work=False)
    document = server.client.get("/openapi.json").json()
    id = server.wait_until_finished(server.post_video(seed=1)["id"])["id"]
    seen = set()

    def check(path, method, client=server.client, **request):
        response = client.request(method, path.replace("{id}", request.pop("id", id)), **request)
        responses = document["paths"][path][method]["responses"]
        assert str(response.status_code) in responses, (method, path, request, response.text)
        seen.add((path, method, response.status_code))

    for path, operations in document["paths"].items():
        for method in operations.keys() - {"parameters"}:
            if "events" not in path:  # a stream of events does not end
                check(path, method, id="video_none", json=SMALL | {"steps": 0} if path == "/v1/videos" else None)
            for client in (locked.client, server.client_from("192.0.2.1")):
                check(path, method, client)
            check(path, method, headers={"content-length": "99999999"})
            if path.startswith("/v1/"):
                check(path, method, params={"nonsense": 1})
    for range in ("bytes=0-9", "bytes=99999999-", "lines=1-2"):
        check("/v1/videos/{id}/content", "get", headers={"range": range})
    for variant in ("thumbnail", "none", "preview"):
        check("/v1/videos/{id}/content", "get", params={"variant": variant})
    for query in ({"limit": "0"}, {"order": "up"}, {"after": "video_none"}):
        check("/v1/videos", "get", params=query)
    for kind, body in {"text/plain": b"a", "application/json": b"[", "multipart/form-data; boundary=x": b"--"}.items():
        check("/v1/videos", "post", headers={"content-type": kind}, content=body)
    for expected in (("/v1/videos", "post", 415), ("/v1/videos/{id}/content", "get", 416), ("/v1/models", "get", 422)):
        assert expected in seen
    assert {status for _, _, status in seen} >= {206, 400, 401, 403, 404, 413, 415, 416, 422}


@pytest.mark.slow
def test_a_generated_client_makes_a_video(tmp_path, monkeypatch):
    pytest.importorskip("openapi_python_client")
    with serving(tmp_path / "served", "--no-rehearse") as (server, _):
        (tmp_path / "openapi.json").write_text(server.get("/openapi.json").text)
        command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json"]
        output_options = ["--meta", "none", "--output-path", "described_client"]
        subprocess.run([*command, *output_options], cwd=tmp_path, check=True, capture_output=True)
        file = tmp_path / "described_client/api/default/create_video.py"
        file.write_text(
            file.read_text().replace("import UNSET, Response", "import UNSET, Response, Unset")
        )  # version 0.29 omits this import
        monkeypatch.syspath_prepend(tmp_path)
        calls, models = (importlib.import_module(f"described_client.{name}") for name in ("api.default", "models"))
        operations = {name: importlib.import_module(f"{calls.__name__}.{name}").sync for name in (
            "create_video", "get_video", "list_videos", "list_models", "get_record", "get_health", "delete_video"
        )}  # fmt: skip
        with importlib.import_module("described_client").Client(base_url=str(server.base_url), timeout=60) as client:
            assert operations["list_models"](client=client).data[0].id == "nano"
            wrong = operations["create_video"](
                client=client, body=models.VideoRequest.from_dict(SMALL | {"steps": 999})
            )
            assert (wrong.error.param, wrong.error.code) == ("steps", "invalid_request")
            result = operations["create_video"](client=client, body=models.VideoRequest.from_dict(SMALL))
            while (video := operations["get_video"](result.id, client=client)).status not in ("completed", "failed"):
                time.sleep(0.1)
            assert (video.status, video.settings.steps, video.size) == ("completed", 2, "32x32")
            assert operations["get_record"](result.id, client=client)["prompt"] == SMALL["prompt"]
            assert [video_listed.id for video_listed in operations["list_videos"](client=client, limit=1).data] == [
                result.id
            ]
            assert operations["get_health"](client=client).model == "nano"
            assert operations["delete_video"](result.id, client=client).deleted
            assert operations["get_video"](result.id, client=client).error.code == "not_found"
