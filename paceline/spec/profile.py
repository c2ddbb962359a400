"""A device profile: how long each layer of one model takes on one device, and how large it is.

The tunnel's emulated accelerators and the predictor live on these files. `measured` ones come from
`paceline profile`, `estimated` ones spread one published throughput over the layers by their
operations. A profile knows one device, never several.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import SpecError, suggest
from paceline.spec.base import Spec, require

SHIPPED = Path(__file__).parent.parent / "predict" / "profiles"
"""Profiles that come with Paceline, named DEVICE-MODEL-PRECISION.json."""

REAL_DEVICE = "cpu"
"""The device that is not emulated: members compute on what their machine has."""


class Layer(Spec, frozen=True, kw_only=True):
    """One module that owns parameters, with the time of the modules without any after it."""

    name: str
    forward_seconds: float
    backward_seconds: float
    """From the moment the layer after it had its gradients until this one has."""

    parameter_bytes: int


class DeviceProfile(Spec, frozen=True, kw_only=True):
    """Times of all layers at one batch size, in the order of the forward pass."""

    device: str
    model: str
    batch: int
    input_shape: tuple[int, ...]
    kind: Literal["measured", "estimated"]
    source: str
    """Where the figures come from: the machine and versions, or the publication and the rule."""

    layers: tuple[Layer, ...]
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    overhead_seconds: float = 0.0
    """Part of each step that does not shrink with the batch, such as starting kernels."""

    def __post_init__(self) -> None:
        where = f"profile {self.device} {self.model}"
        require(
            bool(self.layers), where, "it has no layers.", "measure it with `paceline profile`."
        )
        problem = f"batch = {self.batch} is not at least 1."
        require(self.batch >= 1, where, problem, "write the batch the times were taken at.")

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    def scale_for(self, batch: int) -> float:
        """What the layers' times are multiplied by at another batch: linear above the overhead."""
        total = sum(layer.forward_seconds + layer.backward_seconds for layer in self.layers)
        overhead = min(self.overhead_seconds, total)
        return (overhead + (total - overhead) * batch / self.batch) / total

    def step_seconds(self, batch: int) -> float:
        """Forward and backward of one batch."""
        total = sum(layer.forward_seconds + layer.backward_seconds for layer in self.layers)
        return total * self.scale_for(batch)


def load_profile(path: Path) -> DeviceProfile:
    """Read one profile file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeviceProfile)
    except OSError:
        raise SpecError(str(path), "there is no such profile file.", "check the path.") from None
    except msgspec.MsgspecError as error:
        fix = "write it with `paceline profile`."
        raise SpecError(str(path), f"this is not a device profile: {error}.", fix) from None


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile, one layer a line, so that a person can read and compare it."""
    fields = msgspec.to_builtins(profile)
    layers = [msgspec.json.encode(layer).decode() for layer in fields.pop("layers")]
    head = msgspec.json.format(msgspec.json.encode(fields), indent=1).decode().rstrip("}\n ")
    body = ",\n  ".join(layers)
    path.write_text(f'{head},\n "layers": [\n  {body}\n ]\n}}\n', encoding="utf-8")


def find_profile(device: str, model: str, precision: str = "float32") -> DeviceProfile:
    """The profile of `model` on `device`: a shipped device's name, or a profile file."""
    if device.endswith(".json"):
        profile = load_profile(Path(device))
        problem = f"this profile is of {profile.model}, and the model is {model}."
        require(
            profile.model == model, device, problem, f"profile {model}, or train {profile.model}."
        )
        return profile
    path = SHIPPED / f"{device}-{model}-{precision}.json"
    if path.exists():
        return load_profile(path)
    where, known = "device", shipped_devices()
    if device not in known:
        raise SpecError(where, f'"{device}" is not a device.', suggest(device, known))
    has = ", ".join(sorted(known[device]))
    problem = f"there is no {precision} profile of {model} on {device}."
    raise SpecError(where, problem, f"choose one of {has}, or measure it with `paceline profile`.")


@cache
def shipped_devices() -> dict[str, set[str]]:
    """Every shipped device with its models, as "resnet50" or "resnet50 (bfloat16)"."""
    devices: dict[str, set[str]] = {}
    for path in SHIPPED.glob("*.json"):
        device, _, rest = path.stem.partition("-")
        model, _, precision = rest.rpartition("-")
        label = model if precision == "float32" else f"{model} ({precision})"
        devices.setdefault(device, set()).add(label)
    return devices
