"""All members examine each other: facts to member 0, probes in rounds, the result to everyone.

Plain TCP with a JSON line per message, so that it works before anything else does. In round r
member i probes member i + r: every link carries one probe in each direction at a time. A member
that does not come, or falls silent, is named in the result and does not hold up the others.
"""

import contextlib
import errno
import hashlib
import hmac
import itertools
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from paceline.diagnose.doctor.facts import MemberFacts
from paceline.diagnose.doctor.probes import Clock, Door, Pair, Target, probe, reach
from paceline.errors import DeadlineError, ExchangeError, SpecError
from paceline.launch.identity import Identity, member_name

ROUND_SECONDS = 60.0
LARGEST_MESSAGE_BYTES = 2**24
LARGEST_HELLO_BYTES = 2**17
CALLERS_AT_ONCE = 128
"""That have not said who they are."""

CALLS, AGAIN_SECONDS = 20, 0.2
"""How often a member calls that is sent away: one with another key always is."""

T = TypeVar("T")


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What is known after an examination; the same on every member."""

    facts: list[MemberFacts]
    pairs: list[Pair] = []
    missing: list[str] = []
    """Members that never came, or fell silent."""

    coordinator: str = ""
    on_one_host: bool = True


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a member: who it is, and the proof that it belongs to the job."""

    index: int
    proof: str
    facts: MemberFacts
    port: int


class _Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Member 0's answer once all are there."""

    targets: list[Target]
    rounds: int


def examine(
    identity: Identity,
    facts: MemberFacts,
    *,
    listener: socket.socket | None = None,
    bandwidth: bool = True,
    deadline_seconds: float = 60.0,
    clock: Clock = time.time,
) -> Examination:
    """Take part in the examination; every member of the job calls this.

    Member 0 brings the socket that listens at the coordinator's address, and keeps it. Raises
    where member 0 cannot be reached at all, with the cause.
    """
    if identity.members == 1:
        return Examination(facts=[facts])
    # The token keeps strangers from the doors; who knows the job's key knows it.
    token = hashlib.sha256(f"doctor {identity.key}".encode()).digest()[:16]
    door = Door(token, clock)
    prober = _Prober(identity, token, bandwidth, clock)
    try:
        if identity.index != 0:
            return _attend(identity, facts, door.port, prober, deadline_seconds)
        assert listener is not None, "member 0 listens"
        return _preside(identity, facts, door.port, prober, listener, deadline_seconds)
    finally:
        door.close()


class _Prober:
    """This member's side of a round."""

    def __init__(self, identity: Identity, token: bytes, bandwidth: bool, clock: Clock) -> None:
        self._identity, self._token = identity, token
        self._bandwidth, self._clock = bandwidth, clock

    def round(self, number: int, targets: list[Target]) -> Pair:
        names = [target.member for target in targets]
        place = names.index(self._identity.name)
        target = targets[(place + number) % len(targets)]
        return probe(
            self._identity.name, target, self._token, bandwidth=self._bandwidth, clock=self._clock
        )


def _preside(
    identity: Identity,
    facts: MemberFacts,
    port: int,
    prober: _Prober,
    listener: socket.socket,
    deadline_seconds: float,
) -> Examination:
    with contextlib.ExitStack() as stack:
        lines = _gather(identity, listener, stack, deadline_seconds)
        hellos = [_Hello(index=0, proof="", facts=facts, port=port)]
        hellos += [hello for hello, _ in lines.values()]
        hellos.sort(key=lambda hello: hello.index)
        targets = [_target(hello) for hello in hellos]
        roster = _Roster(targets=targets, rounds=len(targets) - 1)
        for _, line in lines.values():
            line.send(roster)
        pairs: list[Pair] = []
        for number in range(1, len(targets)):
            for _, line in lines.values():
                line.send(number)
            pairs.append(prober.round(number, targets))
            for index, (_, line) in list(lines.items()):
                try:
                    pairs.append(line.receive(Pair, ROUND_SECONDS))
                except (OSError, ExchangeError):
                    del lines[index]
        present = {0, *lines}
        missing = [i for i in range(identity.members) if i not in present]
        result = Examination(
            facts=[hello.facts for hello in hellos],
            pairs=pairs,
            missing=[member_name(index, identity.workers) for index in missing],
            coordinator=identity.coordinator,
            on_one_host=identity.on_one_host,
        )
        for _, line in lines.values():
            with contextlib.suppress(OSError):
                line.send(result)
    return result


