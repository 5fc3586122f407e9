# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve` killed at random moments, again and again: no accepted job is lost, no deleted one returns."""

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Timer
from typing import Any

import httpx
import pytest

from tests.support.served import SMALL, serving, wait_until_finished
from wanjax.jobs.store import STOPPED

KILLS = int(os.environ.get("KILLS", "60"))
MAX_VIDEOS = 8  # videos that exist at a time


def list_videos(client: httpx.Client) -> Iterator[dict[str, Any]]:
    """Yield all videos, page by page."""
    page = {"has_more": True, "last_id": None}
    while page["has_more"]:
        after = {"after": page["last_id"]} if page["last_id"] else {}
        page = client.get("/v1/videos", params={"limit": 3, **after}).raise_for_status().json()
        yield from page["data"]


def is_given_up(video: dict[str, Any]) -> bool:
    """Return whether a video has failed because the server was killed too often while it made the video."""
    return video["status"] == "failed" and video["error"]["code"] == STOPPED


@dataclass
class Ledger:
    """The state of a server by its responses: existing videos, with the bytes of some, and deleted videos.

    `pending` is a request without a response, which may have been executed: the id to delete, or "" for a new video.
    """

    existing: dict[str, bytes | None] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    pending: str | None = None

    def compare(self, client: httpx.Client) -> None:
        """Compare a server with its earlier responses, and add the effect of the pending request."""
        result = {video["id"]: video for video in list_videos(client)}
        assert not result.keys() & self.deleted
        if self.pending and self.pending not in result:  # it was deleted
            self.deleted.add(self.pending)
            del self.existing[self.pending]
        lost = self.existing.keys() - result.keys()
        assert not lost, (lost, result)
        new = result.keys() - self.existing.keys()
        assert len(new) <= (self.pending == ""), (new, self.pending)
        self.existing |= dict.fromkeys(new)
        self.pending = None
        for id, content in self.existing.items():
            assert result[id]["status"] != "failed" or is_given_up(result[id])
            if content is not None:
                assert client.get(f"/v1/videos/{id}/content").content == content

    def send_request(self, client: httpx.Client, choice: random.Random) -> None:
        """Send one random request, and add its response."""
        kind = choice.choice(["create", "create", "delete", "list", "read"])
        if kind == "create" and len(self.existing) < MAX_VIDEOS:
            self.pending = ""
            result = client.post(
                "/v1/videos", json=SMALL | {"seed": choice.randrange(99), "steps": choice.choice([2, 20])}
            )
            self.existing[result.raise_for_status().json()["id"]] = None
        elif kind == "delete" and self.existing:
            self.pending = choice.choice([*self.existing])
            client.delete(f"/v1/videos/{self.pending}").raise_for_status()
            self.deleted.add(self.pending)
            del self.existing[self.pending]
        elif kind == "read":
            for id in [id for id, content in self.existing.items() if content is None]:
                if client.get(f"/v1/videos/{id}").json()["status"] == "completed":
                    self.existing[id] = client.get(f"/v1/videos/{id}/content").raise_for_status().content
        else:
            self.compare(client)
        self.pending = None


@pytest.mark.slow
def test_random_kills_lose_no_accepted_video(tmp_path):
    choice, ledger, num_responses = random.Random(0), Ledger(), 0
    for _ in range(KILLS):
        with serving(tmp_path, "--no-rehearse") as (client, process):
            ledger.compare(client)
            kill = Timer(choice.uniform(0, 1.5), process.kill)
            kill.start()
            with suppress(httpx.TransportError):
                while True:
                    ledger.send_request(client, choice)
                    num_responses += 1
            kill.join()
    # pytest -rP prints it
    print(f"{KILLS} kills, {num_responses} responses, {len(ledger.deleted)} deleted, {len(ledger.existing)} existing")
    assert len(ledger.deleted) > KILLS / 10
    with serving(tmp_path, "--no-rehearse") as (client, _):
        ledger.compare(client)
        finished = [wait_until_finished(client, id) for id in ledger.existing]
        assert all(video["status"] == "completed" or is_given_up(video) for video in finished)
