# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused with a message, and clients without access."""

import base64
import gzip
import io
import json
import re
import socket
from dataclasses import replace
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.serve.conftest import SMALL
from tests.support.commands import refused
from tests.support.video_files import write_clip, write_damaged
from tests.support.words import has_line_with_words
from wanjax.cli import serving
from wanjax.errors import SettingError
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.request import other_fields
from wanjax.serve.auth import COOKIE
from wanjax.serve.error_details import strip_folders
from wanjax.serve.limits import Limits
from wanjax.serve.uploads import save_pictures

TOKEN = "a-token-of-the-tests"


def image_field(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return {"image": "data:;base64," + base64.b64encode(file.getvalue()).decode()}


def animated(side):
    first, *rest = (Image.new("RGB", (side, side), (90 * i, 0, 0)) for i in range(3))
    return image_field(first, "GIF", save_all=True, append_images=rest)["image"]


@pytest.fixture(scope="module")
def fields(pipe):
    return sorted({*pipe.defaults.to_json(), *other_fields()})


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    *(st.lists(st.integers(), max_size=3), st.dictionaries(st.text(), st.text(), max_size=2)),
    st.sampled_from(["x", "1e20", "-1", "0", "9" * 400, "nan", "inf", "true", "a\0b", "\ud800", [], {}, 10**30, 1e20]),
)


