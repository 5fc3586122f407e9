# SPDX-License-Identifier: Apache-2.0
"""Place the actors of a worker in a Ray cluster: a single actor on any host, or several actors, in order, on the hosts
of a TPU slice."""

from collections.abc import Mapping, Sequence
from typing import Any

from wanjax.errors import WanjaxError

# Maps names of resources in actor options to their names in a placement group
BUNDLE_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
FIRST_HOST = "first"  # prefix of resources for the first host of a multi-host worker
SLICE_LABEL, WORKER_ID_LABEL, POD_LABEL, NODE_LABEL = (
    "ray.io/tpu-slice-name",
    "ray.io/tpu-worker-id",
    "ray.io/tpu-pod-type",
    "ray.io/node-id",
)
"""Labels that Ray gives to the hosts of a TPU slice. Every host has `NODE_LABEL`."""
ACTOR_OPTIONS = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}  # the pool restarts an actor, not Ray


def placement_bundles(ray: Any, resources: Mapping[str, Mapping[str, Any]], hosts: int) -> list[dict[str, float]]:
    """Return the resource bundles of a worker's hosts for a placement group.

    On TPUs the first host requests the slice's head resource by default, as Ray's own libraries do to reserve a slice.

    Args:
        ray: The connected Ray module.
        resources: Options for Ray actors. The key "" has the options of every host; the key FIRST_HOST has the
            additional options of the first host.
        hosts: The number of hosts of a worker.

    Raises:
        WanjaxError: No slice of the cluster has this number of hosts.
    """
    every_host, first = (_to_bundle(resources.get(name, {})) for name in ("", FIRST_HOST))
    if "TPU" in every_host and not first:
        first = _slice_head_resource(ray, hosts)
    return [every_host | (first if host == 0 else {}) for host in range(hosts)]


def _to_bundle(options: Mapping[str, Any]) -> dict[str, float]:
    amounts = {BUNDLE_NAMES[name]: amount for name, amount in options.items() if name in BUNDLE_NAMES}
    return amounts | options.get("resources", {})


def _slice_head_resource(ray: Any, hosts: int) -> dict[str, float]:
    """Return the head resource of a TPU slice with this number of hosts. Return {} if the cluster has no slices yet."""
    slices: dict[str, list[str]] = {}
    for node in ray.nodes():
        labels = node.get("Labels", {})
        if node["Alive"] and SLICE_LABEL in labels:
            slices.setdefault(labels[SLICE_LABEL], []).append(labels.get(POD_LABEL, ""))
    pod_types = {pods[0] for pods in slices.values() if len(pods) == hosts}
    if slices and not pod_types:
        sizes = ", ".join(sorted({f"{len(pods)} ({pods[0]})" for pods in slices.values()}))
        raise WanjaxError(
            f"--hosts is {hosts}, but the cluster's slices have {sizes}: give the number of hosts of a slice"
        )
    return {f"TPU-{min(pod_types)}-head": 1} if pod_types else {}


def start_single(ray: Any, resources: Mapping[str, Any], actor_class: type) -> tuple[list[Any], None]:
    """Start one actor on any host. On CPUs, it runs with a lower priority than other processes.

    Args:
        ray: The connected Ray module.
        resources: Options for Ray actors, such as {"num_cpus": 1}.
        actor_class: The class of the actor.

    Returns:
        A list of the actor, and None for no placement group.
    """
    options = {**ACTOR_OPTIONS, **resources, "scheduling_strategy": "SPREAD"}
    return [ray.remote(actor_class).options(**options).remote(not resources.keys() - {"num_cpus"})], None


def start_group(
    ray: Any, bundles: Sequence[Mapping[str, float]], spread: bool, actor_class: type
) -> tuple[list[Any], Any]:
    """Start an actor on each host of a worker. On TPUs, these are the hosts of one slice, in order.

    Args:
        ray: The connected Ray module.
        bundles: The resources of each host, such as {"CPU": 1}.
        spread: Whether all actors must be on different machines.
        actor_class: The class of the actors.

    Returns:
        The actors and their placement group.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = "STRICT_SPREAD" if spread else "PACK"
    group_options: dict[str, Any] = {"strategy": strategy}
    if "TPU" in bundles[0]:
        worker_labels = [{WORKER_ID_LABEL: str(host)} for host in range(len(bundles))]
        group_options = {
            "topology_strategy": {SLICE_LABEL: "STRICT_PACK", NODE_LABEL: strategy},
            "bundle_label_selector": worker_labels,
        }
    group = ray.util.placement_group(list(map(dict, bundles)), **group_options)
    actors = []
    for host, bundle in enumerate(bundles):
        options = {name: bundle.get(resource, 0) for name, resource in BUNDLE_NAMES.items()}
        custom_resources = {name: amount for name, amount in bundle.items() if name not in BUNDLE_NAMES.values()}
        scheduling = PlacementGroupSchedulingStrategy(group, host)
        remote = ray.remote(actor_class).options(
            **options, **ACTOR_OPTIONS, resources=custom_resources, scheduling_strategy=scheduling
        )
        actors.append(remote.remote())
    return actors, group
