"""`python -m paceline.launch.coordinator`: the process that announces views and keeps the store.

Worker 0 starts it in a job that continues after a failure, and it outlives worker 0: so every
worker may fail. It loads no torch. It ends when no member of the job is connected any longer.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from paceline.launch.identity import Identity
from paceline.protocol.actions import Action, Lost, Send
from paceline.protocol.coordinating import Coordinator
from paceline.protocol.messages import Message
from paceline.protocol.views import COORDINATOR, Enroll, GiveUp, Position
from paceline.wire import Closed, JobKey, Mailbox, Packet, StoreKeeper

NOTE = "coordinator"
"""The store's note with the endpoint of the coordinator's mailbox."""

KEY_VARIABLE = "PACELINE_KEY"
PACKAGE = Path(__file__).parents[2]
START_SECONDS = 150.0
"""It ends if no member has connected by then."""

LINGER_SECONDS = 2.0
"""It ends this long after the last member's connection has closed."""

TURN_SECONDS = 0.5

_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that Python does not complain about processes that outlive this one."""


def start(listener: socket.socket, identity: Identity) -> None:
    """Hand the store's listening socket to a coordinator's process of its own."""
    where = "" if identity.on_one_host else identity.address
    descriptor = listener.fileno()
    arguments = [str(descriptor), str(identity.workers), where]
    search = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.launch.coordinator", *arguments],
        env={**os.environ, KEY_VARIABLE: identity.key, "PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,  # what ends worker 0 and its processes leaves this one alone
    )
    _started.append(process)
    listener.close()


def main() -> None:
    descriptor, workers, where = sys.argv[1:4]
    key = JobKey(os.environ[KEY_VARIABLE])
    mailbox: Mailbox[Message] = Mailbox(
        COORDINATOR, Enroll | Position | GiveUp, key, encrypted=bool(where)
    )
    notes = {NOTE: mailbox.listen(where).encode()}
    keeper = StoreKeeper(socket.socket(fileno=int(descriptor)), key, notes)
    _serve(keeper, mailbox, Coordinator(int(workers)))
    mailbox.close()
    keeper.close()


def _serve(
    keeper: StoreKeeper,
    mailbox: Mailbox[Message],
    coordinator: Coordinator,
) -> None:
    def act(actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Send)
            mailbox.send(Packet(action.to, [action.message]))

    last, patience = time.monotonic(), START_SECONDS
    while time.monotonic() < last + patience:
        for event in mailbox.receive(TURN_SECONDS):
            if isinstance(event, Closed):
                act(coordinator.handle(Lost(event.peer)))
                continue
            for message in event.messages:
                act(coordinator.handle(message))
        if keeper.has_members:
            last, patience = time.monotonic(), LINGER_SECONDS


if __name__ == "__main__":
    main()
