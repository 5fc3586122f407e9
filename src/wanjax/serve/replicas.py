# SPDX-License-Identifier: Apache-2.0
"""A server of several workers on Ray Serve.

Fronts, which have no model, answer requests, and are a deployment of Serve's. Workers, plain actors, make the videos:
each asks the owner of the table for one after another. The command that started the service watches them. Where one
dies, Ray says so, its video waits again at once, and another worker takes its place. All end with the command.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

import jax

from wanjax.cluster import actors
from wanjax.cluster.worker import keeping_programs
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.serve.app import Service
from wanjax.serve.desk import Desk
from wanjax.serve.guard import Access
from wanjax.serve.limits import Limits
from wanjax.serve.making import Making
from wanjax.serve.mirror import Mirror
from wanjax.serve.owner import AwayError, Load, Owner
from wanjax.serve.worker import Told, Worker
from wanjax.stores.places import Place

NAMESPACE = "wanjax"
FRONTS = 2  # so that there is one while the other is started anew
UP, DOWN = 5.0, 300.0  # seconds for which more or fewer workers have to be of use before their number changes
PATIENCE = 30.0  # seconds for which an answer of the owner is waited for
LOST = 180.0  # seconds after which an owner that does not answer is given up
POLL = 0.5  # seconds between two looks at the workers
LONGEST = 60.0  # seconds in which a worker ends the step that is under way
MOST_DEATHS = 10  # of workers one after another, each before it was ready
VARIABLES = {**actors.VARIABLES, "RAY_worker_niceness": "0"}  # else all give way to all others, fronts too
Make = Callable[[Desk], Worker]


@dataclass(frozen=True)
class Wanted:
    """The numbers of workers that a service may have, and what each is given of the cluster, as options of an actor."""

    least: int
    most: int
    resources: Mapping[str, Any]


class Line:
    """The way to the owner of a service, from any process of the cluster."""

    def __init__(self, service: str):
        self.service = service

    @cached_property
    def _actor(self) -> Any:
        import ray

        return ray.get_actor(self.service, namespace=NAMESPACE)

    def __call__(self, method: str, *given: Any) -> Any:
        """Calls a method of the owner; raises what it raises, AwayError where it does not answer."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(getattr(self._actor, method).remote(*given), timeout=PATIENCE)
        except RayTaskError as error:
            raise error.cause from error
        except (RayError, ValueError) as error:  # the latter where there is no such actor
            raise AwayError(f"the owner of the service {self.service} does not answer") from error

    def __reduce__(self) -> Any:
        return Line, (self.service,)


class PatientOwner(Owner):
    """An owner that waits for its folder, whose lock one that died may still have for a moment."""

    def __init__(self, *given: Any):
        end = monotonic() + PATIENCE
        while True:
            try:
                super().__init__(*given)
                return
            except WanjaxError:
                if monotonic() > end:
                    raise
                sleep(POLL)


def started(make: Make, line: Line, name: str, folder: Place, shared: Mapping[str, Any]) -> Worker:
    """Returns the worker of a name, in its own process."""
    return keeping_programs(lambda: make(Desk(line, name, folder)), shared)


class Scale:
    """How many workers there are to be: as many as there are videos, within bounds, if that holds for a while."""

    def __init__(self, least: int, most: int):
        self.least, self.most = least, most
        self.count = least
        self._way, self._since = 0, 0.0  # whether more or fewer are of use, and since when

    def wanted(self, load: Load, now: float) -> int:
        """Returns the number; `now` is in seconds."""
        aim = min(self.most, max(self.least, load.waiting + load.running))
        way = (aim > self.count) - (aim < self.count)
        if way != self._way:
            self._way, self._since = way, now
        if way and now - self._since >= (UP if way > 0 else DOWN):
            self.count, self._way = aim, 0
        return self.count


class Crew:
    """The workers of a service."""

    def __init__(self, ray: Any, line: Line, start: Callable[[str], Any], wanted: Wanted, note: Callable[[str], None]):
        """Takes the way to the owner, and `start`, which returns the actor of a worker of a name."""
        self.ray, self.line, self.note = ray, line, note
        self.scale = Scale(wanted.least, wanted.most)
        self._start_actor = start
        self._runs: dict[Any, tuple[str, Any]] = {}  # names and actors, by references that end as they do
        self._lost: list[str] = []  # names of those that died, of which the owner is to be told
        self._dismissed: set[str] = set()
        self._started = self._deaths = 0

    def call(self, method: str) -> Any:
        """Calls a method of the owner, for longer than its start takes; raises WanjaxError where it does not answer."""
        end = monotonic() + LOST
        while True:
            try:
                return self.line(method)
            except AwayError as error:
                if monotonic() > end:
                    raise WanjaxError("the owner of the table does not answer: Ray's logs of it say why") from error
                sleep(POLL)

    def start(self) -> Any:
        """Starts a worker, and returns a reference to what it tells of itself."""
        self._started += 1
        name = f"{self.line.service}-{self._started}"
        actor = self._start_actor(name)
        told = actor.told.remote()
        self._runs[actor.run.remote()] = name, actor
        return told

    def first_told(self, stopped: Callable[[], bool]) -> Told | None:
        """Starts the workers, and returns what one of them tells, None where it is stopped before.

        Raises WanjaxError where no model is found, or the worker dies.
        """
        told = [self.start() for _ in range(self.scale.count)]
        while not (ready := self.ray.wait(told, timeout=POLL)[0]):
            if stopped():
                return None
        try:
            return self.ray.get(ready[0])
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            raise WanjaxError("a worker died while it loaded the model: Ray's logs of it say why") from error

    def look(self) -> None:
        """Waits a moment; replaces workers that died, and starts or ends some, by what there is to do.

        Raises WanjaxError where one after another dies before it is ready, or the owner does not answer.
        """
        if died := self._settle(POLL):
            self.note(f"{quantity(died, 'worker')} died, and others take their places")
        if self._deaths > MOST_DEATHS + self.scale.count:
            raise WanjaxError(
                f"{quantity(self._deaths, 'worker')} died before they were ready: Ray's logs of them say why"
            )
        load: Load = self.call("load")
        at_work = {name for name, _ in self._runs.values()} - self._dismissed
        missing = self.scale.wanted(load, monotonic()) - len(at_work)
        for _ in range(missing):
            self.start()
        if missing < 0:
            with suppress(AwayError):
                self._dismissed.update(self.line("dismiss", -missing))

    def _settle(self, seconds: float) -> int:
        """Waits for a worker's end, has the videos of those that died wait again, and returns how many did."""
        if not self._runs:
            sleep(seconds)
            return 0
        died = 0
        for run in self.ray.wait(list(self._runs), timeout=seconds)[0]:
            name, actor = self._runs.pop(run)
            try:
                self.ray.get(run)
            except self.ray.exceptions.RayError:
                self.ray.kill(actor)  # it may be out of reach alone, and would keep its place
                self._lost.append(name)
                died += 1
        with suppress(AwayError):
            while self._lost:
                self._deaths = 0 if self.line("lose", self._lost[0]) else self._deaths + 1
                self._lost.pop(0)
        return died

    def end(self) -> None:
        """Waits until all have given back what they were making, or for as long as a step may take."""
        end = monotonic() + LONGEST
        while self._runs and monotonic() < end:
            self._settle(POLL)


