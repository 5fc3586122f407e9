# SPDX-License-Identifier: Apache-2.0
"""The job queue in a database, which servers, batches and workers access directly.

Every method is one idempotent transaction, so a call whose answer was lost can be sent again. A worker owns a job from
the lease until it finishes or requeues the job, or until the lease expires without a heartbeat. Worker names are never
reused, so a worker whose lease expired cannot change a job that another one owns now. All times are the database's, so
the hosts' clocks do not matter.

Jobs, workers and counters belong to a namespace, which stands for a shared folder of videos (`wanjax.jobs.sharing`).
One database may hold many namespaces, each invisible to the others; its tables call a namespace `place`.

Each change has a version, in commit order, since the row of the counter stays locked until the commit. This lock is
taken before any other, which prevents deadlocks. A version is at least the time in microseconds, so that a database
which lost its last changes in a crash never reuses the versions that clients have already read.
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
from wanjax.jobs.databases import Connection, DatabaseError, Values, open_database, without_password

ARRIVING, QUEUED, RUNNING = "arriving", "queued", "in_progress"
COMPLETED, FAILED, REMOVED = "completed", "failed", "removed"
CANCELLED, STOPPED = "cancelled", "server_stopped"  # codes of errors
CANCELLATION = {"code": CANCELLED, "message": "the video was cancelled"}
TTL = 30.0  # seconds without a heartbeat after which a worker loses its jobs
RETRY_SECONDS, RETRY_INTERVAL = 5.0, 0.2  # how long an unavailable database is retried, and the time between attempts
RETAINED_FAILURES = 200
REMOVED_RETENTION = 86_400.0  # seconds that a removed job's row is kept, for clients that poll changes
ARRIVAL_TIMEOUT = 3600.0  # seconds that the upload of a job's files may take
MAX_RANKED = 1000  # queued jobs whose rank is counted
SEARCH_PAGE = 500  # jobs that a search reads per query
HELD = "place = :place AND worker != ''"  # matches the condition of the index jobs_held
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
    """The database does not answer."""


class QueueFull(Exception):
    """The queue is full.

    Args:
        limit: Maximum number of waiting jobs.
    """

    def __init__(self, limit: int):
        super().__init__(f"{quantity(limit, 'video')} in the queue, the limit of this server: try again later")
        self.limit = limit

    def __reduce__(self) -> Any:
        return QueueFull, (self.limit,)


class NotFound(LookupError):
    """No job has this id."""


class Signal(Enum):
    """The answer to a heartbeat."""

    CONTINUE = "continue"
    CANCEL = "cancel"  # the job
    DRAIN = "drain"  # requeue the jobs and exit
    LOST = "lost"  # the job is another worker's, or gone


@dataclass(frozen=True)
class Job:
    """A request and its state: a row of the table.

    Args:
        id: Unique within the namespace.
        position: Position in the queue; the lowest is next.
        status: One of arriving, queued, in_progress, completed, failed and removed.
        model: The model that makes the video.
        batch: Key shared by jobs that one run may process; "" for a job that runs alone.
        request: A `VideoRequest` as JSON.
        output: The video's path, relative to the namespace's folder.
        worker: The worker that leased it, or "".
        attempts: How often a worker has started it.
        cancel: Whether cancellation was requested.
        progress: Latest progress from its worker.
        error: `code` and `message` of the failure, or of the last failed attempt.
        created_at: Seconds since 1970, on the database's clock.
        completed_at: When it completed, failed, or was removed.
        version: The number of its last change.
        ahead: Number of jobs before it in the queue; None for a job that is not queued.
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
    def is_over(self) -> bool:
        return self.status in (COMPLETED, FAILED, REMOVED)


@dataclass(frozen=True)
class NewJob:
    """A job to be added.

    Args:
        id: Unique within the namespace.
        request: A `VideoRequest` as JSON.
        model: The name of the model that makes the video.
        output: The video's path, relative to the namespace's folder.
        batch: Key shared by jobs that one run may process.
    """

    id: str
    request: Mapping[str, Any]
    model: str
    output: str
    batch: str = ""


