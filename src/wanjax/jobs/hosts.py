# SPDX-License-Identifier: Apache-2.0
"""A worker of several hosts in a Ray cluster: an actor on each, of which the first leases jobs and leads the others."""

import socket
from collections.abc import Callable, Mapping, Sequence
from math import inf
from threading import Event
from typing import Any

from wanjax.errors import WanjaxError, reason
from wanjax.jobs.lockstep import Leader, follow
from wanjax.jobs.maker import VideoMaker, sentence_of
from wanjax.jobs.processes import connect
from wanjax.jobs.ray_cluster import answer_of, why_ended
from wanjax.jobs.sharing import BATCH, check_place
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import new_name, work

BUNDLED = {"num_cpus": "CPU", "num_gpus": "GPU"}  # the same in a placement group
FIRST = "first"  # the name of the first host among the resources of a worker of several
SLICE, WORKER_ID, POD, NODE = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/tpu-pod-type", "ray.io/node-id"
"""Labels that Ray gives to the hosts of a TPU slice, and to every node."""
ALONE = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}  # an actor that Ray does not start again


class OutOfStep(Exception):
    """An error that leaves the other hosts waiting in a collective, so all must end."""


class Host:
    """The part of a worker on one host, as an actor of Ray: the first tells where they meet and leads.

    Args:
        arguments: Those of `VideoMaker`.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        self._arguments = dict(arguments)
        self._drained, self._asked = Event(), Event()
        self._answer: Any = None
        self._fault: WanjaxError | None = None

    def address(self) -> str:
        """Return this host's address with a port that is free."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.socket() as found:
            found.bind((address, 0))
            return f"{address}:{found.getsockname()[1]}"

    def lead(self, address: str, count: int, work_of: tuple[Any, str, Mapping[str, Any], Any]) -> None:
        """Meet the others, and lease and make jobs with them until this worker is to end."""
        self._meet(address, count, 0, coordinator_bind_address=address)
        self._lead(Leader(**self._arguments, started_again=True), *work_of)

    def _lead(
        self,
        leader: Leader,
        store: JobStore,
        name: str,
        options: Mapping[str, Any],
        ask: Callable[[VideoMaker], Any] | None = None,
    ) -> None:
        if ask is not None:
            try:
                check_place(store, leader.place, BATCH)
                self._answer = ask(leader)
            except WanjaxError as error:
                self._fault = error
            self._asked.set()
        work(store.with_patience(inf), leader, name=name, drained=self._drained.is_set, **options)

    def answer(self) -> Any:
        """Wait for what was asked for."""
        self._asked.wait()
        if self._fault is not None:
            raise self._fault
        return self._answer

    def drain(self) -> None:
        """Have the worker give its jobs back and end."""
        self._drained.set()

    def follow(self, address: str, count: int, index: int) -> None:
        """Meet the others, and make each run that the first one makes."""
        self._meet(address, count, index)
        self._follow(VideoMaker(**self._arguments))

    def _follow(self, maker: VideoMaker, **how: Any) -> None:
        try:
            follow(maker, **how)
        except Exception as error:
            raise OutOfStep(sentence_of(error)) from error

    @staticmethod
    def _meet(address: str, count: int, index: int, **more: Any) -> None:
        try:
            connect(address, count, index, cluster_detection_method="deactivate", **more)
        except RuntimeError as error:
            raise OutOfStep(f"the processes of {address} did not connect: {reason(error)}") from error