def _gather(
    identity: Identity,
    listener: socket.socket,
    stack: contextlib.ExitStack,
    deadline_seconds: float,
) -> dict[int, tuple[_Hello, "_Line"]]:
    """The others, as far as they come in time; who is silent or a stranger holds up nobody, and
    nothing of it is kept."""
    deadline = time.monotonic() + deadline_seconds
    lines: dict[int, tuple[_Hello, _Line]] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(lines) < identity.members - 1 and time.monotonic() < deadline:
            for event, _ in selector.select(max(0.001, deadline - time.monotonic())):
                if event.data is None:
                    _admit(listener, selector)
                    continue
                if event.data.peer.fileno() < 0:  # it had to go in this very turn
                    continue
                hello = _heard(event.data, selector)
                if hello is None:
                    continue
                proof = _proof(identity.key, event.data.challenge).encode()
                known = hmac.compare_digest(hello.proof.encode(errors="replace"), proof)
                if known and 0 < hello.index < identity.members:
                    lines[hello.index] = (hello, stack.enter_context(event.data))
                else:
                    event.data.peer.close()
        for stranger in _silent(selector):
            stranger.peer.close()
    return lines


def _admit(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    """Take in one that calls; of many that have said nothing the first one goes."""
    gone: list[_Line] = []
    try:
        line = _Line(listener.accept()[0])
    except OSError as error:  # it has gone meanwhile, or there is no room: all strangers go
        gone = _silent(selector) if error.errno in (errno.EMFILE, errno.ENFILE) else []
    else:
        try:
            line.send(line.challenge)
            selector.register(line.peer, selectors.EVENT_READ, line)
        except OSError:
            line.peer.close()
        gone = _silent(selector)[:-CALLERS_AT_ONCE]
    for one in gone:
        selector.unregister(one.peer)
        one.peer.close()


def _silent(selector: selectors.BaseSelector) -> list["_Line"]:
    """Who has called and not said who it is, in the order they came."""
    return [key.data for key in selector.get_map().values() if key.data is not None]


def _heard(line: "_Line", selector: selectors.BaseSelector) -> _Hello | None:
    """What one that called says, once all of it is there; it is listened to no longer then."""
    try:
        hello = line.take(_Hello, LARGEST_HELLO_BYTES)
    except (OSError, ExchangeError):
        selector.unregister(line.peer)
        line.peer.close()
        return None
    if hello is not None:
        selector.unregister(line.peer)
    return hello


def _attend(
    identity: Identity, facts: MemberFacts, port: int, prober: _Prober, deadline_seconds: float
) -> Examination:
    with contextlib.ExitStack() as stack:
        try:
            line, roster = _join(identity, facts, port, stack, deadline_seconds)
            for _ in range(roster.rounds):
                number = line.receive(int, ROUND_SECONDS + 5.0)
                line.send(prober.round(number, roster.targets))
            return line.receive(Examination, ROUND_SECONDS + 5.0)
        except (OSError, ExchangeError) as error:
            raise DeadlineError("examination", deadline_seconds, ["worker0"]) from error


def _join(
    identity: Identity,
    facts: MemberFacts,
    port: int,
    stack: contextlib.ExitStack,
    deadline_seconds: float,
) -> tuple["_Line", _Roster]:
    """A line to member 0 by which it knows us, and its answer when all are there. Who is sent away
    calls again: a crowd of strangers may have pushed it out."""
    deadline = time.monotonic() + deadline_seconds
    line = stack.enter_context(_reach_coordinator(identity, deadline, deadline_seconds))
    host, _, number = identity.coordinator.rpartition(":")
    for call in itertools.count(1):
        try:
            challenge = line.receive(str, deadline_seconds)
            proof = _proof(identity.key, challenge)
            line.send(_Hello(index=identity.index, proof=proof, facts=facts, port=port))
            return line, line.receive(_Roster, deadline_seconds + 5.0)
        except (ConnectionError, ExchangeError):
            line.peer.close()
            if call == CALLS or time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_SECONDS)
        line = stack.enter_context(_Line(socket.create_connection((host, int(number)), 5.0)))
    raise AssertionError("the last call has returned or raised")


