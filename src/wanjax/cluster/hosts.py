# SPDX-License-Identifier: Apache-2.0
"""Where a worker is in a cluster of Ray: one actor, or several hosts with an actor each, which are one worker."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanjax.cluster.lockstep import Leader, follow
from wanjax.cluster.worker import Job, Outcome, Worker, told_of
from wanjax.errors import WanjaxError, is_full, reason
from wanjax.jobs.processes import connect

BUNDLED = {"num_cpus": "CPU", "num_gpus": "GPU"}  # the same in a placement group
FIRST = "first"  # the name of the first host among the resources of a worker of several
SLICE, WORKER_ID, POD, NODE = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/tpu-pod-type", "ray.io/node-id"
"""Labels that Ray gives to the hosts of a TPU slice, and to every node."""
ALONE = {"max_restarts": 0, "max_task_retries": 0}  # options of an actor that Ray does not start again


class OutOfStep(Exception):
    """An error that leaves the other hosts waiting in a collective, so all must end.

    The first host has already yielded its job's outcome.
    """


class Host(Leader):
    """The part of a worker on one host, as an actor of Ray: the first tells where they meet and is to `lead`."""

    def address(self) -> str:
        """Returns this host's address with a port that is free."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.socket() as found:
            found.bind((address, 0))
            return f"{address}:{found.getsockname()[1]}"

    def lead(self, address: str, count: int) -> None:
        """Meets the others, and loads the pipeline."""
        self._meet(address, count, 0, coordinator_bind_address=address)

    def follow(self, address: str, count: int, index: int) -> None:
        """Meets the others, loads the pipeline, and makes each run that the first one makes."""
        self._meet(address, count, index)
        try:
            follow(self, self.others)
        except Exception as error:
            raise OutOfStep(told_of(error)) from error

    def _meet(self, address: str, count: int, index: int, **more: Any) -> None:
        try:
            connect(address, count, index, cluster_detection_method="deactivate", **more)
        except RuntimeError as error:
            raise OutOfStep(f"the processes of {address} did not connect: {reason(error)}") from error
        self.ready()

    def make(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        try:
            yield from super().make(jobs)
        except Exception as error:
            if self.in_step or is_full(error):
                raise
            raise OutOfStep(told_of(error)) from error


def bundles_of(ray: Any, resources: Mapping[str, Mapping[str, Any]], hosts: int) -> list[dict[str, float]]:
    """Returns the resources of each host of a worker, as a placement group has them.

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
    """Returns the head of a TPU slice of so many hosts, as Ray names it; {} where there are no slices so far."""
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


@dataclass(eq=False)
class Placed:
    """A worker in a cluster: its actors, the first of which is asked for videos.

    `ready` is the reference that resolves when the worker is loaded; those in `watched` resolve only when one of its
    other hosts ends, and `fault` is why one did.
    """

    actors: Sequence[Any]
    ready: Any
    watched: Sequence[Any] = ()
    group: Any = None
    fault: str = ""

    @property
    def first(self) -> Any:
        return self.actors[0]

    def end(self, ray: Any) -> None:
        """Ends the actors, which may be out of reach alone, and would keep their places."""
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


def placed(ray: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Placed:
    """Starts a worker of one actor, with its options."""
    actor = ray.remote(Worker).options(**options, **ALONE, scheduling_strategy="SPREAD").remote(**arguments)
    return Placed([actor], actor.ready.remote())


def placed_together(
    ray: Any, arguments: Mapping[str, Any], bundles: Sequence[Mapping[str, float]], spread: bool
) -> Placed:
    """Starts a worker of several hosts, which have resources such as {"CPU": 1}, on machines of their own if `spread`.

    On TPUs they are the hosts of one slice, in its own order.
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
        actors.append(kind.remote(**arguments))
    first, *rest = actors
    address, count = first.address.remote(), len(actors)
    watched = [other.follow.remote(address, count, index) for index, other in enumerate(rest, 1)]
    return Placed(actors, first.lead.remote(address, count), watched, group)
