"""The live page of a running job: localhost only, behind a token, fed by server-sent events.

It reads the run folder and nothing else, so it may be attached to any run at any time.
"""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import SpecError
from paceline.report.charts import PHASE_COLOURS
from paceline.report.page import TEMPLATES
from paceline.report.tail import RunTail, attach
from paceline.report.visitors import protocol

HOST_NAMES = ("127.0.0.1", "localhost")
"""By which the page is asked for; another name was made to lead here by somebody else."""

LOOK_SECONDS = 1.0
STOP_SECONDS = 5.0


def serve(
    path: Path, port: int = 0, *, look_seconds: float = LOOK_SECONDS
) -> tuple[str, Callable[[], None]]:
    """Serve the page of the run at `path` until `stop` is called: (address with token, stop)."""
    tail, token = attach(path), secrets.token_urlsafe(16)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        problem = f"{port} cannot be listened on: {error.strerror}."
        raise SpecError("--port", problem, "leave it out for a free one.") from None
    listening.listen(128)  # so that the address works from the moment it is printed
    stopping = threading.Event()
    config = uvicorn.Config(
        application(tail, token, stopping, look_seconds),
        log_level="critical",  # what strangers send is no error of ours
        http=protocol(),
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, args=([listening],), name="paceline-watch", daemon=True
    )
    thread.start()

    def stop() -> None:
        stopping.set()
        server.should_exit = True
        thread.join(STOP_SECONDS)
        listening.close()

    return f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}", stop


@contextmanager
def serving(path: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """Serve a run that is about to start: `announce` is called once its folder is there.

    At the end the page gets one more look, so that it shows how the run ended.
    """
    ending = threading.Event()
    stops: list[Callable[[], None]] = []

    def start() -> None:
        while not (path / "run.json").exists():
            if ending.wait(0.1):
                return
        address, stop = serve(path)
        stops.append(stop)
        announce(address)

    thread = threading.Thread(target=start, name="paceline-watch-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(STOP_SECONDS)
        for stop in stops:
            time.sleep(1.5 * LOOK_SECONDS)
            stop()


def application(
    tail: RunTail, token: str, stopping: threading.Event, look_seconds: float
) -> Starlette:
    """The page at `/`, its events at `/events`; both want the token."""
    looks = _Looks(tail, look_seconds)

    def refused(request: Request) -> Response | None:
        given = request.query_params.get("token", "").encode(errors="replace")
        if secrets.compare_digest(given, token.encode()) and request.url.hostname in HOST_NAMES:
            return None
        text = "This page wants the token that was printed with its address.\n"
        return PlainTextResponse(text, status_code=403)

    async def page(request: Request) -> Response:
        return refused(request) or HTMLResponse(_page(tail.folder.path.resolve().name))

    async def events(request: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            while not stopping.is_set():
                yield b"data: " + await looks.latest() + b"\n\n"
                await asyncio.sleep(look_seconds)

        headers = {"Cache-Control": "no-store"}
        return refused(request) or StreamingResponse(
            stream(), media_type="text/event-stream", headers=headers
        )

    return Starlette(routes=[Route("/", page), Route("/events", events)])


class _Looks:
    """One look per period, however many pages are open."""

    def __init__(self, tail: RunTail, look_seconds: float) -> None:
        self._tail, self._period = tail, look_seconds
        self._lock = asyncio.Lock()
        self._taken, self._content = -1.0, b""

    async def latest(self) -> bytes:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._taken > 0.8 * self._period:
                look = await asyncio.to_thread(self._tail.look)
                self._content, self._taken = msgspec.json.encode(look), now
            return self._content


def _page(title: str) -> str:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # phases keep their order
    return environment.get_template("live.html").render(title=title, colours=PHASE_COLOURS)
