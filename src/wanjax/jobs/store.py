# SPDX-License-Identifier: Apache-2.0
"""The job queue in a database, which servers, batches and workers access directly.

Every method is one idempotent transaction, so the caller can repeat a call if its answer was lost. A worker owns a job
from the lease until it finishes or requeues the job, or until the lease expires without a heartbeat. Worker names are
never reused, so a worker whose lease expired cannot change a job that another worker owns now. All times come from the
database's clock, so the clocks of the hosts do not matter.

Jobs, workers and counters belong to a namespace. Each shared folder of videos has one namespace
(`wanjax.jobs.sharing`). One database may have many namespaces. A client sees only its own namespace.
In the tables, the column `place` has the namespace, and the column `facts` has `WorkerRow.info`.

Each change gets a version number. Versions increase in commit order, because the row `clock` stays locked until the
commit. A transaction takes this lock before any other, which prevents deadlocks. A version is at least the time in
microseconds. So a database that lost its last changes in a crash does not reuse versions that clients have read.
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
from wanjax.figures import pluralize
from wanjax.jobs.databases import Connection, DatabaseError, SqlValues, mask_password, open_database

ARRIVING, QUEUED, RUNNING = "arriving", "queued", "in_progress"
COMPLETED, FAILED, REMOVED = "completed", "failed", "removed"
CANCELLED, STOPPED = "cancelled", "server_stopped"  # error codes
CANCELLATION = {"code": CANCELLED, "message": "the video was cancelled"}
TTL = 30.0  # seconds without a heartbeat after which a worker loses its jobs
RETRY_SECONDS, RETRY_INTERVAL = (
    5.0,
    0.2,
)  # seconds to retry while the database is unavailable, and seconds between two attempts
RETAINED_FAILURES = 200  # failed jobs whose files are kept
REMOVED_RETENTION = 86_400.0  # seconds that a removed job's row is kept, for clients that poll changes
ARRIVAL_TIMEOUT = 3600.0  # seconds that the upload of a job's files may take
MAX_RANKED = 1000  # `jobs_ahead` is computed for at most this many queued jobs
SEARCH_PAGE = 500  # jobs that a search reads per query
IS_LEASED_SQL = "place = :place AND worker != ''"  # must equal the condition of the index jobs_held
T = TypeVar("T")

MIGRATIONS = [  # only append to this list: the version of the schema is the number of scripts that were run
    """
    CREATE TABLE clock (version BIGINT NOT NULL);
    INSERT INTO clock VALUES (1);
    CREATE TABLE places (id TEXT PRIMARY KEY);
    CREATE TABLE jobs (
        place TEXT NOT NULL,
        id TEXT NOT NULL,
        position BIGINT NOT NULL,           -- order in the queue: the version at which the job was added
        status TEXT NOT NULL,
        model TEXT NOT NULL,
        batch TEXT NOT NULL,                -- digest of the settings that jobs of one run share
        request TEXT NOT NULL,              -- JSON
        output TEXT NOT NULL,               -- the video's path, relative to the shared folder
        worker TEXT NOT NULL DEFAULT '',
        attempts INTEGER NOT NULL DEFAULT 0,
        cancel INTEGER NOT NULL DEFAULT 0,
        progress TEXT NOT NULL DEFAULT '{}',
        error TEXT,
        created_at DOUBLE PRECISION NOT NULL,
        completed_at DOUBLE PRECISION,      -- or the time of removal
        version BIGINT NOT NULL,
        PRIMARY KEY (place, id)
    );
    CREATE INDEX jobs_queue ON jobs (place, status, position);
    CREATE INDEX jobs_position ON jobs (place, position);
    CREATE INDEX jobs_version ON jobs (place, version);
    CREATE INDEX jobs_held ON jobs (place, worker, position) WHERE worker != '';
    CREATE TABLE workers (                  -- one heartbeat extends the lease of all jobs of a worker
        name TEXT PRIMARY KEY,
        place TEXT NOT NULL,                -- '' until the worker has joined a namespace
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
        super().__init__(f"the queue has {pluralize(limit, 'video')}, which is the limit: try again later")
        self.limit = limit

    def __reduce__(self) -> Any:
        return QueueFull, (self.limit,)


class NotFound(LookupError):
    """No job has this id."""


class Signal(Enum):
    """The answer to a heartbeat."""

    CONTINUE = "continue"
    CANCEL = "cancel"  # stop the job
    DRAIN = "drain"  # requeue the jobs and exit
    LOST = "lost"  # the worker no longer owns the job


@dataclass(frozen=True)
class Job:
    """A request with its state: one row of the table `jobs`.

    Args:
        id: Unique within the namespace.
        position: Position in the queue; the lowest is next.
        status: `arriving`, `queued`, `in_progress`, `completed`, `failed` or `removed`.
        model: The model that makes the video.
        batch: Key of the jobs that may share a run; "" for a job that runs alone.
        request: A `VideoRequest` as JSON.
        output: The video's path, relative to the namespace's folder.
        worker: Name of the worker that leased the job, or "".
        attempts: How many times workers have started the job.
        cancel: Whether cancellation was requested.
        progress: Latest progress from its worker.
        error: `code` and `message` of the failure or of the last failed attempt.
        created_at: Seconds since 1970, on the database's clock.
        completed_at: Time when the job completed, failed or was removed; None before.
        version: Version of the job's last change.
        jobs_ahead: Number of jobs before this job in the queue; None for a job that is not queued.
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
    jobs_ahead: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job is completed, failed or removed."""
        return self.status in (COMPLETED, FAILED, REMOVED)


@dataclass(frozen=True)
class NewJob:
    """A job to add to the queue.

    Args:
        id: Unique within the namespace.
        request: A `VideoRequest` as JSON.
        model: The name of the model that makes the video.
        output: The video's path, relative to the namespace's folder.
        batch: Key of the jobs that may share a run; "" for a job that runs alone.
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
        name: The worker's name.
        state: LOADING or READY.
        info: The worker's host, process and models.
        draining: Whether the worker was asked to requeue its jobs and to exit.
    """

    name: str
    state: str
    info: dict[str, Any]
    draining: bool


@dataclass(frozen=True)
class Stats:
    """Counts of the jobs and workers in a namespace.

    Args:
        jobs: The number of jobs by status.
        workers: The number of workers by state.
        counters: Numbers of completed, failed and cancelled jobs, and the total seconds of each stage as
            `seconds_STAGE`.
    """

    jobs: dict[str, int]
    workers: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)


