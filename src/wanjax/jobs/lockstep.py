# SPDX-License-Identifier: Apache-2.0
"""A worker of several processes, as on a multi-host TPU slice: a leader and its followers.

Only the leader leases jobs, validates and names them, and writes files. The leader broadcasts the tasks of each run.
Then all processes make the run together, each with its own devices.

Before a run, all processes confirm that they can make the run. If a process fails during the run, the other processes
may already wait for it in a collective. The failing process therefore exits, which ends all processes
(`wanjax.jobs.multihost`). For the same reason, a run stops early only if the whole worker exits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.jobs.maker import Task, VideoMaker, error_message
from wanjax.jobs.multihost import PeerGroup
from wanjax.jobs.worker import Failure, Lease
from wanjax.pipelines.observers import Observer
from wanjax.pipelines.request import PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run

FIT_LATENT_PREVIEW = "fit_latent_preview"  # a message in place of tasks: fit the latent preview in all processes


class OutOfSync(Exception):
    """One process failed while the other processes wait for it in a collective. All processes must exit."""


class Leader(VideoMaker):
    """The maker of videos in the first process. The followers make the same runs at the same time.

    Args:
        arguments: The positional arguments of `VideoMaker`.
        peers: The group of all processes; None for those of `jax.distributed`.
        can_restart: Whether the processes are restarted after an OutOfSync error. A retry may then succeed.
        keywords: The other keyword arguments of `VideoMaker`.
    """

    def __init__(self, *arguments: Any, peers: PeerGroup | None = None, can_restart: bool = False, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.peers, self.can_restart = peers or PeerGroup(), can_restart
        self.sync_error: Exception | None = None  # the error of a run in which followers may still wait

    def fit_latent_preview(self) -> None:
        self.in_sync = False
        self.peers.broadcast(FIT_LATENT_PREVIEW)
        super().fit_latent_preview()
        self.in_sync = True

    def should_stop(self, lease: Lease) -> Callable[[], bool]:
        return lambda: lease.draining

    def run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Iterator[PreparedRequest]:
        run = self.prepare_run(tasks, observers)
        self.in_sync = False
        self.peers.broadcast([(task.output, task.request.to_json()) for task in tasks])
        error_texts = self.peers.gather("")
        if error_text := next(filter(None, error_texts), ""):
            self.in_sync = True
            problem = f"process {error_texts.index(error_text)} of {len(error_texts)}, from 0, cannot make the video"
            raise WanjaxError(f"{problem}: {error_text}") from OSError(
                error_text
            )  # with an OSError as its cause, the failure is retried
        yield from self.make_videos(tasks, run)
        self.in_sync = True

    def explain(self, error: Exception) -> Failure:
        failure = super().explain(error)
        if self.in_sync:
            return failure
        self.sync_error = error
        return failure._replace(is_retryable=failure.is_retryable and self.can_restart)

    def dismiss(self) -> bool:
        """If the followers are in sync, tell them to exit. Return True if they were in sync."""
        if self.in_sync:
            self.peers.broadcast(None)
        return self.in_sync


def follow_leader(maker: VideoMaker, peers: PeerGroup | None = None) -> None:
    """Make each run that the leader broadcasts, until the leader dismisses this process.

    Args:
        maker: The maker of this process.
        peers: The group of all processes; None for those of `jax.distributed`.

    Raises:
        Exception: A run failed. The other processes may then wait for this one.
    """
    peers = peers or PeerGroup()
    while (message := peers.broadcast()) is not None:
        if message == FIT_LATENT_PREVIEW:
            maker.fit_latent_preview()
            continue
        tasks = [Task(output, VideoRequest.from_json(request)) for output, request in message]
        run, error_text = _prepare_run(maker, tasks)
        if not any(peers.gather(error_text)):
            assert run is not None
            deque(maker.make_videos(tasks, run), maxlen=0)


def _prepare_run(maker: VideoMaker, tasks: Sequence[Task]) -> tuple[Run | None, str]:
    """Return the run of the tasks and "". If this process cannot make the run, return None and the reason."""
    try:
        return maker.prepare_run(tasks), ""
    except Exception as error:  # the leader reports errors of any kind
        return None, error_message(error)
