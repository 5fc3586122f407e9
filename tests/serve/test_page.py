# SPDX-License-Identifier: Apache-2.0
"""The page of `wanjax serve` in a real browser: everything that a user does with it."""

import base64
import gzip
import io
import json
import re
import shlex
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

from tests.support.documents import ROOT
from tests.support.quick import quick
from tests.support.served import PROMPT, serving
from tests.support.video_files import write_clip
from tests.support.warm import wanjax
from tests.support.words import has_line_with_words
from tests.support.workflows import TEMPLATES, request_of

PAGE = ROOT / "src/wanjax/serve/page"
MAX_BYTES = 120_000  # bytes of the page, compressed
SMALL_FORM = {"frames": "5", "steps": "2"}


@pytest.fixture(scope="module")
def server_client(tmp_path_factory):
    """A client of one server for all tests, with an empty compilation cache and a planned model."""
    folder = tmp_path_factory.mktemp("page")
    caches = {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla"), "XDG_CACHE_HOME": str(folder / "cache")}
    wanjax(folder, "plan", "nano", "--chip", "cpu")
    with serving(folder / "videos", "--no-rehearse", **caches) as (client, _):
        yield client


@pytest.fixture(scope="module")
def video_ids(server_client):
    """Two small videos, made by the server's interface."""
    ids = []
    for number, prompt in enumerate((PROMPT, "a blue square growing")):
        body = {"prompt": prompt, "size": "64x32", "frames": 5, "steps": 2, "seed": number + 5}
        ids.append(server_client.post("/v1/videos", json=body).json()["id"])
    wait_until(lambda: all(server_client.get(f"/v1/videos/{id}").json()["status"] == "completed" for id in ids))
    return ids


VISIBLE_TEXT = """
() => ["#state", ".wrong", ".toasts p", ".question", "#make", ".source", ".asked", ".item", ".card", "dialog"]
  .flatMap((selector) => [...document.querySelectorAll(selector)].map((one) => `${selector}: ${one.innerText}`))
  .filter((line) => !/: $/.test(line)).join("\\n")
"""


class Tab:
    """A page in a new tab. It collects the errors of scripts and the requests."""

    def __init__(self, browser, server_client, **how):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900} | how.pop("viewport", {}), **how)
        self.page, self.script_errors, self.requests = self.context.new_page(), [], []
        self.page.on("pageerror", lambda error: self.script_errors.append(str(error)))
        self.page.on("console", lambda line: self.script_errors.append(line.text) if line.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append((request.method, request.url)))
        self.url = str(server_client.base_url)

    def goto(self):
        self.page.goto(self.url)
        self.page.wait_for_selector("[name=shape]", state="attached")
        return self.page

    def print_state(self):
        """Print the visible text of the page; pytest shows it if the test fails."""
        if self.page.url.startswith(self.url):
            print(self.page.evaluate(VISIBLE_TEXT), *self.script_errors, *self.requests[-20:], sep="\n")

    def request_urls(self, method="POST"):
        return [url for verb, url in self.requests if verb == method]


@pytest.fixture
def new_tab(browser, server_client, tmp_path):
    """A function that opens tabs. At the end, each tab is saved as a picture and checked for errors."""
    tabs = []

    def open_tab(**how):
        tabs.append(Tab(browser, server_client, **how))
        return tabs[-1]

    yield open_tab
    for number, tab in enumerate(tabs):
        tab.print_state()
        tab.page.screenshot(path=tmp_path / f"tab{number}.png")
        tab.context.close()
        assert not [line for line in tab.script_errors if not re.search(r"\b(4\d\d|503)\b|ERR_", line)], (
            tab.script_errors
        )
        assert all(url.startswith((tab.url, "blob:", "data:")) for _, url in tab.requests)


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def fill_small_form(page, **more):
    """Fill the form for a very small video."""
    if not page.is_visible(".presets"):
        page.click(".drawer > summary")
    if not page.is_checked("[name=shape][value=own]"):
        page.check("[name=shape][value=own]", force=True)
    for name, value in ({"width": "64", "height": "32"} | SMALL_FORM | more).items():
        page.fill(f"[name={name}]", value)


def picture(colour=(200, 30, 30)):
    file = io.BytesIO()
    Image.new("RGB", (64, 32), colour).save(file, "PNG")
    return {"name": "red.png", "mimeType": "image/png", "buffer": file.getvalue()}


DISPATCH_FILE = """
([selector, kind, name, type, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))], name, { type }));
  const how = { dataTransfer: data, clipboardData: data, bubbles: true, cancelable: true };
  document.querySelector(selector).dispatchEvent(new { drop: DragEvent, paste: ClipboardEvent }[kind](kind, how));
}
"""


OVERFLOWING = """
() => { const right = document.querySelector(".composer").getBoundingClientRect().right;
  return [...document.querySelectorAll(".composer :is(input, select, textarea, button)")]
    .filter((one) => one.getBoundingClientRect().right > right).map((one) => one.name || one.outerHTML); }
"""


IN_VIEW = """
(selectors) => selectors.every((selector) => { const box = document.querySelector(selector)?.getBoundingClientRect();
  return box && box.top >= 0 && box.bottom <= innerHeight; })
"""


def base64_of(data):
    return base64.b64encode(data).decode()


def wait_for_completed_card(page, prompt):
    return page.wait_for_selector(f".card.completed:has-text('{prompt}')", timeout=300_000)