@dataclass(frozen=True)
class WorkerRow:
    """A worker whose lease has not expired.

    Args:
        name: Its name.
        state: loading or ready.
        facts: Its host, process and models.
        draining: Whether it was asked to requeue its jobs and exit.
    """

    name: str
    state: str
    facts: dict[str, Any]
    draining: bool


@dataclass(frozen=True)
class Stats:
    """Counts of a namespace.

    Args:
        jobs: The number of jobs by status.
        workers: The number of workers by state.
        counters: Ends by kind (completed, failed, cancelled), and seconds by stage as `seconds_STAGE`.
    """

    jobs: dict[str, int]
    workers: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)


class JobStore:
    """The jobs of a namespace in a database. Pickling keeps only the arguments and reconnects.

    Args:
        url: A path of SQLite's file, or a URL of PostgreSQL; its tables are made or migrated if need be.
        retry_seconds: Seconds for which a database that is away is tried again, before `Unavailable` is raised; without
            end for inf, and then also where its disk is full.
        namespace: The namespace's id; "" for a database with a single user, or until `use_namespace` is called.

    Raises:
        WanjaxError: The URL is wrong, the login is refused, or the tables are of a newer wanjax.
    """

    def __init__(self, url: str, retry_seconds: float = RETRY_SECONDS, namespace: str = ""):
        self.url, self.retry_seconds, self.namespace = url, retry_seconds, namespace
        self._database = open_database(url)
        try:
            self._run(self._migrate)
            self.reclaim()  # move the tables from the log into the file, so that small changes need no more room
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> Any:
        return JobStore, (self.url, self.retry_seconds, self.namespace)

    def __repr__(self) -> str:
        return f"JobStore({self.name!r})"

    @property
    def name(self) -> str:
        """The database's name for messages, without its password."""
        return self._database.name

    @property
    def is_shared(self) -> bool:
        """Whether other hosts can connect to the database."""
        return self._database.is_shared

    def with_retry_seconds(self, seconds: float) -> "JobStore":
        """Return the store with another time of retries, on the same connections.

        Args:
            seconds: As `retry_seconds` of the class.
        """
        other = object.__new__(type(self))  # `copy` would open the database again
        vars(other).update(vars(self), retry_seconds=seconds)
        return other

    def reclaim(self) -> None:
        """Free space for a few changes when the disk of the database is full."""
        with suppress(*self._database.errors):
            self._database.reclaim()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def use_namespace(self, namespace: str, *, is_new: bool) -> bool:
        """Switch to the jobs of a namespace; return False if it is not registered in this database.

        Args:
            namespace: The namespace's id.
            is_new: Whether to register it; clients that add jobs do.
        """

        def note(db: "_Transaction") -> bool:
            if is_new:
                db.execute("INSERT INTO places VALUES (:id) ON CONFLICT (id) DO NOTHING", id=namespace)
            return bool(db.rows("SELECT 1 FROM places WHERE id = :id", id=namespace))

        if is_there := self._run(note, write=is_new):
            self.namespace = namespace
        return is_there

    # Clients

    def add(self, new: NewJob, *, limit: int | None = None, arriving: bool = False) -> Job:
        """Add a job at the end of the queue; it is durable when this returns.

        Args:
            new: The job. If it was added before it stays unchanged, unless its files were arriving.
            limit: Maximum number of waiting jobs.
            arriving: Whether its files are still being uploaded; add it again without this when they are complete.

        Raises:
            QueueFull: `limit` jobs are waiting.
        """

        def insert(db: "_Transaction") -> Job:
            version = db.tick()  # serialises writers, so the limit is exact
            if (job := db.find(new.id)) is not None and job.status != ARRIVING:
                return db.with_ranks([job])[0]  # the answer to the first call was lost
            if limit is not None and db.waiting() >= limit:
                raise QueueFull(limit)
            db.execute(
                INSERT.format(now=db.now),
                version=version,
                status=ARRIVING if arriving else QUEUED,
                **_columns(new),
            )
            return db.with_ranks([db.get(new.id, arriving=arriving)])[0]

        return self._run(insert)

    def add_all(self, jobs: Sequence[NewJob]) -> None:
        """Add jobs in this order. Finished jobs of the same ids restart; waiting and running ones stay unchanged.

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
            id: The job's id.

        Raises:
            NotFound: No job has this id.
        """
        return self._read(lambda db: db.with_ranks([db.get(id)])[0])

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
            limit: Maximum number of jobs.
            after: The id of the last job of the previous page.
            newest: Whether the newest come first.
            matches: Returns True for the request of a job to be listed; None lists all.

        Raises:
            NotFound: No job has the id `after`.
        """

        def read(db: "_Transaction") -> tuple[list[Job], bool]:
            comparison, order = ("<", "DESC") if newest else (">", "ASC")
            page_size = SEARCH_PAGE if matches else limit + 1
            start = {} if after is None else {"after": db.get(after).position}
            jobs: list[Job] = []
            while len(jobs) <= limit:
                where = f"AND position {comparison} :after" if start else ""
                where = f"place = :place AND status NOT IN ('arriving', 'removed') {where}"
                rows = db.jobs(f"{where} ORDER BY position {order} LIMIT :limit", limit=page_size, **start)
                jobs += [job for job in rows if matches is None or matches(job.request)]
                if len(rows) < page_size:
                    break
                start = {"after": rows[-1].position}
            return db.with_ranks(jobs[:limit]), len(jobs) > limit

        return self._read(read)

    def queue(self) -> list[Job]:
        """Return the waiting jobs in order, at most MAX_RANKED."""
        text = "place = :place AND status = 'queued' ORDER BY position LIMIT :limit"
        return self._read(lambda db: db.with_ranks(db.jobs(text, limit=MAX_RANKED)))

    def waiting(self) -> int:
        """Return the number of waiting jobs."""
        return self._read(lambda db: db.waiting())

    def cancel(self, id: str) -> Job:
        """Cancel a job: at once if it waits, or at its worker's next heartbeat if it runs.

        Args:
            id: The job's id.

        Raises:
            NotFound: No job has this id.
        """

        def change(db: "_Transaction") -> Job:
            db.cancel([id])
            return db.get(id)

        return self._run(change)

    def cancel_all(self, ids: Sequence[str]) -> None:
        """Cancel jobs as `cancel` does; unknown ids are ignored.

        Args:
            ids: The ids.
        """
        if ids:
            self._run(lambda db: db.cancel(ids))

    def remove(self, id: str) -> Job:
        """Remove a job permanently.

        Args:
            id: The job's id.

        Returns:
            The job before its removal. The caller removes its files, unless a worker has it: then `leftovers` returns
            it later.

        Raises:
            NotFound: No job has this id.
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
        """Return the jobs whose files can be deleted: removed jobs, abandoned uploads, and old failures."""
        return self._read(
            lambda db: db.jobs(
                f"""(place = :place AND status = 'removed' AND worker = '' AND output != '')
                OR (place = :place AND status = 'arriving' AND created_at < {db.now} - :arriving)
                OR (place = :place AND status = 'failed' AND position < (
                    SELECT position FROM jobs WHERE place = :place AND status = 'failed'
                    ORDER BY position DESC LIMIT 1 OFFSET :failures))""",
                arriving=ARRIVAL_TIMEOUT,
                failures=RETAINED_FAILURES - 1,
            )
        )

    def purge(self, id: str) -> None:
        """Record that the files of a removed job were deleted; its row is deleted a day after the removal.

        Args:
            id: The job's id.
        """
        self._run(
            lambda db: db.execute(
                "UPDATE jobs SET output = '' WHERE place = :place AND id = :id AND status = 'removed'", id=id
            ),
            durable=False,
        )

    def changes(self, since: int, *, only: str | None = None, limit: int = 500) -> list[Job]:
        """Return the jobs that changed after a version, including removed ones, ordered by last change.

        Args:
            since: The version.
            only: Restrict the result to the job of this id; None for all jobs.
            limit: Maximum number of jobs.
        """
        one_job = "" if only is None else "AND id = :only"
        where = f"place = :place AND version > :since AND status != 'arriving' {one_job} ORDER BY version LIMIT :limit"
        return self._read(lambda db: db.with_ranks(db.jobs(where, since=since, limit=limit, only=only)))

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
        """Return the live workers."""

        def read(db: "_Transaction") -> list[WorkerRow]:
            rows = db.rows(f"SELECT name, state, facts, draining FROM workers WHERE {db.is_live} ORDER BY name")
            return [WorkerRow(name, state, json.loads(facts), bool(draining)) for name, state, facts, draining in rows]

        return self._read(read)

    def unserved(self) -> list[str]:
        """Return the models that have waiting jobs but no live worker."""
        text = "SELECT DISTINCT model FROM jobs WHERE place = :place AND status = 'queued'"
        waiting = self._read(lambda db: db.rows(text))
        served = {model for worker in self.workers() for model in worker.facts.get("models", ())} if waiting else ()
        return sorted(model for (model,) in waiting if model not in served)

    # Workers

    def register(self, worker: str, state: str, facts: Mapping[str, Any], ttl: float = TTL) -> None:
        """Register a worker or update its state, and extend its lease.

        Args:
            worker: The worker's name, unique across all processes, past ones too.
            state: LOADING or READY.
            facts: Its host, process and models.
            ttl: Seconds without a heartbeat after which the lease expires.
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

    def lease(self, worker: str, models: Sequence[str], *, limit: int = 1, ttl: float = TTL) -> list[Job]:
        """Lease jobs to a worker: those that it already has, otherwise the first of the queue.

        With a `limit` of 1 the job counts as started; jobs of a batch are started one by one with `begin`.

        Args:
            worker: The name of a registered worker.
            models: The models that the worker serves.
            limit: Maximum number of jobs of one batch.
            ttl: Seconds without a heartbeat after which the lease expires.

        Returns:
            The jobs; empty if none waits, or if the worker is draining or not registered.
        """
        held = f"{HELD} AND worker = :worker AND status IN ('queued', 'in_progress')"
        names = {f"model{number}": model for number, model in enumerate(models)}
        values = ", ".join(f":{name}" for name in names)
        free = f"place = :place AND status = 'queued' AND worker = '' AND model IN ({values})"

        def lease_jobs(db: "_Transaction") -> list[Job]:
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
            if limit == 1 or not job.batch:
                db.update(job.id, worker=worker, status=RUNNING, attempts=job.attempts + 1)
            else:
                same_batch = f"SELECT id FROM jobs WHERE {free} AND batch = :batch ORDER BY position LIMIT :limit"
                db.execute(
                    f"UPDATE jobs SET worker = :worker WHERE place = :place AND id IN ({same_batch})",
                    worker=worker,
                    batch=job.batch,
                    limit=limit,
                    **names,
                )
            return db.jobs(f"{held} ORDER BY position", worker=worker)

        return self._run(lease_jobs, durable=False) if names else []

    def begin(self, worker: str, id: str) -> Signal:
        """Record that a worker starts one of its leased jobs, which counts as an attempt.

        Args:
            worker: The worker's name.
            id: The job's id.
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
        """Extend a worker's lease, and store its job's progress if that changed.

        Args:
            worker: The worker's name.
            id: The job that is running, if any.
            progress: The job's progress; None for no change.
            ttl: Seconds without a heartbeat after which the lease expires.

        Returns:
            What the worker should do next.
        """

        def change(db: "_Transaction") -> Signal:
            job = None if id is None else db.held(worker, id)
            if job is not None and progress is not None and progress != job.progress:
                db.tick()
                job = db.held(worker, job.id)  # read again, now under the lock
                if job is not None and not job.cancel:
                    db.update(job.id, progress=json.dumps(progress))
            if (draining := db.extend(worker, ttl)) is None or (job is None and id is not None):
                return Signal.LOST
            if job is not None and job.cancel:
                return Signal.CANCEL
            return Signal.DRAIN if draining else Signal.CONTINUE

        return self._run(change, durable=False)

    def finish(self, worker: str, id: str, progress: Mapping[str, Any]) -> bool:
        """Record that a job's video is published; return False if the worker no longer owns the job.

        Args:
            worker: The worker's name.
            id: The job's id.
            progress: Final progress; its `stage_seconds` are added to the counters.
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
        """Record why a job failed; return False if the worker no longer owns the job.

        Args:
            worker: The worker's name.
            id: The job's id.
            error: `code` and `message`.
            retries: How often the job may be retried, each time from the end of the queue.
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
        """Requeue the jobs of a worker that exits, at their old positions, without counting the attempt.

        Args:
            worker: The worker's name.
        """
        self._run(
            lambda db: self._requeue_jobs(db, f"{HELD} AND worker = :name", counts=False, name=worker), durable=False
        )

    def requeue_lost(self, worker: str, why: str | None = None) -> None:
        """Requeue the jobs of a worker that died, at their old positions; the attempt counts.

        Args:
            worker: The worker's name.
            why: The cause of death, stored as the error of its running jobs.
        """
        self._run(lambda db: self._requeue_jobs(db, f"{HELD} AND worker = :name", why=why, name=worker), durable=False)

    def requeue_expired(self) -> None:
        """Requeue the jobs of workers whose lease expired; delete the rows of jobs that were removed a day ago."""
        lost_worker = (
            "worker IN (SELECT name FROM workers WHERE expires < {now}) OR worker NOT IN (SELECT name FROM workers)"
        )

        def change(db: "_Transaction") -> None:
            where = f"{HELD} AND ({lost_worker.format(now=db.now)})"
            expired_rows = "place = :place AND status = 'removed' AND worker = '' AND output = ''"
            expired_rows = f"{expired_rows} AND completed_at < {db.now} - :retention"
            expired = f"SELECT 1 FROM workers WHERE expires < {db.now} LIMIT 1"
            if db.rows(expired) or db.rows(f"SELECT 1 FROM jobs WHERE {where} LIMIT 1"):
                self._requeue_jobs(db, where)
            if db.rows(f"SELECT 1 FROM jobs WHERE {expired_rows} LIMIT 1", retention=REMOVED_RETENTION):
                db.tick()
                db.execute(f"DELETE FROM jobs WHERE {expired_rows}", retention=REMOVED_RETENTION)

        self._run(change, durable=False)

    def drain(self, worker: str) -> None:
        """Ask a worker to exit after the current step and to requeue its jobs.

        Args:
            worker: The worker's name.
        """
        self._run(lambda db: db.execute("UPDATE workers SET draining = 1 WHERE name = :name", name=worker))

    # Transactions

    def _requeue_jobs(
        self, db: "_Transaction", where: str, *, counts: bool = True, why: str | None = None, **values: Any
    ) -> None:
        """Requeue the jobs that match `where`, and delete their workers; `counts` says whether the attempts count."""
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
        names_sql = ", ".join(f":{name}" for name in names) or "''"
        db.execute(f"DELETE FROM workers WHERE name IN ({names_sql}) OR expires < {db.now}", **names)

    def _migrate(self, db: "_Transaction") -> None:
        self._database.prepare(db.connection)
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
        version = db.value("SELECT max(version) FROM schema_version") or 0
        if version > len(MIGRATIONS):
            problem = f"{self.name} has schema version {version} of a newer wanjax; this one knows {len(MIGRATIONS)}"
            raise WanjaxError(f"{problem}: upgrade wanjax, or use another --database")
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            for statement in script.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO schema_version VALUES (:number)", number=number)

    def _read(self, operation: Callable[["_Transaction"], T]) -> T:
        return self._run(operation, write=False)

    def _run(self, operation: Callable[["_Transaction"], T], *, write: bool = True, durable: bool = True) -> T:
        """Run an operation in a transaction, and retry it while the database is unavailable.

        Raises:
            Unavailable: The database is unavailable for longer than `retry_seconds`.
            DatabaseError: The database rejects the statement.
        """
        end = time.monotonic() + self.retry_seconds
        while True:
            try:
                with self._database.transaction(write=write, durable=durable) as connection:
                    return operation(_Transaction(connection, self._database.now, self.namespace))
            except self._database.errors as error:
                why, is_full = without_password(reason(error), self.url), self._database.is_full(error)
                why = f"the disk of {self.name} is full" if is_full else why
                if is_full and math.isinf(self.retry_seconds):  # a worker must record its results
                    self.reclaim()
                elif not self._database.is_transient(error):
                    problem = f"the database {self.name} cannot be used: {why}"
                    raise DatabaseError(problem, is_full) from error
                elif time.monotonic() >= end:
                    raise Unavailable(f"the database {self.name} is out of reach: {why}") from error
            time.sleep(RETRY_INTERVAL)


