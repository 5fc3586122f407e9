# SPDX-License-Identifier: Apache-2.0
"""Run workers as actors of a Ray cluster. If the cluster has no shared database, another actor holds the job store."""

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
from wanjax.jobs.lockstep import OutOfSync, follow_leader
from wanjax.jobs.maker import VideoMaker, error_message
from wanjax.jobs.multihost import connect
from wanjax.jobs.pool import CPU_NICENESS, MakerFactory
from wanjax.jobs.ray_cluster import failure_reason, result_if_ready
from wanjax.jobs.store import RETRY_INTERVAL, JobStore, Unavailable
from wanjax.jobs.worker import new_worker_name, work

NAMESPACE = "wanjax"
CALL_TIMEOUT = 30.0  # seconds to wait for an actor's answer
StartActors = Callable[[type], tuple[list[Any], Any]]
"""Starts the actors of a worker, of a given class. Returns the actors and their placement group, or None for no
group."""


class RayWorker:
    """A worker that is an actor of a Ray cluster, or several actors that compute together.

    The worker ends with the command that started it. If there are several actors, the first one leads the other actors.

    Args:
        ray: The connected Ray module.
        store: The job store.
        make_maker: Creates the maker in the process of the first actor.
        options: Keyword arguments of `work`.
        start_actors: Starts the actors.
        make_follower: Creates the maker in the process of each other actor.
        initializer: Called with the maker before the first job. `initializer_result` returns its result.
    """

    def __init__(
        self,
        ray: Any,
        store: JobStore,
        make_maker: MakerFactory,
        options: Mapping[str, Any],
        start_actors: StartActors,
        make_follower: Callable[[], VideoMaker] | None = None,
        initializer: Callable[[Any], Any] | None = None,
    ):
        self.ray, self.name = ray, new_worker_name()
        self._actors, self._group = start_actors(WorkerActor)
        first, *others = self._actors
        address, count = first.address.remote() if others else None, len(self._actors)
        pickled_work = ray.cloudpickle.dumps((store, make_maker, self.name, dict(options), initializer))
        self._calls = [first.work.remote(pickled_work, address, count)]
        pickled_follower = ray.cloudpickle.dumps(make_follower)
        self._calls += [
            actor.follow_leader.remote(pickled_follower, address, count, index) for index, actor in enumerate(others, 1)
        ]
        self._initializer_call = None if initializer is None else first.initializer_result.remote()

    def initializer_result(self) -> Any:
        """Return the result of `initializer`, or None before it is ready.

        Raises its error; EOFError if the worker died.
        """
        return result_if_ready(self.ray, self._initializer_call)

    def exit_reason(self) -> str | None:
        finished, _ = self.ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        reasons = [failure_reason(self.ray, call) for call in finished]
        if self._calls[0] in finished or any(reasons):
            return next(filter(None, reasons), "")
        return None

    def terminate(self) -> None:
        self._actors[0].drain.remote()

    def kill(self) -> None:
        for actor in self._actors:  # an actor that is alive but unreachable would keep its resources
            self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)


