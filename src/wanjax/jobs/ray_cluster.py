# SPDX-License-Identifier: Apache-2.0
"""Connect to a Ray cluster or start a local one; read the results of its actors and the resources of its workers."""

import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf
from typing import Any

from wanjax.errors import WanjaxError, install_extra, reason
from wanjax.jobs.addresses import PORTS_ADVICE, is_host_and_port

OBJECT_STORE_BYTES = 100 * 2**20  # the object store of a local cluster contains only requests and metadata
CONNECT_TIMEOUT = 5.0  # seconds to wait for a cluster to accept a connection
LOCAL = "local"  # the word, in place of an address, that starts a cluster on this machine
ACTOR_OPTION_NAMES = {"cpu": "num_cpus", "gpu": "num_gpus"}
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # sends no usage statistics
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens only on 127.0.0.1, as on Windows and macOS
}
"""Environment variables for a Ray cluster that is started on this machine."""


def resolve_address(address: str | None) -> str | None:
    """Return the address of an existing cluster, from the option or the environment. Return None to start a local
    cluster.

    Args:
        address: The option's value: HOST:PORT, auto or local; None if the option is missing.
    """
    return None if address == LOCAL else address or os.environ.get("RAY_ADDRESS") or None


def check_cluster(address: str | None) -> None:
    """Raise WanjaxError if Ray is not installed or the address is malformed.

    Args:
        address: As in `resolve_address`.
    """
    if find_spec("ray") is None:
        raise WanjaxError(f"Ray is not installed, which workers on other hosts need: {install_extra('cluster')}")
    address = resolve_address(address)
    if address is not None and address.startswith("ray://"):
        raise WanjaxError(
            f"{address} is an address for Ray clients: give auto or HOST:6379 on a machine of the cluster"
        )
    if address not in (None, "auto") and not is_host_and_port(address):
        raise WanjaxError(
            f"{address!r} is not the address of a Ray cluster: give auto, local for this machine, "
            f"or HOST:PORT {PORTS_ADVICE}"
        )


def _check_reachable(address: str) -> None:
    """Raise WanjaxError if nothing answers at HOST:PORT. Without this check, Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        problem = f"no Ray cluster answers at {address}: {reason(error)}"
        raise WanjaxError(f"{problem}; start one with `ray start --head`") from error


@contextmanager
def connect_ray(
    address: str | None,
    min_cores: float,
    dashboard: bool = False,
    object_store_bytes: int | None = OBJECT_STORE_BYTES,
    environment: Mapping[str, str] = LOCAL_ENVIRONMENT,
) -> Iterator[Any]:
    """Connect to a cluster, or start a local one, for the duration of the block. Yield the module `ray`.

    Args:
        address: As in `resolve_address`.
        min_cores: Minimum number of cores of a local cluster.
        dashboard: Whether a local cluster has Ray's dashboard.
        object_store_bytes: Size of a local cluster's object store; None for Ray's default.
        environment: Environment variables for a local cluster. Variables that are already set stay unchanged.

    Raises:
        WanjaxError: Ray is not installed, or no cluster answers at the address.
    """
    check_cluster(address)
    address = resolve_address(address)
    if address is None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
    elif is_host_and_port(address):
        _check_reachable(address)
    if (
        "IPython" in sys.modules and not sys.modules["IPython"]
    ):  # the command hides IPython by a None in `sys.modules`, which Ray cannot handle
        del sys.modules["IPython"]
    import ray
    from ray._private import worker as ray_worker_module

    # otherwise the command's output would show Ray's messages about dead actors
    ray_worker_module._worker_logs_enabled = False
    quiet_options: Any = {"log_to_driver": False, "logging_level": "error"}
    started_here = not ray.is_initialized()
    try:
        if started_here and address is None:
            cpus = max(os.cpu_count() or 1, int(min_cores))
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=dashboard,
                object_store_memory=object_store_bytes,
                **quiet_options,
            )
        elif started_here:
            ray.init(address, **quiet_options)
    except Exception as error:  # Ray raises errors of many types, also plain Exception
        if "RAY_ADDRESS" in str(error):  # the message advises an option of Ray's own command
            advice = "start one with `ray start --head`, or give --ray local"
            raise WanjaxError(f"no cluster of Ray runs on this machine: {advice}") from error
        problem = f"cannot be reached at {address}" if address else "did not start on this machine"
        raise WanjaxError(f"Ray {problem}: {reason(error)}") from error
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()


def result_if_ready(ray: Any, reference: Any) -> Any:
    """Return the result of an actor's call, or None if it is not ready.

    Args:
        ray: The connected Ray module.
        reference: The object reference of the call; None for no call.

    Raises:
        EOFError: The actor died.
        Exception: The error that the actor raised.
    """
    if reference is None or not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise EOFError from error


def failure_reason(ray: Any, reference: Any) -> str:
    """Return the reason why a finished call of an actor failed, or "" if the call succeeded.

    Args:
        ray: The connected Ray module.
        reference: The object reference of the call.
    """
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause).partition("\n")[0] or type(error.cause).__name__
    except ray.exceptions.RayError:
        return "its actor or its node died"
    return ""


def parse_resources(text: str | None, prefixes: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Parse a list of resources, such as cpu=1,gpu=1,TPU=4, into options for Ray actors.

    A resource may have a prefix: first.TPU-v6e-16-head=1 requests a resource only for the first host of a worker.

    Args:
        text: The value of the option; None for no resources.
        prefixes: The allowed prefixes.

    Returns:
        Options for Ray actors, by prefix; resources without a prefix are under "".

    Raises:
        WanjaxError: The text is malformed.
    """
    resources: dict[str, dict[str, Any]] = {}
    for entry in filter(None, (text or "").split(",")):
        name, _, number = entry.strip().partition("=")
        prefix, _, resource = name.rpartition(".")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not resource or not 0 < amount < inf or (prefix and prefix not in prefixes):
            raise WanjaxError(f"the resources {text!r} are malformed: give a list such as cpu=1,TPU=4")
        options = resources.setdefault(prefix, {})
        if resource in ACTOR_OPTION_NAMES:
            options[ACTOR_OPTION_NAMES[resource]] = amount
        else:
            options.setdefault("resources", {})[resource] = amount
    return resources


def default_resources(ray: Any) -> dict[str, Any]:
    """Return the default resources of a worker: all TPUs of a host, one GPU, or one CPU core.

    Args:
        ray: The connected Ray module.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if tpus := max((node.get("TPU", 0) for node in nodes), default=0):
        return {"resources": {"TPU": tpus}}
    return {"num_gpus": 1} if any(node.get("GPU") for node in nodes) else {"num_cpus": 1}
