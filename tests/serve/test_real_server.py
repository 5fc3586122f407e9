# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve` in a process of its own: killed and started again, and its page in a real browser."""

import base64
import io
import json
import resource
import signal
import socket
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
from PIL import Image

from tests.support.commands import refused, succeeded, wanjax
from tests.support.documents import ROOT, blocks
from tests.support.films import ANIMATIONS, CONTAINERS, FRAMES, breaks, film, harmed
from tests.support.quick import quick
from tests.support.served import PROMPT, SMALL, finished, serving
from tests.support.words import says
from wanjax.cli.report import Report
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A client of one server for several tests, whose programs no earlier run has kept."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder / "videos", "--no-rehearse", JAX_COMPILATION_CACHE_DIR=str(folder / "xla")) as (client, _):
        yield client


@pytest.mark.slow
def test_a_kill_and_a_restart_lose_no_video(tmp_path):
    with serving(tmp_path, "--no-rehearse") as (client, process):
        ids = [client.post("/v1/videos", json=SMALL | {"seed": 0, "steps": 2}).json()["id"]]
        assert finished(client, ids[0])["status"] == "completed"
        content = client.get(f"/v1/videos/{ids[0]}/content").content
        ids += [client.post("/v1/videos", json=SMALL | {"seed": n, "steps": 200}).json()["id"] for n in (1, 2)]
        while client.get(f"/v1/videos/{ids[1]}").json()["status"] != "in_progress":
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(tmp_path, "--no-rehearse") as (client, process):
        assert client.get(f"/v1/videos/{ids[0]}/content").content == content
        assert [finished(client, id)["status"] for id in ids] == ["completed"] * 3
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_busy_server_ends_at_a_signal_and_goes_on_later(tmp_path):
    with serving(tmp_path, "--no-rehearse") as (client, process):
        id = client.post("/v1/videos", json=SMALL | {"steps": 200}).json()["id"]
        with client.stream("GET", "/v1/events") as stream:
            for line in stream.iter_lines():
                if '"stage": "denoise"' in line:
                    process.terminate()
        assert process.wait(60) == 0
    with serving(tmp_path, "--no-rehearse") as (client, _):
        assert finished(client, id)["status"] == "completed"


def connected(client, text=b""):
    """Return a connection that says so much and no more."""
    opened = socket.create_connection((client.base_url.host, client.base_url.port))
    opened.sendall(text)
    return opened


