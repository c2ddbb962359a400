"""How long a model's layers take on a device: a profile, or an estimate from one published figure.

`networks.json` knows every built-in network's layers by operations and bytes; one throughput of one
device, spread over them by operations, makes a profile. No torch.
"""

import math
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from paceline import spec
from paceline.errors import SpecError, suggest
from paceline.spec.profile import (
    REAL_DEVICE,
    DeviceProfile,
    Layer,
    find_profile,
    load_profile,
    shipped_devices,
)

NETWORKS = Path(__file__).with_name("networks.json")
FORWARD_FRACTION = 1 / 3
"""Backward computes two products for each one of forward."""

STEP_OVERHEAD_SECONDS = 1e-3
LAYER_OVERHEAD_SECONDS = 60e-6
"""What a layer costs however small the batch: starting kernels, in frameworks of 2017."""

ESTIMATED_BATCH = 32
UNKNOWN_LAYERS = 32


class NetworkLayer(msgspec.Struct, frozen=True, array_like=True):
    """One module with parameters."""

    name: str
    operations: float
    """Of one sample's forward pass; a multiply-add is two."""

    parameter_bytes: int


class Network(msgspec.Struct, frozen=True):
    input_shape: tuple[int, ...]
    layers: tuple[NetworkLayer, ...]

    @property
    def operations(self) -> float:
        return sum(layer.operations for layer in self.layers)


@cache
def networks() -> dict[str, Network]:
    """Every built-in network."""
    return msgspec.json.decode(NETWORKS.read_bytes(), type=dict[str, Network])


def network(model: str) -> Network:
    known = networks()
    if model not in known:
        problem = f'the layers of "{model}" are not known.'
        fix = f"profile it with `paceline profile`, or {suggest(model, known)}"
        raise SpecError("model", problem, fix)
    return known[model]