@given(st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_any_field_fails_the_server(interface, fields, data):
    """In JSON and in a form, a value is accepted, or refused with a message that names the field."""
    name, value = data.draw(st.sampled_from([*fields, "other"])), data.draw(VALUES)
    replaced = {"height": "size", "width": "size", "seconds": "frames"}.get(name)
    request = {key: default for key, default in SMALL.items() if key != replaced} | {name: value}
    pairs = [f"{key}={quote(str(setting).encode('utf-8', 'replace'))}" for key, setting in request.items()]
    bodies = {"application/json": json.dumps(request), "application/x-www-form-urlencoded": "&".join(pairs)}
    for kind, body in bodies.items():
        answer = interface.client.post("/v1/videos", content=body, headers={"content-type": kind})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 200:
            assert interface.client.delete(f"/v1/videos/{answer.json()['id']}").status_code == 200
        else:
            error = answer.json()["error"]
            assert len(error["message"]) < 600
            assert error["param"] is None or error["param"] in (*fields, "other")


@pytest.fixture
def interface(start):
    return start(work=False)


@given(st.sampled_from(["limit", "order", "after", "variant"]), st.text())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_query_fails_the_server(interface, name, value):
    query = {name: value.encode("utf-8", "replace")}
    assert interface.client.get("/v1/videos", params=query).status_code in (200, 404, 422)
    answer = interface.client.get("/v1/videos/video_x/content", params=query)
    assert answer.status_code == (404 if name in ("variant", "after") else 422)


@pytest.mark.parametrize("limit", ["0", "101", "1999", "00000000000001999", "-1", "x", "", "1" * 400, "\u0663"])
def test_a_limit_is_obeyed_or_refused(start, limit):
    response = start(work=False).client.get("/v1/videos", params={"limit": limit})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "limit"


@pytest.mark.parametrize(
    "origin", ["http://[", "null", "http://localhost:9", "", "\u00e9", "https://evil.example", "http://localhost:8000"]
)
def test_no_other_site_sends_requests_through_the_browser(start, origin):
    response = start(work=False).client.post("/v1/videos", json=SMALL, headers={"origin": origin.encode()})
    if origin == "http://localhost:8000":  # the page's own
        assert response.status_code == 200
    else:
        assert response.status_code == 403
        assert has_line_with_words(response.json()["error"]["message"], "another site --token --origin")


def blank(side):
    return image_field(Image.new("1", (side, side)))["image"]


def body_chunks():
    for _ in range(30):
        yield b"x" * 100


CHUNKED = {"headers": {"content-type": "application/json"}}
BAD_REQUESTS = {  # the request, the status of the response, and the words of the message
    "a picture too large": (lambda: {"json": SMALL | {"image": blank(9000)}}, 422, "81,000,000 pixels"),
    "a second picture too large": (
        lambda: {"json": SMALL | {"image": blank(4000), "video": blank(4000)}},
        *(422, "8,000,000"),
    ),
    "an animation": (lambda: {"json": SMALL | {"image": animated(8)}}, 422, "animated"),
    "a picture without effect": (lambda: {"json": SMALL | {"last_image": blank(32)}}, 422, "nano last"),
    "no prompt": (lambda: {"files": {"image": b"x"}}, 422, "prompt"),
    "a body too large": (lambda: {"files": {"image": b"x" * 200_000}}, 413, "MiB at most"),
    "pieces too large": (lambda: CHUNKED | {"content": (chunk * 100 for chunk in body_chunks())}, 413, "MiB at most"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_unusable_requests_are_refused(start, name):
    request, status, words = BAD_REQUESTS[name]
    server = start(work=False, upload=100_000)
    assert has_line_with_words(server.refused(status, **request()), words)
    assert not any(server.folder.glob("video_*"))


CLIPS = [b"", b"ffconcat version 1.0\nfile /etc/passwd\n", b"#EXTM3U\n/etc/passwd\n", b"\0\0\0\x18ftypmp42" + b"x" * 99]


@pytest.mark.parametrize("data", CLIPS, ids=lambda data: repr(data[:12]))
def test_broken_clips_are_refused(start, data):
    server = start(work=False)
    fields = {"video": "data:video/mp4;base64," + base64.b64encode(data).decode()}
    entries = server.client.post("/v1/videos", json=SMALL | fields).json()["error"]
    assert entries["param"] == "video"
    assert str(server.folder) not in entries["message"]
    assert not any(server.folder.glob("video_*"))


def test_a_truncated_clip_is_refused_as_truncated(start, tmp_path):
    """No part of it stays on the disk or in the queue."""
    server = start(work=False)
    clips = {"fast.mp4": "video breaks frame complete copy", "plain.mp4": "video cannot read truncated complete copy"}
    for name, words in clips.items():
        part = write_damaged(write_clip(tmp_path / name), "cut").read_bytes()
        response = server.client.post("/v1/videos", data={"prompt": "a", "frames": "5"}, files={"video": part})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (422, "video"), error
        assert has_line_with_words(error["message"], words), error["message"]
        assert not server.jobs()
        assert not any(server.folder.glob("video_*"))


PICTURE, CLIP = base64.b64decode(blank(32).partition(",")[2]), CLIPS[-1]
ANIMATION = base64.b64decode(animated(32).partition(",")[2])
WRONG_FILES = [  # a field, its content, other fields, and the words of the message
    ("video", b"a text", {}, "video clip mp4 webm animation"),
    ("video", PICTURE, {"frames": None}, "video 1 frame 5 image"),
    ("video", ANIMATION, {"frames": None}, "video frames 5 image"),
    ("video", ANIMATION, {"frames": 9}, "video frames 9 fewer"),
    ("image", CLIP, {}, "image picture video"),
    ("image", ANIMATION, {}, "image animated video"),
    ("image", b"a text", {}, "image picture PNG"),
]


def test_a_mask_that_is_neither_picture_nor_clip_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"mask is not a clip: send a picture, a video file .* animation") as caught:
        save_pictures({"mask": [b"a text"]}, INPUT_SPECS, tmp_path, Limits(10**7))
    assert caught.value.setting == "mask"


def test_a_clip_is_not_suggested_for_a_model_without_clips(tmp_path):
    with pytest.raises(SettingError) as caught:
        save_pictures({"image": [CLIP]}, INPUT_SPECS, tmp_path, Limits(10**7), takes_clips=False)
    assert "video" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({"height": 64, "width": 96, "frames": 33}, "at most 13 frames of this size or a size of 48x32", None),
        ({"height": 60, "width": 96, "frames": 33}, "a size of 48x32", "of this size"),
        ({"height": 64, "width": 96, "frames": 32}, "or a size of 48x32 and 29 frames", None),
        ({"height": 64, "width": 96, "frames": 9, "windows": 9}, "at most 1 window or a size of 32x16", None),
    ],
)
def test_a_video_that_is_too_large_gets_possible_advice(pipe, changes, words, absent):
    """Sizes of nano are multiples of 16 pixels, and frames are 4n + 1."""
    with pytest.raises(SettingError) as caught:
        Limits(80_000).check(replace(pipe.defaults, **changes), spatial=16, temporal=4)
    assert has_line_with_words(str(caught.value), words)
    assert absent is None or absent not in str(caught.value)


@pytest.mark.parametrize(("field", "data", "more", "words"), WRONG_FILES)
def test_a_file_of_another_kind_than_its_field_is_named(start, field, data, more, words):
    server = start(work=False)
    request = SMALL | more | {field: "data:;base64," + base64.b64encode(data).decode()}
    error = server.client.post("/v1/videos", json=request).json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_request")
    assert has_line_with_words(error["message"], words)
    assert not server.jobs()