def health_of(client):
    """Ask for the server's health on a connection of its own, and return the seconds until the answer."""
    asked = time.perf_counter()
    with closing(connected(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) as connection:
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"
    return time.perf_counter() - asked


def test_a_monitor_by_http_1_0_gets_the_health(served):
    """Those of many load balancers send no Host. With one they are what nginx once sent for everybody, by default."""
    for request, status in {
        b"GET /health HTTP/1.0\r\n\r\n": b"200",
        b"GET /v1/videos HTTP/1.0\r\n\r\n": b"403",
        b"GET /health HTTP/1.0\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n": b"403",
        b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n": b"403",
    }.items():
        with closing(connected(served, request)) as connection:
            assert connection.recv(12).partition(b" ")[2] == status, request


@pytest.mark.parametrize("count", quick([600], [600, 2000]))
def test_clients_that_say_little_keep_no_one_out(tmp_path, count):
    """Silent connections, halves of heads and bodies, and open streams: an honest client is answered, and is served."""
    half = b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with serving(tmp_path, "--no-rehearse") as (client, process), ExitStack() as stack:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))  # of the clients
        health = []
        for text in (b"", half, half + b"\r\n{"):
            for number in range(count // 3):
                stack.enter_context(closing(connected(client, text)))
                if number % 50 == 0:
                    health.append(health_of(client))
            assert psutil.Process(process.pid).num_fds() < 700
        id = client.post("/v1/videos", json=SMALL | {"steps": 2}).json()["id"]
        assert finished(client, id)["status"] == "completed"
        asked = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answers = [stack.enter_context(closing(connected(client, asked))) for _ in range(200)]
        statuses = Counter(stream.recv(12) for stream in answers)
        assert statuses == {b"HTTP/1.1 200": 64, b"HTTP/1.1 429": 136}
        health += [health_of(client) for _ in range(10)]
        print(f"{len(health)} answers of /health, the slowest in {max(health):.2f} s")  # by `-rP`


SENT = (*(name for name in CONTAINERS if name.endswith(("mp4", "mov", "mkv", "webm"))), *ANIMATIONS)
"""Those that a request may hold."""


@pytest.mark.parametrize("name", quick(("parts.mp4", "a.webp"), (*CONTAINERS, *ANIMATIONS)))
def test_a_damaged_film_is_refused_with_its_frame(served, tmp_path, name):
    """In a form and in JSON; a whole one is taken as it is."""
    asked = SMALL | {"frames": len(FRAMES), "fps": 25, "steps": 2}
    whole = film(tmp_path / name)
    for kind, file in {"whole": whole, "cut": harmed(whole, "cut"), "hole": harmed(whole, "hole")}.items():
        data = file.read_bytes()
        url = "data:;base64," + base64.b64encode(data).decode()
        for request in {"data": asked, "files": {"video": ("any", data)}}, {"json": asked | {"video": url}}:
            answer = served.post("/v1/videos", **request)
            if kind == "whole" and name in SENT:
                assert answer.status_code == 200, answer.text
                path = f"/v1/videos/{answer.json()['id']}"
                assert served.get(f"{path}/content", params={"variant": "clip"}).content == data
                assert served.delete(path).status_code == 200
                continue
            assert answer.status_code == 422, answer.text
            error = answer.json()["error"]
            assert error["param"] == "video"
            assert str(tmp_path) not in error["message"]
            assert breaks(error["message"], name, kind) or name not in SENT


def picture():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(file, "PNG")
    return {"name": "red.png", "mimeType": "image/png", "buffer": file.getvalue()}


def test_who_types_before_the_server_has_answered(browser, served):
    """The prompt stays, nothing is asked for yet, and no error is told."""
    told, held, asked = [], [], []
    page = browser.new_page()
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.append(request.method))
    page.route("**/v1/models", lambda route: held.append(route))
    page.goto(str(served.base_url))
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    assert page.is_disabled("#make")
    held[0].continue_()
    page.wait_for_selector("#make:enabled")
    assert page.input_value("#prompt") == PROMPT
    assert (told, set(asked)) == ([], {"GET"})
    page.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_an_empty_prompt_is_told_and_asks_nobody(browser, served, width):
    """And no name of a file or a size is cut beside room that is left."""
    page, asked = browser.new_page(viewport={"width": width, "height": 900}), set()
    page.on("request", lambda request: asked.add(request.method))
    page.goto(str(served.base_url))
    page.wait_for_selector("#image")
    page.fill("#prompt", "  ")
    page.click("#make")
    page.wait_for_selector("#told:not(:empty)")
    assert "video" in page.inner_text("#told")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert asked == {"GET"}
    narrowest = min(page.locator("#image").bounding_box()["width"], page.locator("[name=size]").bounding_box()["width"])
    assert narrowest >= 240
    page.close()


