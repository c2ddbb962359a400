"""An emulated device for tests: the tutorial CNN, each layer taking the time it is told to."""

from pathlib import Path

from paceline.spec.profile import DeviceProfile, Layer, save_profile

LAYERS = {
    "features.0": 19_456,
    "features.3": 409_856,
    "classifier.0": 6_292_992,
    "classifier.2": 295_680,
    "classifier.4": 7_720,
}
"""Parameter bytes of the tutorial CNN: 7 MB, or 56 ms on a link of 1 Gbit/s."""

GRADIENT_BYTES = sum(LAYERS.values())


def write_toy_device(folder: Path, *, forward_seconds: float, backward_seconds: float) -> str:
    """Write the profile into `folder`; returns what `--device` takes. Times are each layer's."""
    layers = tuple(
        Layer(
            name=name,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            parameter_bytes=size,
        )
        for name, size in LAYERS.items()
    )
    profile = DeviceProfile(
        device="toy",
        model="tutorial-cnn",
        batch=32,
        input_shape=(3, 32, 32),
        kind="measured",
        source="a test",
        layers=layers,
    )
    save_profile(profile, folder / "toy.json")
    return str(folder / "toy.json")