def test_clips_with_too_many_pixels_are_refused(start, machine):
    server = start(work=False)
    machine.reads_at_most(max_pixels=64 * 64, clip_factor=2)
    assert has_line_with_words(server.refused(422, json=SMALL | {"video": animated(64)}), "3 frames 64x64 8,192")


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (400, "application/json", b"{"),
        (400, "application/json", b"[1]"),
        (400, "application/json", b'{"prompt": "a", "guidance_scale": NaN}'),
        (400, "application/json", b"[" * 100_000),
        (400, "application/json", b"\xff\xfe"),
        (400, "multipart/form-data", b"x"),
        (422, "multipart/form-data; boundary=b", b"--b\r\nnothing"),
        (422, "application/x-www-form-urlencoded", b"prompt=a&prompt=b"),  # a field that is given twice
        (422, "application/json", b'{"prompt": "a", "prompt": "b"}'),
        (422, "application/json", b'{"prompt": "a", "lora": {"x": 1, "x": 2}}'),
        (415, "application/x-www-form-urlencoded", b"{bad"),  # as curl -d sends JSON
        (415, "application/x-www-form-urlencoded", b' {"prompt": "a=b"}'),
        (415, "text/plain", b"a red circle"),
        (415, "", b""),
    ],
)
def test_invalid_bodies_are_refused(start, status, kind, body):
    server = start(work=False)
    server.refused(status, content=body, headers={"content-type": kind})
    assert not server.jobs()


def test_a_repeated_field_of_json_is_named(start):
    body = b'{"prompt": "a", "steps": 2, "steps": 3}'
    response = start(work=False).client.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert response.json()["error"]["param"] == "steps"
    assert has_line_with_words(response.json()["error"]["message"], "steps twice")


@pytest.mark.parametrize("field", ["image", "video", "references[]", "mask"])
def test_an_empty_file_is_refused(start, field):
    server, name = start(work=False), field.removesuffix("[]")
    data = {key: str(value) for key, value in SMALL.items()}
    response = server.client.post("/v1/videos", data=data, files={field: ("empty.png", b"")})
    assert (response.status_code, response.json()["error"]["param"]) == (422, name)
    assert has_line_with_words(response.json()["error"]["message"], f"{name} empty")
    error = server.client.post("/v1/videos", json=SMALL | {"image": "data:image/png;base64,"}).json()["error"]
    assert error["param"] == "image"
    assert has_line_with_words(error["message"], "image empty")
    assert not server.jobs()


def test_an_empty_file_field_of_a_browser_is_ignored(start):
    """A browser sends an empty field without a name and without bytes."""
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    fields = [part % (name.encode(), b"", str(value).encode()) for name, value in SMALL.items()]
    body = b"".join([*fields, part % (b"image", b'; filename=""', b""), b"--b--\r\n"])
    kind = {"content-type": "multipart/form-data; boundary=b"}
    response = start(work=False).client.post("/v1/videos", content=body, headers=kind)
    assert (response.status_code, response.json()["pictures"]) == (200, [])


def test_a_full_queue_refuses_requests(start):
    server = start(work=False, queue=2)
    for _ in range(2):
        server.post_video()
    assert "the queue has 2 videos" in server.refused(429, json=SMALL)
    assert server.client.post("/v1/videos", json=SMALL).headers["retry-after"] == "5"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/videos/video_1", 404),
        ("GET", "/v1/videos/..%2f..", 404),
        ("GET", "/v1/videos/video_1/content", 404),
        ("GET", "/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("PUT", "/v1/videos", 405),
        ("GET", "/v1/videos?limit=0", 422),
        ("GET", "/v1/videos?limit=x", 422),
        ("GET", "/v1/videos?limit=1&limit=2", 422),
        ("GET", "/v1/videos?limt=1", 422),
        ("GET", "/v1/videos?order=up", 422),
        ("GET", "/v1/models?limit=2", 422),
        ("GET", "/v1/videos/video_1?variant=video", 422),
        ("GET", "/v1/videos/video_1/content?varian=preview", 422),
        ("GET", "/v1/videos/video_1/content?variant=preview&variant=video", 422),
        ("POST", "/v1/videos?prompt=a", 422),
        ("GET", "/v1/videos?after=video_1", 404),
        ("DELETE", "/v1/videos/video_1", 404),
        ("POST", "/v1/videos/video_1/cancel", 404),
    ],
)
def test_unknown_paths_and_methods_are_refused(start, method, path, status):
    assert start(work=False).client.request(method, path).status_code == status


