# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused with one sentence, and those who may not ask."""

import base64
import io
import json
import re
import socket
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.serve.conftest import SMALL
from tests.support.commands import refused
from tests.support.words import says
from wanjax.cli import serving
from wanjax.errors import SettingError
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.request import fields_beside
from wanjax.serve.auth import COOKIE
from wanjax.serve.limits import Limits
from wanjax.serve.uploads import save_pictures

TOKEN = "a-token-of-the-tests"


def sent(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return {"image": "data:;base64," + base64.b64encode(file.getvalue()).decode()}


def animated(side):
    first, *others = (Image.new("RGB", (side, side), (90 * i, 0, 0)) for i in range(3))
    return sent(first, "GIF", save_all=True, append_images=others)["image"]


@pytest.fixture(scope="module")
def fields(pipe):
    return sorted({*pipe.defaults.to_json(), *fields_beside()})


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    *(st.lists(st.integers(), max_size=3), st.dictionaries(st.text(), st.text(), max_size=2)),
    st.sampled_from(["x", "1e20", "-1", "0", "9" * 400, "nan", "inf", "true", "a\0b", "\ud800", [], {}, 10**30, 1e20]),
)


@given(st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_any_field_fails_the_server(door, fields, data):
    """By JSON and by form: each is taken, or refused with a sentence that names the field."""
    name, value = data.draw(st.sampled_from([*fields, "other"])), data.draw(VALUES)
    beside = {"height": "size", "width": "size", "seconds": "frames"}.get(name)
    asked = {key: known for key, known in SMALL.items() if key != beside} | {name: value}
    pairs = [f"{key}={quote(str(known).encode('utf-8', 'replace'))}" for key, known in asked.items()]
    bodies = {"application/json": json.dumps(asked), "application/x-www-form-urlencoded": "&".join(pairs)}
    for kind, body in bodies.items():
        answer = door.client.post("/v1/videos", content=body, headers={"content-type": kind})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 200:
            assert door.client.delete(f"/v1/videos/{answer.json()['id']}").status_code == 200
        else:
            error = answer.json()["error"]
            assert len(error["message"]) < 600
            assert error["param"] is None or error["param"] in (*fields, "other")


@pytest.fixture
def door(start):
    return start(work=False)


@given(st.sampled_from(["limit", "order", "after", "variant"]), st.text())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_query_fails_the_server(door, name, value):
    query = {name: value.encode("utf-8", "replace")}
    assert door.client.get("/v1/videos", params=query).status_code in (200, 404, 422)
    assert door.client.get("/v1/videos/video_x/content", params=query).status_code == 404


@pytest.mark.parametrize("limit", ["0", "101", "1999", "00000000000001999", "-1", "x", "", "1" * 400, "\u0663"])
def test_a_limit_is_obeyed_or_refused(start, limit):
    answer = start(work=False).client.get("/v1/videos", params={"limit": limit})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "limit"


@pytest.mark.parametrize(
    "origin", ["http://[", "null", "http://localhost:9", "", "\u00e9", "https://evil.example", "http://localhost:8000"]
)
def test_no_other_site_asks_through_the_browser(start, origin):
    answer = start(work=False).client.post("/v1/videos", json=SMALL, headers={"origin": origin.encode()})
    if origin == "http://localhost:8000":  # the page's own
        assert answer.status_code == 200
    else:
        assert answer.status_code == 403
        assert says(answer.json()["error"]["message"], "another site")


def blank(side):
    return sent(Image.new("1", (side, side)))["image"]


def pieces():
    for _ in range(30):
        yield b"x" * 100


IN_PIECES = {"headers": {"content-type": "application/json"}}
SENT = {  # what is sent, the status of the answer, and what its sentence names
    "a picture too large": (lambda: {"json": SMALL | {"image": blank(9000)}}, 422, "81,000,000 pixels"),
    "what the first leaves of 24 million": (
        lambda: {"json": SMALL | {"image": blank(4000), "video": blank(4000)}},
        *(422, "8,000,000"),
    ),
    "an animation": (lambda: {"json": SMALL | {"image": animated(8)}}, 422, "animated"),
    "a picture of no use": (lambda: {"json": SMALL | {"last_image": blank(32)}}, 422, "nano last"),
    "no prompt": (lambda: {"files": {"image": b"x"}}, 422, "prompt"),
    "a body too large": (lambda: {"files": {"image": b"x" * 200_000}}, 413, "MiB at most"),
    "pieces too large": (lambda: IN_PIECES | {"content": (piece * 100 for piece in pieces())}, 413, "MiB at most"),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_and_cannot_be_used(start, name):
    request, status, words = SENT[name]
    server = start(work=False, upload=100_000)
    assert says(server.refused(status, **request()), words)
    assert not any(server.folder.glob("video_*"))


CLIPS = [b"", b"ffconcat version 1.0\nfile /etc/passwd\n", b"#EXTM3U\n/etc/passwd\n", b"\0\0\0\x18ftypmp42" + b"x" * 99]


@pytest.mark.parametrize("data", CLIPS, ids=lambda data: repr(data[:12]))
def test_bad_clips(start, data):
    server = start(work=False)
    sent = {"video": "data:video/mp4;base64," + base64.b64encode(data).decode()}
    told = server.client.post("/v1/videos", json=SMALL | sent).json()["error"]
    assert told["param"] == "video"
    assert str(server.folder) not in told["message"]
    assert not any(server.folder.glob("video_*"))


PICTURE, FILM = base64.b64decode(blank(32).partition(",")[2]), CLIPS[-1]
ANIMATION = base64.b64decode(animated(32).partition(",")[2])
OF_ANOTHER_KIND = [  # a field, what is sent as it, fields beside, and what the sentence names
    ("video", b"a text", {}, "video clip mp4 webm animation"),
    ("video", PICTURE, {"frames": None}, "video 1 frame 5 image"),
    ("video", ANIMATION, {"frames": None}, "video frames 5 image"),
    ("video", ANIMATION, {"frames": 9}, "video frames 9 fewer"),
    ("image", FILM, {}, "image picture video"),
    ("image", ANIMATION, {}, "image animated video"),
    ("image", b"a text", {}, "image picture PNG"),
]


def test_a_mask_that_is_neither_picture_nor_clip_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"mask is no clip: send a picture, a film .* animation") as caught:
        save_pictures({"mask": [b"a text"]}, INPUTS, tmp_path, Limits(10**7))
    assert caught.value.setting == "mask"


def test_a_clip_is_not_called_for_where_a_model_takes_none(tmp_path):
    with pytest.raises(SettingError) as caught:
        save_pictures({"image": [FILM]}, INPUTS, tmp_path, Limits(10**7), takes_clips=False)
    assert "video" not in str(caught.value)


@pytest.mark.parametrize(("field", "data", "more", "words"), OF_ANOTHER_KIND)
def test_a_file_of_another_kind_than_its_field_is_named(start, field, data, more, words):
    server = start(work=False)
    sent = SMALL | more | {field: "data:;base64," + base64.b64encode(data).decode()}
    error = server.client.post("/v1/videos", json=sent).json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_request")
    assert says(error["message"], words)
    assert not server.jobs()


def test_large_clips(start, machine):
    server = start(work=False)
    machine.reads_at_most(pixels=64 * 64, clip_factor=2)
    assert says(server.refused(422, json=SMALL | {"video": animated(64)}), "3 frames 64x64 8,192")


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
def test_bad_bodies(start, status, kind, body):
    server = start(work=False)
    server.refused(status, content=body, headers={"content-type": kind})
    assert not server.jobs()


def test_a_field_of_json_that_is_given_twice_is_named(start):
    body = b'{"prompt": "a", "steps": 2, "steps": 3}'
    answer = start(work=False).client.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert answer.json()["error"]["param"] == "steps"
    assert says(answer.json()["error"]["message"], "steps twice")


@pytest.mark.parametrize("field", ["image", "video", "references[]", "mask"])
def test_an_empty_file_is_refused(start, field):
    server, name = start(work=False), field.removesuffix("[]")
    data = {key: str(value) for key, value in SMALL.items()}
    answer = server.client.post("/v1/videos", data=data, files={field: ("empty.png", b"")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, name)
    assert says(answer.json()["error"]["message"], f"{name} empty")
    error = server.client.post("/v1/videos", json=SMALL | {"image": "data:image/png;base64,"}).json()["error"]
    assert error["param"] == "image"
    assert says(error["message"], "image empty")
    assert not server.jobs()


def test_a_file_field_that_nobody_touched_counts_as_none(start):
    """A browser sends it without a name and without bytes."""
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    fields = [part % (name.encode(), b"", str(value).encode()) for name, value in SMALL.items()]
    body = b"".join([*fields, part % (b"image", b'; filename=""', b""), b"--b--\r\n"])
    kind = {"content-type": "multipart/form-data; boundary=b"}
    answer = start(work=False).client.post("/v1/videos", content=body, headers=kind)
    assert (answer.status_code, answer.json()["pictures"]) == (200, [])


def test_a_full_queue(start):
    server = start(work=False, queue=2)
    for _ in range(2):
        server.ask()
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
        ("GET", "/v1/videos?order=up", 422),
        ("GET", "/v1/videos?after=video_1", 404),
        ("DELETE", "/v1/videos/video_1", 404),
        ("POST", "/v1/videos/video_1/cancel", 404),
    ],
)
def test_unknown_paths_and_methods(start, method, path, status):
    assert start(work=False).client.request(method, path).status_code == status