@pytest.mark.parametrize(("width", "height"), quick([(1100, 800)], [(1100, 800), (360, 700)]))
def test_the_page_in_a_browser(browser, served, tmp_path, width, height):
    """From a picture: cancelled while compiling, made, refused, made again with another seed, and deleted."""
    told, asked = [], []
    page = browser.new_page(viewport={"width": width, "height": height})
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(str(served.base_url))
    page.fill("#prompt", PROMPT)
    page.click("#ask details summary")
    assert page.is_hidden("[name=resize]")
    assert "text, a first picture, a clip" in page.inner_text("#tasks")
    page.set_input_files("#image", picture())
    page.wait_for_selector("#pictures img")
    assert page.is_visible("[name=resize]")
    assert page.is_hidden("[name=strength]")  # without a clip
    assert page.is_visible("[name=negative_prompt]")
    page.fill("[name=guidance_scale]", "1")
    assert page.is_hidden("[name=negative_prompt]")
    page.fill("[name=guidance_scale]", "")
    page.select_option("[name=size]", "other")
    for name, value in {"width": 64 if width > 500 else 32, "height": 32, "frames": 5, "steps": 2, "seed": 5}.items():
        page.fill(f"[name={name}]", str(value))
    page.click("#make")
    page.wait_for_selector(".card.in_progress:has-text('compiling program')", timeout=120_000)
    page.click(".card.in_progress .remove")
    page.wait_for_selector(".card.failed:has-text('cancelled')", timeout=120_000)
    page.click("#make")
    page.wait_for_selector(".card.completed", timeout=300_000)
    player = page.query_selector(".card video")
    player.evaluate("player => player.play()")
    assert player.evaluate("player => [player.videoHeight, player.error]") == [32, None]
    page.fill("[name=cache]", "nothing")
    page.click("#make")
    page.wait_for_selector("#told:has-text('nothing')")
    page.reload()
    page.click(".card.completed .again")
    page.wait_for_selector("#pictures img")
    assert page.input_value("[name=seed]") == "5"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.fill("[name=seed]", "6")
    page.fill("[name=count]", "2")
    page.click("#make")
    page.wait_for_selector(":nth-match(.card.completed, 3)", timeout=120_000)
    third, second, first = [one for one in served.get("/v1/videos").json()["data"] if one["status"] == "completed"][:3]
    assert [one["settings"].pop("seed") for one in (first, second, third)] == [5, 6, 7]
    same = ("settings", "pictures", "scheduler")
    assert [third[name] for name in same] == [second[name] for name in same] == [first[name] for name in same]
    assert first["pictures"] == ["image"]
    page.on("dialog", lambda dialog: dialog.accept())
    page.click(f"[data-id={first['id']}] .remove")
    page.wait_for_selector(f"[data-id={first['id']}]", state="detached")
    assert served.get(f"/v1/videos/{first['id']}").status_code == 404
    for one in served.get("/v1/videos").json()["data"]:  # so that the next page begins without cards
        served.delete(f"/v1/videos/{one['id']}")
    assert all(url.startswith((str(served.base_url), "blob:")) for url in asked)
    page.close()
    assert not [line for line in told if "422" not in line]  # the browser notes the one bad request


def test_what_is_wrong_in_the_form(browser, served):
    """It is told before anything is sent, where it is: closed settings open, and fields of no use are not looked at."""
    page, sent = browser.new_page(), []
    refusal = {"error": {"message": "no cache of this name", "param": "cache"}}

    def answer(route):
        if route.request.method != "POST":
            return route.continue_()
        sent.append(route.request.post_data)
        return route.fulfill(status=422, json=refusal)

    def wrong(field, *words):
        page.click("#make")
        page.wait_for_selector(f"[name={field}][aria-invalid]:focus")
        assert says(page.inner_text("#told"), " ".join(words))

    page.route("**/v1/videos", answer)
    page.goto(str(served.base_url))
    page.fill("#prompt", PROMPT)
    page.wait_for_selector("#make:enabled")
    for value, words in {
        "5..1": "5..1 1..5",
        "0..30000000": "30000001 32",
        "1,99999999999999999999": "99999999999999999999 18446744073709551615",
        "many": "1,5,9 0..3",
    }.items():
        page.fill("[name=seed]", value)
        wrong("seed", words)
    page.fill("[name=seed]", "3,4")
    page.select_option("[name=size]", "other")
    page.fill("[name=width]", "33")
    page.fill("[name=height]", "32")
    wrong("width", "width")
    page.select_option("[name=size]", "")
    summary = page.locator("#ask summary")
    summary.click()
    page.fill("[name=frames]", "6")
    summary.click()
    wrong("frames", "frames")
    assert page.get_attribute("#ask details", "open") is not None
    assert sent == []
    page.fill("[name=frames]", "5")
    summary.click()
    wrong("cache", "cache name")
    assert page.get_attribute("#ask details", "open") is not None
    [body] = sent  # the first of two seeds was refused
    assert 'name="frames"' in body
    assert 'name="width"' not in body
    page.close()