class WorkerActor:
    """The Ray actor that runs a worker, or the part of a worker on one host.

    Args:
        nice: Whether the process, with JAX's threads, gets a lower priority than other processes.
    """

    def __init__(self, nice: bool = False):
        if nice:
            os.nice(CPU_NICENESS)
        self._exit_event, self._initializer_done = Event(), Event()
        self._initializer_result: Any = None
        self._initializer_error: WanjaxError | None = None

    def address(self) -> str:
        """Return HOST:PORT with this host's address and a free port."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe_socket:
            probe_socket.bind((address, 0))
            return f"{address}:{probe_socket.getsockname()[1]}"

    def work(self, pickled_work: bytes, address: str | None = None, count: int = 1) -> None:
        """Connect to the other hosts of the worker if there are any. Run the worker until it has to exit.

        Args:
            pickled_work: The job store, the maker factory, the worker's name, the keyword arguments of `work` and the
                initializer, pickled by cloudpickle.
            address: The coordinator's HOST:PORT; None for a worker of one host.
            count: The number of hosts.
        """
        if address is not None:
            _connect_hosts(address, count, 0, coordinator_bind_address=address)
        store, make_maker, name, options, initializer = pickle.loads(pickled_work)
        try:
            maker = make_maker(store := store.with_retry_seconds(inf))
            self._initializer_result = None if initializer is None else initializer(maker)
        except WanjaxError as error:
            if initializer is None:
                raise
            self._initializer_error = error
        self._initializer_done.set()
        if self._initializer_error is None:
            work(store, maker, name=name, exit_requested=self._exit_event.is_set, **options)
        else:
            self._exit_event.wait()  # the caller of `initializer_result` gets the error and ends this worker

    def initializer_result(self) -> Any:
        """Wait for the result of the initializer and return it, or raise its error."""
        self._initializer_done.wait()
        if self._initializer_error is not None:
            raise self._initializer_error
        return self._initializer_result

    def drain(self) -> None:
        """Ask the worker to requeue its jobs and exit."""
        self._exit_event.set()

    def follow_leader(self, make_follower: bytes, address: str, count: int, index: int) -> None:
        """Connect to the other hosts, and take part in each run of the first one.

        Args:
            make_follower: The function that creates the maker, pickled by cloudpickle.
            address: The coordinator's HOST:PORT.
            count: The number of hosts.
            index: The index of this host, from 1.
        """
        _connect_hosts(address, count, index)
        self._follow_leader(pickle.loads(make_follower)())

    def _follow_leader(self, maker: VideoMaker, **options: Any) -> None:
        try:
            follow_leader(maker, **options)
        except Exception as error:
            raise OutOfSync(error_message(error)) from error


def _connect_hosts(address: str, count: int, index: int, **keywords: Any) -> None:
    try:
        connect(address, count, index, cluster_detection_method="deactivate", **keywords)
    except RuntimeError as error:
        raise OutOfSync(f"the processes of {address} did not connect: {reason(error)}") from error


class RemoteStore(JobStore):
    """A client of a job store that runs as a Ray actor on an SQLite file, for any process of the cluster.

    If the actor dies, Ray restarts it on the same node with the same file. A call without an answer is repeated.

    Args:
        actor: The actor's name.
        retry_seconds: As in `JobStore`.
        namespace: As in `JobStore`.
    """

    def __init__(self, actor: str, retry_seconds: float, namespace: str):
        self.actor, self.retry_seconds, self.namespace = actor, retry_seconds, namespace
        # set only in the process that started the actor; the actor ends when this handle is deleted
        self.handle: Any = None

    @classmethod
    def start(cls, ray: Any, store: JobStore) -> "RemoteStore":
        """Start an actor for a job store on this node. The actor ends with this process.

        Args:
            ray: The connected Ray module.
            store: A job store on an SQLite file of this host.
        """
        strategies, context = ray.util.scheduling_strategies, ray.get_runtime_context()
        this_node = strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), False)
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
        """Do nothing, because the actor ends with the command that started it."""

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the actor. Retry while the actor is unavailable. Raises Unavailable after
        `retry_seconds`."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        deadline = monotonic() + self.retry_seconds
        while True:
            try:
                actor = ray.get_actor(self.actor, namespace=NAMESPACE)
                return ray.get(getattr(actor, method).remote(*arguments, **keywords), timeout=CALL_TIMEOUT)
            except RayTaskError as error:
                if not isinstance(error.cause, Unavailable) or monotonic() >= deadline:
                    raise error.cause from None
            except (RayError, ValueError) as error:  # ValueError means that no actor has this name
                if isinstance(error, WanjaxError):
                    raise
                if monotonic() >= deadline:
                    raise Unavailable(
                        f"the Ray actor {self.actor} of the job store does not answer: try again later"
                    ) from error
            sleep(RETRY_INTERVAL)


REMOTE_METHODS = {name for name in vars(JobStore) if name.islower() and name[0] != "_"} - {
    *vars(RemoteStore),
    "use_namespace",
    "with_retry_seconds",
}
"""Methods of `JobStore` that the actor executes for its clients."""