def _network_of(experiment: spec.Experiment) -> Network:
    """The model's own layers, or where only its size is known, some that are all alike."""
    model, size = experiment.workload.model, experiment.prediction.model_bytes
    if model in networks() or size is None:
        return network(model)
    layers = [
        NetworkLayer(f"layer{index}", 1.0, size // UNKNOWN_LAYERS)
        for index in range(UNKNOWN_LAYERS)
    ]
    return Network(input_shape=(1,), layers=tuple(layers))


def overhead_seconds(of: Network, layer_seconds: float = LAYER_OVERHEAD_SECONDS) -> float:
    """The part of a step that a smaller batch does not save."""
    return STEP_OVERHEAD_SECONDS + layer_seconds * len(of.layers)


def spread(
    model: str,
    of: Network,
    *,
    device: str,
    batch: int,
    seconds: float,
    overhead: float,
    source: str,
    precision: Literal["float32", "tf32", "bfloat16"] = "float32",
) -> DeviceProfile:
    """A step's time over the layers by their operations."""
    forward, backward = FORWARD_FRACTION * seconds, (1 - FORWARD_FRACTION) * seconds
    total = of.operations
    return DeviceProfile(
        device=device,
        model=model,
        batch=batch,
        input_shape=of.input_shape,
        kind="estimated",
        source=source,
        precision=precision,
        overhead_seconds=min(overhead, seconds / 2),
        layers=tuple(
            Layer(
                name=layer.name,
                forward_seconds=float(f"{forward * layer.operations / total:.5g}"),
                backward_seconds=float(f"{backward * layer.operations / total:.5g}"),
                parameter_bytes=layer.parameter_bytes,
            )
            for layer in of.layers
        ),
    )


def profile_for(
    experiment: spec.Experiment, device: str, layer_overhead_seconds: float = LAYER_OVERHEAD_SECONDS
) -> DeviceProfile:
    """The profile a prediction rests on: as shipped or given, or scaled to one device's figure."""
    workload, known = experiment.workload, experiment.prediction
    _check_model(experiment, device)
    if known.one_device:
        batch = known.one_device_batch or workload.batch or ESTIMATED_BATCH
        profile = _scaled(experiment, device, batch, layer_overhead_seconds)
    elif device == REAL_DEVICE and not _is_shipped(device, workload.model):
        problem = f"nothing is known of {workload.model} on this machine."
        fix = f"run `paceline profile --model {workload.model}` and give its file as --device."
        raise SpecError("--device", problem, fix)
    elif device.endswith(".json") or _is_shipped(device, workload.model):
        profile = find_profile(device, workload.model, workload.precision)
    else:
        profile = _from_nearest(experiment, device, layer_overhead_seconds)
    if known.model_bytes is not None:
        profile = _resized(profile, known.model_bytes)
    return profile


def _check_model(experiment: spec.Experiment, device: str) -> None:
    """Refuse a script, and a model that is neither built in nor profiled, in the words of those who
    build it.

    They load torch, and are asked about those only of which nothing is known here.
    """
    if experiment.workload.script is not None:
        problem = "a script can be run, not predicted: nothing is known of its layers."
        fix = "time it with `paceline run --profile FILE`, then `paceline predict --device FILE`."
        raise SpecError("predict", problem, fix)
    model = experiment.workload.model
    is_sized = experiment.prediction.model_bytes is not None
    is_profiled = device.endswith(".json") and load_profile(Path(device)).model == model
    if not (model in networks() or is_sized or is_profiled or _is_shipped(device, model)):
        from paceline import models

        models.info(model)


def _from_nearest(
    experiment: spec.Experiment, device: str, layer_overhead_seconds: float
) -> DeviceProfile:
    """A known network on a known device: at the rate of the shipped one nearest to it in size."""
    model, known = experiment.workload.model, networks()
    shipped = sorted(name for name in shipped_devices().get(device, ()) if name in known)
    if model not in known or not shipped:
        return find_profile(device, model, experiment.workload.precision)  # says what is wrong
    of = known[model]
    nearest = min(shipped, key=lambda name: abs(math.log(known[name].operations / of.operations)))
    profile = find_profile(device, nearest)
    share = of.operations / known[nearest].operations
    busy = profile.step_seconds(profile.batch) - profile.overhead_seconds
    overhead = overhead_seconds(of, layer_overhead_seconds)
    return spread(
        model,
        of,
        device=device,
        batch=profile.batch,
        seconds=overhead + busy * share,
        overhead=overhead,
        source=f"{profile.source}; {model} from {nearest} by operations",
    )


def _is_shipped(device: str, model: str) -> bool:
    return model in shipped_devices().get(device, set())


def _scaled(
    experiment: spec.Experiment, device: str, batch: int, layer_overhead_seconds: float
) -> DeviceProfile:
    """One published throughput over the layers: of a shipped profile's shape where there is one."""
    workload, rate = experiment.workload, experiment.prediction.one_device
    source = f"{rate:g} samples/s of one device at batch {batch}"
    seconds = batch / rate
    if device.endswith(".json"):
        profile = find_profile(device, workload.model, workload.precision)
        factor = seconds / profile.step_seconds(batch)
        return _slower(profile, factor, f"{profile.source}; scaled to {source}")
    of = _network_of(experiment)
    overhead = overhead_seconds(of, layer_overhead_seconds)
    text = f"{source}; spread over layers by operations"
    return spread(
        workload.model,
        of,
        device=device,
        batch=batch,
        seconds=seconds,
        overhead=overhead,
        source=text,
        precision=workload.precision,
    )


def _slower(profile: DeviceProfile, factor: float, source: str) -> DeviceProfile:
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_seconds=layer.forward_seconds * factor,
            backward_seconds=layer.backward_seconds * factor,
        )
        for layer in profile.layers
    )
    overhead = profile.overhead_seconds * factor
    return msgspec.structs.replace(profile, layers=layers, source=source, overhead_seconds=overhead)


def _resized(profile: DeviceProfile, model_bytes: int) -> DeviceProfile:
    """Another size of the same network; every layer keeps its share of the bytes."""
    factor = model_bytes / profile.parameter_bytes
    layers = tuple(
        msgspec.structs.replace(layer, parameter_bytes=round(layer.parameter_bytes * factor))
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)
