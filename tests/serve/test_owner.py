# SPDX-License-Identifier: Apache-2.0
"""Several workers and fronts around one table, without Ray: what is lost where one dies, and what each sees."""

import asyncio
import pickle
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import SMALL
from tests.support.commands import files, refused
from tests.support.stores import forget
from tests.support.words import naming, says
from wanjax.errors import WanjaxError
from wanjax.serve.app import Service
from wanjax.serve.board import ClosedError, UnknownError
from wanjax.serve.desk import Desk
from wanjax.serve.faults import explained
from wanjax.serve.guard import Access
from wanjax.serve.jobs import VIDEO, Job
from wanjax.serve.limits import Limits
from wanjax.serve.mirror import Mirror
from wanjax.serve.owner import TRIES, AwayError, Load, Orders, Owner
from wanjax.serve.replicas import DOWN, UP, Scale
from wanjax.serve.shelf import Shelf
from wanjax.serve.variants import Variants
from wanjax.serve.worker import Worker
from wanjax.stores.places import Place, place

MADE: dict[str, Any] = {"height": 32, "width": 32, "frames": 5, "fps": 8, "model": "nano", "prompt": "a red circle"}


class House:
    """An owner on an event loop of its own, which can be killed and started again, and the way to it."""

    def __init__(self, folder: Place, table: Path | None = None):
        self.folder, self.table = folder, table
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.owner: Owner | None = None
        self.back = Event()
        self.start()

    def start(self, service: str = "s-") -> None:
        self.owner = Owner(self.folder, self.table, 32, service)
        self.back.set()

    def kill(self) -> None:
        """Ends the owner as a kill does: what waits for it hears nothing."""
        owner, self.owner = self.owner, None
        self.back.clear()

        async def leave() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            if owner is not None:
                owner.shelf.close()

        asyncio.run_coroutine_threadsafe(leave(), self.loop).result()

    def call(self, method: str, *given: Any) -> Any:
        """Calls the owner; a call whose answer is lost is sent again, as Ray does."""
        while self.back.wait(20):
            sent, owner = pickle.loads(pickle.dumps(given)), self.owner  # nothing is shared by processes

            async def answer(owner: Any = owner, sent: Any = sent) -> Any:
                if owner is not self.owner:
                    raise asyncio.CancelledError
                return await getattr(owner, method)(*sent)

            with suppress(CancelledError):
                return pickle.loads(pickle.dumps(asyncio.run_coroutine_threadsafe(answer(), self.loop).result()))
        raise AwayError

    def ask(self, seed: int = 0) -> str:
        """Puts a video on the board, and returns its id."""
        job = Job(self.call("make_place"), MADE | {"seed": seed})
        self.call("change", "add", job)
        return job.id

    def job(self, id: str) -> Job:
        assert self.owner is not None
        return self.owner.board.jobs[id]

    def close(self) -> None:
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    """One whose videos are in a folder, or in the store that a parameter names."""
    store = getattr(request, "param", None)
    made = House(place(store), tmp_path) if store else House(tmp_path / "served")
    yield made
    made.close()
    forget()


def taken(house: House, worker: str) -> str | None:
    job = house.call("take", worker).job
    return job and job.id


def test_each_worker_has_a_video_of_its_own(house):
    ids = [house.ask(seed) for seed in range(3)]
    assert [taken(house, worker) for worker in ("s-1", "s-2")] == ids[:2]
    assert house.call("load") == Load(1, 2)
    house.call("finish", "s-1", ids[0], {"seconds": {"decode": 2.0}}, "completed", None)
    assert taken(house, "s-1") == ids[2]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(taken, house, "s-3")
        later = house.ask()
        assert waiting.result(10) == later
    assert house.call("since", 0, "front", {}).seconds == {"decode": 2.0}


def test_the_video_of_a_worker_that_died_waits_before_the_others(house):
    ids = [house.ask(seed) for seed in range(2)]
    assert taken(house, "s-1") == ids[0]
    assert not house.call("lose", "s-9")  # before it was ready
    assert house.call("lose", "s-1")
    assert house.call("take", "s-1") == Orders(closed=True)  # a call of it that was under way
    assert taken(house, "s-2") == ids[0]
    house.call("finish", "s-1", ids[0], {}, "failed", {"code": "late", "message": ""})
    assert house.call("advance", "s-1", ids[0], 50, {}).cancelled
    assert house.job(ids[0]).status == "in_progress"
    Path(str(house.folder), ids[0], VIDEO).write_bytes(b"a whole video")
    house.call("lose", "s-2")  # before it could tell
    assert house.job(ids[0]).status == "completed"


