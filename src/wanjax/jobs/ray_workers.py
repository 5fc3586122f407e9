# SPDX-License-Identifier: Apache-2.0
"""Workers that are actors of a Ray cluster, and a store that is one, where the hosts of a cluster share no database."""

import os
import pickle
import socket
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from secrets import token_hex
from threading import Event
from time import monotonic, sleep
from typing import Any

from wanjax.errors import WanjaxError, reason
from wanjax.jobs.lockstep import OutOfSync, follow
from wanjax.jobs.maker import VideoMaker, error_message
from wanjax.jobs.multihost import connect
from wanjax.jobs.pool import NICE, Start
from wanjax.jobs.ray_cluster import failure_reason, result_of
from wanjax.jobs.store import RETRY_INTERVAL, JobStore, Unavailable
from wanjax.jobs.worker import new_worker_name, work

NAMESPACE = "wanjax"
CALL_TIMEOUT = 30.0  # seconds in which an actor answers a call
StartActors = Callable[[type], tuple[list[Any], Any]]
"""Starts the actors of a worker, of a class; returns them with their placement group, if they have one."""


class RayWorker:
    """A worker that is an actor of a cluster, or several that compute together: a `Handle` of a pool.

    It ends with the command that started it.

    Args:
        ray: The library, connected.
        store: The store of the jobs.
        start: Returns the maker, in the first actor's process; of several actors it leads the others.
        options: Keywords of `work`.
        start_actors: Starts the actors.
        follower: Returns the maker of each other actor, in its own process.
        probe: Called with the maker before the first job; `answer` has what it returns.
    """

    def __init__(
        self,
        ray: Any,
        store: JobStore,
        start: Start,
        options: Mapping[str, Any],
        start_actors: StartActors,
        follower: Callable[[], VideoMaker] | None = None,
        probe: Callable[[Any], Any] | None = None,
    ):
        self.ray, self.name = ray, new_worker_name()
        self._actors, self._group = start_actors(Host)
        first, *others = self._actors
        address, count = first.address.remote() if others else None, len(self._actors)
        pickled_work = ray.cloudpickle.dumps((store, start, self.name, dict(options), probe))
        self._calls = [first.work.remote(pickled_work, address, count)]
        pickled_follower = ray.cloudpickle.dumps(follower)
        self._calls += [
            actor.follow.remote(pickled_follower, address, count, index) for index, actor in enumerate(others, 1)
        ]
        self._answer = None if probe is None else first.answer.remote()

    def answer(self) -> Any:
        """Return what was asked for, None while it is not there; raises what was raised, or EOFError for a death."""
        return result_of(self.ray, self._answer)

    def exit_reason(self) -> str | None:
        finished, _ = self.ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        reasons = [failure_reason(self.ray, call) for call in finished]
        if self._calls[0] in finished or any(reasons):
            return next(filter(None, reasons), "")
        return None

    def terminate(self) -> None:
        self._actors[0].drain.remote()

    def kill(self) -> None:
        for actor in self._actors:  # which may be out of reach alone, and would keep their places
            self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)