@pytest.mark.parametrize("scheme", quick(["light"], ["light", "dark"]))
def test_each_view_is_accessible(new_tab, video_ids, scheme):
    """Axe-core checks the page, the drawer, a mistake, the viewer, the filled form, and a comparison."""
    axe = Axe()
    tab = new_tab(color_scheme=scheme)
    page = tab.goto()

    def check(view):
        result = axe.run(page).response["violations"]
        assert not result, (
            view,
            [(violation["id"], [node["target"] for node in violation["nodes"]]) for violation in result],
        )

    page.wait_for_selector(".card.completed")
    check("plain")
    page.click(".drawer > summary")
    page.click(".expert > summary")
    check("drawer")
    page.click("#make")
    page.wait_for_selector(".question")
    check("question")
    page.fill("#prompt", PROMPT)
    page.fill("#seed", "5..1")
    page.click("#make")
    page.wait_for_selector(".seed .wrong")
    check("wrong")
    page.click(".card.completed .open")
    page.wait_for_selector("dialog[open] video")
    page.click(".details > summary")
    check("viewer")
    page.click("dialog .extend")
    page.wait_for_selector(".source img")
    assert page.is_visible(".windows")
    check("filled by an action")
    page.set_input_files("#file-request", str(WORKFLOW))
    page.wait_for_selector(".filled")
    check("filled by a file")
    page.click("#select")
    for card in page.query_selector_all(".card.completed .open")[:2]:
        card.click()
    check("selection")
    page.click("#compare")
    page.wait_for_selector(".compared[open]")
    check("compare")


@pytest.mark.parametrize(("width", "height"), quick([(1280, 900)], [(1280, 900), (320, 640), (3840, 2160)]))
def test_a_video_is_made_from_a_text(new_tab, server_client, width, height):
    """The video is cancelled while it compiles, then made, shown, copied and deleted, and the deletion is undone."""
    tab = new_tab(viewport={"width": width, "height": height}, permissions=["clipboard-read", "clipboard-write"])
    page = tab.goto()
    page.fill("#prompt", "a green triangle moving up")
    fill_small_form(
        page, seed="7", frames={1280: "9", 320: "13", 3840: "17"}[width]
    )  # no other test compiles these shapes
    assert page.evaluate(OVERFLOWING) == []
    page.click("#make")
    page.wait_for_selector(".item.in_progress:has-text('preparing')", timeout=60_000)
    assert not page.is_visible(".item .left")  # the estimate excludes compilation
    page.click(".item .cancel")
    page.wait_for_selector(".item .cancel:enabled", state="detached", timeout=1000)
    page.wait_for_selector(".card.failed:has-text('cancelled')", timeout=120_000)
    page.fill("[name=frames]", "5")
    page.press("#prompt", "Control+Enter")
    card = wait_for_completed_card(page, "a green triangle moving up")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    card.query_selector(".open").click()
    player = page.wait_for_selector("dialog video")
    wait_until(lambda: player.evaluate("player => player.videoHeight") == 32)
    page.click(".details > summary")
    page.click(".copy_command")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == "wanjax 'a green triangle moving up' --model nano --seed 7 --size 64x32 --frames 5 --steps 2"
    page.click(".copy_json")
    request = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert request == {"prompt": "a green triangle moving up", "model": "nano", "seed": 7, "size": "64x32"} | {
        "frames": 5,
        "steps": 2,
    }
    page.click(".copy_python")
    assert 'seed=7, size="64x32", frames=5, steps=2)' in page.evaluate("navigator.clipboard.readText()")
    id = card.get_attribute("data-id")
    page.click("dialog .delete")
    page.wait_for_selector("dialog", state="detached")  # the dialog closes, so no other video is under the button
    page.wait_for_selector(f"[data-id={id}]", state="detached")
    page.click(".undo")
    page.wait_for_selector(f"[data-id={id}]")
    assert server_client.get(f"/v1/videos/{id}").status_code == 200
    page.click(f"[data-id={id}] .open")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Delete")
    page.wait_for_selector(f"[data-id={id}]", state="detached")
    page.goto("about:blank")  # the page is left before the deletion is sent
    tab.goto().wait_for_selector(f"[data-id={id}]")
    assert "DELETE" not in [verb for verb, _ in tab.requests]
    server_client.delete(f"/v1/videos/{id}")


def test_a_deletion_is_undone_while_another_video_is_open(new_tab, server_client, video_ids):
    """The undo works by keyboard at once, and by a click while another dialog is open."""
    page = new_tab().goto()
    for open_another in (False, True):
        page.click(f"[data-id={video_ids[0]}] .open")
        page.wait_for_selector("dialog[open] video")
        page.keyboard.press("Delete")
        page.wait_for_selector("dialog", state="detached")
        page.wait_for_selector(f"[data-id={video_ids[0]}]", state="detached")
        if open_another:
            page.click(f"[data-id={video_ids[1]}] .open")
            page.wait_for_selector("dialog[open] video")
            page.click("dialog .undo")
            assert page.is_visible("dialog[open]")
            page.keyboard.press("Escape")
        else:
            page.wait_for_selector(".undo:focus")
            page.keyboard.press("Enter")
        page.wait_for_selector(f"[data-id={video_ids[0]}]")
    page.wait_for_selector(".toasts p", state="detached")
    assert server_client.get(f"/v1/videos/{video_ids[0]}").status_code == 200