def test_deaths_are_no_fault_of_a_video_but_not_for_ever(house):
    id = house.ask()
    for number in range(TRIES):
        assert house.job(id).status == "queued"
        assert taken(house, f"s-{number}") == id
        house.call("advance", f"s-{number}", id, 0, {})
        house.call("lose", f"s-{number}")
    assert house.job(id).status == "failed"
    assert says(house.job(id).error["message"], f"worker {TRIES}")


def test_a_worker_that_was_dead_already_costs_a_video_no_try(house):
    """It died while it waited for a video, which is given to it before its death is known."""
    id = house.ask()
    for number in range(TRIES):
        assert taken(house, f"s-{number}") == id
        house.call("lose", f"s-{number}")
    assert (house.job(id).status, house.job(id).tries) == ("queued", 0)
    desk = Desk(house.call, "s-9", house.folder)
    assert desk.take() is not None
    desk.closed = True
    house.call("lose", "s-9")
    assert house.job(id).tries == 1


def test_an_owner_that_died_finds_its_workers_at_work(house):
    ids = [house.ask(seed) for seed in range(2)]
    assert taken(house, "s-1") == ids[0]
    house.kill()
    house.start()
    assert house.job(ids[0]).status == "in_progress"
    assert not house.call("advance", "s-1", ids[0], 50, {"stage": "denoise"}).cancelled
    assert taken(house, "s-1") == ids[0]  # as the answer to a call that was sent again
    assert taken(house, "s-2") == ids[1]
    house.call("finish", "s-1", ids[0], {}, "completed", None)
    assert house.job(ids[0]).status == "completed"


def test_a_service_that_died_begins_its_videos_anew(house):
    id = house.ask()
    assert taken(house, "s-1") == id
    house.kill()
    house.start("t-")
    assert house.job(id).status == "queued"
    assert house.call("advance", "s-1", id, 50, {}).cancelled
    assert taken(house, "t-1") == id


def test_what_is_under_way_waits_where_the_service_ends(house):
    ids = [house.ask(seed) for seed in range(2)]
    assert taken(house, "s-1") == ids[0]
    house.call("close")
    assert house.call("advance", "s-1", ids[0], 0, {}).closed
    house.call("give_back", "s-1", ids[0])
    assert house.call("take", "s-1") == Orders(closed=True)
    with pytest.raises(ClosedError):
        house.ask()
    house.kill()
    house.start("t-")
    assert [taken(house, f"t-{number}") for number in range(2)] == ids
    assert house.job(ids[0]).tries == 1


def test_calls_that_are_sent_again_are_obeyed_once(house):
    board = Mirror(house.call, house.folder, 32)
    board.follow()
    job = Job(house.call("make_place"), MADE | {"seed": 1})
    assert [board.add(job).id for _ in range(2)] == [job.id] * 2
    assert house.call("load").waiting == 1
    house.call("change", "remove", job.id)
    board.remove(job.id)  # by one who saw it
    assert not Path(str(house.folder), job.id).exists()
    board.renew()
    with pytest.raises(UnknownError):
        board.remove(job.id)


def test_a_copy_forgets_what_went_while_it_looked_away(house):
    board = Mirror(house.call, house.folder, 32)
    ids = [house.ask(seed) for seed in range(2)]
    board._apply(board._news())
    house.call("change", "remove", ids[0])
    house.kill()
    house.start()
    board._apply(board._news())
    assert [*board.jobs] == [ids[1]]
    assert board.since(board.version - 1)[2] == [ids[0]]


def test_a_copy_tells_the_place_of_a_video_that_was_found_before_it_was_renewed(house):
    board = Mirror(house.call, house.folder, 32)
    ids = [house.ask(seed) for seed in range(2)]
    board._apply(board._news())
    job = board.find(ids[1])
    assert board.position(job) == 1
    taken(house, "s-1")
    house.call("finish", "s-1", ids[0], {}, "completed", None)
    board._apply(board._news())
    assert board.position(job) == 0


def test_a_worker_goes_on_telling_after_an_error(house):
    failures = [RuntimeError("of whatever kind")]

    def call(method: str, *given: Any) -> Any:
        if method == "advance" and given[2] and failures:
            raise failures.pop()
        return house.call(method, *given)

    id, desk = house.ask(), Desk(call, "s-1", house.folder)
    job = desk.take()
    assert job is not None
    desk.advance(job, 50)
    end = monotonic() + 20
    while house.job(id).progress < 50 and monotonic() < end:
        sleep(0.05)
    assert (house.job(id).progress, failures) == (50, [])


