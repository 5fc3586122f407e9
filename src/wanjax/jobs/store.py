# SPDX-License-Identifier: Apache-2.0
"""The database of jobs, which servers, batches and workers use directly.

Every method is one transaction and may be repeated, so one whose answer was lost is sent again. A job is the worker's
that leased it until the worker finishes it, gives it back, or is not heard of for its lease. A worker's name is used
by one process once, so one whose lease ended cannot speak for a job that is another's now. Time is the database's:
clocks of hosts do not matter.

Jobs, workers and counts are those of a place, the folder that all who share them have (`wanjax.jobs.sharing`): a
database may have many places, whose users see nothing of each other.

Each change has a version, in the order of the commits, since the row that counts them is locked until the commit. That
lock is taken before any other: in another order two transactions would wait for each other. A version is at least the
time in microseconds: a database that crashed may have lost its last changes, whose versions others have read already,
and which no other change may have.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

from wanjax.errors import WanjaxError, reason
from wanjax.figures import quantity
from wanjax.jobs.databases import Connection, DatabaseError, Values, has_no_room, open_database, without_password

ARRIVING, QUEUED, RUNNING = "arriving", "queued", "in_progress"
COMPLETED, FAILED, REMOVED = "completed", "failed", "removed"
CANCELLED, STOPPED = "cancelled", "server_stopped"  # codes of errors
CANCELLATION = {"code": CANCELLED, "message": "the video was cancelled"}
TTL = 30.0  # seconds after which a worker that is not heard of has lost its jobs
PATIENCE, RETRY = 5.0, 0.2  # seconds for which a database that is away is tried again, and between two tries
KEPT_FAILURES = 200
KEPT_REMOVED = 86_400.0  # seconds for which a removed job's row is kept, for those who watch
KEPT_ARRIVING = 3600.0  # seconds that the files of a job may take to arrive
LONGEST_QUEUE = 1000  # jobs whose places in the queue are counted
SEARCHED = 500  # jobs that a search reads at a time
HELD = "place = :place AND worker != ''"  # as the index of the few jobs that workers have says it
T = TypeVar("T")

MIGRATIONS = [  # never edit one, append: the schema's version is how many of them were run
    """
    CREATE TABLE clock (version BIGINT NOT NULL);
    INSERT INTO clock VALUES (1);
    CREATE TABLE places (id TEXT PRIMARY KEY);
    CREATE TABLE jobs (
        place TEXT NOT NULL,
        id TEXT NOT NULL,
        position BIGINT NOT NULL,           -- in the queue: the version at which the job was added
        status TEXT NOT NULL,
        model TEXT NOT NULL,
        batch TEXT NOT NULL,                -- digest of all in which the jobs of one run have to agree
        request TEXT NOT NULL,              -- JSON, as all that is opaque to the database
        output TEXT NOT NULL,               -- the video's name below the folder that is the place
        worker TEXT NOT NULL DEFAULT '',
        attempts INTEGER NOT NULL DEFAULT 0,
        cancel INTEGER NOT NULL DEFAULT 0,
        progress TEXT NOT NULL DEFAULT '{}',
        error TEXT,
        created_at DOUBLE PRECISION NOT NULL,
        completed_at DOUBLE PRECISION,      -- also when it was removed
        version BIGINT NOT NULL,
        PRIMARY KEY (place, id)
    );
    CREATE INDEX jobs_queue ON jobs (place, status, position);
    CREATE INDEX jobs_position ON jobs (place, position);
    CREATE INDEX jobs_version ON jobs (place, version);
    CREATE INDEX jobs_held ON jobs (place, worker, position) WHERE worker != '';
    CREATE TABLE workers (                  -- the lease is the worker's: one heartbeat keeps all its jobs
        name TEXT PRIMARY KEY,
        place TEXT NOT NULL,                -- '' until the worker has found it
        state TEXT NOT NULL,
        facts TEXT NOT NULL,
        draining INTEGER NOT NULL DEFAULT 0,
        expires DOUBLE PRECISION NOT NULL
    );
    CREATE TABLE counters (
        place TEXT NOT NULL,
        name TEXT NOT NULL,
        value DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (place, name)
    )
    """
]


class Unavailable(WanjaxError):
    """A database that does not answer for a while."""


class QueueFull(Exception):
    """A queue that takes no further job.

    Args:
        limit: How many may wait.
    """

    def __init__(self, limit: int):
        super().__init__(f"{quantity(limit, 'video')} in the queue, as many as this server lets wait: try again later")
        self.limit = limit

    def __reduce__(self) -> Any:
        return QueueFull, (self.limit,)


class NotFound(LookupError):
    """An id that no job has."""


class Signal(Enum):
    """The answer to a heartbeat."""

    CONTINUE = "continue"
    CANCEL = "cancel"  # the job
    DRAIN = "drain"  # give the jobs back, and end
    LOST = "lost"  # the job is another worker's, or gone


@dataclass(frozen=True)
class Job:
    """A request and what has become of it: a row of the table.

    Args:
        id: Its name, which no other job of its place has.
        position: Its place in the queue, of which the lowest is next.
        status: One of arriving, queued, in_progress, completed, failed and removed.
        model: The model that makes it.
        batch: A text in which the jobs of one run agree; "" for one that runs alone.
        request: A `VideoRequest` as JSON.
        output: The video's name, below the folder that is the place.
        worker: The worker that has it, else "".
        attempts: How often it was begun.
        cancel: Whether it is to end.
        progress: What its worker says of it.
        error: Why it failed, or why its last attempt did: `code` and `message`.
        created_at: Seconds since 1970, on the database's clock.
        completed_at: When it completed, failed, or was removed.
        version: The number of its last change.
        ahead: How many jobs end before it begins; None for one that does not wait.
    """

    id: str
    position: int
    status: str
    model: str
    batch: str
    request: dict[str, Any]
    output: str
    worker: str
    attempts: int
    cancel: bool
    progress: dict[str, Any]
    error: dict[str, str] | None
    created_at: float
    completed_at: float | None
    version: int
    ahead: int | None = None

    @property
    def over(self) -> bool:
        return self.status in (COMPLETED, FAILED, REMOVED)


@dataclass(frozen=True)
class NewJob:
    """A job to be added.

    Args:
        id: Its name, which no other job of its place has.
        request: What is asked for, as JSON.
        model: The name of the model that makes it.
        output: The video's path below the folder that is the place.
        batch: A digest of all in which the jobs of one run have to agree.
    """

    id: str
    request: Mapping[str, Any]
    model: str
    output: str
    batch: str = ""


@dataclass(frozen=True)
class WorkerRow:
    """A worker whose lease has not run out.

    Args:
        name: Its name.
        state: loading or ready.
        facts: Its host, process and models.
        draining: Whether it is to give its jobs back and end.
    """

    name: str
    state: str
    facts: dict[str, Any]
    draining: bool


@dataclass(frozen=True)
class Stats:
    """Numbers of a place.

    Args:
        jobs: The number of jobs by status.
        workers: The number of workers by state.
        counters: Ends by kind (completed, failed, cancelled), and seconds by stage as `seconds_STAGE`.
    """

    jobs: dict[str, int]
    workers: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)


class JobStore:
    """The jobs of a place in a database. It goes to another process by its arguments.

    Args:
        url: A path of SQLite's file, or a URL of PostgreSQL; its tables are made or migrated if need be.
        patience: Seconds for which a database that is away is tried again, before `Unavailable` is raised; without end
            for inf, and then also where its disk is full.
        place: The place's id; "" for a database that nobody else uses, or until `enter` is called.

    Raises:
        WanjaxError: The URL is wrong, the login is refused, or the tables are of a newer wanjax.
    """

    def __init__(self, url: str, patience: float = PATIENCE, place: str = ""):
        self.url, self.patience, self.place = url, patience, place
        self._database = open_database(url)
        try:
            self._run(self._migrate)
            self.reclaim()  # so that the tables are in the file itself, and changes need no more room there
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> Any:
        return JobStore, (self.url, self.patience, self.place)

    def __repr__(self) -> str:
        return f"JobStore({self.name!r})"

    @property
    def name(self) -> str:
        """The database as messages call it, without its password."""
        return self._database.name

    @property
    def is_shared(self) -> bool:
        """Whether other hosts reach the database."""
        return self._database.is_shared

    def with_patience(self, seconds: float) -> "JobStore":
        """Return the store with another patience, by the same connections.

        Args:
            seconds: As `patience` of the class.
        """
        other = object.__new__(type(self))  # `copy` would open the database again
        vars(other).update(vars(self), patience=seconds)
        return other

    def reclaim(self) -> None:
        """Make room for a few changes where the disk of the database is full."""
        with suppress(*self._database.errors):
            self._database.reclaim()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def enter(self, place: str, *, is_new: bool) -> bool:
        """Use the jobs of a place from now on; return False for one that nobody has entered as new in this database.

        Args:
            place: The place's id.
            is_new: Whether it is entered for the first time, by whoever adds jobs.
        """

        def note(db: "_Transaction") -> bool:
            if is_new:
                db.execute("INSERT INTO places VALUES (:id) ON CONFLICT (id) DO NOTHING", id=place)
            return bool(db.rows("SELECT 1 FROM places WHERE id = :id", id=place))

        if is_there := self._run(note, write=is_new):
            self.place = place
        return is_there

    # Clients

    def add(self, new: NewJob, *, limit: int | None = None, arriving: bool = False) -> Job:
        """Add a job at the end of the queue; it is durable when this returns.

        Args:
            new: The job. One that was added before stays as it is, unless its files were arriving.
            limit: How many may wait.
            arriving: Whether its files still arrive: it is added again, without this, when they are there.

        Raises:
            QueueFull: As many as `limit` wait.
        """

        def insert(db: "_Transaction") -> Job:
            version = db.tick()  # others who add wait from here on, so the limit is exact
            if (job := db.find(new.id)) is not None and job.status != ARRIVING:
                return db.with_places([job])[0]  # the answer to the first call was lost
            if limit is not None and db.waiting() >= limit:
                raise QueueFull(limit)
            db.execute(
                INSERT.format(now=db.now),
                version=version,
                status=ARRIVING if arriving else QUEUED,
                **_columns(new),
            )
            return db.with_places([db.get(new.id, arriving=arriving)])[0]

        return self._run(insert)

    def add_all(self, jobs: Sequence[NewJob]) -> None:
        """Add jobs in this order, those that are over anew; those that wait or are under way stay as they are.

        Args:
            jobs: The jobs.
        """

        def insert(db: "_Transaction") -> None:
            first = db.tick(len(jobs)) - len(jobs)
            db.execute_many(
                INSERT.format(now=db.now)
                + """, attempts = 0, cancel = 0, progress = '{}', error = NULL, completed_at = NULL
                WHERE jobs.worker = '' AND jobs.status IN ('completed', 'failed', 'removed')""",
                [_columns(job) | {"version": first + number, "status": QUEUED} for number, job in enumerate(jobs, 1)],
            )

        if jobs:
            self._run(insert)

    def get(self, id: str) -> Job:
        """Return a job.

        Args:
            id: Its id.

        Raises:
            NotFound: No job has it.
        """
        return self._read(lambda db: db.with_places([db.get(id)])[0])

    def page(
        self,
        limit: int,
        *,
        after: str | None = None,
        newest: bool = True,
        matches: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> tuple[list[Job], bool]:
        """Return a page of jobs, and whether there are more.

        Args:
            limit: How many at most.
            after: The id of the job before the page.
            newest: Whether the newest come first.
            matches: Returns True for the request of a job to be listed; None lists all.

        Raises:
            NotFound: No job has the id `after`.
        """

        def read(db: "_Transaction") -> tuple[list[Job], bool]:
            way, order = ("<", "DESC") if newest else (">", "ASC")
            most = SEARCHED if matches else limit + 1
            start = {} if after is None else {"after": db.get(after).position}
            jobs: list[Job] = []
            while len(jobs) <= limit:
                where = f"AND position {way} :after" if start else ""
                where = f"place = :place AND status NOT IN ('arriving', 'removed') {where}"
                rows = db.jobs(f"{where} ORDER BY position {order} LIMIT :most", most=most, **start)
                jobs += [job for job in rows if matches is None or matches(job.request)]
                if len(rows) < most:
                    break
                start = {"after": rows[-1].position}
            return db.with_places(jobs[:limit]), len(jobs) > limit

        return self._read(read)

    def queue(self) -> list[Job]:
        """Return the jobs that wait, in their order, as many as are counted."""
        text = "place = :place AND status = 'queued' ORDER BY position LIMIT :most"
        return self._read(lambda db: db.with_places(db.jobs(text, most=LONGEST_QUEUE)))

    def waiting(self) -> int:
        """Return how many jobs wait."""
        return self._read(lambda db: db.waiting())

    def cancel(self, id: str) -> Job:
        """End a job that waits, or one under way as soon as its worker hears of it.

        Args:
            id: Its id.

        Raises:
            NotFound: No job has it.
        """

        def change(db: "_Transaction") -> Job:
            db.cancel([id])
            return db.get(id)

        return self._run(change)

    def cancel_all(self, ids: Sequence[str]) -> None:
        """End jobs as `cancel` does; an id that no job has is left out.

        Args:
            ids: The ids.
        """
        if ids:
            self._run(lambda db: db.cancel(ids))

    def remove(self, id: str) -> Job:
        """Remove a job, which does not come back.

        Args:
            id: Its id.

        Returns:
            The job as it was: its files are the caller's to remove unless a worker has it; `leftovers` has it then.

        Raises:
            NotFound: There is none.
        """

        def change(db: "_Transaction") -> Job:
            db.tick()
            job = db.get(id, arriving=True)
            if job.status == QUEUED:
                db.count(CANCELLED)
            db.update(id, cancel=1, status=REMOVED, ended=True)
            return job

        return self._run(change)

    def leftovers(self) -> list[Job]:
        """Return the jobs whose files nobody needs: removed ones, arrivals that stopped, and failures of long ago."""
        return self._read(
            lambda db: db.jobs(
                f"""(place = :place AND status = 'removed' AND worker = '' AND output != '')
                OR (place = :place AND status = 'arriving' AND created_at < {db.now} - :arriving)
                OR (place = :place AND status = 'failed' AND position < (
                    SELECT position FROM jobs WHERE place = :place AND status = 'failed'
                    ORDER BY position DESC LIMIT 1 OFFSET :failures))""",
                arriving=KEPT_ARRIVING,
                failures=KEPT_FAILURES - 1,
            )
        )

    def purge(self, id: str) -> None:
        """Note that the files of a removed job are gone; its row goes a day after it was removed.

        Args:
            id: Its id.
        """
        self._run(
            lambda db: db.execute(
                "UPDATE jobs SET output = '' WHERE place = :place AND id = :id AND status = 'removed'", id=id
            ),
            durable=False,
        )

    def changes(self, since: int, *, only: str | None = None, limit: int = 500) -> list[Job]:
        """Return the jobs that changed after a version, removed ones too, in the order of their last changes.

        Args:
            since: The version.
            only: The id of the only job to look at; None for all.
            limit: How many jobs at most; 500 by default.
        """
        one = "" if only is None else "AND id = :only"
        return self._read(
            lambda db: db.with_places(
                db.jobs(
                    f"place = :place AND version > :since AND status != 'arriving' {one} ORDER BY version LIMIT :limit",
                    since=since,
                    limit=limit,
                    only=only,
                )
            )
        )

    def version(self) -> int:
        """Return the version of the last change in the database."""
        return self._read(lambda db: db.value("SELECT version FROM clock"))

    def stats(self) -> Stats:
        """Count jobs and workers."""

        def read(db: "_Transaction") -> Stats:
            return Stats(
                dict(db.rows("SELECT status, count(*) FROM jobs WHERE place = :place GROUP BY status")),
                dict(db.rows(f"SELECT state, count(*) FROM workers WHERE {db.is_live} GROUP BY state")),
                dict(db.rows("SELECT name, value FROM counters WHERE place = :place")),
            )

        return self._read(read)

    def workers(self) -> list[WorkerRow]:
        """Return the workers that are heard of."""

        def read(db: "_Transaction") -> list[WorkerRow]:
            rows = db.rows(f"SELECT name, state, facts, draining FROM workers WHERE {db.is_live} ORDER BY name")
            return [WorkerRow(name, state, json.loads(facts), bool(draining)) for name, state, facts, draining in rows]

        return self._read(read)

    def unserved(self) -> list[str]:
        """Return the models for which jobs wait and no worker is heard of."""
        text = "SELECT DISTINCT model FROM jobs WHERE place = :place AND status = 'queued'"
        waiting = self._read(lambda db: db.rows(text))
        served = {model for worker in self.workers() for model in worker.facts.get("models", ())} if waiting else ()
        return sorted(model for (model,) in waiting if model not in served)

    # Workers

    def register(self, worker: str, state: str, facts: Mapping[str, Any], ttl: float = TTL) -> None:
        """Note a worker or its new state, and lease it its jobs.

        Args:
            worker: Its name, which no other process has or had.
            state: LOADING or READY.
            facts: Its host, process and models.
            ttl: Seconds for which it may be silent.
        """
        self._run(
            lambda db: db.execute(
                f"""INSERT INTO workers (name, place, state, facts, expires)
                VALUES (:name, :place, :state, :facts, {db.now} + :ttl)
                ON CONFLICT (name) DO UPDATE SET place = excluded.place, state = excluded.state, facts = excluded.facts,
                    expires = excluded.expires""",
                name=worker,
                state=state,
                facts=json.dumps(facts),
                ttl=ttl,
            ),
            durable=False,
        )

    def lease(self, worker: str, models: Sequence[str], *, most: int = 1, ttl: float = TTL) -> list[Job]:
        """Return the jobs that a worker is to make: those that it has, else the first of the queue.

        A single job counts as begun; several, which are of one batch, are begun one by one.

        Args:
            worker: Its name, which is registered.
            models: Those that it makes.
            most: How many jobs of one batch at most.
            ttl: Seconds for which the worker may be silent.

        Returns:
            The jobs; none where none waits, or where the worker is to drain or has to register again.
        """
        held = f"{HELD} AND worker = :worker AND status IN ('queued', 'in_progress')"
        names = {f"model{number}": model for number, model in enumerate(models)}
        values = ", ".join(f":{name}" for name in names)
        free = f"place = :place AND status = 'queued' AND worker = '' AND model IN ({values})"

        def take(db: "_Transaction") -> list[Job]:
            if not db.rows(f"SELECT 1 FROM jobs WHERE {held} LIMIT 1", worker=worker) and not db.rows(
                f"SELECT 1 FROM jobs WHERE {free} ORDER BY position LIMIT 1", **names
            ):
                db.extend(worker, ttl)
                return []
            db.tick()
            if db.extend(worker, ttl) != 0:
                return []
            if jobs := db.jobs(f"{held} ORDER BY position", worker=worker):
                return jobs
            if not (first := db.jobs(f"{free} ORDER BY position LIMIT 1", **names)):
                return []
            [job] = first
            if most == 1 or not job.batch:
                db.update(job.id, worker=worker, status=RUNNING, attempts=job.attempts + 1)
            else:
                same = f"SELECT id FROM jobs WHERE {free} AND batch = :batch ORDER BY position LIMIT :most"
                db.execute(
                    f"UPDATE jobs SET worker = :worker WHERE place = :place AND id IN ({same})",
                    worker=worker,
                    batch=job.batch,
                    most=most,
                    **names,
                )
            return db.jobs(f"{held} ORDER BY position", worker=worker)

        return self._run(take, durable=False) if names else []

    def begin(self, worker: str, id: str) -> Signal:
        """Note that a worker begins a job that it leased with others, which counts as an attempt.

        Args:
            worker: Its name.
            id: The job.
        """

        def change(db: "_Transaction") -> Signal:
            db.tick()
            if (job := db.held(worker, id)) is None:
                return Signal.LOST
            if job.cancel:
                return Signal.CANCEL
            if job.status == QUEUED:
                db.update(id, status=RUNNING, attempts=job.attempts + 1)
            return Signal.CONTINUE

        return self._run(change, durable=False)

    def heartbeat(self, worker: str, id: str | None, progress: Mapping[str, Any] | None, ttl: float = TTL) -> Signal:
        """Extend a worker's lease, and note how far its job is where that is new.

        Args:
            worker: Its name.
            id: The job that it makes now, if any.
            progress: What it says of the job; None for nothing new.
            ttl: Seconds for which the worker may be silent.

        Returns:
            What the worker is to do.
        """

        def change(db: "_Transaction") -> Signal:
            job = None if id is None else db.held(worker, id)
            if job is not None and progress is not None and progress != job.progress:
                db.tick()
                job = db.held(worker, job.id)  # which another may have changed before the lock was taken
                if job is not None and not job.cancel:
                    db.update(job.id, progress=json.dumps(progress))
            if (draining := db.extend(worker, ttl)) is None or (job is None and id is not None):
                return Signal.LOST
            if job is not None and job.cancel:
                return Signal.CANCEL
            return Signal.DRAIN if draining else Signal.CONTINUE

        return self._run(change, durable=False)

    def finish(self, worker: str, id: str, progress: Mapping[str, Any]) -> bool:
        """Note that a job's video is there; False where the job is not this worker's any more.

        Args:
            worker: Its name.
            id: The job.
            progress: What the worker says of it last, with `stage_seconds`, which are counted.
        """

        def change(db: "_Transaction") -> bool:
            db.tick()
            if (job := db.held(worker, id)) is None:
                return False
            if job.status == REMOVED:
                db.update(id, worker="")
                db.count(COMPLETED)
            else:
                db.end(id, COMPLETED, None, progress=json.dumps(progress))
            db.count(*(f"seconds_{stage}" for stage in progress.get("stage_seconds", {})),
                     amounts=list(progress.get("stage_seconds", {}).values()))  # fmt: skip
            return True

        return self._run(change, durable=False)

    def fail(self, worker: str, id: str, error: Mapping[str, str], *, retries: int = 0) -> bool:
        """Note why a job failed; False where the job is not this worker's any more.

        Args:
            worker: Its name.
            id: The job.
            error: Its `code` and `message`.
            retries: How often it may be tried again, at the end of the queue.
        """

        def change(db: "_Transaction") -> bool:
            version = db.tick()
            if (job := db.held(worker, id)) is None:
                return False
            if job.status == REMOVED:
                db.update(id, worker="")
                db.count(CANCELLED)
            elif job.cancel or job.attempts > retries:
                db.end(id, FAILED, CANCELLATION if job.cancel else error)
            else:
                db.update(id, position=version, error=json.dumps(error), **WAITING)
            return True

        return self._run(change, durable=False)

    def requeue(self, worker: str) -> None:
        """Let the jobs of a worker that ends wait again, in their old places, as if it had not begun them.

        Args:
            worker: Its name.
        """
        self._run(
            lambda db: self._requeue_where(db, f"{HELD} AND worker = :name", counts=False, name=worker), durable=False
        )

    def requeue_lost(self, worker: str, why: str | None = None) -> None:
        """Let the jobs of a worker that died wait again at once, in their old places; the attempt counts.

        Args:
            worker: Its name.
            why: What ended it, kept as the error of the jobs that it made.
        """
        self._run(lambda db: self._requeue_where(db, f"{HELD} AND worker = :name", why=why, name=worker), durable=False)

    def requeue_expired(self) -> None:
        """Let the jobs of workers that are not heard of wait again; forget jobs that were removed a day ago."""
        gone = "worker IN (SELECT name FROM workers WHERE expires < {now}) OR worker NOT IN (SELECT name FROM workers)"

        def change(db: "_Transaction") -> None:
            where = f"{HELD} AND ({gone.format(now=db.now)})"
            old = "place = :place AND status = 'removed' AND worker = '' AND output = ''"
            old = f"{old} AND completed_at < {db.now} - :kept"
            expired = f"SELECT 1 FROM workers WHERE expires < {db.now} LIMIT 1"
            if db.rows(expired) or db.rows(f"SELECT 1 FROM jobs WHERE {where} LIMIT 1"):
                self._requeue_where(db, where)
            if db.rows(f"SELECT 1 FROM jobs WHERE {old} LIMIT 1", kept=KEPT_REMOVED):
                db.tick()
                db.execute(f"DELETE FROM jobs WHERE {old}", kept=KEPT_REMOVED)

        self._run(change, durable=False)

    def drain(self, worker: str) -> None:
        """Ask a worker to end when its step is done, and to give its jobs back.

        Args:
            worker: Its name.
        """
        self._run(lambda db: db.execute("UPDATE workers SET draining = 1 WHERE name = :name", name=worker))

    # Transactions

    def _requeue_where(
        self, db: "_Transaction", where: str, *, counts: bool = True, why: str | None = None, **values: Any
    ) -> None:
        """Let the jobs of some workers wait again, and forget the workers; `counts` tells whether attempts do."""
        db.tick()
        jobs = db.jobs(where, **values)
        for job in jobs:
            if job.status == REMOVED:
                db.update(job.id, worker="")
            elif job.status == RUNNING and not counts and not job.cancel:
                db.update(job.id, attempts=job.attempts - 1, **WAITING)
            elif job.cancel:
                db.end(job.id, FAILED, CANCELLATION)
            else:
                error = job.error if why is None or job.status != RUNNING else {"code": STOPPED, "message": why}
                db.update(job.id, error=error and json.dumps(error), **WAITING)
        names = {**values, **{f"name{n}": name for n, name in enumerate({job.worker for job in jobs})}}
        listed = ", ".join(f":{name}" for name in names) or "''"
        db.execute(f"DELETE FROM workers WHERE name IN ({listed}) OR expires < {db.now}", **names)

    def _migrate(self, db: "_Transaction") -> None:
        self._database.prepare(db.connection)
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
        version = db.value("SELECT max(version) FROM schema_version") or 0
        if version > len(MIGRATIONS):
            problem = f"{self.name} is a database of a newer wanjax, version {version} where {len(MIGRATIONS)} is known"
            raise WanjaxError(f"{problem}: install that wanjax, or give another --database")
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            for statement in script.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO schema_version VALUES (:number)", number=number)

    def _read(self, do: Callable[["_Transaction"], T]) -> T:
        return self._run(do, write=False)

    def _run(self, do: Callable[["_Transaction"], T], *, write: bool = True, durable: bool = True) -> T:
        """Do something in a transaction, and again where the database is away.

        Raises:
            Unavailable: It is away for longer than the store's patience.
            DatabaseError: It refuses the statement.
        """
        end = time.monotonic() + self.patience
        while True:
            try:
                with self._database.transaction(write=write, durable=durable) as connection:
                    return do(_Transaction(connection, self._database.now, self.place))
            except self._database.errors as error:
                why, is_full = without_password(reason(error), self.url), has_no_room(error)
                if is_full and math.isinf(self.patience):  # a worker has to note what it did
                    self.reclaim()
                elif not self._database.is_away(error):
                    problem = f"the database {self.name} cannot be used: {why}"
                    raise DatabaseError(problem, is_full) from error
                elif time.monotonic() >= end:
                    raise Unavailable(f"the database {self.name} is out of reach: {why}") from error
            time.sleep(RETRY)


class _Transaction:
    """The statements of a transaction, in which `:place` is the place.

    `now` is the SQL of the database's time, and `is_live` the condition of workers that are heard of.
    """

    def __init__(self, connection: Connection, now: str, place: str):
        self.connection, self.now, self._place = connection, now, place
        self.is_live = f"place = :place AND expires > {now}"
        self._version = 0

    def execute(self, text: str, **values: Any) -> Any:
        return self.connection.execute(text, {"place": self._place, **values})

    def execute_many(self, text: str, rows: Sequence[Values]) -> None:
        self.connection.executemany(text, [{"place": self._place, **row} for row in rows])

    def rows(self, text: str, **values: Any) -> list[Any]:
        return self.execute(text, **values).fetchall()

    def value(self, text: str, **values: Any) -> Any:
        """Return the first value of the first row; None where there is no row."""
        row = self.execute(text, **values).fetchone()
        return row[0] if row is not None else None

    def tick(self, count: int = 1) -> int:
        """Return a new version; whoever else changes jobs waits for the end of this transaction."""
        if not self._version:
            now, after = f"CAST({self.now} * 1e6 AS BIGINT)", "version + :count"
            text = f"UPDATE clock SET version = CASE WHEN {after} > {now} THEN {after} ELSE {now} END RETURNING version"
            self._version = self.value(text, count=count)
        return self._version

    def jobs(self, where: str, **values: Any) -> list[Job]:
        return [_job(row) for row in self.rows(f"SELECT {SELECTED} FROM jobs WHERE {where}", **values)]

    def find(self, id: str) -> Job | None:
        return next(iter(self.jobs("place = :place AND id = :id", id=id)), None)

    def get(self, id: str, *, arriving: bool = False) -> Job:
        """Return a job that clients see, or one that is `arriving`; raises NotFound."""
        job = self.find(id)
        if job is None or job.status == REMOVED or (job.status == ARRIVING and not arriving):
            raise NotFound("there is no video of this id")
        return job

    def held(self, worker: str, id: str) -> Job | None:
        """Return a job that a worker has, a removed one too."""
        job = self.find(id)
        return job if job is not None and job.worker == worker and job.status not in (COMPLETED, FAILED) else None

    def extend(self, worker: str, ttl: float) -> int | None:
        """Extend a worker's lease; return whether it is to drain, None where it has none."""
        text = f"UPDATE workers SET expires = {self.now} + :ttl WHERE name = :worker RETURNING draining"
        return self.value(text, worker=worker, ttl=ttl)

    def waiting(self) -> int:
        return self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'queued'")

    def with_places(self, jobs: Sequence[Job]) -> list[Job]:
        """Return jobs with how many are before each, as far as that is less than LONGEST_QUEUE."""
        if all(job.status != QUEUED for job in jobs):
            return list(jobs)
        text = "SELECT position FROM jobs WHERE place = :place AND status = 'queued' ORDER BY position LIMIT :most"
        running = self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'in_progress'")
        place = {position: number for number, (position,) in enumerate(self.rows(text, most=LONGEST_QUEUE), running)}
        return [replace(job, ahead=place.get(job.position)) if job.status == QUEUED else job for job in jobs]

    def update(self, id: str, *, ended: bool = False, **columns: Any) -> None:
        """Change a job, and note the time where it `ended`."""
        sets = [f"{name} = :{name}" for name in columns] + ([f"completed_at = {self.now}"] if ended else [])
        text = f"UPDATE jobs SET {', '.join([*sets, 'version = :version'])} WHERE place = :place AND id = :id"
        self.execute(text, id=id, version=self.tick(), **columns)

    def cancel(self, ids: Sequence[str]) -> None:
        """End jobs that wait, and ask for the end of those under way."""
        self.tick()
        for id in ids:
            job = self.find(id)
            if job is not None and job.status == QUEUED:
                self.end(id, FAILED, CANCELLATION, cancel=1)
            elif job is not None and not job.over:
                self.update(id, cancel=1)

    def end(self, id: str, status: str, error: Mapping[str, str] | None, **columns: Any) -> None:
        """Note the end of a job, and count it."""
        text = None if error is None else json.dumps(error)
        self.update(id, status=status, worker="", error=text, ended=True, **columns)
        self.count(CANCELLED if error is not None and error["code"] == CANCELLED else status)

    def count(self, *names: str, amounts: Sequence[float] = (1.0,)) -> None:
        """Add amounts to counters."""
        self.execute_many(
            """INSERT INTO counters VALUES (:place, :name, :amount)
            ON CONFLICT (place, name) DO UPDATE SET value = counters.value + excluded.value""",
            [{"name": name, "amount": amount} for name, amount in sorted(zip(names, amounts, strict=True))],
        )


INSERT = """
    INSERT INTO jobs (place, id, position, status, model, batch, request, output, created_at, version)
    VALUES (:place, :id, :version, :status, :model, :batch, :request, :output, {now}, :version)
    ON CONFLICT (place, id) DO UPDATE SET position = excluded.position, status = excluded.status,
        model = excluded.model, batch = excluded.batch, request = excluded.request, output = excluded.output,
        created_at = excluded.created_at, version = excluded.version"""
WAITING: dict[str, Any] = {"status": QUEUED, "worker": "", "progress": "{}"}
COLUMNS = tuple(each.name for each in fields(Job))[:-1]  # all but `ahead`
SELECTED = ", ".join(COLUMNS)


def _columns(job: NewJob) -> dict[str, Any]:
    return {**vars(job), "request": json.dumps(job.request)}


def _job(row: Sequence[Any]) -> Job:
    columns: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    for name in ("request", "progress", "error"):
        columns[name] = columns[name] and json.loads(columns[name])
    columns["cancel"] = bool(columns["cancel"])
    return Job(**columns)