def test_pictures_are_dropped_pasted_or_chosen(new_tab, server_client):
    """The form shows a thumbnail and its size, and can remove it. The field refuses other files."""
    tab = new_tab(permissions=["clipboard-read", "clipboard-write"])
    page = tab.goto()
    file = picture()
    page.evaluate(DISPATCH_FILE, [".composer", "drop", file["name"], file["mimeType"], base64_of(file["buffer"])])
    page.wait_for_selector("[data-input=image] .thumbnail img")
    assert "64 × 32" in page.wait_for_selector("[data-input=image] .thumbnail small:not(:empty)").inner_text()
    assert page.is_checked("[name=shape][value=picture]")
    page.click("[data-input=image] .thumbnail button")
    page.wait_for_selector("[data-input=image] .thumbnail", state="detached")
    page.evaluate(DISPATCH_FILE, ["#prompt", "paste", file["name"], file["mimeType"], base64_of(file["buffer"])])
    page.wait_for_selector("[data-input=image] .thumbnail img")
    page.evaluate(DISPATCH_FILE, [".composer", "drop", "a.txt", "text/plain", base64_of(b"text")])
    assert has_line_with_words(
        page.wait_for_selector(".go .refused").inner_text(), "a.txt picture PNG JPEG WebP clip MP4 MKV"
    )
    page.evaluate(DISPATCH_FILE, ["[data-input=image]", "drop", "a.txt", "text/plain", base64_of(b"text")])
    message = page.wait_for_selector("[data-input=image] .wrong").inner_text()
    assert has_line_with_words(message, "a.txt picture PNG JPEG WebP First")
    page.set_input_files("#file-image", {"name": "README.md", "mimeType": "text/markdown", "buffer": b"# text"})
    assert "README.md" in page.wait_for_selector("[data-input=image] .wrong:has-text('README.md')").inner_text()
    page.fill("#prompt", "a red circle moving up")
    fill_small_form(page, seed="3")
    page.click("#make")
    page.wait_for_selector("#file-image[aria-invalid]:focus")  # the refused file stays in the form, and nothing is sent
    page.click("[data-input=image] .refused button")
    page.wait_for_selector("[data-input=image] .wrong", state="detached")
    page.evaluate(DISPATCH_FILE, [".composer", "drop", "a.txt", "text/plain", base64_of(b"text")])
    page.wait_for_selector(".go .refused")
    page.click("#make")
    page.wait_for_selector(".go .refused button:focus")
    assert tab.request_urls() == []
    page.keyboard.press("Enter")
    page.wait_for_selector(".refused", state="detached")
    page.evaluate(DISPATCH_FILE, ["[data-input=image]", "drop", "circle.mp4", "video/mp4", base64_of(b"clip")])
    page.wait_for_selector("[data-input=image] .wrong:has-text('circle.mp4')")
    page.set_input_files("#file-image", file)  # another file replaces a refused one
    page.wait_for_selector(".refused", state="detached")
    page.click("#make")
    id = wait_for_completed_card(page, "a red circle moving up").get_attribute("data-id")
    video = server_client.get(f"/v1/videos/{id}").json()
    assert video["pictures"] == ["image"]
    assert server_client.get(f"/v1/videos/{id}/content", params={"variant": "image"}).content == file["buffer"]
    page.click(f"[data-id={id}] .open")
    page.click(".details > summary")
    assert server_client.get(f"/v1/videos/{id}/record").json()["image"] == "image.png"
    assert page.get_attribute(".made-from a:has-text('image.png')", "download") == "image.png"
    copies = {}
    for form in ("command", "json", "python"):
        page.click(f".copy_{form}")
        copies[form] = page.evaluate("navigator.clipboard.readText()")
    assert shlex.split(copies["command"])[-2:] == ["--image", "image.png"]
    assert json.loads(copies["json"])["image"] == "image.png"
    assert 'image="image.png")  # uploaded: image.png\n' in copies["python"]
    page.click("dialog .close")
    server_client.delete(f"/v1/videos/{id}")


def test_copied_settings_have_all_settings_that_change_the_frames(new_tab):
    """Clips, references, LoRAs, the precision and the resizing are copied in all three forms."""
    video = {"prompt": "a", "model": "m", "size": "64x64", "scheduler": None}
    video |= {"settings": {"seed": "7", "width": 64, "height": 64, "resize": "pad", "precision": "int8"}}
    video |= {"inputs": {"video": "clip.mp4", "references": ["references_0.png", "references_1.png"]}}
    video |= {"lora": [{"name": "style", "strength": 0.5}]}
    model = {"defaults": {"width": 64, "height": 64, "resize": "crop"}}
    forms = "({ commandOf, jsonOf, pythonOf }) => [commandOf, jsonOf, pythonOf].map((form) => form(...given))"
    page = new_tab().goto()
    command, request, code = page.evaluate(f"(given) => import('./page/viewer.js').then({forms})", [video, model])
    references = "--reference references_0.png --reference references_1.png"
    assert command == (
        f"wanjax 'a' --model m --seed 7 --resize pad --precision int8 --lora style:0.5 --video clip.mp4 {references}"
    )
    settings = {"prompt": "a", "model": "m", "seed": 7, "resize": "pad", "precision": "int8", "lora": "style:0.5"}
    assert json.loads(request) == settings | video["inputs"]
    assert 'load("m", precision="int8", lora=["style:0.5"])' in code
    assert (
        'pipe("a", seed=7, resize="pad", video="clip.mp4", references=["references_0.png","references_1.png"])' in code
    )


WORKFLOW = TEMPLATES / "video_wan2_2_14B_i2v.json"