STATES = """
window.states = [];
new MutationObserver(() => window.states.push(document.querySelector(".card .state")?.textContent))
  .observe(document.getElementById("videos"), { subtree: true, childList: true, characterData: true });
"""


@pytest.mark.slow
def test_a_video_of_windows_in_a_browser(browser, served):
    """The form has what windows need, the card tells the one under way, and the player has the frames of all."""
    page = browser.new_page()
    page.goto(str(served.base_url))
    page.click("#ask details summary")
    fields = {"prompt": PROMPT, "windows": 3, "then": "a red circle moving left", "frames": 5, "steps": 150, "seed": 5}
    page.select_option("[name=size]", "other")
    for name, value in (fields | {"width": 32, "height": 32}).items():
        page.fill(f"[name={name}]", str(value))
    page.evaluate(STATES)
    page.click("#make")
    page.wait_for_selector(".card.completed", timeout=300_000)
    states = page.evaluate("window.states")
    for window in (1, 2, 3):
        assert any(state and f"window {window} of 3, denoise: " in state for state in states)
    length = "player => new Promise(done => { player.onloadedmetadata = () => done(player.duration); player.load(); })"
    [made] = served.get("/v1/videos").json()["data"][:1]
    assert page.query_selector(".card video").evaluate(length) == pytest.approx(13 / made["settings"]["fps"], abs=0.05)
    page.reload()
    page.click(".card.completed .again")
    page.wait_for_selector("#ask details[open]")
    assert {name: page.input_value(f"[name={name}]") for name in fields} == {n: str(x) for n, x in fields.items()}
    served.delete(f"/v1/videos/{made['id']}")
    page.close()


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_the_client_of_openai(served, tmp_path):
    """It makes a video, waits for it, downloads, lists and deletes it, and says what was wrong."""
    client = openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none")
    with client:
        reference = ("red.png", picture()["buffer"], "image/png")
        asked = {"prompt": PROMPT, "size": "64x32", "extra_body": {"frames": 5, "steps": 2, "seed": 3}}
        made = client.videos.create_and_poll(**asked, input_reference=reference, poll_interval_ms=50)
        assert (made.status, made.size, made.seconds) == ("completed", "64x32", "0.625")
        client.videos.download_content(made.id).write_to_file(tmp_path / "made.mp4")
        assert read_metadata(tmp_path / "made.mp4")["seed"] == 3
        thumbnail = client.videos.download_content(made.id, variant="thumbnail").read()
        assert Image.open(io.BytesIO(thumbnail)).size == (64, 32)
        assert made.id in [video.id for video in client.videos.list(limit=1)]  # page by page
        with pytest.raises(openai.UnprocessableEntityError) as wrong:
            client.videos.create(prompt=PROMPT, size="33x32")
        assert wrong.value.body["message"]
        assert client.videos.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(made.id)


@pytest.mark.slow
def test_the_page_asks_for_the_token(browser, tmp_path):
    token = "a-token-of-the-tests"
    with serving(tmp_path, WANJAX_TOKEN=token) as (client, _):
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#login:visible")
        page.fill("#token", "wrong")
        page.click("#login button")
        page.wait_for_selector("#state:has-text('wrong')")
        page.fill("#token", token)
        page.click("#login button")
        page.wait_for_selector("#ask:visible")
        page.fill("#prompt", PROMPT)
        page.click("#make")
        page.wait_for_selector(".card.completed", timeout=120_000)
        page.close()


@pytest.mark.slow
def test_the_commands_of_the_documentation(tmp_path):
    page = blocks(ROOT / "docs/guides/server.md")
    [block] = [block for block in page if block.run == "run: server"]
    with serving(tmp_path / "served", "--no-rehearse") as (client, _):
        script = block.text.replace("localhost:8000", client.base_url.netloc.decode())
        subprocess.run(["bash", "-euc", script], check=True, stdout=subprocess.PIPE, cwd=tmp_path)
        videos = client.get("/v1/videos").json()["data"]
        assert [finished(client, video["id"])["status"] for video in videos] == ["completed"] * 2
    assert read_metadata(tmp_path / "circle.mp4")["steps"] == 4


