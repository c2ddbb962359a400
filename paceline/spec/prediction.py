"""What only a prediction needs to be told: whose software, and what is known of one device."""

from paceline.spec.base import Spec, require
from paceline.units import parse_bytes


class Prediction(Spec, frozen=True, kw_only=True):
    """Left alone by engines that run."""

    stack: str = "paceline"
    """Whose software exchanges: ours, or a peer's as predict/stacks.toml describes it."""

    one_device: float = 0.0
    """Samples per second of one device alone, published or measured; scales the profile."""

    one_device_batch: int = 0
    """The batch that figure was taken at; the workload's own when left out."""

    model_size: str = ""
    """Bytes of all parameters, "203MB", where they are not as in our own network of that name."""

    def __post_init__(self) -> None:
        where = "[prediction]"
        problem = f"one_device = {self.one_device:g} is negative."
        fix = "write the samples per second of one device, or leave it out."
        require(self.one_device >= 0, where, problem, fix)
        problem = f"one_device_batch = {self.one_device_batch} is negative."
        require(self.one_device_batch >= 0, where, problem, "write a batch above zero.")
        if self.model_size:
            parse_bytes(self.model_size, f"{where}, model_size")

    @property
    def model_bytes(self) -> int | None:
        return parse_bytes(self.model_size, "[prediction]") if self.model_size else None