def test_a_workflow_fills_the_form(new_tab):
    """A workflow is chosen by keyboard or dropped. Unused settings are listed, and an unsupported one is refused."""
    tab = new_tab()
    tab.page.on("filechooser", lambda chooser: None)  # prevents Chromium's own file dialog
    page = tab.goto()
    page.focus("[name=shape]:checked")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "file-request"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(str(WORKFLOW))
    filled = page.wait_for_selector(".filled").inner_text()
    assert filled.startswith("The form contains the settings of video_wan2_2_14B_i2v.json.")
    for words in ("wan2.2-i2v-a14b", "nano", "guidance scale 2", "choose video_wan2_2_14B_i2v_input_image.jpg"):
        assert words in filled
    assert not page.evaluate(OVERFLOWING)
    assert page.input_value("#prompt").startswith("The white dragon warrior")
    assert page.input_value("#seed") == str(nodes_seed(WORKFLOW))
    assert [page.input_value(f"[name={side}]") for side in ("width", "height")] == ["640", "640"]
    page.click(".drawer > summary")
    page.click(".expert > summary")
    assert [page.input_value(f"[name={name}]") for name in ("steps", "sigmas", "rng", "scheduler")] == [
        *("20", "comfy", "torch", "euler"),
    ]
    page.click(".filled button")
    page.wait_for_selector(".filled", state="detached")
    assert page.evaluate("document.activeElement.id") == "file-request"
    dancer = TEMPLATES / "video_wan_dancer.json"
    page.evaluate(
        DISPATCH_FILE, [".composer", "drop", "dancer.json", "application/json", base64_of(dancer.read_bytes())]
    )
    assert has_line_with_words(page.wait_for_selector(".request .wrong").inner_text(), "dancer.json WanDancerVideo")
    assert page.input_value("#seed") == str(nodes_seed(WORKFLOW))  # the form has not changed
    page.evaluate(
        DISPATCH_FILE, [".composer", "drop", "again.json", "application/json", base64_of(WORKFLOW.read_bytes())]
    )
    page.wait_for_selector(".filled:has-text('again.json')")
    assert not page.query_selector(".request .wrong")


def nodes_seed(workflow):
    """Return the seed of the sampler that adds noise."""
    return request_of(json.loads(workflow.read_text())).settings["seed"]


def test_a_video_of_wanjax_fills_the_form(new_tab, server_client, video_ids):
    page = new_tab().goto()
    content = server_client.get(f"/v1/videos/{video_ids[0]}/content").content
    page.evaluate(DISPATCH_FILE, [".request", "drop", "film.mp4", "video/mp4", base64_of(content)])
    assert page.wait_for_selector(".filled").inner_text().startswith("The form contains the settings of film.mp4.")
    assert (page.input_value("#prompt"), page.input_value("#seed")) == (PROMPT, "5")
    assert [page.input_value(f"[name={side}]") for side in ("width", "height")] == ["64", "32"]
    assert not page.query_selector(".filled li")
    page.evaluate(DISPATCH_FILE, [".composer", "drop", "film.mp4", "video/mp4", base64_of(content)])
    page.wait_for_selector("[data-input=video] .thumbnail video")  # dropped here, a video is a clip for the model


def test_again_vary_extend_and_last_frame_fill_the_form(new_tab, server_client, video_ids):
    """Each fills the form from a video: unchanged, with the next seeds, longer, or with its last frame."""
    tab = new_tab()
    page = tab.goto()

    def click_action(name):
        page.click(f"[data-id={video_ids[0]}] .open")
        page.click(f"dialog .{name}")
        page.wait_for_selector("dialog", state="detached")

    page.wait_for_selector(".card.completed")
    click_action("again")
    wait_until(lambda: page.input_value("#prompt") == PROMPT)
    assert page.input_value("#seed") == "5"
    page.click(".drawer > summary")
    values = {name: page.input_value(f"[name={name}]") for name in ("width", "height", "frames", "steps")}
    assert values == {"width": "64", "height": "32", "frames": "5", "steps": "2"}
    click_action("vary")
    wait_until(lambda: (page.input_value("#seed"), page.input_value("#count")) == ("6", "4"))
    assert has_line_with_words(page.inner_text("#make"), "4 variations")
    assert page.is_visible(".source img")
    click_action("extend")
    wait_until(lambda: page.input_value("[name=windows]") == "2")
    assert (page.input_value("#seed"), page.input_value("#count")) == ("5", "1")
    page.fill("[name=then]", "a red circle moving left")
    click_action("last_frame")
    wait_until(lambda: page.input_value("#seed") == "")
    assert not page.is_visible(".windows")
    click_action("extend")
    page.fill("[name=then]", "a red circle moving left")
    assert has_line_with_words(page.inner_text("#make"), "longer")
    page.click("#make")
    wait_until(lambda: server_client.get("/v1/videos").json()["data"][0]["settings"]["windows"] == 2)
    longer_video = server_client.get("/v1/videos").json()["data"][0]
    page.wait_for_selector(f".card.completed[data-id={longer_video['id']}]", timeout=300_000)
    assert (longer_video["settings"]["seed"], longer_video["settings"]["then"]) == (5, "a red circle moving left")
    wait_until(
        lambda: not page.is_visible(".windows") and page.input_value("#seed") == ""
    )  # the form is reset for the next video
    assert "parts" in page.inner_text(f"[data-id={longer_video['id']}] .marks")
    click_action("extend")
    page.click(".windows")
    assert page.input_value("[name=windows]") == "1"
    click_action("last_frame")
    page.wait_for_selector("[data-input=image] .thumbnail img")
    assert "64 × 32" in page.wait_for_selector("[data-input=image] .thumbnail small:not(:empty)").inner_text()
    for video in server_client.get("/v1/videos").json()["data"]:
        if video["id"] not in video_ids:
            server_client.delete(f"/v1/videos/{video['id']}")


