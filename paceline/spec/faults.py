"""What goes wrong on purpose, and what is done about it."""

import math
import re
from typing import Literal

from paceline.errors import SpecError
from paceline.spec.base import Spec, require
from paceline.units import parse_seconds

Kind = Literal["kill", "pause", "slow", "link", "cut"]


class Fault(Spec, frozen=True, kw_only=True):
    """Something that goes wrong on purpose, at a step."""

    member: str
    at_step: int
    kind: Kind
    seconds: float = 0.0
    """`pause`, `cut`: how long."""

    factor: float = 1.0
    """`slow`: how many times slower from then on."""

    link: str = ""
    """`link`: the rate from then on."""

    def __post_init__(self) -> None:
        where = f"[[faults]], {self.kind}"
        problem = f"at_step = {self.at_step} is negative."
        require(self.at_step >= 0, where, problem, "write the step at which it happens.")
        if self.kind in ("pause", "cut"):
            problem = f"seconds = {self.seconds:g} is no time."
            lasts = 0 < self.seconds < math.inf
            require(lasts, where, problem, "write how long it lasts, such as 5.0.")
        if self.kind == "slow":
            problem = f"factor = {self.factor:g} is not above zero."
            require(0 < self.factor < math.inf, where, problem, "write 2.0 for half the speed.")

    @property
    def words(self) -> str:
        """What happens, for messages: "kill worker2 at step 50"."""
        lasting = f" for {self.seconds:g} s" if self.kind in ("pause", "cut") else ""
        slower = f" by {self.factor:g}" if self.kind == "slow" else ""
        return f"{self.kind} {self.member} at step {self.at_step}{lasting}{slower}"


def parse_fault(kind: Kind, text: str) -> Fault:
    """The fault behind "worker2@50" (kill), "worker2@50:5s" (pause, cut) or "worker2@50:3x"."""
    where, examples = f"--{kind}", {"kill": "worker2@50", "slow": "worker2@50:3x"}
    example = examples.get(kind, "worker2@50:5s")
    match = re.fullmatch(r"(?P<member>[a-z]+\d+)@(?P<step>\d+)(:(?P<how>.+))?", text)
    how = match["how"] if match else None
    if match is None or (kind == "kill") != (how is None):
        raise SpecError(where, f'"{text}" names no member and step.', f"write {example}.")
    member, step = match["member"], int(match["step"])
    if how is None:
        return Fault(member=member, at_step=step, kind=kind)
    if kind == "slow":
        factor = re.fullmatch(r"(\d+(\.\d+)?)x", how)
        if factor is None:
            raise SpecError(where, f'"{how}" is no factor.', f"write {example}.")
        return Fault(member=member, at_step=step, kind=kind, factor=float(factor[1]))
    return Fault(member=member, at_step=step, kind=kind, seconds=parse_seconds(how, where))
