# SPDX-License-Identifier: Apache-2.0
"""Joining or starting a Ray cluster, and the resources of its workers."""

import os
import re
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf
from typing import Any

from wanjax.errors import WanjaxError, reason

STORE = 100 * 2**20  # bytes of a local object store, which holds requests and records
CONNECT_TIMEOUT = 5.0  # seconds in which a cluster accepts a connection
HOST = re.compile(r".+:\d{1,5}")
LOCAL = "local"  # in place of an address: a cluster that is started on this machine
ACTOR_OPTION_NAMES = {"cpu": "num_cpus", "gpu": "num_gpus"}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it tells nobody of itself
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it listens at this machine's own address alone, as there
}
"""Variables of a Ray cluster on this machine."""


def address_of(address: str | None) -> str | None:
    """Return the address of the cluster to join, from the option or the environment; None to start one.

    Args:
        address: HOST:PORT, auto or local; None where no option names one.
    """
    return None if address == LOCAL else address or os.environ.get("RAY_ADDRESS") or None


def check_cluster(address: str | None) -> None:
    """Raise WanjaxError if Ray is not installed or the address is malformed.

    Args:
        address: As of `address_of`.
    """
    if find_spec("ray") is None:
        raise WanjaxError("workers on other hosts need Ray, which is not installed: run pip install 'wanjax[cluster]'")
    address = address_of(address)
    if address is not None and address.startswith("ray://"):
        raise WanjaxError(f"{address} is that of a Ray client: give auto, or HOST:6379, on a machine of the cluster")
    if address not in (None, "auto") and not (HOST.fullmatch(address) and int(address.rpartition(":")[2]) < 2**16):
        raise WanjaxError(f"{address!r} names no Ray cluster: give auto, HOST:PORT, or local for this machine")


def _check_answers(address: str) -> None:
    """Raise WanjaxError if nothing answers at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        why = f"no Ray cluster answers at {address}: {reason(error)}"
        raise WanjaxError(f"{why}; `ray start --head` starts one") from error


@contextmanager
def connect_ray(
    address: str | None,
    cores: float,
    dashboard: bool = False,
    store: int | None = STORE,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[Any]:
    """Connect to a cluster, or start a local one, for the duration of the block; yield the module `ray`.

    Args:
        address: As of `address_of`.
        cores: How many cores a started cluster has at least.
        dashboard: Whether a started cluster has Ray's dashboard.
        store: Bytes of a started cluster's object store, STORE by default; None for Ray's own choice.
        environment: Variables of the environment of a started cluster, where they are not set.

    Raises:
        WanjaxError: Ray is not installed, or there is no cluster at the address.
    """
    check_cluster(address)
    address = address_of(address)
    if address is None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
    elif HOST.fullmatch(address):
        _check_answers(address)
    if "IPython" in sys.modules and not sys.modules["IPython"]:  # hidden from Flax by the command, and Ray asks too
        del sys.modules["IPython"]
    import ray
    from ray._private import worker as printing

    printing._worker_logs_enabled = False  # Ray prints deaths among what the command prints, without being asked
    quiet: Any = {"log_to_driver": False, "logging_level": "error"}
    started_here = not ray.is_initialized()
    try:
        if started_here and address is None:
            cpus = max(os.cpu_count() or 1, int(cores))
            ray.init("local", num_cpus=cpus, include_dashboard=dashboard, object_store_memory=store, **quiet)
        elif started_here:
            ray.init(address, **quiet)
    except Exception as error:  # whichever of Ray's, of which some have no class of their own
        where = f"cannot be reached at {address}" if address else "did not start on this machine"
        raise WanjaxError(f"Ray {where}: {reason(error)}") from error
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()


def result_of(ray: Any, reference: Any) -> Any:
    """Return the result of an actor's call, or None if it is not ready.

    Args:
        ray: The library, connected.
        reference: The reference of the call; None for no call.

    Raises:
        EOFError: The actor died.
        Exception: Whatever the actor raised.
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
    """Return why an actor's finished call failed, or "" if it succeeded.

    Args:
        ray: The library, connected.
        reference: The reference of the call.
    """
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause).partition("\n")[0] or type(error.cause).__name__
    except ray.exceptions.RayError:
        return "its actor or its node ended"
    return ""


def resources_of(text: str | None, names: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the options of actors for resources such as cpu=1,gpu=1,TPU=4, by name; those of all by "".

    Some have names of their own, such as first.TPU-v6e-16-head=1. Raises WanjaxError for another text.

    Args:
        text: The option's value; None for none.
        names: Names that may stand before a resource, such as `first` in first.TPU-v6e-16-head=1.

    Raises:
        WanjaxError: The text reads otherwise.
    """
    resources: dict[str, dict[str, Any]] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, number = part.strip().partition("=")
        owner, _, resource = name.rpartition(".")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not resource or not 0 < amount < inf or (owner and owner not in names):
            raise WanjaxError(f"the resources are given as {text!r}: give a list such as cpu=1,TPU=4")
        options = resources.setdefault(owner, {})
        if resource in ACTOR_OPTION_NAMES:
            options[ACTOR_OPTION_NAMES[resource]] = amount
        else:
            options.setdefault("resources", {})[resource] = amount
    return resources


def default_resources(ray: Any) -> dict[str, Any]:
    """Return the default resources of a worker: all TPUs of a host, one GPU, or one core.

    Args:
        ray: The library, connected.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if tpus := max((node.get("TPU", 0) for node in nodes), default=0):
        return {"resources": {"TPU": tpus}}
    return {"num_gpus": 1} if any(node.get("GPU") for node in nodes) else {"num_cpus": 1}