def test_seeds_of_vary_are_used_once(new_tab, server_client, video_ids):
    """A second press does not repeat a video. On a phone, the new videos are shown beside the button."""
    page = new_tab(viewport={"width": 400, "height": 800}).goto()
    before = {video["id"] for video in server_client.get("/v1/videos").json()["data"]}
    page.click(f"[data-id={video_ids[0]}] .open")
    page.click("dialog .vary")
    page.wait_for_selector(".source img")
    page.click("#make:has-text('4')")
    page.wait_for_selector(".go .asked:visible")
    wait_until(lambda: (page.input_value("#seed"), page.input_value("#count")) == ("", "1"))
    assert not page.is_visible(".source")
    new = [video for video in server_client.get("/v1/videos").json()["data"] if video["id"] not in before]
    assert sorted(video["settings"]["seed"] for video in new) == [6, 7, 8, 9]
    for video in new:
        page.wait_for_selector(f".card.completed[data-id={video['id']}]", timeout=120_000)
    page.click(".asked .see")
    page.wait_for_selector("dialog[open] video")
    for video in new:
        server_client.delete(f"/v1/videos/{video['id']}")


BUTTON_POSITIONS = """
(seconds) => new Promise((resolve) => {
  const places = new Set(), end = performance.now() + 1000 * seconds;
  const look = () => {
    const { x, y } = document.getElementById("make").getBoundingClientRect();
    if (!document.querySelector("dialog")) places.add(`${Math.round(x)} ${Math.round(y)}`);
    if (performance.now() < end) requestAnimationFrame(look);
    else resolve([...places]);
  };
  document.querySelector("dialog .vary").click();
  look();
})
"""


def test_the_button_does_not_move_after_it_appears(new_tab, video_ids):
    """When the dialog has closed, neither scrolling nor a late picture moves the button."""
    page = new_tab(viewport={"width": 400, "height": 800}).goto()
    page.click(f"[data-id={video_ids[0]}] .open")
    page.wait_for_selector("dialog[open] video")
    page.evaluate("document.querySelector('.right').style.minHeight = '3000px'")
    page.evaluate("scrollTo(0, 2000)")
    assert page.evaluate("scrollY") == 2000
    positions = page.evaluate(BUTTON_POSITIONS, 1.5)
    assert len(positions) == 1
    page.evaluate("document.querySelector('.source img').removeAttribute('src')")  # the picture has not arrived yet
    assert (
        page.evaluate(BUTTON_POSITIONS.replace('document.querySelector("dialog .vary").click();', ""), 0.1) == positions
    )


def test_a_request_during_a_reload_of_the_list_stays(new_tab, server_client, video_ids):
    """The list of videos may be older than a video that the page has requested meanwhile."""
    tab = new_tab(viewport={"width": 400, "height": 800})
    page, lists = tab.page, []

    def hold_second(route):
        lists.append((route, route.fetch()))
        if len(lists) == 1:
            route.fulfill(response=lists[0][1])

    page.route("**/v1/videos?*", hold_second)
    tab.goto()
    wait_until(lambda: page.evaluate("1") and len(lists) > 1)
    page.fill("#prompt", "a green circle")
    fill_small_form(page)
    page.click("#make")
    page.wait_for_selector(".go .asked:visible")
    lists[1][0].fulfill(response=lists[1][1])
    wait_for_completed_card(page, "a green circle")
    assert page.is_visible(".go .asked")
    [video] = [video for video in server_client.get("/v1/videos").json()["data"] if video["prompt"] == "a green circle"]
    server_client.delete(f"/v1/videos/{video['id']}")


def test_a_scrolled_page_links_to_the_running_job(new_tab, server_client, video_ids):
    """Running jobs are above the finished videos and stay in view; their notes are shown."""
    tab = new_tab(viewport={"width": 1280, "height": 500}, reduced_motion="reduce")
    page = tab.goto()
    page.evaluate("document.querySelector('.right').style.minHeight = '3000px'")  # the height of many videos
    fill_small_form(page)
    page.fill("#prompt", "a green dog")
    page.evaluate("scrollTo(0, 400)")
    assert page.evaluate("scrollY") == 400
    page.click("#make")
    page.wait_for_function(IN_VIEW, arg=[".item:has(.prompt)", "#queue-title"])
    card = wait_for_completed_card(page, "a green dog")
    card.query_selector(".open").click()
    page.wait_for_selector("dialog[open] .about")
    assert has_line_with_words(page.inner_text("dialog .about"), "nano does not know 'dog'")
    [video] = [video for video in server_client.get("/v1/videos").json()["data"] if video["prompt"] == "a green dog"]
    server_client.delete(f"/v1/videos/{video['id']}")


def test_a_prompt_stays_after_a_reload_and_a_broken_picture_is_reported_by_its_label(new_tab, server_client):
    page = new_tab().goto()
    page.fill("#prompt", "a green circle")
    page.reload()
    page.wait_for_selector("[name=shape]", state="attached")
    wait_until(lambda: page.input_value("#prompt") == "a green circle")
    page.set_input_files("#file-image", {"name": "red.png", "mimeType": "image/png", "buffer": b"no picture"})
    page.click("#make")
    page.wait_for_selector(".wrong:has-text('First picture is not a picture')")


