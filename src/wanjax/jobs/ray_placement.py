# SPDX-License-Identifier: Apache-2.0
"""Placement of a worker's actors in a Ray cluster: on any host, or on the hosts of one slice in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from wanjax.errors import WanjaxError

BUNDLE_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # the same in a placement group
FIRST = "first"  # prefix of resources for the first host of a multi-host worker
SLICE, WORKER_ID, POD, NODE = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/tpu-pod-type", "ray.io/node-id"
"""Labels that Ray gives to the hosts of a TPU slice, and to every node."""
ACTOR_OPTIONS = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "max_concurrency": 4,
}  # an actor that Ray does not start again


def placement_bundles(ray: Any, resources: Mapping[str, Mapping[str, Any]], hosts: int) -> list[dict[str, float]]:
    """Return the resource bundles of a worker's hosts for a placement group.

    On TPUs the first host requests the slice's head resource by default, as Ray's own libraries do to reserve a slice.

    Args:
        ray: The library, connected.
        resources: Options of actors: those of each host by "", and what the first has beside them by FIRST.
        hosts: How many hosts a worker has.

    Raises:
        WanjaxError: The cluster's slices have another number of hosts.
    """
    each, first = (_bundle(resources.get(name, {})) for name in ("", FIRST))
    if "TPU" in each and not first:
        first = _slice_head(ray, hosts)
    return [each | (first if host == 0 else {}) for host in range(hosts)]


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    amounts = {BUNDLE_NAMES[name]: amount for name, amount in options.items() if name in BUNDLE_NAMES}
    return amounts | options.get("resources", {})


def _slice_head(ray: Any, hosts: int) -> dict[str, float]:
    """Return Ray's head resource of a TPU slice with this number of hosts; {} if the cluster has no slices yet."""
    slices: dict[str, list[str]] = {}
    for node in ray.nodes():
        labels = node.get("Labels", {})
        if node["Alive"] and SLICE in labels:
            slices.setdefault(labels[SLICE], []).append(labels.get(POD, ""))
    pod_types = {pods[0] for pods in slices.values() if len(pods) == hosts}
    if slices and not pod_types:
        sizes = ", ".join(sorted({f"{len(pods)} ({pods[0]})" for pods in slices.values()}))
        raise WanjaxError(f"--hosts is {hosts} where the cluster's slices have {sizes}: give the hosts of one")
    return {f"TPU-{min(pod_types)}-head": 1} if pod_types else {}


def start_single(ray: Any, resources: Mapping[str, Any], actor_class: type) -> tuple[list[Any], None]:
    """Start one actor on any host.

    Args:
        ray: The library, connected.
        resources: Options of Ray's actors, such as {"num_cpus": 1}. A worker on CPUs gives way to other processes.
        actor_class: The class.

    Returns:
        The actor, and no placement group.
    """
    options = {**ACTOR_OPTIONS, **resources, "scheduling_strategy": "SPREAD"}
    return [ray.remote(actor_class).options(**options).remote(not resources.keys() - {"num_cpus"})], None


def start_group(
    ray: Any, bundles: Sequence[Mapping[str, float]], spread: bool, actor_class: type
) -> tuple[list[Any], Any]:
    """Start an actor on each host of a worker; on TPUs the hosts are those of one slice, in order.

    Args:
        ray: The library, connected.
        bundles: The resources of each host, such as {"CPU": 1}.
        spread: Whether each host is a machine of its own.
        actor_class: The class.

    Returns:
        The actors, and their placement group.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = "STRICT_SPREAD" if spread else "PACK"
    group_options: dict[str, Any] = {"strategy": strategy}
    if "TPU" in bundles[0]:
        order = [{WORKER_ID: str(host)} for host in range(len(bundles))]
        group_options = {"topology_strategy": {SLICE: "STRICT_PACK", NODE: strategy}, "bundle_label_selector": order}
    group = ray.util.placement_group(list(map(dict, bundles)), **group_options)
    actors = []
    for host, bundle in enumerate(bundles):
        options = {name: bundle.get(of, 0) for name, of in BUNDLE_NAMES.items()}
        others = {name: amount for name, amount in bundle.items() if name not in BUNDLE_NAMES.values()}
        scheduling = PlacementGroupSchedulingStrategy(group, host)
        remote = ray.remote(actor_class).options(
            **options, **ACTOR_OPTIONS, resources=others, scheduling_strategy=scheduling
        )
        actors.append(remote.remote())
    return actors, group
