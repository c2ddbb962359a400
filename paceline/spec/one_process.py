"""Architectures of one process, `single` and `replicated`, and `auto`, which stands for another."""

from typing import ClassVar

from paceline.spec.base import LARGEST_QUANTITY, Spec, require
from paceline.spec.facts import ArchitectureFacts


class Auto(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="auto"):
    """Paceline picks one and says why."""

    is_undecided: ClassVar[bool] = True
    takes_scripts: ClassVar[bool] = True

    @property
    def takes_servers(self) -> bool:
        return True

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True


class Single(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="single"):
    """One worker: the baseline and the numerical reference."""

    built_by: ClassVar[str] = "paceline.architectures.single:SingleArchitecture"
    predicted_by: ClassVar[str] = "paceline.predict.collective_step:SYNCHRONOUS"
    is_one_process: ClassVar[bool] = True
    takes_scripts: ClassVar[bool] = True
    takes_recorded_passes: ClassVar[bool] = True

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True

    def rounds(self, workers: int, hosts: int) -> float:
        return 0.0

    def copies_sent(self, workers: int, state_numbers: int) -> float:
        return 0.0


class Replicated(
    ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="replicated"
):
    """One process, several devices, one batch split over them."""

    built_by: ClassVar[str] = "paceline.architectures.replicated:ReplicatedArchitecture"
    is_one_process: ClassVar[bool] = True
    takes_scripts: ClassVar[bool] = True
    divides_model: ClassVar[bool] = True

    devices: int = 0
    """Replicas; every GPU, or without one every core of this machine when left out."""

    shares: str = ""
    """Uneven parts of each batch, one weight per device, such as "3/1"; equal when left out."""

    def __post_init__(self) -> None:
        where = "architecture replicated"
        problem = f"devices = {self.devices} is negative."
        require(self.devices >= 0, where, problem, "write how many replicas there shall be.")
        assert self.share_weights is not None

    @property
    def share_weights(self) -> tuple[float, ...]:
        """The weights in numbers; empty for equal parts."""
        try:
            weights = tuple(float(part) for part in self.shares.split("/") if self.shares)
        except ValueError:
            weights = (-1.0,)
        problem = f'shares = "{self.shares}" are no weights.'
        fits = all(0 < weight <= LARGEST_QUANTITY for weight in weights)
        require(fits, "architecture replicated", problem, "write one for each device, as 3/1.")
        return weights

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True

    def rounds(self, workers: int, hosts: int) -> float:
        return 0.0

    def copies_sent(self, workers: int, state_numbers: int) -> float:
        return 0.0

    def fix_for_workers(self, workers: int) -> str:
        return f"write replicated:devices={workers}, which is one process with several."
