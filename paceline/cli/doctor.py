"""`paceline doctor`: what would keep a job from working, found before step 1, with the fix."""

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from paceline.diagnose.doctor import DoctorFinding, Examination, MemberFacts
    from paceline.launch import Identity

SETTINGS = {
    "epilog": "Examples: paceline doctor · mpirun -n 4 paceline doctor · "
    "on each host: paceline doctor --hosts node1,node2"
}


def command(
    workers: Annotated[int, typer.Option("-n", "--workers", help="Members on this host.")] = 1,
    hosts: Annotated[str, typer.Option(help="a,b,c: run the same command on each.")] = "",
    port: Annotated[int, typer.Option(help="With --hosts: where the first one listens.")] = 7718,
    on: Annotated[
        str, typer.Option("--on", help="here, or tunnel: are its rights there?")
    ] = "here",
    container: Annotated[str, typer.Option(help="Is this container's engine there?")] = "",
    shared_memory: Annotated[str, typer.Option(help="What the job needs per host.")] = "256MiB",
    deadline: Annotated[str, typer.Option(help="How long members wait for others.")] = "60s",
    json: flags.Json = False,
) -> None:
    """Examine this host, or all members: network, clocks, versions, cores, memory, rights."""
    from paceline.cli import console
    from paceline.diagnose.doctor import Requirements, findings
    from paceline.errors import SpecError, suggest
    from paceline.launch import parse_container
    from paceline.units import parse_bytes, parse_seconds

    if on not in ("here", "tunnel"):
        raise SpecError("--on", f'"{on}" has no machine.', suggest(on, ["here", "tunnel"]))
    needs = Requirements(
        shared_memory_bytes=parse_bytes(shared_memory, "--shared-memory"),
        tunnel=on == "tunnel",
        container=parse_container(container).engine if container else "",
    )
    if not 1 <= workers <= 1024:
        problem = f"{workers} members cannot be examined here."
        raise SpecError("--workers", problem, "write how many there are, 1 to 1024.")
    if not 1 <= port < 2**16:
        raise SpecError("--port", f"{port} is not a port.", "write one from 1 to 65535.")
    asked = [name.strip() for name in hosts.split(",") if name.strip()]
    seconds = parse_seconds(deadline, "--deadline")
    identity, examination = _examine(workers, asked, port, seconds)
    found = findings(examination, needs)
    healthy = not any(finding.severity == "error" for finding in found)
    if identity.index == 0:
        if json:
            console.print_json(_answer(examination, found, healthy))
        else:
            _print(examination, found)
    if not healthy:
        raise typer.Exit(1)


def _examine(
    workers: int, asked_hosts: "Sequence[str]", port: int, deadline_seconds: float
) -> "tuple[Identity, Examination]":
    """Who this process is among the members, and what they found."""
    import msgspec

    from paceline.diagnose import doctor
    from paceline.launch import Identity, host_list, identify, meet

    if asked_hosts:
        identity = host_list.from_hosts(asked_hosts, port, os.environ)
    else:
        identity = identify(os.environ)
    if identity.launcher == "none" and workers > 1:
        return Identity(), _examine_here(workers, deadline_seconds)
    if identity.coordinator and not identity.on_one_host and not identity.key:
        # Nothing is told that is secret; a job that trains does not start without a key.
        identity = msgspec.structs.replace(identity, key="examination")
    identity = meet(identity, os.environ, deadline_seconds)
    with _listening(identity) as (known, listener):
        examination = doctor.examine(
            known, _facts(known), listener=listener, deadline_seconds=deadline_seconds
        )
    return identity, examination


def _facts(identity: "Identity") -> "MemberFacts":
    from paceline.diagnose import doctor
    from paceline.launch.containers import ENGINES
    from paceline.tunnel.namespaces import missing_rights

    rights = missing_rights()
    return doctor.gather(identity, os.environ, missing_rights=rights, engines=tuple(ENGINES))


def _examine_here(workers: int, deadline_seconds: float) -> "Examination":
    """Members of this host as threads: there is nothing between them but loopback."""
    import secrets
    from concurrent.futures import ThreadPoolExecutor

    from paceline.diagnose import doctor
    from paceline.launch import Identity

    key = secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(workers) as pool:
        members = [
            Identity(
                index=index,
                workers=workers,
                host=socket.gethostname(),
                coordinator=f"127.0.0.1:{listener.getsockname()[1]}",
                local_index=index,
                local_members=workers,
                key=key,
            )
            for index in range(workers)
        ]
        running = [
            pool.submit(
                doctor.examine,
                member,
                _facts(member),
                listener=listener if member.index == 0 else None,
                deadline_seconds=deadline_seconds,
            )
            for member in members
        ]
        first, *_ = [future.result() for future in running]
        return first


