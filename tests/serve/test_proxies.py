# SPDX-License-Identifier: Apache-2.0
"""The server behind nginx and Caddy, with the documented configuration: its page in a browser, and its access."""

import json
import time

import httpx
import pytest

from tests.support.commands import succeeded, wanjax
from tests.support.proxies import NGINX_1_29_7_LINES, NGINX_LINES, running_proxy
from tests.support.quick import quick
from tests.support.served import PROMPT, SMALL, serving
from tests.support.words import has_line_with_words

TOKEN = "a-token-of-the-tests"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
PROXIES = [(kind, prefix) for kind in ("nginx", "caddy") for prefix in ("/wan/", "/")]
STATES = """
window.states = new Set();
new MutationObserver(() => window.states.add(document.querySelector(".item .state")?.textContent.split(" ")[0]))
  .observe(document.querySelector("main"), { subtree: true, childList: true, characterData: true });
"""


@pytest.fixture(scope="module")
def with_token(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), "--no-rehearse", WANJAX_TOKEN=TOKEN) as (client, _):
        yield client


@pytest.fixture(scope="module")
def without_token(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), "--no-rehearse", WANJAX_TOKEN="") as (client, _):
        yield client


def test_events_pass_a_proxy_at_once(with_token, tmp_path):
    """nginx buffers a response unless the response forbids it."""
    with running_proxy("nginx", tmp_path, with_token.base_url.port) as url:
        requested = time.perf_counter()
        with httpx.stream("GET", f"{url}v1/events", headers=AUTHORIZED, timeout=60) as stream:
            assert stream.status_code == 200
            assert next(stream.iter_lines()).startswith("retry")
        assert time.perf_counter() - requested < 10  # the next keep-alive event comes after 15 seconds


@pytest.mark.parametrize(("kind", "prefix"), quick([("nginx", "/wan/")], PROXIES))
def test_the_page_works_behind_a_proxy(browser, with_token, tmp_path, monkeypatch, kind, prefix):
    """With the token, a video is requested, followed, played and deleted, all below the proxy's URL."""
    messages, requested = [], []
    with running_proxy(kind, tmp_path / "proxy", with_token.base_url.port, prefix) as url:
        assert httpx.get(f"{url}v1/videos").status_code == 401
        context = browser.new_context()
        page = context.new_page()
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(url)
        page.wait_for_selector("#login:visible")
        page.screenshot(path=tmp_path / "login.png")
        page.fill("#token", TOKEN)
        page.click("#login button")
        page.wait_for_selector("[name=shape]", state="attached")
        [cookie] = context.cookies()
        assert (cookie["path"].rstrip("/"), cookie["value"]) == (prefix.rstrip("/"), TOKEN)
        page.fill("#prompt", PROMPT)
        page.click(".drawer > summary")
        for name, value in {"frames": 5, "steps": 40, "seed": 1}.items():
            page.fill(f"[name={name}]", str(value))
        page.evaluate(STATES)
        page.click("#make")
        page.wait_for_selector(".card.completed", timeout=120_000)
        assert "step" in page.evaluate("[...window.states]")  # the page learns it from events only
        page.click(".card .open")
        player = page.wait_for_selector("dialog video")
        player.evaluate("player => player.play()")
        assert player.evaluate("player => [player.videoHeight, player.error]") == [64, None]
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        page.click("dialog .delete")
        page.wait_for_selector(".card", state="detached")
        end = time.monotonic() + 60  # the deletion can be undone for some seconds
        while httpx.get(f"{url}v1/videos", headers=AUTHORIZED).json()["data"] and time.monotonic() < end:
            time.sleep(0.1)
        assert httpx.get(f"{url}v1/videos", headers=AUTHORIZED).json()["data"] == []
        context.close()
        assert messages == []
        assert [address for address in requested if not address.startswith((url, "blob:"))] == []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("WANJAX_TOKEN", TOKEN)
        small = ("--size", "32x32", "--frames", "5", "--steps", "2")
        data = json.loads(succeeded(wanjax(PROMPT, *small, "--at", url, "--json")).stdout)
        assert httpx.delete(f"{url}v1/videos/{data['id']}", headers=AUTHORIZED).status_code == 200


@pytest.mark.parametrize(
    ("kind", "prefix", "lines"),
    quick([("nginx", "/wan/", NGINX_LINES)], [("nginx", "/wan/", NGINX_LINES), *((*each, None) for each in PROXIES)]),
)
def test_without_a_token_a_proxy_gives_no_access(without_token, tmp_path, kind, prefix, lines):
    """Also nginx without configured headers gives no access, though it sends the server's own name as Host."""
    with running_proxy(kind, tmp_path, without_token.base_url.port, prefix, lines) as url:
        for path in ("", "page/app.js", "health", "metrics", "v1/videos", "v1/models", "v1/events"):
            assert httpx.get(f"{url}{path}").status_code == 403, path
        assert httpx.post(f"{url}v1/videos", json=SMALL).status_code == 403
    assert without_token.get("/v1/videos").json()["data"] == []


def test_a_page_behind_a_proxy_without_headers_says_what_is_missing(browser, without_token, tmp_path):
    """Only the address of the page shows that a proxy is used."""
    with running_proxy("nginx", tmp_path, without_token.base_url.port, lines=NGINX_1_29_7_LINES) as url:
        context = browser.new_context()
        page = context.new_page()
        statuses = {}
        page.on("response", lambda result: statuses.setdefault(result.url.partition("/wan/")[2], result.status))
        page.goto(url.replace("127.0.0.1", "videos.example"))
        page.wait_for_selector("#state:has-text('--token')")
        page.screenshot(path=tmp_path / "page.png")
        assert has_line_with_words(page.inner_text("#state"), "'videos.example' proxy --token")
        assert page.query_selector("[name=shape]") is None  # nothing can be requested
        assert statuses["v1/models"] == 403
        fetch_videos = "fetch('v1/videos').then(answer => answer.status)"
        assert page.evaluate(fetch_videos) == 403
        page.goto(str(without_token.base_url))
        assert page.evaluate(fetch_videos) == 200
        context.close()
