"""Start members, and tell a started member who it is. Knows commands and environments; no torch."""

from paceline.launch.identity import Identity, identify, to_environment
from paceline.launch.local import MemberCommand, Output, share_cores, supervise

__all__ = [
    "Identity",
    "MemberCommand",
    "Output",
    "identify",
    "share_cores",
    "supervise",
    "to_environment",
]
