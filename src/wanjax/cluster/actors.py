# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of Ray, on this machine or on those of a cluster. An actor that dies is replaced."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import Any

from wanjax.cluster.batch import Batch
from wanjax.cluster.worker import Job, Outcome, Worker
from wanjax.errors import WanjaxError, reason

STORE = 100 * 2**20  # bytes of a local object store, which holds requests and records
POLL = 1.0  # seconds between two looks at Ctrl-C
PATIENCE = 60.0  # seconds after which it is told that workers wait for a place
MOST_DEATHS = 10  # of workers one after another, without a video between them
NAMES = {"cpu": "num_cpus", "gpu": "num_gpus"}
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Variables by which a local Ray tells nobody of itself, and listens at the address of this machine alone."""


@contextmanager
def connected(address: str | None, cores: float, dashboard: bool) -> Iterator[Any]:
    """Connects to the cluster at an address, or starts one on this machine with so many cores or more; yields `ray`.

    Raises WanjaxError where Ray is not installed, or there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise WanjaxError("several workers need Ray: pip install 'wanjax[cluster]' brings it")
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
    elif address.startswith("ray://"):
        raise WanjaxError(
            f"{address} is that of a Ray client: auto, or HOST:6379, on a machine of the cluster is right"
        )
    if "IPython" in sys.modules and sys.modules["IPython"] is None:  # hidden from Flax by the command, and Ray asks too
        del sys.modules["IPython"]
    import ray

    quiet: Any = {"log_to_driver": False, "logging_level": "error"}
    own = not ray.is_initialized()
    try:
        if own and address is None:
            cpus = max(os.cpu_count() or 1, int(cores))
            ray.init("local", num_cpus=cpus, include_dashboard=dashboard, object_store_memory=STORE, **quiet)
        elif own:
            ray.init(address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise WanjaxError(f"there is no Ray cluster at {address or 'this machine'}: {reason(error)}") from error
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def resources_of(text: str | None) -> dict[str, Any]:
    """Returns the options of an actor for resources such as cpu=1,gpu=1,TPU=4; none where none are given.

    Raises WanjaxError for another text.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, number = part.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or not 0 < amount < inf:
            raise WanjaxError(f"the resources are given as {text!r} where a list such as cpu=1,TPU=4 is right")
        if name in NAMES:
            found[NAMES[name]] = amount
        else:
            found.setdefault("resources", {})[name] = amount
    return found


def usual_resources(ray: Any) -> dict[str, Any]:
    """Returns what a worker is given where nobody says: the TPUs of a host, a graphics card, or a core."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if tpus := max((node.get("TPU", 0) for node in nodes), default=0):
        return {"resources": {"TPU": tpus}}
    return {"num_gpus": 1} if any(node.get("GPU") for node in nodes) else {"num_cpus": 1}


class Actors:
    """Workers of a cluster, each an actor with `resources`, such as {"num_cpus": 1}."""

    def __init__(
        self, arguments: Mapping[str, Any], count: int, resources: Mapping[str, Any], note: Callable[[str], None]
    ):
        import ray

        self.ray, self.arguments, self.count, self.note = ray, dict(arguments), count, note
        self._kind = ray.remote(Worker).options(
            **resources, max_restarts=0, max_task_retries=0, max_concurrency=1, scheduling_strategy="SPREAD"
        )
        self._starting: dict[Any, Any] = {}  # actors by the references that tell when they are ready
        self._idle: list[Any] = []
        self._deaths, self._since = 0, monotonic()
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        actor = self._kind.remote(**self.arguments)
        self._starting[actor.ready.remote()] = actor

    def call(self, method: str, *given: Any, tick: Callable[[], None]) -> Any:
        """Returns the result of a method of the worker that is ready first, or of another where that dies."""
        while True:
            while not self._idle:
                self._wait([], tick)
            actor = self._idle[0]
            reference = getattr(actor, method).remote(*given)
            try:
                while not self.ray.wait([reference], timeout=POLL)[0]:
                    tick()
                return self._value(reference)
            except self.ray.exceptions.RayError:
                self._idle.remove(actor)
                self._replace(actor)

    def outcomes(self, batch: Batch, tick: Callable[[], None]) -> Iterator[Outcome]:
        """Yields the outcome of each job of a batch, once. `tick` is called now and then, and may raise."""
        busy: dict[Any, tuple[Any, dict[str, Job]]] = {}  # generators of outcomes
        while batch.ended < batch.total:
            while self._idle and (jobs := batch.take(self.count)):
                actor = self._idle.pop()
                given = {job.name: job for job in jobs}
                busy[actor.make.options(num_returns="streaming").remote(jobs)] = actor, given
            for generator in self._wait(list(busy), tick):
                actor, left = busy[generator]
                try:
                    outcome = self._value(next(generator))
                    self._deaths = 0
                    left.pop(outcome.name)
                    ended = batch.finish(outcome)
                except StopIteration:
                    del busy[generator]
                    self._idle.append(actor)
                    continue
                except self.ray.exceptions.RayError:
                    del busy[generator]
                    self._replace(actor)
                    ended = batch.lost(list(left.values()))
                if ended is not None:
                    yield ended

    def _wait(self, generators: list[Any], tick: Callable[[], None]) -> list[Any]:
        """Waits a moment for workers and outcomes; takes in workers that are ready, and returns generators that are."""
        waited_for = [*self._starting, *generators]
        ready, _ = self.ray.wait(waited_for, num_returns=len(waited_for), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(waited_for, num_returns=1, timeout=POLL)
        tick()
        if self._starting and monotonic() - self._since > PATIENCE:
            self.note(f"{len(self._starting)} of {self.count} workers wait for a place in the cluster, or load")
            self._since = inf
        found = []
        for one in ready:
            if one not in self._starting:
                found.append(one)
                continue
            actor = self._starting.pop(one)
            try:
                self._value(one)
                self._idle.append(actor)
            except self.ray.exceptions.RayError:
                self._replace(actor)
        return found

    def _value(self, reference: Any) -> Any:
        """Returns what a worker returned; raises what it raised as it was raised there."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def _replace(self, actor: Any) -> None:
        """Starts a worker in place of one that died; raises WanjaxError where one after another does."""
        self.ray.kill(actor)  # it may be out of reach alone, and would keep its place
        self._deaths += 1
        if self._deaths > MOST_DEATHS + self.count:
            raise WanjaxError(f"{self._deaths} workers died one after another: Ray's logs of them say why")
        self.note("a worker died, and another one takes its place")
        self._start()


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
