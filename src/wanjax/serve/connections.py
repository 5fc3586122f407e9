# SPDX-License-Identifier: Apache-2.0
"""Connections: how many may be open, and for how long one may keep the server waiting.

A connection that says nothing costs a client nothing, and a server one of its few file descriptors. So a request has to
arrive within a time, and where too many connections are open, those that wait for a client make room, the oldest first.
"""

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 512  # connections: half of the descriptors that a process has on most machines
BACKLOG = 128  # of those that are accepted at a time
SILENCE, BODY = 20.0, 90.0  # seconds in which the head of a request has to arrive, and its body


class Connection(H11Protocol):
    """A connection that ends where its client is too slow, or where others need its place."""

    since = 0.0  # when the wait began
    _waits: float | None = None  # seconds for which the server waits for the client now; None while it does not
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        open = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        if len(open) > MOST:
            waiting = [each for each in open if each.awaited is not None and each is not self]
            min(waiting, key=lambda each: each.since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_watch()

    @property
    def awaited(self) -> float | None:
        """The seconds for which the client is waited for, by what it has sent; None where it waits for the server."""
        if self.cycle is None or self.cycle.response_complete:
            return SILENCE
        return BODY if self.cycle.more_body else None

    def _watch(self) -> None:
        if self._waits != self.awaited or self._timer is None:
            self._end_watch()
            self._waits, self.since = self.awaited, self.loop.time()
            if self._waits is not None:
                self._timer = self.loop.call_later(self._waits, self._end_late)

    def _end_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        if self.awaited is not None:  # else it arrived meanwhile
            self.transport.abort()
