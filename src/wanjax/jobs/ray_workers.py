# SPDX-License-Identifier: Apache-2.0
"""Workers that are actors of a Ray cluster, and a store that is one, where the hosts of a cluster share no database."""

import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from secrets import token_hex
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.jobs.pool import NICE, Start
from wanjax.jobs.ray_cluster import answer_of, why_ended
from wanjax.jobs.store import RETRY, JobStore, Unavailable
from wanjax.jobs.worker import new_name, work

NAMESPACE = "wanjax"
ANSWER = 30.0  # seconds in which an actor answers a call


class RayWorker:
    """A worker that is an actor of a cluster, and ends with the command that started it: a `Handle` of a pool.

    Args:
        ray: The library, connected.
        store: The store of the jobs.
        start: Returns the maker, in the actor's process.
        options: Keywords of `work`.
        resources: What the actor is given, as options of Ray's actors.
        ask: Called with the maker before the first job; `answer` has what it returns.
    """

    def __init__(
        self,
        ray: Any,
        store: JobStore,
        start: Start,
        options: Mapping[str, Any],
        resources: Mapping[str, Any],
        ask: Callable[[Any], Any] | None = None,
    ):
        self.ray, self.name = ray, new_name()
        once = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD", "max_concurrency": 4}
        nice = not resources.keys() - {"num_cpus"}
        self._actor = ray.remote(_Actor).options(**once, **resources).remote(nice)
        given = ray.cloudpickle.dumps((store, start, self.name, dict(options)))
        self._answer = None if ask is None else self._actor.ask.remote(given, ray.cloudpickle.dumps(ask))
        self._work = self._actor.work.remote(given)

    def answer(self) -> Any:
        return answer_of(self.ray, self._answer)

    def ended(self) -> str | None:
        is_over, _ = self.ray.wait([self._work], timeout=0)
        return why_ended(self.ray, self._work) if is_over else None

    def terminate(self) -> None:
        self._actor.drain.remote()

    def kill(self) -> None:
        self.ray.kill(self._actor)


class _Actor:
    """The process of a worker; `nice` has it give way to others before JAX is imported, and has threads."""

    def __init__(self, nice: bool):
        if nice:
            os.nice(NICE)
        self._asked, self._lock = Event(), Lock()
        self._maker: Any = None

    def _opened(self, given: bytes) -> tuple[Any, str, dict[str, Any]]:
        """Return the store, the worker's name and the options; the maker is made once."""
        store, start, name, options = pickle.loads(given)
        store = store.with_patience(inf)
        with self._lock:
            self._maker = self._maker or start(store)
        return store, name, options

    def ask(self, given: bytes, ask: bytes) -> Any:
        self._opened(given)
        return pickle.loads(ask)(self._maker)

    def work(self, given: bytes) -> None:
        store, name, options = self._opened(given)
        work(store, self._maker, name=name, drained=self._asked.is_set, **options)

    def drain(self) -> None:
        self._asked.set()


class RemoteStore(JobStore):
    """A store that is an actor, by a file of SQLite: its methods are called from any process of a cluster.

    An actor that dies is restarted on the same node by the same file; a call whose answer was lost is sent again.
    """

    def __init__(self, actor: str, patience: float, place: str):
        self.actor, self.patience, self.place = actor, patience, place
        self.kept: Any = None  # in the process that started the actor, which ends with it

    @classmethod
    def start(cls, ray: Any, store: JobStore) -> "RemoteStore":
        """Start the actor of a store on this node; it ends with this process."""
        schedule, context = ray.util.scheduling_strategies, ray.get_runtime_context()
        here = schedule.NodeAffinitySchedulingStrategy(context.get_node_id(), False)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
        remote = cls(f"jobs-{token_hex(4)}", store.patience, store.place)
        kind = ray.remote(JobStore).options(name=remote.actor, namespace=NAMESPACE, max_concurrency=16, **options)
        remote.kept = kind.remote(*store.__reduce__()[1])
        remote.version()
        return remote

    def __getattribute__(self, name: str) -> Any:
        return partial(self._call, name) if name in CALLS else super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return RemoteStore, (self.actor, self.patience, self.place)

    @property
    def name(self) -> str:
        return self.actor

    @property
    def is_shared(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: the actor ends with the command that started it."""

    def _call(self, method: str, *given: Any, **named: Any) -> Any:
        """Call a method of the actor, again while it is away; raise Unavailable after the store's patience."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        end = monotonic() + self.patience
        while True:
            try:
                actor = ray.get_actor(self.actor, namespace=NAMESPACE)
                return ray.get(getattr(actor, method).remote(*given, **named), timeout=ANSWER)
            except RayTaskError as error:
                if not isinstance(error.cause, Unavailable) or monotonic() >= end:
                    raise error.cause from None
            except (RayError, ValueError) as error:  # the latter where there is no such actor
                if isinstance(error, WanjaxError):
                    raise
                if monotonic() >= end:
                    raise Unavailable(f"the actor {self.actor} of the jobs is out of reach") from error
            sleep(RETRY)


CALLS = {name for name in vars(JobStore) if name.islower() and name[0] != "_"} - {
    *vars(RemoteStore),
    "enter",
    "with_patience",
}
"""Methods of the actor."""
