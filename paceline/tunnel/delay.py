"""Latency of a link: the kernel's netem where it exists."""

from paceline.errors import MissingError
from paceline.spec import Link

class Relay:
    def __init__(self, *args: object) -> None:
        raise MissingError("netem", "x")
    def close(self) -> None: ...
def netem_available(ns: str) -> bool: return False
def netem_command(interface: str, link: Link) -> str: return ""