PATHS = {  # paths that do not exist, and the words of the message
    "/v1/v1/videos": "/v1/v1/videos mean /v1/videos",
    "/v1/v1/v1/models": "mean /v1/models",
    "/v1/videos/": "/v1/videos/ mean /v1/videos",
    "/videos/video_1/content": "mean /v1/videos/video_1/content",
    "/v1/health": "mean /health",
    **{
        path: f"{path} POST /v1/videos makes a video"
        for path in ("/generate", "/prompt", "/v1/images/generations", "/api/generate/")
    },
    "/v1/video": "/v1/video mean /v1/videos GET POST",
    "/v1/video/video_1": "mean /v1/videos/video_1 DELETE GET",
    "/V1/Videos": "/V1/Videos mean /v1/videos",
    "/v1/videos/video_1/recrod": "mean /v1/videos/video_1/record (GET)",
    "/v1/videos/video_1/event": "mean /v1/videos/video_1/events (GET)",
    "/v1/videos/video_1/cancle": "mean /v1/videos/video_1/cancel (POST)",
    "/v1/videos/video_1/content/video": "mean /v1/videos/video_1/content (GET)",
    "/v1/event": "mean /v1/events (GET)",
    "/healthz": "mean /health (GET)",
    "/openapi": "mean /openapi.json (GET)",
    "/v1/chat/completions": "/v1/chat/completions GET /openapi.json all paths",
    "/favicon.ico": "/favicon.ico GET /openapi.json all paths",
    "/v2/v1/models": "/v2/v1/models mean /v1/models (GET)",
    "/page/nothing.js": "/page/nothing.js GET /openapi.json all paths",
    "/v1/videos/video_1/nothing": "/v1/videos/video_1/nothing GET /openapi.json all paths",
    "/v1/models/nanoo": "'nanoo' nano",
    "/v1/models/x": "'x' nano",
}


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_path_lists_the_valid_ones(start, path):
    response = start(work=False).client.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
    assert has_line_with_words(error["message"], PATHS[path])


PARAMETERS = {  # the path, the wrong parameter or field, and the words of the message
    "/v1/videos?after=zzz": ("after", "after 'zzz' last_id"),
    "/v1/videos?after=": ("after", "after '' last_id"),
    "/v1/videos?limit=0": ("limit", "limit '0' 1 100"),
    "/v1/videos?order=up": ("order", "order 'up' asc desc"),
    "/v1/videos?limit=2&limit=3": ("limit", "limit 2 times"),
    "/v1/videos?page=2": ("page", "'page' limit after order query"),
    "/v1/videos?query=" + "a" * 4001: ("query", "query 4001 4000"),
    "/v1/models?limit=2": ("limit", "'limit' none"),
    "/v1/models/nanoo": ("id", "'nanoo' nano"),
    "/v1/videos/zzz": ("id", "'zzz' GET /v1/videos"),
    "/v1/videos/zzz/record": ("id", "'zzz' GET /v1/videos"),
    "/v1/videos/zzz/content": ("id", "'zzz' GET /v1/videos"),
    "/v1/videos/zzz/events": ("id", "'zzz' GET /v1/videos"),
    "/v1/videos/zzz/content?varian=preview": ("varian", "'varian' variant"),
}


@pytest.mark.parametrize("path", PARAMETERS)
def test_the_wrong_parameter_of_a_path_or_query_is_named(start, path):
    error = start(work=False).client.get(path).json()["error"]
    name, words = PARAMETERS[path]
    assert error["param"] == name
    assert has_line_with_words(error["message"], words), error["message"]


FIELDS = {  # fields beside the prompt, as JSON; the wrong field; the words of the message
    '"steps": true': ("steps", "steps true 1 200"),
    '"steps": 1e999': ("steps", "steps '1e999'"),
    '"steps": "4"': ("steps", 'steps text "4" 4 without quotes'),
    '"guidance_scale": "2.50"': ("guidance_scale", 'guidance_scale text "2.50" 2.5 without quotes'),
    '"guidance_scale": "high"': ("guidance_scale", "guidance_scale number 'high'"),
    '"seed": "7"': ("seed", 'seed text "7" 7 without quotes'),
    '"allow_empty_prompt": "true"': ("allow_empty_prompt", 'allow_empty_prompt text "true" true without quotes'),
    '"steps": [1, null]': ("steps", "steps [1, null]"),
    '"seconds": "1e999"': ("seconds", "seconds '1e999'"),
    '"seconds": 1, "windows": 2': ("seconds", "seconds one window frames each window"),
    '"seconds": 1, "then": "a dog"': ("seconds", "seconds one window frames each window"),
    '"size": {"a": null}': ("size", '64x64 {"a": null}'),
    '"seed": false': ("seed", "seed false"),
    '"then": [true]': ("then", "[true]"),
    '"overlap": 3': ("overlap", "overlap windows 2"),
    '"cache": true': ("cache", "cache true magcache"),
    '"lora": {"x": true}': ("lora", "no LoRA wanjax serve --lora"),
    '"lora": "x.safetensors"': ("lora", "'x.safetensors' no LoRA wanjax serve --lora"),
    '"guidance_scale": {"a": {"b": "' + "c" * 50 + '"}}': ("guidance_scale", "guidance_scale object"),
    f'"negative_prompt": {[7] * 50}': ("negative_prompt", "negative_prompt array"),
    '"image": "http://a.example/a.png"': ("image", "image data: 'http://a.example/a.png' file"),
    '"image": {"image_url": true}': ("image", "image data: true"),
    '"image": "/etc/passwd"': ("image", "image data: got the path of a file: send"),
    '"allow_empty_prompt": "yes"': ("allow_empty_prompt", "true false 'yes'"),
    '"n": 2': ("n", "'n' field one video"),
    '"count": 2': ("count", "'count' field one video"),
    '"noise": 2': ("noise", "'noise' field seed"),
    '"stepz": 2': ("stepz", "'stepz' steps"),
    '"num_frames": 5': ("num_frames", "'num_frames' frames"),
    '"sampler": "euler"': ("sampler", "'sampler' scheduler"),
    '"dtype": "bfloat16"': ("dtype", "'dtype' server started_with"),
    '"out": "a.mp4"': ("out", "'out' GET /v1/videos/ID/content"),
    '"mesh": "tp=2"': ("mesh", "'mesh' fixed server starts leave it out"),
    '"boundary": 0.5': ("boundary", "'boundary' effect model"),
}