@pytest.fixture
def longer_video(server_client):
    """A video of twice the frames."""
    body = {"prompt": PROMPT, "size": "64x32", "frames": 9, "steps": 2, "seed": 5}
    id = server_client.post("/v1/videos", json=body).json()["id"]
    wait_until(lambda: server_client.get(f"/v1/videos/{id}").json()["status"] == "completed")
    yield id
    server_client.delete(f"/v1/videos/{id}")


@pytest.mark.parametrize("width", quick([1280], [1280, 400]))
def test_videos_of_two_lengths_are_compared_in_real_time(new_tab, video_ids, longer_video, width):
    """The shorter video waits at its end. The button Close is not over the button Delete."""
    page = new_tab(viewport={"width": width, "height": 900}).goto()
    page.wait_for_selector(f".card.completed[data-id={longer_video}]")
    page.click("#select")
    for id in (video_ids[0], longer_video):
        page.click(f"[data-id={id}] .open")
    page.click("#compare")
    players = page.query_selector_all(".compared video")
    wait_until(lambda: all(player.evaluate("player => player.readyState >= 2") for player in players))
    short, long = (player.evaluate("player => player.duration") for player in players)
    assert short < long
    page.click(".compared .toggle")
    wait_until(lambda: players[1].evaluate("player => player.paused"))

    def times():
        return [player.evaluate("player => player.currentTime") for player in players]

    page.fill(".compared [type=range]", f"{short / 2:.2f}")
    wait_until(lambda: times() == pytest.approx([short / 2, short / 2], abs=0.1))
    page.fill(".compared [type=range]", f"{(short + long) / 2:.2f}")
    wait_until(lambda: times() == pytest.approx([short, (short + long) / 2], abs=0.1))
    close, delete = (page.query_selector(selector).bounding_box() for selector in (".compared .close", "#delete"))
    assert close["x"] > delete["x"] + delete["width"] or close["y"] > delete["y"] + delete["height"]


def test_keys_change_the_video_and_two_videos_play_in_step(new_tab, video_ids):
    tab = new_tab()
    page = tab.goto()
    page.wait_for_selector(".card.completed >> nth=1")
    page.click(f"[data-id={video_ids[1]}] .open")
    page.wait_for_selector("dialog[open] video")
    assert "blue" in page.inner_text("dialog .prompt")
    page.keyboard.press("ArrowRight")
    wait_until(lambda: "blue" not in page.inner_text("dialog .prompt"))
    page.keyboard.press("ArrowLeft")
    wait_until(lambda: "blue" in page.inner_text("dialog .prompt"))
    page.focus("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.click("#select")
    for id in video_ids:
        page.click(f"[data-id={id}] .open")
    assert "2" in page.inner_text(".chosen")
    page.click("#compare")
    players = page.query_selector_all(".compared video")
    wait_until(lambda: all(player.evaluate("player => player.readyState >= 2") for player in players))
    before = players[0].evaluate("player => player.currentTime")
    wait_until(lambda: players[0].evaluate("player => player.currentTime") != before)
    times = [player.evaluate("player => player.currentTime / player.duration") for player in players]
    distance = abs(times[0] - times[1])
    assert min(distance, 1 - distance) < 0.25  # they play in a loop
    page.keyboard.press("Escape")


def test_the_page_works_by_keyboard_alone(new_tab, video_ids):
    """Enter opens a card, the dialog keeps the focus and returns it, and an arrow key chooses a shape."""
    page = new_tab(reduced_motion="reduce").goto()
    page.wait_for_selector(".card.completed >> nth=1")
    page.focus(f"[data-id={video_ids[0]}] .open")
    assert page.query_selector(".card video") is None  # no video plays with reduced motion
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] video")
    for _ in range(30):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.closest('.card').dataset.id") == video_ids[0]
    page.focus("[name=shape]:checked")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("[name=width]")


def test_videos_are_searched_by_words(new_tab, video_ids):
    page = new_tab().goto()
    page.wait_for_selector(".card.completed >> nth=1")
    page.fill("#find", "BLUE gro")
    wait_until(lambda: [card.get_attribute("data-id") for card in page.query_selector_all(".card")] == [video_ids[1]])
    page.fill("#find", "no such words")
    page.wait_for_selector(".empty")
    page.fill("#find", "")
    page.wait_for_selector(".card.completed >> nth=1")


def test_an_empty_prompt_has_to_be_confirmed(new_tab, server_client):
    tab = new_tab()
    page = tab.goto()
    page.fill("#prompt", "  ")
    fill_small_form(page)
    page.click("#make")
    page.wait_for_selector(".question")
    assert tab.request_urls() == []
    page.click(".question button >> nth=0")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.click("#make")
    page.click(".question button >> nth=1")
    wait_until(lambda: len(tab.request_urls()) == 1)
    wait_until(lambda: server_client.get("/v1/videos").json()["data"][0]["prompt"] == "")
    server_client.delete(f"/v1/videos/{server_client.get('/v1/videos').json()['data'][0]['id']}")


WRONG_VALUES = {
    "seed": {
        "5..1": "5..1 1..5",
        "0..30000000": "30000001 32",
        "1,99999999999999999999": "18446744073709551615",
        "many": "many",
    },
    "count": {"1000": "1000 32", "x": "x number", "2.5": "2.5 whole", "0": "0 1"},
    "width": {"33": "33 32 48", "": "Width", "x": "x number"},
    "height": {"-16": "-16 16"},
    "frames": {"6": "6 5 9", "999": "999 at most", "0": "0 1", "many": "many number", "5.5": "5.5 whole"},
    "steps": {"0": "0 1", "201": "201 200", "1.5": "1.5 whole", "": "number"},
    "guidance_scale": {"-1": "-1 0", "nan": "nan number"},
    "fps": {"0": "0 1", "241": "241 240"},
    "windows": {"0": "0 1", "1001": "1001 1000"},
    "flow_shift": {"0": "0"},
}