class _Transaction:
    """The statements of a transaction; `:place` is bound to the namespace.

    `now` is an SQL expression for the database's time, and `is_live` the condition of live workers.
    """

    def __init__(self, connection: Connection, now: str, namespace: str):
        self.connection, self.now, self._namespace = connection, now, namespace
        self.is_live = f"place = :place AND expires > {now}"
        self._version = 0

    def execute(self, text: str, **values: Any) -> Any:
        return self.connection.execute(text, {"place": self._namespace, **values})

    def execute_many(self, text: str, rows: Sequence[Values]) -> None:
        self.connection.executemany(text, [{"place": self._namespace, **row} for row in rows])

    def rows(self, text: str, **values: Any) -> list[Any]:
        return self.execute(text, **values).fetchall()

    def value(self, text: str, **values: Any) -> Any:
        """Return the first value of the first row; None where there is no row."""
        row = self.execute(text, **values).fetchone()
        return row[0] if row is not None else None

    def tick(self, count: int = 1) -> int:
        """Return a new version, and lock out other writers until the end of this transaction."""
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
        """Return a job that clients can see, or an `arriving` one; raise NotFound for others."""
        job = self.find(id)
        if job is None or job.status == REMOVED or (job.status == ARRIVING and not arriving):
            raise NotFound("there is no video of this id")
        return job

    def held(self, worker: str, id: str) -> Job | None:
        """Return a job if this worker owns it, removed jobs included."""
        job = self.find(id)
        return job if job is not None and job.worker == worker and job.status not in (COMPLETED, FAILED) else None

    def extend(self, worker: str, ttl: float) -> int | None:
        """Extend a worker's lease; return its `draining` flag, or None if it is not registered."""
        text = f"UPDATE workers SET expires = {self.now} + :ttl WHERE name = :worker RETURNING draining"
        return self.value(text, worker=worker, ttl=ttl)

    def waiting(self) -> int:
        return self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'queued'")

    def with_ranks(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with their rank in `ahead`, for the first MAX_RANKED of the queue."""
        if all(job.status != QUEUED for job in jobs):
            return list(jobs)
        text = "SELECT position FROM jobs WHERE place = :place AND status = 'queued' ORDER BY position LIMIT :limit"
        running = self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'in_progress'")
        ranks = {position: number for number, (position,) in enumerate(self.rows(text, limit=MAX_RANKED), running)}
        return [replace(job, ahead=ranks.get(job.position)) if job.status == QUEUED else job for job in jobs]

    def update(self, id: str, *, ended: bool = False, **columns: Any) -> None:
        """Update columns of a job; with `ended` also set its completion time."""
        sets = [f"{name} = :{name}" for name in columns] + ([f"completed_at = {self.now}"] if ended else [])
        text = f"UPDATE jobs SET {', '.join([*sets, 'version = :version'])} WHERE place = :place AND id = :id"
        self.execute(text, id=id, version=self.tick(), **columns)

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel waiting jobs, and request the cancellation of running ones."""
        self.tick()
        for id in ids:
            job = self.find(id)
            if job is not None and job.status == QUEUED:
                self.end(id, FAILED, CANCELLATION, cancel=1)
            elif job is not None and not job.is_over:
                self.update(id, cancel=1)

    def end(self, id: str, status: str, error: Mapping[str, str] | None, **columns: Any) -> None:
        """Set a job's final status and count it."""
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
