# SPDX-License-Identifier: Apache-2.0
"""Limit the number of open connections, and the time that the server waits for a client.

An idle connection costs a client nothing, but uses one of the server's few file descriptors. Requests must therefore
arrive within a timeout. If too many connections are open, the server closes the connection that has waited longest for
its client.
"""

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512  # half of the usual limit of file descriptors per process
BACKLOG = 128  # connections that the operating system queues until the server accepts them
HEAD_TIMEOUT, BODY_TIMEOUT = 20.0, 90.0  # seconds in which the head and the body of a request must arrive


class Connection(H11Protocol):
    """A connection that is closed if its client is too slow, or if too many connections are open."""

    wait_start = 0.0  # when the server began to wait for the client
    _timeout: float | None = None  # the seconds of the running timer; None while no timer runs
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timer()
        connections = [other for other in self.connections if isinstance(other, Connection)]
        connections = [other for other in connections if not other.transport.is_closing()]
        if len(connections) > MAX_CONNECTIONS:
            waiting_connections = [
                other for other in connections if other.client_timeout is not None and other is not self
            ]
            min(waiting_connections, key=lambda other: other.wait_start, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    @property
    def client_timeout(self) -> float | None:
        """The seconds in which the client must send the next part of its request; None while the server works."""
        if self.cycle is None or self.cycle.response_complete:
            return HEAD_TIMEOUT
        return BODY_TIMEOUT if self.cycle.more_body else None

    def _update_timer(self) -> None:
        if self._timeout != self.client_timeout or self._timer is None:
            self._cancel_timer()
            self._timeout, self.wait_start = self.client_timeout, self.loop.time()
            if self._timeout is not None:
                self._timer = self.loop.call_later(self._timeout, self._close_if_late)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_late(self) -> None:
        if self.client_timeout is not None:  # None: the client has sent its data in the meantime
            self.transport.abort()