class JobStore:
    """The jobs of one namespace in a database. A pickled store contains only its arguments, and reconnects when loaded.

    Args:
        url: Path of an SQLite file, or URL of a PostgreSQL database. The tables of the database are created or migrated
            if needed.
        retry_seconds: Seconds to retry while the database is unavailable, before `Unavailable` is raised. With inf,
            retry forever, also while the disk of the database is full.
        namespace: The namespace's id; "" for a database with a single user, or until `use_namespace` is called.

    Raises:
        WanjaxError: The URL is wrong, the login is rejected, or a newer wanjax created the tables.
    """

    def __init__(self, url: str, retry_seconds: float = RETRY_SECONDS, namespace: str = ""):
        self.url, self.retry_seconds, self.namespace = url, retry_seconds, namespace
        self._database = open_database(url)
        try:
            self._run(self._migrate)
            # moves the changes from the log into the database file, so that small changes need no additional space
            self.reclaim()
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
        """Return a copy of the store with other `retry_seconds`, on the same connections.

        Args:
            seconds: The new `retry_seconds`.
        """
        copied_store = object.__new__(type(self))  # `copy.copy` would open the database again
        vars(copied_store).update(vars(self), retry_seconds=seconds)
        return copied_store

    def reclaim(self) -> None:
        """If the disk of the database is full, free space for a few changes."""
        with suppress(*self._database.errors):
            self._database.reclaim()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def use_namespace(self, namespace: str, *, is_new: bool) -> bool:
        """Switch to the jobs of a namespace; return False if it is not registered in this database.

        Args:
            namespace: The namespace's id.
            is_new: Whether to register it. Clients that add jobs register their namespace.
        """

        def register(db: "_Transaction") -> bool:
            if is_new:
                db.execute("INSERT INTO places VALUES (:id) ON CONFLICT (id) DO NOTHING", id=namespace)
            return bool(db.rows("SELECT 1 FROM places WHERE id = :id", id=namespace))

        if is_registered := self._run(register, writes=is_new):
            self.namespace = namespace
        return is_registered

    # Methods for clients

    def add(self, new: NewJob, *, limit: int | None = None, is_arriving: bool = False) -> Job:
        """Add a job at the end of the queue. The job is on disk when this returns.

        Args:
            new: The job. If the queue has a job with this id, that job stays unchanged unless its files were arriving.
            limit: Maximum number of waiting jobs; None for no limit.
            is_arriving: Whether the files of the job are still being uploaded. When they are there, add the job again
                with False.

        Raises:
            QueueFull: `limit` jobs are waiting.
        """

        def insert(db: "_Transaction") -> Job:
            version = db.next_version()  # locks out other writers, so the limit is exact
            if (job := db.find(new.id)) is not None and job.status != ARRIVING:
                return db.with_queue_positions([job])[0]  # the answer to the first call was lost
            if limit is not None and db.num_waiting() >= limit:
                raise QueueFull(limit)
            db.execute(
                INSERT_JOB.format(now=db.now),
                version=version,
                status=ARRIVING if is_arriving else QUEUED,
                **_new_job_columns(new),
            )
            return db.with_queue_positions([db.get(new.id, arriving=is_arriving)])[0]

        return self._run(insert)

    def add_all(self, jobs: Sequence[NewJob]) -> None:
        """Add jobs in this order. Finished jobs with the same ids restart; waiting and running ones stay unchanged.

        Args:
            jobs: The jobs.
        """

        def insert(db: "_Transaction") -> None:
            first = db.next_version(len(jobs)) - len(jobs)
            db.execute_many(
                INSERT_JOB.format(now=db.now)
                + """, attempts = 0, cancel = 0, progress = '{}', error = NULL, completed_at = NULL
                WHERE jobs.worker = '' AND jobs.status IN ('completed', 'failed', 'removed')""",
                [
                    _new_job_columns(job) | {"version": first + number, "status": QUEUED}
                    for number, job in enumerate(jobs, 1)
                ],
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
        return self._read(lambda db: db.with_queue_positions([db.get(id)])[0])

    def page(
        self,
        limit: int,
        *,
        after: str | None = None,
        newest_first: bool = True,
        matches: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> tuple[list[Job], bool]:
        """Return a page of jobs, and whether there are more.

        Args:
            limit: Maximum number of jobs.
            after: The id of the last job of the previous page; None for the first page.
            newest_first: Whether the newest jobs come first.
            matches: Returns whether to list the job of a request; None to list all jobs.

        Raises:
            NotFound: No job has the id `after`.
        """

        def read(db: "_Transaction") -> tuple[list[Job], bool]:
            comparison, order = ("<", "DESC") if newest_first else (">", "ASC")
            page_size = SEARCH_PAGE if matches else limit + 1
            page_start = {} if after is None else {"after": db.get(after).position}
            jobs: list[Job] = []
            while len(jobs) <= limit:
                where = f"AND position {comparison} :after" if page_start else ""
                where = f"place = :place AND status NOT IN ('arriving', 'removed') {where}"
                rows = db.jobs(f"{where} ORDER BY position {order} LIMIT :limit", limit=page_size, **page_start)
                jobs += [job for job in rows if matches is None or matches(job.request)]
                if len(rows) < page_size:
                    break
                page_start = {"after": rows[-1].position}
            return db.with_queue_positions(jobs[:limit]), len(jobs) > limit

        return self._read(read)

    def queue(self) -> list[Job]:
        """Return the waiting jobs in order, at most MAX_RANKED."""
        sql = "place = :place AND status = 'queued' ORDER BY position LIMIT :limit"
        return self._read(lambda db: db.with_queue_positions(db.jobs(sql, limit=MAX_RANKED)))

    def num_waiting(self) -> int:
        """Return the number of waiting jobs."""
        return self._read(lambda db: db.num_waiting())

    def cancel(self, id: str) -> Job:
        """Cancel a job: a waiting job at once, a running job at its worker's next heartbeat.

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
            The job before its removal. The caller deletes its files, unless a worker owns the job: then
            `deletable_jobs` returns it later.

        Raises:
            NotFound: No job has this id.
        """

        def change(db: "_Transaction") -> Job:
            db.lock_writers()
            job = db.get(id, arriving=True)
            if job.status == QUEUED:
                db.count(CANCELLED)
            db.update(id, cancel=1, status=REMOVED, has_ended=True)
            return job

        return self._run(change)

    def deletable_jobs(self) -> list[Job]:
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
        """Record that the files of a removed job were deleted. The job's row is deleted one day after its removal.

        Args:
            id: The job's id.
        """
        self._run(
            lambda db: db.execute(
                "UPDATE jobs SET output = '' WHERE place = :place AND id = :id AND status = 'removed'", id=id
            ),
            durable=False,
        )

    def changes(self, since: int, *, job_id: str | None = None, limit: int = 500) -> list[Job]:
        """Return the jobs that changed after a version, in the order of their last changes. Removed jobs are included.

        Args:
            since: The version.
            job_id: Return only the job of this id; None for all jobs.
            limit: Maximum number of jobs.
        """
        id_condition = "" if job_id is None else "AND id = :only"
        where = (
            f"place = :place AND version > :since AND status != 'arriving' {id_condition} ORDER BY version LIMIT :limit"
        )
        return self._read(lambda db: db.with_queue_positions(db.jobs(where, since=since, limit=limit, only=job_id)))

    def version(self) -> int:
        """Return the version of the last change in the database."""
        return self._read(lambda db: db.value("SELECT version FROM clock"))

    def stats(self) -> Stats:
        """Count jobs and workers."""

        def read(db: "_Transaction") -> Stats:
            return Stats(
                dict(db.rows("SELECT status, count(*) FROM jobs WHERE place = :place GROUP BY status")),
                dict(db.rows(f"SELECT state, count(*) FROM workers WHERE {db.live_workers_sql} GROUP BY state")),
                dict(db.rows("SELECT name, value FROM counters WHERE place = :place")),
            )

        return self._read(read)

    def workers(self) -> list[WorkerRow]:
        """Return the live workers."""

        def read(db: "_Transaction") -> list[WorkerRow]:
            rows = db.rows(
                f"SELECT name, state, facts, draining FROM workers WHERE {db.live_workers_sql} ORDER BY name"
            )
            return [WorkerRow(name, state, json.loads(info), bool(draining)) for name, state, info, draining in rows]

        return self._read(read)

    def models_without_worker(self) -> list[str]:
        """Return the models that have waiting jobs but no live worker."""
        sql = "SELECT DISTINCT model FROM jobs WHERE place = :place AND status = 'queued'"
        queued_models = self._read(lambda db: db.rows(sql))
        served = (
            {model for worker in self.workers() for model in worker.info.get("models", ())} if queued_models else ()
        )
        return sorted(model for (model,) in queued_models if model not in served)

    # Methods for workers

    def register(self, worker: str, state: str, info: Mapping[str, Any], ttl: float = TTL) -> None:
        """Register a worker or update its state, and extend its lease.

        Args:
            worker: The worker's name, which no other worker has or had.
            state: LOADING or READY.
            info: The worker's host, process and models.
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
                facts=json.dumps(info),
                ttl=ttl,
            ),
            durable=False,
        )

    def lease(self, worker: str, models: Sequence[str], *, limit: int = 1, ttl: float = TTL) -> list[Job]:
        """Lease jobs to a worker: the jobs that it already owns, otherwise the first jobs of the queue.

        With a `limit` of 1 the leased job counts as started. Otherwise `begin` starts the jobs one by one.

        Args:
            worker: The name of a registered worker.
            models: Names of the models that the worker can run.
            limit: Maximum number of jobs; all of them have the same `batch`.
            ttl: Seconds without a heartbeat after which the lease expires.

        Returns:
            The jobs; empty if no job waits, or if the worker is draining or not registered.
        """
        leased_by_worker_sql = f"{IS_LEASED_SQL} AND worker = :worker AND status IN ('queued', 'in_progress')"
        model_names = {f"model{index}": model for index, model in enumerate(models)}
        placeholders = ", ".join(f":{name}" for name in model_names)
        available_sql = f"place = :place AND status = 'queued' AND worker = '' AND model IN ({placeholders})"

        def lease_jobs(db: "_Transaction") -> list[Job]:
            if not db.rows(f"SELECT 1 FROM jobs WHERE {leased_by_worker_sql} LIMIT 1", worker=worker) and not db.rows(
                f"SELECT 1 FROM jobs WHERE {available_sql} ORDER BY position LIMIT 1", **model_names
            ):
                db.extend_lease(worker, ttl)
                return []
            db.lock_writers()
            if db.extend_lease(worker, ttl) != 0:
                return []
            if jobs := db.jobs(f"{leased_by_worker_sql} ORDER BY position", worker=worker):
                return jobs
            if not (first := db.jobs(f"{available_sql} ORDER BY position LIMIT 1", **model_names)):
                return []
            [job] = first
            if limit == 1 or not job.batch:
                db.update(job.id, worker=worker, status=RUNNING, attempts=job.attempts + 1)
            else:
                same_batch_sql = (
                    f"SELECT id FROM jobs WHERE {available_sql} AND batch = :batch ORDER BY position LIMIT :limit"
                )
                db.execute(
                    f"UPDATE jobs SET worker = :worker WHERE place = :place AND id IN ({same_batch_sql})",
                    worker=worker,
                    batch=job.batch,
                    limit=limit,
                    **model_names,
                )
            return db.jobs(f"{leased_by_worker_sql} ORDER BY position", worker=worker)

        return self._run(lease_jobs, durable=False) if model_names else []

    def begin(self, worker: str, id: str) -> Signal:
        """Record that a worker starts one of its leased jobs, which counts as an attempt.

        Args:
            worker: The worker's name.
            id: The job's id.
        """

        def change(db: "_Transaction") -> Signal:
            db.lock_writers()
            if (job := db.owned_job(worker, id)) is None:
                return Signal.LOST
            if job.cancel:
                return Signal.CANCEL
            if job.status == QUEUED:
                db.update(id, status=RUNNING, attempts=job.attempts + 1)
            return Signal.CONTINUE

        return self._run(change, durable=False)

    def heartbeat(self, worker: str, id: str | None, progress: Mapping[str, Any] | None, ttl: float = TTL) -> Signal:
        """Extend a worker's lease, and store its job's progress if it changed.

        Args:
            worker: The worker's name.
            id: The id of the running job; None if no job is running.
            progress: The job's progress; None for no change.
            ttl: Seconds without a heartbeat after which the lease expires.

        Returns:
            What the worker should do next.
        """

        def change(db: "_Transaction") -> Signal:
            job = None if id is None else db.owned_job(worker, id)
            if job is not None and progress is not None and progress != job.progress:
                db.lock_writers()
                job = db.owned_job(worker, job.id)  # read again, because the row may have changed before the lock
                if job is not None and not job.cancel:
                    db.update(job.id, progress=json.dumps(progress))
            if (draining := db.extend_lease(worker, ttl)) is None or (job is None and id is not None):
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
            progress: The final progress. The `stage_seconds` of the progress are added to the counters.
        """

        def change(db: "_Transaction") -> bool:
            db.lock_writers()
            if (job := db.owned_job(worker, id)) is None:
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
            retries: Maximum number of retries. Each retry starts at the end of the queue.
        """

        def change(db: "_Transaction") -> bool:
            version = db.next_version()
            if (job := db.owned_job(worker, id)) is None:
                return False
            if job.status == REMOVED:
                db.update(id, worker="")
                db.count(CANCELLED)
            elif job.cancel or job.attempts > retries:
                db.end(id, FAILED, CANCELLATION if job.cancel else error)
            else:
                db.update(id, position=version, error=json.dumps(error), **REQUEUED_COLUMNS)
            return True

        return self._run(change, durable=False)

    def requeue(self, worker: str) -> None:
        """Requeue the jobs of a worker that exits, at their old positions. The attempts do not count.

        Args:
            worker: The worker's name.
        """
        self._run(
            lambda db: self._requeue_jobs(db, f"{IS_LEASED_SQL} AND worker = :name", counts_attempt=False, name=worker),
            durable=False,
        )

    def requeue_lost(self, worker: str, cause: str | None = None) -> None:
        """Requeue the jobs of a worker that died, at their old positions. The attempts count.

        Args:
            worker: The worker's name.
            cause: Why the worker died, stored as the error of its running jobs; None to keep their errors.
        """
        self._run(
            lambda db: self._requeue_jobs(db, f"{IS_LEASED_SQL} AND worker = :name", cause=cause, name=worker),
            durable=False,
        )

    def requeue_expired(self) -> None:
        """Requeue the jobs of workers whose lease expired; delete the rows of jobs that were removed over a day ago."""
        lost_worker_sql = (
            "worker IN (SELECT name FROM workers WHERE expires < {now}) OR worker NOT IN (SELECT name FROM workers)"
        )

        def change(db: "_Transaction") -> None:
            where = f"{IS_LEASED_SQL} AND ({lost_worker_sql.format(now=db.now)})"
            purgeable_sql = "place = :place AND status = 'removed' AND worker = '' AND output = ''"
            purgeable_sql = f"{purgeable_sql} AND completed_at < {db.now} - :retention"
            expired_worker_query = f"SELECT 1 FROM workers WHERE expires < {db.now} LIMIT 1"
            if db.rows(expired_worker_query) or db.rows(f"SELECT 1 FROM jobs WHERE {where} LIMIT 1"):
                self._requeue_jobs(db, where)
            if db.rows(f"SELECT 1 FROM jobs WHERE {purgeable_sql} LIMIT 1", retention=REMOVED_RETENTION):
                db.lock_writers()
                db.execute(f"DELETE FROM jobs WHERE {purgeable_sql}", retention=REMOVED_RETENTION)

        self._run(change, durable=False)

    def drain(self, worker: str) -> None:
        """Ask a worker to exit after the current step and to requeue its jobs.

        Args:
            worker: The worker's name.
        """
        self._run(lambda db: db.execute("UPDATE workers SET draining = 1 WHERE name = :name", name=worker))

    # Transactions

    def _requeue_jobs(
        self, db: "_Transaction", where: str, *, counts_attempt: bool = True, cause: str | None = None, **values: Any
    ) -> None:
        """Requeue the jobs that match `where`, and delete their workers.

        `counts_attempt` says whether the attempts of running jobs count.
        """
        db.lock_writers()
        jobs = db.jobs(where, **values)
        for job in jobs:
            if job.status == REMOVED:
                db.update(job.id, worker="")
            elif job.status == RUNNING and not counts_attempt and not job.cancel:
                db.update(job.id, attempts=job.attempts - 1, **REQUEUED_COLUMNS)
            elif job.cancel:
                db.end(job.id, FAILED, CANCELLATION)
            else:
                error = job.error if cause is None or job.status != RUNNING else {"code": STOPPED, "message": cause}
                db.update(job.id, error=error and json.dumps(error), **REQUEUED_COLUMNS)
        parameters = {**values, **{f"name{n}": name for n, name in enumerate({job.worker for job in jobs})}}
        placeholders = ", ".join(f":{name}" for name in parameters) or "''"
        db.execute(f"DELETE FROM workers WHERE name IN ({placeholders}) OR expires < {db.now}", **parameters)

    def _migrate(self, db: "_Transaction") -> None:
        self._database.prepare(db.connection)
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
        version = db.value("SELECT max(version) FROM schema_version") or 0
        if version > len(MIGRATIONS):
            problem = (
                f"a newer wanjax wrote schema version {version} to {self.name}; this one reads up to {len(MIGRATIONS)}"
            )
            raise WanjaxError(f"{problem}: upgrade wanjax, or use another --database")
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            for statement in script.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO schema_version VALUES (:number)", number=number)

    def _read(self, operation: Callable[["_Transaction"], T]) -> T:
        return self._run(operation, writes=False)

    def _run(self, operation: Callable[["_Transaction"], T], *, writes: bool = True, durable: bool = True) -> T:
        """Run an operation in a transaction, and retry it while the database is unavailable.

        Raises:
            Unavailable: The database is unavailable for longer than `retry_seconds`.
            DatabaseError: The database rejects the statement.
        """
        end = time.monotonic() + self.retry_seconds
        while True:
            try:
                with self._database.transaction(writes=writes, durable=durable) as connection:
                    return operation(_Transaction(connection, self._database.now, self.namespace))
            except self._database.errors as error:
                cause, is_full = mask_password(reason(error), self.url), self._database.is_full(error)
                cause = f"the disk of {self.name} is full" if is_full else cause
                if is_full and math.isinf(self.retry_seconds):  # a worker waits, because it must record its results
                    self.reclaim()
                elif not self._database.is_transient(error):
                    problem = f"the database {self.name} cannot be used: {cause}"
                    raise DatabaseError(problem, is_full) from error
                elif time.monotonic() >= end:
                    raise Unavailable(f"the database {self.name} does not answer: {cause}") from error
            time.sleep(RETRY_INTERVAL)


class _Transaction:
    """The SQL statements of a transaction. In each statement, `:place` is the namespace.

    `now` is an SQL expression for the database's time. `live_workers_sql` is the condition for workers whose lease has
    not expired.
    """

    def __init__(self, connection: Connection, now: str, namespace: str):
        self.connection, self.now, self._namespace = connection, now, namespace
        self.live_workers_sql = f"place = :place AND expires > {now}"
        self._version = 0

    def execute(self, sql: str, **values: Any) -> Any:
        return self.connection.execute(sql, {"place": self._namespace, **values})

    def execute_many(self, sql: str, rows: Sequence[SqlValues]) -> None:
        self.connection.executemany(sql, [{"place": self._namespace, **row} for row in rows])

    def rows(self, sql: str, **values: Any) -> list[Any]:
        return self.execute(sql, **values).fetchall()

    def value(self, sql: str, **values: Any) -> Any:
        """Return the first value of the first row, or None if there is no row."""
        row = self.execute(sql, **values).fetchone()
        return row[0] if row is not None else None

    def next_version(self, count: int = 1) -> int:
        """Return a new version. Other writers have to wait until the end of this transaction."""
        if not self._version:
            now, after = f"CAST({self.now} * 1e6 AS BIGINT)", "version + :count"
            sql = f"UPDATE clock SET version = CASE WHEN {after} > {now} THEN {after} ELSE {now} END RETURNING version"
            self._version = self.value(sql, count=count)
        return self._version

    def lock_writers(self) -> None:
        """Make other writers wait until the end of this transaction. Reads after this call are up to date."""
        self.next_version()

    def jobs(self, where: str, **values: Any) -> list[Job]:
        return [_parse_row(row) for row in self.rows(f"SELECT {SELECTED_COLUMNS} FROM jobs WHERE {where}", **values)]

    def find(self, id: str) -> Job | None:
        return next(iter(self.jobs("place = :place AND id = :id", id=id)), None)

    def get(self, id: str, *, arriving: bool = False) -> Job:
        """Return a job that clients can see. With `arriving`, also return a job that is still being uploaded. Raises
        NotFound for other ids."""
        job = self.find(id)
        if job is None or job.status == REMOVED or (job.status == ARRIVING and not arriving):
            raise NotFound("there is no video with this id")
        return job

    def owned_job(self, worker: str, id: str) -> Job | None:
        """Return a job if this worker owns it, even if the job is removed. Otherwise return None."""
        job = self.find(id)
        return job if job is not None and job.worker == worker and job.status not in (COMPLETED, FAILED) else None

    def extend_lease(self, worker: str, ttl: float) -> int | None:
        """Extend a worker's lease, and return its `draining` flag. Return None if the worker is not registered."""
        sql = f"UPDATE workers SET expires = {self.now} + :ttl WHERE name = :worker RETURNING draining"
        return self.value(sql, worker=worker, ttl=ttl)

    def num_waiting(self) -> int:
        return self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'queued'")

    def with_queue_positions(self, jobs: Sequence[Job]) -> list[Job]:
        """Set `jobs_ahead` of jobs that are among the first MAX_RANKED jobs of the queue. Return the jobs."""
        if all(job.status != QUEUED for job in jobs):
            return list(jobs)
        sql = "SELECT position FROM jobs WHERE place = :place AND status = 'queued' ORDER BY position LIMIT :limit"
        num_running = self.value("SELECT count(*) FROM jobs WHERE place = :place AND status = 'in_progress'")
        jobs_ahead = {
            position: number for number, (position,) in enumerate(self.rows(sql, limit=MAX_RANKED), num_running)
        }
        return [replace(job, jobs_ahead=jobs_ahead.get(job.position)) if job.status == QUEUED else job for job in jobs]

    def update(self, id: str, *, has_ended: bool = False, **columns: Any) -> None:
        """Update columns of a job. With `has_ended`, also set its completion time."""
        assignments = [f"{name} = :{name}" for name in columns] + ([f"completed_at = {self.now}"] if has_ended else [])
        sql = f"UPDATE jobs SET {', '.join([*assignments, 'version = :version'])} WHERE place = :place AND id = :id"
        self.execute(sql, id=id, version=self.next_version(), **columns)

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel waiting jobs, and request the cancellation of running ones."""
        self.lock_writers()
        for id in ids:
            job = self.find(id)
            if job is not None and job.status == QUEUED:
                self.end(id, FAILED, CANCELLATION, cancel=1)
            elif job is not None and not job.is_over:
                self.update(id, cancel=1)

    def end(self, id: str, status: str, error: Mapping[str, str] | None, **columns: Any) -> None:
        """Set a job's final status, and increment the counter of that status."""
        error_json = None if error is None else json.dumps(error)
        self.update(id, status=status, worker="", error=error_json, has_ended=True, **columns)
        self.count(CANCELLED if error is not None and error["code"] == CANCELLED else status)

    def count(self, *names: str, amounts: Sequence[float] = (1.0,)) -> None:
        """Add amounts to counters."""
        self.execute_many(
            """INSERT INTO counters VALUES (:place, :name, :amount)
            ON CONFLICT (place, name) DO UPDATE SET value = counters.value + excluded.value""",
            [{"name": name, "amount": amount} for name, amount in sorted(zip(names, amounts, strict=True))],
        )


INSERT_JOB = """
    INSERT INTO jobs (place, id, position, status, model, batch, request, output, created_at, version)
    VALUES (:place, :id, :version, :status, :model, :batch, :request, :output, {now}, :version)
    ON CONFLICT (place, id) DO UPDATE SET position = excluded.position, status = excluded.status,
        model = excluded.model, batch = excluded.batch, request = excluded.request, output = excluded.output,
        created_at = excluded.created_at, version = excluded.version"""
REQUEUED_COLUMNS: dict[str, Any] = {"status": QUEUED, "worker": "", "progress": "{}"}
JOB_COLUMNS = tuple(column.name for column in fields(Job))[:-1]  # all fields except `jobs_ahead`
SELECTED_COLUMNS = ", ".join(JOB_COLUMNS)


def _new_job_columns(job: NewJob) -> dict[str, Any]:
    return {**vars(job), "request": json.dumps(job.request)}


def _parse_row(row: Sequence[Any]) -> Job:
    columns: dict[str, Any] = dict(zip(JOB_COLUMNS, row, strict=True))
    for name in ("request", "progress", "error"):
        columns[name] = columns[name] and json.loads(columns[name])
    columns["cancel"] = bool(columns["cancel"])
    return Job(**columns)
