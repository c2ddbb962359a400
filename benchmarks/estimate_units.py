"""What passes between the units of each built-in model: where `predict` may cut a pipeline.

    python benchmarks/estimate_units.py

Writes predict/units.json: for each model the shape of a sample, and for each unit, in order, its
name and how many numbers of a sample it hands on.
"""

import msgspec
import torch

from paceline import models
from paceline.compute.units import UnitChain, units_of
from paceline.predict.pipeline_step import UNITS, ModelUnits


def main() -> None:
    found = {model: units(model) for model in models.names()}
    lines = [f'"{name}": {msgspec.json.encode(of).decode()}' for name, of in found.items()]
    UNITS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def units(model: str) -> ModelUnits:
    described = models.info(model)
    assert described is not None
    shape = described.imagenet_shape or described.input_shape
    handed: list[tuple[str, int]] = []
    with torch.device("meta"):
        built = models.build(model, input_shape=shape).eval()
        kind = torch.long if described.tokens else torch.float32
        features = torch.empty(1, *shape, dtype=kind)
        for unit in units_of(built):
            features = UnitChain([unit])(features)
            handed.append((unit.name, features.numel()))
    return ModelUnits(input_shape=tuple(shape), units=tuple(handed))


if __name__ == "__main__":
    main()
