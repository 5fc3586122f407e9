# SPDX-License-Identifier: Apache-2.0
"""Measure the web page of `wanjax serve` with many videos in Chromium: first paint, scrolling and size.

    python -m benchmarks.page [--videos 1000] [--chromium /usr/bin/chromium]

`nano` makes one video. The benchmark copies it under other ids in the database and in the folder. Then the page is
opened. The benchmark measures the seconds to the first paint and to the first pictures, and the longest task of the
browser's main thread while the page scrolls through all videos. It needs `playwright` and the extra `serve`.
"""

import argparse
import gzip
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from secrets import token_hex

import httpx
from playwright.sync_api import sync_playwright

from benchmarks.serving import SMALL_VIDEO, running_server, wait_for_video

PAGE = Path(__file__).parents[1] / "src/wanjax/serve/page"
TARGETS = {"first paint, s": 1.5, "longest task while scrolling, ms": 100.0, "compressed, kB": 120.0}
PICTURES_SHOWN = """
() => { const pictures = [...document.querySelectorAll(".card img")];
  return pictures.length >= 24 && pictures.slice(0, 8).every((one) => one.complete); }
"""
OBSERVE_LONG_TASKS = """
window.longest = 0;
const note = (one) => { window.longest = Math.max(window.longest, one.duration); };
new PerformanceObserver((list) => list.getEntries().forEach(note))
  .observe({ type: "longtask", buffered: false });
"""


def copy_video(folder: Path, count: int) -> None:
    """Copy the only finished video of a server's folder until there are `count` videos."""
    with sqlite3.connect(folder / "jobs.sqlite") as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
        row = dict(zip(columns, db.execute("SELECT * FROM jobs WHERE status = 'completed'").fetchone(), strict=True))
        for number in range(1, count):
            id = f"video_{token_hex(12)}"
            output = row["output"].replace(row["id"], id)
            new_row = row | {"id": id, "output": output, "position": row["position"] - number}
            new_row |= {"created_at": row["created_at"] - number, "version": row["version"] - number}
            db.execute(
                f"INSERT INTO jobs VALUES ({', '.join('?' * len(columns))})", [new_row[name] for name in columns]
            )
            shutil.copytree(folder / row["id"], folder / id)


def measure(url: str, chromium: str, count: int) -> dict[str, float]:
    """Open the page, and scroll through all of its videos."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        start = time.perf_counter()
        page.goto(url)
        page.wait_for_function(PICTURES_SHOWN)
        pictures = time.perf_counter() - start
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        page.evaluate(OBSERVE_LONG_TASKS)
        start = time.perf_counter()
        while page.locator(".card").count() < count:
            page.mouse.wheel(0, 2000)
            page.wait_for_timeout(30)
            if time.perf_counter() - start > 300:
                raise SystemExit(f"{page.locator('.card').count()} of {count} videos were shown in 300 s")
        scroll_seconds, longest_task = time.perf_counter() - start, page.evaluate("window.longest")
        browser.close()
    return {"first paint, s": paint, "first pictures, s": pictures, "scrolled through, s": scroll_seconds,
            "longest task while scrolling, ms": longest_task}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=1000)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder) / "served"
        with running_server(folder) as (url, _), httpx.Client(base_url=url, timeout=120) as client:
            wait_for_video(
                client, client.post("/v1/videos", json=SMALL_VIDEO | {"prompt": "a red circle"}).json()["id"]
            )
        copy_video(folder, options.videos)
        with running_server(folder) as (url, _):
            figures = measure(url, options.chromium, options.videos)
    files = [file for file in PAGE.rglob("*") if file.suffix in (".js", ".css", ".html", ".svg")]
    figures["compressed, kB"] = sum(len(gzip.compress(file.read_bytes())) for file in files) / 1000
    for name, value in figures.items():
        bar = f", at most {TARGETS[name]:g}: {'met' if value <= TARGETS[name] else 'missed'}" if name in TARGETS else ""
        print(f"{name}: {value:.2f}{bar}")


if __name__ == "__main__":
    main()