def test_mistakes_are_shown_at_their_fields(new_tab, server_client):
    """For every field: nothing is sent, a closed drawer opens, and the field gets the focus."""
    tab = new_tab()
    page = tab.goto()
    page.fill("#prompt", PROMPT)
    page.click(".drawer > summary")
    page.check("[name=shape][value=own]", force=True)
    page.click(".expert > summary")
    valid = {"width": "64", "height": "32", "seed": "3"}
    for name, value in valid.items():
        page.fill(f"[name={name}]", value)
    for field, values in WRONG_VALUES.items():
        before = page.input_value(f"[name={field}]")
        for value, words in values.items():
            page.fill(f"[name={field}]", value)
            if field == "flow_shift":
                page.click(".expert > summary")
            if page.is_visible(".presets"):
                page.click(".drawer > summary")
            page.click("#make")
            page.wait_for_selector(f"[name={field}][aria-invalid]:focus")
            message = page.locator(f"#wrong-{field}")
            assert has_line_with_words(message.inner_text(), words), (field, value, message.inner_text())
            if not page.is_visible(".presets"):
                page.click(".drawer > summary")
        page.fill(f"[name={field}]", before)
    assert tab.request_urls() == []
    page.route("**/v1/videos", lambda route: route.fulfill(
        status=422, json={"error": {"message": "no cache of this name", "param": "cache"}}
    ) if route.request.method == "POST" else route.continue_())  # fmt: skip
    page.select_option("[name=cache]", "\0")
    page.fill("[name=cache-own]", "nothing")
    page.click(".drawer > summary")
    page.click("#make")
    page.wait_for_selector("[name=cache][aria-invalid]:focus")
    assert "no cache of this name" in page.inner_text("[data-setting=cache] .wrong")


def test_a_drawer_shows_and_undoes_changed_settings(new_tab):
    page = new_tab().goto()
    page.click(".drawer > summary")
    page.fill("[name=steps]", "9")
    page.click(".expert > summary")
    page.select_option("[name=scheduler]", "euler")
    assert "2" in page.inner_text(".drawer > summary")
    assert page.locator(".setting.changed").count() == 2
    assert "20" in page.inner_text("[data-setting=steps] .own")
    page.click("[data-preset=draft]")
    assert page.input_value("[name=steps]") == "8"
    assert page.get_attribute("[data-preset=draft]", "aria-pressed") == "true"
    page.fill("[name=guidance_scale]", "1")
    assert not page.is_visible("[name=negative_prompt]")
    page.click(".reset")
    assert page.input_value("[name=steps]") == "20"
    assert page.locator(".setting.changed").count() == 0


def test_a_reload_keeps_the_form_without_its_files(new_tab, server_client, video_ids):
    """Settings, shape, seed and open sections stay, also after a reset; a file must be chosen again."""
    tab = new_tab()
    page = tab.goto()
    page.fill("#prompt", PROMPT)
    page.fill("#seed", "5..7")
    page.set_input_files("#file-image", [picture()])
    page.wait_for_selector("[data-input=image] .thumbnail img")
    fill_small_form(page, steps="9")
    page.click(".expert > summary")
    page.select_option("[name=scheduler]", "euler")
    page.reload()
    page.wait_for_selector(".expert [name=scheduler]")
    names = ("prompt", "seed", "width", "height", "frames", "steps", "scheduler", "count")
    values = [page.input_value(f"[name={name}]") for name in names]
    assert values == [PROMPT, "5..7", "64", "32", "5", "9", "euler", "3"]
    assert page.is_checked("[name=shape][value=own]")
    assert page.query_selector(".thumbnail") is None
    assert has_line_with_words(page.inner_text("[data-input=image] .lost"), "choose again")
    page.set_input_files("#file-image", [picture()])
    page.wait_for_selector("[data-input=image] .lost", state="detached")
    page.click(".reset")
    page.click(".expert > summary")
    page.reload()
    page.wait_for_selector("[name=steps]")
    assert page.input_value("[name=steps]") == "20"
    assert page.input_value("#prompt") == PROMPT
    assert not page.is_visible("[name=scheduler]")
    assert new_tab().goto().input_value("#prompt") == ""  # another tab has an empty form


def test_previews_are_shown_while_a_video_is_made(new_tab, server_client):
    page = new_tab().goto()
    page.fill("#prompt", "a green square moving left")
    fill_small_form(page, steps="200")
    page.click("#make")
    wait_until(lambda: page.evaluate("document.querySelector('.in_progress .preview')?.naturalWidth > 0"))
    id = wait_for_completed_card(page, "a green square moving left").get_attribute("data-id")
    server_client.delete(f"/v1/videos/{id}")