@contextlib.contextmanager
def _reach_coordinator(
    identity: Identity, deadline: float, deadline_seconds: float
) -> Iterator["_Line"]:
    """A line to member 0, which may start later than this member; else the cause that it cannot."""
    host, _, port = identity.coordinator.rpartition(":")
    problem = "refused"
    while time.monotonic() < deadline:
        problem = reach(host, int(port))
        if not problem:
            with _Line(socket.create_connection((host, int(port)), 5.0)) as line:
                yield line
            return
        time.sleep(0.2)
    raise SpecError("doctor", *unreachable(identity, problem, deadline_seconds))


def unreachable(identity: Identity, problem: str, seconds: float) -> tuple[str, str]:
    """Why a member cannot reach member 0, and what to do about it."""
    there = f"worker0 at {identity.coordinator}"
    port = identity.coordinator.rpartition(":")[2]
    said = f"{identity.name} on {identity.host} cannot reach {there}"
    explained = {
        "dropped": (
            f"{said}: packets are dropped on the way, so a firewall blocks port {port}.",
            f"open TCP port {port} on worker0's host for the other hosts.",
        ),
        "refused": (
            f"{said}: the host answers, but nobody listened there within {seconds:g} s.",
            "check that worker0 runs, and that a firewall does not reject the port.",
        ),
        "unknown name": (
            f"{said}: this host does not know that name.",
            "name worker0's host by its address: PACELINE_COORDINATOR=ADDRESS:PORT.",
        ),
        "unroutable": (
            f"{said}: there is no way to that address from here.",
            "name an address of worker0 in a network that both hosts are on.",
        ),
    }
    return explained.get(problem, (f"{said}: {problem}.", "check the network between the hosts."))


def _target(hello: _Hello) -> Target:
    facts = hello.facts
    others = tuple(a for a in facts.addresses if a != facts.address and not a.startswith("127."))
    return Target(
        member=facts.member, address=facts.address, port=hello.port, other_addresses=others
    )


def _proof(key: str, challenge: str) -> str:
    return hmac.new(key.encode(), challenge.encode(), hashlib.sha256).hexdigest()


class _Line:
    """A connection that carries one JSON value a line."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer, self._rest = peer, b""
        self.challenge = secrets.token_hex(16)

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()

    def send(self, value: object) -> None:
        self.peer.settimeout(ROUND_SECONDS)
        self.peer.sendall(msgspec.json.encode(value) + b"\n")

    def receive(self, kind: type[T], timeout_seconds: float) -> T:
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._rest:
            self.peer.settimeout(max(0.001, deadline - time.monotonic()))
            more = self.peer.recv(65536)
            if not more or len(self._rest) > LARGEST_MESSAGE_BYTES:
                raise ExchangeError("the connection was closed in the middle of a message.")
            self._rest += more
        return self._next(kind)

    def take(self, kind: type[T], at_most: int) -> T | None:
        """What has come, where it can be read at once; None while it is not whole."""
        self.peer.settimeout(0.0)
        more = self.peer.recv(65536)
        if not more or len(self._rest) + len(more) > at_most:
            raise ExchangeError("the connection was closed in the middle of a message.")
        self._rest += more
        return self._next(kind) if b"\n" in self._rest else None

    def _next(self, kind: type[T]) -> T:
        content, _, self._rest = self._rest.partition(b"\n")
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ExchangeError(f"a message makes no sense: {error}") from None