def listen_here() -> None:
    """Has servers of gRPC in this process listen at its own machine's address: Serve has one that listens at all."""
    servers: Any = import_module("grpc.aio._server").Server
    bind = servers.add_insecure_port
    servers.add_insecure_port = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))


def front(line: Line, folder: Place, told: Told, limits: Limits, access: Access, own: bool) -> Any:
    """Returns the application of a front; `own` tells that the cluster is this machine's alone."""
    if own:
        listen_here()
    jax.config.update("jax_platforms", "cpu")
    limits.bound_pictures()
    board = Mirror(line, folder, limits.queue)
    board.follow()
    return Service(board, told.known(), told.models, limits, access).application()


def close_fronts() -> None:
    from ray import serve

    serve.shutdown()


def check_alone(ray: Any) -> None:
    """Raises WanjaxError where Serve has applications on this cluster; ends those whose command was killed."""
    from ray import serve

    alive = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE}
    names = serve.status().applications.keys()
    if others := [name for name in names if name in alive or not name.startswith(NAMESPACE)]:
        raise WanjaxError(f"Ray Serve runs {' and '.join(others)} on this cluster: one without that would do")
    close_fronts()


def open_fronts(build: Callable[[], Any], service: str, host: str, port: int, streams: int) -> None:
    """Starts Serve, and the fronts of a service."""
    from ray import serve

    quiet = {"enable_access_log": False, "log_level": "ERROR"}
    options = {"host": host, "port": port, "keep_alive_timeout_s": 30}
    serve.start(proxy_location="HeadOnly", http_options=options, logging_config=quiet)
    made = serve.deployment(
        serve.ingress(build)(),
        name="front",
        num_replicas=FRONTS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * streams,
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        logging_config=quiet,
    )
    serve.run(made.bind(), name=service, route_prefix="/")


def run(
    ray: Any,
    make: Make,
    wanted: Wanted,
    limits_of: Callable[[Told], Limits],
    *,
    own: bool,
    folder: Place,
    table: Path | None,
    queue: int,
    host: str,
    port: int,
    access: Access,
    shared: Mapping[str, Any],
    note: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """Serves until `stopped` tells so.

    `make` returns a worker at a desk, in its own process, and `limits_of` the limits by what it tells. `own` tells that
    the cluster was started for this service.
    """
    logging.getLogger("ray.serve").disabled = True  # Serve sets its level anew; what goes wrong is raised
    if not own:
        check_alone(ray)
    service = f"{NAMESPACE}-{token_hex(4)}"
    line = Line(service)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
    alone = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    owner = ray.remote(PatientOwner).options(name=service, namespace=NAMESPACE, **alone)
    kept = owner.remote(folder, table, queue, f"{service}-")  # as long as this process lives
    gives_way = not wanted.resources.keys() - {"num_cpus"}
    once = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD", **wanted.resources}
    making = ray.remote(Making).options(**once)

    def worker(name: str) -> Any:
        return making.remote(ray.cloudpickle.dumps(partial(started, make, line, name, folder, shared)), gives_way)

    crew = Crew(ray, line, worker, wanted, note)
    if (told := crew.first_told(stopped)) is None:
        return
    if strange := crew.call("strange"):
        note(f"note: {folder} holds what is no video of this server, left alone: {', '.join(strange[:5])}")
    limits = limits_of(told)

    def build() -> Any:
        return front(line, folder, told, limits, access, own)

    try:
        open_fronts(build, service, host, port, limits.streams)
        shown = f"[{host}]" if ":" in host else host
        note(f"{told.outlines[0].defaults.model} is served at http://{shown}:{port}/, videos in {folder}")
        while not stopped():
            crew.look()
        with suppress(AwayError):
            line("close")
        crew.end()
    finally:
        if not own:  # one that is ends with this process
            close_fronts()
        del kept