def test_errors_of_the_table_are_known_elsewhere(house):
    assert house.owner is not None
    house.owner.shelf._table.execute("PRAGMA query_only = ON")
    with pytest.raises(Exception, match=VIDEO.partition(".")[0]) as raised:
        house.ask()
    assert explained(raised.value, ()).status == 507
    house.owner.shelf._table.execute("PRAGMA query_only = OFF")


def test_workers_come_and_go_with_what_waits():
    scale = Scale(1, 4)
    assert scale.wanted(Load(9, 1), 0) == 1
    assert scale.wanted(Load(0, 1), UP / 2) == 1  # it was short
    assert scale.wanted(Load(2, 1), UP) == 1
    assert scale.wanted(Load(2, 1), 2 * UP) == 3
    assert scale.wanted(Load(9, 3), 2 * UP) == 3
    assert scale.wanted(Load(9, 3), 3 * UP) == 4
    assert scale.wanted(Load(0, 0), 3 * UP) == 4
    assert scale.wanted(Load(0, 0), 3 * UP + DOWN) == 1


def test_workers_without_work_are_dismissed(house):
    id = house.ask()
    assert taken(house, "s-1") == id
    with ThreadPoolExecutor() as pool:
        idle = pool.submit(house.call, "take", "s-2")
        while house.call("dismiss", 2) != ["s-2"]:
            pass
        assert idle.result(10).closed
    house.call("finish", "s-1", id, {}, "completed", None)
    house.ask()
    assert taken(house, "s-1")


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.parametrize("house", [None, "memory://videos/served"], ids=["a folder", "a store"], indirect=True)
def test_fronts_and_workers_apart_are_one_server(house, pipe):
    """Two fronts and a worker; the owner dies while it is at work."""
    worker = Worker(Variants(pipe), Desk(house.call, "s-1", house.folder), warm_up=False)
    told = pickle.loads(pickle.dumps(worker.told()))
    clients = []
    for _ in range(2):
        board = Mirror(house.call, house.folder, 32)
        board.follow()
        limits = Limits.of(told.outlines[0].defaults)
        application = Service(board, told.known(), told.models, limits, Access()).application()
        clients.append(TestClient(application, "http://localhost:8000", client=("127.0.0.1", 5000)))
    one, other = clients
    assert one.get("/health").json()["status"] == "loading"
    ids = [one.post("/v1/videos", json=SMALL | {"seed": seed}).json()["id"] for seed in range(3)]
    assert [other.get(f"/v1/videos/{id}").status_code for id in ids] == [200] * 3
    assert "33" in one.post("/v1/videos", json=SMALL | {"size": "33x32"}).json()["error"]["message"]
    assert other.delete(f"/v1/videos/{ids[2]}").status_code == 200
    worker.start()
    house.kill()
    assert other.get(f"/v1/videos/{ids[0]}").status_code == 200  # by the copy
    house.start()
    for id in ids[:2]:
        last = other.get(f"/v1/videos/{id}/events").text.strip().splitlines()[-1]
        assert '"status": "completed"' in last
        assert one.get(f"/v1/videos/{id}/content").content[4:8] == b"ftyp"
        assert one.get(f"/v1/videos/{id}/record").json()["prompt"] == SMALL["prompt"]
    assert one.get("/health").json()["status"] == "ready"
    assert 'wanjax_videos_total{status="completed"} 2' in one.get("/metrics").text
    house.call("close")
    assert worker.join(60)
    ending = one.post("/v1/videos", json=SMALL)
    assert (ending.status_code, ending.headers["retry-after"]) == (503, "30")
    assert other.get("/v1/models").json() == one.get("/v1/models").json()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("given", ["0", "4..2", "many", "1..", "-1", "0..3"])
def test_numbers_of_workers_that_are_none(given, elsewhere):
    assert says(refused("serve", "--replicas", given), f"{given} 1..4")


def test_what_is_for_workers_of_ray_alone(elsewhere):
    assert says(refused("serve", "--resources", "cpu=1"), "--resources --replicas")


def test_a_table_is_on_no_network(tmp_path, monkeypatch):
    mounts = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path / "own"), "xfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    with pytest.raises(WanjaxError, match=naming(f"{tmp_path / 'served'} nfs4 --table")):
        Shelf(tmp_path / "served")
    apart = Shelf(tmp_path / "served", tmp_path / "own" / "table")
    assert sorted(files(tmp_path / "own" / "table"))[-1] == "videos.sqlite-wal"
    apart.close()


def test_replicas_without_ray(monkeypatch, elsewhere):
    from wanjax.cluster import actors

    monkeypatch.setattr(actors, "find_spec", lambda name: None)
    assert says(refused("serve", "--replicas", "2"), "'wanjax[cluster]'")
