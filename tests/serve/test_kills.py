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
MOST = 8  # videos there at a time


def listed(client: httpx.Client) -> Iterator[dict[str, Any]]:
    """Yield all videos, page by page."""
    page = {"has_more": True, "last_id": None}
    while page["has_more"]:
        after = {"after": page["last_id"]} if page["last_id"] else {}
        page = client.get("/v1/videos", params={"limit": 3, **after}).raise_for_status().json()
        yield from page["data"]


def is_given_up(video: dict[str, Any]) -> bool:
    """Return whether a video has failed because the server ended too often while it was made."""
    return video["status"] == "failed" and video["error"]["code"] == STOPPED


@dataclass
class Ledger:
    """What responses said: the videos that exist, with the bytes of those that were read, and those that do not.

    A request without a response, `pending`, may have been executed or not: the id to delete, or "" for a new video.
    """

    there: dict[str, bytes | None] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    pending: str | None = None

    def compare(self, client: httpx.Client) -> None:
        """Compare a server with its earlier responses, and note what became of the last request."""
        result = {video["id"]: video for video in listed(client)}
        assert not result.keys() & self.gone
        if self.pending and self.pending not in result:  # it was deleted
            self.gone.add(self.pending)
            del self.there[self.pending]
        lost = self.there.keys() - result.keys()
        assert not lost, (lost, result)
        new = result.keys() - self.there.keys()
        assert len(new) <= (self.pending == ""), (new, self.pending)
        self.there |= dict.fromkeys(new)
        self.pending = None
        for id, content in self.there.items():
            assert result[id]["status"] != "failed" or is_given_up(result[id])
            if content is not None:
                assert client.get(f"/v1/videos/{id}/content").content == content

    def ask(self, client: httpx.Client, choice: random.Random) -> None:
        """Send one request, and note its answer."""
        kind = choice.choice(["create", "create", "delete", "list", "read"])
        if kind == "create" and len(self.there) < MOST:
            self.pending = ""
            result = client.post(
                "/v1/videos", json=SMALL | {"seed": choice.randrange(99), "steps": choice.choice([2, 20])}
            )
            self.there[result.raise_for_status().json()["id"]] = None
        elif kind == "delete" and self.there:
            self.pending = choice.choice([*self.there])
            client.delete(f"/v1/videos/{self.pending}").raise_for_status()
            self.gone.add(self.pending)
            del self.there[self.pending]
        elif kind == "read":
            for id in [id for id, content in self.there.items() if content is None]:
                if client.get(f"/v1/videos/{id}").json()["status"] == "completed":
                    self.there[id] = client.get(f"/v1/videos/{id}/content").raise_for_status().content
        else:
            self.compare(client)
        self.pending = None


@pytest.mark.slow
def test_kills(tmp_path):
    choice, ledger, answers = random.Random(0), Ledger(), 0
    for _ in range(KILLS):
        with serving(tmp_path, "--no-rehearse") as (client, process):
            ledger.compare(client)
            kill = Timer(choice.uniform(0, 1.5), process.kill)
            kill.start()
            with suppress(httpx.TransportError):
                while True:
                    ledger.ask(client, choice)
                    answers += 1
            kill.join()
    print(f"{KILLS} kills, {answers} answers, {len(ledger.gone)} deleted, {len(ledger.there)} there")  # by `-rP`
    assert len(ledger.gone) > KILLS / 10
    with serving(tmp_path, "--no-rehearse") as (client, _):
        ledger.compare(client)
        ended = [wait_until_finished(client, id) for id in ledger.there]
        assert all(video["status"] == "completed" or is_given_up(video) for video in ended)