@contextmanager
def _listening(identity: "Identity") -> "Iterator[tuple[Identity, socket.socket | None]]":
    """The identity with member 0's address, and on member 0 the socket that listens there."""
    if identity.members == 1:
        yield identity, None
    elif identity.store_is_kept:
        from paceline.session.checkup import listening_beside_store

        with listening_beside_store(identity) as known:
            yield known
    elif identity.index != 0:
        yield identity, None
    elif identity.coordinator_descriptor >= 0:
        with socket.socket(fileno=os.dup(identity.coordinator_descriptor)) as listener:
            yield identity, listener
    else:
        from paceline.errors import MissingError

        port = int(identity.coordinator.rpartition(":")[2])
        try:
            listener = socket.create_server(("", port))
        except OSError as error:
            problem = f"worker0 cannot listen on port {port} of {identity.host}: {error.strerror}."
            raise MissingError(problem, "name another: PACELINE_COORDINATOR or --port.") from None
        with listener:
            yield identity, listener


def _answer(
    examination: "Examination", found: "list[DoctorFinding]", healthy: bool
) -> dict[str, object]:
    return {
        "format_version": 1,
        "healthy": healthy,
        "members": examination.facts,
        "pairs": examination.pairs,
        "missing": examination.missing,
        "findings": found,
    }


def _print(examination: "Examination", found: "list[DoctorFinding]") -> None:
    from rich.text import Text

    from paceline.cli import console

    console.out.print(_members(examination))
    for facts in examination.facts:
        why = f"{facts.member}: {facts.interface or facts.address}, because {facts.interface_why}"
        console.out.print(why, style="dim", markup=False)
    if examination.pairs:
        console.out.print(_pairs(examination))
    colours = {"error": "red", "warning": "yellow", "note": "dim"}
    for finding in found:
        severity = (finding.severity, colours[finding.severity])
        told = f": {finding.problem}\n  fix: {finding.fix}"
        console.out.print(Text.assemble(severity, told))
    if not found:
        console.out.print("nothing is wrong.")


def _members(examination: "Examination") -> "Table":
    """Two lines a member, so that 80 columns hold it."""
    from rich import box
    from rich.table import Table

    from paceline.units import format_bytes

    table = Table(title="members", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("member", no_wrap=True)
    table.add_column("host and address", overflow="fold")
    for heading in ("versions", "cores", "threads", "/dev/shm"):
        table.add_column(heading, no_wrap=True)
    for facts in examination.facts:
        size = facts.shared_memory_bytes
        interface = f" ({facts.interface})" if facts.interface else ""
        versions = [f"{name} {facts.versions.get(name, 'none')}" for name in ("torch", "python")]
        table.add_row(
            facts.member,
            f"{facts.host}\n{facts.address}{interface}",
            "\n".join(versions),
            str(facts.cores),
            str(facts.threads),
            "none" if size is None else format_bytes(size),
        )
    return table


def _pairs(examination: "Examination") -> "Table":
    """One row per source, one column per target: round trip and bandwidth, or what failed."""
    from rich.table import Table

    from paceline.units import format_bandwidth, format_seconds

    names = [facts.member for facts in examination.facts]
    pairs = {(pair.source, pair.target): pair for pair in examination.pairs}
    table = Table("from \\ to", *names, title="round trip, bandwidth, clock")
    for source in names:
        cells = []
        for target in names:
            pair = pairs.get((source, target))
            if pair is None or pair.round_trip_seconds is None:
                cells.append(pair.problem if pair is not None else "")
                continue
            lines = [format_seconds(pair.round_trip_seconds)]
            if pair.bandwidth_bits_per_second is not None:
                lines.append(format_bandwidth(pair.bandwidth_bits_per_second))
            if pair.clock_offset_seconds is not None:
                lines.append(f"{pair.clock_offset_seconds * 1e3:+.1f} ms")
            cells.append("\n".join(lines))
        table.add_row(source, *cells)
    return table