@pytest.mark.parametrize("fields", FIELDS)
def test_a_wrong_field_of_json_is_named_with_its_value_as_json(start, fields):
    name, words = FIELDS[fields]
    response = start(work=False).client.post(
        "/v1/videos", content=f'{{"prompt": "a", {fields}}}', headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, name)
    assert has_line_with_words(error["message"], words), error["message"]
    assert not re.search(r"keyword|wanjax\.load|True|False|None", error["message"])


@pytest.mark.parametrize("name", ["prompt", "steps"])
def test_a_text_field_uploaded_as_a_file_is_named(start, name):
    response = start(work=False).client.post("/v1/videos", data={"seed": "1"}, files={name: b"20"})
    assert (response.status_code, response.json()["error"]["param"]) == (422, name)
    assert has_line_with_words(response.json()["error"]["message"], f"{name} file text")


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("application/json", b"", 'empty {"prompt": "a red circle"}'),
        ("application/json", b"null", "object null"),
        ("application/json", b"[true]", "object [true]"),
        ("multipart/form-data", b"x", "form boundary curl"),
    ],
)
def test_an_unreadable_body_names_the_accepted_formats(start, kind, body, words):
    assert has_line_with_words(start(work=False).refused(400, content=body, headers={"content-type": kind}), words)


def test_a_compressed_body_is_not_read_as_uncompressed(start):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert has_line_with_words(
        start(work=False).refused(415, content=gzip.compress(b"{}"), headers=headers), "'gzip' without"
    )


@pytest.mark.parametrize(
    ("status", "request_options", "words"),
    [
        (415, {"json": {"token": TOKEN}}, "'application/json' form token=TOKEN"),
        (400, {"files": {"token": TOKEN.encode()}}, "form token=TOKEN text"),
        (401, {"data": {"token": "wrong"}}, "token wrong"),
        (401, {"data": {"other": TOKEN}}, "token missing"),
    ],
)
def test_a_refused_login_gives_its_reason(start, status, request_options, words):
    response = start(work=False, token=TOKEN).client.post("/login", **request_options)
    assert response.status_code == status
    assert has_line_with_words(response.json()["error"]["message"], words)


VARIANTS = {  # of a video without a picture or clip
    "image": "'image' image video thumbnail preview",
    "clip": "'clip' video thumbnail preview",
    "last_image": "'last_image' image thumbnail",
    "references_1": "'references_1' references thumbnail",
    "thumb": "'thumb' mean thumbnail",
    "": "'' video thumbnail preview",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_missing_variant_gives_its_reason_and_lists_the_existing_ones(start, variant):
    server = start(work=False)
    id = server.post_video()["id"]
    response = server.client.get(f"/v1/videos/{id}/content", params={"variant": variant})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, "variant")
    assert has_line_with_words(
        error["message"], VARIANTS[variant].replace("references thumbnail", "reference images thumbnail")
    )
    assert ("without" in error["message"]) == (variant in ("image", "clip", "last_image", "references_1"))


def test_a_missing_file_of_a_video_gives_its_reason(start):
    server = start(work=False)
    id = server.post_video()["id"]
    url = f"/v1/videos/{id}/content"
    response = server.client.get(url, params={"variant": "preview"})
    assert response.status_code == 404
    assert has_line_with_words(response.json()["error"]["message"], "preview --no-preview steps")
    assert has_line_with_words(server.client.get(url).json()["error"]["message"], "queued completed")
    server.client.post(f"/v1/videos/{id}/cancel")
    for path in (url, f"/v1/videos/{id}/record"):
        response = server.client.get(path)
        assert response.status_code == 409
        assert has_line_with_words(response.json()["error"]["message"], "cancelled files POST")


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [
        ("PUT", "/v1/videos", {"GET", "HEAD", "POST"}),
        ("POST", "/v1/videos/video_1", {"GET", "HEAD", "DELETE"}),
        ("GET", "/v1/videos/video_1/cancel", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/page/app.js", {"GET", "HEAD"}),
    ],
)
def test_an_unsupported_method_lists_the_supported_ones(start, method, path, methods):
    response = start(work=False).client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (405, "invalid_request_error", "not_allowed")
    assert {*response.headers["allow"].split(", ")} == methods
    assert has_line_with_words(error["message"], " ".join([path, method, *sorted(methods)]))


