# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of Ray, on this machine or on those of a cluster. A worker that dies is replaced.

A worker of several hosts has an actor on each (`wanjax.cluster.lockstep`). Where one of them dies all are replaced.
"""

import os
import re
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import Any

from wanjax.cluster.batch import DIED, Batch
from wanjax.cluster.hosts import OutOfStep, Placed, bundles_of, placed, placed_together
from wanjax.cluster.worker import STAGES, Job, Outcome
from wanjax.errors import WanjaxError, reason
from wanjax.figures import quantity

STORE = 100 * 2**20  # bytes of a local object store, which holds requests and records
POLL = 1.0  # seconds between two looks at Ctrl-C
PATIENCE = 60.0  # seconds after which it is told that workers wait for a place
AHEAD = 2  # videos for each worker that denoises, that may be encoded before
ANSWERED_WITHIN = 5.0  # seconds in which a cluster accepts a connection
HOST = re.compile(r".+:\d{1,5}")
MOST_DEATHS = 10  # of workers one after another, without a video between them
NAMES = {"cpu": "num_cpus", "gpu": "num_gpus"}
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it tells nobody of itself
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it listens at this machine's own address alone, as there
}
"""Variables of a Ray cluster on this machine."""


def address_of(address: str | None) -> str | None:
    """Returns the address of the cluster to join, which the environment may name too; None where one is started."""
    return address or os.environ.get("RAY_ADDRESS") or None


def _check_answers(address: str) -> None:
    """Raise WanjaxError where nothing answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERED_WITHIN).close()
    except (OSError, OverflowError) as error:
        why = f"no Ray cluster answers at {address}: {reason(error)}"
        raise WanjaxError(f"{why}; `ray start --head` starts one") from error


@contextmanager
def connected(
    address: str | None,
    cores: float,
    dashboard: bool = False,
    store: int | None = STORE,
    variables: Mapping[str, str] = VARIABLES,
) -> Iterator[Any]:
    """Connects to the cluster at an address, or starts one on this machine with so many cores or more; yields `ray`.

    `store` are the bytes of a started one's object store, None for Ray's own choice, and `variables` are set for it.
    Raises WanjaxError where Ray is not installed, or there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise WanjaxError("several workers need Ray: pip install 'wanjax[cluster]' brings it")
    address = address_of(address)
    if address is None:
        for name, value in variables.items():
            os.environ.setdefault(name, value)
    elif address.startswith("ray://"):
        raise WanjaxError(
            f"{address} is that of a Ray client: auto, or HOST:6379, on a machine of the cluster is right"
        )
    elif HOST.fullmatch(address):
        _check_answers(address)
    if "IPython" in sys.modules and sys.modules["IPython"] is None:  # hidden from Flax by the command, and Ray asks too
        del sys.modules["IPython"]
    import ray
    from ray._private import worker as printing

    printing._worker_logs_enabled = False  # Ray prints deaths among what the command prints, without being asked
    quiet: Any = {"log_to_driver": False, "logging_level": "error"}
    own = not ray.is_initialized()
    try:
        if own and address is None:
            cpus = max(os.cpu_count() or 1, int(cores))
            ray.init("local", num_cpus=cpus, include_dashboard=dashboard, object_store_memory=store, **quiet)
        elif own:
            ray.init(address, **quiet)
    except Exception as error:  # whichever of Ray's, of which some have no class of their own
        where = f"cannot be reached at {address}" if address else "did not start on this machine"
        raise WanjaxError(f"Ray {where}: {reason(error)}") from error
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def resources_of(text: str | None, stages: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Returns the options of actors for resources such as cpu=1,gpu=1,TPU=4, by stage; "" is for those not named.

    A stage's own are such as denoise.gpu=1, and `stages` are their names. Raises WanjaxError for another text.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, number = part.strip().partition("=")
        stage, _, own = name.rpartition(".")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not own or not 0 < amount < inf or (stage and stage not in stages):
            raise WanjaxError(f"the resources are given as {text!r} where a list such as cpu=1,TPU=4 is right")
        options = found.setdefault(stage, {})
        if own in NAMES:
            options[NAMES[own]] = amount
        else:
            options.setdefault("resources", {})[own] = amount
    return found


def usual_resources(ray: Any) -> dict[str, Any]:
    """Returns what a worker is given where nobody says: the TPUs of a host, a graphics card, or a core."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if tpus := max((node.get("TPU", 0) for node in nodes), default=0):
        return {"resources": {"TPU": tpus}}
    return {"num_gpus": 1} if any(node.get("GPU") for node in nodes) else {"num_cpus": 1}


