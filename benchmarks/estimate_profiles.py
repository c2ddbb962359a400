"""Make the estimated device profiles from published one-device throughputs (anchors.toml).

    python benchmarks/estimate_profiles.py

One step's time at the published batch is spread over the layers by their operations: a third
forward, two thirds backward. A model without a figure of its own takes the rate of operations of
the nearest one that has (NEAREST). Part of each step is held not to shrink with the batch:
1 ms, and 60 us for each layer; an assumption about frameworks of that time, not a measurement.
"""

import tomllib
from typing import Any

import torch

from paceline import models
from paceline.models.profiling import LayerOperations, count_operations
from paceline.spec.profile import SHIPPED, DeviceProfile, Layer, save_profile

NEAREST = {"vgg19": "vgg16", "googlenet": "resnet50", "tutorial-cnn": "resnet50"}
MODELS = ("alexnet", "googlenet", "resnet50", "resnet152", "tutorial-cnn", "vgg16", "vgg19")
DERIVED_BATCH = 128
STEP_OVERHEAD_SECONDS, LAYER_OVERHEAD_SECONDS = 1e-3, 60e-6


def main() -> None:
    devices = tomllib.loads((SHIPPED / "anchors.toml").read_text(encoding="utf-8"))
    layers = {model: operations_of(model) for model in MODELS}
    for device, entry in devices.items():
        of = devices[entry["like"]] if "like" in entry else entry
        anchors = {anchor["model"]: anchor for anchor in of["anchors"]}
        for model in MODELS:
            profile = estimate(device, model, entry, anchors, layers)
            path = SHIPPED / f"{device}-{model}-float32.json"
            save_profile(profile, path)
            rate = profile.batch / profile.step_seconds(profile.batch)
            print(f"{path.name}: {rate:.1f} images/s at batch {profile.batch}")


def operations_of(model: str) -> list[LayerOperations]:
    described = models.info(model)
    assert described is not None
    with torch.device("meta"):
        return count_operations(models.build(model), torch.empty(1, *described.input_shape))


def overhead_of(layers: list[LayerOperations]) -> float:
    return STEP_OVERHEAD_SECONDS + LAYER_OVERHEAD_SECONDS * len(layers)


def estimate(
    device: str,
    model: str,
    entry: dict[str, Any],
    anchors: dict[str, dict[str, Any]],
    layers: dict[str, list[LayerOperations]],
) -> DeviceProfile:
    """The profile of `model` from its own anchor, or from the nearest model's."""
    known = model if model in anchors else NEAREST[model]
    anchor, batch = anchors[known], anchors[known]["batch"]
    total = batch / (anchor["images_per_second"] * entry.get("factor", 1.0))
    overhead = min(overhead_of(layers[known]), total / 2)
    own, other = (sum(layer.operations for layer in layers[m]) for m in (model, known))
    how = ""
    if known != model:
        how = f"; {model} from {known} by operations"
        arithmetic = (total - overhead) / batch * own / other
        batch, overhead = DERIVED_BATCH, overhead_of(layers[model])
        total = overhead + batch * arithmetic
    described = models.info(model)
    assert described is not None
    return DeviceProfile(
        device=device,
        model=model,
        batch=batch,
        input_shape=described.input_shape,
        kind="estimated",
        source=f"{entry['source']}{how}; spread over layers by operations",
        overhead_seconds=overhead,
        layers=tuple(
            Layer(
                name=layer.name,
                forward_seconds=float(f"{total / 3 * layer.operations / own:.5g}"),
                backward_seconds=float(f"{total * 2 / 3 * layer.operations / own:.5g}"),
                parameter_bytes=layer.parameter_bytes,
            )
            for layer in layers[model]
        ),
    )


if __name__ == "__main__":
    main()