def test_a_request_below_the_path_of_videos_is_told_the_path(start):
    message = start(work=False).client.post("/v1/videos/generations", json={"prompt": "a"}).json()["error"]["message"]
    assert has_line_with_words(message, "/v1/videos/generations POST or POST /v1/videos")


def test_a_model_is_shown_by_its_id(start):
    client = start(work=False).client
    assert client.get("/v1/models/nano").json() == client.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize(
    ("address", "host", "has_access"),
    [
        ("192.0.2.1", "localhost:8000", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "127.0.0.1:80", True),
        ("::1", "[::1]:8000", True),
        ("127.8.0.1", "localhost", True),
    ],
)
def test_no_other_machine_has_access_without_a_token(start, address, host, has_access):
    client = start(work=False).client_from(address, host)
    answers = [client.get(path) for path in ("/", "/v1/videos", "/metrics", "/page/app.js")]
    answers.append(client.post("/v1/videos", json=SMALL))
    assert [result.status_code for result in answers] == [200 if has_access else 403] * 5
    assert (client.get("/health").status_code == 403) is not has_access


@pytest.mark.parametrize(
    "name",
    ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Any", "X-Real-IP", "Via"],
)
def test_forwarded_requests_are_not_local(start, name):
    """The proxy runs on this machine and sends the server's own name as Host, like nginx."""
    server = start(work=False)
    forwarded = server.client_from("127.0.0.1", "127.0.0.1:8000")
    for path in ("/", "/v1/videos", "/metrics", "/health", "/page/app.js"):
        result = forwarded.get(path, headers={name: "127.0.0.1"})
        assert result.status_code == 403
        assert has_line_with_words(result.json()["error"]["message"], f"{name.lower()} token --token")
    assert forwarded.post("/v1/videos", json=SMALL, headers={name: ""}).status_code == 403
    assert not server.jobs()


@pytest.mark.parametrize("name", ["referer", "origin"])
def test_a_page_of_another_site_reads_nothing_without_a_token(start, name):
    """A page behind a proxy has no access either; other pages on this machine have access."""
    client = start(work=False).client
    for path in ("/v1/videos", "/v1/events", "/metrics", "/health"):
        for more in ({}, {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}):
            response = client.get(path, headers={name: "https://videos.example", **more})
            assert response.status_code == 403
            assert has_line_with_words(response.json()["error"]["message"], "'videos.example' proxy --token")
    for page in ("http://localhost:3000", "http://[::1]:8000", "http://127.0.0.1", "null", "http://[", ""):
        assert client.get("/v1/videos", headers={name: page}).status_code == 200


