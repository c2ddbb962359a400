"""Whoever opens a connection to the live page and does not ask for anything, or for nothing it may
have, is shown the door: as at every port of a job, not many may wait, and not for long.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.wire.handshake import HELLO_SECONDS, Lobby


def protocol() -> type[H11Protocol]:
    """What uvicorn makes of each connection to one page, which has one lobby."""

    class Visitor(_Visitor):
        lobby: Lobby[_Visitor] = Lobby()

    return Visitor


class _Visitor(H11Protocol):
    """A connection; it ends when nothing is being answered on it."""

    lobby: Lobby["_Visitor"]
    _next_look: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._next_look = self.loop.call_later(HELLO_SECONDS, self._look)
        first = self.lobby.enter(self)
        if first is not None:
            first._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        self.lobby.leave(self)
        super().connection_lost(exc)

    def _look(self) -> None:
        """What takes long to answer is a page's events, which only its token opens."""
        self._next_look.cancel()
        self.lobby.leave(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self._next_look = self.loop.call_later(HELLO_SECONDS, self._look)
        else:
            self.transport.close()