PATHS = {  # those that there are not, and what the sentence names
    "/v1/v1/videos": "/v1/v1/videos mean /v1/videos",
    "/v1/v1/v1/models": "mean /v1/models",
    "/v1/videos/": "/v1/videos/ mean /v1/videos",
    "/videos/video_1/content": "mean /v1/videos/video_1/content",
    "/v1/health": "mean /health",
    "/v1/chat/completions": "/v1/chat/completions /v1/videos /v1/models /openapi.json",
    "/page/nothing.js": "/page/nothing.js /v1/videos",
    "/v1/models/nanoo": "'nanoo' nano",
    "/v1/models/x": "'x' nano",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_there_is_not_is_answered_with_those_that_there_are(start, path):
    answer = start(work=False).client.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
    assert says(error["message"], PATHS[path])


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
def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_takes(start, method, path, methods):
    answer = start(work=False).client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (405, "invalid_request_error", "not_allowed")
    assert {*answer.headers["allow"].split(", ")} == methods
    assert says(error["message"], " ".join([path, method, *sorted(methods)]))


def test_a_model_is_shown_by_its_id(start):
    client = start(work=False).client
    assert client.get("/v1/models/nano").json() == client.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize(
    ("address", "host", "enters"),
    [
        ("192.0.2.1", "localhost:8000", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "127.0.0.1:80", True),
        ("::1", "[::1]:8000", True),
        ("127.8.0.1", "localhost", True),
    ],
)
def test_no_other_machine_gets_in_without_a_token(start, address, host, enters):
    client = start(work=False).client_from(address, host)
    answers = [client.get(path) for path in ("/", "/v1/videos", "/metrics", "/page/app.js")]
    answers.append(client.post("/v1/videos", json=SMALL))
    assert [answer.status_code for answer in answers] == [200 if enters else 403] * 5
    assert (client.get("/health").status_code == 403) is not enters


@pytest.mark.parametrize(
    "name",
    ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Any", "X-Real-IP", "Via"],
)
def test_what_a_proxy_forwards_is_not_this_machines(start, name):
    """Though the proxy runs here, and calls the server by its own name, as nginx does."""
    server = start(work=False)
    forwarded = server.client_from("127.0.0.1", "127.0.0.1:8000")
    for path in ("/", "/v1/videos", "/metrics", "/health", "/page/app.js"):
        answer = forwarded.get(path, headers={name: "127.0.0.1"})
        assert answer.status_code == 403
        assert says(answer.json()["error"]["message"], f"{name.lower()} token --token")
    assert forwarded.post("/v1/videos", json=SMALL, headers={name: ""}).status_code == 403
    assert not server.jobs()


@pytest.mark.parametrize("name", ["referer", "origin"])
def test_no_page_of_another_site_reads_without_a_token(start, name):
    """As little as one that a proxy shows at an address of its own; nor does one of this machine need to be ours."""
    client = start(work=False).client
    for path in ("/v1/videos", "/v1/events", "/metrics", "/health"):
        for more in ({}, {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}):
            answer = client.get(path, headers={name: "https://videos.example", **more})
            assert answer.status_code == 403
            assert says(answer.json()["error"]["message"], "'videos.example' proxy --token")
    for page in ("http://localhost:3000", "http://[::1]:8000", "http://127.0.0.1", "null", "http://[", ""):
        assert client.get("/v1/videos", headers={name: page}).status_code == 200


def test_a_link_on_another_site_may_be_followed(start):
    client = start(work=False).client
    link = {"referer": "https://wiki.example/", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for path in ("/", "/v1/videos", "/metrics"):
        assert client.get(path, headers=link).status_code == 200
    assert client.get("/", headers={"referer": "https://wiki.example/"}).status_code == 200  # of an older browser
    assert client.post("/v1/videos", json=SMALL, headers=link | {"origin": "https://wiki.example"}).status_code == 403


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
def test_the_page_behind_a_proxy_may_ask(start, origin):
    """Its origin is that which the proxy was asked for, in full, or one of those of the command."""
    given, accepted = ORIGINS[origin]
    server = start(work=False, token=TOKEN, origins=["http://proxy.example:81/"])
    headers = {"origin": origin, "authorization": f"Bearer {TOKEN}"}
    headers |= {f"x-forwarded-{name}": value for name, value in given.items()}
    answer = server.client.post("/v1/videos", json=SMALL, headers=headers)
    assert answer.status_code == (200 if accepted else 403)
    assert accepted or says(answer.json()["error"]["message"], "--origin")


def test_a_page_of_another_site_may_send_no_header_of_a_proxy(start):
    """A browser asks before, whether it may, and is not answered that it may."""
    server = start(work=False, token=TOKEN)
    asked = {"origin": "https://evil.example", "access-control-request-headers": "x-forwarded-host"}
    answer = server.client.options("/v1/videos", headers=asked | {"access-control-request-method": "POST"})
    assert answer.status_code == 401
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_cookie_is_of_the_page_alone(start):
    """It has no path, so that a browser takes that of the page, and is sent by https alone where the page is."""
    server = start(work=False, token=TOKEN)

    def cookie(**headers):
        answer = server.client.post("/login", data={"token": TOKEN}, headers=headers)
        return answer.headers["set-cookie"].lower()

    assert "path" not in cookie()
    assert "secure" not in cookie()
    assert "secure" in cookie(**{"X-Forwarded-Proto": "https"})
    assert "secure" not in cookie(**{"X-Forwarded-Proto": "http"})
    fresh = server.client_from("127.0.0.1")
    both = f"{COOKIE}={TOKEN}; other=1; {COOKIE}=of-a-server-at-another-path"
    assert fresh.get("/v1/videos", headers={"cookie": both}).status_code == 200
    assert fresh.get("/v1/videos", headers={"cookie": f"{COOKIE}=wrong; a=("}).status_code == 401


def test_events_are_not_kept_back_by_a_proxy(start):
    server = start(work=False)
    id = server.ask()["id"]
    server.client.post(f"/v1/videos/{id}/cancel")
    assert server.client.get(f"/v1/videos/{id}/events").headers["x-accel-buffering"] == "no"


def test_no_answer_leads_to_an_address_of_its_own(start):
    """Which behind a proxy would be the server's, that the client cannot reach."""
    client = start(work=False).client
    for path in ("/v1/videos/", "/page", "/health/"):
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers.get("location")) == (404, None)


@pytest.mark.parametrize("path", ["video_1/remix", "edits", "extensions", "characters"])
def test_what_openai_offered_beside(start, path):
    answer = start(work=False).client.post(f"/v1/videos/{path}", json={"prompt": "a"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "not_offered")
    assert says(error["message"], f"{path.rpartition('/')[2]} /v1/videos")


@pytest.mark.parametrize("wrong", ["", "a", TOKEN[:-1], TOKEN + "s", TOKEN.upper()])
def test_a_part_of_a_token_lets_nobody_in(start, wrong):
    client = start(work=False, token=TOKEN).client_from("192.0.2.1", "videos.example")
    assert client.get("/v1/videos", headers={"authorization": f"Bearer {wrong}"}).status_code == 401
    assert client.post("/login", data={"token": wrong}).status_code == 401
    assert client.get("/v1/videos", headers={"cookie": f"{COOKIE}={wrong}"}).status_code == 401


def test_a_token_lets_in(start):
    server = start(work=False, token=TOKEN)
    client = server.client_from("192.0.2.1", "videos.example")
    for path in ("/v1/videos", "/metrics", "/v1/events", "/v1/models"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/v1/videos", json=SMALL).headers["www-authenticate"] == "Bearer"
    right = {"authorization": f"Bearer {TOKEN}"}
    assert client.post("/v1/videos", json=SMALL, headers=right).status_code == 200
    assert client.get("/").status_code == client.get("/health").status_code == 200
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    answer = client.post("/login", data={"token": TOKEN})
    assert answer.status_code == 204
    assert re.search(f"{COOKIE}=.*HttpOnly.*SameSite=strict", answer.headers["set-cookie"])
    assert client.get("/v1/videos").status_code == 200  # with the cookie


def test_the_page_loads_nothing_from_elsewhere(start):
    client = start(work=False).client
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    texts = [page.text, *(client.get(f"/page/{name}").text for name in ("app.js", "page.css"))]
    assert not [text for text in texts if re.search(r"(https?:)?//(?!www\.w3\.org)\w+\.\w+", text)]


def test_metrics_are_in_the_form_of_prometheus(start):
    server = start(work=False)
    server.ask()
    server.refused(422, json={})
    lines = server.client.get("/metrics").text.splitlines()
    assert all(re.fullmatch(r'(# (HELP|TYPE) \w+ .+|\w+({\w+="\w+"})? [-+.e\d]+)', line) for line in lines)
    assert "wanjax_queue_length 1" in lines
    assert 'wanjax_answers_total{status="422"} 1' in lines


OPTIONS = [
    (["--host", "0.0.0.0"], "token --token"),
    (["--host", "0.0.0.0", "--token", "short"], "16 characters"),
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
    (["--port", "{taken}", "--model", "owner/nothing"], "{taken} 127.0.0.1 use --port 0"),  # before it is looked for
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda value: str(value))
def test_options_that_the_command_refuses(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANJAX_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("serve", *(option.replace("{taken}", port) for option in options))
    assert says(said, words.replace("{taken}", port))
    assert list(tmp_path.iterdir()) == []


def test_without_the_libraries_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    assert says(refused("serve"), "'wanjax[serve]'")