def test_a_link_on_another_site_may_be_followed(start):
    client = start(work=False).client
    navigation = {"referer": "https://wiki.example/", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for path in ("/", "/v1/videos", "/metrics"):
        assert client.get(path, headers=navigation).status_code == 200
    assert client.get("/", headers={"referer": "https://wiki.example/"}).status_code == 200  # an older browser
    assert (
        client.post("/v1/videos", json=SMALL, headers=navigation | {"origin": "https://wiki.example"}).status_code
        == 403
    )


ORIGINS = {
    "http://localhost:8000": ({}, True),  # Host
    "https://videos.example": ({"host": "videos.example", "proto": "https"}, True),
    "https://videos.example:8443": ({"host": "videos.example:8443", "proto": "https"}, True),
    "http://videos.example:8080": ({"host": "videos.example", "proto": "http", "port": "8080"}, True),
    "https://VIDEOS.example": ({"host": "videos.example:443", "proto": "https, http"}, True),
    "https://first.example": ({"host": "first.example, second.example"}, True),
    "https://[::1]:9000": ({"host": "[::1]:9000", "proto": "https"}, True),
    "http://proxy.example:81": ({}, True),  # --origin
    "https://proxy.example:81": ({}, False),
    "http://proxy.example": ({}, False),
    "https://evil.example": ({"host": "videos.example", "proto": "https"}, False),
    "http://videos.example": ({"host": "videos.example", "proto": "https"}, False),
    "http://videos.example:9090": ({"host": "videos.example", "proto": "http"}, False),
    "https://second.example": ({"host": "first.example, second.example"}, False),
    "https://other.example": ({"host": "[", "proto": "https"}, False),
    "null": ({"host": "null"}, False),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_page_behind_a_proxy_may_send_requests(start, origin):
    """Its origin is the address that the proxy forwards, or an `--origin` of the command."""
    proxy_headers, accepted = ORIGINS[origin]
    server = start(work=False, token=TOKEN, origins=["http://proxy.example:81/"])
    headers = {"origin": origin, "authorization": f"Bearer {TOKEN}"}
    headers |= {f"x-forwarded-{name}": value for name, value in proxy_headers.items()}
    response = server.client.post("/v1/videos", json=SMALL, headers=headers)
    assert response.status_code == (200 if accepted else 403)
    assert accepted or has_line_with_words(response.json()["error"]["message"], "--origin")


def test_a_page_of_another_site_may_send_no_header_of_a_proxy(start):
    """A browser's preflight request is not allowed."""
    server = start(work=False, token=TOKEN)
    requested = {"origin": "https://evil.example", "access-control-request-headers": "x-forwarded-host"}
    result = server.client.options("/v1/videos", headers=requested | {"access-control-request-method": "POST"})
    assert result.status_code == 401
    assert not [name for name in result.headers if name.startswith("access-control")]


def test_the_cookie_is_only_for_the_page(start):
    """The cookie has no path, so it gets the path of the page. It is secure if the page is served by HTTPS."""
    server = start(work=False, token=TOKEN)

    def cookie(**headers):
        response = server.client.post("/login", data={"token": TOKEN}, headers=headers)
        return response.headers["set-cookie"].lower()

    assert "path" not in cookie()
    assert "secure" not in cookie()
    assert "secure" in cookie(**{"X-Forwarded-Proto": "https"})
    assert "secure" not in cookie(**{"X-Forwarded-Proto": "http"})
    other_client = server.client_from("127.0.0.1")
    two_cookies = f"{COOKIE}={TOKEN}; other=1; {COOKIE}=of-a-server-at-another-path"
    assert other_client.get("/v1/videos", headers={"cookie": two_cookies}).status_code == 200
    assert other_client.get("/v1/videos", headers={"cookie": f"{COOKIE}=wrong; a=("}).status_code == 401


def test_a_proxy_does_not_buffer_events(start):
    server = start(work=False)
    id = server.post_video()["id"]
    server.client.post(f"/v1/videos/{id}/cancel")
    assert server.client.get(f"/v1/videos/{id}/events").headers["x-accel-buffering"] == "no"


def test_no_response_redirects(start):
    """Behind a proxy, a redirect could name an address that the client cannot reach."""
    client = start(work=False).client
    for path in ("/v1/videos/", "/page", "/health/"):
        response = client.get(path, follow_redirects=False)
        assert (response.status_code, response.headers.get("location")) == (404, None)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["video_1/remix", "edits", "extensions", "characters"])
def test_unsupported_paths_of_openai_are_named(start, path, method):
    response = start(work=False).client.request(method, f"/v1/videos/{path}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "not_offered")
    assert has_line_with_words(error["message"], f"{path.rpartition('/')[2]} /v1/videos")


@pytest.mark.parametrize("wrong", ["", "a", TOKEN[:-1], TOKEN + "s", TOKEN.upper()])
def test_a_part_of_a_token_gives_no_access(start, wrong):
    client = start(work=False, token=TOKEN).client_from("192.0.2.1", "videos.example")
    assert client.get("/v1/videos", headers={"authorization": f"Bearer {wrong}"}).status_code == 401
    assert client.post("/login", data={"token": wrong}).status_code == 401
    assert client.get("/v1/videos", headers={"cookie": f"{COOKIE}={wrong}"}).status_code == 401


def test_a_valid_token_gives_access(start):
    server = start(work=False, token=TOKEN)
    client = server.client_from("192.0.2.1", "videos.example")
    for path in ("/v1/videos", "/metrics", "/v1/events", "/v1/models"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/v1/videos", json=SMALL).headers["www-authenticate"] == "Bearer"
    authorized = {"authorization": f"Bearer {TOKEN}"}
    assert client.post("/v1/videos", json=SMALL, headers=authorized).status_code == 200
    assert client.get("/").status_code == client.get("/health").status_code == 200
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    response = client.post("/login", data={"token": TOKEN})
    assert response.status_code == 204
    assert re.search(f"{COOKIE}=.*HttpOnly.*SameSite=strict", response.headers["set-cookie"])
    assert client.get("/v1/videos").status_code == 200  # with the cookie


def test_the_page_loads_nothing_from_elsewhere(start):
    client = start(work=False).client
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    texts = [page.text, *(client.get(f"/page/{name}").text for name in ("app.js", "page.css"))]
    assert not [text for text in texts if re.search(r"(https?:)?//(?!www\.w3\.org)\w+\.\w+", text)]


def test_metrics_are_in_the_form_of_prometheus(start):
    server = start(work=False)
    server.post_video()
    server.refused(422, json={})
    lines = server.client.get("/metrics").text.splitlines()
    assert all(re.fullmatch(r'(# (HELP|TYPE) \w+ .+|\w+({\w+="\w+"})? [-+.e\d]+)', line) for line in lines)
    assert "wanjax_queue_length 1" in lines
    assert 'wanjax_answers_total{status="422"} 1' in lines


OPTIONS = [
    (["--host", "0.0.0.0"], "--host 0.0.0.0 may other machines token --token"),
    (["--host", "999.1.1.1"], "--host 999.1.1.1 may other machines token --token"),
    (["--host", "0.0.0.0", "--token", "short"], "16 characters"),
    (["--token", ""], "16 characters"),  # the value of an unset variable of the shell
    (["--host", "203.0.113.1", "--token", TOKEN], "203.0.113.1 --host"),
    (["--origin", "https://videos.example"], "--origin https://videos.example --token"),
    *(
        (["--token", TOKEN, "--origin", wrong], f"--origin '{wrong}' https://videos.example")
        for wrong in (
            *("videos.example", "https://videos.example/wan/", "ftp://videos.example"),
            *("https://a:b@c", "https://["),
        )
    ),
    (["--model", "nothing"], "nothing model"),
    (["--database", "/etc/passwd"], "/etc/passwd SQLite .sqlite"),
    (["--database", "/etc"], "/etc folder .sqlite"),
    (
        ["--port", "{taken}", "--model", "owner/nothing"],
        "{taken} 127.0.0.1 use --port 0",
    ),  # the port is checked before the model
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda value: str(value))
def test_invalid_options_of_the_command_are_refused(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANJAX_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        output = refused("serve", *(option.replace("{taken}", port) for option in options))
    assert has_line_with_words(output, words.replace("{taken}", port))
    assert list(tmp_path.iterdir()) == []


def test_the_message_for_missing_libraries_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    assert has_line_with_words(refused("serve"), "pip install '.[serve]'")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frames": 81}, "32x32 81 frames 82,944 pixels 40,000 37 frames 16x16"),
        ({"size": "320x320", "frames": 1}, "320x320 1 frame 102,400 40,000 192x192"),
        ({"size": "320x320", "frames": 161}, "320x320 161 frames 40,000 smaller size fewer frames"),
    ],
)
def test_the_message_for_a_video_too_large_lists_valid_sizes(start, fields, words):
    server = start(work=False, pixels=40_000)
    assert has_line_with_words(server.refused(422, json=SMALL | fields), words)


def test_a_guidance_cache_is_refused_by_a_server_with_batched_guidance(start):
    server, request = start(work=False, batch_guidance=True), SMALL | {"steps": 8}
    message = server.refused(422, json=request | {"cache": "guidance"})
    assert has_line_with_words(message, "guidance:5 batched guidance leave batch_guidance cache")
    assert server.client.post("/v1/videos", json=request | {"batch_guidance": True}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"seconds": 3600}, "seconds"),
        ({"frames": 4001}, "frames"),
        ({"frames": 4001, "size": "320x320"}, "size"),
        ({"size": "3200x3200"}, "size"),
    ],
)
def test_the_message_for_a_video_too_large_names_the_field(start, fields, name):
    options = {key: value for key, value in SMALL.items() if key not in ("frames", "size")} | fields
    error = start(work=False, pixels=400_000).client.post("/v1/videos", json=options).json()["error"]
    assert error["param"] == name
    assert name != "seconds" or has_line_with_words(error["message"], "3600 s 400,000 at most s")


def test_a_similar_parameter_is_suggested(start):
    response = start(work=False).client.get("/v1/videos/video_x/content", params={"varian": "thumbnail"})
    assert response.json()["error"]["message"].endswith("did you mean variant, or after?")


@pytest.mark.parametrize("fields", [{"strength": 0.5}, {"strength": 0.5, "image": None}])
def test_no_response_names_an_option_of_the_command(start, fields):
    client = start(work=False).client
    assert "--" not in client.post("/v1/videos", json=SMALL | fields).json()["error"]["message"]
    for path in ("/v1/models", "/openapi.json"):
        assert " --" not in client.get(path).text


def test_paths_of_the_interface_are_not_stripped_like_folders():
    text = "POST /v1/videos or GET /v1/videos/x/content; /health; /srv/models/a.safetensors; /v1/weights/b.bin"
    expected = "POST /v1/videos or GET /v1/videos/x/content; /health; a.safetensors; b.bin"
    assert strip_folders(text, []) == expected
