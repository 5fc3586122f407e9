# SPDX-License-Identifier: Apache-2.0
"""A client can send a ComfyUI workflow or a video of wanjax to fill a request."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tests.support.words import has_line_with_words
from tests.support.workflows import api_form, graph_of, template, template_text
from wanjax.media.video import write_video

T2V = "text_to_video_wan"


def post_file(server, name, data):
    return server.client.post("/v1/requests", files={"file": (name, data)})


def read_request(server, name, data):
    """Read a file, and return its fields and notes."""
    result = post_file(server, name, data)
    assert result.status_code == 200, result.text
    request = result.json()
    assert all("\n" not in note and not re.search(r"(^| )--|/tmp", note) for note in request["notes"]), request["notes"]
    return request["fields"], request["notes"]


def error_message(server, name, data, status=422):
    """Send a file that must be refused, and return the message."""
    result = post_file(server, name, data)
    assert result.status_code == status, result.text
    message = result.json()["error"]["message"]
    assert "\n" not in message
    assert "/tmp" not in message
    assert str(server.folder) not in message
    return message


@pytest.fixture
def server(start):
    return start(work=False)


@pytest.mark.parametrize("form", ["editor", "api", "png"])
def test_a_workflow_fills_a_request(server, form):
    text = template_text(T2V)
    if form == "editor":
        fields, notes = read_request(server, "a.json", text.encode())
    elif form == "api":
        fields, notes = read_request(server, "folder\\A.JSON", json.dumps(api_form(graph_of(template(T2V)))).encode())
    else:
        file, chunks = io.BytesIO(), PngImagePlugin.PngInfo()
        chunks.add_text("workflow", text)
        Image.new("RGB", (16, 16)).save(file, "PNG", pnginfo=chunks)
        fields, notes = read_request(server, "a.png", file.getvalue())
    assert fields.pop("prompt").startswith("a fox moving quickly")
    assert fields.pop("negative_prompt")
    assert fields == {
        **{"model": "nano", "width": 832, "height": 480, "frames": 33, "fps": 16, "steps": 30, "guidance_scale": 6.0},
        **{"flow_shift": 8.0, "sigmas": "comfy", "seed": 82628696717253, "rng": "torch", "scheduler": "unipc"},
    }
    assert "the workflow is for wan2.1-t2v-1.3b, but this server has nano" in notes


def test_the_fields_are_a_valid_request(server):
    fields, _ = read_request(server, "a.json", template_text(T2V).encode())
    response = server.client.post("/v1/videos", json=fields | {"width": 64, "height": 32, "frames": 5})
    assert response.status_code == 200, response.text
    assert response.json()["settings"]["rng"] == "torch"


def test_settings_that_the_model_lacks_are_noted(server):
    fields, notes = read_request(server, "a.json", template_text("video_wan2_2_14B_i2v").encode())
    assert "guidance_scale_2" not in fields
    assert "nano does not use guidance scale 2, boundary step" in notes
    assert any(has_line_with_words(note, "an image choose video_wan2_2_14B_i2v_input_image.jpg") for note in notes)
    nodes = api_form(graph_of(template(T2V)))
    nodes["3"]["inputs"] |= {"sampler_name": "res_multistep", "steps": 5000}
    nodes["48"]["inputs"]["model"] = ["L", 0]
    nodes["L"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["37", 0], "lora_name": "x/speed.safetensors"},
    }
    fields, notes = read_request(server, "a.json", json.dumps(nodes).encode())
    assert not {"scheduler", "steps", "lora"} & fields.keys()
    assert any(has_line_with_words(note, "res_multistep") for note in notes)
    assert any(has_line_with_words(note, "steps 200 5000") for note in notes)
    assert "this server has no LoRA speed" in notes


def test_a_composed_clip_is_noted(server):
    _, notes = read_request(server, "a.json", template_text("video_wan_vace_inpainting").encode())
    assert any(has_line_with_words(note, "ImageCompositeMasked composes video") for note in notes)


def test_a_video_of_the_server_fills_a_request_with_its_settings(start):
    server = start()
    request = {
        "seed": 2**64 - 1,
        "guidance_scale": 2.5,
        "negative_prompt": "blurry",
        "scheduler": "euler",
        "rng": "torch",
    }
    id = server.wait_until_finished(server.post_video(**request)["id"])["id"]
    fields, notes = read_request(server, "video.mp4", server.content(id))
    assert notes == []
    assert {name: fields[name] for name in request} == request
    again = server.client.post("/v1/videos", json=fields)
    assert again.status_code == 200, again.text
    assert again.json()["settings"] == server.client.get(f"/v1/videos/{id}").json()["settings"]


def test_files_that_metadata_names_are_not_read(server, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"")
    metadata = {"prompt": "a", "model": str(tmp_path), "image": str(tmp_path / "secret.png"), "video": "/etc/passwd"}
    metadata |= {
        "lora": [f"{tmp_path}/x.safetensors:0.5", "y.safetensors"],
        "steps": "many",
        "seed": -1,
        "frames": True,
    }
    write_video(tmp_path / "a.mp4", np.zeros((5, 16, 16, 3), np.uint8), 8, metadata)
    fields, notes = read_request(server, "a.mp4", (tmp_path / "a.mp4").read_bytes())
    assert fields == {"model": "nano", "prompt": "a"}
    assert any(has_line_with_words(note, "an image choose secret.png") for note in notes)
    assert {"this server has no LoRA x", "this server has no LoRA y"} <= {*notes}
    assert any(has_line_with_words(note, "steps 'many'") for note in notes)
    assert not any(str(tmp_path) in note for note in notes)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"text", "a.txt suffixes json mp4"),
        ("json", b"{}", "suffixes ComfyUI"),
        ("a\x1b.exe", b"text", r"a\x1b.exe suffixes ComfyUI"),
        ("a.json", b"{}", "a.json no request workflow ComfyUI"),
        ("a.json", b"[" * 100_000, "a.json nested too deep"),
        ("a.json", b" " * (17 * 2**20), "a.json 16 MiB"),
        ("a.mp4", b"broken", "a.mp4 no request"),
        ("a.png", b"broken", "a.png no request"),
        ("a.json", b"", "file empty"),
        ("dancer.json", template_text("video_wan_dancer").encode(), "dancer.json WanDancerVideo Wan Dancer"),
        ("a.json", b'{"1": {"class_type": "SaveImage", "inputs": {}}}', "a.json makes pictures"),
    ],
)
def test_an_unreadable_file_is_refused(server, name, data, words):
    assert has_line_with_words(error_message(server, name, data), words)


def test_a_form_with_anything_else_is_refused(server):
    for form in ({"data": {"file": "a"}}, {"files": [("file", ("a.json", b"{}"))] * 2}, {"files": {"other": b"a"}}):
        response = server.client.post("/v1/requests", **form)
        assert response.status_code in (400, 415), response.text
        assert has_line_with_words(response.json()["error"]["message"], "file")
    assert server.client.post("/v1/requests", json={}).status_code == 415
