"""What is wrong, from the facts alone: one function per cause, one table. Nothing is measured here.

An *error* keeps the job from working, so it does not start; a *warning* makes it slow or its record
doubtful; a *note* matters only to those who ask for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from paceline.diagnose.doctor.examination import Examination
from paceline.diagnose.doctor.facts import MemberFacts, Requirements
from paceline.diagnose.doctor.probes import Pair
from paceline.errors import MissingError
from paceline.launch.interfaces import is_loopback
from paceline.units import format_bytes, format_seconds

CLOCK_SECONDS = 0.1
"""Above it the members' records cannot be laid side by side without correction."""

BUSY_FRACTION = 0.75
"""Above this load for each core a machine has nothing left for a job."""

SLOW_LINK_FRACTION = 0.2
"""A pair below this share of the median bandwidth is worth a line."""


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem with its cause and its fix."""

    kind: str
    severity: Literal["error", "warning", "note"]
    members: list[str]
    problem: str
    fix: str


def findings(examination: Examination, needs: Requirements | None = None) -> list[DoctorFinding]:
    """Everything that is wrong, the worst first."""
    needs = needs or Requirements()
    found = [finding for check in CHECKS for finding in check(examination, needs)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def require_healthy(
    examination: Examination, needs: Requirements | None = None
) -> list[DoctorFinding]:
    """Raise what keeps the job from working; return the rest."""
    found = findings(examination, needs)
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more: `paceline doctor`)" if len(errors) > 1 else ""
        raise MissingError(errors[0].problem + more, errors[0].fix)
    return found


def missing_members(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    if examination.missing:
        names = ", ".join(examination.missing)
        yield DoctorFinding(
            kind="missing-member",
            severity="error",
            members=examination.missing,
            problem=f"{names} never reached worker0 at {examination.coordinator}.",
            fix="read what they printed on their own hosts: it names the cause.",
        )


def wrong_interface(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """A member told the others an address that is not the one they can reach it at."""
    for facts in examination.facts:
        failed = [p for p in examination.pairs if p.target == facts.member and p.problem]
        better = next((pair.answers_at for pair in failed if pair.answers_at), "")
        if better:
            interface = facts.addresses.get(better, "")
            why = f"{better} ({interface}) answers"
            fix = f"set PACELINE_ADDRESS={interface or better} on {facts.host}."
        elif not examination.on_one_host and is_loopback(facts.address):
            why = "that leads nowhere but to the host itself"
            fix = f"set PACELINE_ADDRESS on {facts.host} to the interface the others can reach."
        else:
            continue
        said = f"{facts.member} on {facts.host} announced {facts.address}"
        where = f" ({facts.interface})" if facts.interface else ""
        yield DoctorFinding(
            kind="wrong-interface",
            severity="error",
            members=[facts.member],
            problem=f"{said}{where}, because {facts.interface_why}; but {why}.",
            fix=fix,
        )


def blocked_port(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """A member is there (it reached worker 0) and yet cannot be reached itself."""
    by_name = {facts.member: facts for facts in examination.facts}
    causes: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in examination.pairs:
        if pair.problem and not pair.answers_at and not _loopback_elsewhere(pair, examination):
            causes[pair.target, pair.problem].append(pair)
    for (target, problem), pairs in causes.items():
        facts = by_name[target]
        sources = ", ".join(sorted(pair.source for pair in pairs))
        first, last = facts.ports or (1024, 65535)
        said = f"{sources} cannot reach {target} on {facts.host} at {pairs[0].address}"
        opened = f"open TCP ports {first}-{last} on {facts.host} for the other hosts."
        routed = "name an address in a network that all hosts are on: PACELINE_ADDRESS=INTERFACE."
        explained = {
            "dropped": (": packets are dropped on the way, so a firewall blocks the port.", opened),
            "refused": (": it listens there, so a firewall rejects the port.", opened),
            "unroutable": (": there is no route to that address.", routed),
        }
        words, fix = explained.get(problem, (f": {problem}.", opened))
        yield DoctorFinding(
            kind="no-route" if problem == "unroutable" else "blocked-port",
            severity="error",
            members=[target],
            problem=said + words,
            fix=fix,
        )


def clock_off(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """Judged against worker 0, and once per host: members of one host share its clock."""
    by_name = {facts.member: facts for facts in examination.facts}
    seen: set[str] = set()
    for pair in examination.pairs:
        offset, facts = pair.clock_offset_seconds, by_name[pair.target]
        if pair.source != "worker0" or offset is None or abs(offset) < CLOCK_SECONDS:
            continue
        if facts.host in seen:
            continue
        seen.add(facts.host)
        way = "ahead of" if offset > 0 else "behind"
        yield DoctorFinding(
            kind="clock",
            severity="warning",
            members=[pair.target],
            problem=f"the clock of {facts.host} ({pair.target}) is {format_seconds(abs(offset))} "
            f"{way} worker0's.",
            fix="let the hosts keep time: `systemctl enable --now chrony` (or systemd-timesyncd).",
        )


def different_versions(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """Members must run the same torch and Paceline; another Python is worth knowing."""
    for name in ("torch", "paceline", "python"):
        holders: dict[str, list[str]] = defaultdict(list)
        for facts in examination.facts:
            version = facts.versions.get(name, "none")
            holders[_series(version) if name == "python" else version].append(facts.member)
        if len(holders) > 1:
            listed = "; ".join(f"{v}: {', '.join(who)}" for v, who in sorted(holders.items()))
            common = max(holders, key=lambda version: len(holders[version]))
            odd = [member for v, who in holders.items() if v != common for member in who]
            same = f"install {name} {common} for {', '.join(odd)}."
            yield DoctorFinding(
                kind=f"{name}-versions",
                severity="warning" if name == "python" else "error",
                members=odd,
                problem=f"members run different versions of {name}: {listed}.",
                fix=same,
            )


def small_shared_memory(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    for facts in _one_per_host(examination):
        size, needed = facts.shared_memory_bytes, needs.shared_memory_bytes
        where = f"/dev/shm on {facts.host} ({facts.member})"
        if not needed:
            continue
        if size is None:
            problem = f"{where} is missing."
        elif size < needed:
            problem = f"{where} has {format_bytes(size)}, and the job needs {format_bytes(needed)}."
        elif (free := facts.shared_memory_free_bytes) is not None and free < needed:
            problem = f"{where} has {format_bytes(free)} free of {format_bytes(size)}, and the job "
            problem += f"needs {format_bytes(needed)}."
        else:
            continue
        grow = f"`mount -o remount,size={needed // 2**20 + 1}M /dev/shm`"
        yield DoctorFinding(
            kind="shared-memory",
            severity="error" if facts.local_members > 1 else "warning",
            members=[facts.member],
            problem=problem,
            fix=f"enlarge it ({grow}; in a container start it with --ipc=host or --shm-size), "
            "remove what is left in it, or write transport=tcp.",
        )


def too_many_threads(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """More threads than cores: of one member, or of all members of a host together."""
    for facts in _one_per_host(examination):
        members, wanted = facts.local_members, facts.threads * facts.local_members
        if wanted <= facts.host_cores and facts.threads <= facts.cores:
            continue
        each = max(1, min(facts.cores, facts.host_cores // members))
        if each == facts.threads:
            continue  # more members than cores: no number of threads mends that
        yield DoctorFinding(
            kind="threads",
            severity="warning",
            members=[facts.member],
            problem=f"{members} member{'s' if members > 1 else ''} on {facts.host} would run "
            f"{wanted} threads on {min(facts.host_cores, facts.cores * members)} cores.",
            fix=f"set OMP_NUM_THREADS={each}, or write --threads {each}.",
        )


def busy_machine(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    """Cores that somebody else uses are not there for the job."""
    for facts in _one_per_host(examination):
        if facts.load is None or facts.load <= BUSY_FRACTION * facts.host_cores:
            continue
        yield DoctorFinding(
            kind="busy-machine",
            severity="warning",
            members=[facts.member],
            problem=f"{facts.host} is busy already: {facts.load:.1f} threads want its "
            f"{facts.host_cores} core{'s' if facts.host_cores > 1 else ''}, and the job would be "
            "slowed by them.",
            fix="wait until they are done, or end them; `uptime` shows the load.",
        )


def tunnel_rights(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    for facts in _one_per_host(examination):
        if facts.missing_rights:
            yield DoctorFinding(
                kind="tunnel-rights",
                severity="error" if needs.tunnel else "note",
                members=[facts.member],
                problem=f"the tunnel cannot be built on {facts.host}: "
                f"{', '.join(facts.missing_rights)} missing.",
                fix="run as root on Linux, with Debian's package iproute2 installed.",
            )


def container_engine(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    for facts in _one_per_host(examination):
        if needs.container and needs.container not in facts.container_engines:
            have = ", ".join(facts.container_engines) or "none"
            yield DoctorFinding(
                kind="container-engine",
                severity="error",
                members=[facts.member],
                problem=f"{needs.container} cannot be used on {facts.host}; there is: {have}.",
                fix=f"install and start {needs.container}, or leave --container out.",
            )


def slow_pair(examination: Examination, needs: Requirements) -> Iterator[DoctorFinding]:
    measured = [p for p in examination.pairs if p.bandwidth_bits_per_second is not None]
    rates = sorted(pair.bandwidth_bits_per_second or 0.0 for pair in measured)
    if len(rates) < 3:
        return
    usual = rates[len(rates) // 2]
    for pair in measured:
        rate = pair.bandwidth_bits_per_second or 0.0
        if rate < SLOW_LINK_FRACTION * usual:
            yield DoctorFinding(
                kind="slow-link",
                severity="warning",
                members=[pair.source, pair.target],
                problem=f"{pair.source} to {pair.target} carries {rate / 1e9:.2f} Gbit/s, where "
                f"the others carry {usual / 1e9:.2f}.",
                fix="check the cable and the port's negotiated speed (`ethtool INTERFACE`).",
            )


Check = Callable[[Examination, Requirements], Iterator[DoctorFinding]]
CHECKS: tuple[Check, ...] = (
    missing_members,
    wrong_interface,
    blocked_port,
    different_versions,
    small_shared_memory,
    container_engine,
    clock_off,
    too_many_threads,
    busy_machine,
    slow_pair,
    tunnel_rights,
)


def _one_per_host(examination: Examination) -> list[MemberFacts]:
    by_host: dict[str, MemberFacts] = {}
    for facts in examination.facts:
        by_host.setdefault(facts.host, facts)
    return list(by_host.values())


def _loopback_elsewhere(pair: Pair, examination: Examination) -> bool:
    host = pair.address.rpartition(":")[0]
    return not examination.on_one_host and is_loopback(host)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