class Host:
    """The part of a worker on one host, as an actor of Ray; of several the first tells where they meet, and leads.

    Args:
        nice: Whether it gives way to other processes, by all threads that JAX starts later.
    """

    def __init__(self, nice: bool = False):
        if nice:
            os.nice(NICE)
        self._drained, self._answered = Event(), Event()
        self._answer: Any = None
        self._fault: WanjaxError | None = None

    def address(self) -> str:
        """Return this host's address with a port that is free."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return f"{address}:{free.getsockname()[1]}"

    def work(self, pickled_work: bytes, address: str | None = None, count: int = 1) -> None:
        """Meet the others, if there are some, and lease and make jobs with them until this worker is to end.

        Args:
            pickled_work: The store, the start, the worker's name, the keywords of `work` and what is asked, by
                cloudpickle.
            address: Where the hosts meet; None for a worker of one host.
            count: How many hosts there are.
        """
        if address is not None:
            _connect_hosts(address, count, 0, coordinator_bind_address=address)
        store, start, name, options, probe = pickle.loads(pickled_work)
        try:
            maker = start(store := store.with_retry_seconds(inf))
            self._answer = None if probe is None else probe(maker)
        except WanjaxError as error:
            if probe is None:
                raise
            self._fault = error
        self._answered.set()
        if self._fault is None:
            work(store, maker, name=name, drained=self._drained.is_set, **options)
        else:
            self._drained.wait()  # whoever asked hears of it, and ends this worker

    def answer(self) -> Any:
        """Wait for what was asked for."""
        self._answered.wait()
        if self._fault is not None:
            raise self._fault
        return self._answer

    def drain(self) -> None:
        """Have the worker give its jobs back and end."""
        self._drained.set()

    def follow(self, follower: bytes, address: str, count: int, index: int) -> None:
        """Meet the others, and make each run that the first one makes.

        Args:
            follower: What returns the maker, by cloudpickle.
            address: Where the hosts meet.
            count: How many hosts there are.
            index: The number of this one, from 1.
        """
        _connect_hosts(address, count, index)
        self._follow(pickle.loads(follower)())

    def _follow(self, maker: VideoMaker, **options: Any) -> None:
        try:
            follow(maker, **options)
        except Exception as error:
            raise OutOfSync(error_message(error)) from error


def _connect_hosts(address: str, count: int, index: int, **more: Any) -> None:
    try:
        connect(address, count, index, cluster_detection_method="deactivate", **more)
    except RuntimeError as error:
        raise OutOfSync(f"the processes of {address} did not connect: {reason(error)}") from error


class RemoteStore(JobStore):
    """A store that is an actor, by a file of SQLite: its methods are called from any process of a cluster.

    An actor that dies is restarted on the same node by the same file; a call whose answer was lost is sent again.

    Args:
        actor: The actor's name.
        retry_seconds: As of `JobStore`.
        namespace: As of `JobStore`.
    """

    def __init__(self, actor: str, retry_seconds: float, namespace: str):
        self.actor, self.retry_seconds, self.namespace = actor, retry_seconds, namespace
        self.handle: Any = None  # of the process that started the actor, which ends with it

    @classmethod
    def start(cls, ray: Any, store: JobStore) -> "RemoteStore":
        """Start the actor of a store on this node; it ends with this process.

        Args:
            ray: The library, connected.
            store: A store on SQLite, whose file is on this host.
        """
        schedule, context = ray.util.scheduling_strategies, ray.get_runtime_context()
        this_node = schedule.NodeAffinitySchedulingStrategy(context.get_node_id(), False)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": this_node}
        remote = cls(f"jobs-{token_hex(4)}", store.retry_seconds, store.namespace)
        actor_class = ray.remote(JobStore).options(
            name=remote.actor, namespace=NAMESPACE, max_concurrency=16, **options
        )
        remote.handle = actor_class.remote(*store.__reduce__()[1])
        remote.version()
        return remote

    def __getattribute__(self, name: str) -> Any:
        return partial(self._call, name) if name in REMOTE_METHODS else super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return RemoteStore, (self.actor, self.retry_seconds, self.namespace)

    @property
    def name(self) -> str:
        return self.actor

    @property
    def is_shared(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: the actor ends with the command that started it."""

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the actor; retry while it is away, then raise Unavailable after `retry_seconds`."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        end = monotonic() + self.retry_seconds
        while True:
            try:
                actor = ray.get_actor(self.actor, namespace=NAMESPACE)
                return ray.get(getattr(actor, method).remote(*arguments, **keywords), timeout=CALL_TIMEOUT)
            except RayTaskError as error:
                if not isinstance(error.cause, Unavailable) or monotonic() >= end:
                    raise error.cause from None
            except (RayError, ValueError) as error:  # the latter where there is no such actor
                if isinstance(error, WanjaxError):
                    raise
                if monotonic() >= end:
                    raise Unavailable(f"the actor {self.actor} of the jobs is out of reach") from error
            sleep(RETRY_INTERVAL)


REMOTE_METHODS = {name for name in vars(JobStore) if name.islower() and name[0] != "_"} - {
    *vars(RemoteStore),
    "use_namespace",
    "with_retry_seconds",
}
"""Methods of the actor."""
