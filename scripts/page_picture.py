# SPDX-License-Identifier: Apache-2.0
"""Make docs/pictures/page.png again: the web page of a server with `nano`, its videos, and a video in progress.

Start `wanjax serve` with an empty `--dir`, then run `python scripts/page_picture.py http://localhost:8000`.
"""

import io
import shutil
import sys
import time
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "docs/pictures/page.png"
PROMPTS = (
    "a red circle moving right",
    "a blue square growing",
    "a green triangle moving up",
    "an orange cross moving right",
    "a yellow bar shrinking",
)
COLOURS = 128  # of the palette; this makes the file four times smaller


def make_videos(client: httpx.Client) -> None:
    """Make a video of each prompt."""
    ids = [
        client.post("/v1/videos", json={"prompt": prompt, "seed": number}).raise_for_status().json()["id"]
        for number, prompt in enumerate(PROMPTS, 1)
    ]
    while any(client.get(f"/v1/videos/{id}").json()["status"] != "completed" for id in ids):
        time.sleep(0.5)


def screenshot(url: str) -> bytes:
    """Request a long video on the page, and return a screenshot of the page during the video's steps."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 820}, color_scheme="light", locale="en")
        page.goto(url)
        page.wait_for_selector(".card.completed")
        page.fill("#prompt", "a green square moving left")
        page.click(".drawer > summary")
        page.fill("[name=steps]", "200")
        page.click(".drawer > summary")
        page.click("#make")
        while not page.evaluate("document.querySelector('.in_progress .preview')?.naturalWidth > 0"):
            time.sleep(0.05)
        page.evaluate("scrollTo(0, 0)")
        page.focus("#prompt")
        return page.screenshot()


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], timeout=60) as client:
        make_videos(client)
    image = Image.open(io.BytesIO(screenshot(sys.argv[1]))).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
