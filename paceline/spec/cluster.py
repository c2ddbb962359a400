"""Where it is trained: members, hosts, links, devices."""

from typing import Literal

import msgspec

from paceline.errors import SpecError, suggest
from paceline.spec.base import Spec, require
from paceline.units import parse_bandwidth, parse_seconds

NAMED_LINKS: dict[str, tuple[float, float, str]] = {
    "ethernet": (10e9, 30e-6, "tcp"),
    "roce": (25e9, 3e-6, "rdma"),
    "infiniband-fdr": (54.3e9, 1.5e-6, "rdma"),
    "infiniband-edr": (100e9, 1.5e-6, "rdma"),
    "infiniband-edr-x4": (400e9, 1.5e-6, "rdma"),
    "infiniband-hdr": (200e9, 1.5e-6, "rdma"),
    "omni-path": (100e9, 1.5e-6, "tcp"),
    "aries": (80e9, 2e-6, "tcp"),
    "pcie3": (126e9, 5e-6, "bus"),
    "pcie4": (252e9, 5e-6, "bus"),
    "nvlink": (1200e9, 3e-6, "bus"),
    "nvlink3": (2400e9, 3e-6, "bus"),
    "memory": (200e9, 1e-6, "bus"),
}
"""Name -> bits per second in each direction, one-way seconds, how bytes get onto it.

Rates on paper: 16 lanes of PCIe, six NVLinks of a V100 or twelve of an A100, one port of a fabric.
"tcp" stands for every way that copies through the host's memory. What software leaves of them is
the predictor's business (predict/stacks.toml)."""


MOST_THREADS = 4096


class Host(Spec, frozen=True, kw_only=True):
    """One host, or `count` alike. The tunnel builds it; `predict` models it."""

    count: int = 1
    workers: int = 1
    servers: int = 0
    link: str = ""
    """Rate of its cable, "1gbit", or with a one-way latency "1gbit,50us"; else the cluster's."""

    device: str = ""
    slowdown: float = 1.0
    """Its device takes this many times the profiled time."""

    jitter_fraction: float = 0.0
    """Standard deviation of a layer's time as a share of it."""

    rack: str = ""

    def __post_init__(self) -> None:
        where = "[[cluster.hosts]]"
        problem = f"count = {self.count} is not at least 1."
        require(self.count >= 1, where, problem, "leave it out for one host.")
        for name in ("workers", "servers"):
            value = getattr(self, name)
            require(value >= 0, where, f"{name} = {value} is negative.", "write 0 or more.")
        problem = f"slowdown = {self.slowdown:g} is not above zero."
        require(self.slowdown > 0, where, problem, "write 2.0 for a device at half speed.")
        problem = f"jitter_fraction = {self.jitter_fraction:g} is not in [0, 1)."
        require(0 <= self.jitter_fraction < 1, where, problem, "write 0.05 for five percent.")
        if self.link:
            parse_link(self.link, where)


class Link(Spec, frozen=True, kw_only=True):
    """One direction of a cable, in numbers."""

    bandwidth_bits_per_second: float
    latency_seconds: float = 0.0
    kind: Literal["tcp", "rdma", "bus"] = "tcp"
    """How bytes get onto it: copied by the host, past it, or inside one."""


class Cluster(Spec, frozen=True, kw_only=True):
    """The members and what carries them."""

    workers: int = 1
    servers: int = 0
    threads: int = 0
    """Compute threads per worker; this machine's cores divided by its workers when left out."""

    shares: tuple[float, ...] = ()
    """Uneven parts of each batch, one weight per worker."""

    balance: bool = False
    """After the warm-up, divide each batch anew in proportion to the workers' measured speeds."""

    link: str = ""
    inside: str = ""
    """What joins the devices of one host: "nvlink", "pcie3", "memory", or a rate. Only `predict`
    models it; left out, host memory."""

    device: str = "cpu"
    hosts: tuple[Host, ...] = ()
    """Left out: one host per member in the tunnel, this machine for all otherwise."""

    uplink: str = ""
    """Rate of the cable between racks; only with hosts that name a rack."""

    dilation: float = 1.0
    """Slow compute and links alike by this factor; reported times are undilated."""

    container: str = ""
    """Start members inside: "docker:IMAGE", "podman:IMAGE" or "podman:rootfs=FOLDER", …"""

    launcher: Literal["local", "ray"] = "local"
    """Who starts members for us: this process, or a Ray cluster. Other launchers start us."""

    restarts: int = 0
    """How often all members are started again, from the newest checkpoint, when one is lost."""

    on_loss: Literal["stop", "continue"] = "stop"
    """`continue`: the others go on in place when a worker is lost, where the architecture can."""

    @property
    def goes_on(self) -> bool:
        """Whether a lost worker is to end the job no more."""
        return self.on_loss == "continue"

    def __post_init__(self) -> None:
        where = "[cluster]"
        problem = f"restarts = {self.restarts} is negative."
        require(self.restarts >= 0, where, problem, "write how often to start again, or 0.")
        problem = "Ray starts members as plain processes, not in containers."
        plain = self.launcher == "local" or not self.container
        require(plain, where, problem, "leave container out, or start Ray itself inside one.")
        problem = f"workers = {self.workers} is not at least 1."
        require(self.workers >= 1, where, problem, "write how many workers compute, 1 or more.")
        problem = f"servers = {self.servers} is negative."
        require(self.servers >= 0, where, problem, "write 0 or more.")
        problem = f"threads = {self.threads} is negative."
        require(self.threads >= 0, where, problem, "leave it out for a fair share of the cores.")
        problem = f"threads = {self.threads} is more than any machine has cores."
        require(self.threads <= MOST_THREADS, where, problem, "leave it out for a fair share.")
        problem = f"{len(self.shares)} shares for {self.workers} workers."
        fits = not self.shares or len(self.shares) == self.workers
        require(fits, where, problem, "write one weight per worker.")
        positive = all(share > 0 for share in self.shares)
        require(positive, where, "a share is not above zero.", "write weights such as [2, 1].")
        problem = f"dilation = {self.dilation:g} is below 1."
        require(
            self.dilation >= 1, where, problem, "write 1 for real time, 4 for four times slower."
        )
        for text in (self.link, self.uplink, self.inside):
            if text:
                parse_link(text, where)


def parse_link(text: str, where: str) -> Link:
    """Return the numbers behind "1gbit", "1gbit,50us", "infiniband-edr" or "ethernet,50us"."""
    rate, _, latency = text.partition(",")
    if rate[:1].isalpha():
        if rate not in NAMED_LINKS:
            problem = f'"{rate}" is neither a rate such as 10gbit nor a known link.'
            raise SpecError(where, problem, suggest(rate, NAMED_LINKS))
        bits, seconds, kind = NAMED_LINKS[rate]
        known = {"bandwidth_bits_per_second": bits, "kind": kind}
        seconds = parse_seconds(latency, where) if latency else seconds
        return msgspec.convert({**known, "latency_seconds": seconds}, Link)
    return Link(
        bandwidth_bits_per_second=parse_bandwidth(rate, where),
        latency_seconds=parse_seconds(latency, where) if latency else 0.0,
    )
