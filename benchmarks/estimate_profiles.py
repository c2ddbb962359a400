"""Make the estimated device profiles from published one-device throughputs (anchors.toml).

    python benchmarks/estimate_profiles.py

One step's time at the published batch is spread over the layers by their operations: a third
forward, two thirds backward. A model without a figure of its own takes the rate of operations of
the nearest one that has (NEAREST). Small networks do not run at the rate of large ones' operations,
so `tutorial-cnn` rests on its own figure, at the 24x24 pictures it was taken with. Part of each
step is held not to shrink with the batch: an assumption about frameworks of that time, not a
measurement.

Writes predict/networks.json too: every built-in network's layers by operations and bytes.
"""

import tomllib
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paceline import models
from paceline.compute.profiling import FoundLayer, layers_in_order
from paceline.predict.devices import NETWORKS, Network, NetworkLayer, overhead_seconds, spread
from paceline.spec.profile import SHIPPED, DeviceProfile, save_profile

NEAREST = {"vgg19": "vgg16", "googlenet": "resnet50"}
MODELS = ("alexnet", "googlenet", "resnet50", "resnet152", "tutorial-cnn", "vgg16", "vgg19")
SHAPES = {"tutorial-cnn": (3, 24, 24)}
"""As the papers ran them, where that is not the table's own."""

DERIVED_BATCH = 128


def main() -> None:
    found = {model: network_of(model) for model in models.names() if model != "gpt-small"}
    write_networks(found)
    devices = tomllib.loads((SHIPPED / "anchors.toml").read_text(encoding="utf-8"))
    for device, entry in devices.items():
        of = devices[entry["like"]] if "like" in entry else entry
        anchors = {anchor["model"]: anchor for anchor in (*of["anchors"], *entry.get("own", ()))}
        for model in MODELS:
            profile = estimate(device, model, entry, anchors, found)
            path = SHIPPED / f"{device}-{model}-float32.json"
            save_profile(profile, path)
            rate = profile.batch / profile.step_seconds(profile.batch)
            print(f"{path.name}: {rate:.1f} images/s at batch {profile.batch}")


def network_of(model: str) -> Network:
    described = models.info(model)
    assert described is not None
    shape = SHAPES.get(model, described.input_shape)
    with torch.device("meta"):
        built = models.build(model, input_shape=shape)
        layers = count_operations(built, torch.empty(1, *shape))
    return Network(input_shape=shape, layers=tuple(layers))


def count_operations(model: nn.Module, sample: Tensor) -> list[NetworkLayer]:
    """Operations of each layer's forward pass per sample; works on meta tensors, without computing.

    Convolutions and matrix products count two per multiply-add, other layers eight per output.
    """
    counts: list[NetworkLayer] = []
    handles = []
    for layer in layers_in_order(model, sample):

        def counted(_: object, inputs: object, output: Tensor, layer: FoundLayer = layer) -> None:
            operations = 8.0 * output.numel() / sample.shape[0]
            if isinstance(layer.module, nn.Conv2d | nn.Linear):
                weight = layer.module.weight
                operations *= weight.numel() / weight.shape[0] / 4
            counts.append(NetworkLayer(layer.name, operations, layer.parameter_bytes))

        handles.append(layer.module.register_forward_hook(counted))
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def write_networks(found: dict[str, Network]) -> None:
    """One network a line, so that a difference can be read."""
    lines = [f'"{name}": {msgspec.json.encode(of).decode()}' for name, of in found.items()]
    NETWORKS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def estimate(
    device: str,
    model: str,
    entry: dict[str, Any],
    anchors: dict[str, dict[str, Any]],
    known: dict[str, Network],
) -> DeviceProfile:
    """The profile of `model` from its own anchor, or from the nearest model's."""
    nearest = model if model in anchors else NEAREST[model]
    anchor, batch = anchors[nearest], anchors[nearest]["batch"]
    own_figure = "source" in anchor
    factor = 1.0 if own_figure else entry.get("factor", 1.0)
    total = batch / (anchor["images_per_second"] * factor)
    overhead = min(overhead_seconds(known[nearest]), total / 2)
    source = anchor.get("source", entry["source"])
    if nearest != model:
        source = f"{source}; {model} from {nearest} by operations"
        share = known[model].operations / known[nearest].operations
        arithmetic = (total - overhead) / batch * share
        batch, overhead = DERIVED_BATCH, overhead_seconds(known[model])
        total = overhead + batch * arithmetic
    return spread(
        model,
        known[model],
        device=device,
        batch=batch,
        seconds=total,
        overhead=overhead,
        source=f"{source}; spread over layers by operations",
    )


if __name__ == "__main__":
    main()