def test_the_command_asks_a_server(served, tmp_path, monkeypatch):
    """`generate --at` writes the very file that this machine would make, and tells what only the server can choose."""
    monkeypatch.chdir(tmp_path)
    at = ("--at", str(served.base_url))
    small = ("--size", "32x32", "--frames", "5", "--steps", "2")
    succeeded(wanjax(PROMPT, *small, *at, "--out", "there.mp4"))
    succeeded(wanjax(PROMPT, *small, "--out", "here.mp4"))
    assert (tmp_path / "there.mp4").read_bytes() == (tmp_path / "here.mp4").read_bytes()
    assert read_metadata("there.mp4")["seed"] == 42
    Image.new("RGB", (64, 32), "red").save("wide.png")
    given = (*small, "--image", "wide.png", "--seed", "random")
    made = json.loads(succeeded(wanjax(PROMPT, *given, *at, "--json")).stdout)
    assert made["record"]["seed"] != 42
    assert made["record"]["image"].endswith("image.png")
    assert read_metadata(made["file"]) == made["record"]
    refusals = {
        "--dtype bfloat16": "--dtype bfloat16 float32",
        "--lora a.safetensors": "LoRA a none",
        "--model wan2.1-t2v-14b": "wan2.1-t2v-14b nano",
        "--frames 6": "6 frames 4n + 1",
        "--dir here": "--dir",
        "--out a.avi": "a.avi .mp4 .gif",
        "--out a.png": "a.png one",
    }
    for options, told in refusals.items():
        assert says(refused("a", *at, *options.split()), told)
    assert says(refused("a", "--at", "http://127.0.0.1:1", status=1), "http://127.0.0.1:1 refused")


def test_the_command_asks_a_server_for_what_it_makes_itself(served, tmp_path, monkeypatch):
    """A video again from its record, in other formats, and several of them: as without a server."""
    monkeypatch.chdir(tmp_path)
    at = ("--at", str(served.base_url))
    small = ("--size", "32x32", "--frames", "5", "--steps", "2")
    succeeded(wanjax(PROMPT, *small, "--seeds", "3,4", "--out", "here"))
    here = {file.name: file.read_bytes() for file in Path("here").glob("*.mp4")}
    assert len(here) == 2
    succeeded(wanjax(PROMPT, *small, "--seeds", "3,4", *at, "--out", "there"))
    assert {file.name: file.read_bytes() for file in Path("there").glob("*.mp4")} == here
    listed = [json.loads(line)["file_name"] for line in Path("there/manifest.jsonl").read_text().splitlines()]
    assert sorted(listed) == sorted(here)
    first = next(Path("here").glob("*-3-*.mp4"))
    succeeded(wanjax("generate", "--from", str(first), *at, "--out", "again.mp4"))
    assert Path("again.mp4").read_bytes() == first.read_bytes()
    frames = read_clip(first, 100, 8)
    for name in ("again.webp", "again.gif", "again/"):
        succeeded(wanjax("generate", "--from", str(first), *at, "--out", name))
        assert read_metadata(name) == read_metadata(first)
        assert len(read_clip(name.rstrip("/"), 100, 8)) == len(frames) == 5
    np.testing.assert_array_equal(read_clip("again", 100, 8), frames)


def test_ctrl_c_cancels_what_a_server_makes(served, tmp_path, monkeypatch):
    def pressed(report):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Report, "stop_if_asked", pressed)
    result = wanjax(PROMPT, "--steps", "200", "--at", str(served.base_url))
    assert result.exit_code == 130
    newest = served.get("/v1/videos?limit=1").json()["data"][0]
    assert finished(served, newest["id"])["error"]["code"] == "cancelled"
    assert list(tmp_path.iterdir()) == []