class Actors:
    """Workers of a cluster, each an actor; `counts` are their numbers by stage, and "" is that of workers for all.

    `resources` are options of an actor by stage, such as {"": {"num_cpus": 1}}. Workers of several `hosts` are for all
    stages; their resources are those of each host, and by FIRST what the first has beside them; on machines of their
    own if they `spread`.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        counts: Mapping[str, int],
        resources: Mapping[str, Mapping[str, Any]],
        note: Callable[[str], None],
        hosts: int = 1,
        spread: bool = True,
    ):
        import ray

        self.ray: Any = ray
        self.arguments, self.counts, self.note = dict(arguments), counts, note
        self._resources = {stage: resources.get(stage, resources[""]) for stage in counts}
        self._bundles = bundles_of(ray, resources, hosts) if hosts > 1 else []
        self._spread = spread
        self._lost = (self.ray.exceptions.RayError, OutOfStep)
        self._starting: dict[Any, tuple[str, Placed]] = {}  # with their stages, by what tells that they are ready
        self._watched: dict[Any, tuple[str, Placed]] = {}  # by what tells that a part of them has ended
        self._idle: dict[str, list[Placed]] = {stage: [] for stage in counts}
        self._deaths, self._since = 0, inf
        for stage, count in counts.items():
            for _ in range(count):
                self._start(stage)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def _start(self, stage: str) -> None:
        if self._bundles:
            worker = placed_together(self.ray, self.arguments, self._bundles, self._spread)
        else:
            worker = placed(self.ray, self.arguments, self._resources[stage])
        if not self._starting:
            self._since = monotonic()
        self._starting[worker.ready] = stage, worker
        self._watched |= dict.fromkeys(worker.watched, (stage, worker))

    def call(self, method: str, *given: Any, tick: Callable[[], None]) -> Any:
        """Returns the result of a method of the worker that is ready first, or of another where that dies."""
        while True:
            while not (ready := [(stage, worker) for stage, some in self._idle.items() for worker in some]):
                self._wait([], tick)
            stage, worker = ready[0]
            self._idle[stage].remove(worker)
            reference = getattr(worker.first, method).remote(*given)
            try:
                while reference not in self._wait([reference], tick):
                    pass
                value = self._value(reference)
            except self._lost:
                self._replace(stage, worker)
                continue
            self._idle[stage].append(worker)
            return value

    def outcomes(self, batch: Batch, tick: Callable[[], None]) -> Iterator[Outcome]:
        """Yields the outcome of each job of a batch, once. `tick` is called now and then, and may raise."""
        return self._by_stages(batch, tick) if len(self.counts) > 1 else self._whole(batch, tick)

    def _whole(self, batch: Batch, tick: Callable[[], None]) -> Iterator[Outcome]:
        """Yields outcomes of workers each of which makes whole videos."""
        busy: dict[Any, tuple[Placed, dict[str, Job]]] = {}  # with what is left for them, by generators of outcomes
        (idle,) = self._idle.values()
        while batch.ended < batch.total:
            while idle and (jobs := batch.take(self.count)):
                worker = idle.pop()
                given = {job.name: job for job in jobs}
                busy[worker.first.make.options(num_returns="streaming").remote(jobs)] = worker, given
            for generator in self._wait(list(busy), tick):
                worker, left = busy[generator]
                try:
                    outcome = self._value(next(generator))
                    left.pop(outcome.name)
                    ended = self._finish(batch, outcome)
                except StopIteration:
                    del busy[generator]
                    idle.append(worker)
                    continue
                except self._lost as error:
                    del busy[generator]
                    self._replace("", worker, blameless=isinstance(error, OutOfStep) or worker.fault != "")
                    if isinstance(error, OutOfStep):
                        batch.give_back(list(left.values()))
                        continue
                    ended = batch.lost(list(left.values()), worker.fault)
                if ended is not None:
                    yield ended

    def _by_stages(self, batch: Batch, tick: Callable[[], None]) -> Iterator[Outcome]:
        """Yields outcomes of workers for a stage each, between which arrays go through the object store."""
        queues: dict[str, deque[tuple[Job, Any]]] = {stage: deque() for stage in STAGES}
        busy: dict[Any, tuple[str, Placed, Job, Any]] = {}  # with what is made, by references of outcomes

        def given(stage: str) -> tuple[Job, Any] | None:
            if stage != STAGES[0]:
                return queues[stage].popleft() if queues[stage] else None
            ahead = len(queues[STAGES[1]]) < AHEAD * self.counts[STAGES[1]]  # what waits there takes memory
            jobs = batch.take(self.count, most=1) if ahead else []
            return (jobs[0], None) if jobs else None

        while batch.ended < batch.total:
            for stage in reversed(STAGES):
                while self._idle[stage] and (next_one := given(stage)) is not None:
                    worker, (job, before) = self._idle[stage].pop(), next_one
                    made, outcome = worker.first.staged.options(num_returns=2).remote(stage, job, before)
                    busy[outcome] = stage, worker, job, made
            for reference in self._wait(list(busy), tick):
                stage, worker, job, made = busy.pop(reference)
                try:
                    outcome = self._value(reference)
                    self._idle[stage].append(worker)
                except self._lost:
                    self._replace(stage, worker)
                    outcome = Outcome(job.name, error=DIED, again=True)
                if outcome is None:
                    queues[STAGES[STAGES.index(stage) + 1]].append((job, made))
                elif (ended := self._finish(batch, outcome)) is not None:
                    yield ended

    def _finish(self, batch: Batch, outcome: Outcome) -> Outcome | None:
        self._deaths = self._deaths if outcome.error else 0
        return batch.finish(outcome)

    def _wait(self, waited_for: list[Any], tick: Callable[[], None]) -> list[Any]:
        """Waits a moment for workers and outcomes; takes in workers that are ready, and returns what else is.

        Where a part of a worker has ended all of it does, which what waits for it then sees.
        """
        every = [*self._starting, *self._watched, *waited_for]
        ready, _ = self.ray.wait(every, num_returns=len(every), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(every, num_returns=1, timeout=POLL)
        tick()
        if self._starting and monotonic() - self._since > PATIENCE:
            waiting = f"{len(self._starting)} of {quantity(self.count, 'worker')}"
            self.note(f"waiting for a place in the cluster, or loading: {waiting}")
            self._since = inf
        found = []
        for one in ready:
            if one in self._starting:
                stage, worker = self._starting.pop(one)
                try:
                    self._value(one)
                    self._idle[stage].append(worker)
                except self._lost:
                    self._replace(stage, worker)
            elif one in self._watched:
                stage, worker = self._watched.pop(one)
                try:
                    self._value(one)
                except self._lost as error:
                    if isinstance(error, OutOfStep):
                        worker.fault = str(error)
                        self.note(f"one of a worker's hosts failed: {error}")
                if worker in self._idle[stage]:
                    self._idle[stage].remove(worker)
                    self._replace(stage, worker)
                else:
                    worker.end(self.ray)
            elif one in waited_for:
                found.append(one)
        return found

    def _value(self, reference: Any) -> Any:
        """Returns what a worker returned; raises what it raised as it was raised there."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def _replace(self, stage: str, worker: Placed, blameless: bool = False) -> None:
        """Starts a worker in place of one that died; raises WanjaxError where one after another does.

        A worker is `blameless` that ended because a video failed in it, which counts as a try of that video.
        """
        worker.end(self.ray)
        for one in worker.watched:
            self._watched.pop(one, None)
        self._deaths += not blameless
        if self._deaths > MOST_DEATHS + self.count:
            raise WanjaxError(f"{quantity(self._deaths, 'worker')} died one after another: Ray's logs of them say why")
        self.note("a worker died, and another one takes its place")
        self._start(stage)


def counted(outcomes: Iterator[Outcome], batch: Batch) -> Iterator[Outcome]:
    """Yields outcomes, and counts them for Ray's dashboard and whatever gathers its metrics."""
    from ray.util.metrics import Counter, Gauge

    ended = Counter("wanjax_videos", "Videos that were made, and that failed.", ("outcome",))
    left = Gauge("wanjax_videos_left", "Videos that are to be made.")
    left.set(batch.total)
    for outcome in outcomes:
        ended.inc(1, {"outcome": "done" if outcome.error is None else "failed"})
        left.set(batch.total - batch.ended)
        yield outcome