class SliceWorker:
    """A worker of several hosts, each an actor of a cluster: a `Handle` of a pool.

    Args:
        ray: The library, connected.
        store: The store of the jobs.
        arguments: Those of `VideoMaker`.
        options: Keywords of `work`.
        bundles: The resources of each host, such as {"CPU": 1}; on TPUs the hosts are those of one slice, in its order.
        spread: Whether the hosts have machines of their own.
        ask: Called with the first host's maker before the first job; `answer` has what it returns.
    """

    def __init__(
        self,
        ray: Any,
        store: JobStore,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
        bundles: Sequence[Mapping[str, float]],
        spread: bool,
        ask: Callable[[VideoMaker], Any] | None = None,
    ):
        self.ray, self.name = ray, new_name()
        self.actors, self.group = placed_together(ray, arguments, bundles, spread)
        first, *rest = self.actors
        address, count = first.address.remote(), len(self.actors)
        self._followers = [other.follow.remote(address, count, index) for index, other in enumerate(rest, 1)]
        self._lead = first.lead.remote(address, count, (store, self.name, dict(options), ask))
        self._answer = None if ask is None else first.answer.remote()

    def answer(self) -> Any:
        return answer_of(self.ray, self._answer)

    def ended(self) -> str | None:
        every = [self._lead, *self._followers]
        over, _ = self.ray.wait(every, num_returns=len(every), timeout=0)
        whys = [why_ended(self.ray, one) for one in over]
        if self._lead in over or any(whys):
            return next((why for why in whys if why), "")
        return None

    def terminate(self) -> None:
        self.actors[0].drain.remote()

    def kill(self) -> None:
        for actor in self.actors:  # which may be out of reach alone, and would keep their places
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self.group)


def bundles_of(ray: Any, resources: Mapping[str, Mapping[str, Any]], hosts: int) -> list[dict[str, float]]:
    """Return the resources of each host of a worker, as a placement group has them.

    `resources` are options of actors: those of each host by "", and what the first has beside them by FIRST. On TPUs
    that is a slice's head, where nobody says, by which Ray's own libraries take a slice. Raises WanjaxError where the
    cluster's slices have another number of hosts.
    """
    each, first = (_bundle(resources.get(name, {})) for name in ("", FIRST))
    if "TPU" in each and not first:
        first = _head(ray, hosts)
    return [each | (first if host == 0 else {}) for host in range(hosts)]


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    named = {BUNDLED[name]: amount for name, amount in options.items() if name in BUNDLED}
    return named | options.get("resources", {})


def _head(ray: Any, hosts: int) -> dict[str, float]:
    """Return the head of a TPU slice of so many hosts, as Ray names it; {} where there are no slices so far."""
    slices: dict[str, list[str]] = {}
    for node in ray.nodes():
        labels = node.get("Labels", {})
        if node["Alive"] and SLICE in labels:
            slices.setdefault(labels[SLICE], []).append(labels.get(POD, ""))
    right = {pods[0] for pods in slices.values() if len(pods) == hosts}
    if slices and not right:
        found = ", ".join(sorted({f"{len(pods)} ({pods[0]})" for pods in slices.values()}))
        raise WanjaxError(f"--hosts is {hosts} where the cluster's slices have {found}: give the hosts of one")
    return {f"TPU-{min(right)}-head": 1} if right else {}


def placed_together(
    ray: Any, arguments: Mapping[str, Any], bundles: Sequence[Mapping[str, float]], spread: bool
) -> tuple[list[Any], Any]:
    """Start the actors of a worker of several hosts; return them with their placement group.

    The hosts have resources such as {"CPU": 1}, and machines of their own if `spread`. On TPUs they are those of one
    slice, in its own order.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    how = "STRICT_SPREAD" if spread else "PACK"
    where: dict[str, Any] = {"strategy": how}
    if "TPU" in bundles[0]:
        order = [{WORKER_ID: str(host)} for host in range(len(bundles))]
        where = {"topology_strategy": {SLICE: "STRICT_PACK", NODE: how}, "bundle_label_selector": order}
    group = ray.util.placement_group(list(map(dict, bundles)), **where)
    actors = []
    for host, bundle in enumerate(bundles):
        options = {name: bundle.get(of, 0) for name, of in BUNDLED.items()}
        others = {name: amount for name, amount in bundle.items() if name not in BUNDLED.values()}
        place = PlacementGroupSchedulingStrategy(group, host)
        kind = ray.remote(Host).options(**options, **ALONE, resources=others, scheduling_strategy=place)
        actors.append(kind.remote(dict(arguments)))
    return actors, group
