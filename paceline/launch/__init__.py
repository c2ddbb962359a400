"""Start members, and tell a started member who it is. Knows commands and environments; no torch."""

from paceline.launch.containers import check_container, inside, parse_container
from paceline.launch.identity import Identity, member_name, to_environment
from paceline.launch.launchers import LAUNCHERS, identify
from paceline.launch.local import share_cores, supervise
from paceline.launch.ports import reserve
from paceline.launch.process import MemberCommand, Output
from paceline.launch.rendezvous import meet

__all__ = [
    "LAUNCHERS",
    "Identity",
    "MemberCommand",
    "Output",
    "check_container",
    "identify",
    "inside",
    "meet",
    "member_name",
    "parse_container",
    "reserve",
    "share_cores",
    "supervise",
    "to_environment",
]
