"""Close connections to the live page that ask for nothing, or for nothing that they may have.

As at every port of a job, few of them may be open at once, and each for a few seconds.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.wire.listener import HELLO_SECONDS, UnauthenticatedPeers


def protocol() -> type[H11Protocol]:
    """What uvicorn makes of each connection to one page, which has one such list."""

    class Visitor(_Visitor):
        waiting: UnauthenticatedPeers[_Visitor] = UnauthenticatedPeers()

    return Visitor


class _Visitor(H11Protocol):
    """A connection; it ends when nothing is being answered on it."""

    waiting: UnauthenticatedPeers["_Visitor"]
    _next_look: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._next_look = self.loop.call_later(HELLO_SECONDS, self._look)
        first = self.waiting.add(self)
        if first is not None:
            first._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        self.waiting.remove(self)
        super().connection_lost(exc)

    def _look(self) -> None:
        """What takes long to answer is a page's events, which only its token opens."""
        self._next_look.cancel()
        self.waiting.remove(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self._next_look = self.loop.call_later(HELLO_SECONDS, self._look)
        else:
            self.transport.close()