@pytest.mark.slow  # test_a_scrolled_page_links_to_the_running_job has a quick note, test_videos.py this one
def test_a_warning_about_a_picture_with_a_clip_is_shown_with_its_video(new_tab, server_client, tmp_path):
    clip = write_clip(tmp_path / "fast.mp4").read_bytes()
    body = {"prompt": "a picture and a clip", "size": "64x32", "frames": "5", "steps": "2"}
    files = {"image": picture()["buffer"], "video": clip}
    id = server_client.post("/v1/videos", data=body, files=files).raise_for_status().json()["id"]
    wait_until(lambda: server_client.get(f"/v1/videos/{id}").json()["status"] == "completed")
    page = new_tab().goto()
    page.click(f"[data-id={id}] .open")
    assert has_line_with_words(page.wait_for_selector("dialog .note").inner_text(), "picture clip together")
    server_client.delete(f"/v1/videos/{id}")


def test_the_form_shows_the_estimates_of_plan(new_tab):
    """The estimates are shown until the server has made a video."""
    tab = new_tab()
    none = {"object": "list", "data": [], "has_more": False}
    tab.page.route("**/v1/videos?*", lambda route: route.fulfill(json=none))
    page = tab.goto()
    page.click(".drawer > summary")
    has_line_with_words(page.inner_text("[data-preset=published]"), "20 steps estimated")
    seconds = [page.inner_text(f"[data-preset={name}] .cost") for name in ("published", "draft")]
    assert all(re.search(r"\d+ s, estimated", text) for text in seconds)
    assert seconds[0] != seconds[1]
    has_line_with_words(page.inner_text(".go .cost"), "estimated")
    page.check("[name=shape][value=own]", force=True)
    for width, has_time in (("0", False), ("33", False), ("64", True)):  # invalid sizes have no estimate
        page.fill("[name=width]", width)
        page.fill("[name=height]", "32")
        wait_until(lambda has_time=has_time: (page.locator(".cost:has-text('estimated')").count() > 0) == has_time)


def test_two_tabs_and_a_reload_show_the_same_job(new_tab, server_client):
    first, second = new_tab(), new_tab()
    page, second_page = first.goto(), second.goto()
    page.fill("#prompt", "an orange cross moving right")
    fill_small_form(page, steps="150", seed="1")
    page.click("#make")
    second_page.wait_for_selector(".item:has-text('orange')")
    page.reload()
    page.wait_for_selector(".item:has-text('orange')")
    for each in (page, second_page):
        card = wait_for_completed_card(each, "orange")
    id = card.get_attribute("data-id")
    server_client.delete(f"/v1/videos/{id}")
    for each in (page, second_page):
        each.wait_for_selector(f"[data-id={id}]", state="detached")


@pytest.mark.slow
def test_the_page_reconnects_to_a_restarted_server(browser, tmp_path):
    with serving(tmp_path, "--no-rehearse") as (client, process):
        port = client.base_url.port
        tab = Tab(browser, client)
        page = tab.goto()
        page.fill("#prompt", "kept while it is away")
        process.terminate()
        process.wait(60)
        page.wait_for_selector("#state:has-text('again')")
        page.fill("#prompt", "still here")
        page.click("#make")
        page.wait_for_selector("#message:has-text('does not answer')")
        box = page.locator("#message").bounding_box()
        assert box["y"] + box["height"] <= page.viewport_size["height"]  # visible without scrolling
    with serving(tmp_path, "--no-rehearse", "--port", str(port)):
        page.wait_for_selector("#state:has-text('nano')", timeout=60_000)
        assert page.input_value("#prompt") == "still here"
        page.wait_for_selector("#message:empty", state="attached")
        fill_small_form(page)
        page.click("#make")
        wait_for_completed_card(page, "still here")
    tab.context.close()


def test_a_prompt_typed_before_the_server_responds_stays(new_tab):
    """The prompt stays, nothing is requested yet, and the button says why."""
    tab, held_routes = new_tab(), []
    page = tab.page
    page.route("**/v1/models", lambda route: held_routes.append(route))
    page.goto(tab.url)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#message:not(:empty)")
    wait_until(lambda: held_routes)
    held_routes[0].continue_()
    page.wait_for_selector("[name=shape]", state="attached")
    assert page.input_value("#prompt") == PROMPT
    assert tab.request_urls() == []


def test_both_languages_have_every_text(new_tab):
    page = new_tab(locale="zh-CN").goto()
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert page.inner_text("#make") == "生成视频"
    texts = page.evaluate("import('./page/texts.js').then(({ TEXTS }) => TEXTS)")
    assert texts["zh"].keys() == texts["en"].keys()
    for key, text in texts["en"].items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", texts["zh"][key])), key
    page.select_option("#language", "en")
    wait_until(lambda: page.inner_text("#make") == "Make a video")
    page.reload()
    page.wait_for_selector("[name=shape]", state="attached")
    assert page.inner_text("#make") == "Make a video"


def test_the_page_is_small_and_loads_nothing_from_elsewhere():
    files = [file for file in PAGE.rglob("*") if file.suffix in (".js", ".css", ".html", ".svg")]
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) < MAX_BYTES
    for file in files:
        if file.parent == PAGE:
            assert not re.search(r"https?://(?!www\.w3\.org)", file.read_text(encoding="utf-8")), file


@pytest.mark.slow
def test_the_page_asks_for_the_token(browser, tmp_path):
    with serving(tmp_path, WANJAX_TOKEN="a-token-of-the-tests") as (client, _):
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.fill("#token", "wrong")
        page.click("#login button")
        page.wait_for_selector("#login .wrong:has-text('wrong')")
        page.fill("#token", "a-token-of-the-tests")
        page.click("#login button")
        page.wait_for_selector("[name=shape]", state="attached")
        page.fill("#prompt", PROMPT)
        page.click("#make")
        wait_for_completed_card(page, PROMPT)
        page.close()
